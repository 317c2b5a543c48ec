"""Numbers are numbers: before anything has happened, after next to nothing, and at rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases.conftest import DRAFTS, TinyModels
from tests.cases.exercise import BOUNDS, check_every_bound, exercised, until_exercised
from tests.cases.service import Service
from tests.cases.test_cancellation import totals
from tests.cases.test_output_equality import greedy

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.usefixtures("patient")]


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield float(value)


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_no_number_is_ever_nan(tiny: TinyModels, draft: str) -> None:
    """B54: before any request, after one of one token, and idle."""
    async with Service(tiny.target, tiny.drafts[draft]) as service:
        seen: list[list[dict[str, int]]] = []

        async def look() -> None:
            statuses = [await part.status() for part in (*service.targets.values(), *service.drafts)]
            found = list(numbers(statuses))
            assert found
            assert all(math.isfinite(number) and number >= 0 for number in found), statuses
            seen.append(totals([status["engine"] for status in statuses]))
            if len(seen) > 1:
                for old, new in zip(*seen[-2:], strict=True):
                    assert all(old[name] <= new[name] for name in old)

        await look()
        answer = await service.stream(**greedy([7], 1, 4))
        stats = answer.speculation
        assert (stats.rounds, stats.draft_tokens, stats.accepted_tokens) == (0, 0, 0)
        assert stats.mean_acceptance_length == 0.0
        assert list(stats.accepted_per_position) == []
        await look()
        await service.wait_until_idle()
        await look()
        assert seen[-1][0]["num_committed_tokens_total"] == 1
        requests = [greedy([7], 60, bound) for bound in BOUNDS]
        answers = []
        for options in requests:
            answers.append(await service.stream(**options))
            await look()
        check_every_bound(draft, requests, answers)
        await service.wait_until_idle()
        await look()
        assert seen[-1][0]["num_accepted_tokens_total"] == sum(
            answer.speculation.accepted_tokens for answer in answers
        )


@until_exercised
async def test_statistics_add_up(services: dict[str, Service]) -> None:
    """Accepted counts exclude the corrected or bonus token, the mean acceptance length includes it."""
    service = services["noised"]
    (before,) = await service.target_state()
    answers = await service.stream_all(*(greedy([n, 3, 9], 60, 4) for n in range(6)))
    (after,) = await service.target_state()
    exercised(all(answer.speculation.accepted_tokens for answer in answers), "draft tokens are accepted")
    for answer in answers:
        stats = answer.speculation
        assert stats.accepted_tokens == sum(stats.accepted_per_position) == sum(answer.accepted)
        assert stats.accepted_per_position[0] <= stats.rounds <= stats.draft_tokens <= 4 * stats.rounds
        assert sorted(stats.accepted_per_position, reverse=True) == list(stats.accepted_per_position)
        assert stats.mean_acceptance_length == pytest.approx(1 + stats.accepted_tokens / stats.rounds)
        # Each step gives at least its own token; those with a tail give the accepted ones on top.
        assert stats.accepted_tokens + stats.rounds <= len(answer.token_ids)
    for name, stat in (
        ("num_draft_tokens_total", "draft_tokens"),
        ("num_accepted_tokens_total", "accepted_tokens"),
        ("num_rounds_total", "rounds"),
    ):
        assert after[name] - before[name] == sum(getattr(answer.speculation, stat) for answer in answers)
    assert after["num_committed_tokens_total"] - before["num_committed_tokens_total"] == 6 * 60
