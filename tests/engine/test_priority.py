"""Priorities: who is admitted, computed and given blocks first, who is preempted, and that nobody starves."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from paceline.actors.engine.blocks import BlockManager
from paceline.actors.engine.config import NgramConfig, TargetEngineConfig
from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.messages import Submit
from paceline.actors.engine.parameters import FinishReason, SpeculationParams, VerificationRule
from paceline.actors.engine.priority import AGING_SECONDS, check_priority, turn_of
from paceline.actors.engine.proposer import NgramProposer
from paceline.actors.engine.scheduler import Scheduler
from paceline.actors.engine.sequence import TargetSequence
from paceline.actors.engine.target_engine import TargetEngine
from tests.engine.fakes import Clock, HashLaw, HashRunner, Network, make_submit, reference
from tests.engine.test_target_engine import NO_NGRAM, NOISED, PERFECT, TARGET, UNRELATED, check_end


def sequence_of(name: str, length: int, priority: int = 0) -> TargetSequence:
    event = replace(make_submit(name, [1] * length, max_tokens=100), priority=priority)
    return TargetSequence.from_submit("gateway", event, 8, NgramProposer(NgramConfig()))


def scheduler_of(num_blocks: int, max_num_seqs: int = 8) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, 4), max_num_seqs, 32)


def names(sequences: list[TargetSequence]) -> list[str]:
    return [sequence.sequence_id for sequence in sequences]


def queue(scheduler: Scheduler, now: float = 0.0, **priorities: int) -> list[TargetSequence]:
    """Sequences of four tokens, in the order given."""
    sequences = [sequence_of(name, 4, priority) for name, priority in priorities.items()]
    for sequence in sequences:
        scheduler.add(sequence, now)
    return sequences


# ---------------------------------------------------------------- order


def test_lower_numbers_first_and_equals_as_they_arrived() -> None:
    scheduler = scheduler_of(100, max_num_seqs=3)
    queue(scheduler, a=0, b=5, c=0, d=-1, e=-1)
    assert names(scheduler.waiting) == ["d", "e", "a", "c", "b"]
    assert names(scheduler.admit()) == ["d", "e", "a"]
    assert names(scheduler.running) == ["d", "e", "a"]


def test_the_first_in_turn_is_computed_first() -> None:
    scheduler = scheduler_of(100)
    queue(scheduler, a=0, b=-1)
    late = sequence_of("late", 40, -2)
    scheduler.add(late)
    scheduler.admit()
    plan = scheduler.schedule({})
    assert [(item.sequence.sequence_id, item.num_tokens) for item in plan.scheduled] == [("late", 32)]


def test_one_who_does_not_fit_is_not_overtaken_by_the_less_important() -> None:
    scheduler = scheduler_of(10)
    queue(scheduler, a=0)
    scheduler.admit()
    scheduler.add(sequence_of("large", 40, -1))
    scheduler.add(sequence_of("small", 4))
    assert scheduler.admit() == []
    assert names(scheduler.waiting) == ["large", "small"]


def test_preempted_is_the_lowest_priority_and_of_these_the_latest() -> None:
    scheduler = scheduler_of(8)
    a, *_ = queue(scheduler, a=0, b=1, c=1)
    scheduler.admit()
    queue(scheduler, d=-1)
    scheduler.admit()
    assert names(scheduler.running) == ["d", "a", "b", "c"]
    a.token_ids.extend([1] * 20)
    assert names(scheduler.schedule({}).preempted) == ["c"]
    a.token_ids.extend([1] * 4)
    assert names(scheduler.schedule({}).preempted) == ["b"]
    assert names(scheduler.waiting) == ["b", "c"], "they keep their turns"


def test_the_least_important_gives_way_also_to_its_own_growth() -> None:
    scheduler = scheduler_of(4)
    a, b = queue(scheduler, a=0, b=1)
    scheduler.admit()
    a.token_ids.extend([1] * 4)
    scheduler.schedule({})
    b.token_ids.extend([1] * 8)
    assert names(scheduler.schedule({}).preempted) == ["b"]


# ---------------------------------------------------------------- no starvation


@pytest.mark.parametrize(("urgent", "late"), [(0, 1), (-3, 0), (-100, 100)])
def test_who_has_waited_long_enough_goes_ahead(urgent: int, late: int) -> None:
    """One place, and a newcomer of higher priority every second: more than can ever be served."""
    scheduler = scheduler_of(100, max_num_seqs=1)
    (first,) = queue(scheduler, 0.0, first=urgent)
    queue(scheduler, 0.0, patient=late)
    served: list[str] = []
    bound = AGING_SECONDS * (late - urgent)
    now = 0.0
    running = first
    scheduler.admit()
    while running.sequence_id != "patient":
        assert now <= 4 * bound + 10, "it starves"
        for _ in range(3):
            now += 1.0
            queue(scheduler, now, **{f"urgent {now}": urgent})
        scheduler.remove(running)
        (running,) = scheduler.admit()
        served.append(running.sequence_id)
    overtook = served[:-1]
    # Nobody who came later than the bound went ahead, and all who came within it did.
    assert overtook == [f"urgent {float(second)}" for second in range(1, round(bound))]


def test_a_turn_is_worth_ten_seconds_for_each_unit() -> None:
    assert turn_of(0, 100.0) == 100.0
    assert turn_of(1, 90.0) == turn_of(0, 100.0) == turn_of(-2, 120.0)


@pytest.mark.parametrize("priority", [-101, 101, 2**31 - 1])
def test_priorities_are_bounded(priority: int) -> None:
    with pytest.raises(InvalidArgumentError, match=r"\[-100, 100\]"):
        check_priority(priority)
    target = TargetEngine(HashRunner(), TargetEngineConfig())
    target.submit("gateway", replace(make_submit(), priority=priority))
    (finished,) = target.take_outbox().gateways["gateway"].finished
    assert finished.invalid_argument
    assert finished.error.startswith("priority: ")


# ---------------------------------------------------------------- a pool far too small


def crowd(rule: VerificationRule, num_requests: int, rng: random.Random) -> list[Submit]:
    """Requests that each fill the pool nearly to its end. Under the standard and block rules only greedy ones
    have the same ids whatever their drafts do; sampled ones keep their law."""
    events = []
    for index in range(num_requests):
        length = rng.randint(1, 20)
        event = make_submit(
            f"s{index}",
            [rng.randrange(32) for _ in range(length)],
            max_tokens=39 - length,
            temperature=rng.choice([0.0, 1.0]) if rule is VerificationRule.COUPLED else 0.0,
            seed=index,
        )
        events.append(
            replace(event, speculation=SpeculationParams(rule=rule), priority=rng.choice([-7, 0, 0, 3]))
        )
    return events


@pytest.mark.parametrize("rule", VerificationRule)
@pytest.mark.parametrize("law", [PERFECT, NOISED, UNRELATED], ids=["perfect", "noised", "unrelated"])
def test_a_pool_far_too_small_changes_no_token(law: HashLaw, rule: VerificationRule) -> None:
    """Eight sequences at a time on blocks for one and a few more tokens: all complete, with the ids that each
    has alone, though they preempt one another again and again."""
    rng = random.Random(5)
    clock = Clock()
    runner = HashRunner(TARGET, num_blocks=11)
    config = TargetEngineConfig(num_speculative_tokens=4, max_num_batched_tokens=64, ngram=NO_NGRAM)
    network = Network(TargetEngine(runner, config, clock), rng)
    network.join(law)
    events = crowd(rule, 10, rng)
    waiting = list(events)
    for _ in range(4000):
        if waiting and len(network.gateway.base) - len(network.gateway.finished) < 8:
            network.submit(waiting.pop(0))
        if network.target.wait_seconds() is None and not waiting:
            break
        clock.advance(0.1)
        network.settle_drafts()
        network.step_target()
        network.check()
    check_end(network, TARGET, events)
    snapshot = network.target.snapshot()
    assert snapshot.num_preemptions_total > 5
    if law is not UNRELATED:
        assert snapshot.num_accepted_tokens_total > 0


@pytest.mark.parametrize("rule", [VerificationRule.STANDARD, VerificationRule.BLOCK])
def test_sampled_requests_complete_on_a_pool_far_too_small(rule: VerificationRule) -> None:
    runner = HashRunner(TARGET, num_blocks=10)
    network = Network(TargetEngine(runner, TargetEngineConfig(num_speculative_tokens=4, ngram=NO_NGRAM)))
    network.join(NOISED)
    for index in range(8):
        event = make_submit(f"s{index}", range(index, index + 4), max_tokens=36, temperature=1.0, seed=index)
        network.submit(replace(event, speculation=SpeculationParams(rule=rule), priority=index % 3))
    network.run()
    ends = list(network.gateway.finished.values())
    assert [end.reason for end in ends] == [FinishReason.LENGTH] * 8
    assert {len(tokens) for tokens in network.gateway.completions.values()} == {36}
    assert network.target.snapshot().num_preemptions_total > 0
    load = network.target.load()
    assert load.free_blocks == load.total_blocks


@pytest.mark.parametrize("seed", range(6))
def test_whoever_fits_alone_ends_well_among_any_priorities(seed: int) -> None:
    """Arrivals at random, some of them cancelled: the others end as they do alone."""
    rng = random.Random(seed)
    clock = Clock()
    config = TargetEngineConfig(
        max_num_seqs=rng.choice([2, 5, 16]),
        max_num_batched_tokens=rng.choice([16, 64]),
        num_speculative_tokens=rng.choice([0, 3, None]),
        enable_prefix_caching=rng.random() < 0.7,
        ngram=NO_NGRAM,
    )
    network = Network(TargetEngine(HashRunner(TARGET, num_blocks=10), config, clock), rng)
    network.join(NOISED)
    shared = [rng.randrange(32) for _ in range(12)]
    events = [
        replace(
            make_submit(
                f"s{index}",
                shared[: rng.randint(1, 12)],
                max_tokens=rng.randint(1, 28),
                temperature=1.0,
                seed=index,
            ),
            priority=rng.randint(-2, 2),
        )
        for index in range(12)
    ]
    waiting = list(events)
    for _ in range(1000):
        clock.advance(rng.choice([0.0, 0.01, 8.0]))
        if waiting and rng.random() < 0.3:
            network.submit(waiting.pop())
        network.random_action()
        network.check()
    for event in waiting:
        network.submit(event)
    network.run()
    check_end(network, TARGET, events)
    for event in events:
        assert network.gateway.completions[(event.sequence_id, 1)] == reference(TARGET, event)[0]
