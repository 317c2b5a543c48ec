"""Where the time between two steps goes: percentiles over the last steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 512
"""Steps that the percentiles cover."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of seconds; both 0.0 while nothing was recorded."""

    p50: float = 0.0
    p90: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Nearest rank: a value that occurred, so that one of few is not diluted by its neighbour."""
        if not values:
            return cls()
        ordered = sorted(values)
        return cls(*(ordered[-(-len(ordered) * percent // 100) - 1] for percent in (50, 90)))


@dataclass(frozen=True, slots=True)
class StepTimesSnapshot:
    """Percentiles of the parts of a step's interval. ``interval`` = model + overhead, step by step (not
    percentile by percentile), and ``waiting`` is within ``overhead``."""

    num_steps: int = 0
    """Steps covered: the last so many."""
    interval: Percentiles = Percentiles()
    """From the end of the step before (or from when work came after idleness) to the step's own end."""
    overhead: Percentiles = Percentiles()
    """Of the interval, what was not spent in the model's forward pass."""
    waiting: Percentiles = Percentiles()
    """Of the interval, what passed before the step began: hand-over of the output, events of peers, and
    whatever wait for drafts was thought worth its while."""


class StepTimes:
    """The last ``WINDOW`` steps, one record each."""

    __slots__ = ("_recent",)

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)

    def record(self, interval: float, model: float, waiting: float) -> None:
        """One step, in seconds.

        Args:
            interval: from the end of the step before to the end of this one.
            model: time in the forward pass.
            waiting: from the end of the step before to the beginning of this one.
        """
        self._recent.append((interval, interval - model, waiting))

    def snapshot(self) -> StepTimesSnapshot:
        if not self._recent:
            return StepTimesSnapshot()
        interval, overhead, waiting = (Percentiles.of(values) for values in zip(*self._recent, strict=True))
        return StepTimesSnapshot(len(self._recent), interval, overhead, waiting)
