"""The whole gateway on real target engines over real gRPC."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest

from paceline.actors.engine.config import TargetEngineConfig
from paceline.cluster.errors import OverloadedError
from paceline.cluster.gateway import Gateway
from paceline.cluster.requests import ServedModel, check_request
from paceline.cluster.service import GenerationLogic, ServiceInfo
from paceline.cluster.tokenization import EmulatedCodec
from paceline.protos import generation_pb2 as proto
from tests.cluster.engine_target import EngineTarget, reference_token_ids

SOURCE = "emulated://toy?vocab_size=256&base_ms=3&support=8&seed=1&max_model_len=512"
MODEL = ServedModel("toy", vocab_size=256, max_model_len=512, eos_token_ids=())


class Cluster:
    def __init__(self, targets: dict[str, EngineTarget]) -> None:
        self.targets = targets
        self.gateway = Gateway("gateway")
        self.logic = GenerationLogic(self.gateway, EmulatedCodec(256), ServiceInfo("toy"))

    async def start(self) -> None:
        self.gateway.update_targets({name: await target.start() for name, target in self.targets.items()})
        while len(await self.gateway.identities()) < len(self.targets):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Nothing may be left of any request, here or there."""
        assert self.gateway.snapshot().num_live == 0
        await self.gateway.close()
        self.logic.close()
        for target in self.targets.values():
            await eventually(target, lambda snapshot: snapshot.num_running + snapshot.num_waiting == 0)
            await eventually(target, lambda snapshot: snapshot.free_blocks == snapshot.total_blocks)
            await target.kill()


async def eventually(target: EngineTarget, holds: Callable[..., bool]) -> None:
    async with asyncio.timeout(5):
        while not holds(await target.snapshot()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster({name: EngineTarget(name, SOURCE) for name in ("a", "b")})
    await cluster.start()
    yield cluster
    await cluster.stop()


def request(seed: int, max_tokens: int = 40, stop: tuple[str, ...] = ()) -> proto.GenerateRequest:
    return proto.GenerateRequest(
        prompt=f"prompt {seed}",
        sampling=proto.SamplingParams(seed=seed),
        stopping=proto.StoppingParams(max_tokens=max_tokens, stop=stop),
    )


def expected(message: proto.GenerateRequest) -> list[int]:
    return reference_token_ids(
        SOURCE.replace("base_ms=3&", ""), check_request(message, message.prompt.encode(), MODEL)
    )


async def test_unary_and_stream_equal_the_engines_own_answer(cluster: Cluster) -> None:
    message = request(3)
    response = await cluster.logic.generate(message)
    chunks = [chunk async for chunk in cluster.logic.generate_stream(message)]
    assert list(response.choices[0].token_ids) == expected(message)
    assert [i for chunk in chunks for i in chunk.token_ids] == expected(message)
    assert "".join(chunk.text for chunk in chunks) == response.choices[0].text
    assert chunks[-1].usage == response.usage


async def test_sixteen_streams_survive_the_death_of_one_of_two_targets(cluster: Cluster) -> None:
    messages = [request(seed) for seed in range(16)]
    num_tokens = 0
    killed = asyncio.Event()

    async def read(message: proto.GenerateRequest) -> list[int]:
        nonlocal num_tokens
        token_ids: list[int] = []
        async for chunk in cluster.logic.generate_stream(message):
            token_ids.extend(chunk.token_ids)
            num_tokens += len(chunk.token_ids)
            if num_tokens > 16 * 10 and not killed.is_set():
                killed.set()
                await cluster.targets.pop("a").kill()
        return token_ids

    results = await asyncio.gather(*(read(message) for message in messages))
    assert results == [expected(message) for message in messages]
    assert cluster.gateway.snapshot().num_failovers == 8


async def test_mass_cancellation_frees_the_targets(cluster: Cluster) -> None:
    rng = random.Random(4)

    async def leave_early(seed: int) -> None:
        async with aclosing(cluster.logic.generate_stream(request(seed, max_tokens=400))) as chunks:
            async for _ in chunks:
                pass

    tasks = [asyncio.create_task(leave_early(seed)) for seed in range(60)]
    for task in tasks:
        asyncio.get_running_loop().call_later(rng.uniform(0, 0.3), task.cancel)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    for target in cluster.targets.values():
        await eventually(target, lambda snapshot: snapshot.num_running + snapshot.num_waiting == 0)
    message = request(99)
    assert list((await cluster.logic.generate(message)).choices[0].token_ids) == expected(message)


async def test_a_stop_string_frees_the_target_and_brings_its_statistics(cluster: Cluster) -> None:
    codec = EmulatedCodec(256)
    message = request(5, max_tokens=400)
    token_ids = expected(message)
    text = codec.decode(token_ids)
    position = next(i for i, character in enumerate(text) if i > 12 and character != "\ufffd")
    stop = text[position]
    response = await cluster.logic.generate(request(5, max_tokens=400, stop=(stop,)))
    choice = response.choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == proto.FINISH_REASON_STOP
    assert list(choice.token_ids) == token_ids[: len(choice.token_ids)]
    assert codec.decode(list(choice.token_ids)).startswith(choice.text + stop)
    assert response.usage.completion_tokens == len(choice.token_ids) < 400


async def test_full_targets_answer_resource_exhausted_and_recover() -> None:
    config = TargetEngineConfig(max_num_seqs=1, max_num_waiting=1)
    cluster = Cluster({"a": EngineTarget("a", SOURCE, config)})
    await cluster.start()
    results = await asyncio.gather(
        *(cluster.logic.generate(request(seed, max_tokens=20)) for seed in range(8)), return_exceptions=True
    )
    answers = [result for result in results if isinstance(result, proto.GenerateResponse)]
    assert 1 <= len(answers) < 8
    assert all(isinstance(r, proto.GenerateResponse | OverloadedError) for r in results)
    assert len((await cluster.logic.generate(request(1))).choices[0].token_ids) == 40
    await cluster.stop()


async def test_priorities_reach_the_targets_queue() -> None:
    cluster = Cluster({"a": EngineTarget("a", SOURCE, TargetEngineConfig(max_num_seqs=1))})
    await cluster.start()
    order: list[int] = []

    async def ask(priority: int) -> None:
        message = request(priority + 10, max_tokens=10)
        message.priority = priority
        response = await cluster.logic.generate(message)
        order.append(priority)
        assert list(response.choices[0].token_ids) == expected(message)

    async with aclosing(cluster.logic.generate_stream(request(1, max_tokens=400))) as running:
        await anext(running)
        asked = [asyncio.create_task(ask(priority)) for priority in (0, 3, -1, 2, -4)]
        await eventually(cluster.targets["a"], lambda snapshot: snapshot.num_waiting == len(asked))
    await asyncio.gather(*asked)
    assert order == [-4, -1, 0, 2, 3]
    await cluster.stop()
