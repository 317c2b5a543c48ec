"""The public contract, served by a gateway and a codec. The deployment around it only translates errors
(``cluster.errors.status_of``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from paceline.actors.engine.parameters import SpeculationStats, VerificationRule
from paceline.actors.grammar import check_grammar
from paceline.actors.wire import finish_reason_to_proto, rule_to_proto, speculation_stats_to_proto
from paceline.cluster.errors import UnavailableError
from paceline.cluster.gateway import Gateway
from paceline.cluster.generation import Piece, generate_pieces
from paceline.cluster.latency import Observe, RequestTimer
from paceline.cluster.request_parameters import constraint_of
from paceline.cluster.requests import (
    CheckedRequest,
    GenerationInput,
    ServedModel,
    check_input,
    check_model,
    check_parameters,
    check_request,
    check_size,
)
from paceline.cluster.sequence import SequenceResult
from paceline.cluster.time_limit import TimeLimit, time_limit
from paceline.cluster.token_texts import TokenTexts
from paceline.cluster.tokenization import TextCodec
from paceline.protos import generation_pb2 as proto

INLINE_SIZE = 8192
"""Larger inputs are tokenised on a thread, so that they do not hold up other requests' streams."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class ServiceInfo:
    """What the configuration says of the service."""

    model: str
    """Name that requests use."""
    draft_model: str = ""
    """Empty without a draft pool."""
    max_model_len: int | None = None
    """None: what the targets' model allows."""
    rule: VerificationRule = VerificationRule.COUPLED
    version: str = ""


