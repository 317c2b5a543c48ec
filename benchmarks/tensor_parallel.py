"""What dividing a target among ranks costs: the share of a step that goes into broadcast and collectives.

    python -m benchmarks.tensor_parallel --model qwen2.5-coder-1.5b-instruct --size 2

Each rank is a process with its share of the cores. For several kinds of steps it prints the step's time
beside that of the undivided model on all cores, and where the time goes on the leader: the broadcast of the
batch, the sums after row-wise layers, the output layer's gathering. Of what the collectives take, *transfer*
is what the same exchanges take with nothing else going on; the rest is waiting for the other ranks.
"""

from __future__ import annotations

import os

# As in the service: a thread that spins while it waits would steal the others' time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.report import load_average, print_table, quartiles, write_json

if TYPE_CHECKING:
    import torch

    from paceline.actors.engine.batch import ModelRunner, SequenceSlice
    from paceline.actors.engine.shard_group import ShardGroup, ShardMember
    from paceline.actors.model_spec import ModelSpec

HOST = "127.0.0.1"
CONTEXT = 128
"""Tokens in the cache before a step, of each sequence."""
BLOCK_SIZE = 16
BROADCAST, ROWS, OUTPUT = "broadcast", "row-wise sums", "output layer"

KINDS = {
    "decode, 1 sequence": (1, 1),
    "decode, 4 sequences": (4, 1),
    "decode, 16 sequences": (16, 1),
    "tails of 4, 4 sequences": (4, 5),
    "tails of 4, 16 sequences": (16, 5),
    "prompt chunk of 256": (1, 256),
}
"""Name -> sequences of the step, and tokens of each."""


@dataclass
class Step:
    """One kind of step: seconds of each repetition."""

    name: str
    undivided: list[float] = field(default_factory=list)
    divided: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in (BROADCAST, ROWS, OUTPUT)}
    )
    """Part -> what the leader spent in it."""
    transfer: float = 0.0
    """Of the collectives of one step, with nothing else going on."""

    @property
    def share(self) -> float:
        """Of the step, spent in broadcast and collectives."""
        return sum(sum(times) for times in self.parts.values()) / sum(self.divided)


class Recorder:
    """Times each exchange of a group, by its kind."""

    def __init__(self, group: ShardGroup, hidden_size: int) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.shapes: list[torch.Size] = []
        gather, announce = group.gather, group.announce

        def timed_gather(part: torch.Tensor) -> torch.Tensor:
            began = time.perf_counter()
            parts = gather(part)
            name = ROWS if part.shape[-1] == hidden_size else OUTPUT
            self.spent[name] += time.perf_counter() - began
            self.shapes.append(part.shape)
            return parts

        def timed_announce(batch: Sequence[SequenceSlice], block_size: int) -> None:
            began = time.perf_counter()
            announce(batch, block_size)
            self.spent[BROADCAST] += time.perf_counter() - began

        # Instances only: what the model's layers hold is this group.
        group.gather = timed_gather  # type: ignore[method-assign]
        group.announce = timed_announce  # type: ignore[method-assign]

    def reset(self) -> None:
        self.spent.clear()
        self.shapes.clear()


