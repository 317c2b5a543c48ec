"""Every sampling parameter, at every drafted position: the law is the one that was asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.cases.conftest import DRAFTS, TinyModels
from tests.cases.exercise import exercised, until_exercised
from tests.cases.naive import NaiveLaw
from tests.cases.reference import NearTieError
from tests.cases.service import Answer, Service
from tests.cases.test_output_equality import counts, greedy

pytestmark = pytest.mark.asyncio(loop_scope="package")

BOUNDS = (1, 2, 4, 8)
REPETITIVE = [60, 90, 60, 90, 60, 90, 60, 90]


def check_drafted(draft: str, answers: list[Answer]) -> None:
    """A draft applies the request's parameters as well: one of the target's own weights is nearly always
    right, whatever was asked for."""
    drafted, accepted = counts(answers)
    if draft == "equal":
        exercised(drafted >= 20, "draft tokens are verified")
        assert accepted >= 0.97 * drafted
    elif draft == "noised":
        exercised(0 < accepted < drafted, "draft tokens are accepted, and rejected")
    else:
        exercised(drafted == 0 or accepted < drafted, "draft tokens are rejected")


# ---------------------------------------------------------------- seeds


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_same_seed_same_text(services: dict[str, Service], draft: str) -> None:
    """B31: hot, five times over, whatever the bound; another seed says something else."""

    def hot(seed: int, bound: int) -> dict[str, Any]:
        return greedy([7, 3, 9], 10, bound) | {"temperature": 2.0, "seed": seed}

    service = services[draft]
    answers = await service.stream_all(*(hot(42, bound) for bound in (0, *BOUNDS)))
    alone = [await service.stream(**hot(42, 4)) for _ in range(2)]
    assert len({tuple(answer.token_ids) for answer in [*answers, *alone]}) == 1
    other = await service.stream(**hot(43, 4))
    assert other.token_ids != answers[0].token_ids
    exercised(counts([*answers, *alone])[0] > 0, "draft tokens are verified")


# ---------------------------------------------------------------- penalties

PENALTIES = {
    "frequency": [NaiveLaw(temperature=0.0, frequency_penalty=value) for value in (-2.0, 0.0, 2.0)],
    "presence": [NaiveLaw(temperature=0.0, presence_penalty=value) for value in (-2.0, 0.0, 2.0)],
    "repetition": [NaiveLaw(temperature=0.0, repetition_penalty=value) for value in (0.5, 1.0, 2.0)],
    "all": [
        NaiveLaw(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.75),
        NaiveLaw(temperature=0.0),
    ],
}


@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_penalties_count_every_token_once(
    services: dict[str, Service], tiny: TinyModels, draft: str, kind: str
) -> None:
    """B34: each token as the penalised reference has it; every position has a history of its own."""
    laws = PENALTIES[kind]
    requests, expected = [], []
    for law in laws:
        for prompt in (REPETITIVE, [7, 3, 9]):
            try:
                wanted = law.greedy(tiny.reference, prompt, 48)
            except NearTieError:
                continue
            for bound in BOUNDS:
                requests.append(greedy(prompt, 48, bound) | law.options)
                expected.append(wanted)
    assert len({tuple(wanted) for wanted in expected}) >= len(laws), "the penalties change nothing"
    answers = await services[draft].stream_all(*requests)
    assert [answer.token_ids for answer in answers] == expected
    check_drafted(draft, answers)


# ---------------------------------------------------------------- bias and bans


@pytest.mark.parametrize("bound", [1, 8])
@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_forbidden_and_forced_tokens(
    services: dict[str, Service], tiny: TinyModels, draft: str, bound: int
) -> None:
    """B36: at accepted, corrected and bonus positions alike."""
    service = services[draft]
    plain = tiny.reference.greedy([7, 3, 9], 64)
    often = max(set(plain), key=plain.count)
    without = NaiveLaw(temperature=0.0, logit_bias={plain[0]: -100.0, often: -100.0})
    banned = NaiveLaw(temperature=0.0, bad_token_ids=[plain[0], often])
    forced = NaiveLaw(temperature=1.0, logit_bias={77: 100.0})
    two = NaiveLaw(temperature=1.0, logit_bias={77: 100.0, 78: 100.0, 79: -5.0})
    laws = [without, banned, forced, two]
    answers = await service.stream_all(
        *(greedy([7, 3, 9], 200, bound) | law.options | {"seed": 5} for law in laws)
    )
    first, second, third, fourth = answers
    assert not {plain[0], often} & set(first.token_ids)
    assert second.token_ids == first.token_ids
    assert third.token_ids == [77] * 200
    assert set(fourth.token_ids) == {77, 78}
    start = without.greedy(tiny.reference, [7, 3, 9], 12)
    assert first.token_ids[:12] == start
    check_drafted(draft, answers)


@pytest.mark.parametrize("bound", [1, 8])
@until_exercised
async def test_filters_that_leave_one_token_are_greedy(
    services: dict[str, Service], tiny: TinyModels, bound: int
) -> None:
    """B36, B37: hot, any seed; with each filter, at every drafted position."""
    filters = [
        NaiveLaw(temperature=1.5, top_k=1),
        NaiveLaw(temperature=1.5, top_p=1e-6),
        NaiveLaw(temperature=1.5, min_p=0.99),
    ]
    prompts = [prompt for prompt in ([n, 3, 9] for n in range(40)) if widest_gap(tiny, prompt, 40) > 0.02][:2]
    assert len(prompts) == 2
    requests = [
        greedy(prompt, 40, bound) | law.options | {"seed": seed}
        for prompt in prompts
        for law in filters
        for seed in (1, 99)
    ]
    for draft in DRAFTS:
        answers = await services[draft].stream_all(*requests)
        for options, answer in zip(requests, answers, strict=True):
            assert answer.token_ids == tiny.reference.greedy(options["token_ids"], 40)
        check_drafted(draft, answers)


def widest_gap(tiny: TinyModels, prompt: list[int], num_tokens: int) -> float:
    """How far the second best token stays behind the best one, at the position where it comes closest."""
    try:
        said = tiny.reference.greedy(prompt, num_tokens)
    except NearTieError:
        return 0.0
    rows = [np.sort(tiny.reference.logits(prompt + said[:n]))[::-1] for n in range(num_tokens)]
    return float(min(row[0] - row[1] for row in rows))


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_nothing_outside_the_nucleus(
    services: dict[str, Service], tiny: TinyModels, draft: str
) -> None:
    """B37: the exact nucleus of each prefix, in 512 draws of three tokens."""
    law = NaiveLaw(temperature=1.5, top_p=0.3)
    prompt = [7, 3, 9]
    options = greedy(prompt, 3, 2) | law.options
    responses = []
    for seeds in (range(4), range(4, 8)):  # the target's queue takes 256
        responses += await asyncio.gather(
            *(services[draft].generate(**options, n=64, seed=seed) for seed in seeds)
        )
    draws = [tuple(choice.token_ids) for response in responses for choice in response.choices]
    assert len(draws) == 512
    sizes = []
    for draw in set(draws):
        for length in range(3):
            said = list(draw[:length])
            probabilities = law.probabilities(tiny.reference.logits(prompt + said), prompt, said)
            assert probabilities[draw[length]] > 0.0, f"{draw[length]} after {said}"
            sizes.append(np.count_nonzero(probabilities))
    assert max(sizes) > 1, "a nucleus of one token shows nothing"
    assert len(set(draws)) > 3
    exercised(sum(response.speculation.draft_tokens for response in responses) > 0, "tokens are drafted")


# ---------------------------------------------------------------- min_tokens


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_min_tokens_forbids_the_end_inside_blocks(
    services: dict[str, Service], tiny: TinyModels, draft: str
) -> None:
    """The stop token cannot be said before, and is one afterwards."""
    plain = tiny.reference.greedy([7, 3, 9], 64)
    stop = plain[2]
    law = NaiveLaw(temperature=0.0, min_tokens=20, stop_token_ids=[stop])
    requests, expected = [], []
    whole = law.greedy(tiny.reference, [7, 3, 9], 64)
    end = whole.index(stop) + 1 if stop in whole else 64
    for bound in BOUNDS:
        requests.append(greedy([7, 3, 9], 64, bound) | law.options)
        expected.append(whole[:end])
    answers = await services[draft].stream_all(*requests)
    assert [answer.token_ids for answer in answers] == expected
    assert stop not in whole[:20]
    check_drafted(draft, answers)
