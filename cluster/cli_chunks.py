"""Chunks of a stream on a terminal: colours by acceptance, choices one after the other, log probabilities."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator

import grpc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cluster.cli_request import reason_name, split_by_token
from paceline.protos import generation_pb2 as proto
from paceline.protos import generation_pb2_grpc as rpc

ACCEPTED_STYLE = "green"
OWN_STYLE = "yellow"


def chunk_printer(
    console: Console, stub: rpc.GenerationServiceStub, model: str, *, show_tokens: bool
) -> Callable[[proto.GenerateChunk], None]:
    """Prints each chunk as it comes: coloured by acceptance on a terminal, bare text elsewhere."""

    def show_plain(chunk: proto.GenerateChunk) -> None:
        sys.stdout.write(chunk.text)
        sys.stdout.flush()

    def show_coloured(chunk: proto.GenerateChunk) -> None:
        for piece, accepted in _pieces(stub, model, chunk):
            console.print(
                Text(piece, style=ACCEPTED_STYLE if accepted else OWN_STYLE), end="", soft_wrap=True
            )

    def show_ids(chunk: proto.GenerateChunk) -> None:
        for token_id, accepted in zip(chunk.token_ids, chunk.accepted, strict=False):
            style = ACCEPTED_STYLE if accepted else OWN_STYLE
            mark = "+" if accepted else "="
            console.print(Text(f"{mark}{token_id} ", style=style), end="", soft_wrap=True)

    if show_tokens:
        return show_ids
    return show_coloured if console.is_terminal and console.color_system else show_plain


def _pieces(
    stub: rpc.GenerationServiceStub, model: str, chunk: proto.GenerateChunk
) -> Iterator[tuple[str, bool]]:
    """A chunk's text as (piece, accepted). A chunk that mixes both is cut at its tokens, which the
    service's tokeniser is asked for; where the cut is not certain the piece counts as its majority."""
    accepted = list(chunk.accepted)
    if len(set(accepted)) > 1 and chunk.text:
        try:
            encoded = stub.Tokenize(proto.TokenizeRequest(model=model, prompt=chunk.text), timeout=5)
        except grpc.RpcError:
            encoded = proto.TokenizeResponse()
        texts = split_by_token(chunk.text, chunk.token_ids, encoded.token_ids, encoded.tokens)
        if texts is not None:
            yield from zip(texts, accepted, strict=True)
            return
    yield chunk.text, bool(accepted) and sum(accepted) * 2 >= len(accepted)


class ChoicePrinter:
    """Shows several choices one after the other, though they come interleaved: the first one that has not
    ended live, the others when it is their turn.

    Args:
        console: where results go.
        show: prints a chunk's tokens.
        several: whether to print a line above and below each choice.
    """

    def __init__(
        self, console: Console, show: Callable[[proto.GenerateChunk], None], *, several: bool
    ) -> None:
        self._console = console
        self._show = show
        self._several = several
        self._held: dict[int, list[proto.GenerateChunk]] = {}
        self._logprobs: list[proto.PositionLogprobs] = []
        self._current = 0
        self._begun = False
        self._finals: dict[int, proto.GenerateChunk] = {}

    @property
    def finals(self) -> list[proto.GenerateChunk]:
        """The last chunk of each choice that has ended, by index."""
        return [self._finals[index] for index in sorted(self._finals)]

    def __call__(self, chunk: proto.GenerateChunk) -> None:
        self._held.setdefault(chunk.index, []).append(chunk)
        while self._held.get(self._current):
            for ready in self._held.pop(self._current):
                self._print(ready)

    def _print(self, chunk: proto.GenerateChunk) -> None:
        if self._several and not self._begun:
            self._begun = True
            self._console.print(f"choice {self._current}", style="bold")
        self._show(chunk)
        self._logprobs.extend(chunk.logprobs)
        if chunk.finish_reason:
            self._end(chunk)

    def _end(self, chunk: proto.GenerateChunk) -> None:
        self._finals[self._current] = chunk
        self._console.print()
        if self._logprobs:
            self._console.print(logprobs_table(self._logprobs))
            self._logprobs = []
        if self._several:
            told = f"{chunk.usage.completion_tokens} tokens ({reason_name(chunk.finish_reason)})"
            self._console.print(f"{told} · seed {chunk.seed}\n", style="dim")
        self._current += 1
        self._begun = False


def logprobs_table(positions: Iterable[proto.PositionLogprobs]) -> Table:
    """One row for each token: its log probability, and the likeliest tokens in its place."""
    table = Table(box=None, pad_edge=False)
    table.add_column("token", no_wrap=True)
    for name in ("id", "logprob"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("likeliest")
    for position in positions:
        chosen = position.chosen
        likeliest = "  ".join(f"{entry.text!r} {entry.logprob:z.3f}" for entry in position.top)
        # Text, so that nothing in a token is taken for markup.
        cells = (repr(chosen.text), str(chosen.token_id), f"{chosen.logprob:z.3f}", likeliest)
        table.add_row(*(Text(cell) for cell in cells))
    return table
