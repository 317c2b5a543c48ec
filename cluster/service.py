"""The public contract, served by a gateway and a codec. The deployment around it only translates errors
(``cluster.errors.status_of``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass

from paceline.actors.engine.parameters import VerificationRule
from paceline.actors.wire import finish_reason_to_proto, speculation_stats_to_proto
from paceline.cluster.errors import UnavailableError
from paceline.cluster.gateway import Gateway
from paceline.cluster.generation import Piece, generate_pieces
from paceline.cluster.requests import (
    CheckedRequest,
    GenerationInput,
    ServedModel,
    check_input,
    check_model,
    check_parameters,
    check_request,
)
from paceline.cluster.sequence import SequenceResult
from paceline.cluster.tokenization import TextCodec
from paceline.protos import generation_pb2 as proto

INLINE_CHARACTERS = 8192
"""Longer inputs are tokenised on a thread, so that they do not hold up other requests' streams."""

_RULES = {
    VerificationRule.COUPLED: proto.VERIFICATION_RULE_COUPLED,
    VerificationRule.STANDARD: proto.VERIFICATION_RULE_STANDARD,
    VerificationRule.BLOCK: proto.VERIFICATION_RULE_BLOCK,
}


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
    Cancelling a call, or closing its iterator, frees what it holds on the target.
    """

    def __init__(self, gateway: Gateway, codec: TextCodec, info: ServiceInfo) -> None:
        self._gateway = gateway
        self._codec = codec
        self._info = info
        # One thread: a tokenizer is not promised to be safe for use by several.
        self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def generate(self, message: proto.GenerateRequest) -> proto.GenerateResponse:
        request = await self._check(message)
        texts: list[str] = []
        choice = proto.Choice(index=0)
        response = proto.GenerateResponse(
            request_id=request.request_id, model=self._info.model, seed=request.sampling.seed
        )
        async with aclosing(generate_pieces(self._gateway, request, self._codec)) as pieces:
            async for piece in pieces:
                texts.append(piece.text)
                choice.token_ids.extend(piece.token_ids)
                if piece.result is not None:
                    choice.finish_reason = finish_reason_to_proto(piece.result.reason)
                    response.usage.CopyFrom(_usage(request, len(choice.token_ids), piece.result))
                    response.speculation.CopyFrom(speculation_stats_to_proto(piece.result.speculation))
        choice.text = "".join(texts)
        response.choices.append(choice)
        return response

    async def generate_stream(
        self, message: proto.GenerateRequest
    ) -> AsyncGenerator[proto.GenerateChunk, None]:
        """Chunks, each with everything that was committed since the last one. A chunk may have token ids
        and no text yet (a character that is not complete, a possible beginning of a stop string)."""
        request = await self._check(message)
        num_tokens = 0
        async with aclosing(generate_pieces(self._gateway, request, self._codec)) as pieces:
            async for piece in pieces:
                num_tokens += len(piece.token_ids)
                yield _chunk(request, piece, num_tokens)

    async def tokenize(self, message: proto.TokenizeRequest) -> proto.TokenizeResponse:
        check_model(message.model, self._info.model)
        token_ids = await self._encode(check_input(message))
        return proto.TokenizeResponse(
            token_ids=token_ids, tokens=[self._codec.token_text(token_id) for token_id in token_ids]
        )

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
            verification=_RULES[self._info.rule],
            version=self._info.version,
            num_targets=len(identities),
        )

    def close(self) -> None:
        """Give the tokenizer's thread back. The gateway is its owner's to close."""
        self._tokenizer_thread.shutdown(wait=False, cancel_futures=True)

    async def _check(self, message: proto.GenerateRequest) -> CheckedRequest:
        check_model(message.model, self._info.model)
        check_parameters(message)
        token_ids = await self._encode(check_input(message))
        return check_request(message, token_ids, await self._served_model())

    async def _served_model(self) -> ServedModel:
        """What every target at hand can serve, so that a request can move between them."""
        identities = await self._gateway.identities()
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

    async def _encode(self, source: GenerationInput) -> list[int]:
        if source.token_ids is not None:
            return list(source.token_ids)
        if source.conversation is not None:
            messages = source.conversation
            return await self._run(
                sum(len(message.content) for message in messages),
                lambda: self._codec.encode_conversation(messages),
            )
        prompt = source.prompt or ""
        return await self._run(len(prompt), lambda: self._codec.encode(prompt))

    async def _run(self, num_characters: int, encode: Callable[[], list[int]]) -> list[int]:
        if num_characters <= INLINE_CHARACTERS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, encode)


def _chunk(request: CheckedRequest, piece: Piece, num_tokens: int) -> proto.GenerateChunk:
    chunk = proto.GenerateChunk(
        request_id=request.request_id,
        index=0,
        text=piece.text,
        token_ids=piece.token_ids,
        accepted=piece.accepted,
    )
    if piece.result is not None:
        chunk.finish_reason = finish_reason_to_proto(piece.result.reason)
        chunk.usage.CopyFrom(_usage(request, num_tokens, piece.result))
        chunk.speculation.CopyFrom(speculation_stats_to_proto(piece.result.speculation))
        chunk.seed = request.sampling.seed
    return chunk


def _usage(request: CheckedRequest, num_tokens: int, result: SequenceResult) -> proto.Usage:
    return proto.Usage(
        prompt_tokens=len(request.prompt_token_ids),
        completion_tokens=num_tokens,
        cached_prompt_tokens=result.cached_prompt_tokens,
    )
