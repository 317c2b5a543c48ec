"""Greedy output is plain generation's and seeded output is always the same, whatever drafts do."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline.actors.engine.config import DraftEngineConfig, NgramConfig, TargetEngineConfig
from tests.cases.conftest import DRAFTS, TinyModels
from tests.cases.exercise import counts, exercised, until_exercised
from tests.cases.service import Answer, Service

pytestmark = pytest.mark.asyncio(loop_scope="package")

PROMPTS = ([7, 3, 9], [200, 201, 202, 203] * 5, list(range(40, 90)), [1])


def greedy(prompt: list[int], max_tokens: int, num_speculative_tokens: int | None = None) -> dict[str, Any]:
    return {
        "token_ids": prompt,
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "num_speculative_tokens": num_speculative_tokens,
    }


def check_exercised(draft: str, answers: list[Answer]) -> None:
    """A draft of this kind was used and did what it is there for."""
    drafted, accepted = counts(answers)
    if draft == "equal":
        exercised(drafted >= 20, "draft tokens are verified")
        assert accepted >= 0.97 * drafted
    elif draft == "noised":
        exercised(0.05 * drafted < accepted < 0.95 * drafted, "draft tokens are accepted, and rejected")
    else:
        # Nearly all that it says is known to be wrong before it could be verified.
        exercised(accepted <= drafted - accepted, "most of it is rejected")


async def num_discarded(service: Service) -> int:
    """Tokens that the draft had to take back so far."""
    (state,) = await service.draft_state()
    return int(state["num_discarded_tokens_total"])


@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_greedy_is_plain_generation(
    services: dict[str, Service], tiny: TinyModels, draft: str, num_speculative_tokens: int
) -> None:
    service = services[draft]
    before = await num_discarded(service)
    answers = await service.stream_all(*(greedy(prompt, 64, num_speculative_tokens) for prompt in PROMPTS))
    assert [answer.token_ids for answer in answers] == [
        tiny.reference.greedy(prompt, 64) for prompt in PROMPTS
    ]
    check_exercised(draft, answers)
    exercised(draft == "equal" or await num_discarded(service) > before + 20, "the draft rolls back")
    for answer in answers:
        assert len(answer.speculation.accepted_per_position) <= num_speculative_tokens
        assert sum(answer.accepted) == answer.speculation.accepted_tokens


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_seeded_output_does_not_depend_on_speculation(services: dict[str, Service], draft: str) -> None:
    def seeded(seed: int, num_speculative_tokens: int) -> dict[str, Any]:
        options = greedy(PROMPTS[seed % 4], 24, num_speculative_tokens)
        return options | {"temperature": 1.0, "seed": seed, "top_p": 0.95, "top_k": 40}

    plain = [await services["equal"].stream(**seeded(seed, 0)) for seed in range(6)]
    assert counts(plain) == (0, 0)
    assert len({tuple(answer.token_ids) for answer in plain}) == 6
    service = services[draft]
    for num_speculative_tokens in (1, 4, 8):
        before = await num_discarded(service)
        answers = await service.stream_all(*(seeded(seed, num_speculative_tokens) for seed in range(6)))
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
        check_exercised(draft, answers)
        exercised(draft == "equal" or await num_discarded(service) > before + 20, "the draft rolls back")


@until_exercised
async def test_neighbours_with_unequal_tails_do_not_mix(
    services: dict[str, Service], tiny: TinyModels
) -> None:
    """B01: repetitive and unrelated prompts in one batch, so that tails and acceptance differ by row."""
    rng = random.Random(1)
    prompts = [[a, b] * 10 for a, b in zip(range(60, 68), range(90, 98), strict=True)]
    prompts += [[rng.randrange(256) for _ in range(rng.randint(1, 30))] for _ in range(8)]
    answers = await services["noised"].stream_all(*(greedy(prompt, 64, 4) for prompt in prompts))
    assert [answer.token_ids for answer in answers] == [
        tiny.reference.greedy(prompt, 64) for prompt in prompts
    ]
    exercised(len({answer.speculation.accepted_tokens for answer in answers}) > 1, "unequal acceptance")
    check_exercised("noised", answers)


@until_exercised
async def test_drafts_and_lookup_side_by_side(tiny: TinyModels) -> None:
    """B01 with tails of either source: the draft takes half of the sequences."""
    prompts: list[Any] = [[a, b] * 10 for a, b in zip(range(60, 66), range(90, 96), strict=True)]
    prompts += tiny.reference.clear(([n, n + 1] for n in range(10)), 64)[:6]
    engine = TargetEngineConfig(
        max_num_batched_tokens=512, num_speculative_tokens=4, ngram=NgramConfig(min_n=1)
    )
    half = DraftEngineConfig(max_num_seqs=6)
    async with Service(
        tiny.target, tiny.drafts["noised"], target_engine=engine, draft_engine=half
    ) as service:
        answers = await service.stream_all(*(greedy(prompt, 64) for prompt in prompts))
        (state,) = await service.target_state()
    assert [answer.token_ids for answer in answers] == [
        tiny.reference.greedy(prompt, 64) for prompt in prompts
    ]
    exercised(0 < state["num_lookup_tokens_total"] < state["num_draft_tokens_total"], "tails of both sources")
    check_exercised("noised", answers)


@until_exercised
async def test_each_request_keeps_its_own_bound(services: dict[str, Service], tiny: TinyModels) -> None:
    """One batch of tails of 0 to 8 tokens, greedy and sampled rows side by side."""
    bounds = [0, 1, 2, 4, 8, 3, 0, 8]
    requests = [greedy(PROMPTS[index % 4], 24, bound) for index, bound in enumerate(bounds)]
    for index in (1, 4, 6):
        requests[index] |= {"temperature": 0.9, "seed": index}
    service = services["noised"]
    alone = [await service.stream(**options) for options in requests]
    together = await service.stream_all(*requests)
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert together[0].token_ids == tiny.reference.greedy(PROMPTS[0], 24)
    for bound, answer in zip(bounds, together, strict=True):
        assert len(answer.speculation.accepted_per_position) <= bound
        assert bound > 0 or answer.speculation.draft_tokens == 0
    drafting = [
        bound for bound, answer in zip(bounds, together, strict=True) if answer.speculation.draft_tokens
    ]
    exercised(len(set(drafting)) >= 3, "tails of several bounds")


@until_exercised
async def test_many_copies_of_one_prompt_stay_equal(services: dict[str, Service], tiny: TinyModels) -> None:
    """B04: 32 copies and 8 others."""
    copy = list(range(100, 112))
    others = [[200 + index, index] for index in range(8)]
    answers = await services["noised"].stream_all(
        *(greedy(copy, 128, 4) for _ in range(32)), *(greedy(prompt, 128, 4) for prompt in others)
    )
    assert [answer.token_ids for answer in answers[:32]] == [tiny.reference.greedy(copy, 128)] * 32
    assert [answer.token_ids for answer in answers[32:]] == [
        tiny.reference.greedy(prompt, 128) for prompt in others
    ]
    check_exercised("noised", answers)


@until_exercised
async def test_full_acceptance_leaves_no_hole_in_the_draft(
    services: dict[str, Service], tiny: TinyModels
) -> None:
    """B09: without the KV of the bonus token a draft of equal weights would be wrong now and then."""
    answer = await services["equal"].stream(**greedy([6, 7, 8], 256, 4))
    assert answer.token_ids == tiny.reference.greedy([6, 7, 8], 256)
    check_exercised("equal", [answer])
    # Whole tails were the rule, so that full acceptance was followed by another tail again and again.
    exercised(answer.speculation.mean_acceptance_length > 3, "whole tails")
    assert answer.speculation.accepted_per_position[3] >= 10
