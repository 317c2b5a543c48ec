"""What every benchmark prints and writes: a table, a JSON file, and the machine it ran on."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Processor, cores, memory, load and the versions that matter."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 2**30, 1),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "ray", "grpcio", "paceline")},
    }


def load_average() -> float:
    """Of the machine, over the last minute."""
    return os.getloadavg()[0]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third; of few values (below 4) the extremes instead of quartiles."""
    middle = statistics.median(values)
    if len(values) < 4:
        return min(values), middle, max(values)
    low, _, high = statistics.quantiles(values, n=4)
    return low, middle, high


def spread(values: Sequence[float]) -> str:
    """Median and quartiles, ``m [q1, q3]``."""
    if not values:
        return "-"
    low, middle, high = quartiles(values)
    return f"{middle:.3g} [{low:.3g}, {high:.3g}]"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = Table(title=escape(title), title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(escape(column), justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    Console(width=None if os.isatty(1) else 140).print(table)


def write_json(name: str, result: Mapping[str, Any]) -> Path:
    """Write ``results/<name>.json`` with the machine's description beside the result."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **result}, indent=2) + "\n", encoding="utf-8")
    return path
