"""Who is served first: the order of what waits, at a gateway and at a target."""

from __future__ import annotations

from paceline.actors.engine.errors import InvalidArgumentError

MAX_PRIORITY = 100
"""Priorities lie in [-100, 100]; the lower one is served earlier, 0 is everybody's."""

AGING_SECONDS = 10.0
"""What one unit of priority is worth in time waited."""


def check_priority(priority: int) -> None:
    """Raises: InvalidArgumentError if it is out of range."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidArgumentError(
            "priority",
            f"must be in [{-MAX_PRIORITY}, {MAX_PRIORITY}] (lower = served earlier, 0 = normal), "
            f"got {priority}",
        )


def turn_of(priority: int, arrived_at: float) -> float:
    """The place in a queue: the smaller one is served first, and equals in order of arrival.

    It grows with the time of arrival and never changes afterwards, which is what keeps the unimportant from
    starving: whoever has waited ten seconds longer for each unit between their priorities goes ahead. So one
    is overtaken only by what arrives within that time, however much more comes later.

    Args:
        arrived_at: seconds of one clock for all that are compared.
    """
    return arrived_at + AGING_SECONDS * priority
