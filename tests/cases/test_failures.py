"""Parts that die, freeze or leave in the middle: every caller gets its tokens or an error, in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc
import pytest
import pytest_asyncio

from paceline.actors.channels import ChannelSettings
from paceline.actors.execution_client import ExecutionClient
from paceline.cluster.errors import UnavailableError, status_of
from paceline.cluster.gateway import Gateway, GatewaySettings
from paceline.cluster.service import GenerationLogic, ServiceInfo
from paceline.cluster.tokenization import EmulatedCodec
from tests.cases.conftest import TinyModels
from tests.cases.exercise import exercised, until_exercised
from tests.cases.process import Process
from tests.cases.service import Answer, Service, until
from tests.cases.test_output_equality import greedy
from tests.requests import request

pytestmark = pytest.mark.asyncio(loop_scope="package")


def two_of_each(tiny: TinyModels) -> Service:
    """Two targets, two drafts that agree in part."""
    return Service(tiny.target, tiny.drafts["noised"], num_targets=2, num_drafts=2)


def one_of_each(tiny: TinyModels) -> Service:
    """One target, one draft, and little patience."""
    settings = GatewaySettings(resume_timeout_seconds=0.5, attach_grace_seconds=0.2)
    return Service(tiny.target, tiny.drafts["equal"], settings=settings)


# ---------------------------------------------------------------- targets


@until_exercised
async def test_target_that_stops_midway_changes_no_token(tiny: TinyModels) -> None:
    """Sixteen requests on two targets; one goes, then the other is replaced by a new one."""
    prompts = tiny.reference.clear(([n, n + 1, n + 2] for n in range(0, 72, 4)), 100)[:16]
    assert len(prompts) == 16
    async with two_of_each(tiny) as service:
        running = asyncio.create_task(service.stream_all(*(greedy(prompt, 100, 4) for prompt in prompts)))
        first, second = service.targets
        await until(
            lambda: all(load.own_in_flight == 8 for load in service.gateway.snapshot().targets),
            what="both are busy",
        )
        await asyncio.sleep(0.1)
        await service.stop_target(first)
        await service.add_target()
        await service.wait_until_complete()
        exercised(not running.done(), "both targets go while requests run")
        await service.stop_target(second)
        answers = await running
        assert [answer.token_ids for answer in answers] == [
            tiny.reference.greedy(prompt, 100) for prompt in prompts
        ]
        exercised(service.gateway.snapshot().num_failovers >= 16, "every request is moved")
        exercised(sum(answer.speculation.accepted_tokens for answer in answers) > 0, "drafts are of use")


async def test_target_that_drains_finishes_what_it_has(tiny: TinyModels) -> None:
    prompts = [[n, 1] for n in range(8)]
    async with two_of_each(tiny) as service:
        running = asyncio.create_task(service.stream_all(*(greedy(prompt, 80, 4) for prompt in prompts)))
        await until(lambda: service.gateway.snapshot().num_placements == 8, what="all are placed")
        await service.stop_target(next(iter(service.targets)), grace=30.0)
        assert [answer.token_ids for answer in await running] == [
            tiny.reference.greedy(prompt, 80) for prompt in prompts
        ]
        assert service.gateway.snapshot().num_failovers == 0


@until_exercised
async def test_the_only_target_lost_midway_is_an_error_and_no_finish(tiny: TinyModels) -> None:
    """B66, B69: tokens so far, then a status; never a last chunk. Without a deadline of the caller's."""
    async with one_of_each(tiny) as service:
        answer = Answer()

        async def read() -> None:
            async for chunk in service.chunks(**greedy([7, 3, 9], 400, 4)):
                answer.add(chunk)

        running = asyncio.create_task(read())
        await until(lambda: answer.token_ids, what="the stream runs")
        await service.stop_target(*service.targets)
        async with asyncio.timeout(10):
            with pytest.raises(UnavailableError, match=r"target was lost"):
                await running
        assert answer.token_ids
        assert answer.token_ids == tiny.reference.greedy([7, 3, 9], 400)[: len(answer.token_ids)]
        assert not answer.last.finish_reason
        with pytest.raises(UnavailableError, match="no target is ready"):
            await service.generate("abc")
        # Another target makes all well.
        await service.add_target()
        await service.wait_until_complete()
        again = await service.stream(**greedy([7, 3, 9], 60, 4))
        assert again.token_ids == tiny.reference.greedy([7, 3, 9], 60)
        exercised(again.speculation.accepted_tokens > 0, "the draft serves the new target")


async def test_gateway_that_closes_ends_every_call_with_a_status(tiny: TinyModels) -> None:
    """B69: streams and unary calls, none with a deadline."""
    async with one_of_each(tiny) as service:
        options = [{"token_ids": [n], "max_tokens": 400} for n in range(8)]
        streams = [asyncio.create_task(service.stream(**option)) for option in options]
        calls = [asyncio.create_task(service.generate(**option)) for option in options]
        await until(lambda: service.gateway.snapshot().num_placements == 16, what="all are placed")
        await service.gateway.close()
        async with asyncio.timeout(10):
            results = await asyncio.gather(*streams, *calls, return_exceptions=True)
        for result in results:
            assert isinstance(result, Exception)
            assert status_of(result)[0] is grpc.StatusCode.UNAVAILABLE


