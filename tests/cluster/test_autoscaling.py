"""Sizes of the pools: the decisions, what feeds them, and how Ray Serve is given them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ray.serve.config import AutoscalingContext

from paceline.actors.engine.config import TargetEngineConfig
from paceline.actors.engine.draft_engine import DraftEngine, DraftSnapshot
from paceline.actors.engine.target_engine import TargetEngine
from paceline.cluster.autoscaling import (
    DraftGoals,
    DraftReport,
    TargetGoals,
    TargetReport,
    awake_drafts,
    draft_replicas,
    target_replicas,
)
from paceline.cluster.autoscaling_board import STALE_SECONDS, Board, TargetsSeen
from paceline.cluster.autoscaling_policies import (
    application_autoscaling,
    draft_autoscaling,
    target_autoscaling,
)
from paceline.cluster.autoscaling_reports import DraftReporter, TargetReporter, from_stats, to_stats
from paceline.cluster.config import load_config
from tests.engine.fakes import Clock, HashLaw, HashRunner

TARGET_GOALS = TargetGoals(sequences_per_replica=16, kv_cache_usage=0.8, queue_seconds=5)
DRAFT_GOALS = DraftGoals(sequences_per_replica=32, lateness=0.25)


# ---------------------------------------------------------------------- targets


@pytest.mark.parametrize(
    ("reports", "num_replicas", "expected"),
    [
        ([TargetReport()], 1, 0.0),
        ([TargetReport(num_running=16)], 1, 1.0),
        ([TargetReport(num_running=16, num_waiting=8)], 1, 1.5),
        ([TargetReport(num_running=16), TargetReport(num_running=8)], 2, 1.5),
        # A replica that has not reported yet adds no load of its own.
        ([TargetReport(num_running=40)], 3, 2.5),
        # Few long sequences: memory decides.
        ([TargetReport(num_running=2, kv_cache_usage=1.0)], 1, 1.25),
        ([TargetReport(num_running=2, kv_cache_usage=1.0)] * 2, 2, 2.5),
        # However few there are, they wait too long.
        ([TargetReport(num_running=1, num_waiting=1, queue_seconds=6)], 1, 2.0),
        ([TargetReport(num_running=1, num_waiting=1, queue_seconds=4)], 1, 0.125),
        ([TargetReport(num_waiting=1, queue_seconds=6), TargetReport()], 2, 3.0),
    ],
)
def test_targets_follow_the_most_pressing_need(
    reports: list[TargetReport], num_replicas: int, expected: float
) -> None:
    assert target_replicas(reports, num_replicas, TARGET_GOALS) == pytest.approx(expected)


def test_queued_sequences_count_where_a_target_takes_one_at_a_time() -> None:
    """B60."""
    goals = TargetGoals(sequences_per_replica=1, kv_cache_usage=0.8, queue_seconds=5)
    assert target_replicas([TargetReport(num_running=1, num_waiting=19)], 1, goals) == 20.0


def test_a_queue_asks_for_one_more_than_run_and_not_for_more_while_that_starts() -> None:
    queueing = [TargetReport(num_waiting=4, queue_seconds=60)]
    assert [target_replicas(queueing, 1, TARGET_GOALS) for _ in range(5)] == [2.0] * 5


# ---------------------------------------------------------------------- drafts


@pytest.mark.parametrize(
    ("targets", "drafts", "num_replicas", "expected"),
    [
        ([], [], 0, 0.0),
        # The service is loaded, but nothing is worth drafting.
        ([TargetReport(num_running=200)], [DraftReport()], 1, 0.0),
        ([TargetReport(num_running=8, num_wanting_draft=8)], [], 0, 0.25),
        ([TargetReport(num_wanting_draft=40), TargetReport(num_wanting_draft=40)], [], 0, 2.5),
        # Late, and nothing left to give.
        (
            [TargetReport(num_wanting_draft=8, num_drafted=8, draft_lateness=0.5)],
            [DraftReport(num_sequences=8, utilization=0.9)],
            1,
            2.0,
        ),
        # Late, and idle: another one would be as late.
        (
            [TargetReport(num_wanting_draft=8, num_drafted=8, draft_lateness=0.9)],
            [DraftReport(num_sequences=8, utilization=0.2)],
            1,
            0.25,
        ),
        # Busy, and in time: running ahead.
        (
            [TargetReport(num_wanting_draft=8, num_drafted=8, draft_lateness=0.1)],
            [DraftReport(num_sequences=8, utilization=1.0)],
            1,
            0.25,
        ),
        # One draft for each sequence is all that can help.
        (
            [TargetReport(num_wanting_draft=2, num_drafted=2, draft_lateness=0.9)],
            [DraftReport(num_sequences=1, utilization=1.0)] * 2,
            2,
            2.0,
        ),
        # Lateness counts by the sequences that have it.
        (
            [
                TargetReport(num_wanting_draft=9, num_drafted=9, draft_lateness=0.0),
                TargetReport(num_wanting_draft=1, num_drafted=1, draft_lateness=1.0),
            ],
            [DraftReport(num_sequences=10, utilization=1.0)],
            1,
            10 / 32,
        ),
    ],
)
def test_drafts_follow_the_sequences_that_gain_by_them(
    targets: list[TargetReport], drafts: list[DraftReport], num_replicas: int, expected: float
) -> None:
    assert draft_replicas(targets, drafts, num_replicas, DRAFT_GOALS) == pytest.approx(expected)


# ---------------------------------------------------------------------- reports


def test_lateness_is_that_of_the_time_since_the_last_report() -> None:
    reporter = TargetReporter()
    snapshot = TargetEngine(HashRunner(HashLaw()), TargetEngineConfig()).snapshot()
    assert reporter.report(snapshot).draft_lateness == 0.0
    late = replace(snapshot, num_draft_turns_total=10, num_late_drafts_total=5)
    assert reporter.report(late).draft_lateness == 0.5
    assert reporter.report(late).draft_lateness == 0.0
    better = replace(snapshot, num_draft_turns_total=30, num_late_drafts_total=6)
    assert reporter.report(better).draft_lateness == 0.05


def test_utilization_is_the_share_of_the_time_since_the_last_report() -> None:
    clock = Clock()
    reporter = DraftReporter(clock)
    snapshot = _draft_snapshot()
    assert reporter.report(snapshot).utilization == 0.0
    clock.advance(2.0)
    assert reporter.report(replace(snapshot, busy_seconds_total=1.5)).utilization == 0.75
    clock.advance(1.0)
    assert reporter.report(replace(snapshot, busy_seconds_total=4.0)).utilization == 1.0
    clock.advance(1.0)
    assert reporter.report(replace(snapshot, busy_seconds_total=4.0)).utilization == 0.0


def _draft_snapshot() -> DraftSnapshot:
    from paceline.actors.engine.config import DraftEngineConfig

    return DraftEngine(HashRunner(HashLaw()), DraftEngineConfig()).snapshot()


def test_reports_survive_the_way_through_serve() -> None:
    reports = {"a": TargetReport(1, 2, 3.5, 0.5, 4, 5, 0.25), "b": TargetReport(num_running=7)}
    metrics: dict[str, dict[str, float]] = {"running_requests": {"a": 3.0, "c": 1.0}}
    for replica, report in reports.items():
        for name, value in to_stats(report).items():
            metrics.setdefault(name, {})[replica] = value
    assert sorted(from_stats(TargetReport, metrics), key=repr) == sorted(reports.values(), key=repr)
    assert from_stats(TargetReport, {"running_requests": {"c": 1.0}}) == []


def test_the_board_forgets_pools_that_are_no_more() -> None:
    board = Board()
    seen = TargetsSeen(100.0, 1, (TargetReport(num_running=1),))
    board.post("a", seen)
    assert board.read("a", 100.0 + STALE_SECONDS) == seen
    assert board.read("a", 100.5 + STALE_SECONDS) is None
    assert board.read("b", 100.0) is None


# ---------------------------------------------------------------------- as Serve calls them


class Controller:
    """Serve's part: contexts for the policies of one configuration."""

    def __init__(self, **content: Any) -> None:
        config = load_config({"model": "emulated://m", **content})
        target = target_autoscaling(config)
        assert target is not None
        self.target_options = target
        self.target = target.policy.get_policy()(**target.policy.policy_kwargs)
        draft = draft_autoscaling(config.draft) if config.draft is not None else None
        self.draft_options = draft
        self.draft = draft.policy.get_policy()(**draft.policy.policy_kwargs) if draft is not None else None
        self.application = application_autoscaling(config)

    @staticmethod
    def context(
        name: str,
        running: int,
        wanted: int,
        reports: dict[str, Any],
        now: float = 100.0,
        state: dict[str, Any] | None = None,
    ) -> AutoscalingContext:
        metrics: dict[str, dict[Any, float]] = {}
        for replica, report in reports.items():
            for metric, value in to_stats(report).items():
                metrics.setdefault(metric, {})[replica] = value
        return AutoscalingContext(
            deployment_id=None,
            deployment_name=name,
            app_name="autoscaling-test",
            current_num_replicas=running,
            target_num_replicas=wanted,
            running_replicas=[],
            total_num_requests=0.0,
            total_queued_requests=0.0,
            aggregated_metrics=metrics,
            raw_metrics={},
            capacity_adjusted_min_replicas=0,
            capacity_adjusted_max_replicas=100,
            policy_state=state or {},
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=now,
            config=None,
        )


