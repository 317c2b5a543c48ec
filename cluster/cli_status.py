"""``paceline status``: pools, replicas, KV use, live sequences and acceptance of a running service."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.cluster.cli_output import show_share, stdout
from paceline.cluster.runtime import (
    Runtime,
    RuntimeStartError,
    application_progress,
    import_serve,
    running_cluster,
)
from paceline.cluster.service_start import APPLICATION_NAME

ANSWER_TIMEOUT_SECONDS = 3.0

EPILOG = """\
Examples:

paceline status

paceline status --watch

paceline status --json --address 10.0.0.5:6379
"""

Row = Mapping[str, Any]


def collect_status(name: str = APPLICATION_NAME) -> dict[str, Any]:
    """Everything that ``paceline status`` shows, as plain values.

    Raises:
        RuntimeStartError: the joined Ray runs no such application.
    """
    serve = import_serve()
    from paceline.cluster.directory import STATUS_METHOD, ask_replicas, lent

    status, message, pools = application_progress(name)
    if not pools:
        raise RuntimeStartError(
            f"no application named {name!r} runs on this Ray cluster; start one with 'paceline serve', or "
            "name another cluster with --address ('paceline serve' prints it)"
        )
    collected: dict[str, Any] = {"status": status, "message": message, "pools": {}}
    for pool in pools:
        with lent(serve.get_deployment_handle(pool.name, name)) as handle:
            answers = ask_replicas(handle, STATUS_METHOD, timeout_seconds=ANSWER_TIMEOUT_SECONDS)
        collected["pools"][pool.name] = {
            **asdict(pool),
            "other": dict(pool.other),
            "num_silent": answers.num_silent,
            "replicas": sorted(answers.values, key=lambda replica: str(replica.get("id", ""))),
        }
    return collected


def status_view(collected: Mapping[str, Any]) -> Group:
    """The same for a human."""
    pools = collected["pools"]
    style = "green" if collected["status"] == "RUNNING" else "yellow"
    where = f" on the Ray at {collected['ray_address']}" if "ray_address" in collected else ""
    parts: list[Any] = [Text.assemble("service ", (str(collected["status"]).lower(), style), where), Text("")]
    parts.append(pools_table(pools))
    if targets := pools.get("target", {}).get("replicas"):
        parts += [Text(""), targets_table(targets), Text(""), speculation_table(targets)]
    if drafts := pools.get("draft", {}).get("replicas"):
        parts += [Text(""), drafts_table(drafts)]
    return Group(*parts)


def pools_table(pools: Mapping[str, Row]) -> Table:
    table = _table("pool", "running", "other", "silent", "")
    for name, pool in pools.items():
        other = ", ".join(f"{count} {state.lower()}" for state, count in pool["other"].items() if count)
        table.add_row(
            name, str(pool["running"]), other or "–", str(pool["num_silent"]), pool["message"][:120]
        )
    return table


def targets_table(replicas: Sequence[Row]) -> Table:
    table = _table("target", "pid", "live", "queued", "KV", "cached", "drafts", "tokens", "step")
    for row in replicas:
        engine = row.get("engine")
        if engine is None:
            table.add_row(row["id"], str(row["pid"]), Text(row["error"], style="red"))
            continue
        used = engine["total_blocks"] - engine["free_blocks"]
        table.add_row(
            row["id"],
            str(row["pid"]),
            str(engine["num_running"]),
            str(engine["num_waiting"]),
            show_share(used, engine["total_blocks"]),
            show_share(engine["num_prefix_cache_hits_total"], engine["num_prefix_cache_queries_total"]),
            str(len(row["drafts"])),
            str(engine["num_committed_tokens_total"]),
            f"{engine['step_seconds'] * 1000:.1f} ms",
        )
    return table


def speculation_table(replicas: Sequence[Row]) -> Table:
    """What became of the tokens that drafts proposed, and of those that the targets looked up themselves."""
    table = _table("verified", "of drafts", "acc.", "looked up", "acc.", "rounds", "length", "gain")
    for row in replicas:
        engine = row.get("engine")
        if engine is None:
            continue
        lookup = engine["num_lookup_tokens_total"]
        accepted_lookup = engine["num_accepted_lookup_tokens_total"]
        drafted = engine["num_draft_tokens_total"] - lookup
        rounds = engine["num_rounds_total"]
        table.add_row(
            row["id"],
            str(drafted),
            show_share(engine["num_accepted_tokens_total"] - accepted_lookup, drafted),
            str(lookup),
            show_share(accepted_lookup, lookup),
            str(rounds),
            f"{1 + engine['num_accepted_tokens_total'] / rounds:.2f}" if rounds else "–",
            show_gain(engine),
        )
    return table


def show_gain(engine: Row) -> str:
    """What drafting brings at the present load, as the target has measured it."""
    gain = f"{engine['drafting_gain']:.2f}" if engine["drafting_gain"] else "–"
    return f"{gain}, at rest" if engine["drafts_rest"] else gain


def drafts_table(replicas: Sequence[Row]) -> Table:
    table = _table("draft", "pid", "targets", "live", "KV", "drafted", "discarded", "prepared", "step")
    for row in replicas:
        engine = row.get("engine")
        if engine is None:
            table.add_row(row["id"], str(row["pid"]), Text(row["error"], style="red"))
            continue
        used = engine["num_blocks"] - engine["num_free_blocks"]
        table.add_row(
            row["id"],
            str(row["pid"]),
            str(engine["num_targets"]),
            str(engine["num_sequences"]),
            show_share(used, engine["num_blocks"]),
            str(engine["num_drafted_tokens_total"]),
            str(engine["num_discarded_tokens_total"]),
            show_share(engine["num_prepared_corrections_total"], engine["num_corrections_total"]),
            f"{engine['step_seconds'] * 1000:.1f} ms",
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def status(
    address: Annotated[
        str | None, typer.Option(help="The Ray cluster; default: RAY_ADDRESS, else the one on this machine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between looks, with --watch.")] = 2.0,
) -> None:
    """Show what a running service does.

    live: sequences in hand; cached: share of prompt tokens that the prefix cache had; acc.: accepted of those
    verified; length: mean acceptance length; gain: tokens with drafts over those without, at this load (where
    it is too low drafts rest); prepared: share of corrections that a draft had a tail ready for.
    """
    with Runtime.open(
        address=address or os.environ.get("RAY_ADDRESS") or running_cluster() or "auto", num_cpus=0
    ) as runtime:

        def look() -> dict[str, Any]:
            return {"ray_address": runtime.ray_address, **collect_status()}

        if as_json:
            while True:
                sys.stdout.write(json.dumps(look()) + "\n")
                sys.stdout.flush()
                if not watch:
                    return
                time.sleep(interval)
        console = stdout()
        if not watch:
            console.print(status_view(look()))
            return
        with Live(status_view(look()), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(status_view(look()), refresh=True)
