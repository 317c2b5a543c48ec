"""``paceline serve`` as a user runs it: a process of its own, with a Ray of its own, ended by Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from paceline.cluster.client import connect
from paceline.cluster.runtime import free_port, port_is_free
from paceline.protos import generation_pb2 as proto
from tests.integration.serving import STOP_SECONDS, ServeProcess, paceline, serving

CONFIG = """
model: emulated://solo?base_ms=20&support=6
draft: emulated://solo?base_ms=3&support=6&acceptance=0.7
speculation: {{ngram: {{enabled: false}}}}
gateway: {{grpc_port: {port}}}
"""


def children_of_session(session: int) -> list[str]:
    """Command lines of the processes whose session it is: Ray's are all started in the driver's."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (OSError, ProcessLookupError):
            continue
        state, own_session = fields[0], int(fields[3])
        if own_session == session and state != "Z":
            found.append(command)
    return found


@pytest.fixture(scope="module", params=["haproxy", "default proxy"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServeProcess]:
    port = free_port()
    content = CONFIG.format(port=port)
    with serving(
        tmp_path_factory.mktemp("serve"), content, port, haproxy=request.param == "haproxy"
    ) as found:
        yield found


def test_generate_streams_with_drafts(served: ServeProcess) -> None:
    found = paceline(
        *("generate", "hello", "--max-tokens", "40", "--seed", "1", "--address", f"127.0.0.1:{served.port}")
    )
    assert found.returncode == 0, found.stderr
    assert "40 tokens" in found.stderr
    assert "draft tokens accepted" in found.stderr
    plain = paceline(
        *("generate", "hello", "--max-tokens", "40", "--seed", "1", "--no-speculation", "--json"),
        PACELINE_ADDRESS=f"127.0.0.1:{served.port}",
    )
    answer = json.loads(plain.stdout)
    assert answer["choices"][0]["text"] == found.stdout.removesuffix("\n")
    assert answer["speculation"]["draft_tokens"] == "0"


def test_errors_reach_the_terminal_as_one_sentence(served: ServeProcess) -> None:
    found = paceline("generate", "x", "--top-p", "2", "--address", f"127.0.0.1:{served.port}")
    assert found.returncode == 1
    assert found.stderr.startswith("error: INVALID_ARGUMENT: sampling.top_p")
    assert found.stderr.count("\n") == 1


def test_status_finds_the_pools(served: ServeProcess) -> None:
    found = paceline("status", "--address", served.ray_address, "--json", HOME=served.home)
    assert found.returncode == 0, found.stderr
    status = json.loads(found.stdout)
    assert status["status"] == "RUNNING"
    assert {name: pool["running"] for name, pool in status["pools"].items()} == {
        "gateway": 1,
        "target": 1,
        "draft": 1,
    }
    shown = paceline("status", "--address", served.ray_address, COLUMNS="80", HOME=served.home)
    assert shown.returncode == 0, shown.stderr
    assert "service running" in shown.stdout
    assert status["pools"]["target"]["replicas"][0]["id"] in shown.stdout


def test_a_second_service_on_the_port_is_refused(served: ServeProcess) -> None:
    found = paceline(
        *("serve", "--model", "emulated://other", "--port", str(served.port), "--address", "local")
    )
    assert found.returncode == 1
    assert f"port {served.port} is in use; choose another one with --port" in found.stderr


def check_refusal_while_draining(port: int) -> None:
    """New requests soon hear UNAVAILABLE, while the one that runs goes on."""
    request = proto.GenerateRequest(prompt="late", stopping=proto.StoppingParams(max_tokens=1))
    with connect(f"127.0.0.1:{port}") as stub:
        deadline = time.monotonic() + 2
        call = stub.Generate.future(request, timeout=10)
        while call.exception() is None and time.monotonic() < deadline:
            call = stub.Generate.future(request, timeout=10)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in call.details()


def test_interrupt_drains_and_leaves_nothing(served: ServeProcess) -> None:
    session = os.getsid(served.process.pid)
    assert len(children_of_session(session)) > 3
    running = subprocess.Popen(
        [
            *(sys.executable, "-m", "paceline.cluster.cli", "generate", "drain", "--max-tokens", "150"),
            *("--address", f"127.0.0.1:{served.port}"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    assert running.stdout.read(1), "the stream has begun"
    os.killpg(served.process.pid, signal.SIGINT)
    assert served.process.stdout is not None
    assert served.process.stdout.readline() == "draining; Ctrl-C again to stop at once\n"
    check_refusal_while_draining(served.port)
    rest, _ = served.process.communicate(timeout=STOP_SECONDS)
    out, err = running.communicate(timeout=30)
    assert running.returncode == 0, err
    assert "150 tokens" in err
    assert served.process.returncode == 0
    assert rest.splitlines() == ["stopped"]
    deadline = time.monotonic() + 10
    while children_of_session(session) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children_of_session(session) == []
    assert port_is_free(served.port, "0.0.0.0")
    assert out
