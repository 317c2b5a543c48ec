"""Machines that come and go with the load: Ray's autoscaler with the cluster file of ``paceline deploy``.

In PID and network namespaces of its own (``autoscaled_cluster``).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.pools_plot import summary
from tests.integration.network_namespaces import apart, unavailable
from tests.integration.test_pools import CONFIGURATION, DRAFT, GROWN_SECONDS, MODEL

PROCESSES_APART = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
SLOWNESS = 10
"""Steps take so much longer than in ``test_pools``: machines that start and stop keep the processors busy,
and a draft pays only where it is in time."""
IDLE_SECONDS = 6
HELD_SECONDS = 10.0
MACHINES = {
    "region": "us-west-2",
    "head": {"instance_type": "head", "num_cpus": 4},
    "target": {"instance_type": "target", "num_cpus": 1, "num_gpus": 0},
    "draft": {"instance_type": "draft", "num_cpus": 1, "num_gpus": 0},
    "idle_timeout_minutes": IDLE_SECONDS / 60,
}


def pool(name: str, **options: Any) -> dict[str, Any]:
    """As ``test_pools`` has it, but placed by the plan."""
    placed: dict[str, Any] = CONFIGURATION[name]
    return placed | {"ray_actor_options": {"num_cpus": 1}, **options}


def slower(model: str) -> str:
    return re.sub(r"(_ms)=(\d+)", lambda found: f"{found[1]}={SLOWNESS * int(found[2])}", model)


def content() -> dict[str, Any]:
    drafts = pool("draft", model=slower(DRAFT))
    drafts["autoscaling_config"] = drafts["autoscaling_config"] | {"max_replicas": 2}
    return {
        **CONFIGURATION,
        "model": slower(MODEL),
        "gateway": {"http_host": "127.0.0.1"},
        "target": pool("target"),
        "draft": drafts,
        "deploy": {"package": "paceline", "constraints": None, "aws": MACHINES},
    }


@dataclass
class Machines:
    """The process, and what it told."""

    process: subprocess.Popen[str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def clients(self, count: int, **options: Any) -> None:
        """From now on so many ask."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"count": count, **options}) + "\n")
        self.process.stdin.flush()

    def next_row(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.rows.append(json.loads(line))
                return self.rows[-1]
        raise AssertionError(f"the cluster ended with status {self.process.wait(timeout=60)}")

    def until(self, condition: Callable[[dict[str, Any]], bool], what: str) -> list[dict[str, Any]]:
        """All rows up to the one that is so."""
        since = len(self.rows)
        while not condition(row := self.next_row()):
            waited = row["seconds"] - self.rows[since]["seconds"]
            assert waited < GROWN_SECONDS, f"not within {GROWN_SECONDS} s: {what}; last: {row}"
        return self.rows[since:]

    def during(self, seconds: float) -> list[dict[str, Any]]:
        """All rows of the next ``seconds``."""
        end = self.rows[-1]["seconds"] + seconds
        return self.until(lambda row: row["seconds"] >= end, "time passes")


@contextmanager
def started() -> Iterator[Machines]:
    # Unix sockets below it must stay within 107 bytes: pytest's own folders are too deep.
    with tempfile.TemporaryDirectory(prefix="pl-auto-", dir="/tmp") as folder:
        (Path(folder) / "cluster.yaml").write_text(yaml.safe_dump(content()))
        command = [sys.executable, "-m", "tests.integration.autoscaled_cluster", folder]
        command = apart([*PROCESSES_APART, *command])
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            machines = Machines(process)
            try:
                yield machines
            finally:
                if path := os.environ.get("PACELINE_RECORD"):
                    Path(path).write_text(json.dumps(machines.rows))
                assert process.stdin is not None
                process.stdin.close()
                # Its namespaces end with it, and with them whatever Ray has started.
                try:
                    process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    process.kill()


@pytest.mark.heavy
@pytest.mark.timeout(1500)
def test_each_load_adds_machines_and_replicas_of_the_pool_that_it_needs_only() -> None:
    if reason := unavailable(f"import subprocess; subprocess.run({[*PROCESSES_APART, 'true']}, check=True)"):
        pytest.skip(f"no namespaces of its own: {reason}")
    least = {"gateway": 1, "target": 1, "draft": 0}

    def at_least(row: dict[str, Any]) -> bool:
        return row["nodes"] == least and all(row[pool] == count for pool, count in least.items())

    def with_all(name: str, count: int) -> Callable[[dict[str, Any]], bool]:
        return lambda row: row[name] == row["nodes"][name] == count

    with started() as machines:
        machines.until(at_least, "one target on its machine, no draft")

        machines.clients(2)
        grown = machines.until(with_all("draft", 2), "two drafts, each on a machine") + machines.during(
            HELD_SECONDS
        )
        assert {row["target"] for row in grown} == {1}
        assert {row["nodes"]["target"] for row in grown} == {1}
        assert max(row["nodes"]["draft"] for row in grown) == 2
        machines.clients(0)
        machines.until(at_least, "no draft and no machine for any")

        # Else the first few on each new target would want drafts, for longer than the pool's short delay.
        machines.clients(24, num_speculative_tokens=0)
        grown = machines.until(with_all("target", 3), "three targets, each on a machine") + machines.during(
            HELD_SECONDS
        )
        assert {row["draft"] for row in grown} == {0}
        assert {row["nodes"]["draft"] for row in grown} == {0}
        machines.clients(0)
        machines.until(at_least, "one target on its machine, no draft")
        print(summary(machines.rows))

        assert {row["nodes"]["gateway"] for row in machines.rows} == {1}
        for row, name in itertools.product(machines.rows, least):
            assert set(row["places"][name]) <= {name}
