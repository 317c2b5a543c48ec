"""What a target gives back, or loses: how long it may be without one, and what counts as a loss."""

from __future__ import annotations

import asyncio

import pytest

from paceline.actors.engine.messages import Submit
from paceline.actors.engine.parameters import FinishReason
from paceline.cluster.errors import UnavailableError
from tests.cluster.scripted import (
    ScriptedLink,
    ScriptedTargets,
    assert_clean,
    checked,
    collect,
    completion,
    settle,
)
from tests.cluster.test_waking import SleepingTargets

RETRY_SECONDS = 0.25
"""After which the gateway asks targets again that gave a sequence back."""


class RefusingLink(ScriptedLink):
    """Gives everything back at once, and never says that it leaves."""

    def submit(self, submit: Submit) -> None:
        super().submit(submit)
        asyncio.get_running_loop().call_soon(self.finish, submit, FinishReason.CANCELLED)


def holder(targets: ScriptedTargets, epoch: int) -> ScriptedLink:
    """The link that was given the placement of this epoch, of the only sequence."""
    (link,) = (
        link for link in targets.links.values() if any(submit.epoch == epoch for submit in link.submits)
    )
    return link


# ---------------------------------------------------------------- time without a target


@pytest.mark.parametrize("last", ["lost", "given back"])
async def test_time_in_the_queue_of_a_second_target_is_not_time_without_one(
    targets: ScriptedTargets, last: str
) -> None:
    await targets.attach("a", "b")
    request = checked(max_tokens=4)
    with targets.gateway.open(request) as stream:
        holder(targets, 0).report(0, draining=True)
        second = holder(targets, 1)
        await asyncio.sleep(0.3)  # longer than resume_timeout_seconds
        if last == "lost":
            second.die()
        else:
            second.report(0, draining=True)
            second.finish(second.submits[-1], FinishReason.CANCELLED)
        await settle()
        assert targets.gateway.snapshot().num_waiting == 1
        await targets.attach("c")
        third = targets.links["c"]
        async with asyncio.timeout(2.0):
            await third.submitted.wait()
        third.commit(third.submits[0], 4)
        third.finish(third.submits[0])
        assert await collect(stream) == completion(request, 4)


async def test_the_wait_goes_on_where_another_loss_finds_it() -> None:
    """A target that takes a sequence and is lost again at once begins no new wait."""
    targets = ScriptedTargets(resume_timeout_seconds=0.6)
    await targets.attach("a")
    with targets.gateway.open(checked()) as stream:
        targets.links["a"].die()
        started = asyncio.get_running_loop().time()
        for name in ("b", "c"):
            await asyncio.sleep(0.2)
            await targets.attach(name)
            assert len(targets.links[name].submits) == 1
            targets.links[name].die()
        with pytest.raises(UnavailableError, match=r"the target was lost .* within 0\.6 s"):
            await anext(stream)
        assert 0.6 <= asyncio.get_running_loop().time() - started < 0.9
    assert_clean(targets)
    await targets.gateway.close()


async def test_progress_makes_the_next_wait_a_full_one() -> None:
    targets = ScriptedTargets(resume_timeout_seconds=0.4)
    await targets.attach("a")
    with targets.gateway.open(checked()) as stream:
        targets.links["a"].die()
        await asyncio.sleep(0.25)
        await targets.attach("b")
        second = targets.links["b"]
        second.commit(second.submits[0], 1)
        second.die()
        started = asyncio.get_running_loop().time()
        assert len((await anext(stream)).token_ids) == 1
        with pytest.raises(UnavailableError, match="the target was lost"):
            await anext(stream)
        assert asyncio.get_running_loop().time() - started >= 0.4
    assert_clean(targets)
    await targets.gateway.close()


@pytest.mark.parametrize("names", ["a", "abcd"])
async def test_what_every_target_gives_back_at_once_is_given_up_in_time(names: str) -> None:
    seconds = 4.5 * RETRY_SECONDS
    targets = ScriptedTargets(resume_timeout_seconds=seconds)
    targets.link_class = RefusingLink
    await targets.attach(*names)
    started = asyncio.get_running_loop().time()
    with targets.gateway.open(checked()) as stream:
        async with asyncio.timeout(seconds + 2.0):
            with pytest.raises(UnavailableError, match="the target is leaving and no other took the request"):
                await anext(stream)
        assert asyncio.get_running_loop().time() - started >= seconds
    # Each is asked at most once between two waits.
    assert all(2 <= len(link.submits) <= 5 for link in targets.links.values())
    assert targets.gateway.snapshot().num_failovers == 0
    assert_clean(targets)
    await targets.gateway.close()


