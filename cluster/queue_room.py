"""Whether a target's queue takes more: a pure estimate from its refusals and its reports."""

from __future__ import annotations


class QueueRoom:
    """A target reports how many wait there, never how many may. Once it has refused a sequence, its queue
    counts as full for as long as its reports show as many waiting as then; what they show fewer is room.

    The estimate corrects itself: a report of more raises it, a refusal makes it what the next report says,
    and where reports show no room ``widen`` tries for some, twice as much each time until a refusal.
    """

    def __init__(self) -> None:
        self._refused = False
        self._size: int | None = None
        """Sequences that the queue takes; None = to be learnt from the next report."""
        self._step = 1

    def refuse(self) -> None:
        """The target had no room for a sequence."""
        self._refused = True
        self._size = None
        self._step = 1

    def report(self, num_waiting: int) -> None:
        """So many wait there now. An empty queue has room, however many it refused."""
        if num_waiting == 0:
            self.forget()
        elif self._refused:
            self._size = max(self._size or 0, num_waiting)

    def widen(self, num_queued: int) -> None:
        """Believe in some room beyond ``num_queued``."""
        self._size = max(self._size or 0, num_queued) + self._step
        self._step *= 2

    def forget(self) -> None:
        """Count as not full until the next refusal."""
        self._refused = False
        self._size = None

    def is_full(self, num_queued: int) -> bool:
        """Whether there is no room beyond ``num_queued`` sequences, as far as can be known."""
        return self._refused and (self._size is None or num_queued >= self._size)
