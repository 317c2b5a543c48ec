"""What drawing tokens costs beside the model's step: 16 sequences × 5 positions of a whole vocabulary.

    python -m benchmarks.sampler --model qwen2.5-coder-1.5b-instruct
    python -m benchmarks.sampler --model "" --vocab-size 151936      # made-up logits, no model

The logits are those of one real step: each sequence has a Spec-Bench prompt, whose last five tokens are
computed like a pending token with a tail of four. The step is timed too, so that the sampler's share of it is
known. A sampler's time is that of ``verify_step``: edits, sampling, verification and log probabilities.
"""

from __future__ import annotations

import os

# As in the service: a thread that spins while it waits would steal the others' time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from benchmarks.prompts import spec_bench
from benchmarks.report import print_table, spread, write_json

if TYPE_CHECKING:
    import torch

    from paceline.actors.engine.batch import ModelRunner
    from paceline.actors.engine.parameters import SamplingParams

PROMPT_CHARACTERS = 400
MADE_UP_SPREAD = 2.5
"""Of logits without a model: standard deviation, as of real ones; the best are raised above it."""


@dataclass
class Result:
    name: str
    seconds: list[float]
    """Of each repetition."""
    cpu_seconds: list[float]
    """Of the one thread that samples: what ``seconds`` would be on a machine with nothing else to do."""
    share: float
    """Of the step, sampler included; 0 where there is no model."""


def kinds() -> dict[str, SamplingParams]:
    from paceline.actors.engine.parameters import SamplingParams

    return {
        "greedy": SamplingParams(temperature=0.0),
        "T=1": SamplingParams(),
        "T=0.7": SamplingParams(temperature=0.7),
        "top_p=0.95": SamplingParams(top_p=0.95),
        "top_k=40": SamplingParams(top_k=40),
        "min_p=0.05": SamplingParams(min_p=0.05),
        "T=0.7 top_k=20 top_p=0.8": SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
        "greedy, penalties": SamplingParams(
            temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2
        ),
        "T=1, penalties": SamplingParams(
            repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2, bad_token_ids=(0, 1, 2)
        ),
    }


def real_step(
    model: str, num_sequences: int, num_positions: int, dtype: str
) -> tuple[list[list[int]], torch.Tensor, list[float], int]:
    """Prompts, the logits ``[num_sequences * num_positions, V]`` of a step, its times, vocabulary size."""
    from transformers import AutoTokenizer

    from paceline.actors import weights
    from paceline.actors.engine.batch import SequenceSlice
    from paceline.actors.engine.blocks import BlockManager
    from paceline.actors.model_spec import ModelSpec, load

    tokenizer = AutoTokenizer.from_pretrained(weights.resolve(model))
    prompts = [
        list(tokenizer(prompt.text)["input_ids"])[-96:]
        for prompt in spec_bench(num_sequences, max_characters=PROMPT_CHARACTERS)
    ]
    runner: ModelRunner = load(
        ModelSpec(model, dtype=dtype, num_blocks=1024), max_num_batched_tokens=128
    ).runner
    blocks = BlockManager(runner.num_blocks, runner.block_size)
    tables: list[list[int]] = [[] for _ in prompts]
    slices: list[SequenceSlice] = []
    for prompt, table in zip(prompts, tables, strict=True):
        blocks.grow(table, len(prompt))
        start = len(prompt) - num_positions
        runner.forward([SequenceSlice(prompt[:start], 0, table, 0)])
        slices.append(SequenceSlice(prompt[start:], start, table, num_positions))
    seconds: list[float] = []
    for _ in range(4):
        started = time.perf_counter()
        logits = runner.forward(slices)
        seconds.append(time.perf_counter() - started)
    return prompts, logits, seconds[1:], runner.vocab_size


def made_up_step(
    vocab_size: int, num_sequences: int, num_positions: int
) -> tuple[list[list[int]], torch.Tensor, list[float], int]:
    import torch

    rng = np.random.default_rng(0)
    logits = rng.normal(0.0, MADE_UP_SPREAD, (num_sequences * num_positions, vocab_size)).astype(np.float32)
    best = rng.integers(0, vocab_size, (len(logits), 20))
    np.put_along_axis(logits, best, 20.0 - rng.exponential(4.0, best.shape).astype(np.float32), axis=1)
    prompts = [rng.integers(0, vocab_size, 96).tolist() for _ in range(num_sequences)]
    return prompts, torch.from_numpy(logits), [], vocab_size


