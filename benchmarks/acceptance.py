"""How much of a draft each verification rule accepts, beside the most that any rule could.

    python -m benchmarks.acceptance --prompts 12 --max-tokens 96

Target and draft take turns in this process, with tails of fixed length, for every rule and temperature. At
the positions that were tested under the coupled rule both laws are computed once more, with the committed
tokens given: the chance that one draft token is accepted is at most Σ min(p, q) = 1 − TV(p, q), which is what
the standard rule reaches; shared noise reaches Σ_x 1 / Σ_y max(p_y / p_x, q_y / q_x) (Daliri, Musco, Suresh
2024). Block verification (Sun et al. 2024) accepts at least as many tokens of a tail as the standard rule.
"""

from __future__ import annotations

import os

# A thread that spins while it waits steals the time of whoever shares the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("KMP_BLOCKTIME", "0")

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.progress import Progress

from benchmarks.lockstep import Answer, Lockstep
from benchmarks.prompts import encoded, spec_bench
from benchmarks.report import RESULTS, print_table, write_json

if TYPE_CHECKING:
    from paceline.actors.engine.batch import ModelRunner

CHUNK = 32
"""Positions whose laws are computed at a time."""
NEGLIGIBLE = 1e-30


@dataclass
class Outcome:
    """One rule at one temperature."""

    rule: str
    temperature: float
    seconds: float
    answers: list[Answer]

    @property
    def rounds(self) -> int:
        return sum(answer.stats.rounds for answer in self.answers)

    @property
    def draft_tokens(self) -> int:
        return sum(answer.stats.draft_tokens for answer in self.answers)

    @property
    def accepted_tokens(self) -> int:
        return sum(answer.stats.accepted_tokens for answer in self.answers)

    @property
    def mean_acceptance_length(self) -> float:
        return 1.0 + self.accepted_tokens / self.rounds

    @property
    def rates(self) -> list[float]:
        """Entry i: accepted at depth i, given that all before it were."""
        by_depth: dict[int, list[bool]] = {}
        for answer in self.answers:
            for _, depth, agreed in answer.tested:
                by_depth.setdefault(depth, []).append(agreed)
        return [statistics.fmean(by_depth[depth]) for depth in sorted(by_depth)]


def run_rule(
    target_runner: ModelRunner,
    draft_runner: ModelRunner,
    prompts: Sequence[list[int]],
    rule: str,
    temperature: float,
    gamma: int,
    max_tokens: int,
) -> Outcome:
    """All prompts as one batch."""
    pair = Lockstep(
        target_runner,
        draft_runner,
        num_speculative_tokens=gamma,
        max_tokens=max_tokens,
        rule=rule,
        temperature=temperature,
    )
    answers = [pair.submit(prompt, 1000 + index) for index, prompt in enumerate(prompts)]
    started = time.perf_counter()
    pair.run()
    return Outcome(rule, temperature, time.perf_counter() - started, answers)


# ---------------------------------------------------------------- the ceiling


