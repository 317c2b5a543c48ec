"""Log probabilities come from the target, for every token, and are cut with it."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.actors.engine.config import LogprobsMode
from paceline.protos import generation_pb2 as proto
from tests.cases.conftest import DRAFTS, Reciter, TinyModels
from tests.cases.exercise import BOUNDS, check_every_bound, exercised, until_exercised
from tests.cases.naive import Law, NaiveLaw, softmax
from tests.cases.recitation import CHARACTERS
from tests.cases.service import TARGET_ENGINE, Answer, Service
from tests.cases.test_output_equality import greedy
from tests.cases.test_stopping import recite

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.usefixtures("patient")]

TOLERANCE = 1e-3


def check_entries(answer: Answer, laws: list[Law], num_top: int) -> None:
    """One entry for each token: the chosen one as it is in ``laws``, and the likeliest of these, in order."""
    assert len(answer.logprobs) == len(answer.token_ids) == len(laws)
    for token_id, entry, law in zip(answer.token_ids, answer.logprobs, laws, strict=True):
        with np.errstate(divide="ignore"):
            logs = np.log(law)
        assert entry.chosen.token_id == token_id
        assert entry.chosen.logprob == pytest.approx(logs[token_id], abs=TOLERANCE)
        found = [item.logprob for item in entry.top]
        assert found == sorted(found, reverse=True)
        assert len({item.token_id for item in entry.top}) == len(entry.top)
        assert len(entry.top) == min(num_top, np.count_nonzero(law))
        for item, expected in zip(entry.top, np.sort(logs)[::-1], strict=False):
            assert item.logprob == pytest.approx(logs[item.token_id], abs=TOLERANCE)
            assert item.logprob == pytest.approx(expected, abs=TOLERANCE)


def raw_laws(tiny: TinyModels, prompt: list[int], said: list[int]) -> list[Law]:
    return [softmax(tiny.reference.logits(prompt + said[:n])) for n in range(len(said))]


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_the_targets_own_law_at_every_token(
    services: dict[str, Service], tiny: TinyModels, draft: str
) -> None:
    """B45: accepted, corrected and bonus tokens alike; never a probability of one because of acceptance."""
    prompt = [7, 3, 9]
    laws = raw_laws(tiny, prompt, tiny.reference.greedy(prompt, 64))
    requests = [greedy(prompt, 64, bound) | {"logprobs": 5} for bound in (0, *BOUNDS)]
    answers = await services[draft].stream_all(*requests)
    for answer in answers:
        assert answer.token_ids == tiny.reference.greedy(prompt, 64)
        check_entries(answer, laws, 5)
        for entry in answer.logprobs:
            assert entry.chosen.token_id == entry.top[0].token_id
            assert entry.chosen.logprob < 0.0
    check_every_bound(draft, requests, answers)
    response = await services[draft].generate(**requests[-1])
    (choice,) = response.choices
    tokens = [(entry.chosen.token_id, entry.chosen.text) for entry in choice.logprobs]
    assert tokens == [(entry.chosen.token_id, entry.chosen.text) for entry in answers[-1].logprobs]


@until_exercised
async def test_a_sampled_token_is_reported_though_it_is_not_among_the_likeliest(
    services: dict[str, Service], tiny: TinyModels
) -> None:
    """Raw: neither temperature nor penalties nor truncation show."""
    prompt = [7, 3, 9]
    options = {"temperature": 2.0, "seed": 3, "frequency_penalty": 1.0, "top_p": 0.99}
    for num_top in (0, 1, 20):
        answer = await services["equal"].stream(**greedy(prompt, 24, 4) | options | {"logprobs": num_top})
        check_entries(answer, raw_laws(tiny, prompt, answer.token_ids), num_top)
        exercised(answer.speculation.accepted_tokens > 0, "draft tokens are accepted")
    beyond = [e for e in answer.logprobs if e.chosen.token_id != e.top[0].token_id]
    assert beyond


@until_exercised
async def test_processed_is_the_law_that_tokens_are_drawn_from(tiny: TinyModels) -> None:
    engine = replace(TARGET_ENGINE, logprobs_mode=LogprobsMode.PROCESSED)
    prompt = [7, 3, 9]
    laws = [
        NaiveLaw(temperature=1.5, top_k=4, frequency_penalty=1.0, logit_bias={5: -100.0, 9: 2.0}),
        NaiveLaw(temperature=0.7, min_p=0.05, repetition_penalty=1.5, bad_token_ids=[1, 2]),
        NaiveLaw(temperature=1.0, top_p=0.8, presence_penalty=-1.0),
    ]
    async with Service(tiny.target, tiny.drafts["equal"], target_engine=engine) as service:
        answers = await service.stream_all(
            *(greedy(prompt, 24, 4) | law.options | {"seed": 8, "logprobs": 6} for law in laws)
        )
    for law, answer in zip(laws, answers, strict=True):
        said = answer.token_ids
        expected = [
            law.probabilities(tiny.reference.logits(prompt + said[:n]), prompt, said[:n]) for n in range(24)
        ]
        check_entries(answer, expected, 6)
    exercised(all(answer.speculation.accepted_tokens for answer in answers), "draft tokens are accepted")


# ---------------------------------------------------------------- cut together


def texts_of(answer: Answer) -> str:
    return "".join(entry.chosen.text for entry in answer.logprobs)


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_as_many_entries_as_tokens_wherever_it_ends(
    recitals: dict[str, Service], reciter: Reciter, draft: str
) -> None:
    """B21, B22: at a stop string inside a block, at each length, at the model's end."""
    reciting = recitals[draft]
    bounds = itertools.cycle(BOUNDS)
    by_string = [
        recite(reciter, 0, 64, next(bounds), stop=[CHARACTERS[index]], logprobs=2)
        for index in range(1, 30, 3)
    ]
    by_length = [
        recite(reciter, 0, length, 4 if draft == "equal" else next(bounds), logprobs=0)
        for length in range(1, 41)
    ]
    by_end = [
        recite(reciter, len(CHARACTERS) - 9, 40, bound, ignore_eos=False, logprobs=1) for bound in BOUNDS
    ]
    requests: list[dict[str, Any]] = [*by_string, *by_length, *by_end]
    answers = await reciting.stream_all(*requests)
    for answer in answers:
        assert len(answer.logprobs) == len(answer.token_ids) == answer.last.usage.completion_tokens
        assert [entry.chosen.token_id for entry in answer.logprobs] == answer.token_ids
    responses = await asyncio.gather(*(reciting.generate(**options) for options in by_string))
    for options, answer, response in zip(by_string, answers, responses, strict=False):
        # The text ends before the stop string, the entries with the token that completed it.
        assert texts_of(answer) == answer.text + options["stop"][0]
        assert len(response.choices[0].logprobs) == response.usage.completion_tokens
        assert [e.chosen.text for e in response.choices[0].logprobs] == [
            e.chosen.text for e in answer.logprobs
        ]
    for options, answer in zip(by_length, answers[len(by_string) :], strict=False):
        assert len(answer.logprobs) == options["max_tokens"]
        assert texts_of(answer) == answer.text
    for answer in answers[-len(by_end) :]:
        assert answer.last.finish_reason == proto.FINISH_REASON_STOP
        assert answer.logprobs[-1].chosen.token_id == reciter.recitation.eos
    check_every_bound(draft, requests, answers, cut=True)
