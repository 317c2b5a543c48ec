"""What callers are told when something is wrong, and whether idle connections last: through both proxies of
Serve, by a service as a user starts it."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from paceline.cluster.client import connect
from paceline.cluster.runtime import free_port
from paceline.protos import generation_pb2 as proto
from paceline.protos import generation_pb2_grpc as rpc
from tests.integration.conftest import wait_until
from tests.integration.heartbeat import Heartbeat
from tests.integration.serving import ServeProcess, serving
from tests.requests import request

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

MAX_ONGOING = 8
RESUME_SECONDS = 1.0
CONFIG = """
model: emulated://told?base_ms=20&support=6&max_model_len=4096
draft: emulated://told?base_ms=3&support=6&acceptance=0.7
speculation: {{ngram: {{enabled: false}}}}
gateway:
  grpc_port: {port}
  http_port: {http_port}
  max_ongoing_requests: {max_ongoing}
  max_queued_requests: 0
  resume_timeout_s: {resume}
"""
NUM_TOKENS = 3000
"""More than come while something is done to the service."""
START_SECONDS = 240
STATUS_SECONDS = 10.0
"""A caller without a deadline hears within this time that its answer will not come."""
MAX_DETAILS_BYTES = 4096
METHODS = ["Generate", "GenerateStream"]


@pytest.fixture(scope="module", params=["haproxy", "default proxy"])
def proxy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def http_port(proxy: str) -> int:
    return free_port()


@pytest.fixture(scope="module")
def service(proxy: str, http_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    port = free_port()
    content = CONFIG.format(port=port, http_port=http_port, max_ongoing=MAX_ONGOING, resume=RESUME_SECONDS)
    folder = tmp_path_factory.mktemp("serve")
    with serving(folder, content, port, haproxy=proxy == "haproxy", start_seconds=START_SECONDS) as running:
        yield running


@contextmanager
def calling(service: ServeProcess, method: str) -> Iterator[Any]:
    """A function from a message to the tokens of its answer."""
    with connect(service.address) as stub:

        def call(message: proto.GenerateRequest) -> list[int]:
            if method == "Generate":
                return list(stub.Generate(message, timeout=60).choices[0].token_ids)
            return [i for chunk in stub.GenerateStream(message, timeout=60) for i in chunk.token_ids]

        yield call


# ---------------------------------------------------------------- statuses


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"max_tokens": -1}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"temperature": -1.0}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"prompt": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": "nobody"}, grpc.StatusCode.NOT_FOUND),
        ({"model": "x" * 100_000}, grpc.StatusCode.NOT_FOUND),
        ({"prompt": "x" * 5_000_000}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"stop": ["x" * 1_000_000]}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=["max_tokens", "temperature", "empty", "model", "long name", "5 MB", "long stop"],
)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_asked_wrongly_gets_its_own_status(
    service: ServeProcess, method: str, change: dict[str, Any], code: grpc.StatusCode
) -> None:
    """B64: the gateway's status arrives as it was set, with one sentence and no stack."""
    options = {"prompt": "a", **change}
    model = options.pop("model", "")
    message = request(**options)
    message.model = model
    with calling(service, method) as call, pytest.raises(grpc.RpcError) as raised:
        call(message)
    details = raised.value.details()
    assert raised.value.code() is code
    assert details
    assert len(details.encode()) < MAX_DETAILS_BYTES
    assert "Traceback" not in details
    assert "\n" not in details


@pytest.mark.parametrize("method", METHODS)
def test_overload_has_a_status_and_harms_nobody_else(service: ServeProcess, method: str) -> None:
    """B64: three times as many as the gateway takes; no one is told INTERNAL."""
    refused: list[tuple[grpc.StatusCode, str]] = []
    answers: list[list[int]] = []
    with calling(service, method) as call:
        reference = call(request("full", max_tokens=150, seed=3))

        def run(_: int) -> None:
            try:
                answers.append(call(request("full", max_tokens=150, seed=3)))
            except grpc.RpcError as error:
                refused.append((error.code(), error.details()))

        with ThreadPoolExecutor(3 * MAX_ONGOING) as pool:
            list(pool.map(run, range(3 * MAX_ONGOING)))
    assert refused
    assert {code for code, _ in refused} <= {
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
    }
    for _, details in refused:
        assert details
        assert len(details.encode()) < MAX_DETAILS_BYTES
        assert "Traceback" not in details
        assert "\n" not in details
    assert len(answers) >= MAX_ONGOING
    assert all(answer == reference for answer in answers)


def test_http_generates_nothing_and_tells_nothing(service: ServeProcess, http_port: int) -> None:
    """B64: requests over HTTP are not offered. That port answers health checks; to anything else it says no,
    without a stack."""
    with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/-/healthz", timeout=30) as answer:
        assert answer.status == 200
    for path in ("paceline", "paceline/GenerateStream", "v1/completions"):
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(f"http://127.0.0.1:{http_port}/{path}", b'{"prompt": "a"}', timeout=30)
        told = raised.value.read()
        assert 400 <= raised.value.code < 600
        assert len(told) < MAX_DETAILS_BYTES
        assert b"Traceback" not in told


