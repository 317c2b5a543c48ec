"""``paceline serve``: the pools in the foreground, until Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from paceline.cluster.cli_output import pull_progress, stderr, stdout
from paceline.cluster.client import DEFAULT_ADDRESS
from paceline.cluster.config import PacelineConfig, load_config
from paceline.cluster.runtime import PoolProgress
from paceline.cluster.service_start import RunningService, check_models, serving

EPILOG = """\
Examples:

paceline serve paceline.yaml

paceline serve --model qwen2.5-coder-1.5b-instruct --draft qwen2.5-coder-0.5b-instruct

paceline serve --model ./my-model --port 9100 --num-drafts 2

paceline serve paceline.yaml --address auto

paceline serve paceline.yaml --address local

A Ray cluster that --address, the configuration or RAY_ADDRESS names, or that 'ray start' started on this
machine, is joined, and only the application is removed from it again. Where there is none, or with
--address local, an own one is started and later stopped.
"""


class StartProgress:
    """What is being waited for: a live display on a terminal, one line for each change elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._stage = ""
        self._pools: list[PoolProgress] = []
        self._shown: set[str] = set()
        self._live: Live | None = None

    def __enter__(self) -> StartProgress:
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._render, console=self._console, transient=True, refresh_per_second=8
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def stage(self, stage: str) -> None:
        self._stage = stage
        if self._live is None:
            self._print_line(stage)

    def pools(self, pools: list[PoolProgress]) -> None:
        self._pools = pools
        if self._live is None:
            for pool in pools:
                self._print_line(describe_pool(pool))

    def _print_line(self, line: str) -> None:
        if line not in self._shown:
            self._shown.add(line)
            self._console.print(f"[{time.monotonic() - self._started:5.1f} s] {line}", markup=False)

    def _render(self) -> Group:
        elapsed = time.monotonic() - self._started
        head = Spinner("dots", Text(f" {self._stage} ({elapsed:.0f} s)"))
        lines = [
            Text(f"   {describe_pool(pool)}", style="green" if not any(pool.other.values()) else "")
            for pool in self._pools
        ]
        return Group(head, *lines)


def describe_pool(pool: PoolProgress) -> str:
    """``target: 1 running, 1 starting``."""
    states = [f"{pool.running} running"] if pool.running else []
    states += [f"{count} {state.lower().replace('_', ' ')}" for state, count in pool.other.items() if count]
    return f"{pool.name}: {', '.join(states) or 'waiting'}"


def merged_config(config_path: Path | None, overrides: dict[str, Any]) -> PacelineConfig:
    """The file's content with the command line's options over it, checked as one.

    Args:
        overrides: dotted path → value; None = not given.

    Raises:
        ConfigError: the file or the combination is wrong.
    """
    given = {path: value for path, value in overrides.items() if value is not None}
    if not given and config_path is not None:
        return load_config(config_path)
    content: dict[str, Any] = {}
    if config_path is not None:
        load_config(config_path)
        content = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    if isinstance(content.get("draft"), str):
        content["draft"] = {"model": content["draft"]}
    for path, value in given.items():
        section = content
        *parents, key = path.split(".")
        for parent in parents:
            section[parent] = dict(section.get(parent) or {})
            section = section[parent]
        section[key] = value
    return load_config(content)


@contextlib.contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Set by SIGINT or SIGTERM within the block; a second signal raises KeyboardInterrupt as usual.

    Before the service is up, the first one raises too: the caller clears ``handled`` by entering late.
    """
    stopping = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def show_endpoints(console: Console, service: RunningService) -> None:
    """What to call, how to look in, how to stop."""
    info = service.info
    drafts = f"drafts by {info.draft_model}" if info.draft_model else "no draft pool"
    flag = "" if service.grpc_address == DEFAULT_ADDRESS else f" --address {service.grpc_address}"
    lines = (
        f"[bold green]ready[/]  {info.model}, {drafts}, length {info.max_model_len} tokens",
        f"  gRPC    {service.grpc_address}  (paceline.v1.GenerationService, reflection on)",
        f"  Ray     {service.ray_address}  ({'started here' if service.started_ray else 'joined'})",
        f'  try     paceline generate "Hello" --max-tokens 32{flag}',
        f"          paceline status --address {service.ray_address}",
        "  stop    Ctrl-C",
    )
    for line in lines:
        console.print(line, soft_wrap=True)


def serve(
    config_path: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="YAML file; see docs/configuration.md.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Served model: catalogue name, folder, GGUF file or hub id.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model, with the same tokenizer.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the gRPC endpoint (default 9000).")] = None,
    num_targets: Annotated[int | None, typer.Option(help="Target replicas (default 1).")] = None,
    num_drafts: Annotated[int | None, typer.Option(help="Draft replicas (default 1).")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, float32, bfloat16 or float16 (default auto).")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster to join; 'local' = start one (default: join one if it runs)."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the logs of all actors.")] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Give up if it is not ready after so many seconds.")
    ] = None,
) -> None:
    """Start the pools and serve until Ctrl-C."""
    if config_path is None and model is None:
        raise typer.BadParameter("give a configuration file or --model")
    overrides = {
        "model": model,
        "draft.model": draft,
        "gateway.grpc_port": port,
        "target.num_replicas": num_targets,
        "draft.num_replicas": num_drafts,
        "dtype": dtype,
    }
    config = merged_config(config_path, overrides)
    notices = stderr()
    with pull_progress(notices) as progress:
        check_models(config, progress)
    with contextlib.ExitStack() as stack:
        with StartProgress(notices) as started:
            service = stack.enter_context(
                serving(
                    config,
                    address=address,
                    verbose=verbose,
                    timeout_seconds=timeout,
                    on_stage=started.stage,
                    on_progress=started.pools,
                )
            )
        with interrupts() as stopping:
            show_endpoints(stdout(), service)
            stopping.wait()
            notices.print("draining; Ctrl-C again to stop at once")
            stack.close()
    notices.print("stopped")
