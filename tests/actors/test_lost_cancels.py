"""What nobody waits for is freed, on the target and on the draft: also in the middle of a long step, and
where the cancellation itself is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline.actors.channels import ChannelSettings
from paceline.actors.engine.messages import Cancel
from paceline.actors.engine.parameters import FinishReason
from paceline.actors.execution_client import ExecutionClient
from paceline.actors.model_spec import ModelSpec
from tests.actors.conftest import TARGET_MODEL
from tests.actors.link import Link

STEP_SECONDS = 0.2
NEVER = ChannelSettings(keepalive_seconds=600.0, keepalive_timeout_seconds=600.0)
"""A lost peer is not noticed in the time of a test."""


def slow_model() -> ModelSpec:
    source = TARGET_MODEL.replace("base_ms=2", f"base_ms={STEP_SECONDS * 1000:.0f}")
    return ModelSpec(source, num_threads=1, num_blocks=512)


async def in_a_step(target: Any) -> None:
    """Returns early in a step of the target."""
    async with asyncio.timeout(10.0):
        while not 0.0 < target._engine_loop.step_seconds < STEP_SECONDS / 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def until_free(target: Any, draft: Any, seconds: float) -> None:
    """Returns once neither has a sequence or a block in use."""
    async with asyncio.timeout(seconds):
        while True:
            engine = (await target.status())["engine"]
            held = (await draft.status())["engine"]
            if (
                engine["num_running"] == engine["num_waiting"] == held["num_sequences"] == 0
                and engine["free_blocks"] == engine["total_blocks"]
                and held["num_free_blocks"] == held["num_blocks"]
            ):
                return
            await asyncio.sleep(0.005)


async def begin(
    pool: Any, client: ExecutionClient, sequence_id: str, ttl_seconds: float | None = None
) -> None:
    """Submit a long sequence; returns when its first steps are done."""
    client.submit(replace(pool.make_submit(sequence_id, [1, 2, 3], 3000), ttl_seconds=ttl_seconds))
    await pool.until(lambda: len(pool.gateway.tokens[sequence_id]) > 2)


async def test_in_the_middle_of_a_verify(pool: Any) -> None:
    """Within a second of the end of the step, which cannot be broken off."""
    target = await pool.target(model=slow_model())
    draft = await pool.draft()
    cancelling, leaving = await pool.client(target), await pool.client(target)
    await begin(pool, cancelling, "a")
    await begin(pool, leaving, "b")
    await in_a_step(target)
    started = time.monotonic()
    cancelling.cancel(Cancel("a", 0))
    await leaving.close()
    await until_free(target, draft, STEP_SECONDS + 1.0)
    assert time.monotonic() - started > STEP_SECONDS / 4, "no step was under way"
    assert list(pool.gateway.finished) == ["a"]


async def test_between_short_steps(pool: Any) -> None:
    target, draft = await pool.target(), await pool.draft()
    client = await pool.client(target)
    await begin(pool, client, "s")
    client.cancel(Cancel("s", 0))
    await until_free(target, draft, 1.0)
    await pool.until(lambda: "s" in pool.gateway.finished)
    assert pool.gateway.finished["s"].reason is FinishReason.CANCELLED
    assert len(pool.gateway.tokens["s"]) < 3000


async def test_whoever_is_never_cancelled_ends_with_its_time(pool: Any) -> None:
    """The network swallows whatever the gateway says after its submit, and nobody notices."""
    target = await pool.target(channels=NEVER)
    draft = await pool.draft(channels=NEVER)
    async with Link(target.address) as link:
        client = await pool.client(target, NEVER, address=link.address)
        submitted = time.monotonic()
        await begin(pool, client, "s", ttl_seconds=2.0)
        link.cut()
        client.cancel(Cancel("s", 0))
        assert (await target.status())["engine"]["num_running"] == 1
        await until_free(target, draft, 2.0 + 1.0)
        assert time.monotonic() - submitted >= 2.0
        assert (await target.status())["num_gateways"] == 1, "the stream is believed to live"


async def test_whoever_outlives_its_time_hears_of_it(pool: Any) -> None:
    target, draft = await pool.target(), await pool.draft()
    client = await pool.client(target)
    await begin(pool, client, "s", ttl_seconds=1.0)
    await pool.until(lambda: "s" in pool.gateway.finished, 3.0)
    assert pool.gateway.finished["s"].deadline_exceeded
    await until_free(target, draft, 1.0)
    assert await pool.generate_all([client], [[4, 5]]) == [pool.greedy_reference([4, 5])]


async def test_a_gateway_that_vanishes_without_a_reset(pool: Any) -> None:
    """Keepalive finds it out; what it had is freed on target and draft, and no other gateway's."""
    settings = ChannelSettings(keepalive_seconds=0.2, keepalive_timeout_seconds=0.3)
    target = await pool.target(channels=settings)
    draft = await pool.draft(channels=settings)
    watching = await pool.client(target, settings)
    load: Callable[[], Any] = lambda: pool.gateway.loads.get(target.spec.target_id)  # noqa: E731
    async with Link(target.address) as link:
        vanishing = await pool.client(target, settings, pool.Gateway(), link.address)
        vanishing.submit(pool.make_submit("lost", [1, 2, 3], 4000))
        await pool.until(lambda: load() and load().num_running == 1)
        link.cut()
        # Core pings at most once a second.
        await until_free(target, draft, 1.0 + 0.2 + 0.3 + 1.0)
    assert watching.attached
    assert await pool.generate_all([watching], [[4, 5]]) == [pool.greedy_reference([4, 5])]
