"""Sequences on targets: placement, streaming and failover. Knows nothing of Ray or of text."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.actors.channels import ChannelSettings
from paceline.actors.engine.balance import Occupancy, even_out
from paceline.actors.engine.errors import InvalidArgumentError, PacelineError
from paceline.actors.engine.messages import Committed, Finished
from paceline.actors.engine.parameters import FinishReason
from paceline.actors.execution_client import ExecutionClient
from paceline.actors.identity import TargetIdentity
from paceline.cluster.errors import OverloadedError, TargetFailedError, UnavailableError
from paceline.cluster.placement import TargetLoad, choose_target
from paceline.cluster.requests import CheckedRequest
from paceline.cluster.sequence import Arrival, Displacement, Sequence, SequenceResult, Wait
from paceline.cluster.sequence_stream import SequenceStream
from paceline.cluster.targets import AttachedTarget, Connector, TargetPool
from paceline.cluster.time_limit import TimeLimit

logger = logging.getLogger(__name__)

REFUSED_RETRY_SECONDS = 0.25
"""Where sequences that were running already wait for a place and no report shows one, it is asked for
again after this time."""

_NOT_READY = "no target is ready; try again in a while"
_CLOSING = "the gateway is shutting down; try again"
_CAUSES = {
    Displacement.LOST: "the target was lost",
    Displacement.GIVEN_BACK: "the target is leaving",
    Displacement.MOVED: "a new target did not take the request from another's queue",
}


@dataclass(frozen=True)
class GatewaySettings:
    """Times in seconds."""

    resume_timeout_seconds: float = 9.0
    """How long a request that had a target waits for another one: in all, until it makes progress."""
    attach_grace_seconds: float = 2.0
    """How long a new request waits while the first targets are being dialled."""
    cold_start_timeout_seconds: float = 300.0
    """How long a request that has not begun waits for a target pool to wake that had gone to sleep."""
    request_timeout_seconds: float | None = None
    """Longest life of a request that brings no shorter limit; None = as long as it takes."""
    cancel_timeout_seconds: float = 5.0
    """How long a request that ended by a stop string waits for its statistics."""
    max_losses: int = 16
    """A request that has lost its target more often is given up: it may be what kills them."""

    def __post_init__(self) -> None:
        for name in (
            "resume_timeout_seconds",
            "attach_grace_seconds",
            "cold_start_timeout_seconds",
            "cancel_timeout_seconds",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: must not be negative, got {getattr(self, name)}")
        if self.request_timeout_seconds is not None and not self.request_timeout_seconds > 0:
            raise ValueError(f"request_timeout_seconds: must be positive, got {self.request_timeout_seconds}")
        if self.max_losses < 0:
            raise ValueError(f"max_losses: must not be negative, got {self.max_losses}")


@dataclass(frozen=True)
class GatewaySnapshot:
    """For status and metrics."""

    targets: tuple[TargetLoad, ...]
    num_dialling: int
    num_live: int
    """Sequences that have not ended."""
    num_waiting: int
    """Of these, sequences without a target."""
    num_placements: int
    num_failovers: int
    """Sequences that had to be placed again, each time counted, because their target was lost, failed
    them, or left before their end. Not those that a leaving target gives back."""
    num_ignored_messages: int
    """Messages of a former epoch or of a sequence that has ended."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    sequence: Sequence
    wait: Wait
    since: float
    """By the event loop's clock."""
    began: float
    """The same, if all that it has waited so far had been in one go."""
    give_up: asyncio.TimerHandle


