"""The autoscaling decisions as Ray Serve calls them, and the only module that knows how it does.

Serve runs policies in its controller, on the head node, where this package must be installed. It pickles this
module by value: the board, of which there must be one only, is therefore reached through its own module.
Bounds, delays and damping are Serve's, from the deployment's own configuration; what is decided here is only
how many replicas the load calls for. A pool of which nothing is known stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingConfig as ServeAutoscalingConfig
from ray.serve.config import AutoscalingContext, AutoscalingPolicy

from paceline.cluster import autoscaling_board
from paceline.cluster.autoscaling import (
    DraftGoals,
    DraftReport,
    TargetGoals,
    TargetReport,
    awake_drafts,
    draft_replicas,
    target_replicas,
)
from paceline.cluster.autoscaling_board import TargetsSeen
from paceline.cluster.autoscaling_reports import from_stats
from paceline.cluster.config import DraftConfig, PacelineConfig, TargetConfig
from paceline.cluster.config_autoscaling import (
    AutoscalingConfig,
    GatewayAutoscalingConfig,
    TargetAutoscalingConfig,
)
from paceline.cluster.deployment_names import DRAFT, TARGET

SERVE_OPTIONS = set(AutoscalingConfig.model_fields)

Decision = tuple[float, dict[str, Any]]
"""Replicas, and what the policy is to be told the next time."""

WANTED_SINCE = "wanted_since"


class TargetPolicy:
    """Size of the target pool; also lets the draft pool's policy know what the targets report."""

    def __init__(self, **goals: float) -> None:
        self._goals = TargetGoals(**goals)

    def __call__(self, context: AutoscalingContext) -> Decision:
        seen = targets_seen(context)
        autoscaling_board.BOARD.post(str(context.app_name), seen)
        return decide_targets(context, seen, self._goals), {}


class DraftPolicy:
    """Size of the draft pool, from what the targets report, so that it grows from no replica as well."""

    def __init__(self, **goals: float) -> None:
        self._goals = DraftGoals(**goals)

    def __call__(self, context: AutoscalingContext) -> Decision:
        seen = autoscaling_board.BOARD.read(str(context.app_name), context.current_time or 0.0)
        return decide_drafts(context, seen, self._goals)


class ApplicationPolicy:
    """Both pools at once: the policy of a whole application, which a Serve configuration file may name. It
    overrides the two above."""

    def __init__(self, target: Mapping[str, float] | None, draft: Mapping[str, float] | None) -> None:
        self._target = TargetGoals(**target) if target is not None else None
        self._draft = DraftGoals(**draft) if draft is not None else None

    def __call__(self, contexts: Mapping[Any, AutoscalingContext]) -> tuple[dict[Any, float], dict[Any, Any]]:
        by_name = {deployment.name: (deployment, context) for deployment, context in contexts.items()}
        decisions: dict[Any, float] = {}
        states: dict[Any, Any] = {}
        if TARGET not in by_name:
            return decisions, states
        deployment, context = by_name[TARGET]
        seen = targets_seen(context)
        if self._target is not None:
            decisions[deployment] = decide_targets(context, seen, self._target)
        if self._draft is not None and DRAFT in by_name:
            deployment, context = by_name[DRAFT]
            decisions[deployment], states[deployment] = decide_drafts(context, seen, self._draft)
        return decisions, states


def targets_seen(context: AutoscalingContext) -> TargetsSeen:
    reports = from_stats(TargetReport, context.aggregated_metrics or {})
    return TargetsSeen(context.current_time or 0.0, context.current_num_replicas, tuple(reports))


def decide_targets(context: AutoscalingContext, seen: TargetsSeen, goals: TargetGoals) -> float:
    if not seen.reports:
        return float(context.target_num_replicas)
    return _kept_while_starting(target_replicas(seen.reports, seen.num_replicas, goals), context)


def decide_drafts(context: AutoscalingContext, seen: TargetsSeen | None, goals: DraftGoals) -> Decision:
    if seen is None or (seen.num_replicas and not seen.reports):
        return float(context.target_num_replicas), context.policy_state or {}
    drafts = from_stats(DraftReport, context.aggregated_metrics or {})
    wanted = draft_replicas(seen.reports, drafts, context.current_num_replicas, goals)
    if context.current_num_replicas or context.target_num_replicas:
        return _kept_while_starting(wanted, context), {}
    since = (context.policy_state or {}).get(WANTED_SINCE)
    wanted, since = awake_drafts(wanted, since, context.current_time or 0.0, goals)
    return wanted, {} if since is None else {WANTED_SINCE: since}


