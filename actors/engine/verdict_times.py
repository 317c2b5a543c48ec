"""When the next verdict is due, so that a draft is not caught in the middle of a step that can wait.

A draft that runs ahead makes tokens that are rarely needed while it waits for its target. When the verdict
corrects the chain, the fresh start has to wait for the step that is on, half a step on average. So shortly
before a verdict is due no such step is begun.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.actors.engine.draft_sequence import DraftSequence
from paceline.actors.engine.estimates import RecentMedian

GRACE = 0.5
"""In spare steps: how much later than usual a verdict may be before steps go on."""


class VerdictTimes:
    """Learnt for each target: the time from when a sequence has the tail that the target waits for until its
    verdict is here. That is a step of the target, the way there and back, and its wait for others."""

    def __init__(self) -> None:
        self._verify_seconds: dict[str, RecentMedian] = {}
        self._spare_seconds = RecentMedian()
        """Of a step that could have waited."""

    def note_verdict(self, sequence: DraftSequence, now: float) -> None:
        """A verdict that commits something arrived at ``now``. To be told before ``ready_at`` is that of the
        next tail."""
        if sequence.ready_at is not None and now > sequence.ready_at:
            known = self._verify_seconds.setdefault(sequence.key.peer, RecentMedian())
            known.add(now - sequence.ready_at)

    def note_spare_step(self, seconds: float) -> None:
        self._spare_seconds.add(seconds)

    def forget(self, peer: str) -> None:
        self._verify_seconds.pop(peer, None)

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
            end = due + GRACE * spare
            if due - spare < now < end:
                ends.append(end)
        # With many targets there is always a verdict due; the others' tokens are worth something too.
        if not ends or 2 * len(ends) < num_awake:
            return 0.0
        return min(ends) - now
