"""All that a service consists of is killed, frozen or cut off in turn while seeded streams run through it.

``make chaos`` runs it; CHAOS_SECONDS says for how long (600 by default). Where there can be network
namespaces it runs itself again in one of its own, each node in another beside it: only then can a node be cut
off.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import ray

from tests.engine.models import noised, tiny_llama
from tests.integration.conftest import Service, wait_until
from tests.integration.machines import Machine, Machines, machines
from tests.integration.network_namespaces import Bridge, apart, bridged, unavailable
from tests.integration.shards import SIZE, num_placement_groups
from tests.integration.streams import asking
from tests.integration.tiny_models import save
from tests.requests import request as make_request

SECONDS = float(os.environ.get("CHAOS_SECONDS", "600"))
PERIOD_SECONDS = 10.0
NUM_STREAMS = 16
MAX_TOKENS = 200
CUT_OFF_SECONDS = (15.0, 30.0)
"""In turn. A stream that has heard nothing for 20 s is given up, so that the shorter cut may be outlasted."""
START_SECONDS = 300.0
ATTEMPT_SECONDS = 240.0
"""An upper bound on any request. A frozen gateway is found out by Serve's health checks in time, and its
streams end then."""
HEALED_SECONDS = 180.0
REFUSED_SECONDS = 5.0
"""A request that finds no target waits 2 s for one."""
NUM_MACHINES = 3
PLACES = {"rider": 4}
"""Of a machine: any two machines hold all ranks and drafts, however they are spread."""
YOUNG_PROXY = "Application metadata not set"
"""What a proxy of Serve answers, with NOT_FOUND, before it has heard of any application."""
APART = "CHAOS_APART"
"""Set in the environment of the process in a namespace of its own."""


def configuration(folder: Path) -> dict[str, Any]:
    model = tiny_llama()
    on_a_machine = {"resources": {"rider": 1.0}}
    return {
        "model": save(model, folder / "target"),
        "served_model_name": "tiny",
        "dtype": "float32",
        "gateway": {
            "num_replicas": 2,
            "ray_actor_options": {"resources": {"node:__internal_head__": 0.001}},
            "resume_timeout_s": 120.0,
        },
        "target": {
            "num_replicas": 2,
            "tensor_parallel_size": SIZE,
            "shard_timeout_s": 8.0,
            "kv_cache": {"num_blocks": 1024},
            "num_threads": 1,
            "max_num_batched_tokens": 256,
            "ray_actor_options": on_a_machine,
        },
        "draft": {
            "model": save(noised(model, 0.05), folder / "draft"),
            "num_replicas": 2,
            "kv_cache": {"num_blocks": 1024},
            "num_threads": 1,
            "ray_actor_options": on_a_machine,
        },
        # Fixed, lest on busy processors drafts be found not worth it.
        "speculation": {"num_speculative_tokens": 4, "ngram": {"enabled": False}},
    }


TRIAL = "subprocess.run('ip link add name bridge0 type bridge'.split(), check=True)"
"""What a namespace must allow."""
Deploy = Callable[..., AbstractContextManager[Service]]
FRONT = {"killed": 5.0, "frozen": 60.0}
"""Seconds for which a gateway or proxy may be taken for sound that is not. They hold callers' connections: a
caller hears of their loss, and asks again."""


@dataclass
class Outcome:
    """How one attempt at a request ended."""

    seed: int
    began: float
    ended: float
    code: grpc.StatusCode | None
    """None: it ended well."""
    token_ids: list[int]
    longest_pause: float
    """Between two chunks, or before the first."""
    details: str = ""
    """What the caller was told."""

    @property
    def refused(self) -> bool:
        """Told at once to come again: it was never accepted."""
        return self.code is not None and not self.token_ids and self.ended - self.began < REFUSED_SECONDS


@dataclass
class Callers:
    """Clients that each ask one request after the other, and again where they hear that they should."""

    service: Service
    outcomes: list[Outcome] = field(default_factory=list)

    def attempt(self, seed: int) -> Outcome:
        began = last = time.monotonic()
        longest_pause = 0.0
        message = make_request(prompt=f"chaos {seed}", max_tokens=MAX_TOKENS, seed=seed)
        token_ids: list[int] = []
        code, details = None, ""
        try:
            for chunk in self.service.stub.GenerateStream(message, timeout=ATTEMPT_SECONDS):
                token_ids.extend(chunk.token_ids)
                longest_pause, last = max(longest_pause, time.monotonic() - last), time.monotonic()
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
        return Outcome(seed, began, time.monotonic(), code, token_ids, longest_pause, details)

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
    """Hurts one thing after the other. What is the last of its kind is spared, as with none left there is
    nobody to take over: then it is the next one's turn."""

    def __init__(self, service: Service, nodes: Machines) -> None:
        self._service = service
        self._nodes = nodes
        self._lengths = itertools.cycle(CUT_OFF_SECONDS)
        self.events: list[tuple[float, str, str]] = []
        """(when, what, how)."""
        self.num_lost_nodes = 0
        """Nodes that Ray gave up after they had been cut off."""
        self._acts: list[tuple[str, str, Callable[[], bool]]] = [
            ("draft", "killed", lambda: self._signal("draft", signal.SIGKILL)),
            ("shard", "killed", lambda: self._signal("target", signal.SIGKILL, rank=1)),
            ("node", "cut off", self._cut_node_off),
            ("gateway", "killed", lambda: self._signal("gateway", signal.SIGKILL)),
            ("target leader", "killed", lambda: self._signal("target", signal.SIGKILL)),
            ("controller", "killed", lambda: self._kill_actors("ServeController")),
            ("draft", "frozen", lambda: self._signal("draft", signal.SIGSTOP)),
            ("shard", "frozen", lambda: self._signal("target", signal.SIGSTOP, rank=1)),
            ("proxy", "killed", self._kill_proxy),
            ("node", "removed", self._remove_node),
            ("target leader", "frozen", lambda: self._signal("target", signal.SIGSTOP)),
            ("gateway", "frozen", lambda: self._signal("gateway", signal.SIGSTOP)),
        ]

    def run(self, seconds: float) -> None:
        began = time.monotonic()
        acts = itertools.cycle(self._acts)
        for number in itertools.count():
            due = began + number * PERIOD_SECONDS
            if due > began + seconds:
                break
            time.sleep(max(due - time.monotonic(), 0.0))
            self.num_lost_nodes += self._nodes.replace_lost()
            for what, how, act in itertools.islice(acts, len(self._acts)):
                when = time.monotonic()
                if act():
                    self.events.append((when, what, how))
                    break
        self._nodes.mend()
        self.num_lost_nodes += self._nodes.replace_lost()

    def _signal(self, pool: str, number: signal.Signals, rank: int = 0) -> bool:
        sound = [replica for replica in self._service.replicas(pool) if not replica.get("error")]
        if len(sound) < 2:
            return False
        pids = [sound[0]["pid"], *(shard["pid"] for shard in sound[0].get("shards", []))]
        os.kill(pids[rank], number)
        return True

    def _kill_actors(self, kind: str) -> bool:
        found = [process for process in workers() if process.info["cmdline"][0].startswith(f"ray::{kind}")]
        for process in found:
            process.kill()
        return bool(found)

    def _kill_proxy(self) -> bool:
        return self._kill_actors("HAProxyManager") or self._kill_actors("ProxyActor")

    def _whole_nodes(self) -> list[Machine]:
        return [node for node in self._nodes.there if not node.cut and not node.lost]

    def _remove_node(self) -> bool:
        whole = self._whole_nodes()
        if len(whole) < NUM_MACHINES:
            return False
        self._nodes.switch_off(whole[0])
        self._nodes.add()
        return True

    def _cut_node_off(self) -> bool:
        whole = self._whole_nodes()
        if not self._nodes.can_be_cut_off or len(whole) < NUM_MACHINES:
            return False
        self._nodes.cut_off(whole[0], next(self._lengths))
        return True


