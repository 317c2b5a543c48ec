"""One local Ray cluster for the whole session, and services on it."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.auth import first_token
from paceline.cluster.cli_status import collect_status
from paceline.cluster.client import connect
from paceline.cluster.config import PacelineConfig, load_config
from paceline.cluster.runtime import (
    Runtime,
    application_progress,
    free_port,
    free_port_range,
    haproxy_available,
    haproxy_environment,
    quiet_environment,
)
from paceline.cluster.service_start import APPLICATION_NAME, ROUTE_PREFIX, probe
from paceline.protos import generation_pb2 as proto
from paceline.protos import generation_pb2_grpc as rpc
from tests.requests import request

START_TIMEOUT_SECONDS = 120.0

CPUS = 64
"""Logical: replicas of these tests reserve none."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(folder):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def grpc_port() -> int:
    return free_port_range(1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A Ray cluster of this session's own, of one node. Removed with everything on it."""
    # Unix sockets below it must stay within 107 bytes: pytest's own folders are too deep.
    folder = Path(tempfile.mkdtemp(prefix="pl-test-", dir="/tmp"))
    before = dict(os.environ)
    os.environ.update(quiet_environment())
    if haproxy_available(folder / "ha"):
        (folder / "ha").mkdir()
        os.environ.update(haproxy_environment(folder / "ha"))
    from ray._common.utils import get_default_ray_temp_dir
    from ray.cluster_utils import Cluster

    # Ray notes the cluster's address in its default folder, and takes for granted that there is one.
    Path(get_default_ray_temp_dir()).mkdir(exist_ok=True)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": CPUS,
            "include_dashboard": False,
            "temp_dir": str(folder / "ray"),
            "dashboard_agent_listen_port": free_port(),
            # Ten seconds by default.
            "_system_config": {"metrics_report_interval_ms": 1000},
        },
    )
    try:
        yield cluster
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def runtime(cluster: Any, grpc_port: int) -> Iterator[Runtime]:
    """That cluster, joined, with Serve on free ports."""
    with Runtime.open(address=cluster.address, num_cpus=0) as joined:
        joined.start_serve(host="127.0.0.1", port=grpc_port, http_port=free_port_range(1))
        yield joined


@dataclass(frozen=True)
class Service:
    """A running application, and ways to look at it and to hurt it."""

    stub: rpc.GenerationServiceStub
    address: str
    config: PacelineConfig

    def generate(self, **options: Any) -> proto.GenerateResponse:
        """Run one request whole; see ``request``."""
        return self.stub.Generate(request(**options), timeout=120)

    def stream(self, **options: Any) -> Iterator[proto.GenerateChunk]:
        """Run one request as a stream; the call object can be cancelled."""
        return self.stub.GenerateStream(request(**options), timeout=120)

    def replicas(self, pool: str) -> list[dict[str, Any]]:
        """What every replica of a pool says of itself."""
        return list(collect_status()["pools"][pool]["replicas"])

    def kill(self, replica: dict[str, Any]) -> None:
        """``kill -9`` of one replica's process."""
        os.kill(replica["pid"], signal.SIGKILL)


def sizes() -> dict[str, int]:
    """Replicas that take traffic, by pool."""
    return {pool.name: pool.running for pool in application_progress(APPLICATION_NAME)[2]}


def wait_until(condition: Callable[[], object], *, timeout_seconds: float, what: str) -> None:
    """Look every 100 ms until ``condition`` holds."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_seconds} s: {what}"
        time.sleep(0.1)


@contextlib.contextmanager
def deployed(
    runtime: Runtime,
    grpc_port: int,
    content: Mapping[str, Any],
    *,
    timeout_seconds: float = START_TIMEOUT_SECONDS,
) -> Iterator[Service]:
    """The service of a configuration, for the length of the block."""
    from paceline.cluster.application import build_app

    config = load_config(content)
    runtime.deploy(build_app(config), name=APPLICATION_NAME, route_prefix=ROUTE_PREFIX)
    try:
        runtime.wait_until_ready(
            APPLICATION_NAME, on_progress=lambda pools: None, timeout_seconds=timeout_seconds
        )
        address = f"127.0.0.1:{grpc_port}"
        token = first_token(config.security.tokens_file)
        probe(address, runtime, token, may_sleep=config.target.may_sleep)
        with connect(address, token) as stub:
            yield Service(stub, address, config)
    finally:
        runtime.remove(APPLICATION_NAME)


@pytest.fixture(scope="module")
def deploy(runtime: Runtime, grpc_port: int) -> Callable[..., contextlib.AbstractContextManager[Service]]:
    """A function from a configuration's content to its running service (a context manager). Its
    ``timeout_seconds`` bounds the start."""
    return functools.partial(deployed, runtime, grpc_port)
