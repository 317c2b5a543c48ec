"""Processor time of this process and everything it started, by role."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

CLIENT, RAY = "client", "ray"
ROLES = {
    "ray::ServeReplica:paceline:gateway": "gateway",
    "ray::ServeReplica:paceline:target": "target",
    "ray::ServeReplica:paceline:draft": "draft",
    "ray::ProxyActor": "proxy",
    "haproxy": "proxy",
    "py-spy": "profiler",
}
"""How the title or the program's name begins -> role; all else below this process is Ray's own."""


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
    own = psutil.Process()
    at = time.monotonic()
    seconds: dict[int, float] = {}
    roles: dict[int, str] = {}
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
            names = (process.cmdline() or [""])[0], process.name()
        except psutil.Error:  # it has just ended
            continue
        seconds[process.pid] = times.user + times.system
        roles[process.pid] = CLIENT if process.pid == own.pid else _role(*names)
    return ProcessorTime(at, seconds, roles)


def _role(title: str, name: str) -> str:
    return next((role for start, role in ROLES.items() if title.startswith(start) or name == start), RAY)
