"""Speculation on emulated accelerators, beside what theory gives: a step time, a draft's, and an acceptance.

    python -m benchmarks.emulated

Target and draft are processes of their own, joined by the streams of the real service; this process is the
gateway. Their models take 20 ms (and 0.05 ms per token past 64) and 2 ms a step and sleep meanwhile, as the
host of an accelerator would; the draft's law is the target's in 0.8 of the positions. The network is this
machine's loopback.

    plain        no drafts
    lock-step    the draft rests while the target verifies (hardware: shared)
    ahead        it runs ahead along its chain (hardware: separate, draft.max_branches: 0)
    prepared     it prepares likely corrections as well (hardware: separate)

The four take turns, prompt by prompt. The yardstick is the best that taking turns can do without any
overhead: ``E(γ) / (γ·t_draft + RTT + T(γ + 1))`` at its best γ, with E(γ) = (1 − α^(γ+1)) / (1 − α). On the
few positions of a run the draft may be right a little more or less often than α says, so each way is also
held against the yardstick of its own positions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Annotated, Any

import typer

from benchmarks.processes import processor_time
from benchmarks.report import print_table, spread, write_json
from paceline.actors import garbage
from paceline.actors.draft import DraftActor, DraftSpec
from paceline.actors.engine.config import DraftEngineConfig, Hardware, NgramConfig, TargetEngineConfig
from paceline.actors.engine.messages import Committed, Finished, Load, Submit
from paceline.actors.engine.pacing import expected_tokens
from paceline.actors.engine.parameters import SamplingParams, SpeculationParams, StoppingParams
from paceline.actors.execution_client import ExecutionClient
from paceline.actors.model_spec import ModelSpec
from paceline.actors.target import TargetActor, TargetSpec

VOCAB_SIZE = 1024
MAX_MODEL_LEN = 4096
PROMPT_LENGTH = 32
NETWORK_SECONDS = 0.0002
"""Of the yardstick's round trip."""
MAX_SEQUENCES = 256
MAX_TAIL = 12
"""Longer ones are worth it where so many tokens cost nothing."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Models:
    """What the emulated accelerators are like."""

    target_ms: float = 20.0
    free_tokens: int = 64
    per_token_ms: float = 0.05
    draft_ms: float = 2.0
    acceptance: float = 0.8
    near: float = 0.8

    @property
    def target(self) -> str:
        return (
            f"emulated://target?vocab_size={VOCAB_SIZE}&max_model_len={MAX_MODEL_LEN}"
            f"&base_ms={self.target_ms}&free_tokens={self.free_tokens}&per_token_ms={self.per_token_ms}"
        )

    @property
    def draft(self) -> str:
        return (
            f"emulated://draft?vocab_size={VOCAB_SIZE}&max_model_len={MAX_MODEL_LEN}"
            f"&base_ms={self.draft_ms}&acceptance={self.acceptance}&near={self.near}"
        )

    def step_seconds(self, num_tokens: int) -> float:
        return (self.target_ms + self.per_token_ms * max(num_tokens - self.free_tokens, 0)) / 1e3

    def best_lock_step(self) -> tuple[int, float]:
        """γ and tokens per second of one sequence."""

        def rate(gamma: int) -> float:
            seconds = gamma * self.draft_ms / 1e3 + NETWORK_SECONDS + self.step_seconds(gamma + 1)
            return expected_tokens(self.acceptance, gamma) / seconds

        best = max(range(1, 65), key=rate)
        return best, rate(best)


@dataclass(frozen=True)
class Way:
    """One way to serve."""

    name: str
    service: str
    """The pair of processes that it uses."""
    drafted: bool = True


WAYS = (
    Way("plain", "prepared", drafted=False),
    Way("lock-step", "lock-step"),
    Way("ahead", "ahead"),
    Way("prepared", "prepared"),
)
SERVICES = {
    "lock-step": (Hardware.SHARED, 0),
    "ahead": (Hardware.SEPARATE, 0),
    "prepared": (Hardware.SEPARATE, DraftEngineConfig().max_branches),
}


# ---------------------------------------------------------------- the processes


@contextlib.contextmanager
def child(target: Any, *arguments: Any) -> Iterator[Connection]:
    """A process that lives as long as the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join()


