"""The targets that a gateway is attached to: dialled, listened to, left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from paceline.actors.engine.errors import PacelineError
from paceline.actors.engine.messages import Cancel, Committed, Finished, Load, Submit
from paceline.actors.execution_client import ExecutionEvents
from paceline.actors.identity import TargetIdentity
from paceline.cluster.placement import TargetLoad
from paceline.cluster.queue_room import QueueRoom
from paceline.cluster.sequence import Sequence

logger = logging.getLogger(__name__)


class TargetLink(Protocol):
    """One stream to one target (``ExecutionClient``). Used once; ``submit`` and ``cancel`` never block."""

    async def attach(self) -> TargetIdentity:
        """Raises: PacelineError if the target cannot be reached or refuses."""

    def submit(self, submit: Submit) -> None:
        """Raises: PacelineError if the target is gone."""

    def cancel(self, cancel: Cancel) -> None: ...

    async def close(self) -> None: ...


Connector = Callable[[str, ExecutionEvents], TargetLink]
"""Makes a link that is not attached yet, from an address and who hears of its output."""


class TargetEvents(Protocol):
    """What the gateway hears. Called on the event loop; none of them waits."""

    def on_ready(self) -> None:
        """A target can take sequences, or has reported a new load."""

    def on_joined(self, target: AttachedTarget) -> None:
        """The target has been attached."""

    def on_unreachable(self) -> None:
        """An attempt to attach failed."""

    def on_committed(self, target: AttachedTarget, message: Committed) -> None: ...

    def on_finished(self, target: AttachedTarget, message: Finished) -> None: ...

    def on_draining(self, target: AttachedTarget) -> None:
        """The target takes nothing new any more; it goes on with what has begun there."""

    def on_lost(self, target: AttachedTarget) -> None:
        """The target is in the pool no more; ``target.sequences`` need another place."""


class AttachedTarget:
    """One target as the gateway sees it. Hears of the link's output and passes it on with itself."""

    def __init__(
        self, target_id: str, address: str, connect: Connector, pool: TargetPool, events: TargetEvents
    ) -> None:
        self.target_id = target_id
        self.address = address
        self.link = connect(address, self)
        self.identity: TargetIdentity | None = None
        self.reported: Load | None = None
        self.leaving = False
        self.lost = False
        self.sequences: dict[str, Sequence] = {}
        self._begun: set[str] = set()
        """Ids of those for which it has committed anything."""
        self._unreported: dict[str, int] = {}
        """Sequence id → its tokens, for submits after the last report."""
        self._num_unreported_tokens = 0
        """Their sum."""
        self._room = QueueRoom()
        self._pool = pool
        self._events = events

    @property
    def load(self) -> TargetLoad:
        return TargetLoad(
            target_id=self.target_id,
            own_in_flight=len(self.sequences),
            own_unreported=len(self._unreported),
            own_unreported_tokens=self._num_unreported_tokens,
            reported=self.reported,
            leaving=self.leaving,
        )

    @property
    def not_begun(self) -> list[Sequence]:
        """Sequences that would lose nothing by going elsewhere: they queue there, or their prompts do. Not
        those that are cancelled already."""
        return [item for item in self.sequences.values() if not (item.stopping or self.has_begun(item))]

    def has_begun(self, sequence: Sequence) -> bool:
        """Whether tokens of it have come from here."""
        return sequence.sequence_id in self._begun

    @property
    def queued(self) -> list[Sequence]:
        """Sequences that wait for their turn there, as far as can be known: the last to come of those that
        have not begun, no more than wait by its last report."""
        num_waiting = self.reported.num_waiting if self.reported is not None else 0
        return self.not_begun[-num_waiting:] if num_waiting else []

    @property
    def full(self) -> bool:
        """It refused a sequence (see ``refuse``) and shows no room since."""
        return self._room.is_full(self._num_queued)

    @property
    def open(self) -> bool:
        """It takes sequences, as far as can be known."""
        return self.load.accepting and not self.full

    def refuse(self) -> None:
        """Its queue was full for one that waits for a place, or that others wait with."""
        self._room.refuse()

    def ask_again(self) -> None:
        """Its reports show no room: try for some."""
        if self.full:
            self._room.widen(self._num_queued)

    def forget_refusal(self) -> None:
        """Nobody waits for a place there, or not any more."""
        self._room.forget()

    @property
    def _num_queued(self) -> int:
        return len(self._unreported) + (self.reported.num_waiting if self.reported is not None else 0)

    def submit(self, sequence: Sequence) -> None:
        """Raises: PacelineError if the target is gone."""
        self.link.submit(sequence.next_submit(asyncio.get_running_loop().time()))
        self.sequences[sequence.sequence_id] = sequence
        self._unreported[sequence.sequence_id] = sequence.num_tokens
        self._num_unreported_tokens += sequence.num_tokens

    def cancel(self, sequence: Sequence) -> None:
        self.link.cancel(Cancel(sequence.sequence_id, sequence.epoch))

    def release(self, sequence: Sequence) -> None:
        """The sequence is not here any more."""
        self.sequences.pop(sequence.sequence_id, None)
        self._num_unreported_tokens -= self._unreported.pop(sequence.sequence_id, 0)
        self._begun.discard(sequence.sequence_id)
        self._pool.leave_if_idle(self)

    # ---- ExecutionEvents

    def on_committed(self, target_id: str, committed: Committed) -> None:
        if committed.sequence_id in self.sequences:
            self._begun.add(committed.sequence_id)
        self._events.on_committed(self, committed)

    def on_finished(self, target_id: str, finished: Finished) -> None:
        self._events.on_finished(self, finished)

    def on_load(self, target_id: str, load: Load) -> None:
        was_draining = self.reported is not None and self.reported.draining
        self.reported = load
        self._unreported.clear()
        self._num_unreported_tokens = 0
        self._room.report(load.num_waiting)
        if not load.draining:
            self._events.on_ready()
        elif not was_draining:
            self._events.on_draining(self)

    def on_lost(self, target_id: str, reason: str) -> None:
        self._pool.lose(self, reason)


