"""The Serve application: three deployments, bound to each other, from one configuration."""

from __future__ import annotations

import os
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig as ServeAutoscalingConfig

from paceline.actors.threads import thread_environment
from paceline.cluster.config import GatewayConfig, ModelPool, PacelineConfig, ReplicaPool
from paceline.cluster.deployments import DraftDeployment, GatewayDeployment, TargetDeployment

GATEWAY, TARGET, DRAFT = "gateway", "target", "draft"
"""Names of the deployments."""

CONTROL_CALLS = 16
"""Calls that a replica takes beside its own work: discovery and status must never queue behind requests."""

UNLIMITED = 1 << 20

HEALTH_CHECK_PERIOD_SECONDS = 2.0
HEALTH_CHECK_TIMEOUT_SECONDS = 10.0


def build_app(config: PacelineConfig) -> Application:
    """Gateway, target and, where the configuration has one, draft. Deploy it under any route prefix but
    None, which Serve does not reach over gRPC."""
    target_deployment = serve.deployment(TargetDeployment, name=TARGET)
    target = target_deployment.options(**model_pool_options(config.target)).bind(config)
    arguments = [config, target]
    if config.draft is not None:
        draft_deployment = serve.deployment(DraftDeployment, name=DRAFT)
        draft = draft_deployment.options(**model_pool_options(config.draft)).bind(config, target)
        arguments.append(draft)
    gateway_deployment = serve.deployment(GatewayDeployment, name=GATEWAY)
    gateway_options = pool_options(
        config.gateway,
        max_ongoing_requests=gateway_limit(config.gateway),
        graceful_shutdown_timeout_s=config.gateway.graceful_shutdown_timeout_s,
    )
    return gateway_deployment.options(**gateway_options).bind(*arguments)


def gateway_limit(gateway: GatewayConfig) -> int:
    """Requests that Serve lets through to one gateway: all that its own admission lets run or queue, plus
    some, so that it is the gateway that refuses, in its own words."""
    queued = gateway.max_queued_requests if gateway.max_queued_requests >= 0 else UNLIMITED
    return gateway.max_ongoing_requests + queued + CONTROL_CALLS


def pool_options(
    pool: ReplicaPool, *, max_ongoing_requests: int, graceful_shutdown_timeout_s: float
) -> dict[str, Any]:
    """Serve's deployment options for a pool."""
    options: dict[str, Any] = {
        "max_ongoing_requests": max_ongoing_requests,
        "graceful_shutdown_timeout_s": graceful_shutdown_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": HEALTH_CHECK_PERIOD_SECONDS,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_SECONDS,
        "ray_actor_options": actor_options(pool),
    }
    if pool.autoscaling_config is None:
        options["num_replicas"] = pool.num_replicas
    else:
        options["autoscaling_config"] = ServeAutoscalingConfig(
            **pool.autoscaling_config.model_dump(exclude_none=True)
        )
    return options


def model_pool_options(pool: ModelPool) -> dict[str, Any]:
    """Serve's deployment options for a pool that runs a model. Its data does not travel through Serve."""
    return pool_options(
        pool,
        max_ongoing_requests=CONTROL_CALLS,
        graceful_shutdown_timeout_s=pool.graceful_shutdown_timeout_s,
    )


def actor_options(pool: ReplicaPool) -> dict[str, Any]:
    """Ray's options for one replica, its threads' environment included: it must be there before torch is
    imported. The user's own ``env_vars`` win."""
    given = pool.ray_actor_options
    options: dict[str, Any] = given.model_dump(exclude_none=True, exclude={"runtime_env"})
    options = {name: value for name, value in options.items() if value not in ({}, None)}
    if isinstance(pool, ModelPool):
        environment = thread_environment(pool.num_threads or os.cpu_count() or 1)
        if given.num_gpus is None and pool.device == "cuda":
            options["num_gpus"] = 1
    else:
        # A gateway computes nothing; its tokeniser runs on one thread at a time.
        environment = thread_environment(1)
    runtime_env = dict(given.runtime_env)
    runtime_env["env_vars"] = environment | dict(runtime_env.get("env_vars", {}))
    options["runtime_env"] = runtime_env
    return options
