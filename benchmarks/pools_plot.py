"""Draws how two pools followed two kinds of load, from the record of ``tests/integration/test_pools.py`` or,
with their nodes, of ``tests/integration/test_autoscaler.py``.

PACELINE_RECORD=record.json python -m pytest -m heavy tests/integration/test_pools.py
python -m benchmarks.pools_plot record.json docs/plots/pools.png
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SMOOTHED_ROWS = 4
"""Rows, half a second each, that a speed is measured over."""


def speeds(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Tokens per second, one for each row."""
    found = []
    for index, row in enumerate(rows):
        earlier = rows[max(index - SMOOTHED_ROWS, 0)]
        seconds = row["seconds"] - earlier["seconds"]
        found.append((row["tokens"] - earlier["tokens"]) / seconds if seconds else 0.0)
    return found


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    seconds = [row["seconds"] for row in rows]
    figure, (load, replicas, speed) = pyplot.subplots(3, 1, figsize=(8.5, 5), sharex=True)
    load.step(seconds, [row["clients"] for row in rows], where="post", color="tab:grey")
    load.set_ylabel("clients")
    for pool, colour in (("target", "tab:blue"), ("draft", "tab:orange")):
        replicas.step(seconds, [row[pool] for row in rows], where="post", color=colour, label=f"{pool}s")
        if "nodes" in rows[0]:
            nodes = [row["nodes"][pool] for row in rows]
            replicas.step(
                seconds, nodes, where="post", color=colour, linestyle=":", label=f"nodes of {pool}s"
            )
    replicas.set_ylabel("replicas")
    replicas.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small")
    speed.plot(seconds, speeds(rows), color="tab:green")
    speed.set_ylabel("tokens/s")
    speed.set_xlabel("seconds")
    for panel in (load, replicas, speed):
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each change of the replicas, the nodes or the load."""
    changes = [rows[0], *(row for before, row in itertools.pairwise(rows) if state(row) != state(before))]
    return "\n".join(f"{row['seconds']:.0f} s: {state(row)}" for row in changes)


def state(row: dict[str, Any]) -> str:
    told = f"{row['target']} targets, {row['draft']} drafts, {row['clients']} clients"
    if "nodes" in row:
        told += f"; nodes: {row['nodes']['target']} for targets, {row['nodes']['draft']} for drafts"
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("plot", type=Path)
    options = parser.parse_args()
    rows = json.loads(options.record.read_text())
    draw(rows, options.plot)
    print(summary(rows))


if __name__ == "__main__":
    main()
