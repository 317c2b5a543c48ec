"""What is exported: names, help, counters that only grow, no NaN, and the dashboard that asks for it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.actors.engine.config import DraftEngineConfig, TargetEngineConfig
from paceline.actors.engine.draft_engine import DraftEngine
from paceline.actors.engine.target_engine import TargetEngine
from paceline.cluster import metrics
from paceline.cluster.latency import RequestTimer
from paceline.cluster.metrics import (
    METRICS,
    Kind,
    Metric,
    Sample,
    draft_samples,
    gateway_samples,
    target_samples,
)
from paceline.cluster.metrics_export import MetricsExporter
from tests.engine.fakes import HashLaw, HashRunner

GATEWAY_STATUS = {
    "num_ongoing": 1,
    "num_queued": 2,
    "num_waiting": 3,
    "targets": (object(),),
    "num_placements": 4,
    "num_failovers": 5,
    "num_ignored_messages": 6,
}


class Instrument:
    """Ray's, as far as it matters: refuses to count backwards."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.totals: dict[tuple[tuple[str, str], ...], float] = {}
        self.values: list[float] = []

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert self.metric.kind is Kind.COUNTER
        assert value > 0
        key = tuple(sorted(tags.items()))
        assert {name for name, _ in key} == set(self.metric.tag_keys)
        self.totals[key] = self.totals.get(key, 0.0) + value

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert self.metric.kind is Kind.GAUGE
        assert set(tags) == set(self.metric.tag_keys)
        assert math.isfinite(value)
        self.values.append(value)

    def observe(self, value: float) -> None:
        assert self.metric.kind is Kind.HISTOGRAM
        assert math.isfinite(value)
        self.values.append(value)


@pytest.fixture
def recorded() -> dict[Metric, Instrument]:
    return {}


@pytest.fixture
def exporter(recorded: dict[Metric, Instrument]) -> MetricsExporter:
    def make(metric: Metric) -> Instrument:
        assert metric not in recorded, "an instrument is made once"
        return recorded.setdefault(metric, Instrument(metric))

    return MetricsExporter(make)


def test_names_are_unique_and_fit_prometheus() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names) > 40
    for metric in METRICS:
        assert re.fullmatch(r"paceline_[a-z][a-z0-9_]*[a-z0-9]", metric.name)
        assert not metric.name.endswith("_total"), "Ray adds that itself"
        assert metric.help.endswith(".")
        assert (metric.kind is Kind.HISTOGRAM) == bool(metric.buckets)
        assert list(metric.buckets) == sorted(metric.buckets)


@pytest.mark.parametrize(
    "suffix",
    [
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "num_preemptions",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "failovers",
        "late_drafts",
    ],
)
def test_what_operators_look_for_is_there(suffix: str) -> None:
    assert [metric for metric in METRICS if metric.suffix == suffix]


def test_help_says_what_accepted_leaves_out() -> None:
    accepted = [metric for metric in METRICS if "num_accepted" in metric.suffix]
    assert len(accepted) == 3
    assert all("Never includes the corrected or bonus token" in metric.help for metric in accepted)


def test_every_metric_is_fed(recorded: dict[Metric, Instrument], exporter: MetricsExporter) -> None:
    target = TargetEngine(HashRunner(HashLaw()), TargetEngineConfig()).snapshot()
    draft = DraftEngine(HashRunner(HashLaw()), DraftEngineConfig()).snapshot()
    samples = [*target_samples(target), *draft_samples(draft), *gateway_samples(GATEWAY_STATUS)]
    fed = {sample.metric for sample in samples}
    timed = {metrics.TIME_TO_FIRST_TOKEN, metrics.TIME_PER_OUTPUT_TOKEN, metrics.REQUEST_LATENCY}
    # By position there is nothing before the first draft token.
    assert set(METRICS) - fed - timed == {metrics.SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS}
    exporter.export(samples)
    assert recorded


def test_an_idle_engine_exports_numbers_only(exporter: MetricsExporter) -> None:
    snapshot = TargetEngine(HashRunner(HashLaw()), TargetEngineConfig()).snapshot()
    assert all(math.isfinite(sample.value) for sample in target_samples(snapshot))
    exporter.export(target_samples(snapshot))