def laws(
    runner: ModelRunner, token_ids: Sequence[int], first: int, temperature: float
) -> npt.NDArray[np.float64]:
    """Laws ``[n, V]`` of the tokens at positions first … len(token_ids) − 1, the tokens before them given."""
    from paceline.actors.engine.batch import SequenceSlice
    from paceline.actors.engine.parameters import SamplingParams
    from paceline.actors.engine.sampling import process_logits

    table = list(range(-(-len(token_ids) // runner.block_size)))
    rows = []
    computed = 0
    while computed < len(token_ids) - 1:
        piece = list(token_ids[computed : min(computed + CHUNK, len(token_ids) - 1)])
        wanted = max(0, min(len(piece), computed + len(piece) - first + 1))
        logits = runner.forward([SequenceSlice(piece, computed, table, wanted)])
        if wanted:
            weights = process_logits(logits, [SamplingParams(temperature=temperature)] * wanted).numpy()
            odds = np.exp(weights)
            rows.append((odds / odds.sum(axis=1, keepdims=True)).astype(np.float64))
        computed += len(piece)
    return np.concatenate(rows)


def overlap(p: npt.NDArray[np.float64], q: npt.NDArray[np.float64]) -> float:
    """Σ min(p, q) = 1 − TV."""
    return float(np.minimum(p, q).sum())


def coupled_acceptance(p: npt.NDArray[np.float64], q: npt.NDArray[np.float64]) -> float:
    """Probability that two Gumbel-max draws with the same noise agree."""
    both = np.flatnonzero((p > NEGLIGIBLE) & (q > NEGLIGIBLE))
    if not len(both):
        return 0.0
    # Tokens in the order of p/q: those after x have the larger p-ratio, those before it the larger q-ratio.
    order = both[np.argsort(p[both] / q[both])]
    p_kept, q_kept = p[order], q[order]
    p_above = p_kept[::-1].cumsum()[::-1] + p[q <= NEGLIGIBLE].sum()
    q_below = q_kept.cumsum() - q_kept + q[p <= NEGLIGIBLE].sum()
    return float((1.0 / (p_above / p_kept + q_below / q_kept)).sum())


@dataclass(frozen=True)
class Ceiling:
    temperature: float
    num_positions: int
    one_minus_tv: float
    coupled_expected: float
    coupled_measured: float


def ceiling(target_runner: ModelRunner, draft_runner: ModelRunner, outcome: Outcome) -> Ceiling:
    overlaps, expected, agreed = [], [], []
    for answer in outcome.answers:
        if not answer.tested:
            continue
        token_ids = answer.prompt + answer.token_ids
        first = answer.tested[0][0]
        p_rows = laws(target_runner, token_ids, first, outcome.temperature)
        q_rows = laws(draft_runner, token_ids, first, outcome.temperature)
        for position, _, same in answer.tested:
            p, q = p_rows[position - first], q_rows[position - first]
            overlaps.append(overlap(p, q))
            expected.append(coupled_acceptance(p, q))
            agreed.append(same)
    return Ceiling(
        outcome.temperature,
        len(agreed),
        statistics.fmean(overlaps),
        statistics.fmean(expected),
        statistics.fmean(agreed),
    )


# ---------------------------------------------------------------- report


def plot(outcomes: Sequence[Outcome], ceilings: Sequence[Ceiling], path: Path) -> None:
    """Acceptance per depth, a panel per temperature, with the ceiling as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    temperatures = sorted({outcome.temperature for outcome in outcomes})
    figure, panels = pyplot.subplots(
        1, len(temperatures), figsize=(3.6 * len(temperatures), 3.2), sharey=True, squeeze=False
    )
    for panel, temperature in zip(panels[0], temperatures, strict=True):
        for outcome in outcomes:
            if outcome.temperature == temperature:
                depths = range(1, len(outcome.rates) + 1)
                label = f"{outcome.rule} ({outcome.mean_acceptance_length:.2f})"
                panel.plot(depths, outcome.rates, marker="o", label=label)
        for item in ceilings:
            if item.temperature == temperature:
                panel.axhline(item.one_minus_tv, color="grey", linestyle="--", label="1 − TV, all depths")
        panel.set_title(f"temperature {temperature:g}")
        panel.set_xlabel("depth in the tail")
        panel.set_ylim(0.0, 1.0)
        panel.legend(fontsize=7, title="rule (mean acceptance length)", title_fontsize=7)
    panels[0][0].set_ylabel("accepted, given all before")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main(
    model: Annotated[str, typer.Option(help="The target.")] = "qwen2.5-coder-1.5b-instruct",
    draft: Annotated[str, typer.Option(help="The draft.")] = "qwen2.5-coder-0.5b-instruct",
    prompts: Annotated[int, typer.Option(help="Spec-Bench prompts, as one batch.")] = 12,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 96,
    max_characters: Annotated[int, typer.Option(help="Leave out longer prompts.")] = 800,
    gamma: Annotated[int, typer.Option(help="Tail length.")] = 4,
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0,0.7,1",
    rules: Annotated[str, typer.Option(help="Comma-separated.")] = "coupled,standard,block",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    name: Annotated[str, typer.Option(help="Name of the JSON file and the plot.")] = "acceptance",
) -> None:
    """Run it, print the tables, write results/<name>.json and results/<name>.png."""
    from paceline.actors import model_spec
    from paceline.actors.model_spec import ModelSpec

    token_ids = encoded(model, spec_bench(prompts, max_characters=max_characters))
    longest = max(map(len, token_ids)) + max_tokens
    blocks = prompts * (-(-longest // 16) + 1)
    runners = [
        model_spec.load(ModelSpec(source, dtype=dtype, num_blocks=blocks), max_num_batched_tokens=512).runner
        for source in (model, draft)
    ]
    target_runner, draft_runner = runners
    outcomes: list[Outcome] = []
    ceilings: list[Ceiling] = []
    settings: list[tuple[float, str]] = [
        (float(temperature), rule) for temperature in temperatures.split(",") for rule in rules.split(",")
    ]
    with Progress() as progress:
        task = progress.add_task("rules × temperatures", total=len(settings))
        for temperature, rule in settings:
            outcome = run_rule(target_runner, draft_runner, token_ids, rule, temperature, gamma, max_tokens)
            outcomes.append(outcome)
            if rule == "coupled":
                ceilings.append(ceiling(target_runner, draft_runner, outcome))
            progress.advance(task)
    report(outcomes, ceilings, name, {"model": model, "draft": draft, "dtype": dtype, "gamma": gamma})


def report(
    outcomes: Sequence[Outcome], ceilings: Sequence[Ceiling], name: str, settings: dict[str, Any]
) -> None:
    print_table(
        "acceptance per depth",
        ["temperature", "rule", "rounds", "accepted / drafted", "mean acceptance length", "at depth 1, 2, …"],
        [
            [
                outcome.temperature,
                outcome.rule,
                outcome.rounds,
                f"{outcome.accepted_tokens}/{outcome.draft_tokens}",
                f"{outcome.mean_acceptance_length:.3f}",
                " ".join(f"{rate:.3f}" for rate in outcome.rates),
            ]
            for outcome in outcomes
        ],
    )
    print_table(
        "coupled rule against the ceiling, at the positions it tested",
        [
            "temperature",
            "positions",
            "1 − TV",
            "coupled, expected",
            "coupled, measured",
            "measured / (1 − TV)",
        ],
        [
            [
                item.temperature,
                item.num_positions,
                f"{item.one_minus_tv:.3f}",
                f"{item.coupled_expected:.3f}",
                f"{item.coupled_measured:.3f}",
                f"{item.coupled_measured / item.one_minus_tv:.3f}",
            ]
            for item in ceilings
        ],
    )
    path = write_json(
        name,
        {
            "settings": settings,
            "outcomes": [
                {
                    "rule": outcome.rule,
                    "temperature": outcome.temperature,
                    "rounds": outcome.rounds,
                    "draft_tokens": outcome.draft_tokens,
                    "accepted_tokens": outcome.accepted_tokens,
                    "rates": outcome.rates,
                    "mean_acceptance_length": outcome.mean_acceptance_length,
                    "seconds": outcome.seconds,
                }
                for outcome in outcomes
            ],
            "ceilings": [vars(item) for item in ceilings],
        },
    )
    plot(outcomes, ceilings, RESULTS / f"{name}.png")
    print(f"written: {path.name}, {name}.png")


if __name__ == "__main__":
    typer.run(main)
