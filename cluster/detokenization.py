"""Token ids to text, piece by piece, without ever taking a character back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

REPLACEMENT = "\ufffd"
"""What a decoder puts in place of bytes that are not (or not yet) a character."""

_COMPACT_ABOVE = 64
_COMPACT_TAIL = 8


class IncrementalDetokenizer:
    """Turns a growing list of token ids into pieces of text that are final.

    The pieces put together, ``flush`` included, equal ``decode`` of all the ids, however the ids were
    cut into pushes. A character whose bytes are spread over several tokens comes out with the last of
    them; whatever its bytes are, at most one character is held back.

    Only a window of recent tokens is decoded: tokens whose text is out, as context (a decoder may strip
    the space before the first word it sees), then those whose text is not. The window advances whenever
    its text ends with a whole character (the prefix and read offsets of common serving systems).

    Args:
        decode: token ids to text, special tokens already left out, incomplete bytes shown as one
            replacement character where a character may still come of them.
        skipped: ids that have no text (special tokens, ids without a token).
        byte_token_ids: ids that stand for one byte in a vocabulary with byte fallback. A run of them is
            decoded as a whole by such decoders (one bad byte spoils all of it), so it is held until it
            ends.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        skipped: Callable[[int], bool] = lambda token_id: False,
        byte_token_ids: Collection[int] = frozenset(),
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        self._byte_token_ids = byte_token_ids
        self._window: list[int] = []
        self._context = 0
        """The first ``_context`` ids of the window are there for context only."""
        self._emitted = 0
        """Characters of the window's text that are out."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next token ids; return the text that is final with them (may be empty)."""
        pieces: list[str] = []
        for token_id in token_ids:
            if self._skipped(token_id):
                continue
            self._window.append(token_id)
            if token_id in self._byte_token_ids:
                continue
            text = self._decode(self._window)
            cut = text.endswith(REPLACEMENT)
            stable = len(text) - cut
            if stable > self._emitted:
                pieces.append(text[self._emitted : stable])
                self._emitted = stable
                if not cut:
                    self._advance()
            if len(self._window) > _COMPACT_ABOVE:
                self._compact(text)
        return "".join(pieces)

    def flush(self) -> str:
        """End of the ids: the rest of the text, a cut character as the decoder shows it."""
        text = self._decode(self._window)[self._emitted :] if self._window else ""
        self._window, self._context, self._emitted = [], 0, 0
        return text

    def _advance(self) -> None:
        """Forget the old context: what has just come out is context enough."""
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._emitted = len(self._decode(self._window))

    def _compact(self, text: str) -> None:
        """Keep the window short where no whole character comes for long (a model that emits garbage).

        A split at which the texts of both parts add up to the whole text is a character's border.
        """
        for start in range(len(self._window) - _COMPACT_TAIL, len(self._window) - 1):
            head, tail = self._decode(self._window[:start]), self._decode(self._window[start:])
            if head + tail == text and len(head) <= self._emitted:
                self._window = self._window[start:]
                self._context = 0
                self._emitted -= len(head)
                return
