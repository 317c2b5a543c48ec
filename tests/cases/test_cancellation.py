"""Callers that leave: nothing stays behind, in the target, in the drafts or in the counters."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import Any

import pytest

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
        {
            name: value
            for name, value in state.items()
            if name.startswith("num_") and name.endswith("_total") and isinstance(value, int)
        }
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


async def check_random_aborts(
    service: Service, tiny: TinyModels, num_streams: int, seconds: float, seed: int = 0
) -> int:
    """Each stream is left within so many seconds; 3 s after the last one no token is generated any more, and
    every block of target and draft is free.

    Returns: how many draft tokens were verified.
    """
    rng = random.Random(seed)
    before = await service.target_state(), await service.draft_state()
    loop = asyncio.get_running_loop()
    tasks = [
        asyncio.create_task(service.stream(**greedy([n % 256, 3, 9], 400, 4))) for n in range(num_streams)
    ]
    for task in tasks:
        loop.call_later(rng.uniform(0.0, seconds), task.cancel)
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
    await service.wait_until_idle(3.0)
    (idle,) = await service.target_state()
    await asyncio.sleep(0.2)
    (later,) = await service.target_state()
    assert later["num_committed_tokens_total"] == idle["num_committed_tokens_total"]
    answer = await service.stream(**greedy(PROMPT, 48, 4))
    assert answer.token_ids == tiny.reference.greedy(PROMPT, 48)
    return int(watched[0][0]["num_draft_tokens_total"] - before[0][0]["num_draft_tokens_total"])


@pytest.mark.usefixtures("patient")
@until_exercised
async def test_aborts_at_random_moments(services: dict[str, Service], tiny: TinyModels) -> None:
    """B17: 100 streams, 0 to 300 ms; no counter ever falls."""
    drafted = await check_random_aborts(services["noised"], tiny, 100, 0.3)
    exercised(drafted > 0, "draft tokens are verified")


@pytest.mark.heavy
@pytest.mark.usefixtures("patient")
@until_exercised
async def test_aborts_of_three_hundred_streams_five_times(
    services: dict[str, Service], tiny: TinyModels
) -> None:
    drafted = [await check_random_aborts(services["noised"], tiny, 300, 0.5, seed) for seed in range(5)]
    exercised(sum(drafted) > 0, "draft tokens are verified")
