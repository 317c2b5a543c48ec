"""Every sampling parameter, at every drafted position: the law is the one that was asked for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.cases.conftest import DRAFTS, TinyModels
from tests.cases.exercise import BOUNDS, check_every_bound, until_exercised
from tests.cases.naive import NaiveLaw
from tests.cases.reference import NearTieError
from tests.cases.service import Answer, Service
from tests.cases.test_choices import stream_choices
from tests.cases.test_output_equality import greedy

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.usefixtures("patient")]

REPETITIVE = [60, 90, 60, 90, 60, 90, 60, 90]


# ---------------------------------------------------------------- seeds


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_same_seed_same_text(services: dict[str, Service], draft: str) -> None:
    """B31: hot, five times over, whatever the bound; another seed says something else."""

    def hot(seed: int, bound: int) -> dict[str, Any]:
        return greedy([7, 3, 9], 10, bound) | {"temperature": 2.0, "seed": seed}

    service = services[draft]
    requests = [hot(42, bound) for bound in (0, *BOUNDS, *BOUNDS)]
    answers = await service.stream_all(*requests)
    alone = [await service.stream(**hot(42, 4)) for _ in range(2)]
    assert len({tuple(answer.token_ids) for answer in [*answers, *alone]}) == 1
    others = [hot(seed, bound) for seed in range(43, 49) for bound in BOUNDS]
    answers_of_others = await service.stream_all(*others)
    assert len({tuple(answer.token_ids) for answer in [*answers[:1], *answers_of_others]}) == 7
    check_every_bound(draft, [*requests, *others], [*answers, *answers_of_others])


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
    check_every_bound(draft, requests, answers)


# ---------------------------------------------------------------- bias and bans


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_forbidden_and_forced_tokens(
    services: dict[str, Service], tiny: TinyModels, draft: str
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
    start = without.greedy(tiny.reference, [7, 3, 9], 12)
    requests = [greedy([7, 3, 9], 200, bound) | law.options | {"seed": 5} for bound in BOUNDS for law in laws]
    answers = await service.stream_all(*requests)
    for index in range(0, len(answers), len(laws)):
        first, second, third, fourth = answers[index : index + len(laws)]
        assert not {plain[0], often} & set(first.token_ids)
        assert second.token_ids == first.token_ids
        assert third.token_ids == [77] * 200
        assert set(fourth.token_ids) == {77, 78}
        assert first.token_ids[:12] == start
    check_every_bound(draft, requests, answers)


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_filters_that_leave_one_token_are_greedy(
    services: dict[str, Service], tiny: TinyModels, draft: str
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
        for prompt, seed in zip(prompts, (1, 99), strict=True)
        for law in filters
        for bound in BOUNDS
    ]
    answers = await services[draft].stream_all(*requests)
    for options, answer in zip(requests, answers, strict=True):
        assert answer.token_ids == tiny.reference.greedy(options["token_ids"], 40)
    check_every_bound(draft, requests, answers)


def widest_gap(tiny: TinyModels, prompt: list[int], num_tokens: int) -> float:
    """How far the second best token stays behind the best one, at the position where it comes closest."""
    try:
        said = tiny.reference.greedy(prompt, num_tokens)
    except NearTieError:
        return 0.0
    rows = [np.sort(tiny.reference.logits(prompt + said[:n]))[::-1] for n in range(num_tokens)]
    return float(min(row[0] - row[1] for row in rows))


@dataclass(frozen=True)
class NucleusDraws:
    """Draws of three tokens, each next to the exact nucleus of its prefix."""

    requests: list[dict[str, Any]]
    answers: list[Answer]
    draws: list[tuple[int, ...]]
    outside: list[tuple[int, ...]]
    """Prefixes whose last token the law forbids."""
    largest: int
    """Tokens of the largest nucleus."""


async def draw_from_the_nucleus(service: Service, tiny: TinyModels, num_requests: int) -> NucleusDraws:
    """64 draws for each request."""
    law = NaiveLaw(temperature=1.5, top_p=0.3)
    prompt = [7, 3, 9]
    requests, answers, draws = [], [], []
    for start in range(0, num_requests, len(BOUNDS)):  # the target's queue takes 256
        batch = [
            # Room for a whole tail in the second round as well.
            greedy(prompt, 4 + bound, bound) | law.options | {"n": 64, "seed": start + bound}
            for bound in BOUNDS[: num_requests - start]
        ]
        for options, choices in zip(
            batch, await asyncio.gather(*(stream_choices(service, **item) for item in batch)), strict=True
        ):
            requests += [options] * len(choices)
            answers += choices
            draws += [tuple(answer.token_ids[:3]) for answer in choices]
    outside, largest = [], 0
    for prefix in {draw[:length] for draw in draws for length in (1, 2, 3)}:
        *said, token = prefix
        probabilities = law.probabilities(tiny.reference.logits(prompt + said), prompt, said)
        if probabilities[token] <= 0.0:
            outside.append(prefix)
        largest = max(largest, np.count_nonzero(probabilities))
    return NucleusDraws(requests, answers, draws, outside, largest)


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_nothing_outside_the_nucleus(
    services: dict[str, Service], tiny: TinyModels, draft: str
) -> None:
    """B37."""
    found = await draw_from_the_nucleus(services[draft], tiny, 4)
    assert len(found.draws) == 64 * 4
    assert found.outside == []
    assert found.largest > 1, "a nucleus of one token shows nothing"
    assert len(set(found.draws)) > 3
    check_every_bound(draft, found.requests, found.answers)


@pytest.mark.heavy
@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_nothing_outside_the_nucleus_in_4000_draws(
    services: dict[str, Service], tiny: TinyModels, draft: str
) -> None:
    """B37."""
    found = await draw_from_the_nucleus(services[draft], tiny, 64)
    assert len(found.draws) == 64 * 64
    assert found.outside == []
    assert found.largest > 1, "a nucleus of one token shows nothing"
    assert len(set(found.draws)) > 3
    check_every_bound(draft, found.requests, found.answers)


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
    check_every_bound(draft, requests, answers)
