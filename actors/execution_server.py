"""The target's side of ExecutionService: gateways attach, sequences come in, tokens go out."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import grpc
import grpc.aio

from paceline.actors import wire
from paceline.actors.channels import PROTOCOL_VERSION, ChannelSettings
from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.messages import Cancel, Finished, Load, Submit
from paceline.actors.engine.parameters import FinishReason, SpeculationStats
from paceline.actors.engine.target_engine import GatewayOutput, TargetEngine
from paceline.actors.engine_loop import EngineLoop
from paceline.actors.grammar import GrammarCompiler, is_prepared, prepare_constraint
from paceline.actors.identity import TargetIdentity
from paceline.actors.outgoing import PendingCommits
from paceline.actors.server_stream import ServerStream, StreamEndError, StreamStatus, answering
from paceline.protos import execution_pb2 as pb
from paceline.protos import execution_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

OutputT = TypeVar("OutputT")

LOAD_INTERVAL_SECONDS = 0.1
"""A gateway that has nothing running here hears of a changed load at most this much later."""


@dataclass(frozen=True)
class Preparation:
    epoch: int
    task: asyncio.Task[None]


@dataclass
class AttachedGateway:
    """One gateway's stream. A gateway that dials again gets another peer name."""

    peer: str
    pending: PendingCommits
    stream: ServerStream[pb.ExecutionRequest, pb.ExecutionResponse]
    load: Load | None = None
    """The last one it was told."""
    preparing: dict[str, Preparation] = field(default_factory=dict)
    """Sequences whose constraint is being compiled, by id."""

    def finish(self, finished: Finished) -> None:
        """Tell it of a sequence that never came to the engine."""
        self.pending.add([], [finished])
        self.stream.mailbox.notify()

    def forget(self, sequence_id: str) -> None:
        """Give up preparing a sequence, if that is under way."""
        preparation = self.preparing.pop(sequence_id, None)
        if preparation is not None:
            preparation.task.cancel()


