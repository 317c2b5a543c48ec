"""Where text ends: stop tokens, stop strings and the model's own end, anywhere in an accepted block."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from paceline.protos import generation_pb2 as proto
from tests.cases.conftest import DRAFTS, Reciter, TinyModels
from tests.cases.exercise import BOUNDS, check_every_bound, exercised, until_exercised
from tests.cases.naive import NaiveLaw
from tests.cases.recitation import CHARACTERS, SCRIPTS
from tests.cases.service import Answer, Service
from tests.cases.test_output_equality import greedy

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.usefixtures("patient")]


def recite(reciter: Reciter, start: int, max_tokens: int, bound: int, **options: Any) -> dict[str, Any]:
    """CHARACTERS after the one with index ``start``."""
    prompt = [reciter.recitation.characters[start]]
    return greedy(prompt, max_tokens, bound) | options


def place_in_block(answer: Answer) -> int:
    """How many accepted draft tokens the answer ends with."""
    length = 0
    for accepted in reversed(answer.accepted):
        if not accepted:
            break
        length += 1
    return length


async def check_whole(service: Service, answer: Answer, options: dict[str, Any]) -> None:
    """The unary call says the same, and usage counts what was given."""
    response = await service.generate(**options)
    (choice,) = response.choices
    assert list(choice.token_ids) == answer.token_ids
    assert choice.text == answer.text
    assert choice.finish_reason == answer.last.finish_reason
    assert response.usage == answer.last.usage
    assert answer.last.usage.completion_tokens == len(answer.token_ids)


# ---------------------------------------------------------------- stop tokens


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_stop_token_inside_a_block(services: dict[str, Service], tiny: TinyModels, draft: str) -> None:
    """B18: every token of the first 24 in turn is declared the stop token, or every other one."""
    prompt, expected = [7, 3, 9], tiny.reference.greedy([7, 3, 9], 64)
    requests = [
        greedy(prompt, 64, bound) | {"stop_token_ids": [token_id]}
        for bound in BOUNDS
        for token_id in expected[: 24 : 1 if bound == 8 else 2]
    ]
    answers = await services[draft].stream_all(*requests)
    for options, answer in zip(requests, answers, strict=True):
        (token_id,) = options["stop_token_ids"]
        assert answer.token_ids == expected[: expected.index(token_id) + 1]
        assert answer.last.finish_reason == proto.FINISH_REASON_STOP
        assert answer.last.usage.completion_tokens == len(answer.token_ids)
    check_every_bound(draft, requests, answers, cut=True)
    if draft == "equal":
        # A step's last token is never an accepted one: these ended inside a block.
        places = [place_in_block(answer) for answer in answers]
        exercised(sum(place > 0 for place in places) >= 6 and max(places) >= 3, "ends deep inside blocks")


async def test_a_stop_token_comes_after_min_tokens_others(
    services: dict[str, Service], tiny: TinyModels
) -> None:
    """Before that it cannot be said."""
    expected = tiny.reference.greedy([7, 3, 9], 32)
    stop = expected[9]
    first = expected.index(stop)
    options = greedy([7, 3, 9], 32, 8) | {"stop_token_ids": [stop]}
    for min_tokens in range(first + 1):
        answer = await services["equal"].stream(**options, min_tokens=min_tokens)
        assert answer.token_ids == expected[: first + 1]
    for min_tokens in (first + 1, first + 2, 24, 32):
        law = NaiveLaw(temperature=0.0, min_tokens=min_tokens, stop_token_ids=[stop])
        whole = law.greedy(tiny.reference, [7, 3, 9], 32)
        answer = await services["equal"].stream(**options, min_tokens=min_tokens)
        end = whole.index(stop) + 1 if stop in whole else 32
        assert answer.token_ids == whole[:end]
        assert end > min_tokens or end == 32


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_the_models_own_end_inside_a_block(
    recitals: dict[str, Service], reciter: Reciter, draft: str
) -> None:
    """B18: at each distance of 1 to 30 tokens; with ``ignore_eos`` it is a token like any other."""
    reciting, recitation = recitals[draft], reciter.recitation
    total = len(CHARACTERS)
    requests = [
        recite(reciter, total - distance, 40, bound, ignore_eos=False)
        for bound in BOUNDS
        for distance in range(1, 31, 1 if bound == 8 else 3)
    ]
    answers = await reciting.stream_all(*requests)
    for options, answer in zip(requests, answers, strict=True):
        start = recitation.characters.index(options["token_ids"][0])
        assert answer.token_ids == [*recitation.characters[start + 1 :], recitation.eos]
        assert answer.text == CHARACTERS[start + 1 :]
        assert answer.last.finish_reason == proto.FINISH_REASON_STOP
    if draft == "equal":
        exercised(max(place_in_block(answer) for answer in answers) >= 3, "ends deep inside blocks")
    check_every_bound(draft, requests, answers, cut=True)
    for options, answer in list(zip(requests, answers, strict=True))[::12]:
        await check_whole(reciting, answer, options)
        past = await reciting.stream(**options | {"ignore_eos": True})
        assert past.token_ids == recitation.follow(options["token_ids"][0], 40)
        assert past.text.startswith(answer.text + SCRIPTS[:5])


# ---------------------------------------------------------------- stop strings


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_one_character_anywhere_in_a_block(
    recitals: dict[str, Service], reciter: Reciter, draft: str
) -> None:
    """B20: wherever a tail begins, each of the first 16 places after the prompt is the end once."""
    indices = range(1, 17)
    requests = [recite(reciter, 0, 64, bound, stop=[CHARACTERS[i]]) for bound in BOUNDS for i in indices]
    answers = await recitals[draft].stream_all(*requests)
    for options, answer in zip(requests, answers, strict=True):
        index = CHARACTERS.index(options["stop"][0])
        assert answer.text == CHARACTERS[1:index]
        assert answer.token_ids == reciter.recitation.characters[1 : index + 1]
        assert answer.last.finish_reason == proto.FINISH_REASON_STOP
        assert answer.last.usage.completion_tokens == index
    check_every_bound(draft, requests, answers, cut=True)


@until_exercised
async def test_one_character_anywhere_in_a_long_block(reciting: Service, reciter: Reciter) -> None:
    """B20, B21, B22: text, ids and usage are cut together, in tails of 16 tokens."""
    recitation = reciter.recitation
    indices = range(1, 36)
    requests = [recite(reciter, 0, 64, 16, stop=[CHARACTERS[index]]) for index in indices]
    answers = await reciting.stream_all(*requests)
    for index, answer in zip(indices, answers, strict=True):
        assert answer.text == CHARACTERS[1:index]
        assert answer.token_ids == recitation.characters[1 : index + 1]
        assert answer.last.finish_reason == proto.FINISH_REASON_STOP
        assert answer.last.usage.completion_tokens == index
    places = {place_in_block(answer) for answer in answers}
    exercised(len(places) >= 5 and max(places) >= 8, "ends everywhere in blocks")
    for index in (0, 17, 34):
        await check_whole(reciting, answers[index], requests[index])


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_ids_end_with_the_token_that_completes_the_string(
    recitals: dict[str, Service], reciter: Reciter, draft: str
) -> None:
    """B21: tokens of several characters, so that the stop string begins and ends within tokens."""
    reciting, recitation = recitals[draft], reciter.recitation
    start = recitation.scripts[0]
    said = recitation.follow(start, 100)
    text = reciting.codec.decode(said)
    stops = [text[index : index + length] for index in range(4, 60, 3) for length in (1, 2, 5)]
    bounds = itertools.cycle(BOUNDS)
    requests = [greedy([start], 100, next(bounds)) | {"stop": [stop]} for stop in stops]
    answers = await reciting.stream_all(*requests)
    for stop, answer in zip(stops, answers, strict=True):
        assert answer.text == text[: text.index(stop)]
        assert answer.token_ids == said[: len(answer.token_ids)]
        assert stop in reciting.codec.decode(answer.token_ids)
        assert stop not in reciting.codec.decode(answer.token_ids[:-1])
        assert answer.last.usage.completion_tokens == len(answer.token_ids)
    if draft == "equal":
        exercised(max(place_in_block(answer) for answer in answers) > 1, "ends deep inside blocks")
    check_every_bound(draft, requests, answers, cut=True)


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_no_part_of_a_stop_string_is_streamed(
    recitals: dict[str, Service], reciter: Reciter, draft: str
) -> None:
    """B25: it straddles tokens and steps; each piece of the stream must end before it."""
    requests = [
        recite(reciter, 0, 64, bound, stop=[CHARACTERS[index : index + 6]])
        for index in range(3, 30, 3)
        for bound in (0, *BOUNDS)
    ]
    answers = await recitals[draft].stream_all(*requests)
    for options, answer in zip(requests, answers, strict=True):
        assert answer.text == CHARACTERS[1 : CHARACTERS.index(options["stop"][0])]
        assert answer.last.finish_reason == proto.FINISH_REASON_STOP
    check_every_bound(draft, requests, answers, cut=True)


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_text_held_back_comes_out_at_the_end(
    recitals: dict[str, Service], reciter: Reciter, draft: str
) -> None:
    """B25: the text ends with what could have been the beginning of a stop string."""
    by_length: dict[str, Any] = {"stop": [CHARACTERS[28:31] + "ZZZ", CHARACTERS[30] + "!"]}
    by_end: dict[str, Any] = {"stop": [CHARACTERS[-3:] + "ZZZ"], "ignore_eos": False}
    requests = []
    for bound in (0, *BOUNDS):
        requests += [recite(reciter, 0, 30, bound, **by_length), recite(reciter, 70, 60, bound, **by_end)]
    answers = await recitals[draft].stream_all(*requests)
    for options, answer in zip(requests, answers, strict=True):
        ends = "ignore_eos" in options
        assert answer.text == (CHARACTERS[71:] if ends else CHARACTERS[1:31])
        assert answer.last.finish_reason == (proto.FINISH_REASON_STOP if ends else proto.FINISH_REASON_LENGTH)
    await asyncio.gather(
        *(
            check_whole(recitals[draft], answer, options)
            for options, answer in zip(requests, answers, strict=True)
        )
    )
    check_every_bound(draft, requests, answers, cut=True)


async def test_a_stop_string_does_not_count_before_min_tokens(reciting: Service, reciter: Reciter) -> None:
    stop = [CHARACTERS[5], CHARACTERS[12]]
    answer = await reciting.stream(**recite(reciter, 0, 40, 8, stop=stop, min_tokens=8))
    assert answer.text == CHARACTERS[1:12]
    answer = await reciting.stream(**recite(reciter, 0, 40, 8, stop=stop, min_tokens=5))
    assert answer.text == CHARACTERS[1:5]


async def test_the_first_of_several_ends_wins(reciting: Service, reciter: Reciter) -> None:
    """Stop string, stop token, model's end and max_tokens in one block, in every order."""
    characters = reciter.recitation.characters
    for string, token, length in ((4, 7, 9), (7, 4, 9), (9, 7, 4), (6, 6, 6), (20, 20, 6)):
        answer = await reciting.stream(
            **recite(reciter, 0, length, 16, stop=[CHARACTERS[string]], stop_token_ids=[characters[token]])
        )
        end = min(string, token, length)
        assert answer.token_ids == characters[1 : end + 1]
        # The text of a stop token stays, that of a stop string does not.
        assert answer.text == CHARACTERS[1 : end if string == end else end + 1]
        stopped = min(string, token) <= length
        assert answer.last.finish_reason == (
            proto.FINISH_REASON_STOP if stopped else proto.FINISH_REASON_LENGTH
        )


async def test_a_stop_string_frees_the_sequence_at_once(reciting: Service, reciter: Reciter) -> None:
    """The target does not go on to max_tokens when the gateway has found the end."""
    (before,) = await reciting.target_state()
    requests = [recite(reciter, 0, 900, 4, stop=[CHARACTERS[12]]) for _ in range(8)]
    await asyncio.gather(*(reciting.generate(**options) for options in requests))
    await reciting.wait_until_idle()
    (after,) = await reciting.target_state()
    # Twelve each are the answer. A few more are on their way when the gateway sees it.
    assert after["num_committed_tokens_total"] - before["num_committed_tokens_total"] < 8 * 120
