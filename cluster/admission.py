"""How many requests a gateway works on, how many may queue for it, and what the others are told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from paceline.cluster.errors import OverloadedError


class Admission:
    """First come, first served.

    Serve's own limits are not used for this: with HAProxy they count differently, and discovery and
    status calls would queue behind requests.

    Args:
        max_ongoing: requests worked on at a time.
        max_queued: requests that may wait for that; -1 = no limit.
    """

    def __init__(self, max_ongoing: int, max_queued: int) -> None:
        self._max_ongoing = max_ongoing
        self._max_queued = max_queued
        self._slots = asyncio.Semaphore(max_ongoing)
        self._num_ongoing = 0
        self._num_queued = 0

    @property
    def num_ongoing(self) -> int:
        return self._num_ongoing

    @property
    def num_queued(self) -> int:
        return self._num_queued

    @contextlib.asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Hold a slot for the length of the block; waits for one if need be.

        Raises:
            OverloadedError: the queue is full.
        """
        if self._slots.locked() and 0 <= self._max_queued <= self._num_queued:
            raise OverloadedError(
                f"the gateway is full: {self._num_ongoing} requests run and {self._num_queued} wait; "
                "try again later"
            )
        self._num_queued += 1
        try:
            await self._slots.acquire()
        finally:
            self._num_queued -= 1
        self._num_ongoing += 1
        try:
            yield
        finally:
            self._num_ongoing -= 1
            self._slots.release()
