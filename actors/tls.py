"""Mutual TLS of the internal streams: credentials from PEM files that may be renewed while peers run."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import grpc

from paceline.actors.engine.errors import PacelineError

logger = logging.getLogger(__name__)


class TlsError(PacelineError):
    """A certificate, key or authority cannot be used; the text names the file."""


@dataclass(frozen=True)
class TlsFiles:
    """Where this process finds what it shows to its peers, and what it accepts from them. Paths of PEM
    files."""

    certificate: str
    """Own certificate, and the intermediate ones up to the authority."""
    private_key: str
    """Key of the own certificate."""
    ca: str
    """Certificates of the authorities that peers must be signed by."""
    server_name: str | None = None
    """DNS name that the server's certificate must be for; None = the host that is dialled."""


@dataclass(frozen=True)
class _Pem:
    certificate: bytes
    private_key: bytes
    ca: bytes


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials of a server that only takes clients signed by ``files.ca``. Renewed files count for the
    connections that come after; ones that cannot be read leave the former in force.

    Raises:
        TlsError: a file cannot be read.
    """
    pem, mark = _read(files), _stamp(files)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC, on a thread of its own, before each handshake. None = as before."""
        nonlocal mark
        try:
            now = _stamp(files)
            if now == mark:
                return None
            configuration = _server_configuration(_read(files))
        except TlsError as error:
            logger.error("%s; the certificates stay as they were", error)
            return None
        mark = now
        return configuration

    return grpc.dynamic_ssl_server_credentials(
        _server_configuration(pem),
        renewed,  # type: ignore[arg-type]  # the stubs do not know of None
        require_client_authentication=True,
    )


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials to dial a server with: files as they are now.

    Raises:
        TlsError: a file cannot be read.
    """
    pem = _read(files)
    return grpc.ssl_channel_credentials(pem.ca, pem.private_key, pem.certificate)


def check_files(files: TlsFiles) -> None:
    """Raises: TlsError if a file cannot be read or holds something else."""
    _read(files)


def _server_configuration(pem: _Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.private_key, pem.certificate)], pem.ca)


def _read(files: TlsFiles) -> _Pem:
    return _Pem(
        _content("certificate", files.certificate, b"CERTIFICATE"),
        _content("private_key", files.private_key, b"PRIVATE KEY"),
        _content("ca", files.ca, b"CERTIFICATE"),
    )


def _content(name: str, path: str, kind: bytes) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise TlsError(f"{name}: {path} cannot be read ({error.strerror}); check the path") from None
    if kind not in content:
        # gRPC itself would only say that no handshake succeeds.
        raise TlsError(f"{name}: {path} holds no PEM {kind.decode().lower()}; give a file in PEM form")
    return content


def _stamp(files: TlsFiles) -> tuple[tuple[int, int, int], ...]:
    stamps = []
    for path in (files.certificate, files.private_key, files.ca):
        try:
            found = os.stat(path)
        except OSError as error:
            raise TlsError(f"{path} cannot be read ({error.strerror}); check the path") from None
        stamps.append((found.st_ino, found.st_size, found.st_mtime_ns))
    return tuple(stamps)
