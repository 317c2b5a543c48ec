"""Tokens, limits and mutual TLS through the running service: one gateway, one target, one draft."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import grpc
import pytest

from paceline.cluster.client import connect
from paceline.protos import execution_pb2, execution_pb2_grpc
from paceline.protos import generation_pb2 as proto
from paceline.protos import generation_pb2_grpc as rpc
from tests.actors.certificates import Authority
from tests.integration.conftest import Service, wait_until
from tests.requests import request

MODEL = "emulated://guarded?vocab_size=512&base_ms=5&max_model_len=100000"
OPERATOR, ALICE, BOB = "operator-0123456789abcdef", "alice-0123456789abcdef", "bob-0123456789abcdef"
FRESH = [f"caller{number}-0123456789abcdef" for number in range(10)]
"""Tokens whose limits nothing has counted against yet."""
NEW_ALICE = "alice-fedcba9876543210"
MAX_REQUEST_BYTES = 64 * 1024
BURST = 6


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text("\n".join([f"operator {OPERATOR}", f"alice {ALICE}", f"bob {BOB}", *FRESH]))
    return path


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def service(
    deploy: Callable[..., AbstractContextManager[Service]], tokens: Path, authority: Authority
) -> Iterator[Service]:
    files = authority.sign("node")
    with deploy(
        {
            "model": MODEL,
            "draft": MODEL + "&acceptance=0.8",
            "target": {"num_threads": 1},
            # A draft as slow as its target would rightly be left at rest.
            "speculation": {"num_speculative_tokens": 4},
            "security": {
                "tokens_file": str(tokens),
                "max_request_bytes": MAX_REQUEST_BYTES,
                "rate_limit_per_token": {"requests_per_second": 2, "burst": BURST},
                "internal_tls": {
                    "certificate": files.certificate,
                    "private_key": files.private_key,
                    "ca": files.ca,
                },
            },
        }
    ) as running:
        yield running


@pytest.fixture
def caller(service: Service) -> Iterator[rpc.GenerationServiceStub]:
    """Calls with a token of this test's own."""
    with connect(service.address, FRESH.pop()) as stub:
        yield stub


def _stream(stub: rpc.GenerationServiceStub, message: proto.GenerateRequest) -> proto.GenerateChunk:
    (*_, last) = stub.GenerateStream(message, timeout=60)
    return last


CALLS: dict[str, Callable[[rpc.GenerationServiceStub], object]] = {
    "Generate": lambda stub: stub.Generate(request("a", max_tokens=4), timeout=60),
    "GenerateStream": lambda stub: _stream(stub, request("a", max_tokens=4)),
    "Tokenize": lambda stub: stub.Tokenize(proto.TokenizeRequest(prompt="a"), timeout=60),
    "GetModelInfo": lambda stub: stub.GetModelInfo(proto.GetModelInfoRequest(), timeout=60),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_needs_a_token(name: str, service: Service, caller: rpc.GenerationServiceStub) -> None:
    CALLS[name](caller)
    for token, told in (("", "carries no token"), ("wrong-0123456789abcdef", "the token is not valid here")):
        with connect(service.address, token) as stub, pytest.raises(grpc.RpcError) as caught:
            CALLS[name](stub)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert told in caught.value.details()
        assert "Traceback" not in caught.value.details()


def test_a_changed_file_of_tokens_counts_and_running_streams_go_on(service: Service, tokens: Path) -> None:
    before = tokens.read_text()
    with connect(service.address, ALICE) as old, connect(service.address, NEW_ALICE) as new:
        stream = old.GenerateStream(request("a", max_tokens=2000, num_speculative_tokens=0), timeout=60)
        next(stream)
        renewed = tokens.with_suffix(".new")
        renewed.write_text(before.replace(ALICE, NEW_ALICE))
        renewed.replace(tokens)

        def refused() -> bool:
            try:
                old.GetModelInfo(proto.GetModelInfoRequest(), timeout=10)
            except grpc.RpcError as error:
                return error.code() is grpc.StatusCode.UNAUTHENTICATED
            return False

        wait_until(refused, timeout_seconds=5, what="the old token is refused")
        assert new.Generate(request("a", max_tokens=4), timeout=60).choices[0].token_ids
        (*_, last) = stream
        assert last.usage.completion_tokens == 2000


def test_too_many_requests_are_told_when_to_come_again(service: Service) -> None:
    def outcome(call: grpc.Future) -> grpc.RpcError | None:
        error = call.exception()
        assert error is None or isinstance(error, grpc.RpcError)
        return error

    with connect(service.address, BOB) as stub:
        message = request("a", max_tokens=1)
        calls = [stub.Generate.future(message, timeout=60) for _ in range(4 * BURST)]
        refused = [error for call in calls if (error := outcome(call)) is not None]
        assert BURST <= len(calls) - len(refused) < len(calls)
        for error in refused:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "your rate limit is reached; try again in " in error.details()
        told = [re.search(r"try again in ([0-9.]+) s$", error.details()) for error in refused]
        hints = [float(found[1]) for found in told if found]
        assert len(hints) == len(refused)
        assert 0 < min(hints) <= max(hints) <= 0.5
        time.sleep(max(hints))
        assert outcome(stub.Generate.future(message, timeout=60)) is None
        # Asking for the model never comes too soon, and others do not pay.
        stub.GetModelInfo(proto.GetModelInfoRequest(), timeout=10)
    assert service.stub.Generate(message, timeout=60).choices


def test_a_request_that_is_too_large_is_refused_with_a_clean_status(
    caller: rpc.GenerationServiceStub,
) -> None:
    for call in (caller.Generate, lambda message, timeout: _stream(caller, message)):
        with pytest.raises(grpc.RpcError) as caught:
            call(request("x" * (5 * 1024 * 1024)), timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"above the {MAX_REQUEST_BYTES} that are allowed" in caught.value.details()
    assert caller.Generate(request("x" * 60_000, max_tokens=1), timeout=60).choices


def test_the_pools_speak_tls_and_answer_nobody_else(
    service: Service, caller: rpc.GenerationServiceStub, authority: Authority
) -> None:
    answer = caller.Generate(request("a", max_tokens=400, num_speculative_tokens=4), timeout=60)
    assert answer.speculation.accepted_tokens > 0
    (target,) = service.replicas("target")
    hello = execution_pb2.ExecutionRequest(
        hello=execution_pb2.GatewayHello(protocol_version=1, gateway_id="stranger")
    )
    with grpc.insecure_channel(target["address"]) as channel:
        stub = execution_pb2_grpc.ExecutionServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Attach(iter([hello]), timeout=20))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    files = authority.sign("peer")
    credentials = grpc.ssl_channel_credentials(
        Path(files.ca).read_bytes(),
        Path(files.private_key).read_bytes(),
        Path(files.certificate).read_bytes(),
    )
    options = [("grpc.ssl_target_name_override", "paceline")]
    with grpc.secure_channel(target["address"], credentials, options=options) as channel:
        stub = execution_pb2_grpc.ExecutionServiceStub(channel)
        assert next(stub.Attach(iter([hello]), timeout=20)).welcome.model == "guarded"
