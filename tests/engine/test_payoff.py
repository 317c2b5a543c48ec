"""Drafts rest where steps show that they do not pay, whatever is foretold; and are tried again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from paceline.actors.engine.config import Hardware, NgramConfig, TargetEngineConfig
from paceline.actors.engine.drafts import DraftBook
from paceline.actors.engine.payoff import (
    LONGEST_REST,
    PLAIN_KNOWN_STEPS,
    PLAIN_STEPS,
    SHORTEST_REST,
    TRIAL_SHARE,
    Payoff,
)
from paceline.actors.engine.sequence import TargetSequence
from tests.engine.simulation import Simulation
from tests.engine.test_run_ahead import DRAFT, TARGET, rate, submit

STEP_SECONDS = 0.02
GAP_SECONDS = 0.002


class Steps:
    """Steps of a target, with drafts wherever the payoff allows them. A plain one takes 22 ms.

    Args:
        gain: tokens per second of steps with drafts / without.
        deviation: of the tokens that a sequence commits in such a step, relative to their mean.
    """

    def __init__(self, gain: Callable[[], float], num_sequences: int = 8, deviation: float = 0.0) -> None:
        self.payoff = Payoff()
        self.gain = gain
        self.num_sequences = num_sequences
        self.deviation = deviation / num_sequences**0.5
        self.rng = random.Random(num_sequences)
        self.drafted: list[bool] = []

    def run(self, num_steps: int) -> float:
        """The share of steps with drafts."""
        for _ in range(num_steps):
            drafting = not self.payoff.resting
            seconds = STEP_SECONDS + GAP_SECONDS
            luck = max(self.rng.gauss(1.0, self.deviation), 0.3)
            tokens = round(3 * luck * self.num_sequences) if drafting else self.num_sequences
            self.payoff.record(
                num_running=self.num_sequences,
                num_sequences=self.num_sequences,
                num_tokens=tokens,
                num_prompt_tokens=0,
                seconds=3 * seconds / self.gain() if drafting else seconds,
                plain_seconds=STEP_SECONDS,
                drafting=drafting,
            )
            self.drafted.append(drafting)
        return sum(self.drafted[-num_steps:]) / num_steps


def record(steps: Steps, seconds: float, *, num_prompt_tokens: int = 0, drafted: bool = False) -> None:
    """A step out of turn."""
    count = steps.num_sequences
    steps.payoff.record(
        num_running=count,
        num_sequences=count,
        num_tokens=3 * count if drafted else count,
        num_prompt_tokens=num_prompt_tokens,
        seconds=seconds,
        plain_seconds=STEP_SECONDS,
        drafting=drafted,
    )


def test_drafts_that_clearly_pay_never_rest() -> None:
    assert Steps(lambda: 3.5).run(20_000) == 1.0


def test_drafts_that_pay_a_little_rest_only_to_see_what_plain_steps_take() -> None:
    steps = Steps(lambda: 1.2)
    steps.run(4000)
    assert steps.drafted.count(False) == PLAIN_STEPS
    assert steps.payoff.gain == pytest.approx(1.2, rel=0.01)


def test_drafts_that_do_not_pay_rest_and_are_tried_ever_more_seldom() -> None:
    steps = Steps(lambda: 0.8)
    steps.run(3000)
    assert steps.run(5000) < 0.06
    text = "".join("d" if drafted else "." for drafted in steps.drafted)
    rests = [len(rest) for rest in text.split("d") if rest]
    assert rests[0] == PLAIN_STEPS
    assert SHORTEST_REST < rests[1] < rests[2] == min(2 * rests[1], LONGEST_REST)
    assert max(rests) == LONGEST_REST


@pytest.mark.parametrize("gain", [0.6, 0.8, 0.95])
def test_trials_cost_little_time_from_the_first_on(gain: float) -> None:
    """Of the time since the first verdict."""
    steps = Steps(lambda: gain)
    while steps.payoff.gain is None or steps.payoff.gain > 1.0 or not steps.payoff.resting:
        steps.run(1)
    begun = len(steps.drafted)
    steps.run(1500)
    drafted = sum(steps.drafted[begun:])
    lost = drafted * 3 / gain * (1.0 - gain)
    assert lost < 2.5 * TRIAL_SHARE * (1500 - drafted)


def test_drafts_that_have_become_better_are_taken_up_again() -> None:
    gains = [0.8]
    steps = Steps(lambda: gains[0])
    steps.run(1000)
    gains[0] = 1.3
    steps.run(LONGEST_REST + 50)
    assert steps.run(2000) == 1.0


def test_each_load_is_judged_for_itself() -> None:
    steps = Steps(lambda: 0.8 if steps.num_sequences > 32 else 3.5)
    for _ in range(20):
        steps.num_sequences = 64
        steps.run(100)
        steps.num_sequences = 4
        # The step that finds the new load was begun under the old one.
        steps.run(1)
        assert steps.run(99) == 1.0
    steps.num_sequences = 64
    steps.run(1)
    assert steps.run(200) < 0.5


def test_a_rest_is_not_over_by_steps_of_requests_that_want_no_drafts() -> None:
    steps = Steps(lambda: 0.8)
    steps.run(3000)
    while not steps.payoff.resting:
        steps.run(1)
    for _ in range(2 * LONGEST_REST):
        steps.payoff.record(
            num_running=8,
            num_sequences=8,
            num_tokens=8,
            num_prompt_tokens=0,
            seconds=0.022,
            plain_seconds=STEP_SECONDS,
            drafting=False,
            draftable=False,
        )
    assert steps.payoff.resting


def test_what_does_not_pay_for_few_is_not_tried_with_more_at_once() -> None:
    steps = Steps(lambda: 0.8)
    steps.run(300)
    assert steps.payoff.gain is not None
    steps.num_sequences = 16
    steps.run(1)
    rest = 0
    while steps.payoff.resting:
        rest += 1
        assert steps.run(1) == 0.0
    assert SHORTEST_REST < rest < LONGEST_REST


def test_what_does_not_pay_for_one_says_little_of_sixty_four() -> None:
    steps = Steps(lambda: 0.3, num_sequences=1)
    steps.run(400)
    steps.gain, steps.num_sequences = lambda: 2.0, 64
    steps.run(1)
    assert steps.run(SHORTEST_REST) < 0.05
    assert steps.run(100 + PLAIN_STEPS) > 0.9


@pytest.mark.parametrize("pause", [0.1, 1.0, 10.0])
def test_a_machine_that_stops_in_a_plain_step_does_not_speak_for_drafts(pause: float) -> None:
    steps = Steps(lambda: 0.8, num_sequences=16)
    while not steps.payoff.resting:
        steps.run(1)
    steps.run(3)
    record(steps, STEP_SECONDS + pause)
    steps.run(1000)
    assert steps.run(4000) < 0.05


@pytest.mark.parametrize("gain", [1.2, 2.5])
def test_a_machine_that_stops_in_a_step_with_drafts_does_not_speak_against_them(gain: float) -> None:
    steps = Steps(lambda: gain, num_sequences=16)
    steps.run(1000)
    record(steps, 10.0, drafted=True)
    assert steps.run(1000) == 1.0


@pytest.mark.parametrize(("every", "stall"), [(8, 0.6), (3, 0.6), (20, 1.0)])
def test_what_holds_steps_with_drafts_up_again_and_again_speaks_against_them(
    every: int, stall: float
) -> None:
    """Half of the steps are no accidents, but neither is one of eight."""
    steps = Steps(lambda: 2.0)
    steps.run(200)
    lost = 0.0
    for index in range(20_000):
        drafting = not steps.payoff.resting
        if drafting and index % every == 0:
            record(steps, 0.033 + stall, drafted=True)
            lost += stall
        else:
            steps.run(1)
    assert lost < 0.12 * 20_000 * (STEP_SECONDS + GAP_SECONDS), "what it took to find out, and trials"
    assert steps.payoff.gain is not None
    assert steps.payoff.gain < 1.0


def test_trials_of_drafts_that_lose_nearly_everything_are_short() -> None:
    steps = Steps(lambda: 0.1, num_sequences=1)
    steps.run(20_000)
    drafted = steps.drafted.count(True)
    assert drafted * 3 / 0.1 < 0.05 * 20_000
    assert drafted > 10


def rested(gain: float = 0.8) -> Steps:
    """At the end of a rest of ``LONGEST_REST`` steps."""
    steps = Steps(lambda: gain)
    while not steps.payoff.resting or steps.payoff.gain is None:
        steps.run(1)
    for _ in range(5):
        while steps.payoff.resting:
            steps.run(1)
        begun = len(steps.drafted)
        while not steps.payoff.resting:
            steps.run(1)
    while steps.payoff.resting:
        steps.run(1)
    assert len(steps.drafted) - begun > 0.9 * LONGEST_REST
    return steps


def catch_up(steps: Steps, num_steps: int, seconds: float) -> None:
    for _ in range(num_steps):
        count = steps.num_sequences
        steps.payoff.record(
            num_running=count,
            num_sequences=count,
            num_tokens=count,
            num_prompt_tokens=0,
            seconds=seconds,
            plain_seconds=STEP_SECONDS,
            drafting=True,
            catching_up=True,
        )


def test_drafts_that_have_to_catch_up_after_a_rest_are_not_judged_by_that() -> None:
    steps = rested()
    steps.gain = lambda: 2.0
    catch_up(steps, 200, 1.1 * (STEP_SECONDS + GAP_SECONDS))
    assert not steps.payoff.resting
    assert steps.run(2000) > 0.99


@pytest.mark.parametrize(("num_steps", "seconds"), [(300, 0.0242), (40, 0.066)])
def test_drafts_that_catch_up_for_ever_or_at_a_great_cost_rest_again(num_steps: int, seconds: float) -> None:
    steps = rested()
    catch_up(steps, num_steps, seconds)
    assert steps.payoff.resting


def test_catching_up_without_a_rest_is_part_of_what_drafts_cost_and_counts_once() -> None:
    """Of newcomers, say: it makes no later rest longer."""
    rests: list[int] = []
    for flagged in (False, True):
        steps = Steps(lambda: 1.6)
        for _ in range(40):
            steps.run(100)
            if flagged:
                catch_up(steps, 1, 2 * STEP_SECONDS)
        steps.gain = lambda: 0.95
        while not steps.payoff.resting or (steps.payoff.gain or 2.0) > 1.0:
            steps.run(1)
        begun = len(steps.drafted)
        while steps.payoff.resting:
            steps.run(1)
        rests.append(len(steps.drafted) - begun)
    assert rests[1] < 1.5 * rests[0]


def test_what_plain_steps_take_is_looked_at_again_however_much_drafts_seem_to_bring() -> None:
    steps = Steps(lambda: 2.0)
    steps.run(100)
    steps.gain = lambda: 4.0
    steps.run(PLAIN_KNOWN_STEPS + 1)
    assert steps.drafted.count(False) == 2 * PLAIN_STEPS


def test_a_rest_passes_at_whatever_load() -> None:
    steps = Steps(lambda: 0.8 if steps.num_sequences == 16 else 2.0, num_sequences=16)
    steps.run(3000)
    while not steps.payoff.resting:
        steps.run(1)
    steps.num_sequences = 4
    steps.run(LONGEST_REST)
    steps.payoff.expect(16)
    assert not steps.payoff.resting


def test_the_load_of_the_coming_step_decides() -> None:
    """One that swings between two loads, of which drafts pay at one."""
    steps = Steps(lambda: 0.5 if steps.num_sequences == 8 else 3.5)
    share = {7: 0.0, 8: 0.0}
    for _ in range(2000):
        for steps.num_sequences in share:
            steps.payoff.expect(steps.num_sequences)
            share[steps.num_sequences] += steps.run(1) / 2000
    assert share[7] > 0.99
    assert share[8] < 0.05


def test_loads_that_take_turns_do_not_each_have_trials_of_their_own() -> None:
    steps = Steps(lambda: 0.8)
    sizes = [1, 2, 4, 8, 16, 32, 64]
    for index in range(6000):
        steps.num_sequences = sizes[index // 20 % len(sizes)]
        steps.payoff.expect(steps.num_sequences)
        steps.run(1)
    assert sum(steps.drafted[2000:]) < 0.06 * 4000


def test_drafts_that_come_and_go_do_not_undo_what_was_learnt() -> None:
    steps = Steps(lambda: 0.5)
    for _ in range(100):
        steps.payoff.note_draft()
        steps.run(60)
    assert sum(steps.drafted[1000:]) < 0.03 * 5000


def test_a_new_draft_is_tried_at_once() -> None:
    steps = Steps(lambda: 0.8)
    steps.run(3000)
    while not steps.payoff.resting:
        steps.run(1)
    steps.payoff.note_draft()
    steps.gain = lambda: 1.5
    assert steps.run(1000) == 1.0


def test_others_are_given_a_try_before_a_long_rest_is_over() -> None:
    steps = Steps(lambda: 0.8)
    steps.run(3000)
    while steps.payoff.resting:
        steps.run(1)
    while not steps.payoff.resting:
        steps.run(1)
    for _ in range(steps.num_sequences):
        steps.payoff.note_arrival()
    rest = 0
    while steps.payoff.resting:
        rest += 1
        steps.run(1)
    assert SHORTEST_REST < rest < LONGEST_REST / 2


def test_steps_that_read_prompts_before_drafts_begin_are_no_yardstick() -> None:
    """They take long for their prompts, and by what a size is thought to cost before it was met."""
    steps = Steps(lambda: 0.8)
    for _ in range(4):
        record(steps, 0.25, num_prompt_tokens=4000)
    steps.run(1000)
    assert steps.payoff.gain == pytest.approx(0.8, rel=0.02)
    assert steps.run(2000) < 0.1


def test_a_plain_step_or_two_do_not_make_a_yardstick() -> None:
    steps = Steps(lambda: 1.2)
    for _ in range(2):
        record(steps, 0.1)
    steps.run(2000)
    assert steps.drafted.count(False) == PLAIN_STEPS


@pytest.mark.parametrize("num_sequences", [1, 16])
def test_chance_alone_puts_good_drafts_to_rest_but_rarely(num_sequences: int) -> None:
    steps = Steps(lambda: 1.2, num_sequences, deviation=0.5)
    assert steps.run(20_000) > 0.97


# ---------------------------------------------------------------- through the engines, in simulated time


def speed_of(*, drafted: bool, message_seconds: float) -> tuple[float, float]:
    """Tokens per second of a sequence, and the gain that the target states at its end."""
    run = Simulation(
        TARGET,
        DRAFT,
        TargetEngineConfig(hardware=Hardware.SEPARATE, ngram=NgramConfig(enabled=False)),
        message_seconds=message_seconds,
    )
    run.submit(submit("a", 4000, drafted=drafted))
    run.run()
    run.target.check_invariants()
    return rate(run, ["a"]), run.target.snapshot().drafting_gain


def test_while_drafts_rest_nobody_is_told_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    resting = False
    told: list[tuple[str, int]] = []
    report = DraftBook.report

    def spied(self: DraftBook, sequence: TargetSequence, window: int, *rest: Any) -> None:
        told.append((sequence.sequence_id, window))
        report(self, sequence, window, *rest)

    monkeypatch.setattr(Payoff, "resting", property(lambda self: resting))
    monkeypatch.setattr(DraftBook, "report", spied)
    config = TargetEngineConfig(hardware=Hardware.SEPARATE, ngram=NgramConfig(enabled=False))
    run = Simulation(TARGET, DRAFT, config)
    run.submit(submit("a", 400))
    run.run_on(0.5)
    assert max(window for _, window in told) > 0
    resting = True
    run.run_on(0.1)  # the first step of the rest tells all that were asked for something
    assert told[-1] == ("a", 0)
    told.clear()
    run.submit(submit("b", 400), 0.7)
    run.run_on(0.5)
    assert told == []
    assert run.target.snapshot().num_running == 2
    resting = False
    run.run_on(0.2)
    assert {name for name, window in told if window} == {"a", "b"}
    run.run()
    run.target.check_invariants()
    assert {len(run.tokens[name]) for name in "ab"} == {400}


def test_costs_that_no_forecast_knows_end_drafting() -> None:
    """Each message of the draft holds the target up, as a busy machine or a lock does."""
    plain, _ = speed_of(drafted=False, message_seconds=0.0)
    free, gain = speed_of(drafted=True, message_seconds=0.0)
    assert free > 1.8 * plain
    assert gain > 1.8
    dear, gain = speed_of(drafted=True, message_seconds=0.008)
    assert gain < 1.0
    assert dear > 0.93 * plain


def test_drafts_that_were_slow_for_a_while_are_taken_up_with_the_first_trial_after_that() -> None:
    """While they rested 24 sequences have each said a thousand tokens that they know nothing of yet."""
    run = Simulation(
        f"{TARGET}&max_model_len=4096",
        "emulated://d?base_ms=2&per_token_ms=0.05&acceptance=0.85&vocab_size=256&max_model_len=4096",
        TargetEngineConfig(hardware=Hardware.SEPARATE, ngram=NgramConfig(enabled=False)),
        message_seconds=0.01,
    )
    for index in range(24):
        run.submit(submit(f"{index}", 3000))

    def mend() -> None:
        run._message_seconds = 0.0

    run.at(15.0, mend)
    run.run(until=20.0)
    assert run.target.snapshot().drafts_rest
    before = run.target.snapshot().num_committed_tokens_total
    run.run(until=36.0)
    snapshot = run.target.snapshot()
    assert not snapshot.drafts_rest
    assert snapshot.drafting_gain > 1.5
    assert snapshot.num_committed_tokens_total - before > 1.5 * 24 * 16.0 / STEP_SECONDS
