"""Targets and drafts together: output never depends on who proposes, or on who goes."""

import asyncio
import os
import signal
import sys
import textwrap
from typing import Any

import pytest

from paceline.actors.engine.config import DraftEngineConfig
from paceline.actors.engine.errors import IncompatibleDraftError, ModelError
from paceline.actors.engine_loop import EngineFailedError
from paceline.actors.model_spec import ModelSpec

PROMPTS = [[1 + index, 2, 3 + index] for index in range(8)]


def accepted(pool: Any) -> int:
    return sum(finished.speculation.accepted_tokens for finished in pool.gateway.finished.values())


async def test_two_drafts_and_two_targets(pool: Any) -> None:
    targets = [await pool.target(), await pool.target()]
    # Neither draft can take all: both are needed.
    drafts = [await pool.draft(engine=DraftEngineConfig(max_num_seqs=4)) for _ in range(2)]
    clients = [await pool.client(target) for target in targets]
    found = await pool.generate_all(clients, PROMPTS, 200)
    assert found == [pool.greedy_reference(prompt, 200) for prompt in PROMPTS]
    assert accepted(pool) > 0
    for draft in drafts:
        assert (await draft.status())["engine"]["num_drafted_tokens_total"] > 0
    for target in targets:
        target.health()
        status = await target.status()
        assert len(status["drafts"]) == 2
        assert status["load"]["free_blocks"] == status["load"]["total_blocks"]


async def test_without_drafts(pool: Any) -> None:
    client = await pool.client(await pool.target())
    assert await pool.generate_all([client], PROMPTS[:2]) == [pool.greedy_reference(p) for p in PROMPTS[:2]]
    assert accepted(pool) == 0


async def test_a_draft_that_leaves_and_one_that_arrives(pool: Any) -> None:
    target = await pool.target()
    leaving = await pool.draft()
    client = await pool.client(target)
    running = asyncio.create_task(pool.generate_all([client], PROMPTS[:2], 300))
    await pool.until(lambda: pool.gateway.tokens)
    await leaving.stop()
    await pool.until(lambda: not target.drafts)
    arriving = await pool.draft()
    await running
    assert await running == [pool.greedy_reference(prompt, 300) for prompt in PROMPTS[:2]]
    assert (await arriving.status())["engine"]["num_drafted_tokens_total"] > 0