def _kept_while_starting(wanted: float, context: AutoscalingContext) -> float:
    """As long as no replica runs Serve heeds no delay, also where fewer are wanted: with every change of the
    load it would take back what is on its way, and ask for it again."""
    if wanted > 0 and not context.current_num_replicas:
        return max(wanted, float(context.target_num_replicas))
    return wanted


# ---------------------------------------------------------------------- from the configuration


def gateway_autoscaling(autoscaling: GatewayAutoscalingConfig) -> ServeAutoscalingConfig:
    """Serve's own policy: gateways grow with the requests that Serve counts there."""
    return ServeAutoscalingConfig(
        **_serve_options(autoscaling), target_ongoing_requests=autoscaling.target_ongoing_requests
    )


def target_autoscaling(config: PacelineConfig) -> ServeAutoscalingConfig | None:
    """None where neither pool follows the load. Where only drafts do, targets report as well: their number is
    then bounded to the one that is configured."""
    target, draft = config.target, config.draft
    goals = target_goals(target)
    if target.autoscaling_config is not None:
        options = _serve_options(target.autoscaling_config)
    elif draft is not None and draft.autoscaling_config is not None:
        fixed = {"min_replicas": target.num_replicas, "max_replicas": target.num_replicas}
        options = _serve_options(draft.autoscaling_config) | {"initial_replicas": None} | fixed
    else:
        return None
    policy = AutoscalingPolicy(policy_function=TargetPolicy, policy_kwargs=goals)
    return ServeAutoscalingConfig(
        **options, target_ongoing_requests=goals["sequences_per_replica"], policy=policy
    )


def draft_autoscaling(draft: DraftConfig) -> ServeAutoscalingConfig | None:
    """None for a pool of fixed size."""
    if draft.autoscaling_config is None:
        return None
    goals = draft_goals(draft)
    policy = AutoscalingPolicy(policy_function=DraftPolicy, policy_kwargs=goals)
    return ServeAutoscalingConfig(
        **_serve_options(draft.autoscaling_config),
        target_ongoing_requests=goals["sequences_per_replica"],
        policy=policy,
    )


def application_autoscaling(config: PacelineConfig) -> dict[str, Any] | None:
    """``autoscaling_policy`` of the application in a Serve configuration file (an option that Ray calls under
    development); None where no pool follows the load. Without it the deployments' own policies decide, alike.
    """
    target, draft = config.target, config.draft
    follows_target = target.autoscaling_config is not None
    follows_draft = draft is not None and draft.autoscaling_config is not None
    if not follows_target and not follows_draft:
        return None
    return {
        "policy_function": f"{__name__}:{ApplicationPolicy.__name__}",
        "policy_kwargs": {
            "target": target_goals(target) if follows_target else None,
            "draft": draft_goals(draft) if draft is not None and follows_draft else None,
        },
    }


def target_goals(target: TargetConfig) -> dict[str, float]:
    """Fields of ``TargetGoals``."""
    autoscaling = target.autoscaling_config or TargetAutoscalingConfig()
    return {
        "sequences_per_replica": autoscaling.target_ongoing_requests,
        "kv_cache_usage": autoscaling.target_kv_cache_usage,
        "queue_seconds": autoscaling.max_queue_time_s,
    }


def draft_goals(draft: DraftConfig) -> dict[str, float]:
    """Fields of ``DraftGoals``; the pool follows the load."""
    autoscaling = draft.autoscaling_config
    assert autoscaling is not None
    return {
        "sequences_per_replica": autoscaling.target_ongoing_requests or float(draft.max_num_seqs),
        "lateness": autoscaling.max_lateness,
        "wake_delay": autoscaling.upscale_delay_s,
    }


def _serve_options(autoscaling: AutoscalingConfig) -> dict[str, Any]:
    return autoscaling.model_dump(include=SERVE_OPTIONS, exclude_none=True)
