"""From a configuration to a running service: checks first, then Ray, Serve, and the pools."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from paceline.actors import weights
from paceline.actors.engine.errors import ModelError
from paceline.actors.vocabulary import check_compatible, vocabulary_hash
from paceline.actors.weight_progress import ProgressCallback, silent
from paceline.cluster.auth import first_token
from paceline.cluster.client import connect
from paceline.cluster.config import ModelPool, PacelineConfig
from paceline.cluster.replica_options import bundle_cpus, is_sharded, missing_resource
from paceline.cluster.request_limits import message_environment
from paceline.cluster.runtime import (
    POLL_SECONDS,
    OnProgress,
    Runtime,
    RuntimeStartError,
    free_port,
    import_serve,
    port_is_free,
    running_cluster,
)
from paceline.cluster.tokenization import load_codec
from paceline.protos import generation_pb2 as proto

APPLICATION_NAME = "paceline"
ROUTE_PREFIX = "/paceline"
PROBE_TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True)
class RunningService:
    """What a caller needs to know of a service that is up."""

    grpc_address: str
    ray_address: str
    started_ray: bool
    info: proto.GetModelInfoResponse


def check_models(config: PacelineConfig, progress: ProgressCallback = silent) -> None:
    """See that the models are there and speak the same token ids, before anything starts.

    Raises:
        ModelError: a model is missing or cannot be divided as it is to be, with the remedy.
        IncompatibleDraftError: the draft's token map is another one.
    """
    target_source = weights.resolve(config.model, progress)
    check_emulated(config)
    check_divided(config, config.target, target_source)
    if config.draft is None:
        return
    draft_source = weights.resolve(config.draft.model, progress)
    check_divided(config, config.draft, draft_source)
    if draft_source == target_source or _same_tokenizer_file(target_source, draft_source):
        return
    target = load_codec(target_source, trust_remote_code=config.trust_remote_code)
    draft = load_codec(draft_source, trust_remote_code=config.trust_remote_code)
    check_compatible(
        draft_model=config.draft.model,
        draft_vocabulary=vocabulary_hash(draft.vocabulary()),
        target_model=config.model,
        target_vocabulary=vocabulary_hash(target.vocabulary()),
    )


def check_divided(config: PacelineConfig, pool: ModelPool, source: str) -> None:
    """Raises: ModelError for a model that does not divide among the pool's ranks, from its configuration."""
    from paceline.actors.model_spec import EMULATED_SCHEME

    if not is_sharded(pool):
        return
    name = "target" if pool is config.target else "draft"
    if source.startswith(EMULATED_SCHEME):
        raise ModelError(f"{name}.tensor_parallel_size: an emulated model is not divided: set it to 1")
    from paceline.actors.engine.loading import load_model_config
    from paceline.actors.engine.tensor_parallel import check_tensor_parallel

    loaded = load_model_config(source, trust_remote_code=config.trust_remote_code)
    check_tensor_parallel(loaded, pool.tensor_parallel_size, name)


def check_emulated(config: PacelineConfig) -> None:
    """Raises: ModelError for an ``emulated://`` address that no runner would take."""
    from paceline.actors.engine.emulated import EmulatedRunner
    from paceline.actors.model_spec import EMULATED_SCHEME

    for source in (config.model, config.draft.model if config.draft else ""):
        if source.startswith(EMULATED_SCHEME):
            EmulatedRunner.from_source(source, num_blocks=1, block_size=1)


def _same_tokenizer_file(target_source: str, draft_source: str) -> bool:
    """Whether two local models plainly have one token map: seconds sooner than loading both tokenisers,
    and the pools compare the loaded ones again when they meet."""
    from tokenizers import Tokenizer

    files = [Path(source) / "tokenizer.json" for source in (target_source, draft_source)]
    if not all(file.is_file() for file in files):
        return False
    target, draft = (Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True) for file in files)
    return bool(target == draft)


def required_cpus(config: PacelineConfig) -> int:
    """Logical processors that a Ray of our own needs for every replica that may ever run.

    They are a number for placement, not cores: replicas of one laptop share its cores, and their thread
    counts (``num_threads``) say how.
    """
    pools = [config.gateway, config.target, *([config.draft] if config.draft else [])]
    reserved = 0.0
    for pool in pools:
        autoscaling = pool.autoscaling_config
        most = autoscaling.max_replicas if autoscaling is not None else pool.num_replicas
        reserved += most * bundle_cpus(pool)
    return max(os.cpu_count() or 1, int(reserved) + 1)


def cluster_to_join(config: PacelineConfig, address: str | None) -> str | None:
    """Address of the Ray cluster to serve on; None = start one.

    The first of: ``address``, ``config.ray.address``, ``RAY_ADDRESS``, the Ray that runs on this machine.
    ``local``, or a configuration that says what a cluster started here is to be like, asks for an own one.
    """
    started_here = not config.ray.model_fields_set.isdisjoint(("num_cpus", "include_dashboard"))
    wanted = address or config.ray.address or ("local" if started_here else os.environ.get("RAY_ADDRESS"))
    return None if wanted == "local" else wanted or running_cluster()


