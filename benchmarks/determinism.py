"""Whether a request's tokens depend on anything but the request, with and without ``deterministic``.

    python -m benchmarks.determinism --model smollm2-135m-instruct --draft smollm2-135m-instruct

Every prompt is answered, greedily and seeded at temperature 1: alone, among 16 others, drafted, drafted among
16 others, after the loss of its target in the middle, and after preemptions for want of KV blocks. Ids that
differ from those of the prompt alone are counted. Throughput is that of 16 at a time, with drafts.
"""

from __future__ import annotations

import os

# A thread that spins while it waits steals the time of whoever shares the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("KMP_BLOCKTIME", "0")

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from benchmarks.lockstep import Lockstep
from benchmarks.prompts import encoded, spec_bench
from benchmarks.report import print_table, spread, write_json

if TYPE_CHECKING:
    from paceline.actors.engine.batch import ModelRunner

BLOCK_SIZE = 16
WAYS = ("alone", "among others", "drafted alone", "drafted among others", "target lost", "preempted")


@dataclass(frozen=True)
class Models:
    """A target, its draft, and the KV blocks that make the target preempt."""

    target: ModelRunner
    draft: ModelRunner
    few_blocks: int


@dataclass(frozen=True)
class Result:
    token_ids: list[tuple[int, ...]]
    seconds: float
    num_preemptions: int = 0

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


def differing(first: Result, second: Result) -> int:
    """Prompts whose ids are not the same."""
    return sum(one != other for one, other in zip(first.token_ids, second.token_ids, strict=True))


def load(
    model: str,
    draft: str,
    dtype: str,
    num_blocks: int,
    few_blocks: int,
    num_threads: int | None,
    deterministic: bool,
) -> Models:
    from paceline.actors import model_spec
    from paceline.actors.model_spec import ModelSpec

    def runner(source: str) -> ModelRunner:
        spec = ModelSpec(
            source, dtype=dtype, num_blocks=num_blocks, num_threads=num_threads, deterministic=deterministic
        )
        return model_spec.load(spec, max_num_batched_tokens=512).runner

    return Models(runner(model), runner(draft), few_blocks)


class Study:
    """All ways to answer the prompts with one set of models at one temperature."""

    def __init__(
        self,
        models: Models,
        prompts: Sequence[list[int]],
        *,
        temperature: float,
        gamma: int,
        max_tokens: int,
        concurrency: int,
    ) -> None:
        self._models = models
        self._prompts = prompts
        self._temperature = temperature
        self._gamma = gamma
        self._max_tokens = max_tokens
        self._concurrency = concurrency

    def ways(self) -> dict[str, Callable[[], Result]]:
        """The first is what the others are compared with."""
        runs: Sequence[Callable[[], Result]] = (
            lambda: self._alone(drafted=False),
            lambda: self._together(drafted=False),
            lambda: self._alone(drafted=True),
            lambda: self._together(drafted=True),
            self._lost,
            self._preempted,
        )
        return dict(zip(WAYS, runs, strict=True))

    def _pair(self, *, drafted: bool, few_blocks: bool = False) -> Lockstep:
        models = self._models
        return Lockstep(
            models.target,
            models.draft if drafted else None,
            num_speculative_tokens=self._gamma,
            max_tokens=self._max_tokens,
            temperature=self._temperature,
            max_num_seqs=self._concurrency,
            num_blocks=models.few_blocks if few_blocks else None,
        )

    def _alone(self, *, drafted: bool) -> Result:
        started = time.perf_counter()
        found = []
        for index, prompt in enumerate(self._prompts):
            pair = self._pair(drafted=drafted)
            answer = pair.submit(prompt, index)
            pair.run()
            found.append(tuple(answer.token_ids))
        return Result(found, time.perf_counter() - started)

    def _together(self, *, drafted: bool) -> Result:
        started = time.perf_counter()
        pair = self._pair(drafted=drafted)
        answers = [pair.submit(prompt, index) for index, prompt in enumerate(self._prompts)]
        pair.run()
        return Result([tuple(answer.token_ids) for answer in answers], time.perf_counter() - started)

    def _lost(self) -> Result:
        started = time.perf_counter()
        pair = self._pair(drafted=True)
        answers = [pair.submit(prompt, index) for index, prompt in enumerate(self._prompts)]
        for num_steps in (7, 12):
            pair.run(num_steps)
            pair.replace_target()
        pair.run()
        return Result([tuple(answer.token_ids) for answer in answers], time.perf_counter() - started)

    def _preempted(self) -> Result:
        started = time.perf_counter()
        pair = self._pair(drafted=True, few_blocks=True)
        answers = [pair.submit(prompt, index) for index, prompt in enumerate(self._prompts)]
        pair.run()
        seconds = time.perf_counter() - started
        return Result([tuple(answer.token_ids) for answer in answers], seconds, pair.preemptions)


