"""Time to live: a sequence whose cancellation was lost ends by itself, wherever it is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paceline.actors.engine.config import TargetEngineConfig
from paceline.actors.engine.deadlines import Deadlines
from paceline.actors.engine.messages import Submit
from paceline.actors.engine.parameters import FinishReason
from paceline.actors.engine.proposer import NgramProposer
from paceline.actors.engine.sequence import TargetSequence
from paceline.actors.engine.target_engine import TargetEngine
from tests.engine.fakes import Clock, HashRunner, Network, make_submit
from tests.engine.test_target_engine import NO_NGRAM, NOISED, TARGET, check_end


def mortal(name: str, ttl_seconds: float | None, *, max_tokens: int = 60, length: int = 3) -> Submit:
    event = make_submit(name, [i % 32 for i in range(length)], max_tokens=max_tokens)
    return replace(event, ttl_seconds=ttl_seconds)


def network_of(clock: Clock, num_blocks: int = 256, max_num_seqs: int = 8) -> Network:
    config = TargetEngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        num_speculative_tokens=4,
        wait_for_drafts=False,
        ngram=NO_NGRAM,
    )
    network = Network(TargetEngine(HashRunner(TARGET, num_blocks=num_blocks), config, clock))
    network.join(NOISED)
    return network


@pytest.mark.parametrize("steps", range(12))
def test_it_ends_at_every_stage_on_target_and_draft(steps: int) -> None:
    """While it waits for its place, in the middle of its prompt, and while it decodes with a tail."""
    clock = Clock()
    network = network_of(clock, max_num_seqs=2)
    kept = [mortal("kept", None), mortal("long", 1e6)]
    network.submit(kept[0])
    network.submit(mortal("over", 5.0, length=60))
    network.submit(kept[1])
    for _ in range(steps):
        network.settle_drafts()
        network.step_target()
    clock.advance(4.9)
    network.step_target()
    assert ("over", 1) not in network.gateway.finished
    clock.advance(0.1)
    network.step_target()
    end = network.gateway.finished[("over", 1)]
    assert (end.reason, end.deadline_exceeded) == (FinishReason.ERROR, True)
    assert (end.invalid_argument, end.resource_exhausted) == (False, False)
    network.run()
    check_end(network, TARGET, kept)


def test_it_ends_while_it_is_preempted() -> None:
    clock = Clock()
    network = network_of(clock, num_blocks=10)
    kept = mortal("kept", None, max_tokens=37)
    network.submit(kept)
    network.submit(mortal("over", 5.0, max_tokens=37))
    while not network.target.snapshot().num_preemptions_total:
        network.settle_drafts()
        network.step_target()
    assert network.target.load().num_waiting == 1
    clock.advance(5.0)
    network.step_target()
    assert network.gateway.finished[("over", 1)].deadline_exceeded
    network.run()
    check_end(network, TARGET, [kept])


def test_one_that_comes_too_late_is_not_computed() -> None:
    network = network_of(Clock())
    network.submit(mortal("late", 0.0))
    network.step_target()
    assert network.gateway.finished[("late", 1)].deadline_exceeded
    assert network.target.snapshot().num_computed_tokens_total == 0
    assert network.target.wait_seconds() is None
    check_end(network, TARGET, [])


def test_a_new_placement_has_its_own_time() -> None:
    clock = Clock()
    network = network_of(clock)
    network.submit(mortal("s", 5.0))
    clock.advance(4.0)
    again = replace(mortal("s", 5.0), epoch=2)
    network.submit(again)
    clock.advance(4.0)
    network.run()
    check_end(network, TARGET, [again])


def test_the_earliest_deadline_is_found_whoever_ended_before() -> None:
    def sequence(name: str, ttl_seconds: float | None, now: float) -> TargetSequence:
        return TargetSequence.from_submit(
            "gateway", mortal(name, ttl_seconds), 8, NgramProposer(NO_NGRAM), now=now
        )

    deadlines = Deadlines()
    ever, first, second = sequence("ever", None, 0.0), sequence("a", 3.0, 0.0), sequence("b", 4.0, 2.0)
    assert [item.deadline for item in (ever, first, second)] == [math.inf, 3.0, 6.0]
    for item in (ever, first, second):
        deadlines.watch(item)
    live = [ever, first, second]
    assert deadlines.passed(live, 2.9) == []
    live.remove(first)
    assert deadlines.passed(live, 5.9) == []
    assert deadlines.passed(live, 6.0) == [second]
    assert deadlines.passed([ever], 1e9) == []
