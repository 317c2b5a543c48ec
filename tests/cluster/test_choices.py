"""Requests of several choices, and log probabilities, as the caller sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.messages import Submit
from paceline.actors.engine.noise import derive_seed
from paceline.actors.engine.parameters import FinishReason
from paceline.cluster.service import GenerationLogic, ServiceInfo
from paceline.cluster.tokenization import EmulatedCodec
from paceline.protos import generation_pb2 as proto
from tests.cluster.scripted import PlayingLink, ScriptedTargets, logprobs_at, settle

CODEC = EmulatedCodec(256)
SEED = 3
TEXTS = ("only X said", "quite another text, of more tokens", "yet", "한국어 X")
SEEDS = [derive_seed(SEED, index) for index in range(len(TEXTS))]


class Link(PlayingLink):
    """Says a text of its own for each choice."""

    round_size = 3

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rounds: list[int] = []

    def finish(self, *args: Any, **options: Any) -> None:
        self.rounds.append(options.get("rounds", 0))
        super().finish(*args, **options)

    def tape_of(self, submit: Submit) -> Sequence[int]:
        return TEXTS[SEEDS.index(submit.sampling.seed)].encode()


class Service:
    def __init__(self) -> None:
        class Targets(ScriptedTargets):
            link_class = Link

        self.targets = Targets()
        self.logic = GenerationLogic(self.targets.gateway, CODEC, ServiceInfo("toy"))

    async def __aenter__(self) -> Service:
        await self.targets.attach("a")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self.targets.gateway.snapshot().num_live == 0
        assert all(load.own_in_flight == 0 for load in self.targets.gateway.snapshot().targets)
        self.logic.close()
        await self.targets.gateway.close()
        # No task of any choice is left.
        await settle()
        assert len(asyncio.all_tasks()) == 1

    @property
    def link(self) -> Link:
        link = self.targets.links["a"]
        assert isinstance(link, Link)
        return link


def request(
    n: int, max_tokens: int = 8, stop: Sequence[str] = (), logprobs: int | None = None, seed: int = SEED
) -> proto.GenerateRequest:
    return proto.GenerateRequest(
        prompt="pq",
        sampling=proto.SamplingParams(seed=seed, n=n),
        stopping=proto.StoppingParams(max_tokens=max_tokens, stop=stop),
        logprobs=logprobs,
    )


async def test_choices_are_ordered_and_counted() -> None:
    async with Service() as service:
        response = await service.logic.generate(request(3, max_tokens=5, stop=["X"]))
        rounds = sum(service.link.rounds)
        alone = [await service.logic.generate(request(1, 5, ["X"], seed=seed)) for seed in SEEDS[:3]]
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert [choice.text for choice in response.choices] == ["only ", "quite", "yettt"]
    for choice, other in zip(response.choices, alone, strict=True):
        other.choices[0].index = choice.index
        assert choice == other.choices[0]
    assert response.seed == SEED
    assert response.usage == proto.Usage(prompt_tokens=2, completion_tokens=3 * 5)
    assert rounds > 0
    assert (response.speculation.rounds, response.speculation.draft_tokens) == (rounds, 2 * rounds)
    assert response.speculation.mean_acceptance_length == 2.0


async def test_a_stream_interleaves_choices_and_ends_each_of_them() -> None:
    async with Service() as service:
        chunks = [chunk async for chunk in service.logic.generate_stream(request(4, 9, ["X"]))]
        response = await service.logic.generate(request(4, 9, ["X"]))
    order = [chunk.index for chunk in chunks]
    # All of them speak in turn, not one after the other.
    assert order[:4] == [0, 1, 2, 3]
    last = {chunk.index: chunk for chunk in chunks}
    for choice in response.choices:
        mine = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in mine) == choice.text
        assert [token_id for chunk in mine for token_id in chunk.token_ids] == choice.token_ids
        assert [bool(chunk.finish_reason) for chunk in mine] == [False] * (len(mine) - 1) + [True]
        end = last[choice.index]
        assert end.finish_reason == choice.finish_reason
        assert end.usage == proto.Usage(prompt_tokens=2, completion_tokens=len(choice.token_ids))
        assert end.seed == SEEDS[choice.index]
        assert not any(chunk.HasField("usage") or chunk.seed for chunk in mine[:-1])
    assert len({chunk.request_id for chunk in chunks}) == 1
    assert response.choices[0].finish_reason == proto.FINISH_REASON_STOP
    assert response.choices[1].finish_reason == proto.FINISH_REASON_LENGTH
    assert response.usage.completion_tokens == sum(len(choice.token_ids) for choice in response.choices)


@pytest.mark.parametrize("how", ["closed", "cancelled", "unary cancelled"])
async def test_a_caller_that_leaves_frees_every_choice(how: str) -> None:
    async with Service() as service:
        message = request(4, max_tokens=60)

        async def read() -> None:
            async with aclosing(service.logic.generate_stream(message)) as chunks:
                async for _ in chunks:
                    if how == "closed":
                        return
                    await asyncio.Event().wait()

        async def call() -> None:
            await service.logic.generate(message)

        task = asyncio.create_task(call() if how == "unary cancelled" else read())
        await settle()
        if how != "closed":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(service.link.submits) == 4
        assert {c.sequence_id for c in service.link.cancels} == {s.sequence_id for s in service.link.submits}


@pytest.mark.parametrize("unary", [True, False])
async def test_one_choice_that_fails_fails_the_call_and_frees_the_others(unary: bool) -> None:
    async with Service() as service:

        async def call() -> None:
            if unary:
                await service.logic.generate(request(3, max_tokens=60))
            else:
                async for _ in service.logic.generate_stream(request(3, max_tokens=60)):
                    pass

        task = asyncio.create_task(call())
        await settle()
        link = service.link
        link.finish(link.submits[1], FinishReason.ERROR, error="sampling.seed: is bad luck", invalid=True)
        with pytest.raises(InvalidArgumentError, match="bad luck"):
            await task
        cancelled = {cancel.sequence_id for cancel in link.cancels}
        assert cancelled == {link.submits[0].sequence_id, link.submits[2].sequence_id}


# ---------------------------------------------------------------- log probabilities


@pytest.mark.parametrize("num_top", [0, 2])
async def test_logprobs_are_cut_with_the_tokens(num_top: int) -> None:
    """At a stop string inside a round, at max_tokens, and in stream and response alike."""
    message = request(4, 7, ["X"], logprobs=num_top)
    async with Service() as service:
        response = await service.logic.generate(message)
        chunks = [chunk async for chunk in service.logic.generate_stream(message)]
    for choice in response.choices:
        assert len(choice.logprobs) == len(choice.token_ids)
        mine = [chunk for chunk in chunks if chunk.index == choice.index]
        assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in mine)
        assert [entry for chunk in mine for entry in chunk.logprobs] == list(choice.logprobs)
        for position, (token_id, entry) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True), 2):
            expected = logprobs_at(position, token_id, num_top)
            assert (entry.chosen.token_id, entry.chosen.logprob) == (token_id, expected.logprob)
            assert [(item.token_id, item.logprob) for item in entry.top] == list(expected.top)
            assert entry.chosen.text == CODEC.token_text(token_id)
            assert all(item.text == CODEC.token_text(item.token_id) for item in entry.top)
    first = response.choices[0]
    texts = "".join(entry.chosen.text for entry in first.logprobs)
    assert (first.text, texts) == ("only ", "only X")


async def test_without_being_asked_nobody_gets_logprobs() -> None:
    async with Service() as service:
        response = await service.logic.generate(request(2))
        assert all(submit.logprobs is None for submit in service.link.submits)
    assert not any(choice.logprobs for choice in response.choices)
