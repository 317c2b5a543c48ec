"""How the command line speaks: consoles, error texts, progress of pulls, numbers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import grpc
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from paceline.actors.weight_progress import ProgressCallback, PullProgress, PullStage

_STAGES = {
    PullStage.WAIT: "another process pulls",
    PullStage.VERIFY: "verifying",
    PullStage.DOWNLOAD: "downloading",
    PullStage.CONVERT: "converting",
    PullStage.SEAL: "sealing",
}
_BYTE_STAGES = frozenset({PullStage.VERIFY, PullStage.DOWNLOAD, PullStage.SEAL})


def stdout() -> Console:
    """The console of results. Made anew each time: tests and pipes replace ``sys.stdout``."""
    return Console(file=sys.stdout, highlight=False)


def stderr() -> Console:
    """The console of notices, progress and errors, so that stdout can be piped.

    It holds on to the present stream: a live display goes on while Ray's output is kept away.
    """
    return Console(file=sys.stderr, highlight=False)


def show_error(message: str) -> None:
    """One red word and the sentence; no markup of the sentence's own is interpreted."""
    console = stderr()
    console.print("[bold red]error:[/] ", end="")
    console.print(message, markup=False, soft_wrap=True)


def describe_rpc_error(error: grpc.RpcError, address: str) -> str:
    """A failed call in a sentence: the status code, the service's details, and a remedy where known."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and _unreachable(details):
        return (
            f"no service at {address}; start one with 'paceline serve', or name it with --address host:port"
        )
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return f"{details}; the environment variable PACELINE_TOKEN holds the token to call with"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"{address} is a gRPC server, but not a Paceline service ({details})"
    return f"{code.name}: {details}" if details else str(code.name)


def _unreachable(details: str) -> bool:
    told = details.lower()
    return "failed to connect" in told or "connection refused" in told or "dns resolution" in told


@contextlib.contextmanager
def pull_progress(console: Console) -> Iterator[ProgressCallback]:
    """A callback for ``weights.pull`` that draws one bar for each model and stage.

    Off a terminal it prints one line at the beginning of each stage instead.
    """
    if not console.is_terminal:
        yield _line_progress(console)
        return
    bytes_bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    items_bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    tasks: dict[tuple[str, PullStage], TaskID] = {}
    active = bytes_bar

    def show(progress: PullProgress) -> None:
        nonlocal active
        bar = bytes_bar if progress.stage in _BYTE_STAGES else items_bar
        if bar is not active:
            active.stop()
            active = bar
        bar.start()
        key = (progress.model, progress.stage)
        if key not in tasks:
            tasks[key] = bar.add_task(f"{_STAGES[progress.stage]} {progress.model}", total=None)
        bar.update(tasks[key], completed=progress.done, total=progress.total or None)

    try:
        yield show
    finally:
        active.stop()


def _line_progress(console: Console) -> ProgressCallback:
    shown: set[tuple[str, PullStage]] = set()

    def show(progress: PullProgress) -> None:
        key = (progress.model, progress.stage)
        if key not in shown:
            shown.add(key)
            console.print(f"{_STAGES[progress.stage]} {progress.model}")

    return show


def show_bytes(count: int) -> str:
    """``count`` in decimal units, as file sizes are usually told: 491.4 MB."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def show_share(part: float, whole: float) -> str:
    """``part`` of ``whole`` in percent; a dash where there is no whole."""
    return f"{part / whole:.0%}" if whole else "–"