# ---------------------------------------------------------------- drafts


@until_exercised
async def test_drafts_that_come_and_go_change_no_token(tiny: TinyModels) -> None:
    prompts = tiny.reference.clear(([n, n + 1, n + 2] for n in range(0, 24, 4)), 200)
    async with two_of_each(tiny) as service:
        running = asyncio.create_task(service.stream_all(*(greedy(prompt, 200, 4) for prompt in prompts)))
        for _ in range(3):
            await asyncio.sleep(0.1)
            await service.stop_draft(service.drafts[0])
            await service.add_draft()
        while service.drafts:
            await service.stop_draft(service.drafts[0])
        exercised(not running.done(), "all drafts go while requests run")
        answers = await running
        assert [answer.token_ids for answer in answers] == [
            tiny.reference.greedy(prompt, 200) for prompt in prompts
        ]
        drafted = sum(answer.speculation.draft_tokens for answer in answers)
        accepted = sum(answer.speculation.accepted_tokens for answer in answers)
        exercised(0 < accepted < drafted, "draft tokens are accepted, and rejected")


# ---------------------------------------------------------------- processes

SOURCE = "emulated://{name}?vocab_size=256&seed=7&base_ms={base_ms}&support=6&max_model_len=2048"
TARGET_SOURCE = SOURCE.format(name="target", base_ms=6)
DRAFT_SOURCE = SOURCE.format(name="draft", base_ms=1) + "&acceptance=0.7"
CHANNELS = ChannelSettings(keepalive_seconds=0.5, keepalive_timeout_seconds=0.5)


class Processes:
    """Two targets and a draft, each a process, and a gateway here."""

    def __init__(self, targets: dict[str, Process], draft: Process) -> None:
        self.targets = targets
        self.draft = draft
        self.addresses = {name: target.line for name, target in targets.items()}
        self.gateway = Gateway(
            "gateway",
            connect=lambda address, events: ExecutionClient(
                address=address, gateway_id="gateway", events=events, settings=CHANNELS
            ),
        )
        self.logic = GenerationLogic(self.gateway, EmulatedCodec(256), ServiceInfo("tiny"))

    def attached(self) -> set[str]:
        self.gateway.update_targets(self.addresses)
        return {load.target_id for load in self.gateway.snapshot().targets}

    async def collect(self, seed: int, num_tokens: int) -> Answer:
        answer = Answer()
        async for chunk in self.logic.generate_stream(request("go", max_tokens=num_tokens, seed=seed)):
            answer.add(chunk)
        return answer

    async def collect_all(self, num_requests: int, num_tokens: int) -> list[Answer]:
        return list(await asyncio.gather(*(self.collect(seed, num_tokens) for seed in range(num_requests))))


@pytest_asyncio.fixture(loop_scope="package")
async def processes() -> AsyncIterator[Processes]:
    async with AsyncExitStack() as stack:

        async def target(name: str) -> Process:
            process = await Process.target(name, TARGET_SOURCE, CHANNELS)
            stack.push_async_callback(process.end)
            return process

        names = ("a", "b")
        targets = dict(zip(names, await asyncio.gather(*map(target, names)), strict=True))
        addresses = {name: process.line for name, process in targets.items()}
        draft = await Process.draft("draft", DRAFT_SOURCE, CHANNELS, addresses)
        stack.push_async_callback(draft.end)
        running = Processes(targets, draft)
        stack.callback(running.logic.close)
        stack.push_async_callback(running.gateway.close)
        await until(lambda: running.attached() == {"a", "b"}, what="both targets are attached")
        yield running


@until_exercised
async def test_frozen_target_loses_its_sequences_to_another(processes: Processes) -> None:
    """B62: found by its silence; when it thaws it is a target like any other, and what it still says of
    former sequences is dropped."""
    reference = await processes.collect_all(8, 300)
    expected = [answer.token_ids for answer in reference]
    exercised(sum(answer.speculation.accepted_tokens for answer in reference) > 0, "the draft is of use")

    def both_are_busy() -> bool:
        loads = processes.gateway.snapshot().targets
        return len(loads) == 2 and all(load.own_in_flight > 0 for load in loads)

    failovers = processes.gateway.snapshot().num_failovers
    running = asyncio.create_task(processes.collect_all(8, 300))
    await until(both_are_busy, what="both targets are busy")
    await asyncio.sleep(0.1)
    processes.targets["a"].freeze()
    try:
        exercised(not running.done(), "a target freezes while requests run")
        async with asyncio.timeout(30):
            answers = await running
    finally:
        processes.targets["a"].thaw()
    assert [answer.token_ids for answer in answers] == expected
    assert processes.gateway.snapshot().num_failovers > failovers

    await until(lambda: processes.attached() == {"a", "b"}, what="the thawed target is back", seconds=20)
    running = asyncio.create_task(processes.collect_all(8, 300))
    await until(both_are_busy, what="both targets are busy")
    assert [answer.token_ids for answer in await running] == expected
