"""A target and its drafts in simulated time: the real engines on emulated models, events in order of time.

Each engine has a device of its own: what it does takes as long as its model says and nothing else, and a
message takes ``latency`` from one to the other. So rates are those of the policies alone, and the same in
every run.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.actors.engine.config import DraftEngineConfig, TargetEngineConfig
from paceline.actors.engine.draft_engine import DraftEngine
from paceline.actors.engine.emulated import EmulatedRunner
from paceline.actors.engine.messages import DraftHello, Submit
from paceline.actors.engine.target_engine import TargetEngine
from tests.engine.fakes import Clock

NUM_BLOCKS, BLOCK_SIZE = 4096, 16


@dataclass
class Device:
    """One engine: busy until its step is over; then it hears what came meanwhile."""

    clock: Clock
    busy: bool = False
    inbox: list[Callable[[], None]] = field(default_factory=list)
    wake: int = 0
    """Number of the look that is due; older ones are void."""


class Simulation:
    """``run`` until all that was submitted is finished."""

    def __init__(
        self,
        target_source: str,
        draft_source: str | None,
        target_config: TargetEngineConfig,
        draft_config: DraftEngineConfig | None = None,
        *,
        latency: float = 0.0001,
        message_seconds: float = 0.0,
        capacity: int = 64,
    ) -> None:
        """``message_seconds``: what a message of the draft costs the target, which nobody tells it."""
        self.now = 0.0
        self._latency = latency
        self._message_seconds = message_seconds
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finished_at: dict[str, float] = {}
        self._open = 0
        self.target_device = Device(Clock())
        self.target = TargetEngine(
            self._runner(target_source, self.target_device), target_config, self.target_device.clock
        )
        self.target.measure_step_costs()
        self.target_device.clock.now = 0.0
        self.draft_device = Device(Clock())
        self.draft_device.clock.now = 0.0
        self.draft: DraftEngine | None = None
        if draft_source is not None:
            runner = self._runner(draft_source, self.draft_device)
            self.draft = DraftEngine(runner, draft_config or DraftEngineConfig(), self.draft_device.clock)
            self.draft.target_joined("t", runner.vocab_size)
            hello = DraftHello("d", "draft", runner.vocab_size, capacity, runner.max_model_len, "model")
            self.target.draft_joined("d", hello)

    def _runner(self, source: str, device: Device) -> EmulatedRunner:
        from paceline.actors.engine.emulated import EmulatedModel

        model = EmulatedModel.from_source(source)
        runner = EmulatedRunner(model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        step_seconds = runner.step_seconds
        runner.step_seconds = lambda num_tokens: 0.0  # type: ignore[method-assign]
        forward = runner.forward

        def timed(batch):  # type: ignore[no-untyped-def]
            device.clock.advance(step_seconds(sum(len(piece.token_ids) for piece in batch)))
            return forward(batch)

        runner.forward = timed  # type: ignore[method-assign]
        return runner

    # ------------------------------------------------------------------ events

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), action))

    def submit(self, event: Submit, time: float = 0.0) -> None:
        self._open += 1
        self.at(time, lambda: self._tell(self.target_device, lambda: self.target.submit("gateway", event)))

    def run(self, until: float = 1e9) -> None:
        while self._open and self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
        assert not self._open or until < 1e9, "nothing happens any more"

    def run_on(self, seconds: float) -> None:
        """Whatever is still under way, although nobody waits for it."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def _tell(self, device: Device, event: Callable[[], None]) -> None:
        device.inbox.append(event)
        if not device.busy:
            self.look(device)

    def look(self, device: Device) -> None:
        """The engine is free: it hears what waits for it, and steps if there is reason to."""
        device.busy = False
        device.wake += 1
        device.clock.now = max(self.now, device.clock.now)
        for event in device.inbox:
            event()
        device.inbox.clear()
        if device is self.draft_device:
            self._send_candidates(self.now)
            assert self.draft is not None
            wait = self.draft.wait_seconds()
            if wait == 0.0:
                self.draft.step()
                self._occupy(device)
                self._send_candidates(device.clock.now)
        else:
            wait = self.target.wait_seconds()
            self._publish(self.now)
            if wait == 0.0:
                self.target.step()
                self._publish(device.clock.now)
                self._occupy(device)
        if wait:
            wake = device.wake
            self.at(self.now + wait, lambda: self.look(device) if device.wake == wake else None)

    def _occupy(self, device: Device) -> None:
        device.busy = True
        # A step that takes no time is over a moment later.
        self.at(max(device.clock.now, self.now + 1e-6), lambda: self.look(device))

    def _publish(self, time: float) -> None:
        outbox = self.target.take_outbox()
        for output in outbox.gateways.values():
            for committed in output.committed:
                self.tokens[committed.sequence_id].extend(committed.token_ids)
            for finished in output.finished:
                assert not finished.error, finished.error
                self.finished_at[finished.sequence_id] = time
                self._open -= 1
        for told in outbox.drafts.values():

            def hear(arrived: float, told=told) -> None:  # type: ignore[no-untyped-def]
                assert self.draft is not None
                for closed in told.closes:
                    self.draft.close("t", closed)
                for opened in told.opens:
                    self.draft.open("t", opened)
                for verdict in told.verdicts:
                    self.draft.verdict("t", verdict, arrived)

            self._deliver(time, self.draft_device, hear)

    def _deliver(self, time: float, device: Device, event: Callable[[float], None]) -> None:
        """``event`` leaves at ``time``; it is told when it arrived."""

        def arrive() -> None:
            arrived = self.now
            self._tell(device, lambda: event(arrived))

        self.at(time + self._latency, arrive)

    def _send_candidates(self, time: float) -> None:
        assert self.draft is not None
        for output in self.draft.take_outbox().values():

            def hear(output=output) -> None:  # type: ignore[no-untyped-def]
                self.target_device.clock.advance(self._message_seconds)
                self.target.candidates(
                    "d",
                    output.candidates,
                    output.step_seconds,
                    self._heard_at,
                    step_tokens=output.step_tokens,
                    num_awake=output.num_awake,
                )
                for decline in output.declines:
                    self.target.decline("d", decline)

            def arrive(hear=hear) -> None:  # type: ignore[no-untyped-def]
                arrived = self.now

                def event() -> None:
                    self._heard_at = arrived
                    hear()

                self._tell(self.target_device, event)

            self.at(time + self._latency, arrive)

    _heard_at = 0.0
