"""A target pool that sleeps: the request that finds nobody wakes it, and waits."""

from __future__ import annotations

import asyncio

import pytest

from paceline.cluster.errors import TimeExceededError, UnavailableError
from paceline.cluster.gateway import Gateway, GatewaySettings
from paceline.cluster.service import GenerationLogic, ServiceInfo
from paceline.cluster.tokenization import EmulatedCodec
from paceline.protos import generation_pb2 as proto
from tests.cluster.scripted import ScriptedTargets, assert_clean, checked, collect, completion, placed, settle


class SleepingTargets(ScriptedTargets):
    """Counts how often the pool was asked to wake."""

    def __init__(self, **settings: float) -> None:
        super().__init__(**settings)
        self.num_wakes = 0
        self.gateway = Gateway(
            "gateway",
            GatewaySettings(**settings),  # type: ignore[arg-type]
            self._connect,
            wake=self._wake,
        )

    def _wake(self) -> None:
        self.num_wakes += 1


async def test_a_request_waits_for_the_target_that_it_wakes() -> None:
    targets = SleepingTargets()
    waiting = asyncio.create_task(targets.gateway.awake_identities())
    await settle()
    assert targets.num_wakes == 1
    assert targets.gateway.wants_target
    assert not waiting.done()
    await targets.attach("a")
    assert [identity.target_id for identity in await waiting] == ["a"]
    assert not targets.gateway.wants_target
    await targets.gateway.close()


async def test_a_sequence_waits_for_the_target_that_it_wakes() -> None:
    targets = SleepingTargets()
    request = checked(max_tokens=3)
    with targets.gateway.open(request) as stream:
        assert targets.num_wakes == 1
        # An attempt at one that has gone to sleep meanwhile changes nothing.
        targets.refuses.add("old")
        await targets.attach("old")
        assert targets.gateway.wants_target
        await targets.attach("new")
        link, submit = placed(targets)
        assert link.target_id == "new"
        link.commit(submit, 3)
        link.finish(submit)
        assert await collect(stream) == completion(request, 3)
    assert_clean(targets)
    await targets.gateway.close()


async def test_nobody_is_woken_while_a_target_is_there() -> None:
    targets = SleepingTargets()
    await targets.attach("a")
    assert len(await targets.gateway.awake_identities()) == 1
    with targets.gateway.open(checked(max_tokens=1)):
        assert targets.num_wakes == 0
    await targets.gateway.close()


async def test_asking_for_the_model_wakes_nobody() -> None:
    targets = SleepingTargets()
    assert await targets.gateway.identities() == []
    assert targets.num_wakes == 0
    await targets.gateway.close()


async def test_a_pool_that_does_not_wake_in_time_is_unavailable() -> None:
    targets = SleepingTargets(cold_start_timeout_seconds=0.05)
    assert await targets.gateway.awake_identities() == []
    stream = targets.gateway.open(checked(max_tokens=1))
    with stream, pytest.raises(UnavailableError, match=r"no target was started within 0\.05 s"):
        await anext(stream)
    assert_clean(targets)
    await targets.gateway.close()


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("streaming", [True, False])
async def test_a_requests_time_is_over_also_while_the_pool_wakes(own: bool, streaming: bool) -> None:
    targets = SleepingTargets(**({} if own else {"request_timeout_seconds": 0.05}))
    logic = GenerationLogic(targets.gateway, EmulatedCodec(256), ServiceInfo("toy"))
    message = proto.GenerateRequest(model="toy", prompt="hello", timeout_s=0.05 if own else None)
    async with asyncio.timeout(2.0):
        with pytest.raises(TimeExceededError, match=r"timeout_s = 0\.05" if own else r"limit of 0\.05 s"):
            await (anext(logic.generate_stream(message)) if streaming else logic.generate(message))
    assert targets.num_wakes == 1
    assert not targets.gateway.wants_target, "nobody waits for it any more"
    logic.close()
    assert_clean(targets)
    await targets.gateway.close()


async def test_a_request_that_has_time_left_waits_for_the_pool() -> None:
    targets = SleepingTargets()
    logic = GenerationLogic(targets.gateway, EmulatedCodec(256), ServiceInfo("toy"))
    message = proto.GenerateRequest(model="toy", prompt="hello", timeout_s=60.0)
    message.stopping.max_tokens = 2
    asked = asyncio.create_task(logic.generate(message))
    await settle()
    await targets.attach("a")
    link, submit = placed(targets)
    link.commit(submit, 2)
    link.finish(submit)
    assert len((await asked).choices[0].token_ids) == 2
    logic.close()
    assert_clean(targets)
    await targets.gateway.close()


async def test_a_gateway_that_closes_ends_every_wait_at_once() -> None:
    targets = SleepingTargets()
    asked = asyncio.create_task(targets.gateway.awake_identities())
    await settle()
    assert targets.gateway.wants_target
    async with asyncio.timeout(2.0):
        await targets.gateway.close()
        assert await asked == []
        assert await targets.gateway.awake_identities() == []
        with (
            targets.gateway.open(checked(max_tokens=1)) as stream,
            pytest.raises(UnavailableError, match="shutting down"),
        ):
            await anext(stream)
    assert targets.num_wakes == 1
    assert_clean(targets)
