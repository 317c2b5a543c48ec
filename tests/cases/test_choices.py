"""Several choices of one request: each is the request of its own seed alone, and all end together."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from paceline.actors.engine.noise import derive_seed
from paceline.protos import generation_pb2 as proto
from tests.cases.conftest import DRAFTS, Reciter, TinyModels
from tests.cases.exercise import BOUNDS, check_every_bound, exercised, until_exercised
from tests.cases.recitation import CHARACTERS
from tests.cases.service import Answer, Service, until
from tests.cases.test_output_equality import greedy
from tests.cases.test_stopping import recite
from tests.requests import request

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.usefixtures("patient")]

SEED = 42


def sampled(num_tokens: int, bound: int, seed: int = SEED, **options: Any) -> dict[str, Any]:
    return greedy([7, 3, 9], num_tokens, bound) | {"temperature": 1.2, "seed": seed} | options


async def stream_choices(service: Service, **options: Any) -> list[Answer]:
    """The choices of one streamed request, by index."""
    answers = [Answer() for _ in range(options["n"])]
    async for chunk in service.chunks(**options):
        answers[chunk.index].add(chunk)
    assert all(answer.last.finish_reason for answer in answers)
    return answers


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_eight_choices_are_eight_requests(services: dict[str, Service], draft: str) -> None:
    """B43: unlike each other, and each like the request with its derived seed."""
    service = services[draft]
    response = await service.generate(**sampled(32, 4, logprobs=2), n=8)
    requests = [sampled(32, bound, logprobs=2, n=8) for bound in BOUNDS]
    streams = await asyncio.gather(*(stream_choices(service, **options) for options in requests))
    alone = await service.stream_all(
        *(sampled(32, 0, derive_seed(SEED, index), logprobs=2) for index in range(8))
    )
    assert [choice.index for choice in response.choices] == list(range(8))
    assert [list(choice.token_ids) for choice in response.choices] == [a.token_ids for a in alone]
    for streamed in streams:
        assert [answer.token_ids for answer in streamed] == [answer.token_ids for answer in alone]
        assert [answer.last.seed for answer in streamed] == [derive_seed(SEED, index) for index in range(8)]
        assert [choice.text for choice in response.choices] == [answer.text for answer in streamed]
        assert all(answer.last.usage.completion_tokens == 32 for answer in streamed)
    assert len({tuple(answer.token_ids) for answer in alone}) == 8
    assert all(len(choice.logprobs) == 32 for choice in response.choices)
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (3, 8 * 32)
    assert response.seed == SEED
    stats = response.speculation
    assert stats.accepted_tokens == sum(stats.accepted_per_position)
    exercised(stats.draft_tokens > 0, "draft tokens are verified")
    if stats.rounds:
        assert stats.mean_acceptance_length == pytest.approx(1 + stats.accepted_tokens / stats.rounds)
    of_each_choice = [options for options in requests for _ in range(8)]
    check_every_bound(draft, of_each_choice, [answer for streamed in streams for answer in streamed])


async def test_greedy_choices_are_copies(services: dict[str, Service], tiny: TinyModels) -> None:
    response = await services["noised"].generate(**greedy([7, 3, 9], 40, 4), n=4)
    expected = tiny.reference.greedy([7, 3, 9], 40)
    assert [list(choice.token_ids) for choice in response.choices] == [expected] * 4


async def test_each_choice_ends_where_it_ends(reciting: Service, reciter: Reciter) -> None:
    """Stop strings, counted per choice: all recite the same, so all stop alike."""
    options = recite(reciter, 0, 64, 8, stop=[CHARACTERS[9]], n=3)
    answers = await stream_choices(reciting, **options)
    for answer in answers:
        assert answer.text == CHARACTERS[1:9]
        assert answer.last.finish_reason == proto.FINISH_REASON_STOP
        assert answer.last.usage.completion_tokens == 9


async def test_leaving_frees_every_choice(services: dict[str, Service], tiny: TinyModels) -> None:
    service = services["noised"]
    for left_after in (1, 3, 9):
        seen = 0
        async with aclosing(service.chunks(**sampled(400, 4, n=6))) as chunks:
            async for _ in chunks:
                seen += 1
                if seen == left_after:
                    break
        await service.wait_until_idle()
    call = asyncio.create_task(service.logic.generate(request(**sampled(400, 4, n=6))))
    await until(lambda: service.gateway.snapshot().num_live == 6, what="all choices run")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await service.wait_until_idle()
    answer = await service.stream(**greedy([7, 3, 9], 40, 4))
    assert answer.token_ids == tiny.reference.greedy([7, 3, 9], 40)


@until_exercised
async def test_choices_survive_the_loss_of_their_target(tiny: TinyModels) -> None:
    """Tokens, accepted flags and log probabilities go on as if nothing had been."""
    options = sampled(120, 4, logprobs=1)
    async with Service(tiny.target, tiny.drafts["noised"], num_targets=2, num_drafts=2) as service:
        expected = await stream_choices(service, **options, n=4)
        running = asyncio.create_task(stream_choices(service, **options, n=4))
        await until(lambda: service.gateway.snapshot().num_live == 4, what="all choices run")
        busy = {load.target_id: load.own_in_flight for load in service.gateway.snapshot().targets}
        (first,) = (target_id for target_id, count in busy.items() if count == 4)
        await asyncio.sleep(0.1)
        await service.stop_target(first)
        answers = await running
        exercised(service.gateway.snapshot().num_failovers == 4, "all choices are moved midway")
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.token_ids == wanted.token_ids
        assert [entry.chosen.token_id for entry in answer.logprobs] == wanted.token_ids
        for entry, other in zip(answer.logprobs, wanted.logprobs, strict=True):
            assert entry.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-3)
