"""When the next verdict is due, so that a draft is not caught in the middle of a step that can wait.

A draft that runs ahead makes tokens that are rarely needed while it waits for its target. When the verdict
corrects the chain, the fresh start has to wait for the step that is on, half a step on average. So shortly
before a verdict is due no such step is begun. Where it accepts the chain instead that time is lost. To wait r
seconds for a verdict that corrects with probability P, instead of a step of s, wins s − r or loses r: it is
worth it while r < P·s.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.actors.engine.draft_sequence import DraftSequence
from paceline.actors.engine.estimates import RecentMedian

PATIENCE = 1.5
"""Verdicts do not come on the moment: they are waited for so many times longer than these odds would have it,
but no longer than a step."""
GRACE = 0.5
"""How much later than usual a verdict may be before steps go on, of what it may be waited for before."""
PRIOR_CORRECTED = 0.5
CORRECTED_WEIGHT = 0.05
"""Of the last verdict."""


class VerdictTimes:
    """Learnt for each target: the time from when a sequence has the tail that the target waits for until its
    verdict is here. That is a step of the target, the way there and back, and its wait for others."""

    def __init__(self) -> None:
        self._verify_seconds: dict[str, RecentMedian] = {}
        self._corrected: dict[str, float] = {}
        """Recent share of the verdicts that corrected a chain."""
        self._spare_seconds = RecentMedian()
        """Of a step that could have waited."""

    def note_verdict(self, sequence: DraftSequence, corrected: bool, now: float) -> None:
        """A verdict that commits something arrived at ``now``. To be told before ``window`` and ``ready_at``
        are those of the next tail."""
        if sequence.window == 0 or sequence.ready_at is None or now <= sequence.ready_at:
            return
        peer = sequence.key.peer
        self._verify_seconds.setdefault(peer, RecentMedian()).add(now - sequence.ready_at)
        share = self._corrected.get(peer, PRIOR_CORRECTED)
        self._corrected[peer] = share + CORRECTED_WEIGHT * (corrected - share)

    def note_spare_step(self, seconds: float) -> None:
        self._spare_seconds.add(seconds)

    def forget(self, peer: str) -> None:
        self._verify_seconds.pop(peer, None)
        self._corrected.pop(peer, None)

    def seconds_to_wait(self, sequences: Iterable[DraftSequence], now: float) -> float:
        """0.0: begin a step now. Else a step would likely be on when verdicts come, and nobody waits for its
        tokens: to be asked again after so many seconds, or after the verdict."""
        spare = self._spare_seconds.value
        if spare is None:
            return 0.0
        num_awake = 0
        ends: list[float] = []
        for sequence in sequences:
            if sequence.window == 0:
                continue
            if sequence.ready_at is None:
                return 0.0  # its target waits for it
            num_awake += 1
            verify = self._verify_seconds.get(sequence.key.peer)
            if verify is None or verify.value is None:
                continue
            due = sequence.ready_at + verify.value
            longest = min(PATIENCE * self._corrected[sequence.key.peer], 1.0) * spare
            end = due + GRACE * longest
            if due - longest < now < end:
                ends.append(end)
        # With many targets there is always a verdict due; the others' tokens are worth something too.
        if not ends or 2 * len(ends) < num_awake:
            return 0.0
        return min(ends) - now
