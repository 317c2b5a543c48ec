from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.cluster.errors import ModelNotFoundError, UnavailableError
from paceline.cluster.generation import TextAssembler
from paceline.cluster.sequence import CommittedTokens
from paceline.cluster.service import GenerationLogic, ServiceInfo
from paceline.cluster.tokenization import EmulatedCodec
from paceline.protos import generation_pb2 as proto
from tests.cluster.scripted import PlayingLink, ScriptedTargets, settle

CODEC = EmulatedCodec(256)
KOREAN = "한국어 🎉 ok"


def tokens(token_ids: bytes | list[int]) -> CommittedTokens:
    return CommittedTokens(tuple(token_ids), (True,) * len(token_ids))


class Service:
    """The whole gateway on one target that copies ``text``, ``round_size`` tokens a step."""

    def __init__(
        self,
        text: str,
        round_size: int = 1,
        max_model_len: int | None = None,
        codec: EmulatedCodec = CODEC,
    ) -> None:
        class Link(PlayingLink):
            tape = text.encode()

        Link.round_size = round_size

        class Targets(ScriptedTargets):
            link_class = Link

        self.targets = Targets()
        self.logic = GenerationLogic(
            self.targets.gateway, codec, ServiceInfo("toy", "small", max_model_len, version="1")
        )

    async def __aenter__(self) -> Service:
        await self.targets.attach("a")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        snapshot = self.targets.gateway.snapshot()
        assert snapshot.num_live == 0
        assert all(load.own_in_flight == 0 for load in snapshot.targets)
        self.logic.close()
        await self.targets.gateway.close()

    @property
    def link(self) -> PlayingLink:
        link = self.targets.links["a"]
        assert isinstance(link, PlayingLink)
        return link


def request(max_tokens: int = 60, stop: tuple[str, ...] = (), **stopping: int) -> proto.GenerateRequest:
    return proto.GenerateRequest(
        prompt="p",
        request_id="mine",
        sampling=proto.SamplingParams(seed=3),
        stopping=proto.StoppingParams(max_tokens=max_tokens, stop=stop, **stopping),
    )


