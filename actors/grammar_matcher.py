"""One sequence's way through its grammar."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from paceline.actors.engine.errors import ConstraintError

Row = npt.NDArray[np.uint32]


class GrammarMatcher:
    """A ``ConstraintMatcher`` over an automaton that can go back.

    The automaton is left where the last question took it: a tail that is asked about again, or committed, is
    not walked again, and its masks are kept. Only where another way is asked about it goes back to the fork.

    Args:
        compiled: the automaton at its start. It is copied.
        vocab_size: width of the masks, in bits.
        end_token_ids: tokens that end the sequence and are no text.
        ignored_token_ids: end-of-text tokens of the model that do not end this sequence.
    """

    def __init__(
        self,
        compiled: LLMatcher,
        *,
        vocab_size: int,
        end_token_ids: Collection[int],
        ignored_token_ids: Collection[int],
    ) -> None:
        self._compiled = compiled
        self._automaton = compiled.deep_copy()
        self._vocab_size = vocab_size
        self._ends = frozenset(end_token_ids)
        self._vocabulary = _all_bits(vocab_size)
        self._nothing = np.zeros_like(self._vocabulary)
        self._end_bits = _bits(end_token_ids, vocab_size)
        self._kept_bits = self._vocabulary & ~_bits(ignored_token_ids, vocab_size)
        self._path: list[int] = []
        """Completion tokens that the automaton has taken: the committed ones, then those of a tail."""
        self._num_committed = 0
        self._ended = False
        """A token that ends the sequence is committed."""
        self._rows: dict[int, Row] = {}
        """Masks along the path, by the number of tokens before them."""

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            position = self._num_committed
            if not self._ended and token_id in self._ends and self._allows(self._row(position), token_id):
                self._ended = True
            elif self._ended or not self._step(position, token_id):
                raise ConstraintError(
                    f"constraint: token {position} of the completion, {token_id}, does not satisfy it"
                )
            else:
                self._num_committed += 1
        for position in [position for position in self._rows if position < self._num_committed]:
            del self._rows[position]

    def masks(self, tail: Sequence[int]) -> npt.NDArray[np.uint32]:
        rows = np.empty((len(tail) + 1, len(self._vocabulary)), dtype=np.uint32)
        if self._ended:
            rows[:] = self._vocabulary
            return rows
        rows[0] = row = self._row(self._num_committed)
        for depth, token_id in enumerate(tail, start=1):
            position = self._num_committed + depth - 1
            if row is self._vocabulary or token_id in self._ends or not self._allows(row, token_id):
                rows[depth:] = self._vocabulary
                break
            try:
                # What a mask allows is taken, or a limit is met.
                row = self._row(position + 1) if self._step(position, token_id) else self._nothing
            except ConstraintError:
                # Only where the tail is accepted up to here may this end the sequence: it then asks again.
                row = self._nothing
            if row is self._nothing:
                rows[depth:] = row
                break
            rows[depth] = row
        return rows

    def find_end(self, token_ids: Sequence[int]) -> int | None:
        if self._ended:
            return None
        for index, token_id in enumerate(token_ids):
            try:
                if token_id in self._ends or not self._step(self._num_committed + index, token_id):
                    return None
            except ConstraintError:
                return None
            # Nothing follows a complete text, so that the path ends where it is complete.
            if self._num_committed + index + 1 == len(self._path) and self._automaton.is_stopped():
                return index + 1
        return None

    def _row(self, position: int) -> Row:
        """The mask after ``position`` tokens of the path. Raises: ConstraintError."""
        row = self._rows.get(position)
        if row is not None:
            return row
        self._go_back(position)
        if position and self._automaton.is_stopped() and not self._automaton.is_error():
            # Complete: the sequence ends here.
            return self._vocabulary
        words = np.frombuffer(self._automaton.compute_bitmask(), dtype=np.uint32)
        self._check(position)
        row = np.zeros_like(self._vocabulary)
        width = min(len(row), len(words))
        row[:width] = words[:width]
        if self._automaton.is_accepting():
            row &= self._kept_bits
            row |= self._end_bits
        row &= self._vocabulary
        self._rows[position] = row
        return row

    def _step(self, position: int, token_id: int) -> bool:
        """Take ``token_id`` after ``position`` tokens of the path; False, and nothing changes, where the
        grammar does not allow for it. Raises: ConstraintError."""
        if position < len(self._path):
            if self._path[position] == token_id:
                return True
            self._go_back(position)
        if not 0 <= token_id < self._vocab_size or not self._automaton.try_consume_tokens([token_id]):
            self._check(position)
            return False
        self._path.append(token_id)
        return True

    def _go_back(self, position: int) -> None:
        num_tokens = len(self._path) - position
        if num_tokens == 0:
            return
        if not self._automaton.rollback(num_tokens):
            self._start_again(position)
            return
        del self._path[position:]
        self._forget_rows(position)

    def _check(self, position: int) -> None:
        """Raises: ConstraintError, where the automaton met a limit after ``position`` tokens."""
        if self._automaton.is_error():
            reason = " ".join(self._automaton.get_error().replace("<non-verbose/>", "").split())[:200]
            self._start_again(position)
            raise ConstraintError(f"constraint: it is too complex at this place: {reason}")

    def _start_again(self, position: int) -> None:
        """What met an error stays in it: walk the path anew. Raises: ConstraintError."""
        del self._path[position:]
        self._forget_rows(position)
        self._automaton = self._compiled.deep_copy()
        if self._automaton.try_consume_tokens(self._path) < position:
            raise ConstraintError("constraint: it is too complex at this place")

    def _forget_rows(self, position: int) -> None:
        for later in [later for later in self._rows if later > position]:
            del self._rows[later]

    def _allows(self, row: Row, token_id: int) -> bool:
        return bool(token_id < self._vocab_size and row[token_id // 32] >> (token_id % 32) & 1)


def _bits(token_ids: Collection[int], vocab_size: int) -> Row:
    """A mask, from the ids that it allows; those past the vocabulary are left out."""
    row = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    for token_id in token_ids:
        if 0 <= token_id < vocab_size:
            row[token_id // 32] |= np.uint32(1 << token_id % 32)
    return row


def _all_bits(vocab_size: int) -> Row:
    """The mask that allows every token."""
    row = np.full(-(-vocab_size // 32), 0xFFFFFFFF, dtype=np.uint32)
    row[-1] >>= np.uint32(-vocab_size % 32)
    return row