def batch_of(num_sequences: int, num_tokens: int) -> list[SequenceSlice]:
    from paceline.actors.engine.batch import SequenceSlice

    blocks = -(-(CONTEXT + num_tokens) // BLOCK_SIZE)
    num_logits = num_tokens if num_tokens <= 8 else 1
    return [
        SequenceSlice(
            [(31 * index + place) % 250 for place in range(num_tokens)],
            CONTEXT,
            range(index * blocks, (index + 1) * blocks),
            num_logits,
        )
        for index in range(num_sequences)
    ]


def timed_steps(runner: ModelRunner, batch: list[SequenceSlice], repetitions: int) -> Iterator[float]:
    for repetition in range(repetitions + 1):
        began = time.perf_counter()
        runner.forward(batch)
        if repetition:  # the first compiles kernels
            yield time.perf_counter() - began


def follow(spec: ModelSpec, member: ShardMember, exchanges: Any) -> None:
    """The other ranks: all steps, then the bare exchanges that the leader names."""
    from paceline.actors.model_spec import load_shard

    runner, group = load_shard(spec, member)
    while (batch := group.receive()) is not None:
        runner.forward(batch)
    bare_exchanges(group, exchanges.get())


def bare_exchanges(group: ShardGroup, steps: list[list[tuple[int, ...]]]) -> list[float]:
    """Seconds that each step's exchanges take with nothing else going on: the median of five."""
    import torch

    results = []
    for shapes in steps:
        parts = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
        times = []
        for _ in range(5):
            began = time.perf_counter()
            for part in parts:
                group.gather(part)
            times.append(time.perf_counter() - began)
        results.append(statistics.median(times))
    return results


@contextmanager
def followers(
    target: Callable[..., None], spec: ModelSpec, members: Sequence[ShardMember]
) -> Iterator[list[Any]]:
    """A process for each member, with a queue to each."""
    context = multiprocessing.get_context("spawn")
    queues = [context.Queue() for _ in members]
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(spec.num_threads)
    processes = [
        context.Process(target=target, args=(spec, member, queue), daemon=True)
        for member, queue in zip(members, queues, strict=True)
    ]
    for process in processes:
        process.start()
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    try:
        yield queues
    finally:
        for process in processes:
            process.join(30.0)
            process.kill()


def main(
    model: Annotated[str, typer.Option(help="Target.")] = "qwen2.5-coder-1.5b-instruct",
    size: Annotated[int, typer.Option(help="Ranks.")] = 2,
    repetitions: Annotated[int, typer.Option(help="Steps of each kind.")] = 20,
    dtype: Annotated[str, typer.Option(help="Number format.")] = "bfloat16",
) -> None:
    from paceline.actors.engine.shard_group import ShardMember, open_store
    from paceline.actors.model_spec import ModelSpec, load

    cores = os.cpu_count() or 1
    most = max(num_sequences for num_sequences, _ in KINDS.values())
    num_blocks = most * (CONTEXT + 16) // BLOCK_SIZE + 64
    whole = ModelSpec(model, dtype=dtype, device="cpu", num_threads=cores, num_blocks=num_blocks)
    steps = {name: Step(name) for name in KINDS}
    before = load_average()
    loaded = load(whole, max_num_batched_tokens=256)
    for name, kind in KINDS.items():
        steps[name].undivided = list(timed_steps(loaded.runner, batch_of(*kind), repetitions))
    del loaded

    spec = replace(whole, num_threads=max(1, cores // size))
    store = open_store(HOST, 600.0)
    members = [ShardMember(rank, size, HOST, store.port, timeout_seconds=60.0) for rank in range(size)]
    exchanges = []
    with followers(follow, spec, members[1:]) as queues:
        divided = load(spec, max_num_batched_tokens=256, member=members[0], store=store)
        group = divided.group
        assert group is not None
        recorder = Recorder(group, hidden_size(model))
        for name, kind in KINDS.items():
            batch = batch_of(*kind)
            divided.runner.forward(batch)
            for _ in range(repetitions):
                recorder.reset()
                began = time.perf_counter()
                divided.runner.forward(batch)
                steps[name].divided.append(time.perf_counter() - began)
                for part, spent in recorder.spent.items():
                    steps[name].parts[part].append(spent)
            exchanges.append([tuple(shape) for shape in recorder.shapes])
        group.close()
        for queue in queues:
            queue.put(exchanges)
        transfers = bare_exchanges(group, exchanges)
    for step, transfer in zip(steps.values(), transfers, strict=True):
        step.transfer = transfer
    show(list(steps.values()), model, size, cores, before)


def hidden_size(model: str) -> int:
    from paceline.actors import weights
    from paceline.actors.engine.loading import load_model_config

    return int(load_model_config(weights.resolve(model)).get_text_config().hidden_size)


def show(steps: list[Step], model: str, size: int, cores: int, load_before: float) -> None:
    def milliseconds(times: Sequence[float]) -> str:
        return f"{1e3 * quartiles(times)[1]:.2f}" if times else "-"

    rows = [
        (
            step.name,
            milliseconds(step.undivided),
            milliseconds(step.divided),
            milliseconds(step.parts[BROADCAST]),
            milliseconds(step.parts[ROWS]),
            milliseconds(step.parts[OUTPUT]),
            f"{1e3 * step.transfer:.2f}",
            f"{100 * step.share:.0f} %",
        )
        for step in steps
    ]
    print_table(
        f"{model}, {size} ranks of {max(1, cores // size)} threads, medians in ms (load {load_before:.1f})",
        ("step", f"1 rank, {cores} threads", f"{size} ranks", BROADCAST, ROWS, OUTPUT, "transfer", "share"),
        rows,
    )
    broadcasts = [seconds for step in steps for seconds in step.parts[BROADCAST]]
    print(f"broadcast of a step, p50: {1e3 * statistics.median(broadcasts):.3f} ms")
    write_json(
        "tensor_parallel",
        {
            "model": model,
            "size": size,
            "load_before": load_before,
            "broadcast_p50_ms": 1e3 * statistics.median(broadcasts),
            "steps": [asdict(step) | {"share": step.share} for step in steps],
        },
    )


if __name__ == "__main__":
    typer.run(main)
