"""Tables, JSON and plot of ``benchmarks.throughput``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.loads import Answered, FixedConcurrency, Load, Outcome, Reply
from benchmarks.report import RESULTS, print_table, quartiles, spread, write_json


@dataclass(frozen=True)
class Cell:
    """One load on one contender in one round."""

    contender: str
    load: Load
    round_number: int
    load_average: float
    """Of the machine, over the minute before."""
    outcome: Outcome


def report(cells: Sequence[Cell], name: str, settings: dict[str, Any]) -> None:
    loads = list(dict.fromkeys(_load_name(cell) for cell in cells))
    summary: dict[str, Any] = {}
    for load in loads:
        own = [cell for cell in cells if _load_name(cell) == load]
        contenders = list(dict.fromkeys(cell.contender for cell in own))
        contenders.sort(key=list(dict.fromkeys(cell.contender for cell in cells)).index)
        summary[load] = {who: _summary([cell for cell in own if cell.contender == who]) for who in contenders}
        print_table(
            f"{load}: median [quartiles] over {len({cell.round_number for cell in own})} rounds; "
            f"load average before each {spread([cell.load_average for cell in own])}",
            [
                "",
                "tokens/s",
                "TTFT ms, p50 / p90",
                "TPOT ms, p50 / p90",
                "length",
                "acceptance",
                "drafted",
            ],
            [[who, *_row(summary[load][who])] for who in contenders],
        )
        _print_categories(load, own, contenders)
    ratios = throughput_ratios(cells)
    print_table(
        "tokens/s against others, round by round: median [quartiles]",
        ["", *loads],
        [[what, *(spread(values.get(load, [])) for load in loads)] for what, values in ratios.items()],
    )
    print(
        "length: mean acceptance length, 1 + accepted / rounds. acceptance: accepted / drafted.\n"
        "drafted: share of the answers' tokens that were draft tokens. –: nobody tells."
    )
    path = write_json(
        name,
        {
            "settings": settings,
            "summary": summary,
            "ratios": ratios,
            "cells": [asdict(cell) | {"tokens_per_second": cell.outcome.tokens_per_second} for cell in cells],
        },
    )
    plot(cells, RESULTS / f"{name}.png")
    print(f"written: {path.name}, {name}.png")


def _load_name(cell: Cell) -> str:
    return cell.load.name


def _replies(cells: Iterable[Cell]) -> list[Answered]:
    return [answered for cell in cells for answered in cell.outcome.answered]


def _summary(cells: Sequence[Cell]) -> dict[str, Any]:
    """Of one contender under one load."""
    replies = [answered.reply for answered in _replies(cells)]
    return {
        "tokens_per_second": [cell.outcome.tokens_per_second for cell in cells],
        "num_requests": len(replies),
        "num_tokens": sum(reply.num_tokens for reply in replies),
        "ttft": percentiles([reply.first_token for reply in replies]),
        "tpot": percentiles(_times_per_token(replies)),
        **acceptance(replies),
    }


def _row(summary: dict[str, Any]) -> list[str]:
    def ms(times: dict[str, float] | None) -> str:
        return "–" if times is None else f"{1e3 * times['p50']:.0f} / {1e3 * times['p90']:.0f}"

    def number(value: float | None, digits: int = 2) -> str:
        return "–" if value is None else f"{value:.{digits}f}"

    return [
        spread(summary["tokens_per_second"]),
        ms(summary["ttft"]),
        ms(summary["tpot"]),
        number(summary["mean_acceptance_length"]),
        number(summary["acceptance"]),
        number(summary["drafted_share"]),
    ]


def _times_per_token(replies: Iterable[Reply]) -> list[float]:
    return [reply.time_per_token for reply in replies if reply.time_per_token is not None]


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median and 90th percentile (nearest rank: values that occurred); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return {f"p{percent}": ordered[-(-len(ordered) * percent // 100) - 1] for percent in (50, 90)}


def acceptance(replies: Sequence[Reply]) -> dict[str, float | None]:
    """Mean acceptance length, acceptance, and share of the tokens that were drafted; None = not known."""
    rounds, drafted, accepted, tokens = (
        sum(getattr(reply, field) for reply in replies)
        for field in ("rounds", "draft_tokens", "accepted_tokens", "num_tokens")
    )
    return {
        "mean_acceptance_length": 1.0 + accepted / rounds if rounds else None,
        "acceptance": accepted / drafted if drafted else None,
        "drafted_share": accepted / tokens if rounds and tokens else None,
    }


def _print_categories(load: str, cells: Sequence[Cell], contenders: Sequence[str]) -> None:
    by_category: dict[str, dict[str, list[Reply]]] = {}
    for cell in cells:
        for answered in cell.outcome.answered:
            replies = by_category.setdefault(answered.category, {})
            replies.setdefault(cell.contender, []).append(answered.reply)

    def shown(replies: list[Reply]) -> str:
        times = percentiles(_times_per_token(replies))
        length = acceptance(replies)["mean_acceptance_length"]
        pace = "–" if times is None else f"{1 / times['p50']:.1f}"
        return pace if length is None else f"{pace} ({length:.2f})"

    print_table(
        f"{load}, per category: tokens/s of one stream, median (mean acceptance length)",
        ["", *contenders],
        [
            [category, *(shown(replies.get(who, [])) for who in contenders)]
            for category, replies in sorted(by_category.items())
        ],
    )


def throughput_ratios(cells: Sequence[Cell]) -> dict[str, dict[str, list[float]]]:
    """What -> load -> one ratio of tokens/s per round."""
    speeds: dict[tuple[str, int], dict[str, float]] = {}
    for cell in cells:
        speeds.setdefault((cell.load.name, cell.round_number), {})[cell.contender] = (
            cell.outcome.tokens_per_second
        )

    def better(speed: dict[str, float]) -> float | None:
        rivals = [speed[who] for who in ("off", "fixed") if who in speed]
        return max(rivals, default=None)

    rivals: dict[str, Callable[[dict[str, float]], float | None]] = {
        "adaptive / off": lambda speed: speed.get("off"),
        "adaptive / fixed": lambda speed: speed.get("fixed"),
        "adaptive / better of off and fixed": better,
        "adaptive / continuous": lambda speed: speed.get("continuous"),
        "adaptive / openai": lambda speed: speed.get("openai"),
    }
    found: dict[str, dict[str, list[float]]] = {}
    for what, rival_of in rivals.items():
        for (load, _), speed in speeds.items():
            rival = rival_of(speed)
            if rival and "adaptive" in speed:
                found.setdefault(what, {}).setdefault(load, []).append(speed["adaptive"] / rival)
    return found


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Tokens/s and TPOT over the concurrency; over the rate of arrivals where there are any."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    fixed = [cell for cell in cells if isinstance(cell.load, FixedConcurrency)]
    rows = [part for part in (fixed, [cell for cell in cells if cell not in fixed]) if part]
    figure, panels = pyplot.subplots(len(rows), 2, figsize=(11, 4.2 * len(rows)), squeeze=False)
    for (left, right), part in zip(panels, rows, strict=True):
        _draw(
            left, part, lambda own: [cell.outcome.tokens_per_second for cell in own], "tokens/s, all streams"
        )
        _draw(
            right,
            part,
            lambda own: [1e3 * value for value in _times_per_token(item.reply for item in _replies(own))],
            "TPOT, ms: median, quartiles",
        )
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw(
    panel: Any, cells: Sequence[Cell], values_of: Callable[[list[Cell]], list[float]], label: str
) -> None:
    def size(cell: Cell) -> float:
        return cell.load.concurrency if isinstance(cell.load, FixedConcurrency) else cell.load.rate

    top = 0.0
    for who in dict.fromkeys(cell.contender for cell in cells):
        points: list[tuple[float, float, float, float]] = []
        for at in sorted({size(cell) for cell in cells if cell.contender == who}):
            values = values_of([cell for cell in cells if cell.contender == who and size(cell) == at])
            if values:
                low, middle, high = quartiles(values)
                points.append((at, middle, middle - low, high - middle))
                top = max(top, high)
        if points:
            sizes, middles, below, above = zip(*points, strict=True)
            panel.errorbar(sizes, middles, yerr=(below, above), marker="o", capsize=3, label=who)
    is_fixed = isinstance(cells[0].load, FixedConcurrency)
    panel.set_xlabel("requests at a time" if is_fixed else "requests per second")
    if is_fixed:
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
    panel.set_ylabel(label)
    panel.set_ylim(0.0, 1.1 * top)
