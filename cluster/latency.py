"""How long a request's tokens take, as its caller sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from paceline.cluster.metrics import REQUEST_LATENCY, TIME_PER_OUTPUT_TOKEN, TIME_TO_FIRST_TOKEN, Metric

Observe = Callable[[Metric, float], None]
"""Takes one value of a histogram, in its unit."""


@dataclass(slots=True)
class _Choice:
    first_at: float
    last_at: float
    num_tokens: int


class RequestTimer:
    """Times the choices of one request.

    Args:
        arrived_at: by the event loop's clock.
        observe: hears of each value; None: nobody does.
    """

    def __init__(self, arrived_at: float, observe: Observe | None) -> None:
        self._arrived_at = arrived_at
        self._observe = observe
        self._choices: dict[int, _Choice] = {}

    def note(self, index: int, num_tokens: int, *, ended: bool) -> None:
        """So many more tokens of a choice have come; ``ended``: they are its last."""
        if self._observe is None:
            return
        now = asyncio.get_running_loop().time()
        choice = self._choices.get(index)
        if choice is not None and num_tokens:
            choice.num_tokens += num_tokens
            choice.last_at = now
        elif num_tokens:
            choice = self._choices[index] = _Choice(now, now, num_tokens)
            self._observe(TIME_TO_FIRST_TOKEN, now - self._arrived_at)
        if ended:
            self._observe(REQUEST_LATENCY, now - self._arrived_at)
            if choice is not None and choice.num_tokens > 1:
                seconds = choice.last_at - choice.first_at
                self._observe(TIME_PER_OUTPUT_TOKEN, seconds / (choice.num_tokens - 1))
