"""Emulated accelerators: tokens/s over the numbers of targets and drafts.

    python -m benchmarks.scaling --targets 1,2,4 --drafts 0,1,2

Every cell is a service of its own: Ray, gateway, targets and drafts are real processes, joined as they always
are; only the models sleep instead of computing (a target's step: 20 ms and 0.05 ms for each token past 64; a
draft's: 2 ms; acceptance 0.8), so that more replicas do not contend for this machine's cores. Each target
gets the same load, so that perfect scaling doubles tokens/s with the targets; the gateway is one process.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ray starts workers at a low priority; here all processes compete on equal terms, whatever else runs.
os.environ.setdefault("RAY_worker_niceness", "0")

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import grpc.aio
import typer
from rich.progress import Progress

from benchmarks.processes import processor_time
from benchmarks.report import RESULTS, load_average, print_table, quartiles, write_json
from benchmarks.services import running_services
from paceline.cluster.runtime import free_port
from paceline.protos import generation_pb2 as proto
from paceline.protos import generation_pb2_grpc as rpc

VOCAB_SIZE = 1024
MAX_MODEL_LEN = 1 << 16
PROMPT_LENGTH = 32
WARM_UP_SECONDS = 3.0
"""Drafts attach, acceptance and step costs are learnt."""
WINDOWS = 5
"""Looks at the tokens that came, each of ``--seconds`` / WINDOWS: their spread is the measurement's."""


@dataclass(frozen=True)
class Cell:
    """One service."""

    num_targets: int
    num_drafts: int
    num_sequences: int
    tokens_per_second: tuple[float, ...]
    """Per window, over all sequences."""
    accepted_share: float
    """Of all tokens, those that were a draft's."""
    shares: dict[str, float]
    """Role -> cores kept busy."""
    load_average: float

    @property
    def median(self) -> float:
        return quartiles(self.tokens_per_second)[1]

    @property
    def tokens_per_step(self) -> float:
        """Of one sequence: each of its steps commits one token that is the target's own."""
        return 1.0 / (1.0 - self.accepted_share)


def config_of(
    num_targets: int,
    num_drafts: int,
    *,
    step_ms: float,
    per_token_ms: float,
    draft_step_ms: float,
    acceptance: float,
) -> dict[str, Any]:
    keys = f"vocab_size={VOCAB_SIZE}&max_model_len={MAX_MODEL_LEN}"
    config: dict[str, Any] = {
        "model": f"emulated://target?base_ms={step_ms}&per_token_ms={per_token_ms}&{keys}",
        "target": {
            "num_threads": 1,
            "num_replicas": num_targets,
            "max_num_seqs": 256,
            "kv_cache": {"num_blocks": 1 << 15},
        },
        "speculation": {"ngram": {"enabled": False}, "hardware": "separate"},
        "gateway": {"grpc_port": free_port()},
    }
    if num_drafts:
        source = f"emulated://draft?base_ms={draft_step_ms}&acceptance={acceptance}&{keys}"
        config["draft"] = {
            "model": source,
            "num_threads": 1,
            "num_replicas": num_drafts,
            "max_num_seqs": 256,
            "kv_cache": {"num_blocks": 1 << 15},
        }
    return config


def request(seed: int) -> proto.GenerateRequest:
    """One that does not end within the measurement."""
    made = proto.GenerateRequest()
    made.token_ids.ids.extend(random.Random(seed).choices(range(VOCAB_SIZE), k=PROMPT_LENGTH))
    made.sampling.temperature = 1.0
    made.sampling.seed = seed
    made.stopping.max_tokens = MAX_MODEL_LEN - PROMPT_LENGTH
    made.stopping.ignore_eos = True
    return made


async def measure(
    address: str, num_targets: int, num_drafts: int, num_sequences: int, seconds: float
) -> Cell:
    """Open all streams, wait until they are warm, count. Raises: what ends a stream."""
    counts = [0] * num_sequences
    accepted = [0] * num_sequences
    waiting = set(range(num_sequences))
    all_run = asyncio.Event()

    async def read(stub: Any, index: int) -> None:
        async for chunk in stub.GenerateStream(request(index + 1)):
            counts[index] += len(chunk.token_ids)
            accepted[index] += sum(chunk.accepted)
            waiting.discard(index)
            if not waiting:
                all_run.set()

    windows: list[float] = []
    async with grpc.aio.insecure_channel(address) as channel, asyncio.TaskGroup() as group:
        stub = rpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        tasks = [group.create_task(read(stub, index)) for index in range(num_sequences)]
        await all_run.wait()
        await asyncio.sleep(WARM_UP_SECONDS)
        load, before = load_average(), processor_time()
        tokens_before, accepted_before = sum(counts), sum(accepted)
        for _ in range(WINDOWS):
            began, tokens = time.perf_counter(), sum(counts)
            await asyncio.sleep(seconds / WINDOWS)
            windows.append((sum(counts) - tokens) / (time.perf_counter() - began))
        shares = processor_time().shares_since(before)
        tokens, kept = sum(counts) - tokens_before, sum(accepted) - accepted_before
        for task in tasks:
            task.cancel()
    return Cell(num_targets, num_drafts, num_sequences, tuple(windows), kept / tokens, shares, load)


