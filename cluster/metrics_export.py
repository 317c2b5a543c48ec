"""Hands metrics to Ray, which Prometheus scrapes on every node.

The only module that uses ``ray.serve.metrics``.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from ray.serve import metrics as serve_metrics

from paceline.cluster.metrics import Kind, Metric, Sample

logger = logging.getLogger("ray.serve")

EXPORT_SECONDS = 2.0
"""How often a replica looks at its counters. Ray itself hands them on every ten seconds."""


def make_instrument(metric: Metric) -> Any:
    """Ray's object for it. One per process and metric."""
    if metric.kind is Kind.COUNTER:
        return serve_metrics.Counter(metric.name, description=metric.help, tag_keys=metric.tag_keys)
    if metric.kind is Kind.GAUGE:
        return serve_metrics.Gauge(metric.name, description=metric.help, tag_keys=metric.tag_keys)
    return serve_metrics.Histogram(
        metric.name, description=metric.help, boundaries=list(metric.buckets), tag_keys=metric.tag_keys
    )


class MetricsExporter:
    """One replica's metrics. Counters only grow, whatever is exported; what is not a number is left out.

    Args:
        make: makes the object that a metric is recorded with, Ray's by default.
    """

    def __init__(self, make: Callable[[Metric], Any] = make_instrument) -> None:
        self._make = make
        self._instruments: dict[Metric, Any] = {}
        self._totals: dict[tuple[Metric, tuple[tuple[str, str], ...]], float] = {}

    def export(self, samples: Iterable[Sample]) -> None:
        """Set gauges, and bring counters up to their totals."""
        for sample in samples:
            if not math.isfinite(sample.value):
                continue
            instrument = self._instrument(sample.metric)
            tags = dict(sample.tags)
            if sample.metric.kind is Kind.GAUGE:
                instrument.set(sample.value, tags=tags)
                continue
            key = (sample.metric, tuple(sorted(tags.items())))
            growth = sample.value - self._totals.get(key, 0.0)
            if growth > 0.0:
                self._totals[key] = sample.value
                instrument.inc(growth, tags=tags)

    def observe(self, metric: Metric, value: float) -> None:
        """One value of a histogram."""
        if math.isfinite(value):
            self._instrument(metric).observe(value)

    async def run(self, look: Callable[[], Awaitable[Iterable[Sample]]]) -> None:
        """Export what ``look`` gives, again and again, until cancelled. A look that fails is one that is
        missed: whether the replica is well is not for its metrics to say."""
        while True:
            try:
                self.export(await look())
            except Exception:
                logger.exception("exporting metrics failed")
            await asyncio.sleep(EXPORT_SECONDS)

    def _instrument(self, metric: Metric) -> Any:
        instrument = self._instruments.get(metric)
        if instrument is None:
            instrument = self._instruments[metric] = self._make(metric)
        return instrument
