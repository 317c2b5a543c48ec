"""How many sequences a gateway works on, how many may queue for it, and what the others are told."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from paceline.cluster.errors import OverloadedError, UnavailableError


class Admission:
    """First come, first served. A request of several choices counts as that many.

    Serve's own limits are not used for this: with HAProxy they count differently, and discovery and
    status calls would queue behind requests.

    Args:
        max_ongoing: sequences worked on at a time.
        max_queued: sequences that may wait for that; -1 = no limit.
    """

    def __init__(self, max_ongoing: int, max_queued: int) -> None:
        self._max_ongoing = max_ongoing
        self._max_queued = max_queued
        self._num_ongoing = 0
        self._num_queued = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        """Size and turn of those that wait."""
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_ongoing(self) -> int:
        return self._num_ongoing

    @property
    def num_queued(self) -> int:
        return self._num_queued

    @contextlib.asynccontextmanager
    async def admitted(self, size: int = 1) -> AsyncIterator[None]:
        """Hold ``size`` slots for the length of the block; waits for them if need be. More than there are
        counts as all of them.

        Raises:
            OverloadedError: the queue is full.
            UnavailableError: nobody is let in any more.
        """
        if self._closed:
            raise UnavailableError("the service is shutting down; try again in a while")
        self._idle.clear()
        size = max(1, min(size, self._max_ongoing))
        if self._queue or self._num_ongoing + size > self._max_ongoing:
            await self._wait(size)
        else:
            self._num_ongoing += size
        try:
            yield
        finally:
            self._num_ongoing -= size
            self._call()
            self._note_idle()

    async def close(self) -> None:
        """Let nobody in any more; returns once those who were let in, or wait for it, have left."""
        self._closed = True
        await self._idle.wait()

    def _note_idle(self) -> None:
        if not self._num_ongoing and not self._queue:
            self._idle.set()

    async def _wait(self, size: int) -> None:
        """Returns with the slots taken."""
        # An empty queue takes any request, else one of many choices might never get in.
        needed = self._num_queued + size if self._queue else 1
        if 0 <= self._max_queued < needed:
            self._note_idle()
            raise OverloadedError(
                f"the gateway is full: {self._num_ongoing} sequences run and {self._num_queued} wait; "
                "try again later"
            )
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((size, turn))
        self._num_queued += size
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._num_ongoing -= size
            else:
                self._queue.remove((size, turn))
                self._num_queued -= size
            self._call()
            self._note_idle()
            raise

    def _call(self) -> None:
        """Let in, from the head of the queue, whoever has room now."""
        while self._queue and self._num_ongoing + self._queue[0][0] <= self._max_ongoing:
            size, turn = self._queue.popleft()
            self._num_queued -= size
            self._num_ongoing += size
            turn.set_result(None)