BOTH: dict[str, Any] = {
    "target": {"autoscaling_config": {"min_replicas": 0, "max_replicas": 4}},
    "draft": {"model": "emulated://m", "max_num_seqs": 8, "autoscaling_config": {"max_replicas": 4}},
}


def test_drafts_grow_from_nothing_by_what_targets_report() -> None:
    controller = Controller(**BOTH)
    report = TargetReport(num_running=20, num_wanting_draft=20)
    assert controller.target(controller.context("target", 1, 1, {"t": report}))[0] == pytest.approx(1.25)
    assert controller.draft is not None
    # A machine is not started for a passing moment.
    wanted, state = controller.draft(controller.context("draft", 0, 0, {}))
    assert wanted == 0
    later = controller.context("draft", 0, 0, {}, now=104.9, state=state)
    assert controller.draft(later) == (0, state)
    later = controller.context("draft", 0, 0, {}, now=105.0, state=state)
    assert controller.draft(later)[0] == pytest.approx(2.5)
    # What is asked for is kept without another delay.
    assert controller.draft(controller.context("draft", 0, 3, {}, now=105.1))[0] == 3


def test_drafts_wanted_for_a_moment_only_start_none() -> None:
    goals = DraftGoals(sequences_per_replica=32, lateness=0.25, wake_delay=5.0)
    assert awake_drafts(0.5, None, 100.0, goals) == (0.0, 100.0)
    assert awake_drafts(0.0, 100.0, 103.0, goals) == (0.0, None)
    assert awake_drafts(0.5, None, 104.0, goals) == (0.0, 104.0)
    assert awake_drafts(0.7, 104.0, 109.0, goals) == (0.7, 104.0)


