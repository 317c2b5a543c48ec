"""The Serve application: three deployments, bound to each other, from one configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig as ServeAutoscalingConfig

from paceline.cluster.autoscaling_policies import draft_autoscaling, gateway_autoscaling, target_autoscaling
from paceline.cluster.config import GatewayConfig, ModelPool, PacelineConfig, ReplicaPool, load_config
from paceline.cluster.deployment_names import DRAFT, GATEWAY, TARGET
from paceline.cluster.deployments import DraftDeployment, GatewayDeployment, TargetDeployment
from paceline.cluster.replica_options import actor_options, placement_options

CONTROL_CALLS = 16
"""Calls that a replica takes beside its own work: discovery and status must never queue behind requests."""

UNLIMITED = 1 << 20

HEALTH_CHECK_PERIOD_SECONDS = 2.0
HEALTH_CHECK_TIMEOUT_SECONDS = 10.0


def build_app(config: PacelineConfig | Mapping[str, Any]) -> Application:
    """Gateway, target and, where the configuration has one, draft. Deploy it under any route prefix but
    None, which Serve does not reach over gRPC.

    Args:
        config: or what its file contains: the ``args`` of an application in a Serve configuration file.

    Raises:
        ConfigError: the content is no configuration.
    """
    if not isinstance(config, PacelineConfig):
        config = load_config(config)
    target_deployment = serve.deployment(TargetDeployment, name=TARGET)
    target_options = model_pool_options(config.target, target_autoscaling(config))
    target = target_deployment.options(**target_options).bind(config)
    arguments = [config, target]
    if config.draft is not None:
        draft_deployment = serve.deployment(DraftDeployment, name=DRAFT)
        draft_options = model_pool_options(config.draft, draft_autoscaling(config.draft))
        draft = draft_deployment.options(**draft_options).bind(config, target)
        arguments.append(draft)
    gateway_deployment = serve.deployment(GatewayDeployment, name=GATEWAY)
    autoscaling = config.gateway.autoscaling_config
    gateway_options = pool_options(
        config.gateway,
        gateway_autoscaling(autoscaling) if autoscaling is not None else None,
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
    pool: ReplicaPool,
    autoscaling: ServeAutoscalingConfig | None,
    *,
    max_ongoing_requests: int,
    graceful_shutdown_timeout_s: float,
) -> dict[str, Any]:
    """Serve's deployment options for a pool. ``autoscaling``: None: the pool's size is fixed."""
    options: dict[str, Any] = {
        "max_ongoing_requests": max_ongoing_requests,
        "graceful_shutdown_timeout_s": graceful_shutdown_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "max_surge_percent": pool.max_surge_percent,
        "health_check_period_s": HEALTH_CHECK_PERIOD_SECONDS,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_SECONDS,
        "ray_actor_options": actor_options(pool),
    }
    if autoscaling is None:
        options["num_replicas"] = pool.num_replicas
    else:
        options["autoscaling_config"] = autoscaling
    return options


def model_pool_options(pool: ModelPool, autoscaling: ServeAutoscalingConfig | None) -> dict[str, Any]:
    """Serve's deployment options for a pool that runs a model. Its data does not travel through Serve."""
    options = pool_options(
        pool,
        autoscaling,
        max_ongoing_requests=CONTROL_CALLS,
        graceful_shutdown_timeout_s=pool.graceful_shutdown_timeout_s,
    )
    return options | placement_options(pool)
