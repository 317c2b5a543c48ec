"""Whether it pays that a draft reads what it does not know of a sequence yet.

Before its first token of a sequence a draft has to read the prompt, and after a rest what was committed
meanwhile. On hardware of its own that delays nothing but drafts. On hardware that it shares with its target
it holds all sequences up, and has to be made up for by the tokens that are still to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TRIAL_SHARE = 0.02
"""Of the time: what a draft at rest may read only to find out whether it is still as it was."""
LENGTH_WEIGHT = 1 / 16
"""Of the last answer."""


class AnswerLengths:
    """How long answers are, lately, in tokens."""

    def __init__(self) -> None:
        self._mean: float | None = None

    def add(self, num_tokens: int) -> None:
        """One has ended by itself, or at its limit."""
        self._mean = (
            num_tokens if self._mean is None else self._mean + LENGTH_WEIGHT * (num_tokens - self._mean)
        )

    def expected_left(self, most: int) -> float:
        """Tokens that one still has before it, of which there can be ``most``: as many however long it is
        already, as those that go on are the long ones."""
        return most if self._mean is None else min(self._mean, most)


class Reading(NamedTuple):
    """What a draft would have to read of one sequence, and what for."""

    seconds: float
    """Until it has read it."""
    num_left: float
    """Tokens that are still to come."""
    saved_seconds: float
    """How much sooner each of them comes, once all sequences have tails."""


def worth_reading(readings: Sequence[Reading], num_sequences: int) -> list[int]:
    """What a draft should read: as many as together bring what they cost.

    Args:
        num_sequences: in the same steps. All of them wait while it reads; and one alone brings only its share
            of what all together save.

    Returns:
        Indices, those that bring most first.
    """
    gains = [
        reading.num_left * reading.saved_seconds / num_sequences - reading.seconds for reading in readings
    ]
    found: list[int] = []
    total = 0.0
    for index in sorted(range(len(readings)), key=gains.__getitem__, reverse=True):
        total += gains[index]
        if readings[index].saved_seconds <= 0.0 or total < 0.0:
            break
        found.append(index)
    return found


def may_be_tried(reading_seconds: float, rested_seconds: float) -> bool:
    """Whether a draft that has rested so long may read something only to be measured anew."""
    return reading_seconds <= TRIAL_SHARE * rested_seconds