class Gateway:
    """Places sequences on targets and keeps each one going until it ends, whichever targets die.

    All methods run on one event loop, and none of those that change a sequence waits: a sequence is
    always in exactly one of three states, placed on a target, waiting for one, or ended.

    Those that wait come before those that come, the longest wait first: a target that was full for one of
    them is closed to all until it shows room, and then it is they who hear of it first. While anybody waits
    although there is a target, a retry is due: it tries for room where reports show none.

    Args:
        gateway_id: unique among the gateways of the service.
        connect: makes links to targets; the default dials gRPC, over ``channels``.
        wake: asks for a target; called when a request finds none. None: the target pool never sleeps, so
            that a request which finds none is refused.
    """

    def __init__(
        self,
        gateway_id: str,
        settings: GatewaySettings | None = None,
        connect: Connector | None = None,
        channels: ChannelSettings | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self._settings = settings or GatewaySettings()
        self._wake = wake
        self._ready = asyncio.Event()
        """Set whenever a target can take sequences."""
        self._num_awaiting = 0
        """Requests that wait for any target before they are checked."""
        self._pool = TargetPool(
            connect
            or (
                lambda address, events: ExecutionClient(
                    address=address, gateway_id=gateway_id, events=events, settings=channels
                )
            ),
            self,
        )
        self._live: dict[str, Sequence] = {}
        self._places: dict[str, AttachedTarget] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False
        self._num_placements = 0
        self._num_failovers = 0
        self._num_ignored_messages = 0

    # ------------------------------------------------------------ for the service

    @property
    def request_timeout_seconds(self) -> float | None:
        """Longest life of a request; None = as long as it takes."""
        return self._settings.request_timeout_seconds

    def update_targets(self, addresses: Mapping[str, str]) -> None:
        """Set which targets there are: target id → address. To be called again from time to time, since
        each call dials those that are not attached (see ``TargetPool.update``)."""
        self._pool.update(addresses)

    async def identities(self) -> list[TargetIdentity]:
        """Of the targets that take sequences. Waits a little where there is none: a young gateway has yet to
        find them, and a redeployment may take the last one away a moment before the next is found."""
        grace = self._settings.attach_grace_seconds
        if self._wake is not None:
            await self._pool.dialled(grace)
            return self._pool.identities
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._until_ready()
        return self._pool.identities

    async def awake_identities(self) -> list[TargetIdentity]:
        """The same, but where the pool sleeps it is woken, and waited for as long as that may take, or until
        the gateway closes."""
        identities = await self.identities()
        if identities or self._wake is None or self._closed:
            return identities
        timeout = self._settings.cold_start_timeout_seconds
        self._num_awaiting += 1
        try:
            self._wake()
            async with asyncio.timeout(timeout):
                await self._until_ready()
        except TimeoutError:
            logger.warning("no target was started within %g s", timeout)
        finally:
            self._num_awaiting -= 1
        return self._pool.identities

    async def _until_ready(self) -> None:
        while not (self._pool.identities or self._closed):
            self._ready.clear()
            await self._ready.wait()

    @property
    def wants_target(self) -> bool:
        """Somebody waits for a target, and there is none."""
        return not self._pool.identities and bool(self._num_awaiting or self._waiting)

    def open_choices(self, request: CheckedRequest) -> list[SequenceStream]:
        """Place a sequence for each choice of a request and return their streams by index: see ``open``.

        They begin on one target while it has room, where they can share what their prompt costs; after that
        each of them survives on its own.
        """
        streams: list[SequenceStream] = []
        preferred: str | None = None
        for index in range(request.n):
            streams.append(self.open(request.choice(index), preferred))
            if index == 0 and (place := self._places.get(streams[0].sequence_id)) is not None:
                preferred = place.target_id
        return streams

    def open(self, request: CheckedRequest, preferred: str | None = None) -> SequenceStream:
        """Place one sequence and return its stream, which must be closed (see there).

        Args:
            request: its ``n`` is taken for 1.
            preferred: the target to begin on while it has room.
        """
        loop = asyncio.get_running_loop()
        limit = request.time_limit
        if limit is None and (seconds := self._settings.request_timeout_seconds) is not None:
            limit = TimeLimit(seconds, loop.time())
        sequence = Sequence(uuid.uuid4().hex, request, limit)
        self._live[sequence.sequence_id] = sequence
        if limit is not None:
            self._deadlines[sequence.sequence_id] = loop.call_at(
                limit.deadline, self._fail, sequence, limit.exceeded()
            )
        if self._closed:
            self._fail(sequence, UnavailableError(_CLOSING))
        self._place_waiting()
        self._place(sequence, preferred)
        return SequenceStream(sequence, self._stop, self._abandon)

    def snapshot(self) -> GatewaySnapshot:
        return GatewaySnapshot(
            targets=tuple(self._pool.loads),
            num_dialling=self._pool.num_dialling,
            num_live=len(self._live),
            num_waiting=len(self._waiting),
            num_placements=self._num_placements,
            num_failovers=self._num_failovers,
            num_ignored_messages=self._num_ignored_messages,
        )

    async def close(self) -> None:
        """End with UNAVAILABLE what is live and what is still to come, and leave every target. Idempotent."""
        self._closed = True
        self._ready.set()
        for sequence in list(self._live.values()):
            self._fail(sequence, UnavailableError(_CLOSING))
        if self._retry is not None:
            self._retry.cancel()
        await self._pool.close()

    # ------------------------------------------------------------ TargetEvents

    def on_ready(self) -> None:
        self._ready.set()
        self._place_waiting()

    def on_joined(self, target: AttachedTarget) -> None:
        """What waits, or queues elsewhere, may begin here at once."""
        for sequence in self._live.values():
            sequence.refused_by.discard(target.target_id)  # a former one of this name
            sequence.avoids.discard(target.target_id)
        if target.load.accepting:
            self._place_waiting()
        if not target.load.accepting or target.load.queueing:
            return
        present = dict(self._pool.present)
        alike = 1 + len(self._places)  # more than any can hold: nobody says how many it could
        moves = even_out(
            target.target_id,
            {name: Occupancy(len(other.sequences), alike) for name, other in present.items()},
            {name: len(other.queued) for name, other in present.items()},
        )
        for name, count in moves.items():
            holder = present[name]
            for sequence in holder.queued[-count:]:
                if target.lost:
                    return  # on one that it was given
                # Where that loss led to another, the holder's, its sequences are elsewhere already.
                if self._places.get(sequence.sequence_id) is holder:
                    holder.cancel(sequence)
                    self._release(sequence)
                    # It had a place: should nobody have one now, it waits and is not refused.
                    sequence.displaced = sequence.displaced or Displacement.MOVED
                    self._place(sequence, target.target_id)

    def on_unreachable(self) -> None:
        if self._pool.num_dialling == 0 and self._wake is None:
            for waiting in list(self._waiting.values()):
                if not waiting.sequence.resuming:
                    self._fail(waiting.sequence, UnavailableError(_NOT_READY))

    def on_committed(self, target: AttachedTarget, message: Committed) -> None:
        sequence = target.sequences.get(message.sequence_id)
        if sequence is None or sequence.stopping:
            self._num_ignored_messages += sequence is None
            return
        arrival = sequence.apply(message)
        if arrival is Arrival.STALE:
            self._num_ignored_messages += 1
        elif arrival is Arrival.BROKEN:
            logger.error(
                "target %s sent %d tokens at %d for sequence %s of %d tokens, which do not fit: moving it",
                target.target_id,
                len(message.token_ids),
                message.base_position,
                sequence.sequence_id,
                sequence.num_tokens,
            )
            target.cancel(sequence)
            self._release(sequence)
            self._replace(sequence, Displacement.LOST)

    def on_finished(self, target: AttachedTarget, message: Finished) -> None:
        sequence = target.sequences.get(message.sequence_id)
        if sequence is None or message.epoch != sequence.epoch:
            self._num_ignored_messages += 1
            return
        has_begun = target.has_begun(sequence)
        self._release(sequence)
        sequence.speculation.add(message.speculation)
        if sequence.stopping:
            self._end(sequence, FinishReason.STOP, message.cached_prompt_tokens)
        elif message.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._end(sequence, message.reason, message.cached_prompt_tokens)
        elif message.reason is FinishReason.ERROR and message.invalid_argument:
            self._fail(sequence, _invalid_argument(message.error))
        elif message.reason is FinishReason.ERROR and message.resource_exhausted:
            sequence.refused_by.add(target.target_id)
            if sequence.resuming or self._waiting:
                target.refuse()
                self._retry_later()
            self._place(sequence)
        elif message.reason is FinishReason.ERROR and message.deadline_exceeded and sequence.limit:
            self._fail(sequence, sequence.limit.exceeded())
        elif message.reason is FinishReason.CANCELLED:
            # Not cancelled by us: the target is leaving and gives its sequences back.
            if not has_begun:  # it may not have said yet that it leaves
                sequence.avoids.add(target.target_id)
            self._replace(sequence, Displacement.GIVEN_BACK)
        elif not target.load.accepting:
            self._replace(sequence, Displacement.LOST)
        elif not sequence.failed_before:
            # Perhaps the target's fault. A second failure, elsewhere where there is elsewhere, is the
            # request's: it must not go round and fail every target.
            logger.warning("target %s failed a sequence, trying again: %s", target.target_id, message.error)
            sequence.failed_before = True
            sequence.avoids.add(target.target_id)
            self._replace(sequence, Displacement.LOST)
        else:
            logger.error("target %s failed a sequence again: %s", target.target_id, message.error)
            self._fail(sequence, TargetFailedError(message.error or "the target failed this request"))

    def on_draining(self, target: AttachedTarget) -> None:
        """What has not begun there begins elsewhere at once, if there is an elsewhere."""
        for sequence in target.not_begun:
            if not self._open_targets() - sequence.refused_by - sequence.avoids:
                continue
            target.cancel(sequence)
            self._release(sequence)
            self._replace(sequence, Displacement.GIVEN_BACK)
        self._wait_for_others()

    def on_lost(self, target: AttachedTarget) -> None:
        for sequence in list(target.sequences.values()):
            self._release(sequence)
            self._replace(sequence, Displacement.LOST)
        self._wait_for_others()

    # ------------------------------------------------------------ placing

    def _place(self, sequence: Sequence, preferred: str | None = None) -> None:
        """Put an unplaced sequence on a target, or let it wait for one, or end it."""
        if sequence.ended or sequence.sequence_id in self._places:
            return
        if (reason := sequence.find_end()) is not None:
            self._end(sequence, reason)
            return
        while True:
            target_id = choose_target(
                (target.load for target in self._pool.present.values() if not target.full),
                excluded=sequence.refused_by | sequence.avoids,
                preferred=preferred,
                turn=self._num_placements,
            )
            if target_id is None:
                self._wait(sequence)
                return
            target = self._pool.present[target_id]
            try:
                target.submit(sequence)
            except PacelineError as error:
                self._pool.lose(target, str(error))
                if sequence.ended or sequence.sequence_id in self._places:
                    return  # that loss was looked after, for this one as well
                continue
            self._places[sequence.sequence_id] = target
            self._num_placements += 1
            self._stop_waiting(sequence)
            return

    def _replace(self, sequence: Sequence, displacement: Displacement) -> None:
        """Place a sequence again that has its target no more."""
        if sequence.stopping:
            self._end(sequence, FinishReason.STOP)
            return
        if displacement is Displacement.LOST:
            sequence.num_losses += 1
            if sequence.num_losses > self._settings.max_losses:
                text = f"the request lost its target {sequence.num_losses} times and was given up"
                self._fail(sequence, UnavailableError(text))
                return
            self._num_failovers += 1
        sequence.displaced = displacement
        self._place(sequence)

    def _wait(self, sequence: Sequence) -> None:
        """No target takes the sequence now. A new one waits only for targets that are being dialled, or
        started; one that had a target waits for any."""
        refused = bool(sequence.refused_by or sequence.avoids or self._pool.identities)
        if refused and not sequence.resuming:
            self._fail(sequence, OverloadedError("every target's queue is full; try again later"))
            return
        if refused:
            self._retry_later()
        sequence.refused_by.clear()  # it may be asked again when it shows room
        self._wait_for(sequence, self._what_to_wait_for(sequence))
        self._wake_if_wanted()

    def _what_to_wait_for(self, sequence: Sequence) -> Wait:
        begun = bool(sequence.committed) or sequence.displaced is Displacement.LOST
        if self._wake is not None and not begun and not self._pool.identities:
            return Wait.STARTED
        return Wait.DIALLED if sequence.displaced is None else Wait.ANOTHER

    def _wait_for(self, sequence: Sequence, wait: Wait) -> None:
        waiting = self._waiting.get(sequence.sequence_id)
        if waiting is not None and waiting.wait is wait:
            return
        settings = self._settings
        if wait is Wait.STARTED:
            seconds = settings.cold_start_timeout_seconds
            text = f"no target was started within {seconds:g} s"
        elif sequence.displaced is not None:
            seconds = settings.resume_timeout_seconds
            text = f"{_CAUSES[sequence.displaced]} and no other took the request within {seconds:g} s"
        elif self._pool.num_dialling:
            seconds = settings.attach_grace_seconds
            text = _NOT_READY
        else:
            self._fail(sequence, UnavailableError(_NOT_READY))
            return
        self._stop_waiting(sequence)
        loop = asyncio.get_running_loop()
        now = loop.time()
        began = now - sequence.seconds_waited.get(wait, 0.0)
        give_up = loop.call_at(began + seconds, self._fail, sequence, UnavailableError(text))
        self._waiting[sequence.sequence_id] = _Waiting(sequence, wait, now, began, give_up)

    def _place_waiting(self) -> None:
        """Give what room there is to those that wait. Looks at none of them where there is none."""
        if not self._waiting:
            return
        if open_targets := self._open_targets():
            for sequence in self._longest_waiting():
                if open_targets <= sequence.avoids:
                    continue
                self._place(sequence)
                if not (open_targets := self._open_targets()):
                    break
        if self._waiting:
            self._retry_later()

    def _open_targets(self) -> set[str]:
        return {target_id for target_id, target in self._pool.present.items() if target.open}

    def _longest_waiting(self) -> list[Sequence]:
        waiting = sorted(self._waiting.values(), key=lambda item: item.began)
        return [item.sequence for item in waiting]

    def _wait_for_others(self) -> None:
        """A target takes nothing more: those that wait may have to wait for one that must be started."""
        for sequence in self._longest_waiting():
            self._place(sequence)
        self._wake_if_wanted()

    def _wake_if_wanted(self) -> None:
        if self._wake is not None and self.wants_target:
            self._wake()

    def _stop_waiting(self, sequence: Sequence) -> None:
        waiting = self._waiting.pop(sequence.sequence_id, None)
        if waiting is not None:
            waiting.give_up.cancel()
            seconds = asyncio.get_running_loop().time() - waiting.since
            sequence.seconds_waited[waiting.wait] = sequence.seconds_waited.get(waiting.wait, 0.0) + seconds

    def _retry_later(self) -> None:
        if self._retry is None:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(REFUSED_RETRY_SECONDS, self._retry_waiting)

    def _retry_waiting(self) -> None:
        """Ask targets again that failed those that wait, or gave them back, and try for room at the full."""
        self._retry = None
        for target in self._pool.present.values():
            if self._waiting:
                target.ask_again()
            else:
                target.forget_refusal()
        for waiting in self._waiting.values():
            waiting.sequence.avoids.clear()
        self._place_waiting()

    # ------------------------------------------------------------ ending

    async def _stop(self, sequence: Sequence) -> SequenceResult:
        target = self._places.get(sequence.sequence_id)
        if not sequence.ended and target is None:
            self._end(sequence, FinishReason.STOP)
        elif not sequence.ended and target is not None:
            sequence.stopping = True
            target.cancel(sequence)
            timer = asyncio.get_running_loop().call_later(
                self._settings.cancel_timeout_seconds, self._end, sequence, FinishReason.STOP
            )
            try:
                while not sequence.ended:
                    await sequence.wait()
            finally:
                timer.cancel()
        cached = sequence.result.cached_prompt_tokens if sequence.result is not None else 0
        return SequenceResult(FinishReason.STOP, sequence.speculation, cached)

    def _abandon(self, sequence: Sequence) -> None:
        """Nobody wants the sequence any more: free it, wherever it is. Idempotent."""
        self._end(sequence, FinishReason.CANCELLED)

    def _end(self, sequence: Sequence, reason: FinishReason, cached_prompt_tokens: int = 0) -> None:
        if not sequence.ended:
            self._forget(sequence)
            sequence.finish(reason, cached_prompt_tokens)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        if not sequence.ended:
            self._forget(sequence)
            sequence.fail(error)

    def _forget(self, sequence: Sequence) -> None:
        self._stop_waiting(sequence)
        target = self._places.get(sequence.sequence_id)
        if target is not None:
            target.cancel(sequence)
            self._release(sequence)
        deadline = self._deadlines.pop(sequence.sequence_id, None)
        if deadline is not None:
            deadline.cancel()
        self._live.pop(sequence.sequence_id, None)

    def _release(self, sequence: Sequence) -> None:
        target = self._places.pop(sequence.sequence_id, None)
        if target is not None:
            target.release(sequence)


def _invalid_argument(text: str) -> InvalidArgumentError:
    """A target's refusal, which reads ``field: reason``."""
    field, separator, reason = text.partition(": ")
    return InvalidArgumentError(field, reason) if separator else InvalidArgumentError("request", text)