def workers() -> list[psutil.Process]:
    """Ray's workers of this session's cluster."""
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path()).name
    found = []
    for process in psutil.process_iter(["cmdline"]):
        cmdline = process.info["cmdline"]
        if not cmdline or not cmdline[0].startswith("ray::"):
            continue
        parent = process.parent()
        if parent is not None and any(session in part for part in parent.cmdline()):
            found.append(process)
    return found


def ailments(service: Service) -> list[str]:
    """In what the service differs from one that has just started: pools as large as configured, everything
    attached, nothing held anywhere."""
    gateways, targets, drafts = (service.replicas(pool) for pool in ("gateway", "target", "draft"))
    found = []
    if [len(gateways), len(targets), len(drafts)] != [2, 2, 2]:
        found.append(f"{len(gateways)} gateways, {len(targets)} targets, {len(drafts)} drafts answer")
    for target in targets:
        stages = [shard["stage"] for shard in target["shards"]]
        engine = target.get("engine")
        if target["error"] or engine is None or stages != ["following"]:
            found.append(f"a target is at fault: {target['error']}, shards {stages}")
            continue
        if [target["num_gateways"], len(target["drafts"])] != [2, 2]:
            found.append(f"a target has {target['num_gateways']} gateways, {len(target['drafts'])} drafts")
        if engine["free_blocks"] != engine["total_blocks"]:
            found.append(f"a target has {engine['free_blocks']} of {engine['total_blocks']} blocks free")
    for draft in drafts:
        engine = draft["engine"]
        if engine["num_sequences"] or engine["num_free_blocks"] != engine["num_blocks"]:
            found.append(
                f"a draft has {engine['num_sequences']} sequences, {engine['num_free_blocks']} of "
                f"{engine['num_blocks']} blocks free"
            )
    found += [f"a gateway has {item['num_live']} requests" for item in gateways if item["num_live"]]
    return found