@pytest.mark.parametrize("has_begun", [False, True])
async def test_what_the_only_target_gives_back_is_not_called_lost(
    targets: ScriptedTargets, has_begun: bool
) -> None:
    await targets.attach("a")
    with targets.gateway.open(checked()) as stream:
        only = targets.links["a"]
        if has_begun:
            only.commit(only.submits[0], 1)
            await anext(stream)
        only.report(1, draining=True)
        only.finish(only.submits[0], FinishReason.CANCELLED)
        with pytest.raises(UnavailableError, match=r"the target is leaving .* within 0\.2 s"):
            await anext(stream)
    assert targets.gateway.snapshot().num_failovers == 0


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("how", ["drained", "given back"])
async def test_leaving_targets_may_hand_a_request_on_more_often_than_it_may_be_lost(how: str) -> None:
    targets = ScriptedTargets(max_losses=2)
    request = checked(max_tokens=4)
    await targets.attach("0")
    with targets.gateway.open(request) as stream:
        for number in range(5):
            await targets.attach(str(number), str(number + 1))
            old, new = targets.links[str(number)], targets.links[str(number + 1)]
            if how == "drained":
                old.report(0, draining=True)
            else:
                old.finish(old.submits[0], FinishReason.CANCELLED)
            assert [submit.epoch for submit in new.submits] == [number + 1]
        assert targets.gateway.snapshot().num_failovers == 0
        for number in (5, 6):  # those that are lost still count
            await targets.attach(str(number), str(number + 1))
            targets.links[str(number)].die()
        assert targets.gateway.snapshot().num_failovers == 2
        last = targets.links["7"]
        last.commit(last.submits[0], 4)
        last.finish(last.submits[0])
        assert await collect(stream) == completion(request, 4)
    assert_clean(targets)
    await targets.gateway.close()


async def test_a_draining_target_keeps_what_no_other_would_take(targets: ScriptedTargets) -> None:
    await targets.attach("a", "b")
    request = checked(max_tokens=4)
    with targets.gateway.open(request) as stream:
        first = holder(targets, 0)
        first.finish(first.submits[0], FinishReason.ERROR, error="queue full", full=True)
        second = holder(targets, 1)
        second.report(0, waiting=1, draining=True)
        assert second.cancels == []
        second.commit(second.submits[0], 4)
        second.finish(second.submits[0])
        assert await collect(stream) == completion(request, 4)


async def test_what_left_a_queue_for_a_newcomer_is_not_refused(targets: ScriptedTargets) -> None:
    """Neither has room for it then, but it had its place."""
    await targets.attach("a")
    request = checked(max_tokens=4)
    with targets.gateway.open(request), targets.gateway.open(request) as stream:
        old = targets.links["a"]
        old.report(1, waiting=1)
        await targets.attach("a", "b")
        new = targets.links["b"]
        assert [submit.sequence_id for submit in new.submits] == [stream.sequence_id]
        for link in (new, old):
            link.finish(link.submits[-1], FinishReason.ERROR, error="queue full", full=True)
        assert targets.gateway.snapshot().num_waiting == 1
        with pytest.raises(UnavailableError, match="a new target did not take the request"):
            await anext(stream)


async def test_what_is_being_stopped_moves_nowhere(targets: ScriptedTargets) -> None:
    """Only its statistics are still to come."""
    await targets.attach("a")
    with targets.gateway.open(checked()) as stream:
        first = targets.links["a"]
        first.commit(first.submits[0], 2)
        first.die()
        await targets.attach("b")
        second = targets.links["b"]
        stopping = asyncio.create_task(stream.stop())
        await settle()
        second.report(0, waiting=1)
        await targets.attach("b", "c")
        second.report(0, waiting=1, draining=True)
        assert targets.links["c"].submits == []
        second.finish(second.submits[0], FinishReason.CANCELLED, rounds=3)
        async with asyncio.timeout(1.0):
            assert (await stopping).speculation.rounds == 3


# ---------------------------------------------------------------- a pool that may sleep


