"""Borders of length: the model's, the draft's, the KV pool's, and the request's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from paceline.actors.engine.config import DraftEngineConfig, TargetEngineConfig
from paceline.actors.engine.errors import InvalidArgumentError
from paceline.protos import generation_pb2 as proto
from tests.cases.conftest import DRAFTS, TinyModels
from tests.cases.exercise import BOUNDS, check_every_bound, exercised, until_exercised
from tests.cases.service import NO_LOOKUP, Service
from tests.cases.test_output_equality import greedy
from tests.engine.models import MAX_MODEL_LEN
from tests.integration.tiny_models import save

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.usefixtures("patient")]

DRAFT_LEN = 64
SOME_LENGTHS = (1, 2, 3, 4, 5, 6, 9, 16, 25, 40)


# ---------------------------------------------------------------- the request's own


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_exactly_max_tokens(services: dict[str, Service], tiny: TinyModels, draft: str) -> None:
    """B22, B23: ids, usage and stream agree on every length from 1 to 40 where every tail is accepted, and on
    some where it is not."""
    service = services[draft]
    expected = tiny.reference.greedy([7, 3, 9], 40)
    requests = [
        greedy([7, 3, 9], max_tokens, bound)
        for bound in BOUNDS
        for max_tokens in (range(1, 41) if draft == "equal" and bound >= 4 else SOME_LENGTHS)
    ]
    streamed = await service.stream_all(*requests)
    whole = await asyncio.gather(*(service.generate(**options) for options in requests))
    for options, answer, response in zip(requests, streamed, whole, strict=True):
        max_tokens = options["max_tokens"]
        (choice,) = response.choices
        assert answer.token_ids == list(choice.token_ids) == expected[:max_tokens]
        assert answer.last.usage.completion_tokens == response.usage.completion_tokens == max_tokens
        assert answer.last.finish_reason == choice.finish_reason == proto.FINISH_REASON_LENGTH
        assert answer.text == choice.text == service.codec.decode(expected[:max_tokens])
        # A tail leaves a place for the token after it, so what is verified can all be kept.
        assert draft != "equal" or answer.speculation.draft_tokens <= max(0, max_tokens - 1)
        assert max_tokens > 1 or answer.speculation.draft_tokens == 0
    check_every_bound(draft, requests, streamed)


@pytest.mark.parametrize("max_tokens", [0, -1, -(2**31)])
async def test_no_tokens_asked_for_is_refused(services: dict[str, Service], max_tokens: int) -> None:
    """B23."""
    with pytest.raises(InvalidArgumentError, match=r"stopping\.max_tokens: must be at least 1"):
        await services["equal"].generate("a", max_tokens=max_tokens)


# ---------------------------------------------------------------- the model's


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_to_the_last_position(services: dict[str, Service], tiny: TinyModels, draft: str) -> None:
    """B29: prompt + max_tokens is the model's length, with and without max_tokens, at several borders of
    blocks."""
    prompts = [[(3 * i) % 256 for i in range(MAX_MODEL_LEN - room)] for room in (1, 2, 9, 17, 32)]
    requests = []
    for bound in BOUNDS:
        requests += [greedy(prompt, MAX_MODEL_LEN - len(prompt), bound) for prompt in prompts]
        requests.append(greedy(prompts[-1], 1, bound) | {"max_tokens": None})
    answers = await services[draft].stream_all(*requests)
    for options, answer in zip(requests, answers, strict=True):
        prompt = options["token_ids"]
        assert answer.token_ids == tiny.reference.greedy(prompt, MAX_MODEL_LEN - len(prompt))
        assert answer.last.finish_reason == proto.FINISH_REASON_LENGTH
    check_every_bound(draft, requests, answers)


async def test_one_more_than_the_model_holds_is_refused(services: dict[str, Service]) -> None:
    service = services["equal"]
    with pytest.raises(InvalidArgumentError, match=r"stopping\.max_tokens: must be in \[1, 12\]"):
        await service.generate(token_ids=[1] * (MAX_MODEL_LEN - 12), max_tokens=13)
    with pytest.raises(
        InvalidArgumentError, match=r"token_ids\.ids: has 512 tokens; it may have at most 511"
    ):
        await service.generate(token_ids=[1] * MAX_MODEL_LEN, max_tokens=1)


# ---------------------------------------------------------------- the draft's


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def short_draft(
    request: pytest.FixtureRequest, tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Service]:
    """A draft of only 64 positions: by the model itself ("model": the target's own function), or by the draft
    pool's option (one of ``DRAFTS``)."""
    folder = tmp_path_factory.mktemp("short")
    if request.param == "model":
        source = save(tiny.model, folder)
        config = folder / "config.json"
        config.write_text(
            config.read_text().replace(
                f'"max_position_embeddings": {MAX_MODEL_LEN}', f'"max_position_embeddings": {DRAFT_LEN}'
            )
        )
        engine = DraftEngineConfig()
    else:
        source = tiny.drafts[request.param]
        engine = DraftEngineConfig(max_model_len=DRAFT_LEN)
    async with Service(tiny.target, source, draft_engine=engine) as service:
        yield service


@pytest.mark.parametrize(
    ("short_draft", "draft"),
    [("model", "equal"), *((draft, draft) for draft in DRAFTS)],
    indirect=["short_draft"],
    scope="module",
)
@until_exercised
async def test_requests_past_the_drafts_length(short_draft: Service, tiny: TinyModels, draft: str) -> None:
    """B27: long prompts, and a short one that grows past it, go on without drafts; neighbours with them."""
    lengths = [50, DRAFT_LEN - 2, DRAFT_LEN - 1, DRAFT_LEN, DRAFT_LEN + 1, 100, 200]
    prompts = [[(5 * i + length) % 256 for i in range(length)] for length in lengths]
    growing, neighbour = [4, 5, 6], [8, 9]
    long = [greedy(prompt, 24, bound) for bound in BOUNDS for prompt in prompts]
    grown = [greedy(growing, 100, bound) for bound in BOUNDS]
    beside = [greedy(neighbour, 40, bound) for bound in BOUNDS]
    requests = [*long, *grown, *beside]
    answers = await short_draft.stream_all(*requests)
    for options, answer in zip(requests, answers, strict=True):
        assert answer.token_ids == tiny.reference.greedy(options["token_ids"], options["max_tokens"])
        if len(options["token_ids"]) >= DRAFT_LEN:
            assert answer.speculation.draft_tokens == 0
    answers_grown = answers[len(long) : len(long) + len(grown)]
    assert not any(any(answer.accepted[DRAFT_LEN:]) for answer in answers_grown)
    check_every_bound(draft, grown, answers_grown)
    check_every_bound(draft, beside, answers[-len(beside) :])
    # Still the same draft, and of use to who comes next.
    short_draft.drafts[0].health()
    again = await short_draft.stream_all(*beside)
    assert all(answer.token_ids == tiny.reference.greedy(neighbour, 40) for answer in again)
    check_every_bound(draft, beside, again)


# ---------------------------------------------------------------- the KV pools'


@until_exercised
async def test_pools_too_small_for_all_at_once(tiny: TinyModels) -> None:
    """Targets preempt and drafts decline; nobody's tokens change."""
    async with Service(
        tiny.target,
        tiny.drafts["noised"],
        num_blocks=20,
        draft_blocks=12,
        target_engine=TargetEngineConfig(num_speculative_tokens=4, ngram=NO_LOOKUP),
    ) as service:
        prompts = [[index, index + 1, index + 2] * 5 for index in range(8)]
        answers = await service.stream_all(*(greedy(prompt, 80) for prompt in prompts))
        assert [answer.token_ids for answer in answers] == [
            tiny.reference.greedy(prompt, 80) for prompt in prompts
        ]
        (target,) = await service.target_state()
        (draft,) = await service.draft_state()
        assert target["num_preemptions_total"] > 0
        assert draft["num_declines_total"] > 0
        exercised(sum(answer.speculation.accepted_tokens for answer in answers) > 0, "tokens are accepted")
        # One that fills the pool alone to its last slot.
        capacity = 20 * 16
        prompt = [5] * (capacity - 30)
        alone = await service.stream(**greedy(prompt, 30))
        assert alone.token_ids == tiny.reference.greedy(prompt, 30)
        with pytest.raises(InvalidArgumentError, match=r"stopping\.max_tokens"):
            await service.generate(token_ids=prompt, max_tokens=31)


@until_exercised
async def test_prompts_longer_than_a_step(tiny: TinyModels) -> None:
    """Prompts computed in chunks of both models, while others decode."""
    async with Service(
        tiny.target,
        tiny.drafts["noised"],
        target_engine=TargetEngineConfig(
            max_num_seqs=16, max_num_batched_tokens=48, num_speculative_tokens=4, ngram=NO_LOOKUP
        ),
        draft_engine=DraftEngineConfig(max_num_seqs=16, max_num_batched_tokens=32),
    ) as service:
        prompts = [[3, 4], *([(7 * i + n) % 256 for i in range(n)] for n in (47, 48, 49, 200, 301))]
        answers = await service.stream_all(*(greedy(prompt, 60) for prompt in prompts))
        assert [answer.token_ids for answer in answers] == [
            tiny.reference.greedy(prompt, 60) for prompt in prompts
        ]
        drafted = sum(answer.speculation.draft_tokens > 0 for answer in answers)
        exercised(drafted >= len(answers) / 2, "the draft serves prompts of several lengths")