def test_counters_only_grow(recorded: dict[Metric, Instrument], exporter: MetricsExporter) -> None:
    metric = metrics.GENERATION_TOKENS
    for total in (0, 5, 5, 3, math.nan, 8):
        exporter.export([Sample(metric, total)])
    assert recorded[metric].totals == {(): 8.0}


def test_counters_of_several_tags_grow_apart(
    recorded: dict[Metric, Instrument], exporter: MetricsExporter
) -> None:
    metric = metrics.SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS
    for counts in ((3, 1), (5, 1), (5, 4)):
        exporter.export(
            [Sample(metric, count, {"position": str(place)}) for place, count in enumerate(counts)]
        )
    assert recorded[metric].totals == {(("position", "0"),): 5.0, (("position", "1"),): 4.0}


def test_what_is_not_a_number_is_left_out(
    recorded: dict[Metric, Instrument], exporter: MetricsExporter
) -> None:
    exporter.export([Sample(metrics.STEP_SECONDS, math.nan), Sample(metrics.STEP_SECONDS, 0.5)])
    exporter.observe(metrics.TIME_TO_FIRST_TOKEN, math.inf)
    exporter.observe(metrics.TIME_TO_FIRST_TOKEN, 0.25)
    assert recorded[metrics.STEP_SECONDS].values == [0.5]
    assert recorded[metrics.TIME_TO_FIRST_TOKEN].values == [0.25]


async def test_latencies_of_a_request_of_two_choices() -> None:
    observed: list[Metric] = []
    timer = RequestTimer(0.0, lambda metric, value: observed.append(metric))
    timer.note(0, 0, ended=False)
    assert observed == []
    timer.note(0, 2, ended=False)
    timer.note(1, 1, ended=True)
    timer.note(0, 1, ended=False)
    timer.note(0, 0, ended=True)
    assert observed.count(metrics.TIME_TO_FIRST_TOKEN) == 2
    assert observed.count(metrics.REQUEST_LATENCY) == 2
    # One token has no time between tokens: no 0/0.
    assert observed.count(metrics.TIME_PER_OUTPUT_TOKEN) == 1


# ---------------------------------------------------------------------- the dashboard


@pytest.fixture(scope="module")
def dashboard(repository: Path) -> dict[str, Any]:
    content = json.loads((repository / "deploy" / "grafana" / "paceline.json").read_text())
    assert isinstance(content, dict)
    return content


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_the_dashboard_has_what_grafana_asks_of_one(dashboard: dict[str, Any]) -> None:
    assert dashboard["title"]
    assert dashboard["schemaVersion"] >= 36
    assert dashboard["id"] is None, "an id would collide on import"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        assert place["h"] > 0
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["targets"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert [target["refId"] for target in panel["targets"]] == [
                chr(ord("A") + index) for index in range(len(panel["targets"]))
            ]
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert "datasource" in names
    asked = set(re.findall(r"\$\{?(\w+)", " ".join(queries(dashboard)))) - {"__rate_interval"}
    assert asked <= set(names)


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_query_names_metrics_that_are_exported(dashboard: dict[str, Any]) -> None:
    exported = {metric.series for metric in METRICS if metric.kind is not Kind.HISTOGRAM}
    for metric in METRICS:
        if metric.kind is Kind.HISTOGRAM:
            exported |= {f"{metric.series}_{part}" for part in ("bucket", "sum", "count")}
    for query in queries(dashboard):
        named = set(re.findall(r"\bray_paceline_\w+", query))
        foreign = set(re.findall(r"\bray_serve_\w+", query))
        assert named or foreign, query
        assert named <= exported, named - exported
        # A rate of a gauge, or a counter without one, shows nonsense.
        for name in named:
            is_growing = name.endswith(("_total", "_bucket", "_sum", "_count"))
            assert (f"rate({name}{{" in query or f"increase({name}{{" in query) == is_growing, query


def test_no_query_divides_by_nothing(dashboard: dict[str, Any]) -> None:
    """0/0 is NaN in PromQL: a ratio is shown only where its denominator is above 0."""
    for query in queries(dashboard):
        if " / " in query:
            assert re.search(r" > 0\)?$", query.strip()), query
