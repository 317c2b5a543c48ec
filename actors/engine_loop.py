"""An engine on its own thread: events in from anywhere, output out to the event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from paceline.actors.engine.errors import PacelineError

logger = logging.getLogger(__name__)

EngineT = TypeVar("EngineT")
OutputT = TypeVar("OutputT")
ResultT = TypeVar("ResultT")


MAX_BACKLOG = 256
"""Events that may wait for the engine before a stream is no longer read (HTTP/2 then holds the peer)."""


class EngineFailedError(PacelineError):
    """The engine met an error that it cannot go on after. The actor must be replaced."""


class EngineLoop(Generic[EngineT, OutputT]):
    """Steps an engine on a thread of its own, so that compute never runs on the event loop.

    Each pass of the thread runs the posted events, steps the engine if there is work, and hands the
    output over with one wake-up of the event loop. Without work it sleeps until an event comes. Only
    this thread touches the engine once the loop has started.

    Args:
        engine: owned by the thread from ``start`` to ``stop``.
        wait_seconds: asked on the thread: 0 = step now, None = sleep until an event, else sleep so long.
        step: one pass of the engine.
        take_output: what to publish since the last call, or None for nothing.
        publish: called on the event loop with each output, in order.
        on_failed: called once on the event loop if engine code raised.
        prepare: runs first on the thread (thread counts, for example).
    """

    def __init__(
        self,
        engine: EngineT,
        *,
        wait_seconds: Callable[[], float | None],
        step: Callable[[], None],
        take_output: Callable[[], OutputT | None],
        publish: Callable[[OutputT], None],
        on_failed: Callable[[EngineFailedError], None] | None = None,
        prepare: Callable[[], None] | None = None,
        name: str = "engine",
    ) -> None:
        self._engine = engine
        self._wait_seconds = wait_seconds
        self._step = step
        self._take_output = take_output
        self._publish = publish
        self._on_failed = on_failed
        self._prepare = prepare
        self._inbox: queue.SimpleQueue[Callable[[EngineT], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._events: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._stopping = False
        self._failure: EngineFailedError | None = None
        self._abandoned = False
        self._step_started: float | None = None

    # ------------------------------------------------------------ from any thread

    def post(self, event: Callable[[EngineT], None]) -> None:
        """Have ``event(engine)`` run on the engine's thread, before its next step. Events keep their
        order. After a failure or a stop they are dropped."""
        self._inbox.put(event)

    @property
    def backlog(self) -> int:
        """Events that were posted and not run yet."""
        return self._inbox.qsize()

    @property
    def failure(self) -> EngineFailedError | None:
        """Why the engine can no longer be used; None while it can."""
        return self._failure

    @property
    def step_seconds(self) -> float:
        """How long the step in progress has been running; 0.0 between steps."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def check(self, stuck_after_seconds: float) -> None:
        """Raises: EngineFailedError if the engine has failed, stopped, or hangs in one step."""
        if self._failure is not None:
            raise self._failure
        if not self._thread.is_alive():
            raise EngineFailedError(f"the {self._thread.name} thread is not running")
        if self.step_seconds > stuck_after_seconds:
            raise EngineFailedError(
                f"the {self._thread.name} has been in one step for {self.step_seconds:.0f} s "
                f"(limit {stuck_after_seconds:g} s)"
            )

    # ------------------------------------------------------------ from the event loop

    def start(self) -> None:
        """Start the thread; output goes to the running event loop."""
        self._events = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._thread.start()

    async def call(self, function: Callable[[EngineT], ResultT]) -> ResultT:
        """Run ``function(engine)`` on the engine's thread and return what it returns or raises.

        Raises: EngineFailedError if the engine fails or stops before it could answer.
        """
        events, ended = self._started()
        answer: asyncio.Future[ResultT] = events.create_future()

        def settle(result: ResultT | None, error: Exception | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        def run(engine: EngineT) -> None:
            try:
                result, error = function(engine), None
            except Exception as raised:
                result, error = None, raised
            events.call_soon_threadsafe(settle, result, error)

        self.post(run)
        over = asyncio.create_task(ended.wait())
        waited: set[asyncio.Future[Any]] = {answer, over}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
        if not answer.done():
            answer.cancel()
            raise self._failure or EngineFailedError(f"the {self._thread.name} has stopped")
        return answer.result()

    async def relieve(self) -> None:
        """Return at once while the engine keeps up, else when it has run all that was posted.

        Awaited by whoever reads messages from a peer. Raises: EngineFailedError, as ``call``.
        """
        if self.backlog > MAX_BACKLOG:
            await self.call(lambda engine: None)

    def fail(self, reason: str) -> None:
        """Count the engine as failed although its thread may hang in a step, and is not waited for. For what
        the thread depends on and somebody else sees break. No effect where the engine has ended."""
        if self._ended is None or self._ended.is_set():
            return
        self._failure = EngineFailedError(f"the {self._thread.name} failed: {reason}")
        self._abandoned = self._stopping = True
        self._inbox.put(None)
        self._end()

    async def stop(self) -> None:
        """End the thread after the pass in progress, and wait for it. Idempotent."""
        if self._events is None or self._abandoned:
            return
        self._stopping = True
        self._inbox.put(None)
        assert self._ended is not None
        await self._ended.wait()
        self._thread.join()

    def _started(self) -> tuple[asyncio.AbstractEventLoop, asyncio.Event]:
        if self._events is None or self._ended is None:
            raise RuntimeError("the engine loop has not been started")
        return self._events, self._ended

    # ------------------------------------------------------------ on the engine's thread

    def _run(self) -> None:
        try:
            if self._prepare is not None:
                self._prepare()
            self._run_passes()
        except Exception as error:
            logger.exception("the %s failed", self._thread.name)
            if not self._abandoned:
                self._failure = EngineFailedError(
                    f"the {self._thread.name} failed: {type(error).__name__}: {error}"
                )
                self._failure.__cause__ = error
        finally:
            self._step_started = None
            self._hand_over(self._end)

    def _run_passes(self) -> None:
        wait: float | None = 0.0
        while True:
            self._run_events(wait)
            if self._stopping:
                return
            wait = self._wait_seconds()
            if wait is not None and wait <= 0.0:
                # What the events brought about (refusals, sequences for drafts) must not wait for the step.
                self._hand_over_output()
                self._step_started = time.monotonic()
                self._step()
                self._step_started = None
                wait = 0.0
            self._hand_over_output()

    def _hand_over_output(self) -> None:
        output = self._take_output()
        if output is not None:
            self._hand_over(self._deliver, output)

    def _deliver(self, output: OutputT) -> None:
        if not self._abandoned:
            self._publish(output)

    def _run_events(self, wait: float | None) -> None:
        """Sleep up to ``wait`` for a first event (None = for ever), then run all that are there."""
        inbox = self._inbox
        if wait is None or wait > 0.0:
            try:
                event = inbox.get(timeout=wait)
            except queue.Empty:
                return
            if event is not None:
                event(self._engine)
        # Only what is there now: a flood of events must not keep the engine from stepping.
        for _ in range(inbox.qsize()):
            event = inbox.get_nowait()
            if event is not None:
                event(self._engine)

    def _hand_over(self, callback: Callable[..., None], *args: object) -> None:
        assert self._events is not None
        try:
            self._events.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The event loop was closed without a stop: nobody is left to hear it.
            self._stopping = True

    def _end(self) -> None:
        assert self._ended is not None
        if self._ended.is_set():
            return
        self._ended.set()
        if self._failure is not None and self._on_failed is not None:
            self._on_failed(self._failure)
