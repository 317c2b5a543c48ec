"""The target engine: when a step waits for drafts, and when drafts are left alone."""

from __future__ import annotations

from paceline.actors.engine.chain import DraftChain
from paceline.actors.engine.config import NgramConfig, TargetEngineConfig
from paceline.actors.engine.estimates import AcceptanceEstimate
from paceline.actors.engine.messages import Candidates
from paceline.actors.engine.sequence import Drafting
from paceline.actors.engine.target_engine import TargetEngine
from tests.engine.fakes import Clock, HashLaw, HashRunner, hello, make_submit, reference

TARGET = HashLaw()
NO_NGRAM = NgramConfig(enabled=False)


def timed_target(clock: Clock, seconds_per_step: float) -> TargetEngine:
    runner = HashRunner(on_forward=lambda _: clock.advance(seconds_per_step))
    return TargetEngine(runner, TargetEngineConfig(num_speculative_tokens=4, ngram=NO_NGRAM), clock)


def test_waits_for_a_lively_draft_and_not_for_a_silent_one() -> None:
    clock = Clock()
    target = timed_target(clock, 0.1)
    target.draft_joined("d", hello())
    event = make_submit(max_tokens=60)
    whole, _ = reference(TARGET, event)
    target.submit("gateway", event)
    assert target.wait_seconds() == 0.0
    target.step()
    # Nothing came from it yet: it may be busy with the prompt.
    assert target.wait_seconds() == 0.0
    target.candidates("d", [Candidates("s", 1, 4, (whole[1],), 0)], 0.005)
    wait = target.wait_seconds()
    assert wait is not None
    assert 0.0 < wait <= 0.0125
    clock.advance(0.005)
    target.candidates("d", [Candidates("s", 1, 5, tuple(whole[2:5]), 0)], 0.005)
    assert target.wait_seconds() == 0.0, "the tail is complete"
    target.step()
    assert target.wait_seconds() > 0.0  # type: ignore[operator]
    clock.advance(0.06)
    assert target.wait_seconds() == 0.0, "late"
    target.step()
    assert target.wait_seconds() == 0.0, "silent since"


def test_another_sequence_is_held_up_only_while_that_brings_more_in_all() -> None:
    clock = Clock()
    target = timed_target(clock, 0.1)
    target.draft_joined("d", hello(capacity=1))
    event = make_submit(max_tokens=60)
    whole, _ = reference(TARGET, event)
    target.submit("gateway", event)
    target.step()
    target.candidates("d", [Candidates("s", 1, 4, (whole[1],), 0)], 0.005)
    assert target.wait_seconds() > 0.0  # type: ignore[operator]
    target.submit("gateway", make_submit("undrafted", max_tokens=60))
    # Another 0.6 tokens for 5 ms, of a step of 100 ms: both gain more than they lose.
    assert target.wait_seconds() > 0.0  # type: ignore[operator]
    for index in range(40):
        target.submit("gateway", make_submit(f"undrafted {index}", max_tokens=60))
    assert target.wait_seconds() == 0.0, "41 tokens wait for a fraction of one"


def test_a_neighbour_is_never_held_up_by_more_than_a_step() -> None:
    clock = Clock()
    target = timed_target(clock, 0.01)
    target.measure_step_costs()
    target.draft_joined("d", hello(capacity=1))
    event = make_submit(max_tokens=60)
    whole, _ = reference(TARGET, event)
    target.submit("gateway", event)
    target.submit("gateway", make_submit("undrafted", max_tokens=60))
    target.step()
    began = clock()
    # A draft that looks fast, and answers more and more slowly.
    for position, gap in ((4, 0.001), (5, 0.002), (6, 0.004), (7, 0.008)):
        target.candidates("d", [Candidates("s", 1, position, (whole[position - 3],), 0)], 0.001)
        wait = target.wait_seconds()
        assert wait is not None
        assert clock() + wait - began <= 0.0101
        if wait == 0.0:
            break
        clock.advance(gap)


