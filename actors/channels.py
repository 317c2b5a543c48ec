"""gRPC channel and server options of the internal streams, and how addresses are bound."""

from __future__ import annotations

from dataclasses import dataclass

import grpc.aio

from paceline.actors.engine.errors import PacelineError
from paceline.actors.tls import TlsFiles, channel_credentials, server_credentials

PROTOCOL_VERSION = 1
"""Version of execution.proto and verification.proto that this build speaks. Peers must be equal."""

ChannelOptions = list[tuple[str, int]]


@dataclass(frozen=True)
class ChannelSettings:
    """How internal streams notice a silent peer, and what they may carry.

    A peer that vanished without a reset is found after at most
    ``keepalive_seconds + keepalive_timeout_seconds``.
    """

    keepalive_seconds: float = 10.0
    """Both sides ping after this long without data, also while no call is open."""
    keepalive_timeout_seconds: float = 10.0
    """The connection is lost if a ping is not answered within this time."""
    max_message_bytes: int = 64 * 1024 * 1024
    """Room for the token ids of about ten million prompt tokens."""
    hello_timeout_seconds: float = 10.0
    """The first message of a stream, and the answer to it, must come within this time."""
    tls: TlsFiles | None = None
    """Mutual TLS; None = nothing is encrypted and anybody who reaches the port is a peer."""

    def __post_init__(self) -> None:
        for name in ("keepalive_seconds", "keepalive_timeout_seconds", "hello_timeout_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be positive, got {getattr(self, name)}")
        if self.max_message_bytes < 1024:
            raise ValueError(f"max_message_bytes: must be at least 1024, got {self.max_message_bytes}")


def _common_options(settings: ChannelSettings) -> ChannelOptions:
    return [
        ("grpc.keepalive_time_ms", max(1, round(settings.keepalive_seconds * 1000))),
        ("grpc.keepalive_timeout_ms", max(1, round(settings.keepalive_timeout_seconds * 1000))),
        # Core bounds every ping by its own timeout as well (60 s by default), whichever ends first counts.
        ("grpc.http2.ping_timeout_ms", max(1, round(settings.keepalive_timeout_seconds * 1000))),
        ("grpc.keepalive_permit_without_calls", 1),
        # By default a peer stops pinging after two pings without data, and never notices the loss.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
    ]


def client_options(settings: ChannelSettings) -> ChannelOptions:
    """Options of a channel to one target."""
    return [
        *_common_options(settings),
        # Streams are retried by their owner, on a fresh channel: no shared back-off, no hidden retry.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
    ]


def server_options(settings: ChannelSettings) -> ChannelOptions:
    """Options of a target's server: it accepts its clients' pings, whatever their interval."""
    return [
        *_common_options(settings),
        # The default allows a ping per 5 minutes without data, and answers more with GOAWAY
        # (too_many_pings). 0 strikes = never punish.
        ("grpc.http2.min_ping_interval_without_data_ms", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1),
        ("grpc.http2.max_ping_strikes", 0),
        # Two servers must never share a port by accident.
        ("grpc.so_reuseport", 0),
    ]


def open_channel(address: str, settings: ChannelSettings) -> grpc.aio.Channel:
    """A fresh channel to ``host:port``; it connects on its first call.

    Raises:
        TlsError: the certificates of ``settings.tls`` cannot be read.
    """
    options: list[tuple[str, int | str]] = [*client_options(settings)]
    if settings.tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if settings.tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", settings.tls.server_name))
    return grpc.aio.secure_channel(address, channel_credentials(settings.tls), options=options)


def bind_free_port(server: grpc.aio.Server, host: str, settings: ChannelSettings) -> str:
    """Let ``server`` listen on a free port of ``host``, and return the ``host:port``.

    Raises:
        PacelineError: the host cannot be bound.
        TlsError: the certificates of ``settings.tls`` cannot be read.
    """
    address = join_address(host, 0)
    try:
        if settings.tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, server_credentials(settings.tls))
    except RuntimeError as error:
        raise PacelineError(f"cannot listen on {host}: {error}; give an address of this host") from None
    return join_address(host, port)


def join_address(host: str, port: int) -> str:
    """``host:port``, with IPv6 hosts in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
