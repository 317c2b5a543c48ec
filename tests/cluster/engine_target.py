"""A real target engine behind a real gRPC server, in this process: what a target actor serves to gateways."""

from __future__ import annotations

from collections.abc import Mapping

import grpc.aio

from paceline.actors.channels import ChannelSettings, server_options
from paceline.actors.engine.config import TargetEngineConfig
from paceline.actors.engine.emulated import EmulatedRunner
from paceline.actors.engine.messages import Load, Submit
from paceline.actors.engine.target_engine import GatewayOutput, TargetEngine
from paceline.actors.engine.target_output import TargetSnapshot
from paceline.actors.engine_loop import EngineLoop
from paceline.actors.execution_server import ExecutionServicer
from paceline.actors.identity import TargetIdentity
from paceline.cluster.requests import CheckedRequest
from paceline.protos import execution_pb2_grpc as pb_grpc

Output = tuple[Mapping[str, GatewayOutput], Load]
NUM_BLOCKS = 512
BLOCK_SIZE = 16


def new_engine(source: str, config: TargetEngineConfig | None = None) -> TargetEngine:
    runner = EmulatedRunner.from_source(source, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    return TargetEngine(runner, config or TargetEngineConfig())


def reference_token_ids(source: str, request: CheckedRequest) -> list[int]:
    """The completion that an engine gives to this request alone, without any wire."""
    engine = new_engine(source)
    engine.submit(
        "test",
        Submit(
            "s",
            0,
            request.prompt_token_ids,
            len(request.prompt_token_ids),
            request.sampling,
            request.stopping,
            request.speculation,
        ),
    )
    token_ids: list[int] = []
    while True:
        engine.step()
        output = engine.take_outbox().gateways.get("test", GatewayOutput())
        token_ids.extend(i for committed in output.committed for i in committed.token_ids)
        if output.finished:
            return token_ids


class EngineTarget:
    """Start it, attach gateways to ``address``, and ``kill`` or ``stop`` it."""

    def __init__(self, target_id: str, source: str, config: TargetEngineConfig | None = None) -> None:
        self.engine = new_engine(source, config)
        self.address = ""
        self._loop: EngineLoop[TargetEngine, Output] = EngineLoop(
            self.engine,
            wait_seconds=self.engine.wait_seconds,
            step=self.engine.step,
            take_output=lambda: (self.engine.take_outbox().gateways, self.engine.load()),
            publish=lambda output: self._servicer.publish(*output),
        )
        self._servicer = ExecutionServicer(
            TargetIdentity(
                target_id,
                "toy",
                b"",
                vocab_size=256,
                max_model_len=self.engine.max_model_len,
                kv_capacity_tokens=self.engine.kv_capacity_tokens,
            ),
            self._loop,
            ChannelSettings(),
        )
        self._server: grpc.aio.Server | None = None

    async def start(self) -> str:
        self._server = grpc.aio.server(options=server_options(ChannelSettings()))
        pb_grpc.add_ExecutionServiceServicer_to_server(self._servicer, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._loop.start()
        await self._server.start()
        return self.address

    async def kill(self) -> None:
        """Drop every stream without a word, as a process that dies does."""
        assert self._server is not None
        await self._server.stop(None)
        await self._loop.stop()

    async def snapshot(self) -> TargetSnapshot:
        return await self._loop.call(TargetEngine.snapshot)
