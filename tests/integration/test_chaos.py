"""Everything that a service consists of is killed or frozen in turn while seeded streams run through it.

``make chaos`` runs it; CHAOS_SECONDS says for how long (600 by default).
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil
import pytest
import ray

from tests.integration.conftest import Service, wait_until
from tests.integration.streams import DRAFT_MODEL, MODEL, asking
from tests.requests import request

SECONDS = float(os.environ.get("CHAOS_SECONDS", "600"))
PERIOD_SECONDS = 10.0
NUM_STREAMS = 16
MAX_TOKENS = 200
NOTICED_SECONDS = 60.0
"""A frozen gateway is found out by Serve's health checks, and its streams end then."""
HEALED_SECONDS = 180.0
RIDER = {"resources": {"rider": 1.0}}
CONFIGURATION = {
    "model": MODEL,
    "gateway": {
        "num_replicas": 2,
        "ray_actor_options": {"resources": {"node:__internal_head__": 0.001}},
        "resume_timeout_s": 120.0,
    },
    "target": {
        "num_replicas": 2,
        "kv_cache": {"num_blocks": 1024},
        "num_threads": 1,
        "ray_actor_options": RIDER,
    },
    "draft": {"model": DRAFT_MODEL, "num_replicas": 2, "num_threads": 1, "ray_actor_options": RIDER},
    "speculation": {"num_speculative_tokens": 4, "ngram": {"enabled": False}},
}
FRONT = ("gateway", "proxy")
"""What holds callers' connections: a caller hears of its death, and asks again."""


@dataclass
class Outcome:
    """How one attempt at a request ended."""

    seed: int
    began: float
    ended: float
    code: grpc.StatusCode | None
    """None: it ended well."""
    token_ids: list[int]


@dataclass
class Callers:
    """Clients that each ask one request after the other, and again where they hear that they should."""

    service: Service
    outcomes: list[Outcome] = field(default_factory=list)

    def attempt(self, seed: int) -> Outcome:
        began = time.monotonic()
        message = request(prompt=f"chaos {seed}", max_tokens=MAX_TOKENS, seed=seed)
        token_ids: list[int] = []
        code = None
        try:
            for chunk in self.service.stub.GenerateStream(message, timeout=2 * NOTICED_SECONDS):
                token_ids.extend(chunk.token_ids)
        except grpc.RpcError as error:
            code = error.code()
        return Outcome(seed, began, time.monotonic(), code, token_ids)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """For the length of the block; then every request is brought to its end."""

        def ask(caller: int, ended: threading.Event) -> None:
            for number in itertools.count():
                seed = (caller + number * NUM_STREAMS) % (2 * NUM_STREAMS)
                while True:
                    outcome = self.attempt(seed)
                    self.outcomes.append(outcome)
                    if outcome.code is None:
                        break
                    time.sleep(0.2)
                if ended.is_set():
                    return

        with asking(NUM_STREAMS, ask):
            yield


class Chaos:
    """Hurts one thing after the other, by the process of that thing alone."""

    def __init__(self, service: Service, cluster: Any, nodes: list[Any]) -> None:
        self._service = service
        self._cluster = cluster
        self._nodes = nodes
        self.events: list[tuple[float, str, str]] = []
        """(when, what, how)."""
        self._acts: list[tuple[str, str, Callable[[], None]]] = [
            ("draft", "killed", lambda: self._signal("draft", signal.SIGKILL)),
            ("target", "killed", lambda: self._signal("target", signal.SIGKILL)),
            ("gateway", "killed", lambda: self._signal("gateway", signal.SIGKILL)),
            ("controller", "killed", lambda: self._kill_actors("ServeController")),
            ("draft", "frozen", lambda: self._signal("draft", signal.SIGSTOP)),
            ("proxy", "killed", self._kill_proxy),
            ("node", "removed", self._remove_node),
            ("target", "frozen", lambda: self._signal("target", signal.SIGSTOP)),
            ("gateway", "frozen", lambda: self._signal("gateway", signal.SIGSTOP)),
        ]

    def run(self, seconds: float) -> None:
        began = time.monotonic()
        for number in itertools.count():
            due = began + number * PERIOD_SECONDS
            if due > began + seconds:
                return
            time.sleep(max(due - time.monotonic(), 0.0))
            what, how, act = self._acts[number % len(self._acts)]
            self.events.append((time.monotonic(), what, how))
            act()

    def _signal(self, pool: str, number: signal.Signals) -> None:
        replicas = self._service.replicas(pool)
        # The last one of a pool is spared: with none left there is nobody to take over.
        if len(replicas) > 1:
            os.kill(replicas[0]["pid"], number)

    def _kill_actors(self, kind: str) -> bool:
        found = [process for process in workers() if process.info["cmdline"][0].startswith(f"ray::{kind}")]
        for process in found:
            process.kill()
        return bool(found)

    def _kill_proxy(self) -> None:
        assert self._kill_actors("HAProxyManager") or self._kill_actors("ProxyActor")

    def _remove_node(self) -> None:
        self._cluster.remove_node(self._nodes.pop(0), allow_graceful=False)
        self._nodes.append(self._cluster.add_node(num_cpus=1, resources={"rider": 2}))


