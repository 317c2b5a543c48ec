"""What a target step costs beside the model: emulated models that take no time, everything else real.

    python -m benchmarks.overhead --sequences 1,64,256
    python -m benchmarks.overhead --step-ms 10 --draft-step-ms 1 --with-drafts

Client, proxy, gateway, target and draft are processes of their own, joined by Serve and the streams of the
real application. Each row is one load: so many streams that are open all the time, with or without drafts,
greedy or sampled at temperature 1. The target itself measures its steps:

    step        from the end of one step to the end of the next
    overhead    of that, what is not the model's forward pass
    waiting     of that, before the step began: hand-over, events, and any wait for drafts

With models that take no time drafts hardly pay, and the adaptive policy lets them rest; the second command
shows the same overhead beneath a model whose steps take 10 ms, with candidates and verdicts on the wire.

The client is one asyncio process, and like all others it needs its share of the same cores: the table says
how much of one each process took.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ray starts workers at a low priority; here all processes compete on equal terms, whatever else runs.
os.environ.setdefault("RAY_worker_niceness", "0")

import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import grpc.aio
import typer

from benchmarks.processes import processor_time
from benchmarks.profiling import finish_profilers, start_profilers
from benchmarks.report import print_table, write_json
from paceline.actors.engine.step_times import WINDOW
from paceline.cluster.cli_status import collect_status
from paceline.cluster.config import PacelineConfig, load_config
from paceline.cluster.runtime import free_port
from paceline.cluster.service_start import serving
from paceline.protos import generation_pb2 as proto
from paceline.protos import generation_pb2_grpc as rpc

VOCAB_SIZE = 1024
MAX_MODEL_LEN = 1 << 17
"""Long enough for streams that never end by themselves."""
PROMPT_LENGTH = 32
WARM_UP_SECONDS = 1.5
MEASURE_SECONDS = 4.0
"""At least; longer where ``WINDOW`` steps take longer."""
MAX_SECONDS = 60.0
"""At most, should the steps be slow."""
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Load:
    """One row."""

    num_sequences: int
    drafted: bool
    temperature: float

    @property
    def name(self) -> str:
        kind = "drafts" if self.drafted else "plain"
        return f"{self.num_sequences} × {kind}, T={self.temperature:g}"

    @property
    def slug(self) -> str:
        """For the names of files."""
        return f"{self.num_sequences}-{'drafts' if self.drafted else 'plain'}-t{self.temperature:g}"

    def request(self, seed: int) -> proto.GenerateRequest:
        request = proto.GenerateRequest()
        request.token_ids.ids.extend(random.Random(seed).choices(range(VOCAB_SIZE), k=PROMPT_LENGTH))
        request.sampling.temperature = self.temperature
        request.sampling.seed = seed
        request.stopping.max_tokens = MAX_MODEL_LEN - PROMPT_LENGTH
        request.stopping.ignore_eos = True
        if not self.drafted:
            request.speculation.num_speculative_tokens = 0
        return request


@dataclass(frozen=True)
class Result:
    """What was seen while a load was on. Times in seconds."""

    load: Load
    seconds: float
    num_steps: int
    step_times: dict[str, Any]
    """``StepTimesSnapshot``: each percentile the median over the looks at the target's last steps."""
    mean_step: float
    """Wall time per step: other than the median it holds every stall."""
    tokens_per_second: float
    tokens_per_chunk: float
    rounds: int
    draft_tokens: int
    accepted_tokens: int
    draft_step_seconds: float
    draft_response_seconds: float
    shares: dict[str, float]
    """Role -> cores kept busy."""
    load_average: float
    engine_parts: dict[str, float]
    """Share of each part in the engine thread's samples outside of the model; empty without profiles."""

    @property
    def acceptance(self) -> float:
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        return 1.0 + self.accepted_tokens / self.rounds if self.rounds else 1.0


def config_of(
    acceptance: float,
    num_speculative_tokens: int | None,
    step_ms: float,
    draft_step_ms: float,
    most_sequences: int,
) -> PacelineConfig:
    keys = f"per_token_ms=0&vocab_size={VOCAB_SIZE}&max_model_len={MAX_MODEL_LEN}"
    draft = f"emulated://draft?base_ms={draft_step_ms}&{keys}&acceptance={acceptance}"
    # Room for all of them in one step, each with a tail of the usual length.
    room = {"num_threads": 1, "max_num_seqs": most_sequences, "max_num_batched_tokens": 16 * most_sequences}
    return load_config(
        {
            "model": f"emulated://target?base_ms={step_ms}&{keys}",
            "draft": {"model": draft, **room},
            "target": {"kv_cache": {"num_blocks": 1 << 17}, **room},
            "speculation": {
                "ngram": {"enabled": False},
                "num_speculative_tokens": num_speculative_tokens,
            },
            "gateway": {"grpc_port": free_port()},
        }
    )