def verifying(
    params: SamplingParams,
    prompts: Sequence[Sequence[int]],
    logits: torch.Tensor,
    vocab_size: int,
    logprobs: int | None,
) -> Callable[[int], None]:
    """The verification of this step with these parameters, seeds by the repetition's number."""
    from paceline.actors.engine.config import NgramConfig
    from paceline.actors.engine.messages import Submit
    from paceline.actors.engine.parameters import SpeculationParams, StoppingParams
    from paceline.actors.engine.processors import LogitProcessors
    from paceline.actors.engine.proposer import NgramProposer
    from paceline.actors.engine.scheduler import ScheduledSequence
    from paceline.actors.engine.sequence import TargetSequence
    from paceline.actors.engine.verifier import verify_step

    num_positions = len(logits) // len(prompts)
    scheduled: list[ScheduledSequence] = []
    stopping = StoppingParams(max_tokens=64)
    for index, prompt in enumerate(prompts):
        split = len(prompt) - num_positions + 1
        known, tail = tuple(prompt[:split]), prompt[split:]
        half = len(known) // 2
        event = Submit(str(index), 1, known, half, params, stopping, SpeculationParams(), logprobs=logprobs)
        processors = LogitProcessors.create(params, stopping, half, vocab_size)
        sequence = TargetSequence.from_submit(
            "gateway", event, num_positions, NgramProposer(NgramConfig()), processors
        )
        scheduled.append(ScheduledSequence(sequence, split - 1, 1, tail))

    def verify(number: int) -> None:
        for index, item in enumerate(scheduled):
            item.sequence.sampling = replace(params, seed=1000 * number + index)
        verify_step(scheduled, logits)

    return verify


def share_of(seconds: Sequence[float], step: float) -> float:
    middle = statistics.median(seconds)
    return middle / (middle + step) if step else 0.0


def main(
    model: Annotated[str, typer.Option(help="Catalogue name or folder; empty: made-up logits.")] = (
        "qwen2.5-coder-1.5b-instruct"
    ),
    dtype: Annotated[str, typer.Option(help="Of the model.")] = "bfloat16",
    sequences: Annotated[int, typer.Option(help="In the step.")] = 16,
    positions: Annotated[int, typer.Option(help="Of each sequence: a pending token and its tail.")] = 5,
    vocab_size: Annotated[int, typer.Option(help="Of made-up logits.")] = 151_936,
    repeats: Annotated[int, typer.Option(help="Per kind of request; others' seeds each time.")] = 15,
    name: Annotated[str, typer.Option(help="Name of the JSON file.")] = "sampler",
) -> None:
    """Run it, print the table, write results/<name>.json."""
    prompts, logits, step_seconds, num_ids = (
        real_step(model, sequences, positions, dtype)
        if model
        else made_up_step(vocab_size, sequences, positions)
    )
    step = statistics.median(step_seconds) if step_seconds else 0.0
    contenders = {kind: verifying(params, prompts, logits, num_ids, None) for kind, params in kinds().items()}
    plain = kinds()
    contenders["greedy, 5 logprobs"] = verifying(plain["greedy"], prompts, logits, num_ids, 5)
    contenders["T=1, 5 logprobs"] = verifying(plain["T=1"], prompts, logits, num_ids, 5)
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in contenders}
    for number in range(repeats + 1):
        for kind, verify in contenders.items():
            started, on_cpu = time.perf_counter(), time.thread_time()
            verify(number)
            if number:  # the first one warms up
                times[kind].append((time.perf_counter() - started, time.thread_time() - on_cpu))
    results = []
    for kind, pairs in times.items():
        seconds, cpu_seconds = ([pair[index] for pair in pairs] for index in (0, 1))
        results.append(Result(kind, seconds, cpu_seconds, share_of(seconds, step)))
    print_table(
        f"{sequences} sequences × {positions} positions × {num_ids} tokens, ms"
        + (f"; the model's step: {spread([1e3 * seconds for seconds in step_seconds])}" if step else ""),
        ["", "sampler", "of it on the CPU", "share of the step"],
        [
            [
                result.name,
                spread([1e3 * seconds for seconds in result.seconds]),
                spread([1e3 * seconds for seconds in result.cpu_seconds]),
                f"{result.share:.1%}" if step else "-",
            ]
            for result in results
        ],
    )
    path = write_json(
        name,
        {
            "settings": {
                "model": model,
                "dtype": dtype,
                "sequences": sequences,
                "positions": positions,
                "vocab_size": num_ids,
            },
            "step_seconds": step_seconds,
            "results": [asdict(result) for result in results],
        },
    )
    print(f"written: {path.name}")


if __name__ == "__main__":
    typer.run(main)
