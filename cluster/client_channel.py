"""Dialling a service's public endpoint: plain or TLS, with a token where there is one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from paceline.actors.engine.errors import PacelineError
from paceline.cluster.auth import AUTHORIZATION

TOKEN_VARIABLE = "PACELINE_TOKEN"
CA_VARIABLE = "PACELINE_CA_FILE"
TLS_SCHEME = "https://"


class _CallDetails(NamedTuple):
    """What gRPC wants to know of a call that an interceptor changes."""

    method: str
    timeout: float | None
    metadata: list[tuple[str, str | bytes]] | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _TokenSender(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
):
    """Adds the token to each call."""

    def __init__(self, token: str) -> None:
        self._value = f"Bearer {token}"

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(self._with_token(details), request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(self._with_token(details), request)

    def _with_token(self, details: Any) -> _CallDetails:
        return _CallDetails(
            details.method,
            details.timeout,
            [*(details.metadata or ()), (AUTHORIZATION, self._value)],
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )


def open_channel(address: str, token: str | None = None) -> grpc.Channel:
    """A channel to ``host:port``, or over TLS to ``https://host:port``. Connects with the first call.

    Args:
        token: bearer token; None = the environment's ``PACELINE_TOKEN``, where there is one.

    The certificates of ``PACELINE_CA_FILE`` are trusted instead of the system's where it is set.

    Raises:
        PacelineError: that file cannot be read.
    """
    token = os.environ.get(TOKEN_VARIABLE) if token is None else token
    if address.startswith(TLS_SCHEME):
        channel = grpc.secure_channel(address.removeprefix(TLS_SCHEME).rstrip("/"), _credentials())
    else:
        channel = grpc.insecure_channel(address)
    return grpc.intercept_channel(channel, _TokenSender(token)) if token else channel


def _credentials() -> grpc.ChannelCredentials:
    path = os.environ.get(CA_VARIABLE)
    if not path:
        return grpc.ssl_channel_credentials()
    try:
        return grpc.ssl_channel_credentials(Path(path).read_bytes())
    except OSError as error:
        raise PacelineError(f"{CA_VARIABLE}: {path} cannot be read ({error.strerror})") from None
