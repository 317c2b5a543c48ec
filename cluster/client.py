"""Calling a running service, as the command line does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.actors.engine.errors import PacelineError
from paceline.cluster.client_channel import open_channel
from paceline.protos import generation_pb2 as proto
from paceline.protos import generation_pb2_grpc as rpc

DEFAULT_ADDRESS = "127.0.0.1:9000"
DEADLINE_MARGIN_SECONDS = 2.0


@dataclass(frozen=True)
class Timing:
    """When a stream's tokens came, in seconds after the request was sent."""

    first_token: float
    last_token: float
    num_first: int
    """Tokens of the first chunk."""
    num_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Over the whole request, prompt included; 0 where nothing came."""
        return self.num_tokens / self.last_token if self.last_token > 0 else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """After the first chunk: 1 / TPOT. 0 where there was only one chunk."""
        seconds = self.last_token - self.first_token
        return (self.num_tokens - self.num_first) / seconds if seconds > 0 else 0.0


class ServiceError(PacelineError):
    """A call to the service failed. The text is the service's own, with a remedy where one is known."""


@contextlib.contextmanager
def connect(address: str, token: str | None = None) -> Iterator[rpc.GenerationServiceStub]:
    """The service at an address, for the length of the block: see ``open_channel``."""
    with open_channel(address, token) as channel:
        yield rpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]


def rpc_timeout(request: proto.GenerateRequest) -> float | None:
    """Deadline of the call in seconds: a little after the request's own limit, whose error says more."""
    return request.timeout_s + DEADLINE_MARGIN_SECONDS if request.HasField("timeout_s") else None


def stream(
    stub: rpc.GenerationServiceStub,
    request: proto.GenerateRequest,
    on_chunk: Callable[[proto.GenerateChunk], None],
) -> tuple[proto.GenerateChunk, Timing]:
    """Run one stream to its end, calling ``on_chunk`` for each chunk.

    Returns:
        The last chunk (finish reason, usage, speculation, seed), and when tokens came.

    Raises:
        grpc.RpcError: as the service ended the call; the call is cancelled on any other exception.
    """
    started = time.monotonic()
    first = last = 0.0
    num_tokens = num_first = 0
    final = proto.GenerateChunk()
    call = stub.GenerateStream(request, timeout=rpc_timeout(request))
    try:
        for chunk in call:
            now = time.monotonic() - started
            if chunk.token_ids:
                if not num_tokens:
                    first, num_first = now, len(chunk.token_ids)
                num_tokens += len(chunk.token_ids)
                last = now
            on_chunk(chunk)
            final = chunk
    finally:
        call.cancel()
    return final, Timing(first, last, num_first, num_tokens)
