"""The three Serve deployments: thin shells that translate between Serve and the parts that do the work.

Plain classes; ``application.build_app`` makes deployments of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import ray
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from paceline.actors import garbage, weights
from paceline.actors.draft import DraftActor
from paceline.actors.engine.draft_engine import DraftSnapshot
from paceline.actors.engine.errors import PacelineError
from paceline.actors.engine.parameters import VerificationRule
from paceline.actors.engine.priority import check_priority
from paceline.actors.engine.target_output import TargetSnapshot
from paceline.actors.target import TargetActor
from paceline.cluster.actor_specs import draft_spec, target_spec
from paceline.cluster.admission import Admission
from paceline.cluster.autoscaling import DraftReport, TargetReport
from paceline.cluster.autoscaling_reports import DraftReporter, TargetReporter
from paceline.cluster.channel_settings import checked_channel_settings
from paceline.cluster.config import PacelineConfig
from paceline.cluster.directory import TargetDirectory
from paceline.cluster.edge import Edge
from paceline.cluster.errors import status_of
from paceline.cluster.gateway import Gateway, GatewaySettings
from paceline.cluster.metrics import Sample, draft_samples, gateway_samples, target_samples
from paceline.cluster.metrics_export import MetricsExporter
from paceline.cluster.replica_reports import ReplicaReports
from paceline.cluster.request_parameters import num_choices
from paceline.cluster.service import GenerationLogic, ServiceInfo
from paceline.cluster.shards import bring_up, check_gang, end_gang, gang_of, gang_status, loader_of
from paceline.cluster.tokenization import load_codec
from paceline.protos import generation_pb2 as proto

logger = logging.getLogger("ray.serve")

DISCOVERY_SECONDS = 1.0
"""How often a gateway looks which targets there are. Each look costs a call to every target."""


FIRST_TARGET_SECONDS = 120.0
"""How long a draft replica is starting while there is no target yet. It looks on after that."""

STOP_MARGIN_SECONDS = 5.0
"""What is left of the time to stop, once a target has drained, for closing its streams."""


class RequestEndedError(PacelineError):
    """Ends a call in Serve whose code and details are set already."""


@contextlib.asynccontextmanager
async def answering(context: RayServegRPCContext) -> AsyncIterator[None]:
    """Turn what goes wrong within the block into a status code and one sentence.

    Serve would otherwise send the traceback to the caller.
    """
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except Exception as error:
        if not isinstance(error, PacelineError):
            logger.exception("a request failed")
        code, details = status_of(error)
        context.set_code(code)
        context.set_details(details)
        raise RequestEndedError(details) from None


def replica_id() -> str:
    """Unique among all replicas of the service."""
    return str(serve.get_replica_context().replica_id.unique_id)


def node_id() -> str:
    """Of the Ray node that this replica runs on."""
    return str(ray.get_runtime_context().get_node_id())


class GatewayDeployment:
    """The ingress: ``paceline.v1.GenerationService``. Its method names are the RPC's."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: PacelineConfig,
        target: DeploymentHandle[Any],
        draft: DeploymentHandle[Any] | None = None,
    ) -> None:
        source = await asyncio.to_thread(weights.resolve, config.model)
        codec = await asyncio.to_thread(load_codec, source, trust_remote_code=config.trust_remote_code)
        self._id = replica_id()
        self._edge = Edge(config.security)
        self._gateway = Gateway(
            self._id,
            GatewaySettings(
                resume_timeout_seconds=config.gateway.resume_timeout_s,
                request_timeout_seconds=config.gateway.request_timeout_s,
                cold_start_timeout_seconds=config.gateway.cold_start_timeout_s,
            ),
            channels=checked_channel_settings(config),
            wake=self._wake_targets if config.target.may_sleep else None,
        )
        self._metrics = MetricsExporter()
        self._logic = GenerationLogic(
            self._gateway,
            codec,
            ServiceInfo(
                model=config.model_name,
                draft_model=config.draft.model if config.draft else "",
                max_model_len=config.target.max_model_len,
                rule=VerificationRule(config.speculation.verification),
                version=importlib.metadata.version("paceline"),
            ),
            observe=self._metrics.observe,
        )
        self._admission = Admission(config.gateway.max_ongoing_requests, config.gateway.max_queued_requests)
        self._target = target
        self._waking: asyncio.Task[None] | None = None
        self._directory = TargetDirectory(target)
        self._look = asyncio.Event()
        self._discovery = asyncio.create_task(self._discover(), name="target discovery")
        self._export = asyncio.create_task(self._metrics.run(self._samples), name="metrics")
        garbage.freeze()

    def _wake_targets(self) -> None:
        """A call to a deployment without replicas makes Serve start one."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._call_target(), name="waking targets")

    async def _call_target(self) -> None:
        while self._gateway.wants_target:
            try:
                await self._target.endpoint.remote()
            except Exception:
                logger.exception("waking the targets failed")
            self._look.set()
            await asyncio.sleep(DISCOVERY_SECONDS)

    async def _samples(self) -> Iterable[Sample]:
        return gateway_samples(await self.status())

    async def _discover(self) -> None:
        while True:
            self._look.clear()
            try:
                self._gateway.update_targets(await self._directory.discover())
            except Exception:
                # Serve's controller may be away for a moment; the targets known so far stay.
                logger.exception("looking for targets failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DISCOVERY_SECONDS):
                    await self._look.wait()

    @contextlib.asynccontextmanager
    async def _admitted(
        self, message: proto.GenerateRequest, context: RayServegRPCContext, arrived_at: float
    ) -> AsyncIterator[None]:
        """Hold the places of a request that came at ``arrived_at`` (event loop's clock)."""
        size = num_choices(message.sampling)
        self._edge.check(message, context, size)
        check_priority(message.priority)
        limit = self._logic.time_limit(message, arrived_at)
        async with self._admission.admitted(size, message.priority, limit):
            yield

    async def Generate(  # noqa: N802
        self, message: proto.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> proto.GenerateResponse:
        arrived_at = asyncio.get_running_loop().time()
        async with answering(grpc_context), self._admitted(message, grpc_context, arrived_at):
            return await self._logic.generate(message, arrived_at)

    async def GenerateStream(  # noqa: N802
        self, message: proto.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[proto.GenerateChunk]:
        arrived_at = asyncio.get_running_loop().time()
        async with (
            answering(grpc_context),
            self._admitted(message, grpc_context, arrived_at),
            aclosing(self._logic.generate_stream(message, arrived_at)) as chunks,
        ):
            async for chunk in chunks:
                yield chunk

    async def Tokenize(  # noqa: N802
        self, message: proto.TokenizeRequest, grpc_context: RayServegRPCContext
    ) -> proto.TokenizeResponse:
        async with answering(grpc_context):
            self._edge.check(message, grpc_context)
            return await self._logic.tokenize(message)

    async def GetModelInfo(  # noqa: N802
        self, message: proto.GetModelInfoRequest, grpc_context: RayServegRPCContext
    ) -> proto.GetModelInfoResponse:
        async with answering(grpc_context):
            self._edge.check(message, grpc_context, num_sequences=0)
            return await self._logic.get_model_info(message)

    async def status(self) -> dict[str, Any]:
        """For ``paceline status``: plain values."""
        snapshot = asdict(self._gateway.snapshot())
        return {
            "id": self._id,
            "pid": os.getpid(),
            "node_id": node_id(),
            "num_ongoing": self._admission.num_ongoing,
            "num_queued": self._admission.num_queued,
            **snapshot,
        }

    async def drain(self) -> None:
        """Before the service is stopped: refuse new requests as UNAVAILABLE, and return once all that run
        have ended. Serve itself would take the route away first, and callers would hear NOT_FOUND."""
        await self._admission.close()

    def check_health(self) -> None:
        """Raises: RuntimeError if targets are not looked for any more."""
        if self._discovery.done():
            raise RuntimeError("the gateway no longer looks for targets")

    async def __del__(self) -> None:
        """Serve calls it once the replica's requests have ended."""
        await end_tasks(self._discovery, self._export, self._waking)
        await self._gateway.close()
        self._logic.close()


class TargetDeployment:
    """One target replica. Its requests do not come through Serve: gateways and drafts dial its address."""

    _reports: ReplicaReports[TargetSnapshot] | None = None
    """None while it starts."""

    async def __init__(self, config: PacelineConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        spec = target_spec(config, replica_id())
        self._gang = await gang_of(config.target, spec.model)
        self._actor = TargetActor(spec, loader_of(self._gang))
        self._grace = stop_grace(config.target.graceful_shutdown_timeout_s)
        start = self._actor.start(ray.util.get_node_ip_address())
        self._address = await bring_up(self._gang, start, self._actor.fail)
        self._reports = ReplicaReports(
            self._actor.snapshot, TargetReporter().report, target_samples, TargetReport()
        )
        garbage.freeze()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """This replica's own load, for the autoscaling policies."""
        assert self._reports is not None
        return await self._reports.stats()

    async def endpoint(self) -> tuple[str, str]:
        """(target_id, ``host:port``), for ``TargetDirectory``."""
        return self._actor.spec.target_id, self._address

    async def status(self) -> dict[str, Any]:
        """For ``paceline status``: plain values."""
        return {**await self._actor.status(), "node_id": node_id()} | gang_status(self._gang)

    def check_health(self) -> None:
        """Raises: what makes Serve replace this replica."""
        check_gang(self._gang)
        self._actor.health()

    async def __del__(self) -> None:
        """Serve has taken the replica out of the directory by now: finish what it has, then end."""
        await end_tasks(self._reports.task if self._reports else None)
        await self._actor.stop(self._grace)
        await end_gang(self._gang)


class DraftDeployment:
    """One draft replica: it dials every target of the same application.

    One that every target refuses does not start, so that the deployment fails and tells why.
    """

    _reports: ReplicaReports[DraftSnapshot] | None = None
    """None while it starts."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: PacelineConfig, target: DeploymentHandle[Any]
    ) -> None:
        checked_channel_settings(config)
        spec = draft_spec(config, replica_id())
        assert config.draft is not None
        self._gang = await gang_of(config.draft, spec.model)
        self._actor = DraftActor(spec, TargetDirectory(target).discover, loader_of(self._gang))
        await bring_up(self._gang, self._actor.start(), self._actor.fail)
        garbage.freeze()
        try:
            await self._actor.wait_for_target(FIRST_TARGET_SECONDS)
        except BaseException:
            await self._actor.stop()
            await end_gang(self._gang)
            raise
        self._reports = ReplicaReports(
            self._actor.snapshot, DraftReporter().report, draft_samples, DraftReport()
        )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """As a target's."""
        assert self._reports is not None
        return await self._reports.stats()

    async def status(self) -> dict[str, Any]:
        """For ``paceline status``: plain values."""
        return {**await self._actor.status(), "node_id": node_id()} | gang_status(self._gang)

    def check_health(self) -> None:
        """Raises: what makes Serve replace this replica."""
        check_gang(self._gang)
        self._actor.health()

    async def __del__(self) -> None:
        """Goodbye to every target: each gives this draft's sequences to others at once."""
        await end_tasks(self._reports.task if self._reports else None)
        await self._actor.stop()
        await end_gang(self._gang)


async def end_tasks(*tasks: asyncio.Task[None] | None) -> None:
    """Cancel them and wait until they have ended."""
    begun = {task for task in tasks if task is not None}
    for task in begun:
        task.cancel()
    if begun:
        await asyncio.wait(begun)


def stop_grace(graceful_shutdown_timeout_s: float) -> float:
    """Seconds that a replica may drain for, so that it has ended before Serve kills it."""
    return max(graceful_shutdown_timeout_s - STOP_MARGIN_SECONDS, graceful_shutdown_timeout_s / 2)