def after_the_prompt(clock: Clock) -> tuple[TargetEngine, int, list[int]]:
    """A fast target with a draft and one sequence, whose first token is out; the prompt's length, and all
    that the target will say."""
    target = timed_target(clock, 0.001)
    target.draft_joined("d", hello())
    event = make_submit(max_tokens=40)
    whole, _ = reference(TARGET, event)
    target.submit("gateway", event)
    target.step()
    return target, len(event.token_ids), whole


def test_a_draft_as_fast_as_the_target_catches_up() -> None:
    """Whatever it says is outdated by the time it comes, unless the target waits for its answer."""
    clock = Clock()
    target, prompt, whole = after_the_prompt(clock)
    # The first is made before the first verdict is heard of, and wrong.
    wrong = (whole[0] + 1) % 50
    target.candidates("d", [Candidates("s", 1, prompt, (wrong,), 0)], 0.001)
    wait = target.wait_seconds()
    assert wait is not None
    assert wait > 0.0, "an answer to the verdict is due"
    target.step()
    # Late by one step, again and again: it is alive, and how long its answers take becomes known.
    for step in range(1, 6):
        clock.advance(0.006)
        target.candidates("d", [Candidates("s", 1, prompt + step, (wrong,), step)], 0.001)
        assert target.wait_seconds() > 0.0  # type: ignore[operator]
        target.step()
    (draft,) = target.snapshot().drafts
    assert 0.012 < draft.response_seconds < 0.014, "two pauses and a step"
    clock.advance(0.006)
    target.candidates("d", [Candidates("s", 1, prompt + 6, tuple(whole[6:11]), 6)], 0.001)
    assert target.wait_seconds() == 0.0
    before = target.snapshot().num_accepted_tokens_total
    target.step()
    assert target.snapshot().num_accepted_tokens_total == before + 4, "all but the first, which was committed"


def test_a_fixed_tail_is_waited_for_whatever_the_rate() -> None:
    clock = Clock()
    target, prompt, whole = after_the_prompt(clock)
    # A draft token takes as long as twenty steps of the target.
    target.candidates("d", [Candidates("s", 1, prompt + 1, (whole[1],), 0)], 0.02)
    for count in range(2, 5):
        assert 0.0 < target.wait_seconds() <= 0.05  # type: ignore[operator]
        clock.advance(0.02)
        target.candidates("d", [Candidates("s", 1, prompt + count, (whole[count],), 0)], 0.02)
    assert target.wait_seconds() == 0.0


def test_resting_draft_gets_no_traffic() -> None:
    """A draft as slow as the target, and a target that loses by waiting: no windows, no verdicts."""
    clock = Clock()
    runner = HashRunner(on_forward=lambda batch: clock.advance(0.01 * sum(len(i.token_ids) for i in batch)))
    target = TargetEngine(runner, TargetEngineConfig(ngram=NO_NGRAM), clock)
    target.draft_joined("d", hello())
    target.submit("gateway", make_submit(max_tokens=200))
    target.step()
    told = 0
    for step in range(150):
        target.candidates("d", [Candidates("s", 1, 4 + step, (0,), 0)], 0.05)
        target.step()
        told += len(target.take_outbox().drafts)
    assert told < 20


def test_measuring_step_costs_leaves_nothing_behind() -> None:
    clock = Clock()
    target = timed_target(clock, 0.1)
    before = target.load()
    target.measure_step_costs()
    assert target.load() == before
    assert target.snapshot().num_steps_total == 0
    target.check_invariants()


def test_a_draft_that_prepares_corrections_counts_as_busy_when_its_chain_is_full() -> None:
    """Else steps beside its work would pass for steps at rest, and shared hardware for separate."""
    drafting = Drafting("d", 3, 2, DraftChain(token_ids=[1, 2]), AcceptanceEstimate())
    assert not drafting.busy
    drafting.tell(3, 2, 0.0, branch_tokens=2)
    assert drafting.busy
    drafting.tell(3, 2, 0.0)
    assert not drafting.busy
