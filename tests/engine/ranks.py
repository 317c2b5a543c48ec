"""The other ranks of a shard group, as processes beside the test, which leads."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import PreTrainedModel

from paceline.actors.engine.loading import load_model
from paceline.actors.engine.model_runner import TransformersRunner
from paceline.actors.engine.shard_group import ShardGroup, ShardMember, Store, leave_group, open_store

BLOCK_SIZE = 16
NUM_BLOCKS = 256
HOST = "127.0.0.1"
TIMEOUT_SECONDS = 30.0
START_TIMEOUT_SECONDS = 120.0

QUIET_THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}


@dataclass(frozen=True)
class Job:
    """One group that a rank takes part in."""

    folder: str
    member: ShardMember
    device: str
    options: Mapping[str, Any]
    """Of ``load_model``, its dtype included."""


@dataclass(frozen=True)
class Rank:
    """One rank that is ready to step."""

    runner: TransformersRunner
    group: ShardGroup
    model: PreTrainedModel

    @property
    def num_weights(self) -> int:
        """Elements of this rank's parameters, packed ones not included."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def device_of(device_type: str, rank: int) -> torch.device:
    """A GPU of its own for each rank, as long as there are enough."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def bring_up(job: Job, store: Store | None = None) -> Rank:
    """Join, load, and be ready for steps."""
    device = device_of(job.device, job.member.rank)
    group = ShardGroup.join(job.member, device, store)
    options = dict(job.options)
    dtype = options.pop("dtype", torch.float32)
    model = load_model(job.folder, dtype, device, group=group, **options)
    group.meet("loaded")
    runner = TransformersRunner(
        model,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        device=device,
        announce=group.announcer(BLOCK_SIZE) if group.is_leader else None,
    )
    return Rank(runner, group, model)


def _play(connection: Connection) -> None:
    """Take jobs until there are none, and follow in each to its end."""
    torch.set_num_threads(1)
    while (job := connection.recv()) is not None:
        rank = bring_up(job)
        connection.send({"weights": rank.num_weights, "kv_cache_bytes": rank.runner.kv_cache_bytes})
        while (batch := rank.group.receive()) is not None:
            rank.runner.forward(batch)
        leave_group()
        connection.send("done")


class Followers:
    """Processes that play ranks 1, 2, … of one group after the other. Started when first needed."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    @contextlib.contextmanager
    def lead(
        self,
        folder: str,
        size: int,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        lost: bool = False,
        **options: Any,
    ) -> Iterator[tuple[Rank, list[Any]]]:
        """A group of ``size`` ranks, this process leading: (own rank, what the others say of theirs).

        Args:
            lost: the test breaks the group, so that none of them comes to a good end.
        """
        self._start(size - 1)
        store = open_store(HOST, START_TIMEOUT_SECONDS)
        jobs = [
            Job(
                folder,
                ShardMember(rank, size, HOST, store.port, timeout_seconds, START_TIMEOUT_SECONDS),
                self.device,
                options,
            )
            for rank in range(size)
        ]
        connections = self._connections[: size - 1]
        for connection, job in zip(connections, jobs[1:], strict=True):
            connection.send(job)
        done = False
        try:
            rank = bring_up(jobs[0], store)
            yield rank, [connection.recv() for connection in connections]
            if not lost:
                rank.group.close()
                assert [connection.recv() for connection in connections] == ["done"] * (size - 1)
                done = True
        finally:
            if not done:
                # Whatever state they are in: the next test gets others.
                self.stop()
            leave_group()

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank that is not the leader."""
        os.kill(self._processes[rank - 1].pid, number)

    def stop(self) -> None:
        """End the processes, in whatever state they are."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes.clear()
        self._connections.clear()

    def _start(self, count: int) -> None:
        before = {name: os.environ.get(name) for name in QUIET_THREADS}
        os.environ.update(QUIET_THREADS)
        try:
            while len(self._processes) < count:
                connection, far_end = self._context.Pipe()
                process = self._context.Process(target=_play, args=(far_end,), daemon=True)
                process.start()
                far_end.close()
                self._processes.append(process)
                self._connections.append(connection)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
