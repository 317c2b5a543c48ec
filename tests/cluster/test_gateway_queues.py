"""What queues or waits at a gateway while targets come and go."""

from __future__ import annotations

import asyncio
import contextlib

from paceline.actors.engine.parameters import FinishReason
from tests.cluster.scripted import (
    ScriptedTargets,
    assert_clean,
    checked,
    collect,
    completion,
    placed,
    settle,
)


async def test_what_has_not_begun_on_a_draining_target_begins_elsewhere_at_once(
    targets: ScriptedTargets,
) -> None:
    await targets.attach("a")
    request = checked(max_tokens=4)
    with targets.gateway.open(request) as running, targets.gateway.open(request) as queued:
        old = targets.links["a"]
        first, second = old.submits
        old.commit(first, 1)
        await targets.attach("a", "b")
        old.report(2, draining=True)
        # What runs there goes on there.
        assert [cancel.sequence_id for cancel in old.cancels] == [second.sequence_id]
        (moved,) = targets.links["b"].submits
        assert (moved.sequence_id, moved.epoch) == (second.sequence_id, second.epoch + 1)
        old.report(1, draining=True)
        assert len(targets.links["b"].submits) == 1
        old.commit(first, 3, base=4)
        old.finish(first)
        targets.links["b"].commit(moved, 4)
        targets.links["b"].finish(moved)
        assert await collect(running) == completion(request, 4)
        assert await collect(queued) == completion(request, 4)
    assert_clean(targets)


async def test_what_queues_goes_to_a_target_that_comes_later(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    request = checked(max_tokens=4)
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(targets.gateway.open(request)) for _ in range(7)]
        old = targets.links["a"]
        begun, prefilled, *queued = old.submits
        old.commit(begun, 1)
        old.report(2, waiting=5)
        await targets.attach("a", "b")
        new = targets.links["b"]
        # Half of all: the last that came.
        assert [submit.sequence_id for submit in new.submits] == [
            submit.sequence_id for submit in queued[-3:]
        ]
        assert [cancel.sequence_id for cancel in old.cancels] == [
            submit.sequence_id for submit in queued[-3:]
        ]
        for submit in queued[-3:]:
            old.finish(submit, FinishReason.CANCELLED)  # its answer to the cancellation
        old.commit(begun, 3, base=4)
        for submit in (prefilled, *queued[:-3]):
            old.commit(submit, 4)
        for submit in new.submits:
            assert submit.epoch == 1
            new.commit(submit, 4)
        for link, submits in ((old, old.submits[:4]), (new, new.submits)):
            for submit in submits:
                link.finish(submit)
        for stream in streams:
            assert await collect(stream) == completion(request, 4)
    assert targets.gateway.snapshot().num_failovers == 0
    assert_clean(targets)


async def test_what_a_dead_newcomer_was_to_take_over_is_not_lost(
    targets: ScriptedTargets,
) -> None:
    """What was taken from a queue for it goes back there, and is lost to nobody."""
    await targets.attach("a")
    request = checked(max_tokens=4)
    with contextlib.ExitStack() as stack:
        queued = [stack.enter_context(targets.gateway.open(request)) for _ in range(4)]
        old = targets.links["a"]
        old.report(1, waiting=3)
        targets.held.add("b")
        await targets.attach("a", "b")
        targets.links["b"].dead = True
        targets.links["b"].open_gate.set()
        await settle()
        assert targets.links["b"].submits == []
        last = {submit.sequence_id: submit for submit in old.submits}
        for submit in last.values():
            old.commit(submit, 4)
            old.finish(submit)
        for stream in queued:
            assert await collect(stream) == completion(request, 4)
    assert_clean(targets)


async def test_nothing_moves_where_nothing_queues(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    request = checked(max_tokens=4)
    with targets.gateway.open(request), targets.gateway.open(request), targets.gateway.open(request):
        targets.links["a"].report(3)
        await targets.attach("a", "b")
        assert targets.links["b"].submits == targets.links["a"].cancels == []


async def test_the_only_target_finishes_what_it_has_while_it_drains(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    request = checked(max_tokens=4)
    with targets.gateway.open(request) as stream:
        only, submit = placed(targets)
        only.report(1, draining=True)
        assert only.cancels == []
        only.commit(submit, 4)
        only.finish(submit)
        assert await collect(stream) == completion(request, 4)
    assert_clean(targets)


async def test_who_comes_before_the_first_target_is_found_waits_for_it() -> None:
    targets = ScriptedTargets(attach_grace_seconds=5.0)
    asked = asyncio.create_task(targets.gateway.identities())
    await asyncio.sleep(0)
    assert not asked.done()
    await targets.attach("a")
    assert [identity.target_id for identity in await asked] == ["a"]
    await targets.gateway.close()


async def test_where_there_is_none_the_wait_is_bounded() -> None:
    targets = ScriptedTargets(attach_grace_seconds=0.05)
    async with asyncio.timeout(2.0):
        assert await targets.gateway.identities() == []
    await targets.gateway.close()
