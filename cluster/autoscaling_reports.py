"""What replicas tell the autoscaler of themselves, and how it reads it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from paceline.actors.engine.draft_engine import DraftSnapshot
from paceline.actors.engine.target_output import TargetSnapshot
from paceline.cluster.autoscaling import DraftReport, TargetReport

ReportT = TypeVar("ReportT", TargetReport, DraftReport)


class TargetReporter:
    """Turns one target's snapshots into reports; what is counted there is compared with the one before."""

    def __init__(self) -> None:
        self._num_turns = 0
        self._num_late = 0

    def report(self, snapshot: TargetSnapshot) -> TargetReport:
        turns = snapshot.num_draft_turns_total - self._num_turns
        late = snapshot.num_late_drafts_total - self._num_late
        self._num_turns, self._num_late = snapshot.num_draft_turns_total, snapshot.num_late_drafts_total
        return TargetReport(
            num_running=snapshot.num_running,
            num_waiting=snapshot.num_waiting,
            queue_seconds=snapshot.queue_seconds,
            kv_cache_usage=kv_cache_usage(snapshot.free_blocks, snapshot.total_blocks),
            num_wanting_draft=snapshot.num_wanting_draft,
            num_drafted=snapshot.num_drafted,
            draft_lateness=late / turns if turns > 0 else 0.0,
        )


class DraftReporter:
    """Turns one draft's snapshots into reports."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._busy_seconds = 0.0

    def report(self, snapshot: DraftSnapshot) -> DraftReport:
        now = self._clock()
        seconds, self._at = now - self._at, now
        busy = snapshot.busy_seconds_total - self._busy_seconds
        self._busy_seconds = snapshot.busy_seconds_total
        return DraftReport(
            num_sequences=snapshot.num_sequences,
            # A step that ends in this interval may have begun in the one before.
            utilization=min(max(busy / seconds, 0.0), 1.0) if seconds > 0.0 else 0.0,
        )


def kv_cache_usage(free_blocks: int, total_blocks: int) -> float:
    """Share of the KV blocks that live sequences hold."""
    return 1.0 - free_blocks / total_blocks if total_blocks else 0.0


def to_stats(report: TargetReport | DraftReport) -> dict[str, float]:
    """As Serve's ``record_autoscaling_stats`` returns it."""
    return {name: float(value) for name, value in asdict(report).items()}


def from_stats(kind: type[ReportT], metrics: Mapping[str, Mapping[Any, float]]) -> list[ReportT]:
    """One report per replica that has told anything.

    Args:
        metrics: name → replica → value, as Serve's autoscaling context has it. What is none of the report's
            (Serve's own figures) is left out.
    """
    names = [field.name for field in fields(kind)]
    replicas = {replica for name in names for replica in metrics.get(name, {})}
    return [
        kind(**{name: metrics[name][replica] for name in names if replica in metrics.get(name, {})})
        for replica in replicas
    ]