def test_a_pool_of_which_nothing_is_known_stays_as_it_is() -> None:
    controller = Controller(**BOTH)
    assert controller.draft is not None
    # The targets' policy has not been called for long.
    stale = controller.context("draft", 2, 2, {"d": DraftReport()}, now=100.0 + 100 * STALE_SECONDS)
    assert controller.draft(stale)[0] == 2
    # Targets run and have not reported yet, as after the controller's restart.
    assert controller.target(controller.context("target", 3, 3, {}, now=5000.0))[0] == 3
    assert controller.draft(controller.context("draft", 2, 2, {}, now=5000.0))[0] == 2
    # One is being started for a request.
    assert controller.target(controller.context("target", 0, 1, {}, now=5001.0))[0] == 1


def test_what_is_on_its_way_to_an_empty_pool_is_not_taken_back_while_any_is_wanted() -> None:
    controller = Controller(**BOTH)
    assert controller.draft is not None
    controller.target(controller.context("target", 1, 1, {"t": TargetReport(num_wanting_draft=8)}))
    assert controller.draft(controller.context("draft", 0, 2, {}))[0] == 2
    # With a replica that runs Serve's own delay holds.
    assert controller.draft(controller.context("draft", 1, 2, {}))[0] == 1
    controller.target(controller.context("target", 1, 1, {"t": TargetReport()}))
    assert controller.draft(controller.context("draft", 0, 2, {}))[0] == 0


def test_drafts_of_a_sleeping_target_pool_go_to_sleep() -> None:
    controller = Controller(**BOTH)
    assert controller.draft is not None
    controller.target(controller.context("target", 0, 0, {}))
    assert controller.draft(controller.context("draft", 2, 2, {"d": DraftReport()}))[0] == 0


def test_targets_of_a_fixed_number_report_for_the_drafts() -> None:
    controller = Controller(
        target={"num_replicas": 3},
        draft={"model": "emulated://m", "autoscaling_config": {"max_replicas": 4, "initial_replicas": 2}},
    )
    options = controller.target_options
    assert (options.min_replicas, options.max_replicas, options.initial_replicas) == (3, 3, None)
    assert controller.draft_options is not None
    assert controller.draft_options.initial_replicas == 2


def test_nothing_is_installed_where_no_pool_follows_the_load() -> None:
    config = load_config({"model": "emulated://m", "draft": "emulated://m"})
    assert target_autoscaling(config) is None
    assert config.draft is not None
    assert draft_autoscaling(config.draft) is None
    assert application_autoscaling(config) is None


def test_the_policy_of_the_application_decides_alike() -> None:
    from ray.serve.config import AutoscalingPolicy
    from ray.serve.schema import ServeApplicationSchema

    controller = Controller(**BOTH)
    assert controller.application is not None
    schema = ServeApplicationSchema(import_path="a:b", autoscaling_policy=controller.application)
    assert schema.autoscaling_policy is not None
    policy = AutoscalingPolicy(**schema.autoscaling_policy)
    decide = policy.get_policy()(**policy.policy_kwargs)
    report = TargetReport(num_running=20, num_wanting_draft=20)
    target, draft = _Deployment("target"), _Deployment("draft")

    def contexts(now: float, states: dict[Any, Any]) -> dict[Any, Any]:
        return {
            target: controller.context("target", 1, 1, {"t": report}, now),
            draft: controller.context("draft", 0, 0, {}, now, states.get(draft)),
        }

    decisions, states = decide(contexts(100.0, {}))
    assert decisions[draft] == 0
    decisions, _ = decide(contexts(105.0, states))
    assert {deployment.name: wanted for deployment, wanted in decisions.items()} == pytest.approx(
        {"target": 1.25, "draft": 2.5}
    )


class _Deployment:
    """Serve's ``DeploymentID``, as far as it matters."""

    def __init__(self, name: str) -> None:
        self.name = name
