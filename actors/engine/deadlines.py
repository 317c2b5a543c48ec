"""Sequences whose time is over."""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.actors.engine.sequence import TargetSequence


class Deadlines:
    """Finds the sequences that have outlived their deadlines, at the cost of a comparison while there are
    none: it remembers the earliest one only. That may be of a sequence which has ended since; the look at all
    live ones that it then causes for nothing finds the next."""

    def __init__(self) -> None:
        self._earliest = math.inf

    def watch(self, sequence: TargetSequence) -> None:
        self._earliest = min(self._earliest, sequence.deadline)

    def passed(self, live: Iterable[TargetSequence], now: float) -> list[TargetSequence]:
        """Those of the ``live`` sequences whose deadline is not after ``now``."""
        if now < self._earliest:
            return []
        passed: list[TargetSequence] = []
        self._earliest = math.inf
        for sequence in live:
            if sequence.deadline <= now:
                passed.append(sequence)
            else:
                self.watch(sequence)
        return passed
