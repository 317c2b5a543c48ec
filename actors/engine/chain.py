"""A draft's chain as the target sees it: tokens past the committed ones, compared by absolute position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from paceline.actors.engine.messages import MAX_REVISIONS, DraftLaw, Open
from paceline.actors.engine.parameters import VerificationRule


class Received(Enum):
    """What became of a message of candidates."""

    KEPT = "kept"
    """At least one token extends the chain."""
    KNOWN = "known"
    """Fits, but says nothing new: all of it is committed or in the chain already, or past the limit."""
    STALE = "stale"
    """Of a revision that the draft has left, or of one known to differ from the committed tokens."""
    DIFFERS = "differs"
    """Contradicts committed tokens, or earlier tokens of its revision: the revision is dead."""
    GAP = "gap"
    """Starts past the chain's end: the revision is dead."""


@dataclass(slots=True)
class DraftChain:
    """Invariant: ``token_ids`` are the positions from the committed length on, and agree with everything
    committed so far; nothing of a revision at or below ``dead_revision`` is ever taken again."""

    token_ids: list[int] = field(default_factory=list)
    laws: list[DraftLaw | None] = field(default_factory=list)
    """One per token: what it was drawn from, where the draft said so."""
    revision: int = 0
    dead_revision: int = -1
    revisions: range = range(MAX_REVISIONS)
    """Revisions of the present stay: no other is ever taken."""
    started: bool = False
    """The draft has sent something that was not stale: it follows the sequence."""
    reopened: bool = False
    """The same draft held this sequence before, so that messages of that time may still be under way. As a
    stream keeps its order, a revision below one seen before is then the first of the present stay."""

    @classmethod
    def of_stay(cls, opened: Open, *, reopened: bool) -> DraftChain:
        """The chain that answers ``opened``."""
        first = opened.revisions[0]
        return cls(
            revision=first,
            dead_revision=first - 1,
            revisions=opened.revisions,
            reopened=reopened and opened.rule is VerificationRule.COUPLED,
        )

    @property
    def broken(self) -> bool:
        """The draft's present revision is known to be wrong; it has to be told before it can be of use."""
        return self.dead_revision >= self.revision

    def receive(
        self,
        revision: int,
        base_position: int,
        token_ids: Sequence[int],
        committed: Sequence[int],
        max_length: int,
        laws: Sequence[DraftLaw] = (),
    ) -> Received:
        """Take in candidates for positions ``base_position``, ….

        Args:
            committed: all committed tokens of the sequence.
            max_length: tokens that the chain may hold; what is past it is dropped.
            laws: one per token, or none at all.
        """
        if revision not in self.revisions:
            return Received.STALE
        if self.reopened and revision < self.revision:
            self.reopened = False
            self.revision, self.dead_revision = revision, -1
            self._clear()
        if revision <= self.dead_revision or revision < self.revision:
            return Received.STALE
        if revision > self.revision:
            self.revision = revision
            self._clear()
        self.started = True
        end = len(committed)
        if base_position < 0 or base_position > end + len(self.token_ids):
            self._die()
            return Received.GAP
        known = end + len(self.token_ids) - base_position
        for offset, token_id in enumerate(token_ids[:known]):
            position = base_position + offset
            expected = committed[position] if position < end else self.token_ids[position - end]
            if token_id != expected:
                self._die()
                return Received.DIFFERS
        fresh = token_ids[known : known + max(max_length - len(self.token_ids), 0)]
        self.token_ids.extend(fresh)
        self.laws.extend(laws[known : known + len(fresh)] if laws else [None] * len(fresh))
        return Received.KEPT if fresh else Received.KNOWN

    def advance(self, committed: Sequence[int]) -> int:
        """Newly committed tokens take the place of the chain's head.

        Returns:
            How many of them the chain had foretold. If it foretold one wrongly, its revision is dead.
        """
        for index, (own, token_id) in enumerate(zip(self.token_ids, committed, strict=False)):
            if own != token_id:
                self._die()
                return index
        foretold = min(len(self.token_ids), len(committed))
        del self.token_ids[:foretold], self.laws[:foretold]
        return foretold

    def _die(self) -> None:
        self.dead_revision = self.revision
        self._clear()

    def _clear(self) -> None:
        self.token_ids, self.laws = [], []
