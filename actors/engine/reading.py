"""Whether it pays that a draft reads what it does not know of a sequence yet.

Before its first token of a sequence a draft has to read the prompt, and after a rest what was committed
meanwhile. On hardware of its own that delays nothing but drafts. On hardware that it shares with its target
it holds all sequences up, and has to be made up for by the tokens that are still to come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

TRIAL_SHARE = 0.02
"""Of the time: what a draft at rest may read only to find out whether it is still as it was."""
SHORTEST_REST, LONGEST_REST = 1.0, 64.0
"""Seconds between two such trials. Each that fails doubles them."""
DOUBT_SECONDS = 30.0
"""Of rest, after which a draft is taken to read twice as fast as it did: what has to be read may grow faster
than any share of the time, and what slowed it down may be over."""
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

    def expected_left(self, num_done: int, most: int) -> float:
        """Tokens that an answer of ``num_done`` so far still has before it, at most ``most``: as many as
        answers have in all, and where it is longer than that already, as many again."""
        return most if self._mean is None else min(max(self._mean, num_done), most)


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


class Trials:
    """When a draft at rest is asked for tokens although nothing says that it pays: it may have changed."""

    def __init__(self) -> None:
        self._rest = SHORTEST_REST
        self._next_at = -math.inf
        self._rests_since: float | None = None

    def note_rest(self, now: float) -> None:
        """It is asked for nothing."""
        if self._rests_since is None:
            self._rests_since = now

    def note_news(self) -> None:
        """It has been heard of."""
        self._rests_since = None

    def note_paying(self) -> None:
        """It pays, as far as is known."""
        self._rest = SHORTEST_REST

    def due(self, reading_seconds: float, left_seconds: float, now: float) -> bool:
        """Whether it may be tried by one sequence.

        Args:
            reading_seconds: what it would have to read first takes so long.
            left_seconds: how long the sequence still goes on. What has to be read grows while a draft rests:
                a long answer may spend a share of what is left of it, too.
        """
        rested = 0.0 if self._rests_since is None else now - self._rests_since
        doubted_seconds = reading_seconds * 0.5 ** (rested / DOUBT_SECONDS)
        return now >= self._next_at and doubted_seconds <= TRIAL_SHARE * max(rested, left_seconds)

    def begin(self, now: float) -> None:
        """It is tried now, whether or not anything comes of it."""
        self._next_at = now + self._rest
        self._rest = min(2.0 * self._rest, LONGEST_REST)
        self._rests_since = None
