"""``paceline deploy`` on a cluster of several nodes: every replica on a machine of its pool, and a
redeployment that replaces them all without a caller noticing."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from paceline.cluster.client import connect
from paceline.cluster.deploy_fit import POOL_LABEL
from paceline.cluster.runtime import free_port_range
from paceline.protos import generation_pb2_grpc as rpc
from tests.requests import request

TOKEN = "operator-0123456789abcdef"
MODEL = "emulated://deployed?vocab_size=512&base_ms=5&seed=3"


def _content(folder: Path) -> dict[str, Any]:
    (folder / "tokens").write_text(f"{TOKEN}\n")
    hosts = [
        {"address": "192.0.2.21", "pool": "target", "num_cpus": 2, "num_gpus": 0},
        {"address": "192.0.2.22", "pool": "target", "num_cpus": 2, "num_gpus": 0},
        {"address": "192.0.2.31", "pool": "draft", "num_cpus": 4, "num_gpus": 0, "num_slots": 2},
    ]
    return {
        "model": MODEL,
        "draft": {"model": f"{MODEL}&acceptance=0.8", "num_replicas": 2},
        "target": {"num_replicas": 2},
        "gateway": {
            "num_replicas": 2,
            "grpc_port": free_port_range(1),
            "http_port": free_port_range(1),
            "http_host": "127.0.0.1",
        },
        "security": {"tokens_file": str(folder / "tokens")},
        "deploy": {"onprem": {"head_address": "192.0.2.1", "head_num_cpus": 4, "hosts": hosts}},
    }


@contextmanager
def _cluster(config: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.integration.labelled_cluster", str(config)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=60)


def _next_report(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("["):
            report: list[dict[str, Any]] = json.loads(line)
            return report
    raise AssertionError(f"the cluster ended with status {process.wait(timeout=60)}")


class Caller(threading.Thread):
    """Asks again and again until told to stop."""

    def __init__(self, stub: rpc.GenerationServiceStub) -> None:
        super().__init__()
        self._stub = stub
        self._stopping = threading.Event()
        self.answers: list[tuple[int, ...]] = []
        self.errors: list[str] = []

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                answer = self._stub.Generate(request("go", max_tokens=64, seed=5), timeout=60)
                self.answers.append(tuple(answer.choices[0].token_ids))
            except grpc.RpcError as error:
                self.errors.append(f"{error.code().name}: {error.details()}")

    def stop(self) -> None:
        self._stopping.set()
        self.join()


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_replicas_go_where_they_belong_and_are_replaced_unnoticed(tmp_path: Path) -> None:
    content, config = _content(tmp_path), tmp_path / "cluster.yaml"
    config.write_text(yaml.safe_dump(content))
    address = f"127.0.0.1:{content['gateway']['grpc_port']}"
    with _cluster(config) as process:
        first = _next_report(process)
        assert Counter(replica["pool"] for replica in first) == {"gateway": 2, "target": 2, "draft": 2}
        for replica in first:
            assert replica["labels"][POOL_LABEL] == replica["pool"]
        slots = {replica["pool"]: replica["resources"].get(f"{replica['pool']}_slot") for replica in first}
        assert slots == {"gateway": None, "target": 1, "draft": 2}
        with connect(address, "wrong-0123456789abcdef") as stub, pytest.raises(grpc.RpcError) as caught:
            stub.Generate(request("go"), timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with connect(address, TOKEN) as stub:
            caller = Caller(stub)
            caller.start()
            content["target"]["max_num_seqs"] = 32
            config.write_text(yaml.safe_dump(content))
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            second = _next_report(process)
            caller.stop()
        assert not {replica["replica"] for replica in first} & {replica["replica"] for replica in second}
        assert all(replica["labels"][POOL_LABEL] == replica["pool"] for replica in second)
        assert caller.errors == []
        assert len(caller.answers) > 10
        assert len(set(caller.answers)) == 1
