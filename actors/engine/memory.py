"""How much memory a device has left, and how its want shows."""

from __future__ import annotations

from pathlib import Path

import torch

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that may still be taken on ``device``: of a GPU by anybody, of main memory by this container.

    None = this system does not say.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    known = [
        number for number in (_available(), *(_left(*files) for files in _CGROUPS)) if number is not None
    ]
    return min(known, default=None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an operation failed because its result did not fit, of a GPU or of main memory."""
    text = str(error)
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError) or "alloc" in text or "out of memory" in text
    )


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def _left(limit_file: str, usage_file: str) -> int | None:
    """What a limit of the container leaves; None = there is no limit."""
    try:
        limit, usage = Path(limit_file).read_text().strip(), Path(usage_file).read_text().strip()
        return max(int(limit) - int(usage), 0)
    except (OSError, ValueError):
        return None
