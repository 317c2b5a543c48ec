"""A target and its draft in network namespaces of their own, joined by a network that delays and loses.

    python -m tests.integration.narrow_network EXPERIMENT

A process of its own, started in a fresh network namespace (see ``command``): the target's and its caller's.
The draft's is joined to it by two TUN devices and ``packet_forwarder``. Models are those of
``benchmarks.emulated``. Prints one line of JSON: what each run gave.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.emulated import (
    SERVICES,
    Listener,
    Models,
    Service,
    attached,
    child,
    run_draft,
    run_target,
    submit_all,
)
from paceline.actors.draft import DraftSpec
from paceline.actors.engine.config import DraftEngineConfig, NgramConfig, TargetEngineConfig
from paceline.actors.engine.messages import Committed
from paceline.actors.model_spec import ModelSpec
from paceline.actors.target import TargetSpec
from tests.integration.network_namespaces import apart, enter, ip, new_namespace, unavailable

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
TARGET_ADDRESS, DRAFT_ADDRESS = "192.0.2.1", "192.0.2.2"


@dataclass(frozen=True)
class Network:
    seconds: float
    """Each way."""
    loss: float
    """Of the packets, each way."""


@dataclass(frozen=True)
class Experiment:
    """Plain and drafted runs in turn."""

    network: Network
    service: str
    """Of ``benchmarks.emulated.SERVICES``: what the target takes its hardware for."""
    loads: tuple[tuple[int, int], ...]
    """Sequences at a time, and tokens of each."""
    repeats: int


@dataclass(frozen=True)
class Run:
    """One way with one load."""

    drafted: bool
    num_sequences: int
    seed: int
    token_ids: list[list[int]]
    tokens_per_second: float
    """Per sequence, while all of them run."""
    num_rounds: int
    num_accepted: int
    num_late: int
    """Steps of a sequence that began without any token of its draft, which had been asked for some."""


# ---------------------------------------------------------------- the network


def why_not() -> str:
    """Why there can be no such network here; empty: there can."""
    return unavailable("import os; os.open('/dev/net/tun', os.O_RDWR)")


def command(experiment: Experiment) -> list[str]:
    module = [sys.executable, "-m", "tests.integration.narrow_network"]
    return apart([*module, json.dumps(asdict(experiment))])


def open_device(address: str, peer: str) -> int:
    """A TUN device in the calling thread's namespace."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"far", IFF_TUN | IFF_NO_PI))
    ip("link set dev lo up", f"address add {address} peer {peer} dev far", "link set dev far up")
    return device


@contextlib.contextmanager
def joined(network: Network, seed: int) -> Iterator[int]:
    """The draft's namespace, as an open file. The caller's is the target's."""
    ours = open_device(TARGET_ADDRESS, DRAFT_ADDRESS)
    namespace, theirs = new_namespace(lambda: open_device(DRAFT_ADDRESS, TARGET_ADDRESS))
    forwarder = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.packet_forwarder"]
        + [str(argument) for argument in (ours, theirs, network.seconds, network.loss, seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(ours, theirs),
        text=True,
    )
    try:
        yield namespace
        assert forwarder.poll() is None, "the network is gone"
    finally:
        passed, _ = forwarder.communicate()
        print(f"packets passed on and lost: {passed.strip()}", file=sys.stderr)
        for file in (ours, theirs, namespace):
            os.close(file)


# ---------------------------------------------------------------- the processes


def run_draft_apart(namespace: str, spec: DraftSpec, targets: dict[str, str], parent: Connection) -> None:
    # Before there is any other thread that could open a socket.
    file = os.open(namespace, os.O_RDONLY)
    enter(file)
    os.close(file)
    run_draft(spec, targets, parent)


@contextlib.contextmanager
def pair(name: str, namespace: int, models: Models) -> Iterator[Service]:
    hardware, num_branches = SERVICES[name]
    target = TargetSpec(
        name,
        ModelSpec(models.target, num_threads=1, num_blocks=1 << 13),
        engine=TargetEngineConfig(ngram=NgramConfig(enabled=False), hardware=hardware),
    )
    draft = DraftSpec(
        f"draft of {name}",
        ModelSpec(models.draft, num_threads=1, num_blocks=1 << 13),
        engine=DraftEngineConfig(max_branches=num_branches),
    )
    with child(run_target, target, TARGET_ADDRESS) as to_target:
        address = to_target.recv()
        apart = f"/proc/{os.getpid()}/fd/{namespace}"
        with child(run_draft_apart, apart, draft, {name: address}) as to_draft:
            to_draft.recv()
            yield Service(address, to_target, to_draft)


# ---------------------------------------------------------------- one run


@dataclass
class Reader(Listener):
    token_ids: dict[str, list[int]] = field(default_factory=dict)

    def on_committed(self, target_id: str, committed: Committed) -> None:
        super().on_committed(target_id, committed)
        self.token_ids.setdefault(committed.sequence_id, []).extend(committed.token_ids)


async def ask(service: Service, drafted: bool, num_sequences: int, num_tokens: int, seed: int) -> Run:
    reader = Reader(num_sequences)
    names = [f"{seed}-{drafted}-{index}" for index in range(num_sequences)]
    async with attached(service, f"run-{seed}-{drafted}", reader) as client:
        before, _ = service.status()
        submit_all(client, names, num_tokens, seed, drafted=drafted)
        await reader.done.wait()
        after, _ = service.status()

    def counted(name: str) -> int:
        return int(after[name] - before[name])

    return Run(
        drafted=drafted,
        num_sequences=num_sequences,
        seed=seed,
        token_ids=[reader.token_ids[name] for name in names],
        tokens_per_second=reader.tokens_per_second,
        num_rounds=counted("num_rounds_total"),
        num_accepted=counted("num_accepted_tokens_total"),
        num_late=counted("num_late_drafts_total"),
    )


async def ask_all(experiment: Experiment, service: Service) -> list[Run]:
    runs: list[Run] = []
    for num_sequences, num_tokens in experiment.loads:
        await ask(service, True, num_sequences, num_tokens, seed=0)  # what it needs to learn first
        for seed in range(1, experiment.repeats + 1):
            for drafted in (seed % 2 == 0, seed % 2 == 1):
                run = await ask(service, drafted, num_sequences, num_tokens, seed)
                runs.append(run)
    return runs


def main(content: dict[str, Any]) -> None:
    content["network"] = Network(**content["network"])
    experiment = Experiment(**content)
    with (
        joined(experiment.network, seed=1) as namespace,
        pair(experiment.service, namespace, Models()) as service,
    ):
        runs = asyncio.run(ask_all(experiment, service))
    print(json.dumps([asdict(run) for run in runs]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