@dataclass
class Received:
    """What the client has got, over all streams of one load."""

    num_tokens: int = 0
    num_chunks: int = 0


async def read_stream(stub: Any, request: proto.GenerateRequest, received: Received) -> None:
    """Raises: whatever ends the stream; it is not to end."""
    async for chunk in stub.GenerateStream(request):
        received.num_chunks += 1
        received.num_tokens += len(chunk.token_ids)
    raise RuntimeError("a stream ended before its load; max_model_len is too short for so fast a service")


@contextlib.asynccontextmanager
async def running(stub: Any, load: Load, seeds: itertools.count[int]) -> AsyncIterator[Received]:
    """The load's streams, open for the length of the block, which ends with the first that fails."""
    received = Received()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(read_stream(stub, load.request(next(seeds)), received))
            for _ in range(load.num_sequences)
        ]
        yield received
        for task in tasks:
            task.cancel()


async def engine_status() -> dict[str, Any]:
    """The target's counters. Raises: RuntimeError if it does not answer."""
    replicas = (await asyncio.to_thread(collect_status))["pools"]["target"]["replicas"]
    if len(replicas) != 1 or "engine" not in replicas[0]:
        raise RuntimeError(f"the target does not answer: {replicas}")
    engine: dict[str, Any] = replicas[0]["engine"]
    return engine