@pytest.mark.parametrize("order", ["given back, leaving", "leaving, given back", "given back, lost"])
async def test_what_the_last_target_gives_back_wakes_another_and_waits_for_it(order: str) -> None:
    targets = SleepingTargets(resume_timeout_seconds=0.05, cold_start_timeout_seconds=5.0)
    await targets.attach("a")
    request = checked(max_tokens=4)
    with targets.gateway.open(request) as stream:
        old = targets.links["a"]
        for step in order.split(", "):
            assert targets.num_wakes == 0
            if step == "given back":
                old.finish(old.submits[0], FinishReason.CANCELLED)
            elif step == "leaving":
                old.report(0, draining=True)
            else:
                old.die()
        assert targets.num_wakes > 0
        await asyncio.sleep(0.15)  # longer than resume_timeout_seconds
        assert targets.gateway.wants_target
        await targets.attach("b")
        new = targets.links["b"]
        async with asyncio.timeout(2.0):
            await new.submitted.wait()
        new.commit(new.submits[0], 4)
        new.finish(new.submits[0])
        assert await collect(stream) == completion(request, 4)
    assert_clean(targets)
    await targets.gateway.close()


async def test_where_nothing_wakes_it_ends_as_a_new_request_does() -> None:
    targets = SleepingTargets(resume_timeout_seconds=0.05, cold_start_timeout_seconds=0.2)
    await targets.attach("a")
    with targets.gateway.open(checked()) as stream:
        only = targets.links["a"]
        only.finish(only.submits[0], FinishReason.CANCELLED)
        only.report(0, draining=True)
        with pytest.raises(UnavailableError, match=r"no target was started within 0\.2 s"):
            await anext(stream)
    assert_clean(targets)
    await targets.gateway.close()


@pytest.mark.parametrize("fate", ["begun and given back", "lost"])
async def test_what_had_begun_or_was_lost_waits_no_longer_for_a_pool_that_may_sleep(fate: str) -> None:
    targets = SleepingTargets(resume_timeout_seconds=0.1, cold_start_timeout_seconds=5.0)
    await targets.attach("a")
    with targets.gateway.open(checked()) as stream:
        only = targets.links["a"]
        if fate == "lost":
            only.die()
        else:
            only.commit(only.submits[0], 1)
            await anext(stream)
            only.report(1, draining=True)
            only.finish(only.submits[0], FinishReason.CANCELLED)
        assert targets.num_wakes > 0
        async with asyncio.timeout(2.0):
            with pytest.raises(UnavailableError, match=r"within 0\.1 s"):
                await anext(stream)
    assert_clean(targets)
    await targets.gateway.close()


async def test_targets_that_are_there_but_give_back_are_not_waited_for_as_sleepers() -> None:
    targets = SleepingTargets(resume_timeout_seconds=2.5 * RETRY_SECONDS, cold_start_timeout_seconds=60.0)
    targets.link_class = RefusingLink
    await targets.attach("a")
    with targets.gateway.open(checked()) as stream:
        async with asyncio.timeout(5.0):
            with pytest.raises(UnavailableError, match="the target is leaving"):
                await anext(stream)
    assert targets.num_wakes == 0
    assert_clean(targets)
    await targets.gateway.close()


# ---------------------------------------------------------------- targets that are listed again


@pytest.mark.parametrize("what", ["nothing", "lost", "draining", "broken"])
async def test_newcomers_are_placed_although_others_wait_to_ask_again(what: str) -> None:
    """All targets give one request back, so that a retry is due; they are delisted for a moment, in which
    others come; and while they accept again one of them is lost, leaves, or turns out to be gone."""
    targets = SleepingTargets(resume_timeout_seconds=3.0, cold_start_timeout_seconds=20.0)
    await targets.attach("a", "b", "c")
    gateway, links = targets.gateway, [targets.links[name] for name in "abc"]
    running = [gateway.open(checked(max_tokens=40)) for _ in links]
    await settle()
    for link in links:
        link.commit(link.submits[0], 1)
    bounced = gateway.open(checked(max_tokens=4))
    await settle()
    for epoch in range(len(links)):
        for link in links:
            for submit in link.submits[1:]:
                if submit.epoch == epoch:
                    link.finish(submit, FinishReason.CANCELLED)
        await settle()
    assert gateway.snapshot().num_waiting == 1
    gateway.update_targets({})
    newcomers = [gateway.open(checked(max_tokens=4)) for _ in links]
    await settle()
    assert gateway.snapshot().num_waiting == 4
    if what == "broken":
        links[0].dead = True
    gateway.update_targets({name: f"{name}:1" for name in "abc"})
    if what == "lost":
        links[2].die()
    elif what == "draining":
        links[2].report(0, draining=True)
    async with asyncio.timeout(2.0):
        while gateway.snapshot().num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    streams = [*running, bounced, *newcomers]
    assert gateway.snapshot().num_live == len(streams)
    for stream in streams:
        stream.close()
    await settle()
    assert_clean(targets)
    await gateway.close()