def report(cells: Sequence[Cell], name: str, settings: dict[str, Any]) -> None:
    drafts = sorted({cell.num_drafts for cell in cells})
    targets = sorted({cell.num_targets for cell in cells})
    by_size = {(cell.num_targets, cell.num_drafts): cell for cell in cells}

    def shown(cell: Cell) -> str:
        low, middle, high = quartiles(cell.tokens_per_second)
        gain = middle / by_size[targets[0], cell.num_drafts].median
        return f"{middle:.0f} [{low:.0f}, {high:.0f}] ×{gain:.2f}"

    print_table(
        f"tokens/s, {settings['sequences_per_target']} sequences per target: median [quartiles of "
        f"{WINDOWS} windows], × against {targets[0]} target(s)",
        ["targets", *(f"{count} drafts" for count in drafts)],
        [[size, *(shown(by_size[size, count]) for count in drafts)] for size in targets],
    )
    print_table(
        "per sequence",
        ["targets", *(f"{count} drafts: tokens/s, tokens per step" for count in drafts)],
        [
            [
                size,
                *(
                    f"{by_size[size, count].median / by_size[size, count].num_sequences:.1f}, "
                    f"{by_size[size, count].tokens_per_step:.2f}"
                    for count in drafts
                ),
            ]
            for size in targets
        ],
    )
    roles = ("target", "draft", "gateway", "proxy", "client", "ray")
    print_table(
        f"cores kept busy, of {os.cpu_count()}",
        ["targets × drafts", *roles, "load average before"],
        [
            [
                f"{cell.num_targets} × {cell.num_drafts}",
                *(f"{cell.shares.get(role, 0.0):.2f}" for role in roles),
                f"{cell.load_average:.1f}",
            ]
            for cell in cells
        ],
    )
    path = write_json(name, {"settings": settings, "cells": [asdict(cell) for cell in cells]})
    plot(cells, RESULTS / f"{name}.png")
    print(f"written: {path.name}, {name}.png")


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Tokens/s over the targets, a line per number of drafts, and what perfect scaling would be."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(6, 4.2))
    for number, count in enumerate(sorted({cell.num_drafts for cell in cells})):
        own = sorted((cell for cell in cells if cell.num_drafts == count), key=lambda cell: cell.num_targets)
        sizes = [cell.num_targets for cell in own]
        low, middle, high = zip(*(quartiles(cell.tokens_per_second) for cell in own), strict=True)
        errors = [
            [at - bound for at, bound in zip(middle, low, strict=True)],
            [bound - at for at, bound in zip(middle, high, strict=True)],
        ]
        panel.errorbar(
            sizes, middle, yerr=errors, marker="o", capsize=3, color=f"C{number}", label=f"{count} drafts"
        )
        panel.plot(
            sizes,
            [middle[0] * size / sizes[0] for size in sizes],
            color=f"C{number}",
            linestyle=":",
            alpha=0.6,
        )
    panel.set_xlabel("targets")
    panel.set_xticks(sorted({cell.num_targets for cell in cells}))
    panel.set_ylabel("tokens/s (dotted: perfect scaling)")
    panel.set_ylim(bottom=0.0)
    panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def counts(text: str, option: str, least: int) -> list[int]:
    """Raises: typer.BadParameter for anything but whole numbers ≥ ``least``, separated by commas."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and int(part) >= least for part in parts):
        raise typer.BadParameter(
            f"must be whole numbers from {least} on, separated by commas; got {text!r}", param_hint=option
        )
    return sorted({int(part) for part in parts})


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    epilog="Examples:\n\npython -m benchmarks.scaling\n\n"
    "python -m benchmarks.scaling --targets 1,2 --drafts 0,1 --seconds 5\n\n"
    "A cell takes about 20 s, most of them to start and stop its service."
)
def main(
    targets: Annotated[str, typer.Option(help="Numbers of targets, comma-separated.")] = "1,2,4",
    drafts: Annotated[str, typer.Option(help="Numbers of drafts; 0 = plain decoding.")] = "0,1,2",
    sequences: Annotated[int, typer.Option(min=1, help="Streams per target.")] = 8,
    seconds: Annotated[float, typer.Option(min=1.0, help="Measured time of a cell.")] = 5.0,
    step_ms: Annotated[float, typer.Option(help="A target's step.")] = 20.0,
    per_token_ms: Annotated[float, typer.Option(help="On top, for each token past 64.")] = 0.05,
    draft_step_ms: Annotated[float, typer.Option(help="A draft's step.")] = 2.0,
    acceptance: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of the emulated draft.")] = 0.8,
    name: Annotated[str, typer.Option(help="Name of the JSON file and the plot.")] = "scaling",
) -> None:
    """Tokens/s over the numbers of emulated targets and drafts."""
    sizes = [
        (size, count) for size in counts(targets, "--targets", 1) for count in counts(drafts, "--drafts", 0)
    ]
    cells: list[Cell] = []
    with Progress() as progress:
        bar = progress.add_task("targets × drafts", total=len(sizes))
        for size, count in sizes:
            config = config_of(
                size,
                count,
                step_ms=step_ms,
                per_token_ms=per_token_ms,
                draft_step_ms=draft_step_ms,
                acceptance=acceptance,
            )
            with running_services({"scaling": config}) as addresses:
                cells.append(
                    asyncio.run(measure(addresses["scaling"], size, count, size * sequences, seconds))
                )
            progress.advance(bar)
    settings = {
        "sequences_per_target": sequences,
        "step_ms": step_ms,
        "per_token_ms": per_token_ms,
        "draft_step_ms": draft_step_ms,
        "acceptance": acceptance,
    }
    report(cells, name, settings)


if __name__ == "__main__":
    app()
