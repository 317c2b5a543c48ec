"""What a Prometheus would scrape from a running service: before any request, after one, and idle."""

from __future__ import annotations

import itertools
import math
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from paceline.cluster.metrics import (
    DRAFT_TARGETS,
    DRAFTED_TOKENS,
    GATEWAY_TARGETS,
    GENERATION_TOKENS,
    KV_CACHE_USAGE,
    PLACEMENTS,
    REQUEST_LATENCY,
    SPEC_DECODE_NUM_ACCEPTED_TOKENS,
    SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS,
    SPEC_DECODE_NUM_DRAFT_TOKENS,
    SPEC_DECODE_NUM_DRAFTS,
    TIME_PER_OUTPUT_TOKEN,
    TIME_TO_FIRST_TOKEN,
    Metric,
)
from tests.integration.conftest import Service, wait_until
from tests.integration.streams import DRAFT_MODEL, MODEL, wait_for_full_strength

EXPORTED_SECONDS = 45
"""Ray hands metrics on every second here, and Paceline every two."""


class Scrape:
    """All series of the head node that are these replicas': those of former services stay for a while."""

    def __init__(self, replicas: set[str]) -> None:
        (node,) = ray.nodes()
        address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(address, timeout=10) as answer:
            text = answer.read().decode()
        self.series: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("ray_paceline_") and sample.labels["replica"] in replicas:
                    self.series[sample.name, tuple(sorted(sample.labels.items()))] = sample.value

    def total(self, metric: Metric, part: str = "") -> float:
        """Over all replicas and tags."""
        return sum(value for (name, _), value in self.series.items() if name == metric.series + part)

    def has(self, metric: Metric) -> bool:
        return any(name == metric.series for name, _ in self.series)

    def is_growing(self, key: tuple[str, tuple[tuple[str, str], ...]]) -> bool:
        return key[0].endswith(("_total", "_bucket", "_count", "_sum"))


@pytest.mark.timeout(240)
def test_what_is_scraped_is_numbers_that_add_up(
    deploy: Callable[..., AbstractContextManager[Service]],
) -> None:
    configuration = {
        "model": MODEL,
        "draft": {"model": DRAFT_MODEL, "num_threads": 1},
        "target": {"kv_cache": {"num_blocks": 512}, "num_threads": 1},
        "speculation": {"num_speculative_tokens": 4, "ngram": {"enabled": False}},
    }
    scrapes: list[Scrape] = []
    with deploy(configuration) as service:
        wait_for_full_strength(service)
        replicas = {item["id"] for pool in ("gateway", "target", "draft") for item in service.replicas(pool)}

        def scraped(condition: Callable[[Scrape], object]) -> bool:
            scrapes.append(Scrape(replicas))
            return bool(condition(scrapes[-1]))

        wait_until(
            lambda: scraped(lambda s: s.total(GATEWAY_TARGETS) and s.total(DRAFT_TARGETS)),
            timeout_seconds=EXPORTED_SECONDS,
            what="gauges are exported before any request",
        )
        assert scrapes[-1].has(KV_CACHE_USAGE)
        assert scrapes[-1].total(PLACEMENTS) == scrapes[-1].total(GENERATION_TOKENS) == 0
        service.generate(prompt="one", max_tokens=1, seed=1)
        answer = service.generate(prompt="many", max_tokens=200, seed=2)
        wait_until(
            lambda: scraped(lambda s: s.total(GENERATION_TOKENS) == 201),
            timeout_seconds=EXPORTED_SECONDS,
            what="every token is counted, and none twice",
        )
        wait_until(
            lambda: scraped(lambda s: s.total(TIME_TO_FIRST_TOKEN, "_count") >= 2),
            timeout_seconds=EXPORTED_SECONDS,
            what="latencies are exported",
        )
        # Each replica exports by its own clock: the draft's figures may come a second after the target's.
        wait_until(
            lambda: scraped(lambda s: s.total(DRAFTED_TOKENS) >= answer.speculation.draft_tokens),
            timeout_seconds=EXPORTED_SECONDS,
            what="what the draft proposed is counted",
        )
        last = scrapes[-1]
        assert last.total(PLACEMENTS) == 2
        assert last.total(SPEC_DECODE_NUM_DRAFTS) == answer.speculation.rounds
        assert last.total(SPEC_DECODE_NUM_DRAFT_TOKENS) == answer.speculation.draft_tokens
        accepted = answer.speculation.accepted_tokens
        assert last.total(SPEC_DECODE_NUM_ACCEPTED_TOKENS) == accepted > 0
        assert last.total(SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS) == accepted
        assert last.total(REQUEST_LATENCY, "_count") == 2
        # The answer of one token has no time between tokens.
        assert last.total(TIME_PER_OUTPUT_TOKEN, "_count") == 1
    for scrape in scrapes:
        assert all(math.isfinite(value) for value in scrape.series.values())
    for earlier, later in itertools.pairwise(scrapes):
        for key in earlier.series.keys() & later.series.keys():
            if later.is_growing(key):
                assert later.series[key] >= earlier.series[key], key
