"""``paceline serve`` as a process of its own, and the command line beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.serve_output import read_until_ready

START_SECONDS = 120
STOP_SECONDS = 60


def paceline(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline.cluster.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"} | options,
    )


@dataclass
class ServeProcess:
    """The process once it is ready."""

    process: subprocess.Popen[str]
    port: int
    lines: list[str]
    home: str
    """Where Ray's token is."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def ray_address(self) -> str:
        (line,) = [line for line in self.lines if line.strip().startswith("Ray ")]
        return line.split()[1]

    def replicas(self, pool: str) -> list[dict[str, Any]]:
        """What every replica of a pool says of itself."""
        found = paceline("status", "--address", self.ray_address, "--json", HOME=self.home)
        return list(json.loads(found.stdout)["pools"][pool]["replicas"])


@contextmanager
def serving(
    folder: Path, content: str, port: int, *, haproxy: bool, start_seconds: float = START_SECONDS
) -> Iterator[ServeProcess]:
    """A service with a Ray of its own, for the length of the block.

    Args:
        content: of its configuration file; ``port`` is the gRPC port that it gives.
        haproxy: which of Serve's proxies is in front.
    """
    path = folder / "paceline.yaml"
    path.write_text(content)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_SERVE_")}
    environment["RAY_SERVE_ENABLE_HA_PROXY"] = "1" if haproxy else "0"
    # As a user's is: Ray writes its token into the home folder, and clients have to send it.
    environment.pop("RAY_AUTH_MODE", None)
    environment["HOME"] = str(folder)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "paceline.cluster.cli", "serve", str(path), "--address", "local"),
            *("--timeout", f"{start_seconds:g}"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        yield ServeProcess(process, port, read_until_ready(process), environment["HOME"])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(STOP_SECONDS)