@contextlib.contextmanager
def serving(
    config: PacelineConfig,
    *,
    address: str | None = None,
    verbose: bool = False,
    timeout_seconds: float | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_progress: OnProgress = lambda pools: None,
) -> Iterator[RunningService]:
    """A running service for the length of the block; afterwards it is drained and gone.

    Args:
        address: Ray cluster to join; ``auto``: this machine's; ``local``: start one. None: see
            ``cluster_to_join``.
        timeout_seconds: give up where the service is not ready by then; None = never.
        on_stage: told in a few words what happens next.

    Raises:
        RuntimeStartError: the service does not come up; what was started has been stopped again.
    """
    port = config.gateway.grpc_port
    token = first_token(config.security.tokens_file)
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    joined = cluster_to_join(config, address)
    if joined is None and not port_is_free(port, "0.0.0.0"):
        # Found out before the seconds that Ray needs.
        raise RuntimeStartError(f"port {port} is in use; choose another one with --port")
    on_stage(f"joining the Ray at {joined}" if joined else "starting Ray")
    runtime = Runtime.open(
        address=joined,
        num_cpus=config.ray.num_cpus or required_cpus(config),
        include_dashboard=config.ray.include_dashboard,
        namespace=config.ray.namespace,
        verbose=verbose,
        environment=message_environment(config.security),
    )
    with runtime:
        if runtime.started_ray:
            check_resources(config, runtime.resources())
        # Only now: Ray Serve reads its environment when it is imported.
        from paceline.cluster.application import build_app

        on_stage("starting Ray Serve")
        runtime.start_serve(host=config.gateway.http_host, port=port, http_port=_http_port(config))
        on_stage("starting the pools")
        runtime.deploy(build_app(config), name=APPLICATION_NAME, route_prefix=ROUTE_PREFIX)
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        runtime.wait_until_ready(APPLICATION_NAME, on_progress=on_progress, timeout_seconds=left)
        host = "127.0.0.1" if config.gateway.http_host in ("0.0.0.0", "::") else config.gateway.http_host
        grpc_address = f"{host}:{port}"
        info = probe(grpc_address, runtime, token, may_sleep=config.target.may_sleep)
        yield RunningService(grpc_address, runtime.ray_address, runtime.started_ray, info)
        drain_gateways(config.gateway.graceful_shutdown_timeout_s)


def check_resources(config: PacelineConfig, available: Mapping[str, float]) -> None:
    """Raises: RuntimeStartError for a replica that a cluster that does not grow cannot hold: it would wait
    for ever."""
    for name, pool in (("target", config.target), ("draft", config.draft)):
        if pool is not None and (missing := missing_resource(pool, available)) is not None:
            raise RuntimeStartError(
                f"{name}: {missing}; lower {name}.tensor_parallel_size or {name}.ray_actor_options, or serve "
                "on a larger cluster with --address"
            )


def drain_gateways(timeout_seconds: float) -> None:
    """New requests are refused from now on; returns when those that run have ended, or the time is over."""
    from paceline.cluster.deployment_names import GATEWAY
    from paceline.cluster.directory import DRAIN_METHOD, ask_replicas, lent

    with lent(import_serve().get_deployment_handle(GATEWAY, APPLICATION_NAME)) as handle:
        ask_replicas(handle, DRAIN_METHOD, timeout_seconds=timeout_seconds)


def probe(
    grpc_address: str, runtime: Runtime, token: str | None = None, *, may_sleep: bool = False
) -> proto.GetModelInfoResponse:
    """Ask the public endpoint who it is, until it has a target: the last sign that the service is up.

    Args:
        token: one that the service lets in, where it asks for any.
        may_sleep: it is up without a target, too.

    Raises:
        RuntimeStartError: nobody answers, it is not this service, or its gateway finds no target.
    """
    deadline = time.monotonic() + PROBE_TIMEOUT_SECONDS
    with connect(grpc_address, token) as stub:
        while True:
            left = max(deadline - time.monotonic(), 0.1)
            try:
                info: proto.GetModelInfoResponse = stub.GetModelInfo(
                    proto.GetModelInfoRequest(), timeout=left, wait_for_ready=True
                )
            except grpc.RpcError as error:
                raise RuntimeStartError(_unanswered(grpc_address, error, runtime)) from error
            if info.num_targets or may_sleep:
                return info
            if time.monotonic() > deadline:
                raise RuntimeStartError(
                    f"the pools run, but the gateway reaches no target within {PROBE_TIMEOUT_SECONDS:.0f} s; "
                    "are the nodes' addresses reachable from each other?"
                )
            time.sleep(POLL_SECONDS)


def _unanswered(grpc_address: str, error: grpc.RpcError, runtime: Runtime) -> str:
    remedy = (
        ""
        if runtime.started_ray
        else "; Serve of the joined cluster must have been started with Paceline's gRPC servicer and this "
        "port: see docs/operations.md"
    )
    told = f"{error.code().name}: {error.details()}"
    return f"the pools run, but {grpc_address} does not answer ({told}){remedy}"


def _http_port(config: PacelineConfig) -> int:
    """The configured one; where that is a default that is taken, any other: nobody waits for it there."""
    port = config.gateway.http_port
    if "http_port" in config.gateway.model_fields_set or port_is_free(port, config.gateway.http_host):
        return port
    return free_port(config.gateway.http_host)