class ExecutionServicer(pb_grpc.ExecutionServiceServicer):
    """Serves all gateways of one target. All methods run on the event loop."""

    def __init__(
        self,
        identity: TargetIdentity,
        engine_loop: EngineLoop[TargetEngine, OutputT],
        settings: ChannelSettings,
        constraints: GrammarCompiler | None = None,
    ) -> None:
        self._identity = identity
        self._constraints = constraints
        self._engine_loop = engine_loop
        self._settings = settings
        self._gateways: dict[str, AttachedGateway] = {}
        self._counter = itertools.count()
        self._load: Load | None = None
        self._load_timer: asyncio.TimerHandle | None = None
        self._closing: StreamStatus | None = None

    @property
    def num_gateways(self) -> int:
        return len(self._gateways)

    def publish(self, outputs: Mapping[str, GatewayOutput], load: Load) -> None:
        """Hand each gateway what the engine has for it; the load travels along, or a little later."""
        self._load = load
        for peer, output in outputs.items():
            gateway = self._gateways.get(peer)
            if gateway is not None:
                gateway.pending.add(output.committed, output.finished, load)
                gateway.load = load
                gateway.stream.mailbox.notify()
        if self._load_timer is None and any(item.load != load for item in self._gateways.values()):
            self._load_timer = asyncio.get_running_loop().call_later(LOAD_INTERVAL_SECONDS, self._tell_load)

    def end_streams(self, status: StreamStatus, *, flush: bool) -> None:
        """End every stream with ``status``, and refuse new ones with it."""
        self._closing = status
        if self._load_timer is not None:
            self._load_timer.cancel()
            self._load_timer = None
        for gateway in self._gateways.values():
            gateway.stream.end(status, flush=flush)

    async def Attach(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.ExecutionRequest],
        context: grpc.aio.ServicerContext[pb.ExecutionRequest, pb.ExecutionResponse],
    ) -> None:
        """One gateway, from its hello to its end."""
        async with answering(context):
            pending = PendingCommits()
            stream = ServerStream(aiter(request_iterator), context, pending)
            first = await stream.first_request(self._settings.hello_timeout_seconds)
            gateway_id = self._admit(first)
            identity = self._identity
            await stream.write(
                pb.ExecutionResponse(
                    welcome=pb.TargetWelcome(
                        protocol_version=PROTOCOL_VERSION,
                        target_id=identity.target_id,
                        model=identity.model,
                        vocab_size=identity.vocab_size,
                        max_model_len=identity.max_model_len,
                        kv_capacity_tokens=identity.kv_capacity_tokens,
                    ),
                    load=None if self._load is None else wire.load_to_proto(self._load),
                )
            )
            gateway = AttachedGateway(f"{gateway_id}#{next(self._counter)}", pending, stream, load=self._load)
            await self._serve(gateway)

    def _admit(self, first: pb.ExecutionRequest) -> str:
        """Raises: StreamEndError, whose text tells the gateway's operator what to change."""
        if self._closing is not None:
            raise StreamEndError(self._closing.code, self._closing.details)
        if not first.HasField("hello"):
            raise StreamEndError(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello")
        hello = first.hello
        if hello.protocol_version != PROTOCOL_VERSION:
            raise StreamEndError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"gateway {hello.gateway_id!r} speaks protocol version {hello.protocol_version}, target "
                f"{self._identity.target_id!r} speaks {PROTOCOL_VERSION}; run the same release on both",
            )
        if not 1 <= len(hello.gateway_id) <= wire.MAX_ID_LENGTH:
            raise StreamEndError(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"hello.gateway_id: must have 1 to {wire.MAX_ID_LENGTH} characters",
            )
        return hello.gateway_id

    async def _serve(self, gateway: AttachedGateway) -> None:
        self._gateways[gateway.peer] = gateway
        logger.info("gateway %s attached", gateway.peer)

        async def on_request(message: pb.ExecutionRequest) -> None:
            self._handle(gateway, message)
            await self._engine_loop.relieve()

        try:
            await gateway.stream.run(on_request)
        finally:
            for sequence_id in list(gateway.preparing):
                gateway.forget(sequence_id)
            del self._gateways[gateway.peer]
            self._engine_loop.post(lambda engine: engine.gateway_left(gateway.peer))
            logger.info("gateway %s left", gateway.peer)

    def _handle(self, gateway: AttachedGateway, message: pb.ExecutionRequest) -> None:
        peer = gateway.peer
        received_at = time.monotonic()
        submits: list[Submit] = []
        for proto in message.submits:
            try:
                submit = wire.submit_from_proto(proto)
            except InvalidArgumentError as error:
                gateway.finish(_refusal(proto.sequence_id, proto.epoch, error))
                continue
            gateway.forget(submit.sequence_id)
            if is_prepared(self._constraints, submit.sampling.constraint):
                submits.append(submit)
            else:
                # Neither on the engine's thread, where a step of everybody would wait for it, nor here, where
                # the gateway's other messages would.
                task = asyncio.create_task(self._submit_prepared(gateway, submit, received_at))
                gateway.preparing[submit.sequence_id] = Preparation(submit.epoch, task)
        cancels: list[Cancel] = []
        for cancel in map(wire.cancel_from_proto, message.cancels):
            preparation = gateway.preparing.get(cancel.sequence_id)
            if preparation is None:
                cancels.append(cancel)
            elif preparation.epoch == cancel.epoch:
                gateway.forget(cancel.sequence_id)
                gateway.finish(
                    Finished(cancel.sequence_id, cancel.epoch, FinishReason.CANCELLED, SpeculationStats())
                )

        def event(engine: TargetEngine) -> None:
            for submit in submits:
                engine.submit(peer, submit, received_at)
            for cancel in cancels:
                engine.cancel(peer, cancel)

        if submits or cancels:
            self._engine_loop.post(event)

    async def _submit_prepared(self, gateway: AttachedGateway, submit: Submit, received_at: float) -> None:
        """Hand a sequence to the engine once its constraint is compiled. Cancelled where nobody wants it."""
        try:
            await prepare_constraint(self._constraints, submit.sampling.constraint)
        except InvalidArgumentError as error:
            gateway.finish(_refusal(submit.sequence_id, submit.epoch, error))
        except Exception as error:
            logger.exception("a constraint could not be compiled")
            failed = _refusal(submit.sequence_id, submit.epoch, error)
            gateway.finish(replace(failed, invalid_argument=False))
        else:
            self._engine_loop.post(lambda engine: engine.submit(gateway.peer, submit, received_at))
        # Not where it is cancelled: whoever does that has taken it out, and may have put another one there.
        del gateway.preparing[submit.sequence_id]

    def _tell_load(self) -> None:
        self._load_timer = None
        for gateway in self._gateways.values():
            if self._load is not None and gateway.load != self._load:
                gateway.load = self._load
                gateway.pending.add([], [], self._load)
                gateway.stream.mailbox.notify()


def _refusal(sequence_id: str, epoch: int, error: Exception) -> Finished:
    """A submit that cannot be read, or not be compiled, fails alone."""
    return Finished(
        sequence_id=sequence_id,
        epoch=epoch,
        reason=FinishReason.ERROR,
        speculation=SpeculationStats(),
        error=str(error),
        invalid_argument=True,
    )