async def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + MAX_SECONDS
    while not condition(await engine_status()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {MAX_SECONDS:.0f} s: {what}")
        await asyncio.sleep(POLL_SECONDS)


async def measure(stub: Any, load: Load, seeds: itertools.count[int], profiles: Path | None) -> Result:
    await until(lambda engine: engine["num_running"] + engine["num_waiting"] == 0, "the target is idle")
    async with running(stub, load, seeds) as received:
        await until(lambda engine: engine["num_running"] == load.num_sequences, "all streams run")
        await asyncio.sleep(WARM_UP_SECONDS)
        before, time_before = await engine_status(), processor_time()
        tokens, chunks = received.num_tokens, received.num_chunks
        profilers = start_profilers(profiles, load.slug, time_before, MEASURE_SECONDS) if profiles else []
        after = before
        looks: list[dict[str, Any]] = []
        elapsed = 0.0
        while elapsed < MEASURE_SECONDS or (not looks and elapsed < MAX_SECONDS):
            await asyncio.sleep(POLL_SECONDS)
            after = await engine_status()
            # Once the window is full of steps of this load, its percentiles are this load's alone.
            if after["num_steps_total"] - before["num_steps_total"] >= WINDOW:
                looks.append(after["step_times"])
            elapsed = time.monotonic() - time_before.at
        time_after = processor_time()
        parts = await asyncio.to_thread(finish_profilers, profilers)
        tokens, chunks = received.num_tokens - tokens, received.num_chunks - chunks
    seconds = time_after.at - time_before.at
    num_steps = after["num_steps_total"] - before["num_steps_total"]
    draft = after["drafts"][0] if after["drafts"] else {}

    def counted(name: str) -> int:
        return int(after[name] - before[name])

    return Result(
        load=load,
        seconds=seconds,
        num_steps=num_steps,
        step_times=median_times(looks or [after["step_times"]]),
        mean_step=seconds / max(num_steps, 1),
        tokens_per_second=tokens / seconds,
        tokens_per_chunk=tokens / max(chunks, 1),
        rounds=counted("num_rounds_total"),
        draft_tokens=counted("num_draft_tokens_total"),
        accepted_tokens=counted("num_accepted_tokens_total"),
        draft_step_seconds=draft.get("step_seconds", 0.0),
        draft_response_seconds=draft.get("response_seconds", 0.0),
        shares=time_after.shares_since(time_before),
        load_average=os.getloadavg()[0],
        engine_parts=parts,
    )


def median_times(looks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each percentile of each part."""
    parts = ("interval", "overhead", "waiting")
    return {
        part: {
            percentile: statistics.median(look[part][percentile] for look in looks)
            for percentile in ("p50", "p90")
        }
        for part in parts
    }


async def measure_all(address: str, loads: Sequence[Load], profiles: Path | None) -> list[Result]:
    seeds = itertools.count(1)
    results: list[Result] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        await until(lambda engine: engine["drafts"], "the draft is attached")
        for load in loads:
            results.append(await measure(stub, load, seeds, profiles))
            print(f"{load.name}: {results[-1].num_steps} steps in {results[-1].seconds:.1f} s")
    return results


def report(results: Sequence[Result], name: str, settings: dict[str, Any]) -> None:
    def ms(times: dict[str, float]) -> str:
        return f"{1e3 * times['p50']:.2f} / {1e3 * times['p90']:.2f}"

    print_table(
        "per target step, ms: p50 / p90",
        [
            "",
            "step",
            "not the model",
            "of it waiting",
            "step, mean",
            "tokens/s",
            "tokens/chunk",
            "acceptance",
            "length",
        ],
        [
            [
                result.load.name,
                *(ms(result.step_times[part]) for part in ("interval", "overhead", "waiting")),
                f"{1e3 * result.mean_step:.2f}",
                f"{result.tokens_per_second:.0f}",
                f"{result.tokens_per_chunk:.1f}",
                f"{result.acceptance:.2f}" if result.draft_tokens else "–",
                f"{result.acceptance_length:.2f}",
            ]
            for result in results
        ],
    )
    roles = ("target", "draft", "gateway", "proxy", "client", "ray")
    print_table(
        f"cores kept busy, of {os.cpu_count()}",
        ["", *roles, "draft step, ms", "draft answers in, ms", "load average"],
        [
            [
                result.load.name,
                *(f"{result.shares.get(role, 0.0):.2f}" for role in roles),
                f"{1e3 * result.draft_step_seconds:.2f}" if result.load.drafted else "–",
                f"{1e3 * result.draft_response_seconds:.2f}" if result.load.drafted else "–",
                f"{result.load_average:.1f}",
            ]
            for result in results
        ],
    )
    if any(result.engine_parts for result in results):
        parts = sorted(
            {part for result in results for part in result.engine_parts},
            key=lambda part: -sum(result.engine_parts.get(part, 0.0) for result in results),
        )
        print_table(
            "what is not the model, share of the engine thread's samples",
            ["", *(result.load.name for result in results)],
            [[part, *(f"{result.engine_parts.get(part, 0.0):.0%}" for result in results)] for part in parts],
        )
    path = write_json(
        name,
        {
            "settings": settings,
            "results": [
                asdict(result)
                | {"acceptance": result.acceptance, "mean_acceptance_length": result.acceptance_length}
                for result in results
            ],
        },
    )
    print(f"written: {path.name}")


def main(
    sequences: Annotated[str, typer.Option(help="Numbers of streams, comma-separated.")] = "1,16,64,256",
    drafts: Annotated[
        bool | None,
        typer.Option("--with-drafts/--without-drafts", help="Only one of the two; default: both."),
    ] = None,
    temperatures: Annotated[str, typer.Option(help="0 = greedy.")] = "0,1",
    acceptance: Annotated[float, typer.Option(help="Of the emulated draft.")] = 0.8,
    gamma: Annotated[int | None, typer.Option(help="Fixed draft length; default: adaptive.")] = None,
    step_ms: Annotated[float, typer.Option(help="Time of a target's step.")] = 0.0,
    draft_step_ms: Annotated[float, typer.Option(help="Time of a draft's step.")] = 0.0,
    profiles: Annotated[
        Path | None, typer.Option(help="Folder for stacks sampled by py-spy; it slows what it looks at.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the JSON file.")] = "overhead",
) -> None:
    """Run it, print the tables, write results/<name>.json."""
    kinds = (False, True) if drafts is None else (drafts,)
    loads = [
        Load(int(count), drafted, float(temperature))
        for count in sequences.split(",")
        for drafted in kinds
        for temperature in temperatures.split(",")
    ]
    most_sequences = max(64, *(load.num_sequences for load in loads))
    config = config_of(acceptance, gamma, step_ms, draft_step_ms, most_sequences)
    with serving(config, address="local") as service:
        results = asyncio.run(measure_all(service.grpc_address, loads, profiles))
    settings = {
        "acceptance": acceptance,
        "num_speculative_tokens": gamma,
        "step_ms": step_ms,
        "draft_step_ms": draft_step_ms,
    }
    report(results, name, settings)


if __name__ == "__main__":
    typer.run(main)