class TargetPool:
    """Which targets there are. A target is being dialled, present, or leaving (listed no more, but still
    finishing sequences); one that is lost is in none of these."""

    def __init__(self, connect: Connector, events: TargetEvents) -> None:
        self._connect = connect
        self._events = events
        self._present: dict[str, AttachedTarget] = {}
        self._dialling: dict[str, AttachedTarget] = {}
        self._leaving: set[AttachedTarget] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def present(self) -> Mapping[str, AttachedTarget]:
        return self._present

    @property
    def num_dialling(self) -> int:
        return len(self._dialling)

    @property
    def loads(self) -> list[TargetLoad]:
        """Of all targets that have or take sequences."""
        return [target.load for target in (*self._present.values(), *self._leaving)]

    @property
    def identities(self) -> list[TargetIdentity]:
        """Of the targets that take sequences."""
        return [t.identity for t in self._present.values() if t.identity is not None and t.load.accepting]

    def update(self, addresses: Mapping[str, str]) -> None:
        """Set which targets there are: target id → address.

        New ones are dialled; so is again, with each call, one whose link was lost or that could not be
        reached. One that is no longer listed gets nothing new and is left when its sequences have ended.
        """
        if self._closed:
            return
        for target_id, target in list(self._present.items()):
            if addresses.get(target_id) != target.address:
                del self._present[target_id]
                target.leaving = True
                self._leaving.add(target)
                self.leave_if_idle(target)
        for target_id, address in addresses.items():
            dialling = self._dialling.get(target_id)
            if target_id in self._present or (dialling is not None and dialling.address == address):
                continue
            if (returning := self._find_leaving(target_id, address)) is not None:
                self._leaving.discard(returning)
                returning.leaving = False
                returning.forget_refusal()  # of another time
                self._present[target_id] = returning
                self._events.on_ready()
            else:
                target = AttachedTarget(target_id, address, self._connect, self, self._events)
                self._dialling[target_id] = target
                self._spawn(self._attach(target))

    def lose(self, target: AttachedTarget, reason: str) -> None:
        """The link is gone. Idempotent."""
        if target.lost:
            return
        target.lost = target.leaving = True
        logger.warning("target %s lost: %s", target.target_id, reason)
        if self._present.get(target.target_id) is target:
            del self._present[target.target_id]
        self._leaving.discard(target)
        self._spawn(target.link.close())
        self._events.on_lost(target)

    def leave_if_idle(self, target: AttachedTarget) -> None:
        if target in self._leaving and not target.sequences:
            self._leaving.discard(target)
            self._spawn(target.link.close())

    async def dialled(self, timeout_seconds: float) -> None:
        """Wait until a target takes sequences or none is being dialled, for a bounded time."""
        until = asyncio.get_running_loop().time() + timeout_seconds
        while self._dialling and not self.identities and self._tasks:
            left = until - asyncio.get_running_loop().time()
            if left <= 0:
                return
            await asyncio.wait(set(self._tasks), timeout=left, return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """Leave every target. Idempotent."""
        self._closed = True
        targets = [*self._present.values(), *self._dialling.values(), *self._leaving]
        self._present.clear()
        self._dialling.clear()
        self._leaving.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for target in targets:
            await target.link.close()

    def _find_leaving(self, target_id: str, address: str) -> AttachedTarget | None:
        return next((t for t in self._leaving if (t.target_id, t.address) == (target_id, address)), None)

    async def _attach(self, target: AttachedTarget) -> None:
        try:
            identity = await target.link.attach()
        except PacelineError as error:
            logger.warning("cannot attach to target %s: %s", target.target_id, error)
            await target.link.close()
            self._undial(target)
            self._events.on_unreachable()
            return
        except BaseException:
            self._undial(target)
            raise
        wanted = self._undial(target)
        if not wanted or target.lost:
            await target.link.close()
            return
        target.identity = identity
        self._present[target.target_id] = target
        logger.info("attached to target %s at %s", target.target_id, target.address)
        self._events.on_ready()
        self._events.on_joined(target)

    def _undial(self, target: AttachedTarget) -> bool:
        """The attempt is over. Whether it was still wanted."""
        if self._dialling.get(target.target_id) is not target:
            return False
        del self._dialling[target.target_id]
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
