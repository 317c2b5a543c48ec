"""What a target or a draft tells of itself: to Serve's autoscaler when asked, to Ray's metrics unasked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from paceline.actors.engine_loop import EngineFailedError
from paceline.cluster.autoscaling import DraftReport, TargetReport
from paceline.cluster.autoscaling_reports import to_stats
from paceline.cluster.metrics import Sample
from paceline.cluster.metrics_export import MetricsExporter

REPORT_SECONDS = 2.0
"""How long a replica's report on its load may wait for the step in progress."""

SnapshotT = TypeVar("SnapshotT")


class ReplicaReports(Generic[SnapshotT]):
    """Begins to export on construction, within a running event loop, until ``task`` is cancelled.

    Args:
        snapshot: the engine's gauges and counters, after the step in progress.
        report: its own load since the report before.
        samples: what is exported.
        idle: the report of a replica that could not tell yet.
    """

    def __init__(
        self,
        snapshot: Callable[[], Awaitable[SnapshotT]],
        report: Callable[[SnapshotT], TargetReport | DraftReport],
        samples: Callable[[SnapshotT], Iterable[Sample]],
        idle: TargetReport | DraftReport,
    ) -> None:
        self._snapshot = snapshot
        self._report = report
        self._samples = samples
        self._stats = to_stats(idle)
        self.task = asyncio.create_task(MetricsExporter().run(self._collect), name="metrics")

    async def stats(self) -> dict[str, float]:
        """For ``record_autoscaling_stats``. Serve asks at regular intervals; a step that takes longer than
        that must not make it give up, so the last report stands in."""
        with contextlib.suppress(TimeoutError, EngineFailedError):
            async with asyncio.timeout(REPORT_SECONDS):
                self._stats = to_stats(self._report(await self._snapshot()))
        return self._stats

    async def _collect(self) -> Iterable[Sample]:
        return self._samples(await self._snapshot())