def wait_until_well(service: Service) -> None:
    """Says at the end what is amiss still."""
    deadline = time.monotonic() + HEALED_SECONDS
    while found := ailments(service):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


@pytest.fixture(scope="session")
def bridge() -> Iterator[Bridge | None]:
    """None: nodes cannot have namespaces of their own. For the session, as the head's address is on it."""
    if APART not in os.environ:
        yield None
        return
    with bridged() as found:
        yield found


@pytest.fixture
def nodes(bridge: Bridge | None, cluster: Any) -> Iterator[Machines]:
    """Beside the head. The bridge comes first: through it the head finds its own address."""

    def wait_for(count: int) -> None:
        def known() -> bool:
            return len(cluster.global_state._live_node_ids()) == count + 1

        wait_until(known, timeout_seconds=60, what="Ray knows the node")

    with machines(cluster.address, NUM_MACHINES, PLACES, bridge, wait_for) as found:
        yield found


@pytest.mark.heavy
@pytest.mark.timeout(SECONDS + 900)
def test_streams_survive_whatever_is_lost(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    without = "" if APART in os.environ else unavailable("import subprocess; " + TRIAL)
    if APART not in os.environ and not without:
        again = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", request.node.nodeid]
        # Niceness as where Paceline starts Ray itself.
        environment = {APART: "1", "RAY_worker_niceness": "0"}
        done = subprocess.run(apart(again), env=os.environ | environment, cwd=request.config.rootpath)
        assert done.returncode == 0
        return
    nodes: Machines = request.getfixturevalue("nodes")
    deploy: Deploy = request.getfixturevalue("deploy")
    content = configuration(tmp_path_factory.mktemp("models"))
    with deploy(content, timeout_seconds=START_SECONDS) as service:
        wait_until_well(service)
        num_groups = num_placement_groups()
        callers = Callers(service)
        with ThreadPoolExecutor(NUM_STREAMS) as threads:
            undisturbed = list(threads.map(callers.attempt, range(2 * NUM_STREAMS)))
        expected = {outcome.seed: outcome.token_ids for outcome in undisturbed}
        assert all(len(token_ids) == MAX_TOKENS for token_ids in expected.values())
        chaos = Chaos(service, nodes)
        with callers.asking():
            chaos.run(SECONDS)
        good = [outcome for outcome in callers.outcomes if outcome.code is None]
        bad = [outcome for outcome in callers.outcomes if outcome.code is not None]
        refused = [outcome for outcome in bad if outcome.refused]
        broken = [outcome for outcome in bad if not outcome.refused]
        front = [(when, FRONT[how]) for when, what, how in chaos.events if what in ("gateway", "proxy")]
        blameless = [
            outcome
            for outcome in broken
            if not any(outcome.began - taken <= when <= outcome.ended for when, taken in front)
        ]
        figures = {
            "events": dict(Counter(f"{what} {how}" for _, what, how in chaos.events)),
            "cut off": f"never: {without}" if without else f"{CUT_OFF_SECONDS} s in turn",
            "nodes that Ray gave up": chaos.num_lost_nodes,
            "requests": len(good),
            "broken off by the loss of a gateway or proxy": dict(
                Counter(f"{outcome.code}: {outcome.details}" for outcome in broken)
            ),
            "told to come again": dict(Counter(f"{outcome.code}: {outcome.details}" for outcome in refused)),
            "longest request, seconds": round(max(o.ended - o.began for o in callers.outcomes), 1),
            "longest pause, seconds": round(max(o.longest_pause for o in good), 1),
            "longest pause undisturbed, seconds": round(max(o.longest_pause for o in undisturbed), 1),
        }
        for name, figure in figures.items():
            print(f"{name}: {figure}", flush=True)
        wait_until_well(service)
        # Ray takes a moment longer to end a lost replica, and its group with it, than to start another.
        wait_until(
            lambda: num_placement_groups() == num_groups,
            timeout_seconds=HEALED_SECONDS,
            what="no group is left of what was lost",
        )
        for outcome in good:
            assert outcome.token_ids == expected[outcome.seed]
        for outcome in broken:
            assert outcome.token_ids == expected[outcome.seed][: len(outcome.token_ids)]
            assert outcome.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        for outcome in refused:
            young = outcome.code is grpc.StatusCode.NOT_FOUND and outcome.details.startswith(YOUNG_PROXY)
            assert young or outcome.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert blameless == [], "a gateway that lived lost a request"