class GenerationLogic:
    """``paceline.v1.GenerationService`` without its transport.

    Every method raises ``RequestError`` or ``InvalidArgumentError`` for a request that cannot be served.
    Cancelling a call, or closing its iterator, frees what it holds on the target. A request's time limit
    counts from ``arrived_at`` (by the event loop's clock; None = now).
    """

    def __init__(
        self, gateway: Gateway, codec: TextCodec, info: ServiceInfo, observe: Observe | None = None
    ) -> None:
        self._gateway = gateway
        self._codec = codec
        self._info = info
        self._observe = observe
        self._texts = TokenTexts(codec)
        # One thread: a tokenizer is not promised to be safe for use by several.
        self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        # Of their own: a crowd of dear constraints holds up nothing but one another.
        self._constraint_threads = ThreadPoolExecutor(2, thread_name_prefix="constraint")

    def time_limit(self, message: proto.GenerateRequest, arrived_at: float | None = None) -> TimeLimit | None:
        """How long the request may take; None = for ever."""
        return time_limit(message, self._gateway.request_timeout_seconds, _now_unless(arrived_at))

    async def generate(
        self, message: proto.GenerateRequest, arrived_at: float | None = None
    ) -> proto.GenerateResponse:
        timer = RequestTimer(_now_unless(arrived_at), self._observe)
        request = await self._check(message, arrived_at)
        choices = [proto.Choice(index=index) for index in range(request.n)]
        texts: list[list[str]] = [[] for _ in choices]
        results: dict[int, SequenceResult] = {}
        async with aclosing(generate_pieces(self._gateway, request, self._codec)) as pieces:
            async for index, piece in pieces:
                timer.note(index, len(piece.token_ids), ended=piece.result is not None)
                choice = choices[index]
                texts[index].append(piece.text)
                choice.token_ids.extend(piece.token_ids)
                choice.logprobs.extend(self._texts.logprobs(piece.token_ids, piece.logprobs))
                if piece.result is not None:
                    choice.finish_reason = finish_reason_to_proto(piece.result.reason)
                    results[index] = piece.result
        for choice, parts in zip(choices, texts, strict=True):
            choice.text = "".join(parts)
        speculation = SpeculationStats()
        for result in results.values():
            speculation.add(result.speculation)
        return proto.GenerateResponse(
            request_id=request.request_id,
            model=self._info.model,
            choices=choices,
            usage=proto.Usage(
                prompt_tokens=len(request.prompt_token_ids),
                completion_tokens=sum(len(choice.token_ids) for choice in choices),
                # What no choice had to compute: choices find the prompt of those before them.
                cached_prompt_tokens=min(result.cached_prompt_tokens for result in results.values()),
            ),
            speculation=speculation_stats_to_proto(speculation),
            seed=request.sampling.seed,
        )

    async def generate_stream(
        self, message: proto.GenerateRequest, arrived_at: float | None = None
    ) -> AsyncGenerator[proto.GenerateChunk, None]:
        """Chunks, each with everything that was committed for its choice since that choice's last one. A
        chunk may have token ids and no text yet (a character that is not complete, a possible beginning of
        a stop string)."""
        timer = RequestTimer(_now_unless(arrived_at), self._observe)
        request = await self._check(message, arrived_at)
        num_tokens = [0] * request.n
        async with aclosing(generate_pieces(self._gateway, request, self._codec)) as pieces:
            async for index, piece in pieces:
                timer.note(index, len(piece.token_ids), ended=piece.result is not None)
                num_tokens[index] += len(piece.token_ids)
                yield self._chunk(request, index, piece, num_tokens[index])

    async def tokenize(self, message: proto.TokenizeRequest) -> proto.TokenizeResponse:
        check_model(message.model, self._info.model)
        source = check_input(message)
        return await self._run(source.size, lambda: self._tokenize(source))

    def _tokenize(self, source: GenerationInput) -> proto.TokenizeResponse:
        token_ids = self._encode(source)
        tokens = [self._codec.token_text(token_id) for token_id in token_ids]
        return proto.TokenizeResponse(token_ids=token_ids, tokens=tokens)

    async def get_model_info(self, message: proto.GetModelInfoRequest) -> proto.GetModelInfoResponse:
        """Works without a target too; ``max_model_len`` is then the configured one, or 0."""
        check_model(message.model, self._info.model)
        identities = await self._gateway.identities()
        lengths = [identity.max_model_len for identity in identities]
        if self._info.max_model_len is not None:
            lengths.append(self._info.max_model_len)
        return proto.GetModelInfoResponse(
            model=self._info.model,
            max_model_len=min(lengths, default=0),
            vocab_size=self._codec.vocab_size,
            eos_token_ids=self._codec.eos_token_ids,
            has_chat_template=self._codec.has_chat_template,
            draft_model=self._info.draft_model,
            verification=rule_to_proto(self._info.rule),
            version=self._info.version,
            num_targets=len(identities),
        )

    def close(self) -> None:
        """Give the threads back. The gateway is its owner's to close."""
        for threads in (self._tokenizer_thread, self._constraint_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _check(self, message: proto.GenerateRequest, arrived_at: float | None) -> CheckedRequest:
        check_model(message.model, self._info.model)
        check_parameters(message)
        limit = self.time_limit(message, arrived_at)
        if (constraint := constraint_of(message)) is not None:
            # Takes milliseconds, some seconds at the worst, and no vocabulary: what only that can tell
            # (names of special tokens in a grammar) is said by the target.
            await asyncio.get_running_loop().run_in_executor(
                self._constraint_threads, check_grammar, constraint
            )
        source = check_input(message)
        model = await self._served_model(limit)
        check_size(source, model, self._codec.max_token_characters)
        token_ids = await self._run(source.size, lambda: self._encode(source))
        return check_request(message, token_ids, model, limit)

    async def _served_model(self, limit: TimeLimit | None) -> ServedModel:
        """What every target at hand can serve, so that a request can move between them."""
        try:
            async with asyncio.timeout_at(None if limit is None else limit.deadline):
                identities = await self._gateway.awake_identities()
        except TimeoutError:
            if limit is None:
                raise
            raise limit.exceeded() from None
        lengths = [min(item.max_model_len, item.kv_capacity_tokens) for item in identities]
        if self._info.max_model_len is not None:
            lengths.append(self._info.max_model_len)
        if not lengths:
            raise UnavailableError("no target is ready; try again in a while")
        return ServedModel(
            name=self._info.model,
            vocab_size=min([self._codec.vocab_size, *(item.vocab_size for item in identities)]),
            max_model_len=min(lengths),
            eos_token_ids=self._codec.eos_token_ids,
            rule=self._info.rule,
        )

    def _encode(self, source: GenerationInput) -> list[int]:
        if source.token_ids is not None:
            return list(source.token_ids)
        if source.conversation is not None:
            return self._codec.encode_conversation(source.conversation)
        return self._codec.encode(source.prompt or "")

    async def _run(self, size: int, work: Callable[[], Result]) -> Result:
        """Small work here and now; what is large on the tokenizer's thread, unless the caller has left."""
        if size <= INLINE_SIZE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, work)

    def _chunk(
        self, request: CheckedRequest, index: int, piece: Piece, num_tokens: int
    ) -> proto.GenerateChunk:
        chunk = proto.GenerateChunk(
            request_id=request.request_id,
            index=index,
            text=piece.text,
            token_ids=piece.token_ids,
            logprobs=self._texts.logprobs(piece.token_ids, piece.logprobs),
            accepted=piece.accepted,
        )
        if piece.result is not None:
            chunk.finish_reason = finish_reason_to_proto(piece.result.reason)
            chunk.usage.prompt_tokens = len(request.prompt_token_ids)
            chunk.usage.completion_tokens = num_tokens
            chunk.usage.cached_prompt_tokens = piece.result.cached_prompt_tokens
            chunk.speculation.CopyFrom(speculation_stats_to_proto(piece.result.speculation))
            chunk.seed = request.choice(index).sampling.seed
        return chunk


def _now_unless(arrived_at: float | None) -> float:
    """By the event loop's clock."""
    return asyncio.get_running_loop().time() if arrived_at is None else arrived_at
