"""The three Serve deployments: thin shells that translate between Serve and the parts that do the work.

Plain classes; ``application.build_app`` makes deployments of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import ray
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from paceline.actors import weights
from paceline.actors.draft import DraftActor
from paceline.actors.engine.errors import PacelineError
from paceline.actors.engine.parameters import VerificationRule
from paceline.actors.target import TargetActor
from paceline.cluster.actor_specs import draft_spec, target_spec
from paceline.cluster.admission import Admission
from paceline.cluster.config import PacelineConfig
from paceline.cluster.directory import TargetDirectory
from paceline.cluster.errors import status_of
from paceline.cluster.gateway import Gateway, GatewaySettings
from paceline.cluster.request_parameters import num_choices
from paceline.cluster.service import GenerationLogic, ServiceInfo
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
        self._gateway = Gateway(
            self._id,
            GatewaySettings(
                resume_timeout_seconds=config.gateway.resume_timeout_s,
                request_timeout_seconds=config.gateway.request_timeout_s,
            ),
        )
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
        )
        self._admission = Admission(config.gateway.max_ongoing_requests, config.gateway.max_queued_requests)
        self._directory = TargetDirectory(target)
        self._discovery = asyncio.create_task(self._discover(), name="target discovery")

    async def _discover(self) -> None:
        while True:
            try:
                self._gateway.update_targets(await self._directory.discover())
            except Exception:
                # Serve's controller may be away for a moment; the targets known so far stay.
                logger.exception("looking for targets failed")
            await asyncio.sleep(DISCOVERY_SECONDS)

    async def Generate(  # noqa: N802
        self, message: proto.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> proto.GenerateResponse:
        async with answering(grpc_context), self._admission.admitted(num_choices(message.sampling)):
            return await self._logic.generate(message)

    async def GenerateStream(  # noqa: N802
        self, message: proto.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[proto.GenerateChunk]:
        async with (
            answering(grpc_context),
            self._admission.admitted(num_choices(message.sampling)),
            aclosing(self._logic.generate_stream(message)) as chunks,
        ):
            async for chunk in chunks:
                yield chunk

    async def Tokenize(  # noqa: N802
        self, message: proto.TokenizeRequest, grpc_context: RayServegRPCContext
    ) -> proto.TokenizeResponse:
        async with answering(grpc_context):
            return await self._logic.tokenize(message)

    async def GetModelInfo(  # noqa: N802
        self, message: proto.GetModelInfoRequest, grpc_context: RayServegRPCContext
    ) -> proto.GetModelInfoResponse:
        async with answering(grpc_context):
            return await self._logic.get_model_info(message)

    async def status(self) -> dict[str, Any]:
        """For ``paceline status``: plain values."""
        snapshot = asdict(self._gateway.snapshot())
        return {
            "id": self._id,
            "pid": os.getpid(),
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
        self._discovery.cancel()
        await asyncio.wait({self._discovery})
        await self._gateway.close()
        self._logic.close()


class TargetDeployment:
    """One target replica. Its requests do not come through Serve: gateways and drafts dial its address."""

    async def __init__(self, config: PacelineConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        self._actor = TargetActor(target_spec(config, replica_id()))
        self._grace = stop_grace(config.target.graceful_shutdown_timeout_s)
        self._address = await self._actor.start(ray.util.get_node_ip_address())

    async def endpoint(self) -> tuple[str, str]:
        """(target_id, ``host:port``), for ``TargetDirectory``."""
        return self._actor.spec.target_id, self._address

    async def status(self) -> dict[str, Any]:
        """For ``paceline status``: plain values."""
        return await self._actor.status()

    def check_health(self) -> None:
        """Raises: what makes Serve replace this replica."""
        self._actor.health()

    async def __del__(self) -> None:
        """Serve has taken the replica out of the directory by now: finish what it has, then end."""
        await self._actor.stop(self._grace)


class DraftDeployment:
    """One draft replica: it dials every target of the same application.

    One that every target refuses does not start, so that the deployment fails and tells why.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: PacelineConfig, target: DeploymentHandle[Any]
    ) -> None:
        self._actor = DraftActor(draft_spec(config, replica_id()), TargetDirectory(target).discover)
        await self._actor.start()
        try:
            await self._actor.wait_for_target(FIRST_TARGET_SECONDS)
        except BaseException:
            await self._actor.stop()
            raise

    async def status(self) -> dict[str, Any]:
        """For ``paceline status``: plain values."""
        return await self._actor.status()

    def check_health(self) -> None:
        """Raises: what makes Serve replace this replica."""
        self._actor.health()

    async def __del__(self) -> None:
        await self._actor.stop()


def stop_grace(graceful_shutdown_timeout_s: float) -> float:
    """Seconds that a replica may drain for, so that it has ended before Serve kills it."""
    return max(graceful_shutdown_timeout_s - STOP_MARGIN_SECONDS, graceful_shutdown_timeout_s / 2)
