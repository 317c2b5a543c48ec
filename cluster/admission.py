"""How many sequences a gateway works on, how many may queue for it, and what the others are told."""

from __future__ import annotations

import asyncio
import contextlib
from bisect import insort
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from paceline.actors.engine.priority import turn_of
from paceline.cluster.errors import OverloadedError, UnavailableError
from paceline.cluster.time_limit import TimeLimit


@dataclass(slots=True, order=True)
class _Waiting:
    """A request in the queue. Ordered by its turn, then by its number."""

    turn: float
    number: int
    size: int = field(compare=False)
    """Slots that it needs."""
    let_in: asyncio.Future[None] = field(compare=False)


class Admission:
    """First come, first served among requests of equal priority (``priority.turn_of``). A request of several
    choices counts as that many.

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
        self._num_waits = 0
        self._queue: list[_Waiting] = []
        """In the order of turns."""
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
    async def admitted(
        self, size: int = 1, priority: int = 0, limit: TimeLimit | None = None
    ) -> AsyncIterator[None]:
        """Hold ``size`` slots for the length of the block; waits for them if need be. More than there are
        counts as all of them.

        Args:
            priority: lower = earlier.
            limit: bounds the waiting.

        Raises:
            OverloadedError: the queue is full.
            TimeExceededError: the limit was reached in the queue.
            UnavailableError: nobody is let in any more.
        """
        if self._closed:
            raise UnavailableError("the service is shutting down; try again in a while")
        self._idle.clear()
        size = max(1, min(size, self._max_ongoing))
        if self._queue or self._num_ongoing + size > self._max_ongoing:
            await self._wait(size, priority, limit)
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

    async def _wait(self, size: int, priority: int, limit: TimeLimit | None) -> None:
        """Returns with the slots taken."""
        # An empty queue takes any request, else one of many choices might never get in.
        needed = self._num_queued + size if self._queue else 1
        if 0 <= self._max_queued < needed:
            self._note_idle()
            raise OverloadedError(
                f"the gateway is full: {self._num_ongoing} sequences run and {self._num_queued} wait; "
                "try again later"
            )
        loop = asyncio.get_running_loop()
        self._num_waits += 1
        waiting = _Waiting(turn_of(priority, loop.time()), self._num_waits, size, loop.create_future())
        insort(self._queue, waiting)
        self._num_queued += size
        try:
            async with asyncio.timeout_at(None if limit is None else limit.deadline):
                await waiting.let_in
        except (asyncio.CancelledError, TimeoutError) as error:
            if waiting in self._queue:
                self._queue.remove(waiting)
                self._num_queued -= size
            else:
                # It was let in, in the same moment.
                self._num_ongoing -= size
            self._call()
            self._note_idle()
            if limit is not None and isinstance(error, TimeoutError):
                raise limit.exceeded() from None
            raise

    def _call(self) -> None:
        """Let in, from the head of the queue, whoever has room now."""
        while self._queue and self._num_ongoing + self._queue[0].size <= self._max_ongoing:
            if self._queue[0].let_in.cancelled():
                # It is leaving and takes itself out, which calls the next one.
                return
            waiting = self._queue.pop(0)
            self._num_queued -= waiting.size
            self._num_ongoing += waiting.size
            waiting.let_in.set_result(None)
