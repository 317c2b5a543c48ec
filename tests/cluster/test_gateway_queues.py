"""What queues or waits at a gateway while targets come and go."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from paceline.actors.engine.parameters import FinishReason
from tests.cluster.scripted import (
    ScriptedLink,
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


async def test_what_a_leaving_target_gives_back_unbegun_waits_for_another() -> None:
    """It was sent there before the target had said that it leaves, and no other was there yet."""
    targets = ScriptedTargets(resume_timeout_seconds=5.0)
    await targets.attach("a")
    request = checked(max_tokens=4)
    with targets.gateway.open(request) as stream:
        old = targets.links["a"]
        (given,) = old.submits
        old.finish(given, FinishReason.CANCELLED)
        assert len(old.submits) == 1, "not to the same one again"
        assert targets.gateway.snapshot().num_waiting == 1
        old.report(0, draining=True)
        await targets.attach("a", "b")
        new = targets.links["b"]
        async with asyncio.timeout(4.0):
            await new.submitted.wait()
        new.commit(new.submits[0], 4)
        new.finish(new.submits[0])
        assert await collect(stream) == completion(request, 4)
        assert len(old.submits) == 1
    assert_clean(targets)
    await targets.gateway.close()


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


def on(link: ScriptedLink) -> set[tuple[str, int]]:
    """Placements that a target holds: what was submitted to it and not cancelled."""
    submitted = {(submit.sequence_id, submit.epoch) for submit in link.submits}
    return submitted - {(cancel.sequence_id, cancel.epoch) for cancel in link.cancels}


async def join(targets: ScriptedTargets, *names: str, newcomer: str) -> ScriptedLink:
    """The newcomer is being dialled; ``open_gate`` attaches it."""
    targets.held.add(newcomer)
    await targets.attach(*names, newcomer)
    return targets.links[newcomer]


@pytest.mark.parametrize("fault", ["dead", "draining", "queueing"])
async def test_a_newcomer_that_takes_nothing_costs_a_queue_no_place(
    targets: ScriptedTargets, fault: str
) -> None:
    """Of those that it was to take over one at most finds out, and goes back."""
    await targets.attach("a")
    request = checked(max_tokens=4)
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(targets.gateway.open(request)) for _ in range(8)]
        old = targets.links["a"]
        old.report(1, waiting=7)
        new = await join(targets, "a", newcomer="b")
        if fault == "dead":
            new.dead = True
        else:
            new.report(9, waiting=50 * (fault == "queueing"), draining=fault == "draining")
        new.open_gate.set()
        await settle()
        assert new.submits == []
        assert len(old.cancels) == (fault == "dead")
        assert len(on(old)) == 8
        for submit in [submit for submit in old.submits if (submit.sequence_id, submit.epoch) in on(old)]:
            old.commit(submit, 4)
            old.finish(submit)
        for stream in streams:
            assert await collect(stream) == completion(request, 4)
    assert_clean(targets)


@pytest.mark.parametrize("num_sequences", [5, 7, 8])
async def test_no_target_keeps_what_the_loss_of_two_at_once_has_moved(
    targets: ScriptedTargets, num_sequences: int
) -> None:
    """The newcomer fails, and so does the old target that its share should go back to."""
    await targets.attach("a", "c", "d", "e")
    others = [targets.links[name] for name in ("c", "d", "e")]
    for link in others:
        link.report(50)
    with contextlib.ExitStack() as stack:
        for _ in range(num_sequences):
            stack.enter_context(targets.gateway.open(checked(max_tokens=4)))
        old = targets.links["a"]
        assert len(on(old)) == num_sequences
        old.report(1, waiting=num_sequences - 1)
        new = await join(targets, "a", "c", "d", "e", newcomer="b")
        new.dead = old.dead = True
        new.open_gate.set()
        await settle()
        held = [placement for link in others for placement in on(link)]
        assert len(held) == num_sequences, "somebody works for nobody"
        assert len({sequence_id for sequence_id, _ in held}) == num_sequences
    assert not any(on(link) for link in others)
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
