"""``paceline serve`` beside a Ray that runs already: it joins, and leaves the cluster as it was."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.cluster.runtime import free_port_range, haproxy_environment
from tests.integration.serve_output import read_until_ready

BIN = Path(sys.executable).parent
SERVICER = "paceline.protos.generation_pb2_grpc.add_GenerationServiceServicer_to_server"
START_SECONDS = 120
PORTS = 200


@dataclass(frozen=True)
class RayProcess:
    """``ray start --block``, and the environment in which it is this machine's Ray."""

    process: subprocess.Popen[str]
    environment: dict[str, str]
    address: str

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=100, check=False
        )


@pytest.fixture(scope="module")
def ray_process() -> Iterator[RayProcess]:
    # Unix sockets below it must stay within 107 bytes: pytest's own folders are too deep.
    folder = Path(tempfile.mkdtemp(prefix="pl-ray-", dir="/tmp"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_SERVE_")}
    ports = haproxy_environment(folder)
    environment = kept | {name: value for name, value in ports.items() if name.endswith("_PORT")}
    environment |= {"RAY_TMPDIR": str(folder), "RAY_SERVE_ENABLE_HA_PROXY": "0", "PYTHONUNBUFFERED": "1"}
    port = free_port_range(PORTS)
    address = f"127.0.0.1:{port}"
    options = {
        "node-ip-address": "127.0.0.1",
        "port": port,
        "ray-client-server-port": port + 1,
        "dashboard-agent-listen-port": port + 2,
        "min-worker-port": port + 3,
        "max-worker-port": port + PORTS - 1,
        "num-cpus": 4,
        "include-dashboard": "false",
    }
    process = subprocess.Popen(
        [
            *(str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats"),
            *(f"--{name}={value}" for name, value in options.items()),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        told = []
        for line in process.stdout:
            told.append(line)
            if "--block" in line:
                break
        else:
            pytest.fail("ray start ended: " + "".join(told))
        yield RayProcess(process, environment, address)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def joined_service(ray: RayProcess, port: int) -> Iterator[list[str]]:
    """``paceline serve`` that is not told where to run; ended by an interrupt."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "paceline.cluster.cli", "serve", "--model", "emulated://solo?base_ms=5"),
            *("--draft", "emulated://solo?base_ms=1&acceptance=0.7", "--port", str(port)),
            *("--timeout", str(START_SECONDS)),
        ],
        env=ray.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield read_until_ready(process)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == 0, rest
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def check_answers(ray: RayProcess, lines: list[str], port: int) -> None:
    port_of_ray = ray.address.rpartition(":")[2]
    assert re.search(rf"joining the Ray at [\d.]+:{port_of_ray}\n", "".join(lines))
    assert any("(joined)" in line for line in lines)
    command = [sys.executable, "-m", "paceline.cluster.cli"]
    answered = ray.run(*command, "generate", "hi", "--max-tokens", "30", "--address", f"127.0.0.1:{port}")
    assert answered.returncode == 0, answered.stderr
    assert "30 tokens" in answered.stderr
    # It too finds this machine's Ray without being told.
    assert "service running" in ray.run(*command, "status").stdout


def applications(ray: RayProcess) -> str:
    """What a driver of its own finds on the cluster: applications, and whether Serve runs."""
    script = (
        "import ray; from ray import serve\n"
        f"ray.init(address={ray.address!r}, log_to_driver=False, logging_level='ERROR')\n"
        "status = serve.status(); print(sorted(status.applications), bool(status.proxies))"
    )
    found = ray.run(sys.executable, "-c", script)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip().splitlines()[-1]


def test_a_ray_that_runs_is_joined_and_left_running(ray_process: RayProcess) -> None:
    port = free_port_range(1)
    with joined_service(ray_process, port) as lines:
        check_answers(ray_process, lines, port)
    assert ray_process.process.poll() is None
    assert applications(ray_process) == "[] False"


def test_serve_that_runs_is_used_and_left_running(ray_process: RayProcess) -> None:
    port = free_port_range(1)
    started = ray_process.run(
        *(str(BIN / "serve"), "start", "--address", ray_process.address),
        *("--http-port", str(free_port_range(1))),
        *("--grpc-port", str(port), "--grpc-servicer-functions", SERVICER),
    )
    assert started.returncode == 0, started.stderr
    with joined_service(ray_process, port) as lines:
        check_answers(ray_process, lines, port)
    assert applications(ray_process) == "[] True"


def test_serve_that_listens_elsewhere_is_told(ray_process: RayProcess) -> None:
    """Serve of the test before: a clear end before anything is deployed."""
    found = ray_process.run(
        *(sys.executable, "-m", "paceline.cluster.cli", "serve", "--model", "emulated://solo"),
        *("--port", str(free_port_range(1))),
    )
    assert found.returncode == 1
    told = " ".join(found.stderr.split())
    assert "docs/operations.md" in told
    assert "starting the pools" not in told
    assert applications(ray_process) == "[] True"
