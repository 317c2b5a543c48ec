"""Targets whose queues are full: who waits, who comes first when a place is free, and what that costs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from paceline.actors.engine.messages import Submit
from paceline.actors.engine.parameters import FinishReason, StoppingParams
from paceline.cluster.errors import OverloadedError, UnavailableError
from paceline.cluster.sequence_stream import SequenceStream
from tests.cluster.scripted import (
    ScriptedLink,
    ScriptedTargets,
    assert_clean,
    checked,
    collect,
    completion,
    settle,
)

RETRY_SECONDS = 0.25
"""After which the gateway asks for a place where no report shows one."""


class QueueLink(ScriptedLink):
    """Takes ``capacity`` sequences and refuses more, in its own time, as a target does."""

    capacity = 1000

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.held: list[Submit] = []

    def submit(self, submit: Submit) -> None:
        super().submit(submit)
        if len(self.held) < self.capacity:
            self.held.append(submit)
        else:
            asyncio.get_running_loop().call_soon(self.refuse, submit)

    def refuse(self, submit: Submit) -> None:
        self.finish(submit, FinishReason.ERROR, error="queue full", full=True)

    def end_first(self) -> Submit:
        """The first of its sequences finishes. It does not say so in a report yet."""
        submit = self.held.pop(0)
        left = submit.stopping.max_tokens - (len(submit.token_ids) - submit.prompt_length)
        self.commit(submit, left)
        self.finish(submit)
        return submit

    def report_queue(self) -> None:
        self.report(0, waiting=len(self.held))


def queue_link(targets: ScriptedTargets, name: str) -> QueueLink:
    link = targets.links[name]
    assert isinstance(link, QueueLink)
    return link


async def full_after_a_loss(
    targets: ScriptedTargets, num_moved: int, capacity: int = 4
) -> tuple[QueueLink, list[SequenceStream], list[SequenceStream]]:
    """Target a is lost with so many sequences mid-stream; b, the only other, is full. Returns b, the streams
    that wait and those that b holds."""
    targets.link_class = QueueLink
    await targets.attach("a", "b")
    lost, other = queue_link(targets, "a"), queue_link(targets, "b")
    moved = [targets.gateway.open(checked(seed=i, max_tokens=9), "a") for i in range(num_moved)]
    for submit in lost.submits:
        lost.commit(submit, 5)
    holding = [targets.gateway.open(checked(seed=100 + i, max_tokens=9), "b") for i in range(capacity)]
    other.capacity = capacity
    assert len(other.held) == capacity
    other.report_queue()
    lost.die()
    await settle()
    other.report_queue()
    assert targets.gateway.snapshot().num_waiting == num_moved
    return other, moved, holding


@pytest.mark.parametrize("num_newcomers", [1, 4])
async def test_a_free_place_goes_to_those_that_wait_and_not_to_those_that_come(num_newcomers: int) -> None:
    """However many come between two reports, and whenever."""
    targets = ScriptedTargets(resume_timeout_seconds=30.0)
    other, moved, holding = await full_after_a_loss(targets, 8)
    waiting = [stream.sequence_id for stream in moved]
    turned_away: list[SequenceStream] = []
    placed: list[str] = []
    while len(placed) < len(waiting):
        turned_away += [targets.gateway.open(checked()) for _ in range(num_newcomers)]
        held = {submit.sequence_id for submit in other.held}
        other.end_first()
        other.report_queue()
        turned_away += [targets.gateway.open(checked()) for _ in range(num_newcomers)]
        await settle()
        placed += [submit.sequence_id for submit in other.held if submit.sequence_id not in held]
        assert len(placed) <= 2 * len(waiting)
    assert placed == waiting, "the longest wait first"
    for stream in turned_away:
        with stream, pytest.raises(OverloadedError, match="every target's queue is full"):
            await anext(stream)
    while other.held:
        other.end_first()
    for seed, stream in enumerate(moved):
        assert await collect(stream) == completion(checked(seed=seed), 9)
    for stream in [*moved, *holding]:
        stream.close()
    assert_clean(targets)
    await targets.gateway.close()


async def test_those_that_come_are_placed_again_when_nobody_waits() -> None:
    targets = ScriptedTargets(resume_timeout_seconds=30.0)
    other, moved, holding = await full_after_a_loss(targets, 2)
    for _ in moved:
        other.end_first()
    other.report_queue()
    assert targets.gateway.snapshot().num_waiting == 0
    other.end_first()
    other.report_queue()
    with targets.gateway.open(checked()) as stream:
        await settle()
        assert other.held[-1].sequence_id == stream.sequence_id
    for stream in [*moved, *holding]:
        stream.close()
    await targets.gateway.close()


async def test_one_full_target_keeps_nobody_from_another() -> None:
    targets = ScriptedTargets(resume_timeout_seconds=30.0)
    _, moved, holding = await full_after_a_loss(targets, 2)
    await targets.attach("a", "b")
    fresh = targets.links["a"]
    assert [submit.sequence_id for submit in fresh.submits[:2]] == [stream.sequence_id for stream in moved]
    with targets.gateway.open(checked()) as stream:
        assert fresh.submits[-1].sequence_id == stream.sequence_id
    for stream in [*moved, *holding]:
        stream.close()
    await targets.gateway.close()


async def test_a_target_that_only_failed_one_is_closed_to_nobody_else(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    only = targets.links["a"]
    with targets.gateway.open(checked()) as stream:
        only.finish(only.submits[0], FinishReason.ERROR, error="the step failed")
        assert targets.gateway.snapshot().num_waiting == 1
        with targets.gateway.open(checked()) as newcomer:
            assert only.submits[-1].sequence_id == newcomer.sequence_id
            only.report(1, waiting=3)
            assert len(only.submits) == 2, "and it asks again only after a while"
        assert not stream.ended


async def test_an_empty_queue_takes_all_that_wait_at_once() -> None:
    targets = ScriptedTargets(resume_timeout_seconds=30.0)
    other, moved, holding = await full_after_a_loss(targets, 8)
    other.capacity = 1000
    while other.held:
        other.end_first()
    other.report_queue()
    assert [submit.sequence_id for submit in other.held] == [stream.sequence_id for stream in moved]
    for stream in [*moved, *holding]:
        stream.close()
    await targets.gateway.close()


async def test_places_that_no_report_shows_are_found() -> None:
    """Its queue takes more than it did when it refused, yet is never empty."""
    targets = ScriptedTargets(resume_timeout_seconds=30.0)
    other, moved, holding = await full_after_a_loss(targets, 15)
    other.capacity = 1000
    assert targets.gateway.snapshot().num_waiting == 15
    async with asyncio.timeout(8 * RETRY_SECONDS):
        while targets.gateway.snapshot().num_waiting:
            await asyncio.sleep(0.01)
            other.report_queue()
    placed = [submit.sequence_id for submit in other.held]
    assert sorted(placed) == sorted(stream.sequence_id for stream in [*moved, *holding]), "each of them once"
    for stream in [*moved, *holding]:
        stream.close()
    await targets.gateway.close()


async def test_who_has_waited_longest_stays_first_although_it_was_refused_once_more() -> None:
    targets = ScriptedTargets(resume_timeout_seconds=30.0)
    targets.link_class = QueueLink
    await targets.attach("a", "b", "c")
    links = [queue_link(targets, name) for name in "abc"]
    last = links[2]
    streams = [targets.gateway.open(checked(max_tokens=9), name) for name in "abc"]
    for link in links:
        link.commit(link.submits[0], 1)
        link.capacity = 0
        link.report(0, waiting=7)
    for link in links[:2]:
        link.die()
        await asyncio.sleep(0.02)  # two waits that began at different times
        last.report(0, waiting=7)
    assert targets.gateway.snapshot().num_waiting == 2
    first = streams[0].sequence_id
    for _ in range(3):
        last.report(0, waiting=6)
        assert last.submits[-1].sequence_id == first
        await settle()  # somebody else's sequence was faster
        last.report(0, waiting=7)
        assert targets.gateway.snapshot().num_waiting == 2
    for stream in streams:
        stream.close()
    assert_clean(targets)
    await targets.gateway.close()


# ---------------------------------------------------------------- what it costs


async def test_targets_that_stay_full_are_asked_little() -> None:
    """One place at a time is asked for at each, however many wait."""
    targets = ScriptedTargets(resume_timeout_seconds=2.5 * RETRY_SECONDS)
    other, moved, holding = await full_after_a_loss(targets, 32)
    num_submits = len(other.submits)
    for _ in range(100):
        other.report_queue()
    assert len(other.submits) == num_submits
    for stream in moved:
        with stream, pytest.raises(UnavailableError, match="the target was lost"):
            await collect(stream)
    assert 1 <= len(other.submits) - num_submits <= 4
    for stream in holding:
        stream.close()
    assert_clean(targets)
    await targets.gateway.close()


class CountedTokens(frozenset[int]):
    """Stop tokens that count how many tokens were compared with them."""

    num_looks = 0

    def __contains__(self, token_id: object) -> bool:
        type(self).num_looks += 1
        return super().__contains__(token_id)


async def test_a_report_costs_no_look_at_what_those_that_wait_have_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CountedTokens, "num_looks", 0)
    targets = ScriptedTargets(resume_timeout_seconds=30.0)
    await targets.attach("a")
    stopping = StoppingParams(max_tokens=1000, stop_token_ids=CountedTokens({299}))
    only = targets.links["a"]
    with targets.gateway.open(replace(checked(), stopping=stopping)) as stream:
        only.commit(only.submits[0], 500)
        assert CountedTokens.num_looks == 500, "each token once, when it comes"
        only.die()
        await targets.attach("a")
        fresh = targets.links["a"]
        fresh.finish(fresh.submits[0], FinishReason.ERROR, error="queue full", full=True)
        for _ in range(10):
            fresh.report(0, waiting=7)
        assert targets.gateway.snapshot().num_waiting == 1
        assert not stream.ended
        assert CountedTokens.num_looks == 500
    await targets.gateway.close()


async def test_a_target_that_is_listed_again_is_not_full_any_more(targets: ScriptedTargets) -> None:
    """Nobody was there to ask it while it was not listed."""
    targets.link_class = QueueLink
    await targets.attach("a", "b")
    first, second = queue_link(targets, "a"), queue_link(targets, "b")
    gateway = targets.gateway
    with gateway.open(checked(seed=1), "a"), gateway.open(checked(seed=2), "b"):
        first.commit(first.submits[0], 3)
        second.capacity = 1
        second.report(0, waiting=5)
        first.die()
        await settle()
        assert gateway.snapshot().num_waiting == 1
        await targets.attach("a")  # b is not listed, but holds a sequence; the other one has a place
        assert gateway.snapshot().num_waiting == 0
        second.capacity = 1000
        await targets.attach("b")
        second.report(3, waiting=3)
        num_before = len(second.held)
        with gateway.open(checked(seed=3)):
            await settle()
            assert len(second.held) == num_before + 1