def workers() -> list[psutil.Process]:
    """Ray's workers of this session's cluster."""
    session = ray._private.worker.global_worker.node.get_session_dir_path()
    found = []
    for process in psutil.process_iter(["cmdline"]):
        cmdline = process.info["cmdline"]
        if not cmdline or not cmdline[0].startswith("ray::"):
            continue
        parent = process.parent()
        if parent is not None and any(session in part for part in parent.cmdline()):
            found.append(process)
    return found


@pytest.fixture
def nodes(cluster: Any) -> Iterator[list[Any]]:
    """Three nodes with places for two replicas each, so that any two hold them all."""
    added = [cluster.add_node(num_cpus=1, resources={"rider": 2}) for _ in range(3)]
    try:
        cluster.wait_for_nodes()
        yield added
    finally:
        for node in added:
            cluster.remove_node(node)


def healed(service: Service) -> bool:
    """Every pool is as large as configured, and nothing is held anywhere."""
    gateways, targets, drafts = (service.replicas(pool) for pool in ("gateway", "target", "draft"))
    return (
        [len(gateways), len(targets), len(drafts)] == [2, 2, 2]
        and all(len(target["drafts"]) == 2 and not target["error"] for target in targets)
        and all(target["engine"]["free_blocks"] == target["engine"]["total_blocks"] for target in targets)
        and all(draft["engine"]["num_sequences"] == 0 for draft in drafts)
        and all(draft["engine"]["num_free_blocks"] == draft["engine"]["num_blocks"] for draft in drafts)
        and all(gateway["num_live"] == 0 for gateway in gateways)
    )


@pytest.mark.heavy
@pytest.mark.timeout(SECONDS + 600)
def test_streams_survive_whatever_is_killed(
    deploy: Callable[..., AbstractContextManager[Service]], cluster: Any, nodes: list[Any]
) -> None:
    with deploy(CONFIGURATION) as service:
        wait_until(lambda: healed(service), timeout_seconds=HEALED_SECONDS, what="all are attached")
        groups = len(ray.util.placement_group_table())
        callers = Callers(service)
        with ThreadPoolExecutor(NUM_STREAMS) as threads:
            undisturbed = list(threads.map(callers.attempt, range(2 * NUM_STREAMS)))
        expected = {outcome.seed: outcome.token_ids for outcome in undisturbed}
        assert all(len(token_ids) == MAX_TOKENS for token_ids in expected.values())
        chaos = Chaos(service, cluster, nodes)
        with callers.asking():
            chaos.run(SECONDS)
        wait_until(lambda: healed(service), timeout_seconds=HEALED_SECONDS, what="all is as before")
        assert len(ray.util.placement_group_table()) == groups
        good = [outcome for outcome in callers.outcomes if outcome.code is None]
        bad = [outcome for outcome in callers.outcomes if outcome.code is not None]
        front = [when for when, what, _ in chaos.events if what in FRONT]
        blameless = [
            outcome
            for outcome in bad
            if not any(outcome.began - 5.0 <= when <= outcome.ended for when in front)
        ]
        print(
            {
                "events": Counter(f"{what} {how}" for _, what, how in chaos.events),
                "requests": len(good),
                "attempts that failed with their gateway or proxy": Counter(
                    str(outcome.code) for outcome in bad
                ),
                "longest": round(max(outcome.ended - outcome.began for outcome in callers.outcomes), 1),
            }
        )
        for outcome in good:
            assert outcome.token_ids == expected[outcome.seed]
        for outcome in bad:
            assert outcome.token_ids == expected[outcome.seed][: len(outcome.token_ids)]
            assert outcome.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert blameless == [], "a gateway that lived lost a request"
