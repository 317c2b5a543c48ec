"""How long the machine itself kept a process from running."""

from __future__ import annotations

import threading
import time

TICK_SECONDS = 0.01


class Heartbeat:
    """A thread that has nothing to do but wake up, and remembers each time it was late.

    On busy processors it sets apart what a service waits for from what everybody waits for. It loses less
    than a process with work to do, so that it explains too little rather than too much.
    """

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []
        """(when it was due, when it came)."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def lost_seconds(self, begin: float, end: float) -> float:
        """Of the time between two readings of ``time.monotonic``."""
        return sum(max(0.0, min(end, came) - max(begin, due)) for due, came in list(self._late))

    def _beat(self) -> None:
        due = time.monotonic() + TICK_SECONDS
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            now = time.monotonic()
            if now - due > TICK_SECONDS:
                self._late.append((due, now))
            due = now + TICK_SECONDS