# ---------------------------------------------------------------- calls that are cut


class Reader(threading.Thread):
    """A call whose caller set no deadline, read to its end."""

    def __init__(self, stub: rpc.GenerationServiceStub, message: proto.GenerateRequest) -> None:
        super().__init__(daemon=True)
        self._call = stub.GenerateStream(message)
        self.token_ids: list[int] = []
        self.finished = False
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.heard_at = time.monotonic()
        """When the last token or the end came."""
        self.start()

    def run(self) -> None:
        try:
            for chunk in self._call:
                self.token_ids.extend(chunk.token_ids)
                self.heard_at = time.monotonic()
                self.finished = self.finished or bool(chunk.finish_reason)
            self.code = self._call.code()
        except grpc.RpcError as error:
            self.code, self.details = error.code(), error.details() or ""
        self.heard_at = time.monotonic()


def wait_until_served(service: ServeProcess) -> None:
    def serves() -> bool:
        try:
            with connect(service.address) as stub:
                return len(stub.Generate(request("up", max_tokens=4), timeout=10).choices[0].token_ids) == 4
        except grpc.RpcError:
            return False

    wait_until(serves, timeout_seconds=120, what="the service serves again")


def test_request_that_is_ended_by_the_server(service: ServeProcess) -> None:
    """B69: by its own limit on the gateway, with nothing that the caller's side would end it by."""
    with connect(service.address) as stub:
        begun = time.monotonic()
        readers = [Reader(stub, request("on", max_tokens=NUM_TOKENS, timeout_s=1.0)) for _ in range(4)]
        for reader in readers:
            reader.join(begun + 1.0 + STATUS_SECONDS - time.monotonic())
            assert not reader.is_alive(), "the caller still waits"
            assert reader.code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert not reader.finished


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill -9", "terminated"])
@pytest.mark.parametrize("pool", ["target", "gateway"])
def test_replica_that_goes_in_the_middle(service: ServeProcess, pool: str, number: int) -> None:
    """B66, B69: the caller, without a deadline, never waits long for the next token or a status, and an end
    that looks normal is that of a whole answer.

    The target is the only one, and its requests may not wait for the next one. A gateway that is terminated
    may finish what it has.
    """
    wait_until_served(service)
    (replica,) = service.replicas(pool)
    with connect(service.address) as stub, Heartbeat() as heartbeat:
        messages = [request("on", max_tokens=NUM_TOKENS, seed=seed) for seed in range(4)]
        readers = [Reader(stub, message) for message in messages]
        wait_until(
            lambda: all(reader.token_ids for reader in readers), timeout_seconds=60, what="the streams run"
        )
        assert all(reader.is_alive() for reader in readers)
        os.kill(replica["pid"], number)
        struck = time.monotonic()
        for reader in readers:
            while reader.is_alive():
                since, now = max(struck, reader.heard_at), time.monotonic()
                # Less what the machine itself kept everybody waiting.
                assert now - since - heartbeat.lost_seconds(since, now) < STATUS_SECONDS
                reader.join(0.1)
            assert reader.finished == (reader.code is grpc.StatusCode.OK)
            assert len(reader.token_ids) == NUM_TOKENS or not reader.finished
            assert "Traceback" not in reader.details
            assert len(reader.details.encode()) < MAX_DETAILS_BYTES
        if number == signal.SIGKILL:
            assert not any(reader.finished for reader in readers)
        if pool == "target":
            assert {reader.code for reader in readers} == {grpc.StatusCode.UNAVAILABLE}
        wait_until_served(service)
        # What had come was the beginning of the answer.
        for message, reader in zip(messages, readers, strict=True):
            message.stopping.max_tokens = 20
            answer = stub.Generate(message, timeout=60).choices[0]
            assert reader.token_ids[:20] == list(answer.token_ids)[: len(reader.token_ids)]


# ---------------------------------------------------------------- pings


def test_three_idle_minutes_with_pings_then_a_long_request(service: ServeProcess, proxy: str) -> None:
    """B70: at a client's usual keepalive, and at the fastest that there is."""
    if proxy != "haproxy":
        pytest.skip("Serve's default proxy allows a ping in five minutes")

    def options(milliseconds: int) -> list[tuple[str, int]]:
        return [
            ("grpc.keepalive_time_ms", milliseconds),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]

    def hold(milliseconds: int) -> list[list[int]]:
        with grpc.insecure_channel(service.address, options=options(milliseconds)) as channel:
            stub = rpc.GenerationServiceStub(channel)
            message = request("long", max_tokens=20, seed=7)
            first = stub.Generate(message, timeout=60)
            time.sleep(180.0)
            # Without drafts a step for each token: more than half a minute in which nothing is sent.
            message.stopping.max_tokens, message.speculation.num_speculative_tokens = 1800, 0
            begun = time.monotonic()
            last = stub.Generate(message, timeout=600)
            assert time.monotonic() - begun > 30.0
            return [list(answer.choices[0].token_ids) for answer in (first, last)]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(hold, [10_000, 1_000]))
    for first, last in found:
        assert len(last) == 1800
        assert last[: len(first)] == first
