"""Targets, drafts and a gateway in one process, over real gRPC streams."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.actors.channels import ChannelSettings
from paceline.actors.draft import DraftActor, DraftSpec
from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.config import DraftEngineConfig, NgramConfig, TargetEngineConfig
from paceline.actors.engine.emulated import EmulatedRunner
from paceline.actors.engine.messages import Committed, Finished, Load, Submit
from paceline.actors.engine.parameters import SamplingParams, SpeculationParams, StoppingParams
from paceline.actors.execution_client import ExecutionClient
from paceline.actors.model_spec import ModelSpec
from paceline.actors.target import TargetActor, TargetSpec

TARGET_MODEL = "emulated://target?vocab_size=256&seed=7&base_ms=2"
DRAFT_MODEL = "emulated://draft?vocab_size=256&seed=7&base_ms=0.5&acceptance=0.7"

TARGET_ENGINE = TargetEngineConfig(num_speculative_tokens=4, ngram=NgramConfig(enabled=False))


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Returns once the condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class Gateway:
    """Keeps what targets say, by sequence."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.positions: dict[str, int] = {}
        self.finished: dict[str, Finished] = {}
        self.loads: dict[str, Load] = {}
        self.lost: dict[str, str] = {}
        self.changed = asyncio.Event()

    def on_committed(self, target_id: str, committed: Committed) -> None:
        expected = self.positions.get(committed.sequence_id, committed.base_position)
        assert committed.base_position == expected, "committed tokens have a gap"
        self.positions[committed.sequence_id] = expected + len(committed.token_ids)
        self.tokens[committed.sequence_id].extend(committed.token_ids)
        self.changed.set()

    def on_finished(self, target_id: str, finished: Finished) -> None:
        self.finished[finished.sequence_id] = finished
        self.changed.set()

    def on_load(self, target_id: str, load: Load) -> None:
        self.loads[target_id] = load

    def on_lost(self, target_id: str, reason: str) -> None:
        self.lost[target_id] = reason
        self.changed.set()

    async def finish(self, sequence_id: str, seconds: float = 20.0) -> list[int]:
        async with asyncio.timeout(seconds):
            while sequence_id not in self.finished:
                assert not self.lost, self.lost
                self.changed.clear()
                await self.changed.wait()
        return self.tokens[sequence_id]


def make_submit(sequence_id: str, prompt: Sequence[int], max_tokens: int = 40, **sampling: Any) -> Submit:
    return Submit(
        sequence_id=sequence_id,
        epoch=0,
        token_ids=tuple(prompt),
        prompt_length=len(prompt),
        sampling=SamplingParams(**({"temperature": 0.0} | sampling)),
        stopping=StoppingParams(max_tokens=max_tokens),
        speculation=SpeculationParams(),
    )


def greedy_reference(prompt: Sequence[int], max_tokens: int = 40) -> list[int]:
    """Plain greedy decoding of the emulated target, one token at a time."""
    runner = EmulatedRunner.from_source(
        "emulated://target?vocab_size=256&seed=7&base_ms=0", num_blocks=64, block_size=16
    )
    token_ids = list(prompt)
    for _ in range(max_tokens):
        piece = SequenceSlice([token_ids[-1]], len(token_ids) - 1, list(range(64)), 1)
        token_ids.append(int(runner.forward([piece]).argmax()))
    return token_ids[len(prompt) :]


class Pool:
    """Starts actors and clients, and stops them all."""

    Gateway = Gateway
    until = staticmethod(until)
    make_submit = staticmethod(make_submit)
    greedy_reference = staticmethod(greedy_reference)

    def __init__(self) -> None:
        self.targets: dict[str, TargetActor] = {}
        self.drafts: list[DraftActor] = []
        self.clients: list[ExecutionClient] = []
        self.gateway = Gateway()
        self._ids = itertools.count()

    async def discover(self) -> dict[str, str]:
        return {target_id: target.address for target_id, target in self.targets.items()}

    async def target(self, **changes: Any) -> TargetActor:
        spec = TargetSpec(
            target_id=f"target-{next(self._ids)}",
            model=ModelSpec(TARGET_MODEL, num_threads=1, num_blocks=512),
            engine=TARGET_ENGINE,
        )
        target = TargetActor(replace(spec, **changes))
        await target.start()
        self.targets[target.spec.target_id] = target
        return target

    async def draft(self, *, attach: bool = True, **changes: Any) -> DraftActor:
        spec = DraftSpec(
            draft_id=f"draft-{next(self._ids)}",
            model=ModelSpec(DRAFT_MODEL, num_threads=1, num_blocks=512),
            engine=DraftEngineConfig(max_num_seqs=32),
            discovery_seconds=0.1,
        )
        draft = DraftActor(replace(spec, **changes), self.discover)
        await draft.start()
        self.drafts.append(draft)
        if attach:
            await self.attached(draft)
        return draft

    async def generate_all(
        self, clients: Sequence[ExecutionClient], prompts: Sequence[Sequence[int]], max_tokens: int = 40
    ) -> list[list[int]]:
        """Spread the prompts over the clients, all at once; their completions."""
        ids = [f"sequence-{next(self._ids)}" for _ in prompts]
        for index, (sequence_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
            clients[index % len(clients)].submit(make_submit(sequence_id, prompt, max_tokens))
        return [await self.gateway.finish(sequence_id) for sequence_id in ids]

    async def attached(self, draft: DraftActor) -> None:
        async with asyncio.timeout(10.0):
            while True:
                targets = (await draft.status())["targets"]
                if len(targets) == len(self.targets) and all(item["attached"] for item in targets.values()):
                    return
                await asyncio.sleep(0.01)

    async def detached(self, draft: DraftActor) -> None:
        """A target is rid of its drafts before they have heard of it: wait for the draft's own word."""
        async with asyncio.timeout(10.0):
            while (await draft.status())["targets"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def client(
        self,
        target: TargetActor,
        settings: ChannelSettings | None = None,
        events: Gateway | None = None,
        address: str = "",
    ) -> ExecutionClient:
        client = ExecutionClient(
            address=address or target.address,
            gateway_id=f"gateway-{next(self._ids)}",
            events=events or self.gateway,
            settings=settings,
        )
        await client.attach()
        self.clients.append(client)
        return client

    async def stop(self) -> None:
        for client in self.clients:
            await client.close()
        for draft in self.drafts:
            await draft.stop()
        for target in self.targets.values():
            await target.stop(0.0)


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    """Afterwards neither a task nor an engine's thread may be left."""
    tasks_before = asyncio.all_tasks()
    pool = Pool()
    yield pool
    await pool.stop()
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - tasks_before - {asyncio.current_task()}
    assert not left, left
    assert not [thread.name for thread in threading.enumerate() if "engine" in thread.name]
