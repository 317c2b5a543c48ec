"""Callers that leave: nothing stays behind, in the target, in the drafts or in the counters."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import aclosing
from typing import Any

import psutil
import pytest

from paceline.actors.engine.errors import InvalidArgumentError
from tests.cases.conftest import TinyModels
from tests.cases.exercise import exercised, until_exercised
from tests.cases.service import Answer, Service
from tests.cases.test_output_equality import greedy

pytestmark = pytest.mark.asyncio(loop_scope="package")

PROMPT = list(range(60, 80))


async def leave_after(service: Service, num_chunks: int, options: dict[str, Any]) -> Answer:
    """Read so many chunks of a stream and close it."""
    answer = Answer()
    async with aclosing(service.chunks(**options)) as chunks:
        async for chunk in chunks:
            answer.add(chunk)
            num_chunks -= 1
            if num_chunks == 0:
                break
    return answer


def totals(states: list[dict[str, Any]]) -> list[dict[str, int]]:
    return [
        {name: value for name, value in state.items() if name.startswith("num_") and name.endswith("_total")}
        for state in states
    ]


async def check_resent_after_leaving(service: Service, tiny: TinyModels, num_chunks: int) -> int:
    """Returns: how many draft tokens were accepted the second time."""
    expected = tiny.reference.greedy(PROMPT, 48)
    left = await leave_after(service, num_chunks, greedy(PROMPT, 400, 4))
    assert left.token_ids == tiny.reference.greedy(PROMPT, 400)[: len(left.token_ids)]
    again = await service.stream(**greedy(PROMPT, 48, 4))
    assert again.token_ids == expected
    return int(again.speculation.accepted_tokens)


@until_exercised
async def test_the_same_prompt_again_after_leaving(services: dict[str, Service], tiny: TinyModels) -> None:
    """B15: after 1 to 10 chunks."""
    accepted = [await check_resent_after_leaving(services["equal"], tiny, n) for n in range(1, 11)]
    exercised(sum(map(bool, accepted)) >= 5, "draft tokens are accepted")


@pytest.mark.heavy
async def test_the_same_prompt_again_after_leaving_fifty_times(
    services: dict[str, Service], tiny: TinyModels
) -> None:
    for turn in range(500):
        await check_resent_after_leaving(services["noised"], tiny, 1 + turn % 10)


async def check_random_aborts(service: Service, tiny: TinyModels, num_streams: int) -> None:
    rng = random.Random(num_streams)
    before = await service.target_state(), await service.draft_state()
    loop = asyncio.get_running_loop()
    tasks = [
        asyncio.create_task(service.stream(**greedy([n % 256, 3, 9], 400, 4))) for n in range(num_streams)
    ]
    for task in tasks:
        loop.call_later(rng.uniform(0.0, 0.3), task.cancel)
    watched = before
    while not all(task.done() for task in tasks):
        await asyncio.wait(tasks, timeout=0.05)
        seen = await service.target_state(), await service.draft_state()
        for old, new in zip(watched, seen, strict=True):
            for old_total, new_total in zip(totals(old), totals(new), strict=True):
                assert all(0 <= old_total[name] <= new_total[name] for name in old_total)
        watched = seen
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await service.wait_until_idle()
    answer = await service.stream(**greedy(PROMPT, 48, 4))
    assert answer.token_ids == tiny.reference.greedy(PROMPT, 48)
    drafted = watched[0][0]["num_draft_tokens_total"] - before[0][0]["num_draft_tokens_total"]
    exercised(drafted > 0, "draft tokens are verified")


@until_exercised
async def test_aborts_at_random_moments(services: dict[str, Service], tiny: TinyModels) -> None:
    """B17: 100 streams, 0 to 300 ms; no counter ever falls."""
    await check_random_aborts(services["noised"], tiny, 100)


async def run_mixed(service: Service, num_requests: int, seed: int) -> dict[str, int]:
    """Requests that finish, stop, are left and are refused, 32 at a time; how many of each."""
    rng = random.Random(seed)
    places = asyncio.Semaphore(32)
    found = {"finished": 0, "stopped": 0, "left": 0, "refused": 0}

    async def run(kind: str, options: dict[str, Any]) -> None:
        async with places:
            if kind == "left":
                await leave_after(service, rng.randint(1, 4), options | {"max_tokens": 300})
            elif kind == "stopped":
                answer = await service.stream(**options, stop_token_ids=range(0, 256, 8), stop=["e"])
                assert 0 < len(answer.token_ids) <= options["max_tokens"]
            elif kind == "finished":
                answer = await service.stream(**options)
                assert len(answer.token_ids) == options["max_tokens"]
            else:
                with pytest.raises(InvalidArgumentError):
                    await service.stream(**options | {"max_tokens": 10_000})
            found[kind] += 1

    await asyncio.gather(
        *(
            run(
                rng.choice(list(found)),
                greedy(
                    [rng.randrange(256) for _ in range(rng.randint(1, 60))],
                    rng.randint(1, 24),
                    rng.randint(0, 8),
                ),
            )
            for _ in range(num_requests)
        )
    )
    await service.wait_until_idle()
    return found


@until_exercised
async def test_every_block_comes_back(services: dict[str, Service]) -> None:
    """B16: 200 requests that end in every way, and the pools of target and draft are as at the start."""
    service = services["noised"]
    assert await service.is_idle()
    found = await run_mixed(service, 200, seed=16)
    assert min(found.values()) > 20
    (target,), (draft,) = await service.target_state(), await service.draft_state()
    exercised(target["num_draft_tokens_total"] > target["num_accepted_tokens_total"] > 0, "both outcomes")
    assert (target["num_running"], target["num_waiting"], draft["num_sequences"]) == (0, 0, 0)


@pytest.mark.heavy
async def test_memory_does_not_grow(services: dict[str, Service]) -> None:
    """B16: 2,000 more requests, less than 5 % more memory."""
    service = services["noised"]
    process = psutil.Process(os.getpid())
    await run_mixed(service, 400, seed=1)
    before = process.memory_info().rss
    await run_mixed(service, 2000, seed=2)
    assert process.memory_info().rss < 1.05 * before
