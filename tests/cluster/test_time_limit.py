"""How long a request may live: what the gateway tells a target, and what ends it."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.messages import Finished
from paceline.actors.engine.parameters import FinishReason, SpeculationStats
from paceline.cluster.errors import TimeExceededError
from paceline.cluster.time_limit import MAX_TIMEOUT_SECONDS, TimeLimit, time_limit
from paceline.protos import generation_pb2 as proto
from tests.cluster.scripted import ScriptedLink, ScriptedTargets, assert_clean, checked, placed, settle


def message(timeout_s: float | None = None) -> proto.GenerateRequest:
    return proto.GenerateRequest(timeout_s=timeout_s)


def test_the_shorter_of_two_limits_holds() -> None:
    assert time_limit(message(), None, 7.0) is None
    assert time_limit(message(2.0), None, 7.0) == TimeLimit(2.0, 7.0, own=True)
    assert time_limit(message(), 3.0, 7.0) == TimeLimit(3.0, 7.0)
    assert time_limit(message(2.0), 3.0, 7.0) == TimeLimit(2.0, 7.0, own=True)
    assert time_limit(message(4.0), 3.0, 7.0) == TimeLimit(3.0, 7.0)
    assert TimeLimit(2.0, 7.0).deadline == 9.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, MAX_TIMEOUT_SECONDS * 1.01])
def test_a_time_that_cannot_pass_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"timeout_s: must be in \(0, 31536000\] seconds"):
        time_limit(message(seconds), 3.0, 0.0)


def in_seconds(seconds: float, **options: int) -> TimeLimit:
    """A limit that ends so many seconds from now, of a request that came 100 s ago."""
    return TimeLimit(100.0 + seconds, asyncio.get_running_loop().time() - 100.0, own=True)


async def test_a_target_is_told_what_is_left_at_each_placement(targets: ScriptedTargets) -> None:
    await targets.attach("a", "b")
    request = replace(checked(), time_limit=in_seconds(20.0), priority=-3)
    with targets.gateway.open(request) as stream:
        link, submit = placed(targets)
        assert submit.ttl_seconds == pytest.approx(20.0, abs=1.0)
        assert submit.priority == -3
        link.commit(submit, 1)
        await anext(stream)
        await asyncio.sleep(0.05)
        link.die()
        await settle()
        _, again = placed(targets)
        assert (again.epoch, again.priority) == (1, -3)
        assert again.ttl_seconds is not None
        assert again.ttl_seconds < submit.ttl_seconds - 0.04


async def test_without_a_limit_a_target_is_told_none(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    with targets.gateway.open(checked()):
        _, submit = placed(targets)
        assert (submit.ttl_seconds, submit.priority) == (None, 0)


async def test_the_requests_own_limit_ends_it_from_its_arrival_on(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    with targets.gateway.open(replace(checked(), time_limit=in_seconds(0.05))) as stream:
        link, submit = placed(targets)
        link.commit(submit, 2)
        assert len((await anext(stream)).token_ids) == 2
        with pytest.raises(TimeExceededError, match=r"timeout_s = 100\.05"):
            await anext(stream)
        assert len(link.cancels) == 1


async def test_the_services_limit_holds_for_a_longer_one_too() -> None:
    scripted = ScriptedTargets(request_timeout_seconds=30.0)
    await scripted.attach("a")
    assert scripted.gateway.request_timeout_seconds == 30.0
    with scripted.gateway.open(checked()):
        _, submit = placed(scripted)
        assert submit.ttl_seconds == pytest.approx(30.0, abs=1.0)
    assert_clean(scripted)
    await scripted.gateway.close()


async def test_a_target_that_ends_it_by_itself_is_believed(targets: ScriptedTargets) -> None:
    """Its clock may be the first to find the time over. Nobody else is asked then."""
    await targets.attach("a", "b")
    with targets.gateway.open(replace(checked(), time_limit=in_seconds(20.0))) as stream:
        link, submit = placed(targets)
        link.commit(submit, 2)
        assert len((await anext(stream)).token_ids) == 2
        over(link, submit.sequence_id, submit.epoch)
        with pytest.raises(TimeExceededError):
            await anext(stream)
    assert sum(len(link.submits) for link in targets.links.values()) == 1


def over(link: ScriptedLink, sequence_id: str, epoch: int) -> None:
    finished = Finished(
        sequence_id, epoch, FinishReason.ERROR, SpeculationStats(), error="over", deadline_exceeded=True
    )
    link.events.on_finished(link.target_id, finished)