DRAFT_PROCESS = """
import asyncio, sys
from paceline.actors.draft import DraftActor, DraftSpec
from paceline.actors.model_spec import ModelSpec

async def main(target_id, address, source):
    async def discover():
        return {target_id: address}
    spec = DraftSpec("killed", ModelSpec(source, num_threads=1, num_blocks=512), discovery_seconds=0.1)
    await DraftActor(spec, discover).start()
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_kill_nine_of_a_draft_process(pool: Any) -> None:
    target = await pool.target()
    client = await pool.client(target)
    source = "emulated://draft?vocab_size=256&seed=7&base_ms=0.5&acceptance=0.7"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(DRAFT_PROCESS), target.spec.target_id, target.address, source
    )
    try:
        await pool.until(lambda: target.drafts, 30.0)
        running = asyncio.create_task(pool.generate_all([client], PROMPTS[:2], 400))
        await pool.until(lambda: len(pool.gateway.tokens) == 2)
        await asyncio.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        await pool.until(lambda: not target.drafts, 2.0)
        assert not running.done(), "the draft must die while the requests run"
        assert await running == [pool.greedy_reference(prompt, 400) for prompt in PROMPTS[:2]]
        assert accepted(pool) > 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_draft_with_another_vocabulary_is_unhealthy_and_says_why(pool: Any) -> None:
    target = await pool.target()
    draft = await pool.draft(attach=False, model=ModelSpec("emulated://other?vocab_size=300", num_threads=1))

    def refused() -> bool:
        try:
            draft.health()
        except IncompatibleDraftError:
            return True
        return False

    with pytest.raises(IncompatibleDraftError):
        await draft.wait_for_target(10.0)
    assert refused()
    with pytest.raises(IncompatibleDraftError) as caught:
        draft.health()
    assert "emulated://other" in str(caught.value)
    assert target.spec.model_name in str(caught.value)
    assert list((await draft.status())["refused"]) == [target.spec.target_id]
    assert not target.drafts
    # A target that it fits makes it healthy again.
    await pool.target(model=ModelSpec("emulated://fits?vocab_size=300", num_threads=1))
    await pool.until(lambda: not refused())
    await draft.wait_for_target(10.0)


async def test_a_draft_waits_for_its_first_target_but_not_for_ever(pool: Any) -> None:
    draft = await pool.draft(attach=False)
    await draft.wait_for_target(0.2)
    draft.health()
    waiting = asyncio.create_task(draft.wait_for_target(10.0))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    target = await pool.target()
    await waiting
    assert [hello.draft_id for hello in target.drafts] == [draft.spec.draft_id]


async def test_a_target_that_stops_lets_its_sequences_end(pool: Any) -> None:
    target = await pool.target()
    client = await pool.client(target)
    running = asyncio.create_task(pool.generate_all([client], PROMPTS[:2], 100))
    await pool.until(lambda: pool.gateway.tokens)
    stopping = asyncio.create_task(target.stop(20.0))
    await pool.until(lambda: pool.gateway.loads[target.spec.target_id].draining)
    assert await running == [pool.greedy_reference(prompt, 100) for prompt in PROMPTS[:2]]
    async with asyncio.timeout(5.0):
        await stopping
        await pool.until(lambda: pool.gateway.lost)
    assert "UNAVAILABLE" in pool.gateway.lost[target.spec.target_id]


async def test_a_target_that_drains_is_drafted_for_to_the_end(pool: Any) -> None:
    target = await pool.target()
    draft = await pool.draft()
    client = await pool.client(target)
    running = asyncio.create_task(pool.generate_all([client], PROMPTS[:2], 300))
    await pool.until(lambda: pool.gateway.tokens)
    # As in a service: first it is listed no more, then it is told to stop.
    del pool.targets[target.spec.target_id]
    await asyncio.sleep(3 * draft.spec.discovery_seconds)
    assert [hello.draft_id for hello in target.drafts] == [draft.spec.draft_id]
    stopping = asyncio.create_task(target.stop(20.0))
    assert await running == [pool.greedy_reference(prompt, 300) for prompt in PROMPTS[:2]]
    await stopping
    await pool.until(lambda: not target.drafts)
    await pool.detached(draft)
    assert (await draft.status())["engine"]["num_sequences"] == 0


async def test_a_draft_that_stops_hands_its_sequences_to_another_at_once(pool: Any) -> None:
    target = await pool.target()
    first, second = await pool.draft(), await pool.draft()
    client = await pool.client(target)
    running = asyncio.create_task(pool.generate_all([client], PROMPTS[:2], 300))
    await pool.until(lambda: pool.gateway.tokens)
    await first.stop()
    snapshot = await target.snapshot()
    (left,) = snapshot.drafts
    assert left.draft_id == second.spec.draft_id
    assert left.num_sequences == snapshot.num_running == snapshot.num_drafted == 2
    assert await running == [pool.greedy_reference(prompt, 300) for prompt in PROMPTS[:2]]


async def test_a_target_that_stops_at_once_gives_every_stream_a_status(pool: Any) -> None:
    target = await pool.target()
    draft = await pool.draft()
    client = await pool.client(target)
    client.submit(pool.make_submit("long", [1, 2], 4000))
    await pool.until(lambda: pool.gateway.tokens)
    async with asyncio.timeout(5.0):
        await target.stop(0.0)
        await pool.until(lambda: pool.gateway.lost)
    assert "is stopping" in pool.gateway.lost[target.spec.target_id]
    del pool.targets[target.spec.target_id]
    await pool.detached(draft)
    status = await draft.status()
    assert status["engine"]["num_targets"] == 0
    assert status["engine"]["num_sequences"] == 0
    draft.health()


async def test_a_failed_engine_is_unhealthy_and_ends_its_streams(pool: Any) -> None:
    target = await pool.target()
    client = await pool.client(target)
    client.submit(pool.make_submit("long", [1, 2], 4000))
    await pool.until(lambda: pool.gateway.tokens)

    def fail(engine: object) -> None:
        raise ValueError("corrupted state")

    target._engine_loop.post(fail)
    await pool.until(lambda: pool.gateway.lost, 5.0)
    reason = pool.gateway.lost[target.spec.target_id]
    assert "UNAVAILABLE" in reason
    assert "corrupted state" in reason
    with pytest.raises(EngineFailedError, match="corrupted state"):
        target.health()
    assert "corrupted state" in (await target.status())["error"]
    assert not client.attached


async def test_a_target_that_is_gone_is_dropped_and_a_new_one_is_dialled(pool: Any) -> None:
    first = await pool.target()
    draft = await pool.draft()
    await first.stop(0.0)
    del pool.targets[first.spec.target_id]
    second = await pool.target()
    await pool.attached(draft)
    client = await pool.client(second)
    assert await pool.generate_all([client], PROMPTS[:1]) == [pool.greedy_reference(PROMPTS[0])]


async def test_a_missing_model_is_a_clear_error(pool: Any) -> None:
    with pytest.raises(ModelError, match="no/such-folder"):
        await pool.target(model=ModelSpec("./no/such-folder"))
    with pytest.raises(ModelError, match="speed"):
        await pool.target(model=ModelSpec("emulated://x?speed=9"))
    with pytest.raises(ModelError, match="block_size"):
        ModelSpec("x", block_size=0)
