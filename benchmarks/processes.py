"""Processor time of this process and everything it started, by role. Reads ``/proc``: Linux only."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

CLIENT, RAY = "client", "ray"
ROLES = {
    "ray::ServeReplica:paceline:gateway": "gateway",
    "ray::ServeReplica:paceline:target": "target",
    "ray::ServeReplica:paceline:draft": "draft",
    "haproxy": "proxy",
    "ray::ProxyActor": "proxy",
}
"""How a command line begins (or the program is named) -> role; all else below this process is Ray's own."""


@dataclass(frozen=True)
class ProcessorTime:
    """At one moment."""

    at: float
    """Seconds, monotonic."""
    seconds: dict[int, float]
    """Process id -> user and system time since its start."""
    roles: dict[int, str]

    def shares_since(self, earlier: ProcessorTime) -> dict[str, float]:
        """Role -> processors kept busy between the two moments (1.0 = one core)."""
        shares: dict[str, float] = {}
        for pid, seconds in self.seconds.items():
            spent = seconds - earlier.seconds.get(pid, 0.0)
            role = self.roles[pid]
            shares[role] = shares.get(role, 0.0) + spent / (self.at - earlier.at)
        return shares

    def pids(self, role: str) -> list[int]:
        return [pid for pid, name in self.roles.items() if name == role]


def processor_time() -> ProcessorTime:
    """Of this process (the client) and of all its descendants."""
    ticks = os.sysconf("SC_CLK_TCK")
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    names: dict[int, str] = {}
    at = time.monotonic()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The program's name stands in brackets and may hold anything, spaces and brackets too.
            name, _, rest = (folder / "stat").read_text(encoding="utf-8").partition("(")[2].rpartition(")")
            command = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
        except OSError:  # it has just ended
            continue
        fields = rest.split()
        pid = int(folder.name)
        parents[pid] = int(fields[1])
        seconds[pid] = (int(fields[11]) + int(fields[12])) / ticks
        names[pid] = command if command.startswith("ray::") else name
    own = os.getpid()
    roles = {own: CLIENT}
    for pid in parents:
        line = []
        ancestor = pid
        while ancestor in parents and ancestor not in roles:
            line.append(ancestor)
            ancestor = parents[ancestor]
        if ancestor in roles:
            roles.update({member: _role(names[member]) for member in line})
    return ProcessorTime(at, {pid: seconds[pid] for pid in roles}, roles)


def _role(name: str) -> str:
    return next((role for beginning, role in ROLES.items() if name.startswith(beginning)), RAY)
