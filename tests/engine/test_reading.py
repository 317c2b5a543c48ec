"""A draft on its target's hardware reads a prompt where that pays, and now and then to be measured anew."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from paceline.actors.engine.attached_draft import Draft
from paceline.actors.engine.config import Hardware, NgramConfig, TargetEngineConfig
from paceline.actors.engine.estimates import DraftStepCost
from paceline.actors.engine.messages import Candidates, DraftHello
from paceline.actors.engine.reading import (
    DOUBT_SECONDS,
    LONGEST_REST,
    SHORTEST_REST,
    TRIAL_SHARE,
    AnswerLengths,
    Reading,
    Trials,
    worth_reading,
)
from tests.engine.simulation import Simulation
from tests.engine.test_run_ahead import DRAFT, TARGET, simulation, submit

SLOW_READER = DRAFT + "&free_tokens=1&per_token_ms=2"
"""A prompt of 200 tokens takes it 0.4 s."""
PROMPT = 200


def num_read(run: Simulation) -> int:
    """Prompt tokens that the draft has computed."""
    assert run.draft is not None
    return run.draft.snapshot().num_prefill_tokens_total


def num_awake(run: Simulation) -> int:
    """Sequences that the draft is asked for tokens of."""
    sequences = next(iter(run.target._book.drafts.values())).sequences.values()
    return sum(item.drafting is not None and item.drafting.window > 0 for item in sequences)


def test_answers_are_expected_to_be_as_long_as_lately_and_no_longer_than_they_may() -> None:
    lengths = AnswerLengths()
    assert lengths.expected_left(0, 500) == 500
    lengths.add(100)
    assert lengths.expected_left(0, 500) == 100
    assert lengths.expected_left(70, 500) == 100
    assert lengths.expected_left(70, 30) == 30
    for _ in range(100):
        lengths.add(20)
    assert lengths.expected_left(0, 500) == pytest.approx(20, abs=1)
    assert lengths.expected_left(200, 500) == 200


@pytest.mark.parametrize(("num_sequences", "pays"), [(1, True), (4, True), (5, False)])
def test_all_wait_for_what_one_reads_and_it_brings_but_its_share(num_sequences: int, pays: bool) -> None:
    found = worth_reading([Reading(0.25, 100.0, 0.0101)], num_sequences)
    assert found == ([0] if pays else [])


def test_what_pays_carries_what_nearly_does_but_not_what_is_far_too_dear() -> None:
    good, short, dear = Reading(0.1, 100.0, 0.01), Reading(0.3, 10.0, 0.01), Reading(9.0, 100.0, 0.01)
    assert worth_reading([short], 1) == []
    assert worth_reading([short, dear, good], 1) == [2, 0]
    assert worth_reading([short, dear, good], 4) == [2]
    assert worth_reading([dear], 1) == []


def test_a_first_step_that_reads_a_prompt_says_little_of_those_that_follow() -> None:
    cost = DraftStepCost()
    cost.record(192, 0.384)
    assert cost.expected(192) == pytest.approx(0.384)
    assert cost.expected(1) == pytest.approx(0.002)
    assert cost.expected(8) == pytest.approx(0.016)
    assert cost.bound(1) == pytest.approx(0.384)
    cost.record(4, 0.03)
    assert cost.expected(4) == pytest.approx(0.03)
    assert cost.expected(8) == pytest.approx(0.03 + 4 * (0.384 - 0.03) / 188)


def test_reading_for_nothing_does_not_pay_even_where_it_costs_nothing() -> None:
    assert worth_reading([Reading(0.0, 100.0, 0.0)], 1) == []
    assert worth_reading([Reading(0.0, 100.0, 0.0), Reading(0.0, 1.0, 1e-6)], 1) == [1]


def test_trials_take_a_share_of_the_rest_or_of_what_is_left() -> None:
    trials = Trials()
    assert trials.due(0.0, 0.0, 100.0), "nothing is known yet"
    assert not trials.due(0.1, 0.0, 100.0)
    trials.note_rest(100.0)
    trials.note_rest(101.0)
    assert not trials.due(0.1, 0.0, 100.0 + 0.08 / TRIAL_SHARE)
    assert trials.due(0.1, 0.0, 100.0 + 0.1 / TRIAL_SHARE)
    assert not trials.due(10.0, 0.0, 100.0 + DOUBT_SECONDS)
    assert trials.due(10.0, 0.0, 100.0 + 3 * DOUBT_SECONDS)
    assert trials.due(0.1, 0.11 / TRIAL_SHARE, 101.0)
    trials.note_news()
    assert not trials.due(0.1, 0.0, 200.0)


def test_trials_that_fail_are_ever_rarer_whether_or_not_anything_is_heard() -> None:
    trials = Trials()
    moments = []
    for tenth in range(10_000):
        now = tenth / 10
        trials.note_rest(now)
        if trials.due(0.0, 0.0, now):
            trials.begin(now)
            moments.append(now)
    pauses = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert pauses[:6] == pytest.approx([SHORTEST_REST * 2**n for n in range(6)])
    assert pauses[6:] == pytest.approx([LONGEST_REST] * len(pauses[6:]))
    trials.note_paying()
    trials.begin(2000.0)
    assert trials.due(0.0, 0.0, 2000.0 + SHORTEST_REST)


@pytest.mark.parametrize(("hardware", "num_prompts"), [(Hardware.SHARED, 1), (Hardware.SEPARATE, 6)])
def test_the_prompts_of_short_answers_are_left_to_the_target_where_the_draft_would_hold_it_up(
    hardware: Hardware, num_prompts: int
) -> None:
    run = simulation(hardware, draft=SLOW_READER)
    for index in range(6):
        run.submit(submit(f"short {index}", 15, prompt=PROMPT), time=1.5 * index)
    run.run()
    assert num_read(run) == pytest.approx(num_prompts * PROMPT, abs=50 * num_prompts)


def test_those_of_long_answers_are_read() -> None:
    run = simulation(Hardware.SHARED, draft=SLOW_READER)
    for index in range(3):
        run.submit(submit(f"long {index}", 300, prompt=PROMPT), time=5.0 * index)
    run.run()
    assert num_read(run) > 2.5 * PROMPT
    assert run.target.snapshot().num_accepted_tokens_total > 400


def test_nothing_is_read_for_the_end_of_an_answer() -> None:
    """Another draft comes when there are 20 of 300 tokens to go."""
    run = simulation(Hardware.SHARED, draft=SLOW_READER)
    run.submit(submit("first", 300, prompt=PROMPT))
    run.run()
    assert run.draft is not None
    read = num_read(run)
    hello = next(iter(run.target._book.drafts.values())).hello
    run.target.draft_left("d")
    run.draft.target_left("t")
    run.submit(submit("second", 300, prompt=PROMPT), time=run.now)
    run.run(until=run.now + 0.02 * 280)
    run.draft.target_joined("t", 256)
    run.target.draft_joined("d", hello)
    known = run.target._book.drafts["d"]
    known.hear(PROMPT, 0.4, [], 1)
    known.hear(1, 0.002, [], 1)
    run.run()
    assert len(run.tokens["second"]) == 300
    assert num_read(run) == read


def test_a_draft_at_rest_is_tried_by_one_sequence_at_a_time_and_seldom() -> None:
    """Eight streams of short answers for a minute: reading 0.4 s may be tried each 20 s."""
    run = simulation(Hardware.SHARED, draft=SLOW_READER)
    for stream in range(8):
        for turn in range(40):
            run.submit(submit(f"{stream} {turn}", 30, prompt=PROMPT), time=1.5 * turn + 0.05 * stream)
    most_awake = 0
    at = 3.0
    while at < 60.0:
        run.run(until=at)
        most_awake = max(most_awake, num_awake(run))
        at += 0.01
    run.run()
    assert most_awake == 1
    assert 2 * PROMPT <= num_read(run) <= 6 * PROMPT


def test_while_nothing_is_known_of_a_draft_it_reads_one_prompt() -> None:
    run = simulation(Hardware.SHARED, draft=DRAFT.replace("base_ms=2", "base_ms=200"))
    for index in range(8):
        run.submit(submit(f"{index}", 300, prompt=8))
    run.run(until=0.15)  # the target has read them all, and waits for nobody's prompt
    assert num_awake(run) == 1
    run.run()


def test_a_draft_that_never_answers_one_sequence_is_tried_with_the_next() -> None:
    run = simulation(Hardware.SHARED)
    assert run.draft is not None
    receive = run.target.candidates

    def without_first(peer: str, messages: list[Candidates], *args: Any, **named: Any) -> None:
        others = [item for item in messages if item.sequence_id != "0"]
        if others:
            receive(peer, others, *args, **named)

    run.target.candidates = without_first  # type: ignore[method-assign,assignment]
    for index in range(4):
        run.submit(submit(f"{index}", 200))
    run.run()
    assert run.target.snapshot().num_accepted_tokens_total > 60


@pytest.mark.parametrize(("num_sequences", "slower"), [(1, 15), (4, 50), (8, 50)])
def test_a_draft_that_was_slow_for_a_while_is_used_again(num_sequences: int, slower: int) -> None:
    """Although what it would have to read grows faster than its share of the time for trials, and although
    the answer to a trial is one beside many that were slow."""
    run = simulation(Hardware.SHARED)
    assert run.draft is not None
    forward = run.draft._runner.forward

    def slowed(batch: list[Any]) -> Any:
        logits = forward(batch)
        if 2.0 < run.now < 3.5:
            run.draft_device.clock.advance(0.002 * slower)
        return logits

    run.draft._runner.forward = slowed  # type: ignore[method-assign]
    for index in range(num_sequences):
        run.submit(submit(f"d{index}", 2500))
    run.run(until=15.0)
    accepted = run.target.snapshot().num_accepted_tokens_total
    run.run(until=18.0)
    assert run.target.snapshot().num_accepted_tokens_total - accepted > 100 * num_sequences


def test_what_a_draft_reads_after_a_rest_does_not_pass_for_a_slow_answer() -> None:
    run = simulation(Hardware.SHARED, draft=SLOW_READER)
    run.submit(submit("d", 2000, prompt=2000))
    run.run()
    assert run.now < 30.0, "40 without a draft"


def test_steps_of_many_sequences_do_not_pass_for_reading() -> None:
    draft = Draft("d", DraftHello("d", "draft", 256, 64, 1024, "model"))
    for _ in range(9):
        draft.hear(20, 0.005, [], 20)
        draft.hear(4, 0.005, [], 4)
    assert draft.reading_seconds(1000) == 0.0
    draft.hear(1024, 0.015, [], 4)
    assert draft.reading_seconds(1024) == pytest.approx(0.010)


def test_a_step_that_the_target_slowed_down_is_believed_where_it_is_faster_or_the_first() -> None:
    cost = DraftStepCost()
    cost.record(1, 0.006, disturbed=True)
    assert cost.expected(1) == pytest.approx(0.006)
    cost.record(1, 0.004)
    assert cost.expected(1) == pytest.approx(0.004)
    for _ in range(9):
        cost.record(1, 0.008, disturbed=True)
    assert cost.expected(1) == pytest.approx(0.004)
    for _ in range(9):
        cost.record(1, 0.003, disturbed=True)
    assert cost.expected(1) == pytest.approx(0.003)


def test_long_answers_after_short_ones_have_drafts_before_one_of_them_has_ended() -> None:
    run = simulation(Hardware.SHARED, draft=DRAFT + "&free_tokens=1&per_token_ms=0.3")
    for index in range(20):
        run.submit(submit(f"short {index}", 10, prompt=PROMPT), time=0.3 * index)
    for index in range(4):
        run.submit(submit(f"long {index}", 800, prompt=PROMPT), time=8.0)
    run.run(until=16.0)
    assert num_awake(run) >= 3


def test_tails_of_fixed_length_are_drafted_whatever_has_to_be_read() -> None:
    config = TargetEngineConfig(
        hardware=Hardware.SHARED, num_speculative_tokens=3, ngram=NgramConfig(enabled=False)
    )
    run = Simulation(TARGET, SLOW_READER, config)
    for index in range(4):
        run.submit(submit(f"{index}", 60, prompt=PROMPT), time=2.0 * index)
    run.run()
    assert num_read(run) > 3 * PROMPT
