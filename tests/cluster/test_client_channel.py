"""Dialling the public endpoint: a token with every call, and TLS where it stands in front of the service."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from paceline.actors.engine.errors import PacelineError
from paceline.cluster.cli_output import describe_rpc_error
from paceline.cluster.client import connect
from paceline.cluster.client_channel import CA_VARIABLE, TOKEN_VARIABLE
from paceline.protos import generation_pb2 as proto
from paceline.protos import generation_pb2_grpc as rpc
from tests.actors.certificates import Authority


class Guarded(rpc.GenerationServiceServicer):
    """Notes what each call says of its caller; lets in who says anything."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def GetModelInfo(  # noqa: N802
        self, request: proto.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> proto.GetModelInfoResponse:
        self._note(context)
        return proto.GetModelInfoResponse(model="guarded")

    def GenerateStream(  # noqa: N802
        self, request: proto.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[proto.GenerateChunk]:
        self._note(context)
        yield proto.GenerateChunk(text="x")

    def _note(self, context: grpc.ServicerContext) -> None:
        told = dict(context.invocation_metadata()).get("authorization")
        self.seen.append(told)
        if told is None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call carries no token")


@pytest.fixture
def guarded() -> Guarded:
    return Guarded()


@pytest.fixture
def server(guarded: Guarded) -> Iterator[grpc.Server]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    rpc.add_GenerationServiceServicer_to_server(guarded, server)
    yield server
    server.stop(None)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.delenv(CA_VARIABLE, raising=False)


def test_every_call_carries_the_token(
    guarded: Guarded, server: grpc.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with connect(address, "given") as stub:
        assert stub.GetModelInfo(proto.GetModelInfoRequest()).model == "guarded"
        assert [chunk.text for chunk in stub.GenerateStream(proto.GenerateRequest())] == ["x"]
    monkeypatch.setenv(TOKEN_VARIABLE, "of the environment")
    with connect(address) as stub:
        stub.GetModelInfo(proto.GetModelInfoRequest())
    assert guarded.seen == ["Bearer given", "Bearer given", "Bearer of the environment"]


def test_without_a_token_the_command_line_says_where_to_put_one(
    guarded: Guarded, server: grpc.Server
) -> None:
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with connect(address) as stub, pytest.raises(grpc.RpcError) as caught:
        stub.GetModelInfo(proto.GetModelInfoRequest())
    assert guarded.seen == [None]
    assert describe_rpc_error(caught.value, address) == (
        "the call carries no token; the environment variable PACELINE_TOKEN holds the token to call with"
    )


def test_tls_in_front_of_the_service(
    guarded: Guarded, server: grpc.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Authority(tmp_path / "ours").sign("front", dns="localhost")
    stranger = Authority(tmp_path / "theirs").sign("front", dns="localhost")
    pair = (Path(files.private_key).read_bytes(), Path(files.certificate).read_bytes())
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([pair]))
    server.start()
    monkeypatch.setenv(CA_VARIABLE, files.ca)
    with connect(f"https://localhost:{port}/", "given") as stub:
        assert stub.GetModelInfo(proto.GetModelInfoRequest(), timeout=10).model == "guarded"
    monkeypatch.setenv(CA_VARIABLE, stranger.ca)
    with connect(f"https://localhost:{port}", "given") as stub, pytest.raises(grpc.RpcError) as caught:
        stub.GetModelInfo(proto.GetModelInfoRequest(), timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    # The token went to nobody whose certificate was not checked.
    assert guarded.seen == ["Bearer given"]
    monkeypatch.setenv(CA_VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(PacelineError, match=r"PACELINE_CA_FILE: .*gone cannot be read"), connect("https://x"):
        pass
