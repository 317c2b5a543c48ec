"""``paceline models``: the catalogue of weights and the cache."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from paceline.actors import weights
from paceline.cluster.cli_output import pull_progress, show_bytes, stderr, stdout

app = typer.Typer(
    no_args_is_help=True,
    help="List and pull the weights that Paceline knows by name.",
    epilog="Example: paceline models list",
)

_STATE_STYLES = {"cached": "green", "missing": "dim", "damaged": "red"}


@app.command("list", epilog="Example: paceline models list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the catalogue, and what of it is in the cache."""
    entries = weights.list_models()
    if as_json:
        listed = [
            {
                "name": entry.model.name,
                "state": entry.state.value,
                "size_bytes": entry.size_bytes,
                "draft": entry.model.draft,
                "license": entry.model.license,
                "folder": str(entry.folder),
            }
            for entry in entries
        ]
        sys.stdout.write(json.dumps(listed) + "\n")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("size", no_wrap=True, justify="right")
    table.add_column("description")
    for entry in entries:
        state = entry.state.value
        table.add_row(
            entry.model.name,
            f"[{_STATE_STYLES[state]}]{state}[/]",
            show_bytes(entry.size_bytes),
            Text.assemble(entry.model.description, (f"\n{entry.model.license}", "dim")),
        )
    stdout().print(table)


@app.command(epilog="Example: paceline models pull smollm2-135m-instruct")
def pull(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of 'paceline models list'.")],
    keep_download: Annotated[
        bool, typer.Option("--keep-download", help="Keep the fetched GGUF file after the conversion.")
    ] = False,
) -> None:
    """Fetch models into the cache, or verify and mend those that are there."""
    console = stderr()
    for name in names:
        with pull_progress(console) as progress:
            folder = weights.pull(name, progress, keep_download=keep_download)
        stdout().print(f"{name}: {folder}", soft_wrap=True)