async def both(
    text: str, round_size: int, message: proto.GenerateRequest
) -> tuple[proto.GenerateResponse, list[proto.GenerateChunk]]:
    async with Service(text, round_size) as service:
        response = await service.logic.generate(message)
        chunks = [chunk async for chunk in service.logic.generate_stream(message)]
    (choice,) = response.choices
    assert "".join(chunk.text for chunk in chunks) == choice.text
    assert [i for chunk in chunks for i in chunk.token_ids] == choice.token_ids
    assert all(len(chunk.accepted) == len(chunk.token_ids) for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [0] * (len(chunks) - 1)
    last = chunks[-1]
    assert (last.finish_reason, last.usage, last.seed) == (
        choice.finish_reason,
        response.usage,
        response.seed,
    )
    assert response.usage.completion_tokens == len(choice.token_ids)
    assert {chunk.request_id for chunk in chunks} == {"mine"}
    return response, chunks


# ---------------------------------------------------------------- text


@pytest.mark.parametrize("round_size", [1, 2, 3, 9])
async def test_multi_byte_text_at_any_round_size(round_size: int) -> None:
    length = len(KOREAN.encode())
    response, chunks = await both(KOREAN, round_size, request(max_tokens=length))
    assert response.choices[0].text == KOREAN
    assert response.choices[0].finish_reason == proto.FINISH_REASON_LENGTH
    assert all("\ufffd" not in chunk.text for chunk in chunks)
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (1, length)


@pytest.mark.parametrize("max_tokens", range(1, 12))
async def test_max_tokens_that_cuts_a_character(max_tokens: int) -> None:
    response, _ = await both(KOREAN, 4, request(max_tokens=max_tokens))
    assert response.choices[0].text == CODEC.decode(list(KOREAN.encode()[:max_tokens]))
    assert response.usage.completion_tokens == max_tokens


@pytest.mark.parametrize("round_size", [1, 3, 17])
@pytest.mark.parametrize("offset", range(16))
async def test_a_stop_string_anywhere_in_a_round(round_size: int, offset: int) -> None:
    text = "a" * offset + "X" + "b" * 30
    response, _ = await both(text, round_size, request(stop=("X",)))
    choice = response.choices[0]
    assert (choice.text, choice.finish_reason) == ("a" * offset, proto.FINISH_REASON_STOP)
    assert bytes(choice.token_ids) == text.encode()[: offset + 1]
    assert response.usage.completion_tokens == offset + 1


@pytest.mark.parametrize("round_size", [1, 2, 5, 50])
async def test_no_part_of_a_stop_string_is_streamed(round_size: int) -> None:
    response, chunks = await both("one ENtwo END three", round_size, request(stop=("END",)))
    assert response.choices[0].text == "one ENtwo "
    assert all("END" not in chunk.text for chunk in chunks)


@pytest.mark.parametrize("round_size", [1, 4])
async def test_what_was_held_back_comes_at_the_end(round_size: int) -> None:
    response, _ = await both("the end", round_size, request(max_tokens=7, stop=("endZZZ",)))
    assert response.choices[0].text == "the end"
    assert response.choices[0].finish_reason == proto.FINISH_REASON_LENGTH


async def test_a_stop_string_of_multi_byte_characters() -> None:
    response, _ = await both("ok 日本 more", 2, request(stop=("本",)))
    assert response.choices[0].text == "ok 日"


async def test_a_stop_string_cancels_the_target_and_keeps_its_statistics() -> None:
    async with Service("abcXdef", 2) as service:
        response = await service.logic.generate(request(stop=("X",)))
        assert len(service.link.cancels) == 1
        assert response.choices[0].finish_reason == proto.FINISH_REASON_STOP


async def test_a_stop_string_in_the_last_tokens_is_a_stop() -> None:
    response, chunks = await both("abX", 3, request(max_tokens=3, stop=("X",)))
    assert len(chunks) == 1
    assert response.choices[0].finish_reason == proto.FINISH_REASON_STOP
    assert response.choices[0].text == "ab"
    assert response.speculation.rounds == 1


async def test_a_stop_string_that_only_the_cut_end_completes() -> None:
    response, _ = await both("ab한", 3, request(max_tokens=3, stop=("b\ufffd",)))
    assert response.choices[0].text == "a"
    assert response.choices[0].finish_reason == proto.FINISH_REASON_STOP


async def test_a_stop_token_ends_inside_a_round() -> None:
    message = request(stop_token_ids=[ord("c")])  # type: ignore[arg-type]
    response, _ = await both("abcdef", 5, message)
    assert bytes(response.choices[0].token_ids) == b"abc"
    assert response.choices[0].finish_reason == proto.FINISH_REASON_STOP


async def test_stop_strings_do_not_count_before_min_tokens() -> None:
    response, _ = await both("aXbXcX", 3, request(stop=("X",), min_tokens=3))
    assert response.choices[0].text == "aXb"
    assert response.usage.completion_tokens == 4


@given(st.binary(max_size=30), st.lists(st.integers(0, 6), max_size=10))
def test_assembled_text_does_not_depend_on_the_rounds(data: bytes, sizes: list[int]) -> None:
    def assemble(rounds: list[bytes]) -> tuple[str, int]:
        assembler = TextAssembler(CODEC, ("aa", "b\ufffd"), min_tokens=2)
        text = ""
        for part in rounds:
            text += assembler.push(tokens(part)).text
            if assembler.stopped:
                return text, assembler.num_tokens
        return text + assembler.flush(), assembler.num_tokens

    rounds, start = [], 0
    for size in sizes:
        rounds.append(data[start : start + size])
        start += size
    assert assemble([*rounds, data[start:]]) == assemble([data[i : i + 1] for i in range(len(data))])


async def test_chunks_hold_all_that_was_committed_since_the_last_one() -> None:
    async with Service("abcdefghij", 5) as service:
        stream = service.logic.generate_stream(request(max_tokens=10))
        chunks = [chunk async for chunk in stream]
    assert [chunk.text for chunk in chunks] == ["abcde", "fghij"]


# ---------------------------------------------------------------- requests


async def test_errors_reach_the_caller_and_leave_nothing_behind() -> None:
    async with Service("abc") as service:
        for message, error, text in [
            (proto.GenerateRequest(model="other", prompt="x"), ModelNotFoundError, "other"),
            (proto.GenerateRequest(prompt=""), InvalidArgumentError, "prompt"),
            (request(max_tokens=64), InvalidArgumentError, r"\[1, 63\]"),
            (proto.GenerateRequest(token_ids=proto.TokenIds(ids=[256])), InvalidArgumentError, r"\[0, 255\]"),
            (
                proto.GenerateRequest(conversation=proto.Conversation(messages=[proto.Message(role="user")])),
                InvalidArgumentError,
                "no chat template",
            ),
        ]:
            with pytest.raises(error, match=text):
                await service.logic.generate(message)
            with pytest.raises(error, match=text):
                await anext(service.logic.generate_stream(message))
        assert service.link.submits == []


async def test_the_configured_length_bounds_the_models() -> None:
    async with Service("abc", max_model_len=10) as service:
        with pytest.raises(InvalidArgumentError, match=r"\[1, 9\]"):
            await service.logic.generate(request(max_tokens=10))
        response = await service.logic.generate(proto.GenerateRequest(prompt="p"))
        assert response.usage.completion_tokens == 9


async def test_without_targets_a_request_is_unavailable() -> None:
    service = Service("abc")
    with pytest.raises(UnavailableError, match="no target is ready"):
        await service.logic.generate(request())
    info = await service.logic.get_model_info(proto.GetModelInfoRequest())
    assert info.num_targets == 0
    service.logic.close()


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_a_caller_that_leaves_frees_the_sequence(how: str) -> None:
    async with Service("abc") as service:
        stream = service.logic.generate_stream(proto.GenerateRequest(prompt="p"))
        if how == "closed":
            async with aclosing(stream):
                assert (await anext(stream)).text == "a"
        else:
            started = asyncio.Event()

            async def read() -> None:
                async for _ in stream:
                    started.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(read())
            await started.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await stream.aclose()
        assert len(service.link.cancels) == 1
        assert service.link.steps < 60


async def test_a_cancelled_unary_call_frees_the_sequence() -> None:
    async with Service("abc") as service:
        task = asyncio.create_task(service.logic.generate(proto.GenerateRequest(prompt="p")))
        await settle()
        assert len(service.link.submits) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(service.link.cancels) == 1


async def test_the_drawn_seed_is_returned() -> None:
    async with Service("abc") as service:
        message = proto.GenerateRequest(prompt="p", stopping=proto.StoppingParams(max_tokens=1))
        response = await service.logic.generate(message)
        assert response.seed == service.link.submits[0].sampling.seed != 0
        assert response.request_id


async def test_tokenize_and_model_info() -> None:
    async with Service("abc") as service:
        answer = await service.logic.tokenize(proto.TokenizeRequest(prompt="né"))
        assert list(answer.token_ids) == [110, 195, 169]
        assert list(answer.tokens) == ["n", "\ufffd", "\ufffd"]
        with pytest.raises(ModelNotFoundError):
            await service.logic.tokenize(proto.TokenizeRequest(model="other", prompt="n"))
        info = await service.logic.get_model_info(proto.GetModelInfoRequest(model="toy"))
        assert (info.model, info.draft_model, info.version) == ("toy", "small", "1")
        assert (info.max_model_len, info.vocab_size, info.num_targets) == (64, 256, 1)
        assert info.verification == proto.VERIFICATION_RULE_COUPLED


class WatchedCodec(EmulatedCodec):
    """Remembers which threads tokenised."""

    def __init__(self) -> None:
        super().__init__(256)
        self.threads: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread().name)
        return super().encode(text)


@pytest.mark.parametrize(("size", "thread"), [(100, "MainThread"), (20_000, "tokenizer_0")])
async def test_a_long_prompt_is_tokenised_off_the_event_loop(size: int, thread: str) -> None:
    codec = WatchedCodec()
    async with Service("abc", codec=codec) as service:
        await service.logic.tokenize(proto.TokenizeRequest(prompt="x" * size))
    assert set(codec.threads) == {thread}


async def test_what_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    codec = WatchedCodec()
    async with Service("abc", max_model_len=64, codec=codec) as service:
        with pytest.raises(InvalidArgumentError, match="prompt: has 20000 characters"):
            await service.logic.generate(proto.GenerateRequest(prompt="x" * 20_000))
        messages = [proto.Message(role="user")] * 5000
        with pytest.raises(InvalidArgumentError, match=r"messages: may have at most 4096 messages, got 5000"):
            await service.logic.generate(
                proto.GenerateRequest(conversation=proto.Conversation(messages=messages))
            )
    assert codec.threads == []
