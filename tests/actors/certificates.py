"""A small certificate authority for tests, by the openssl program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.actors.tls import TlsFiles


class Authority:
    """Signs certificates; each authority is a stranger to the others."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("the openssl program is not installed")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.certificate, self._key = folder / f"{name}.crt", folder / f"{name}.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", f"/CN={name}", "-keyout", self._key, "-out", self.certificate),
        )

    def sign(
        self, name: str, *, dns: str = "paceline", days: int = 2, server_name: str | None = "paceline"
    ) -> TlsFiles:
        """Files of a new certificate for the DNS name, valid for so many days from now."""
        certificate, key, request, extensions = (
            self._folder / f"{name}.{suffix}" for suffix in ("crt", "key", "csr", "ext")
        )
        extensions.write_text(f"subjectAltName=DNS:{dns}\n")
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", f"/CN={name}", "-keyout", key, "-out", request),
        )
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key),
            *("-CAcreateserial", "-days", days, "-extfile", extensions, "-out", certificate),
        )
        return TlsFiles(str(certificate), str(key), str(self.certificate), server_name)


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
