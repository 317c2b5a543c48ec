"""The machine that a process computes on: whether two of them are in each other's way."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Cores(NamedTuple):
    """What a process computes with, where that is a machine's processor cores."""

    host: str
    """Names the machine and those of its cores that the process may run on; empty: unknown."""
    num_threads: int
    """0: it computes elsewhere, or not at all."""


NO_CORES = Cores("", 0)


def cores_of_this_process(num_threads: int) -> Cores:
    return Cores(_host(), num_threads)


def num_usable_cores() -> int:
    """Cores that this process may run on."""
    return len(_usable_cores())


def _usable_cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def share_cores(first: Cores, second: Cores, num_cores: int) -> bool:
    """Whether two processes of one machine, which may use ``num_cores`` of its cores, have more threads than
    that."""
    if not first.host or first.host != second.host or not first.num_threads or not second.num_threads:
        return False
    return first.num_threads + second.num_threads > num_cores


def _host() -> str:
    """Containers of one machine have names of their own, machines that are named alike boots of their own;
    processes that are pinned to other cores are as good as on another machine."""
    try:
        boot_id = _BOOT_ID.read_text().strip()
    except OSError:
        boot_id = ""
    return f"{socket.gethostname()}/{boot_id}/{sum(1 << core for core in _usable_cores()):x}"
