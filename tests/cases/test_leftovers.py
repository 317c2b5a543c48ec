"""Requests that end in every way leave nothing behind: no block, no task, no thread, no stream, no open file
and no memory."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

import psutil
import pytest
import torch

from paceline.actors import model_spec
from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.config import TargetEngineConfig
from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.model_spec import LoadedModel, ModelSpec, WarmableRunner
from paceline.cluster.errors import TargetFailedError, TimeExceededError
from tests.cases.conftest import TinyModels
from tests.cases.service import NO_LOOKUP, Service, until
from tests.cases.test_output_equality import greedy

pytestmark = pytest.mark.asyncio(loop_scope="package")

POISON = 255
"""A prompt of this token alone is what the model cannot compute: its logits are not numbers."""

CONCURRENCY = 32
NUM_BLOCKS = 32
"""Of 16 tokens each: more than any request asks for, and far less than all of them together."""

WAYS = ("finished", "stopped", "left", "refused", "failed", "late")


class PoisonedRunner:
    def __init__(self, runner: WarmableRunner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        logits = self._runner.forward(batch).clone()
        row = 0
        for piece in batch:
            if piece.start == 0 and piece.token_ids[0] == POISON:
                logits[row : row + piece.num_logits] = torch.nan
            row += piece.num_logits
        return logits


def load_poisoned(spec: ModelSpec, *, max_num_batched_tokens: int) -> LoadedModel:
    loaded = model_spec.load(spec, max_num_batched_tokens=max_num_batched_tokens)
    return replace(loaded, runner=cast(WarmableRunner, PoisonedRunner(loaded.runner)))


def small_service(tiny: TinyModels) -> Service:
    return Service(
        tiny.target,
        tiny.drafts["noised"],
        num_blocks=NUM_BLOCKS,
        target_engine=TargetEngineConfig(
            max_num_batched_tokens=512, num_speculative_tokens=4, ngram=NO_LOOKUP
        ),
        load_target=load_poisoned,
    )


async def run_one(service: Service, way: str, rng: random.Random) -> None:
    """One request that ends in this way."""
    prompt = [rng.randrange(POISON) for _ in range(rng.randint(1, 30))]
    options = greedy(prompt, rng.choice([3, 10, 80]), rng.randint(0, 8)) | {"priority": rng.randint(-2, 2)}
    if way == "finished":
        answer = await service.stream(**options)
        assert len(answer.token_ids) == options["max_tokens"]
    elif way == "stopped":
        answer = await service.stream(**options, stop_token_ids=range(0, 256, 8), stop=["e"])
        assert 0 < len(answer.token_ids) <= options["max_tokens"]
    elif way == "left":
        num_chunks = rng.randint(1, 4)
        async with aclosing(service.chunks(**options | {"max_tokens": 300})) as chunks:
            async for _ in chunks:
                num_chunks -= 1
                if not num_chunks:
                    break
    elif way == "refused":
        with pytest.raises(InvalidArgumentError):
            await service.stream(**options | {"max_tokens": 10_000})
    elif way == "failed":
        with pytest.raises(TargetFailedError):
            await service.stream(**greedy([POISON], 8))
    else:
        with pytest.raises(TimeExceededError):
            await service.stream(**options | {"max_tokens": 400}, timeout_s=0.02 * rng.random() + 0.001)


async def run_all(service: Service, num_requests: int, seed: int) -> Counter[str]:
    """So many requests at random, of any priority; how many ended in each way."""
    rng = random.Random(seed)
    places = asyncio.Semaphore(CONCURRENCY)
    ended: Counter[str] = Counter()

    async def run(way: str, own: random.Random) -> None:
        async with places:
            await run_one(service, way, own)
            ended[way] += 1

    await asyncio.gather(
        *(run(rng.choice(WAYS), random.Random(rng.getrandbits(64))) for _ in range(num_requests))
    )
    return ended


@dataclass(frozen=True)
class Footprint:
    """What a process holds besides memory."""

    num_tasks: int
    num_threads: int
    num_files: int
    num_streams: int
    """Of gateways and drafts, at the targets."""

    @classmethod
    def now(cls, service: Service) -> Footprint:
        servicers = [(target._execution, len(target.drafts)) for target in service.targets.values()]
        return cls(
            len(asyncio.all_tasks()),
            threading.active_count(),
            psutil.Process().num_fds(),
            sum(
                num_drafts + (execution.num_gateways if execution else 0)
                for execution, num_drafts in servicers
            ),
        )

    def exceeds(self, other: Footprint) -> bool:
        return (
            self.num_tasks > other.num_tasks
            or self.num_threads > other.num_threads
            or self.num_files > other.num_files
            or self.num_streams != other.num_streams
        )


async def check_nothing_is_left(service: Service, before: Footprint) -> None:
    await service.wait_until_idle()
    await until(lambda: not Footprint.now(service).exceeds(before), what=f"as before: {before}", seconds=5.0)


async def test_every_block_comes_back(tiny: TinyModels) -> None:
    """B16: 200 requests that end in every way."""
    async with small_service(tiny) as service:
        await run_all(service, 60, seed=1)
        await service.wait_until_idle()
        before = Footprint.now(service)
        ended = await run_all(service, 200, seed=2)
        assert min(ended[way] for way in WAYS) > 15
        await check_nothing_is_left(service, before)
        (target,) = await service.target_state()
        assert target["num_preemptions_total"] > 0
        assert target["num_draft_tokens_total"] > target["num_accepted_tokens_total"] > 0


@pytest.mark.heavy
@pytest.mark.timeout(1800)
async def test_ten_thousand_requests_leave_nothing(
    tiny: TinyModels, caplog: pytest.LogCaptureFixture
) -> None:
    """After a thousand of them memory has its size: nine thousand more add less than 5 %."""
    caplog.set_level(logging.CRITICAL, "paceline")  # Else every failure is kept for the report.
    process = psutil.Process()
    async with small_service(tiny) as service:
        ended = await run_all(service, 1000, seed=3)
        await service.wait_until_idle()
        gc.collect()
        memory = process.memory_info().rss
        before = Footprint.now(service)
        ended += await run_all(service, 9000, seed=4)
        await check_nothing_is_left(service, before)
        gc.collect()
        assert process.memory_info().rss < 1.05 * memory
        assert ended.total() == 10_000
        assert min(ended[way] for way in WAYS) > 1000
        (target,) = await service.target_state()
        assert target["num_preemptions_total"] > 20
        print(
            f"rss {memory / 2**20:.1f} -> {process.memory_info().rss / 2**20:.1f} MiB, {before}, "
            f"{target['num_preemptions_total']} preemptions, {dict(ended)}"
        )
