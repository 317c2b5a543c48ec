"""From committed tokens to what a caller reads: text, exact stops, chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace

from paceline.actors.engine.messages import TokenLogprobs
from paceline.actors.engine.parameters import FinishReason
from paceline.cluster.gateway import Gateway
from paceline.cluster.merging import merged
from paceline.cluster.requests import CheckedRequest
from paceline.cluster.sequence import CommittedTokens, SequenceResult
from paceline.cluster.sequence_stream import SequenceStream
from paceline.cluster.stop_strings import StopStringMatcher
from paceline.cluster.tokenization import TextCodec


@dataclass(frozen=True, slots=True)
class Piece:
    """Newly committed tokens and the text that became final with them."""

    text: str
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token where the request asks for them, else none."""
    result: SequenceResult | None = None
    """Set on the last piece only."""


class TextAssembler:
    """Text of one choice, cut at the first stop string.

    Token ids, log probabilities, text and usage are cut together: the ids end with the token that completed
    the stop string (its text may reach past the returned text, never the other way round). A stop string
    that is complete before ``min_tokens`` tokens are there does not count.

    What comes in ends at the first stop token or at ``max_tokens`` already. Tokens are looked at one by one,
    so that for each of them the stop strings come first, then stop tokens, then ``max_tokens``.
    """

    def __init__(self, codec: TextCodec, stop_strings: tuple[str, ...], min_tokens: int) -> None:
        self._detokenizer = codec.detokenizer()
        self._matcher = StopStringMatcher(stop_strings) if stop_strings else None
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to the choice so far."""
        return self._num_tokens

    @property
    def stopped(self) -> bool:
        """A stop string is complete."""
        return self._matcher is not None and self._matcher.stopped

    def push(self, tokens: CommittedTokens) -> Piece:
        """Take committed tokens; the piece holds those up to a stop string's end."""
        if self._matcher is None:
            self._num_tokens += len(tokens.token_ids)
            text = self._detokenizer.push(tokens.token_ids)
            return Piece(text, tokens.token_ids, tokens.accepted, tokens.logprobs)
        texts: list[str] = []
        taken = 0
        for token_id in tokens.token_ids:
            self._num_tokens += 1
            taken += 1
            text, stopped = self._matcher.feed(
                self._detokenizer.push((token_id,)), armed=self._num_tokens >= self._min_tokens
            )
            texts.append(text)
            if stopped:
                break
        return Piece(
            "".join(texts), tokens.token_ids[:taken], tokens.accepted[:taken], tokens.logprobs[:taken]
        )

    def flush(self) -> str:
        """The rest of the text, once no more tokens come. A stop string may end in it."""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return rest
        text, stopped = self._matcher.feed(rest, armed=self._num_tokens >= self._min_tokens)
        return text if stopped else text + self._matcher.flush()


async def generate_pieces(
    gateway: Gateway, request: CheckedRequest, codec: TextCodec
) -> AsyncGenerator[tuple[int, Piece], None]:
    """Run one request: the pieces of all its choices as they come, each with its choice's index. A piece
    holds all that was committed since that choice's piece before; its last one has the result. It is over
    when all choices are.

    One choice that fails fails the request. Then, and also when the iterator is closed or its reader is
    cancelled, every sequence is freed on its target at once.

    Raises:
        RequestError, InvalidArgumentError: see ``cluster.errors``.
    """
    async with AsyncExitStack() as stack:
        streams = [stack.enter_context(stream) for stream in gateway.open_choices(request)]
        choices = [
            await stack.enter_async_context(aclosing(_choice_pieces(stream, request, codec)))
            for stream in streams
        ]
        if len(choices) == 1:
            async for piece in choices[0]:
                yield 0, piece
        else:
            async for numbered in await stack.enter_async_context(aclosing(merged(choices))):
                yield numbered


async def _choice_pieces(
    stream: SequenceStream, request: CheckedRequest, codec: TextCodec
) -> AsyncGenerator[Piece, None]:
    assembler = TextAssembler(codec, request.stop_strings, request.stopping.min_tokens)
    async for tokens in stream:
        piece = assembler.push(tokens)
        if assembler.stopped:
            if stream.ended:
                yield replace(piece, result=_stopped(stream.result))
            else:
                # The text is out at once; statistics follow when the target has given them.
                yield piece
                yield Piece("", (), (), result=await stream.stop())
            return
        if stream.ended:
            yield _last(assembler, piece, stream.result)
            return
        yield piece
    yield _last(assembler, Piece("", (), ()), stream.result)


def _last(assembler: TextAssembler, piece: Piece, result: SequenceResult) -> Piece:
    return replace(
        piece,
        text=piece.text + assembler.flush(),
        result=_stopped(result) if assembler.stopped else result,
    )


def _stopped(result: SequenceResult) -> SequenceResult:
    return SequenceResult(FinishReason.STOP, result.speculation, result.cached_prompt_tokens)