def run_target(spec: TargetSpec, host: str, parent: Connection) -> None:
    async def run() -> None:
        actor = TargetActor(spec)
        address = await actor.start(host)
        garbage.freeze()
        parent.send(address)
        await answer(parent, actor)
        await actor.stop(0.0)

    asyncio.run(run())


def run_draft(spec: DraftSpec, targets: dict[str, str], parent: Connection) -> None:
    async def discover() -> dict[str, str]:
        return targets

    async def run() -> None:
        actor = DraftActor(spec, discover)
        await actor.start()
        garbage.freeze()
        await actor.wait_for_target(60.0)
        parent.send("attached")
        await answer(parent, actor)
        await actor.stop()

    asyncio.run(run())


async def answer(parent: Connection, actor: TargetActor | DraftActor) -> None:
    """Say the status whenever asked, until the parent closes its end."""
    with contextlib.suppress(EOFError):
        while True:
            await asyncio.to_thread(parent.recv)
            parent.send(await actor.status())


@dataclass
class Service:
    """A target and its draft."""

    address: str
    target: Connection
    draft: Connection

    def status(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The engines' counters."""
        found: list[dict[str, Any]] = []
        for peer in (self.target, self.draft):
            peer.send("status")
            found.append(peer.recv()["engine"])
        return found[0], found[1]


@contextlib.contextmanager
def services(models: Models, num_branches: int) -> Iterator[dict[str, Service]]:
    with contextlib.ExitStack() as stack:
        found: dict[str, Service] = {}
        for name, (hardware, branches) in SERVICES.items():
            engine = TargetEngineConfig(
                max_num_seqs=MAX_SEQUENCES,
                max_num_waiting=MAX_SEQUENCES,
                max_num_batched_tokens=4096,
                ngram=NgramConfig(enabled=False),
                hardware=hardware,
                max_num_speculative_tokens=MAX_TAIL,
            )
            target = TargetSpec(
                name, ModelSpec(models.target, num_threads=1, num_blocks=1 << 15), engine=engine
            )
            draft = DraftSpec(
                f"draft of {name}",
                ModelSpec(models.draft, num_threads=1, num_blocks=1 << 15),
                engine=DraftEngineConfig(
                    max_num_seqs=MAX_SEQUENCES,
                    max_num_batched_tokens=4096,
                    max_branches=min(branches, num_branches),
                ),
            )
            to_target = stack.enter_context(child(run_target, target, LOOPBACK))
            address = to_target.recv()
            to_draft = stack.enter_context(child(run_draft, draft, {name: address}))
            to_draft.recv()
            found[name] = Service(address, to_target, to_draft)
        yield found


# ---------------------------------------------------------------- one run


@dataclass
class Listener:
    """Hears of the sequences of one run."""

    num_sequences: int
    at: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Tokens of each piece, and when it came."""
    num_ended: int = 0
    num_at_first_end: int = 0
    """Pieces until the first sequence ended: as long as all of them run."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    error: str = ""

    def on_committed(self, target_id: str, committed: Committed) -> None:
        self.at.append(time.monotonic())
        self.counts.append(len(committed.token_ids))

    def on_finished(self, target_id: str, finished: Finished) -> None:
        self.error = self.error or finished.error
        self.num_at_first_end = self.num_at_first_end or len(self.at)
        self.num_ended += 1
        if self.num_ended == self.num_sequences:
            self.done.set()

    @property
    def tokens_per_second(self) -> float:
        """Per sequence, while all of them run: from the last one's first piece to the first one's end."""
        # The first piece of each sequence is its prefill's.
        counted = slice(self.num_sequences, self.num_at_first_end)
        seconds = self.at[counted.stop - 1] - self.at[counted.start - 1]
        return sum(self.counts[counted]) / seconds / self.num_sequences

    def on_load(self, target_id: str, load: Load) -> None:
        pass

    def on_lost(self, target_id: str, reason: str) -> None:
        self.error = reason
        self.done.set()


@dataclass(frozen=True)
class Result:
    """One way with one load."""

    way: str
    num_sequences: int
    tokens_per_second: float
    """See ``Listener``."""
    mean_acceptance_length: float
    acceptance: float
    """Per position that was tested."""
    prepared: float
    """Of the corrections, those for which a tail was ready."""
    draft_step_ms: float
    target_step_ms: float
    cores: float
    """Kept busy by all processes."""


@contextlib.asynccontextmanager
async def attached(service: Service, gateway_id: str, listener: Listener) -> AsyncIterator[ExecutionClient]:
    """A gateway's stream to the target, for the length of the block. Raises: RuntimeError: what the listener
    heard of as an error."""
    client = ExecutionClient(address=service.address, gateway_id=gateway_id, events=listener)
    await client.attach()
    try:
        yield client
    finally:
        await client.close()
    if listener.error:
        raise RuntimeError(listener.error)


def submit_all(
    client: ExecutionClient, names: Sequence[str], num_tokens: int, seed: int, *, drafted: bool
) -> None:
    """A sequence of so many tokens for each name. What they say depends on ``seed`` and their order alone."""
    for index, name in enumerate(names):
        rng = random.Random(seed * MAX_SEQUENCES + index)
        client.submit(
            Submit(
                sequence_id=name,
                epoch=0,
                token_ids=tuple(rng.choices(range(VOCAB_SIZE), k=PROMPT_LENGTH)),
                prompt_length=PROMPT_LENGTH,
                sampling=SamplingParams(temperature=1.0, seed=rng.randrange(1 << 63)),
                stopping=StoppingParams(max_tokens=num_tokens),
                speculation=SpeculationParams(None if drafted else 0),
            )
        )


async def run_load(
    service: Service, way: Way, num_sequences: int, num_tokens: int, seed: int, models: Models
) -> Result:
    listener = Listener(num_sequences)
    names = [f"{seed}-{way.name}-{index}" for index in range(num_sequences)]
    async with attached(service, f"benchmark-{seed}", listener) as client:
        before, before_time = service.status(), processor_time()
        submit_all(client, names, num_tokens, seed, drafted=way.drafted)
        await listener.done.wait()
        cores = sum(processor_time().shares_since(before_time).values())
        after = service.status()

    def counted(engine: int, name: str) -> int:
        return int(after[engine][name] - before[engine][name])

    rounds, accepted = counted(0, "num_rounds_total"), counted(0, "num_accepted_tokens_total")
    corrections = counted(1, "num_corrections_total")
    tested, foretold = (
        sum(draft[name] for draft in after[0]["drafts"]) - sum(draft[name] for draft in before[0]["drafts"])
        for name in ("num_tested_total", "num_foretold_total")
    )
    return Result(
        way=way.name,
        num_sequences=num_sequences,
        tokens_per_second=listener.tokens_per_second,
        mean_acceptance_length=1.0 + accepted / rounds if rounds else 1.0,
        acceptance=foretold / tested if tested else 0.0,
        prepared=counted(1, "num_prepared_corrections_total") / corrections if corrections else 0.0,
        draft_step_ms=1e3 * after[1]["step_seconds"],
        target_step_ms=1e3 * after[0]["step_times"]["interval"]["p50"],
        cores=cores,
    )


async def run_all(
    found: dict[str, Service], loads: Sequence[tuple[int, int]], repeats: int, models: Models
) -> list[Result]:
    results: list[Result] = []
    seeds = iter(range(1, 1 << 30))
    for num_sequences, num_tokens in loads:
        for way in WAYS:  # what each needs to learn first
            await run_load(found[way.service], way, num_sequences, num_tokens // 4, next(seeds), models)
        for repeat in range(repeats):
            seed = next(seeds)
            turn = repeat % len(WAYS)
            for way in (*WAYS[turn:], *WAYS[:turn]):
                result = await run_load(found[way.service], way, num_sequences, num_tokens, seed, models)
                results.append(result)
                print(
                    f"{num_sequences} × {way.name}: {result.tokens_per_second:.1f} tokens/s each", flush=True
                )
    return results


# ---------------------------------------------------------------- the report


def report(results: Sequence[Result], models: Models, name: str, settings: dict[str, Any]) -> None:
    gamma, best = models.best_lock_step()
    print(f"best of taking turns: γ = {gamma}, {best:.1f} tokens/s")
    rows: list[list[str]] = []
    summary: list[dict[str, Any]] = []
    for num_sequences in dict.fromkeys(result.num_sequences for result in results):
        plain = statistics.median(rates(results, "plain", num_sequences))
        for way in WAYS:
            runs = [r for r in results if (r.way, r.num_sequences) == (way.name, num_sequences)]
            values = rates(results, way.name, num_sequences)
            middle = statistics.median(values)

            def median(key: str, runs: Sequence[Result] = runs) -> float:
                return float(statistics.median(getattr(run, key) for run in runs))

            of_best = of_own_best = None
            if num_sequences == 1:
                of_best = middle / best
                if way.drafted:
                    met = statistics.mean(run.acceptance for run in runs)
                    of_own_best = middle / replace(models, acceptance=met).best_lock_step()[1]
            rows.append(
                [
                    f"{num_sequences} × {way.name}",
                    spread(values),
                    f"{middle / plain:.2f}",
                    f"{of_best:.2f}" if of_best else "–",
                    f"{of_own_best:.2f}" if of_own_best else "–",
                    f"{median('mean_acceptance_length'):.2f}",
                    f"{median('acceptance'):.3f}" if way.drafted else "–",
                    f"{median('prepared'):.2f}" if way.name == "prepared" else "–",
                    f"{median('target_step_ms'):.1f}",
                    f"{median('draft_step_ms'):.1f}" if way.drafted else "–",
                    f"{median('cores'):.2f}",
                ]
            )
            summary.append(
                {
                    "way": way.name,
                    "num_sequences": num_sequences,
                    "tokens_per_second": middle,
                    "of_plain": middle / plain,
                    "of_best_lock_step": of_best,
                    "of_best_lock_step_at_its_acceptance": of_own_best,
                }
            )
    print_table(
        f"tokens/s of each sequence, median [quartiles]; {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.1f}",
        [
            "",
            "tokens/s",
            "of plain",
            "of best",
            "at its α",
            "length",
            "acceptance",
            "prepared",
            "step, ms",
            "draft, ms",
            "cores",
        ],
        rows,
    )
    path = write_json(
        name,
        {
            "settings": settings,
            "best_lock_step": {"num_speculative_tokens": gamma, "tokens_per_second": best},
            "summary": summary,
            "results": [asdict(result) for result in results],
        },
    )
    print(f"written: {path.name}")


def rates(results: Sequence[Result], way: str, num_sequences: int) -> list[float]:
    return [r.tokens_per_second for r in results if (r.way, r.num_sequences) == (way, num_sequences)]


def main(
    sequences: Annotated[str, typer.Option(help="Numbers of streams, comma-separated.")] = "1,256",
    tokens: Annotated[str, typer.Option(help="Tokens of each sequence, per number of streams.")] = "1000,64",
    repeats: Annotated[int, typer.Option(help="Runs of each way.")] = 5,
    branches: Annotated[int, typer.Option(help="draft.max_branches at most.")] = 256,
    acceptance: Annotated[float, typer.Option(help="Of the emulated draft.")] = 0.8,
    near: Annotated[float, typer.Option(help="How often a correction is among its next three.")] = 0.8,
    name: Annotated[str, typer.Option(help="Name of the JSON file.")] = "emulated",
) -> None:
    """Run it, print the table, write results/<name>.json."""
    models = replace(Models(), acceptance=acceptance, near=near)
    loads = list(
        zip((int(n) for n in sequences.split(",")), (int(n) for n in tokens.split(",")), strict=True)
    )
    with services(models, branches) as found:
        results = asyncio.run(run_all(found, loads, repeats, models))
    settings = {"models": asdict(models), "loads": loads, "repeats": repeats, "network": "loopback"}
    report(results, models, name, json.loads(json.dumps(settings)))


if __name__ == "__main__":
    typer.run(main)
