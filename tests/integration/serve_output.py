"""What ``paceline serve`` prints while it starts."""

from __future__ import annotations

import subprocess

import pytest


def read_until_ready(process: subprocess.Popen[str]) -> list[str]:
    """Its lines up to the last of its announcement; fails the test where it ends before."""
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.strip().startswith("stop"):
            return lines
    pytest.fail("paceline serve ended: " + "".join(lines))
