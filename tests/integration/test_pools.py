"""Two kinds of nodes, two pools: each load makes the pool grow that it needs, on nodes of its kind, and no
other; afterwards both are as small as before."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.runtime import application_progress
from paceline.cluster.service_start import APPLICATION_NAME
from tests.integration.conftest import Service, sizes, wait_until
from tests.integration.streams import asking

MODEL = (
    "emulated://criterium?vocab_size=512&base_ms=20&support=6&max_model_len=4096&free_tokens=4&per_token_ms=5"
)
"""A step of eight sequences takes 200 ms, one with as many tail tokens 400: nothing is worth drafting. A step
of two sequences has room for two tail tokens more."""
DRAFT = "emulated://criterium?vocab_size=512&base_ms=5&support=6&acceptance=0.9"
FOLLOWING = {
    "metrics_interval_s": 0.5,
    "look_back_period_s": 3.0,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 6.0,
}
GROWN_SECONDS = 240


def pool(kind: str, **options: Any) -> dict[str, Any]:
    return {
        "num_threads": 1,
        "ray_actor_options": {"num_cpus": 1, "label_selector": {"pool": kind}},
        "autoscaling_config": {"max_replicas": 3, **FOLLOWING, **options},
    }


CONFIGURATION = {
    "gateway": {"ray_actor_options": {"resources": {"node:__internal_head__": 0.001}}},
    "model": MODEL,
    "target": pool("target", min_replicas=1, target_ongoing_requests=8) | {"kv_cache": {"num_blocks": 2048}},
    "draft": pool("draft", min_replicas=0, target_ongoing_requests=1) | {"model": DRAFT},
    "speculation": {"ngram": {"enabled": False}},
}


@pytest.fixture
def kinds_of_nodes(cluster: Any) -> Iterator[dict[str, str]]:
    """Node id → kind. Each has room for one replica."""
    nodes = {
        kind: [cluster.add_node(num_cpus=1, labels={"pool": kind}) for _ in range(count)]
        for kind, count in (("target", 3), ("draft", 2))
    }
    try:
        cluster.wait_for_nodes()
        yield {node.node_id: kind for kind, added in nodes.items() for node in added}
    finally:
        for added in nodes.values():
            for node in added:
                cluster.remove_node(node)


@dataclass
class Record:
    """What a plot shows: load, replicas and speed over time."""

    began: float = field(default_factory=time.monotonic)
    rows: list[dict[str, Any]] = field(default_factory=list)
    num_clients: int = 0
    num_tokens: int = 0
    on_row: Callable[[dict[str, Any]], None] = lambda row: None
    """Gets each row, and may add to it."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Look twice a second for the length of the block."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(0.5):
                pools = application_progress(APPLICATION_NAME)[2]
                row: dict[str, Any] = {"seconds": round(time.monotonic() - self.began, 2)}
                row |= {pool.name: pool.running for pool in pools}
                row |= {"clients": self.num_clients, "tokens": self.num_tokens}
                row["other"] = {pool.name: dict(pool.other) for pool in pools}
                self.on_row(row)
                self.rows.append(row)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def seen(self, since: int) -> set[tuple[int, int]]:
        """(targets, drafts) of all rows from the ``since``-th on."""
        return {(row["target"], row["draft"]) for row in self.rows[since:]}


@contextmanager
def recorded() -> Iterator[Record]:
    """Kept in the file PACELINE_RECORD where that is set, also of a run that fails."""
    record = Record()
    try:
        yield record
    finally:
        if path := os.environ.get("PACELINE_RECORD"):
            Path(path).write_text(json.dumps(record.rows))


@contextmanager
def clients(service: Service, record: Record, count: int, **options: Any) -> Iterator[None]:
    """So many clients ask one request after the other for the length of the block. None may fail.

    Args:
        options: more of a request's own.
    """

    def ask(seed: int, ended: threading.Event) -> None:
        while not ended.is_set():
            for chunk in service.stream(prompt=f"lap {seed}", max_tokens=30, seed=seed, **options):
                record.num_tokens += len(chunk.token_ids)

    record.num_clients = count
    with asking(count, ask):
        try:
            yield
        finally:
            record.num_clients = 0


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_each_load_adds_to_the_pool_that_it_needs_and_to_no_other(
    deploy: Callable[..., AbstractContextManager[Service]], kinds_of_nodes: dict[str, str]
) -> None:
    with deploy(CONFIGURATION) as service, recorded() as record:
        with record.running():
            assert sizes() == {"gateway": 1, "target": 1, "draft": 0}
            with clients(service, record, 2):
                wait_until(lambda: sizes()["draft"] == 2, timeout_seconds=GROWN_SECONDS, what="two drafts")
                time.sleep(8.0)
                assert {targets for targets, _ in record.seen(0)} == {1}
                assert max(drafts for _, drafts in record.seen(0)) == 2
                check_places(service, kinds_of_nodes)
            wait_until(lambda: sizes()["draft"] == 0, timeout_seconds=GROWN_SECONDS, what="no draft")
            since = len(record.rows)
            with clients(service, record, 24):
                wait_until(
                    lambda: sizes()["target"] == 3, timeout_seconds=GROWN_SECONDS, what="three targets"
                )
                time.sleep(8.0)
                check_places(service, kinds_of_nodes)
                assert {drafts for _, drafts in record.seen(since)} == {0}
            wait_until(
                lambda: sizes() == {"gateway": 1, "target": 1, "draft": 0},
                timeout_seconds=GROWN_SECONDS,
                what="both pools are as small as before",
            )
        print({"tokens": record.num_tokens, "seconds": record.rows[-1]["seconds"], "seen": record.seen(0)})


def check_places(service: Service, kinds: dict[str, str]) -> None:
    """Every replica of a model runs on a node of its kind, and none beside another."""
    for name in ("target", "draft"):
        nodes = [replica["node_id"] for replica in service.replicas(name)]
        if not nodes:
            continue
        assert {kinds.get(node) for node in nodes} == {name}
        assert len(set(nodes)) == len(nodes)