def main(
    model: Annotated[str, typer.Option(help="The target.")] = "smollm2-135m-instruct",
    draft: Annotated[str, typer.Option(help="The draft.")] = "smollm2-135m-instruct",
    prompts: Annotated[int, typer.Option(help="Spec-Bench prompts.")] = 24,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 96,
    max_characters: Annotated[int, typer.Option(help="Leave out longer prompts.")] = 600,
    concurrency: Annotated[int, typer.Option(help="Sequences of one step.")] = 16,
    gamma: Annotated[int, typer.Option(help="Tail length.")] = 4,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0,1",
    repeats: Annotated[int, typer.Option(help="Of the throughput, interleaved.")] = 3,
    ways: Annotated[
        str | None,
        typer.Option(help='Comma-separated, beside `alone`; all if left out; "" = throughput only.'),
    ] = None,
    num_threads: Annotated[int | None, typer.Option(help="Compute threads; all cores if left out.")] = None,
    without: Annotated[
        str, typer.Option(help="Whether to count without deterministic numerics: too, no or only.")
    ] = "too",
    name: Annotated[str, typer.Option(help="Name of the JSON file.")] = "determinism",
) -> None:
    """Run it, print the tables, write results/<name>.json."""
    token_ids = encoded(model, spec_bench(prompts, max_characters=max_characters))
    blocks = [-(-(len(ids) + max_tokens) // BLOCK_SIZE) + 1 for ids in token_ids]
    # Half of what the fullest step wants, and enough for any one sequence.
    few_blocks = max(max(blocks), sum(sorted(blocks)[-concurrency:]) // 2)
    results: dict[tuple[bool, float, str], Result] = {}
    speeds: dict[bool, list[float]] = {True: [], False: []}
    kinds = {
        deterministic: load(model, draft, dtype, sum(blocks), few_blocks, num_threads, deterministic)
        for deterministic in {"too": (True, False), "no": (True,), "only": (False,)}[without]
    }
    degrees = [float(value) for value in temperatures.split(",")]
    chosen = set(WAYS) if ways is None else {way.strip() for way in ways.split(",") if way.strip()}
    if chosen:
        chosen.add(WAYS[0])
    if unknown := sorted(chosen - set(WAYS)):
        raise typer.BadParameter(f"no such way: {', '.join(unknown)}; there are {', '.join(WAYS)}")
    if len(kinds) == 1:
        repeats = 0
    with Progress() as progress:
        num_runs = len(kinds) * (len(degrees) * len(chosen) + repeats)
        task = progress.add_task("ways", total=num_runs)
        studies = {
            (deterministic, temperature): Study(
                models,
                token_ids,
                temperature=temperature,
                gamma=gamma,
                max_tokens=max_tokens,
                concurrency=concurrency,
            )
            for deterministic, models in kinds.items()
            for temperature in degrees
        }
        for (deterministic, temperature), study in studies.items():
            for way, run in study.ways().items():
                if way not in chosen:
                    continue
                result = results[deterministic, temperature, way] = run()
                reference = results[deterministic, temperature, "alone"]
                progress.console.print(
                    f"deterministic {deterministic}, T = {temperature:g}, {way}: "
                    f"{differing(reference, result)} of {len(result.token_ids)} differ"
                )
                progress.advance(task)
        for repeat in range(repeats):
            for deterministic in (True, False) if repeat % 2 == 0 else (False, True):
                run = studies[deterministic, degrees[0]].ways()["drafted among others"]
                speeds[deterministic].append(run().tokens_per_second)
                progress.advance(task)
    rows = []
    for (deterministic, temperature, way), result in results.items():
        reference = results[deterministic, temperature, "alone"]
        rows.append(
            {
                "deterministic": deterministic,
                "temperature": temperature,
                "way": way,
                "prompts": len(reference.token_ids),
                "differing": differing(reference, result),
                "preemptions": result.num_preemptions,
                "tokens_per_second": result.tokens_per_second,
            }
        )
    print_table(
        "prompts whose ids differ from those of the prompt alone",
        ["deterministic", "temperature", "way", "differ", "preemptions", "tokens/s"],
        [
            [
                row["deterministic"],
                row["temperature"],
                row["way"],
                f"{row['differing']} of {row['prompts']}",
                row["preemptions"],
                f"{row['tokens_per_second']:.1f}",
            ]
            for row in rows
        ],
    )
    settings = {"model": model, "draft": draft, "dtype": dtype, "gamma": gamma, "concurrency": concurrency}
    ratio = [first / second for first, second in zip(speeds[True], speeds[False], strict=True)]
    if ratio:
        print_table(
            "throughput, drafted among others",
            ["", "tokens/s"],
            [
                ["deterministic", spread(speeds[True])],
                ["not deterministic", spread(speeds[False])],
                ["ratio", f"{statistics.median(ratio):.3f} ({spread(ratio)})"],
            ],
        )
    path = write_json(name, {"settings": settings, "rows": rows, "throughput_ratio": ratio})
    print(f"written: {path.name}")


if __name__ == "__main__":
    typer.run(main)
