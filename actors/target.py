"""The target actor: a target engine with its two services. No Ray in here."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
import grpc.aio

from paceline.actors import model_spec
from paceline.actors.channels import ChannelSettings, bind_free_port, server_options
from paceline.actors.engine.config import TargetEngineConfig
from paceline.actors.engine.messages import DraftHello, Load
from paceline.actors.engine.target_engine import TargetEngine
from paceline.actors.engine.target_output import TargetOutbox, TargetSnapshot
from paceline.actors.engine_loop import EngineFailedError, EngineLoop
from paceline.actors.execution_server import ExecutionServicer
from paceline.actors.identity import TargetIdentity
from paceline.actors.model_spec import Allotment, LoadedModel, Loader, ModelSpec
from paceline.actors.server_stream import StreamStatus
from paceline.actors.verification_server import VerificationServicer
from paceline.protos import execution_pb2_grpc, verification_pb2_grpc

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""How long a stream may take to be written out and ended when the target stops."""


@dataclass(frozen=True)
class TargetSpec:
    """What a target serves and how."""

    target_id: str
    """Unique among the replicas of the service, also over restarts."""
    model: ModelSpec
    served_model_name: str = ""
    """Empty: the model's source."""
    engine: TargetEngineConfig = field(default_factory=TargetEngineConfig)
    channels: ChannelSettings = field(default_factory=ChannelSettings)
    stuck_after_seconds: float = 120.0
    """A single step of this length makes the target unhealthy."""

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.source


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What one pass of the engine publishes."""

    outbox: TargetOutbox
    load: Load
    fault: str


class TargetActor:
    """Owns the engine's thread and the gRPC server. Start it once, stop it once."""

    def __init__(self, spec: TargetSpec, load: Loader = model_spec.load) -> None:
        self.spec = spec
        self._load_model = load
        self._engine_loop: EngineLoop[TargetEngine, TargetOutput] | None = None
        self._server: grpc.aio.Server | None = None
        self._execution: ExecutionServicer | None = None
        self._verification: VerificationServicer | None = None
        self._address = ""
        self._load: Load | None = None
        self._fault = ""
        self._allotment: Allotment | None = None
        self._drained = asyncio.Event()
        self._stopped = False

    @property
    def address(self) -> str:
        """``host:port`` of both services; empty before ``start``."""
        return self._address

    @property
    def drafts(self) -> list[DraftHello]:
        """The drafts that are attached now."""
        return [] if self._verification is None else self._verification.drafts

    async def start(self, host: str = "127.0.0.1") -> str:
        """Load the model, start the engine and serve on a free port of ``host``.

        Returns: the address, once the target is ready to be dialled.

        Raises:
            ModelError: the model cannot be served.
            PacelineError: the host cannot be bound, or a certificate cannot be read.
        """
        model = await asyncio.to_thread(
            self._load_model, self.spec.model, max_num_batched_tokens=self.spec.engine.max_num_batched_tokens
        )
        self._allotment = model.allotment
        engine = TargetEngine(model.runner, self.spec.engine, constraints=model.constraints)
        loop = self._start_loop(engine)
        try:
            await loop.call(lambda engine: engine.measure_step_costs())
            identity = self._identity(model, engine)
            self._execution = ExecutionServicer(identity, loop, self.spec.channels, model.constraints)
            self._verification = VerificationServicer(identity, loop, self.spec.channels)
            self._server = grpc.aio.server(options=server_options(self.spec.channels))
            execution_pb2_grpc.add_ExecutionServiceServicer_to_server(self._execution, self._server)  # type: ignore[no-untyped-call]
            verification_pb2_grpc.add_VerificationServiceServicer_to_server(self._verification, self._server)  # type: ignore[no-untyped-call]
            address = bind_free_port(self._server, host, self.spec.channels)
            await self._server.start()
        except BaseException:
            await self.stop(0.0)
            raise
        self._address = address
        logger.info("target %s serves %s at %s", self.spec.target_id, self.spec.model_name, self._address)
        return self._address

    def health(self) -> None:
        """Raises: EngineFailedError with the reason why this target must be replaced."""
        if self._engine_loop is None or self._server is None:
            raise EngineFailedError("the target has not been started")
        self._engine_loop.check(self.spec.stuck_after_seconds)
        if self._fault:
            raise EngineFailedError(self._fault)

    def fail(self, reason: str) -> None:
        """Count the target as failed, and end its streams, although its engine may hang in a step."""
        if self._engine_loop is not None:
            self._engine_loop.fail(reason)

    async def status(self) -> dict[str, Any]:
        """Plain values. Answers after the step in progress; without counters where the engine has failed."""
        status: dict[str, Any] = {
            "id": self.spec.target_id,
            "pid": os.getpid(),
            "model": self.spec.model_name,
            "address": self._address,
            "num_gateways": self._execution.num_gateways if self._execution else 0,
            "drafts": [asdict(hello) for hello in self.drafts],
            "load": asdict(self._load) if self._load else None,
            "kv_cache": asdict(self._allotment) if self._allotment else None,
            "error": "",
        }
        try:
            self.health()
            snapshot = await self.snapshot()
            status["engine"] = asdict(snapshot) | {"hardware": snapshot.hardware.value}
        except EngineFailedError as error:
            status["error"] = str(error)
        return status

    async def snapshot(self) -> TargetSnapshot:
        """The engine's gauges and counters, after the step in progress.

        Raises: EngineFailedError if there is no engine that could tell.
        """
        if self._engine_loop is None:
            raise EngineFailedError("the target has not been started")
        return await self._engine_loop.call(lambda engine: engine.snapshot())

    def start_draining(self) -> None:
        """Take no new sequences; gateways hear of it with the next load."""
        if self._engine_loop is not None:
            self._engine_loop.post(lambda engine: engine.start_draining())

    async def stop(self, grace: float = 10.0) -> None:
        """Drain for up to ``grace`` seconds, end every stream with a status, and stop. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if self._engine_loop is not None and grace > 0.0:
            await self._drain(self._engine_loop, grace)
        self._end_streams(
            StreamStatus(grpc.StatusCode.UNAVAILABLE, f"target {self.spec.target_id} is stopping"), flush=True
        )
        if self._server is not None:
            await self._server.stop(CLOSE_SECONDS)
        if self._engine_loop is not None:
            await self._engine_loop.stop()

    async def _drain(self, loop: EngineLoop[TargetEngine, TargetOutput], grace: float) -> None:
        try:
            async with asyncio.timeout(grace):
                self.start_draining()
                self._load = await loop.call(lambda engine: engine.load())
                while not (self._load.draining and self._load.num_running + self._load.num_waiting == 0):
                    self._drained.clear()
                    await self._drained.wait()
        except TimeoutError:
            logger.warning("target %s still had work after %g s", self.spec.target_id, grace)
        except EngineFailedError as error:
            logger.warning("target %s cannot drain: %s", self.spec.target_id, error)

    def _start_loop(self, engine: TargetEngine) -> EngineLoop[TargetEngine, TargetOutput]:
        last: Load | None = None

        def take() -> TargetOutput | None:
            nonlocal last
            outbox, load = engine.take_outbox(), engine.load()
            if outbox.empty and load == last:
                return None
            last = load
            return TargetOutput(outbox, load, engine.fault)

        self._engine_loop = EngineLoop(
            engine,
            wait_seconds=engine.wait_seconds,
            step=engine.step,
            take_output=take,
            publish=self._publish,
            on_failed=self._on_failed,
            prepare=lambda: model_spec.prepare_thread(self.spec.model),
            name=f"target engine {self.spec.target_id}",
        )
        self._engine_loop.start()
        return self._engine_loop

    def _identity(self, model: LoadedModel, engine: TargetEngine) -> TargetIdentity:
        return TargetIdentity(
            target_id=self.spec.target_id,
            model=self.spec.model_name,
            vocabulary_hash=model.vocabulary_hash,
            vocab_size=model.runner.vocab_size,
            max_model_len=engine.max_model_len,
            kv_capacity_tokens=engine.kv_capacity_tokens,
            cores=model_spec.cores_of(self.spec.model, model.allotment),
        )

    def _publish(self, output: TargetOutput) -> None:
        self._load, self._fault = output.load, output.fault
        if self._execution is not None and self._verification is not None:
            self._verification.publish(output.outbox.drafts)
            self._execution.publish(output.outbox.gateways, output.load)
        self._drained.set()

    def _on_failed(self, error: EngineFailedError) -> None:
        self._drained.set()
        self._end_streams(StreamStatus(grpc.StatusCode.UNAVAILABLE, str(error)), flush=False)

    def _end_streams(self, status: StreamStatus, *, flush: bool) -> None:
        if self._execution is not None and self._verification is not None:
            self._execution.end_streams(status, flush=flush)
            self._verification.end_streams(status, flush=flush)
