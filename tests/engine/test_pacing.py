"""How far to draft, how much to verify, when to wait, and what is learnt from step times."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from paceline.actors.engine.config import Hardware
from paceline.actors.engine.estimates import (
    LONE_RECORDS,
    AcceptanceEstimate,
    RecentMedian,
    StepCostModel,
    StepCosts,
    token_bucket,
)
from paceline.actors.engine.pacing import (
    Awaited,
    OverlapProbe,
    allocate_tails,
    best_num_speculative_tokens,
    draft_window,
    expected_tokens,
    fit_tails,
    go_or_wait,
    useful_depth,
)


def linear(base: float, per_token: float):  # type: ignore[no-untyped-def]
    return lambda tokens: base + per_token * tokens


# ---------------------------------------------------------------- expected tokens


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.99, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 4, 9])
def test_expected_tokens_by_enumeration(alpha: float, gamma: int) -> None:
    exact = sum(alpha**k * (1 - alpha) * (k + 1) for k in range(gamma)) + alpha**gamma * (gamma + 1)
    assert expected_tokens(alpha, gamma) == pytest.approx(exact)
    assert expected_tokens([alpha] * 3, gamma) == pytest.approx(exact)


def test_expected_tokens_per_depth() -> None:
    assert expected_tokens([0.9, 0.5], 2) == pytest.approx(1 + 0.9 + 0.45)
    assert expected_tokens([0.9, 0.5], 3) == pytest.approx(1 + 0.9 + 0.45 + 0.225)


# ---------------------------------------------------------------- best tail length


def test_best_length_maximises_the_rate_by_brute_force() -> None:
    for alpha, draft, rtt, per_token in itertools.product(
        (0.2, 0.6, 0.85), (0.01, 0.1), (0.0, 0.05), (0.0, 0.02, 0.3)
    ):
        cost = linear(0.3, per_token)
        rates = [1 / cost(1)] + [
            expected_tokens(alpha, g) / (g * draft + rtt + cost(g + 1)) for g in range(1, 9)
        ]
        assert best_num_speculative_tokens(alpha, draft, rtt, cost, 8, True) == rates.index(max(rates))


def test_best_length_on_the_slow_pair_is_about_two() -> None:
    # A verify of γ + 1 tokens costs little more than one; a draft token costs a third of a step.
    assert best_num_speculative_tokens(0.75, 0.09, 0.001, linear(0.25, 0.02), 8, True) in (2, 3)


def test_useless_or_dear_drafts_are_not_asked() -> None:
    assert best_num_speculative_tokens(0.05, 0.1, 0.0, linear(0.3, 0.01), 8, True) == 0
    assert best_num_speculative_tokens(0.9, 1.0, 0.0, linear(0.3, 0.0), 8, True) == 0
    # Under load a token costs a token: nothing to gain.
    assert best_num_speculative_tokens(0.9, 0.001, 0.0, linear(0.0, 1.0), 8, True) == 0


def test_run_ahead_never_asks_for_less_where_the_round_trip_dominates() -> None:
    cost = linear(0.05, 0.0)
    taking_turns = best_num_speculative_tokens(0.95, 0.01, 0.02, cost, 16, True)
    running_ahead = best_num_speculative_tokens(0.95, 0.01, 0.02, cost, 16, False)
    assert taking_turns > 0
    assert running_ahead > 0


def test_window() -> None:
    deep = 64
    assert draft_window(0, 0.01, 0.0, 0.1, True, 26, deep) == 0
    assert draft_window(4, 0.01, 0.0, 0.1, False, 26, deep) == 4
    assert draft_window(4, 0.1, 0.0, 0.1, True, 26, deep) == 9
    assert draft_window(4, 0.01, 0.02, 0.1, True, 26, deep) == 16
    assert draft_window(4, 0.0001, 0.02, 0.1, True, 26, deep) == 26
    assert draft_window(4, 0.0, 0.0, 0.0, True, 26, deep) == 9
    # No further than tokens are of use, but to the bonus position in any case.
    assert draft_window(4, 0.01, 0.02, 0.1, True, 26, 12) == 12
    assert draft_window(4, 0.01, 0.02, 0.1, True, 26, 2) == 5
    assert draft_window(4, 0.01, 0.0, 0.1, False, 26, 2) == 4


@pytest.mark.parametrize(
    ("acceptance", "num_sequences", "depth"),
    [(0.8, 1, 13), (0.8, 16, 7), (0.8, 10_000, 3), (0.99, 1, 298), (0.3, 64, 1), (1.0, 1, 298)],
)
def test_a_draft_runs_ahead_while_its_tokens_are_likely_to_be_needed(
    acceptance: float, num_sequences: int, depth: int
) -> None:
    assert useful_depth(acceptance, num_sequences) == depth


# ---------------------------------------------------------------- tails of one step


def test_allocation_is_the_best_of_all_by_brute_force() -> None:
    rng = random.Random(3)
    for _ in range(60):
        available = [rng.randint(0, 3) for _ in range(3)]
        alphas = [rng.uniform(0.05, 0.95) for _ in range(3)]
        cost = linear(rng.uniform(0, 1), rng.uniform(0.01, 1))
        elapsed = rng.choice([0.0, 0.3])
        rates = {
            taken: sum(expected_tokens(a, k) for a, k in zip(alphas, taken, strict=True))
            / (elapsed + cost(3 + sum(taken)))
            for taken in itertools.product(*(range(n + 1) for n in available))
        }
        taken = tuple(allocate_tails(available, alphas, 3, cost, elapsed))
        assert rates[taken] == pytest.approx(max(rates.values()))


def test_allocation_steps_over_a_stair_and_gives_all_where_tokens_are_free() -> None:
    def tile(tokens: int) -> float:
        return 0.1 if tokens <= 1 else 0.15

    assert allocate_tails([8], [0.8], 1, tile) == [8]
    assert allocate_tails([8, 8], [0.8, 0.1], 2, lambda _: 0.1) == [8, 8]
    assert allocate_tails([], [], 0, tile) == []
    assert allocate_tails([8] * 4, [0.5] * 4, 4, linear(0.0, 1.0)) == [0] * 4


def test_fit_tails_shortens_the_longest() -> None:
    assert fit_tails([1, 8, 3], 12) == [1, 8, 3]
    assert fit_tails([1, 8, 3], 8) == [1, 4, 3]
    assert fit_tails([5, 5, 5], 7) == [2, 2, 3]
    assert fit_tails([5, 5], 0) == [0, 0]
    assert fit_tails([], 3) == []


# ---------------------------------------------------------------- go or wait


def test_waits_when_the_next_candidate_is_near_and_the_step_dear() -> None:
    near = Awaited(num_ready=0, limit=4, acceptance=0.8, first_seconds=0.01, gap_seconds=0.01)
    assert go_or_wait([near], 0.0, lambda _: 0.1) == pytest.approx(0.01)
    assert go_or_wait([near], 0.0, lambda _: 0.001) == 0.0


def test_first_candidate_alone_not_worth_it_but_those_behind_it_are() -> None:
    far = Awaited(num_ready=0, limit=1, acceptance=0.9, first_seconds=0.1, gap_seconds=0.001)
    assert go_or_wait([far], 0.0, lambda _: 0.1) == 0.0
    more = Awaited(num_ready=0, limit=6, acceptance=0.9, first_seconds=0.1, gap_seconds=0.001)
    assert go_or_wait([more], 0.0, lambda _: 0.1) == pytest.approx(0.1)


def test_complete_tails_and_deep_ones_go() -> None:
    full = Awaited(num_ready=4, limit=4, acceptance=0.8, first_seconds=0.0001, gap_seconds=0.0001)
    assert go_or_wait([full], 0.0, lambda _: 0.1) == 0.0
    deep = Awaited(num_ready=6, limit=16, acceptance=0.5, first_seconds=0.01, gap_seconds=0.01)
    assert go_or_wait([deep], 0.0, lambda _: 0.1) == 0.0
    assert go_or_wait([], 0.0, lambda _: 0.1) == 0.0


def test_a_complete_tail_counts_among_those_that_grow() -> None:
    complete = Awaited(num_ready=4, limit=4, acceptance=0.8, first_seconds=float("inf"), gap_seconds=1.0)
    growing = Awaited(num_ready=0, limit=4, acceptance=0.8, first_seconds=0.03, gap_seconds=0.03)
    assert go_or_wait([growing], 0.0, lambda _: 0.1) == pytest.approx(0.03)
    assert go_or_wait([complete] * 4 + [growing], 0.0, lambda _: 0.1) == 0.0
    assert go_or_wait([complete] + [growing] * 4, 0.0, lambda _: 0.1) == pytest.approx(0.03)
    assert go_or_wait([complete] * 3, 0.0, lambda _: 0.1) == 0.0


def test_waiting_depends_on_step_time_by_the_rate_rule() -> None:
    for step, first, alpha in itertools.product((0.01, 0.05, 0.2), (0.005, 0.02, 0.1), (0.2, 0.6, 0.9)):
        item = Awaited(num_ready=1, limit=2, acceptance=alpha, first_seconds=first, gap_seconds=first)
        now = expected_tokens(alpha, 1) / step
        later = expected_tokens(alpha, 2) / (first + step)
        assert (go_or_wait([item], 0.0, lambda _, s=step: s) > 0) == (later > now)


# ---------------------------------------------------------------- measurements


def test_median_forgets_an_outlier() -> None:
    median = RecentMedian()
    assert median.value is None
    for value in (1.0, 1.1, 50.0, 0.9, 1.0):
        median.add(value)
    assert median.value == 1.0


def test_buckets_are_exact_when_small_and_never_below() -> None:
    assert [token_bucket(n) for n in (1, 2, 3, 7, 15, 16)] == [1, 2, 3, 7, 15, 16]
    for n in range(17, 5000):
        assert n <= token_bucket(n) <= n * 1.25


def test_step_cost_interpolates_and_never_falls() -> None:
    cost = StepCostModel()
    assert not cost.known
    assert cost(5) == 0.0
    cost.record(1, 9.0)
    assert cost(100) == 9.0
    for _ in range(3):
        cost.record(3, 1.0)
        cost.record(5, 2.0)
    assert cost(1) == 1.0, "a slow first step says nothing once more tokens were faster"
    assert cost(4) == pytest.approx(1.5)
    assert cost(7) == pytest.approx(3.0)
    big = StepCostModel()
    for size in (64, 128):
        big.record(size, 0.001 * (size + 4))
    assert big(32) == pytest.approx(0.036), "smaller than ever measured: down the same slope"
    flat = StepCostModel()
    flat.record(4, 0.1)
    flat.record(5, 0.2)
    assert flat(1) == pytest.approx(0.025), "but never below its share"
    values = [cost(n) for n in range(1, 40)]
    assert values == sorted(values)


def test_one_slow_first_step_of_a_size_is_not_believed() -> None:
    cost = StepCostModel()
    for _ in range(3):
        cost.record(16, 0.02)
    cost.record(48, 2.0)
    assert cost(48) == 0.02, "a hundred times as much, for thrice the tokens"
    cost.record(48, 1.0)
    assert cost(48) == pytest.approx(1.0), "twice is no accident"


def test_disturbed_steps_are_better_than_a_lone_one_of_long_ago() -> None:
    cost = StepCostModel()
    for _ in range(3):
        cost.record(1, 10.0)
    cost.record(9, 25.0)
    for _ in range(3 * LONE_RECORDS):
        cost.record(1, 10.0)
        cost.record(9, 30.0, disturbed=True)
    assert cost(9) == 30.0


def test_one_dear_step_of_a_size_is_believed_for_a_while() -> None:
    """What seems dear is not tried again, and would never be found to be cheap."""
    cost = StepCostModel()
    for _ in range(3):
        cost.record(16, 0.02)
    cost.record(48, 0.05)
    assert cost(48) == pytest.approx(0.05)
    for _ in range(LONE_RECORDS):
        cost.record(16, 0.02)
    assert cost(48) == 0.02
    cost.record(48, 0.05)
    for _ in range(2 * LONE_RECORDS):
        cost.record(16, 0.02)
    assert cost(48) == pytest.approx(0.05)


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_a_clock_that_jumps_says_nothing(seconds: float) -> None:
    cost = StepCosts()
    for size in (1, 8):
        cost.record(size, 0, 0, 0.02)
    cost.record(16, 0, 0, seconds)
    cost.record(16, 0, 100, seconds)
    assert cost(16) == cost.plain(16, 100) == 0.02


def test_a_tail_token_is_not_priced_like_one_of_a_prompt() -> None:
    """Decoding costs 100 + 6 per token past 10, a prompt's token 3."""
    cost = StepCosts()
    assert not cost.known
    cost.record(0, 0, 200, 700.0)
    assert cost.known
    assert cost(200) == 700.0, "better than nothing"
    for size in (1, 10, 14, 16):
        cost.record(size, 0, 0, 100.0 + 6.0 * max(size - 10, 0))
    for prompt in (48, 496):
        cost.record(16, 0, prompt, 136.0 + 3.0 * prompt)
    assert cost(64) == pytest.approx(424.0), "prompts of that size took less, and say nothing"
    assert cost.plain(16, 0) == 136.0
    assert cost.plain(16, 48) == pytest.approx(280.0)
    beside = cost.beside(16, 48)
    assert beside(64) == pytest.approx(280.0)
    assert beside(64 + 8) == pytest.approx(280.0 + 48.0)
    assert cost.beside(16, 0)(24) == cost(24)


def test_the_tails_of_a_step_are_not_charged_to_its_prompts() -> None:
    cost = StepCosts()
    for size in (1, 4, 8):
        cost.record(size, 0, 0, 10.0 * size)
    cost.record(2, 6, 30, 110.0)
    assert cost.plain(2, 30) == pytest.approx(50.0)


def test_a_step_with_prompts_costs_no_less_than_one_without() -> None:
    cost = StepCosts()
    for _ in range(2):
        cost.record(4, 0, 0, 20.0)
        cost.record(4, 16, 0, 90.0)
    cost.record(4, 16, 200, 35.0)
    assert cost.plain(4, 200) == 20.0


def test_past_what_was_measured_verifying_costs_no_less_than_reading() -> None:
    cost = StepCosts()
    for size in (1, 8):
        cost.record(size, 0, 0, 20.0)
    for prompt in (1, 504, 1004):
        cost.record(8, 0, prompt, 20.0 + 0.1 * prompt)
    assert cost(8) == 20.0
    assert cost(512) == pytest.approx(20.0 + 0.1 * 503, rel=0.01)


def test_what_is_little_known_is_taken_for_better_and_for_worse() -> None:
    new = AcceptanceEstimate(prior=0.7, prior_trials=2.0)
    old = AcceptanceEstimate(prior=0.7, prior_trials=50.0)
    assert new.cautious < old.cautious < 0.7 < old.optimistic < new.optimistic
    assert old.rate - old.cautious == pytest.approx(old.optimistic - old.rate)


def test_acceptance_follows_what_happens() -> None:
    estimate = AcceptanceEstimate(prior=0.7)
    assert estimate.rate == pytest.approx(0.7)
    for _ in range(200):
        estimate.record(4, 4)
    assert estimate.rate > 0.97
    for _ in range(200):
        estimate.record(4, 0)
    assert estimate.rate < 0.03


def test_doubt_is_worth_a_try_and_ends_with_evidence() -> None:
    estimate = AcceptanceEstimate(prior=0.5, prior_trials=50.0)
    assert estimate.rate < estimate.optimistic < 0.55
    for _ in range(200):
        estimate.fade()
    assert estimate.rate == pytest.approx(0.5)
    assert estimate.optimistic > 0.65
    for _ in range(10):
        estimate.record(2, 0)
    assert estimate.optimistic < 0.3


def test_acceptance_is_unbiased_whatever_the_tail_length() -> None:
    rng = random.Random(5)
    for length in (1, 3, 8):
        estimate = AcceptanceEstimate(prior=0.2, decay=0.999)
        for _ in range(4000):
            accepted = 0
            while accepted < length and rng.random() < 0.75:
                accepted += 1
            estimate.record(length, accepted)
        assert estimate.rate == pytest.approx(0.75, abs=0.04)


# ---------------------------------------------------------------- shared or separate


def run_probe(probe: OverlapProbe, steps: int, slowdown: float, seed: int = 0) -> list[bool]:
    """Steps of 3 to 6 tokens; a draft that was told to run ahead is busy during the step."""
    rng = random.Random(seed)
    asked = []
    for _ in range(steps):
        ahead = probe.run_ahead
        asked.append(ahead)
        seconds = rng.uniform(0.95, 1.1) * (slowdown if ahead else 1.0)
        probe.record(rng.choice([4, 5, 6]), ahead, seconds)
    return asked


@pytest.mark.parametrize(
    ("slowdown", "found"), [(1.0, Hardware.SEPARATE), (1.6, Hardware.SHARED), (8.0, Hardware.SHARED)]
)
def test_probe_finds_out_and_acts_on_it(slowdown: float, found: Hardware) -> None:
    probe = OverlapProbe()
    assert probe.hardware is Hardware.AUTO
    asked = run_probe(probe, 40, slowdown)
    assert probe.hardware is found
    assert asked[:4] == [True, False, True, False]
    asked = run_probe(probe, 640, slowdown)
    assert asked.count(found is Hardware.SEPARATE) == pytest.approx(640 * 62 / 64, abs=2)


def test_probe_notices_a_change() -> None:
    probe = OverlapProbe()
    run_probe(probe, 100, 1.0)
    assert probe.hardware is Hardware.SEPARATE
    run_probe(probe, 1280, 2.0)
    assert probe.hardware is Hardware.SHARED
    run_probe(probe, 1280, 1.0)
    assert probe.hardware is Hardware.SEPARATE


def test_larger_steps_do_not_pass_for_contention() -> None:
    probe = OverlapProbe()
    rng = random.Random(2)
    for step in range(200):
        running = step % 2 == 0
        num_tokens = rng.randint(40, 60) if running else rng.randint(33, 52)
        probe.record(num_tokens, running, 0.001 * num_tokens)
    assert probe.hardware is Hardware.SEPARATE
    assert probe.ratio == pytest.approx(1.0, abs=0.06)


def test_probe_does_as_configured() -> None:
    probe = OverlapProbe(Hardware.SEPARATE)
    assert all(run_probe(probe, 100, 9.0))
    assert probe.hardware is Hardware.SEPARATE
    assert not any(run_probe(OverlapProbe(Hardware.SHARED), 100, 1.0))


def test_disturbed_steps_count_only_where_nothing_better_is_known() -> None:
    cost = StepCostModel()
    cost.record(4, 0.2, disturbed=True)
    assert cost(4) == pytest.approx(0.2)
    cost.record(4, 0.1)
    assert cost(4) == pytest.approx(0.1), "one undisturbed step replaces the others"
    for _ in range(20):
        cost.record(4, 0.2, disturbed=True)
    assert cost(4) == pytest.approx(0.1)


def test_a_tail_that_may_be_prepared_is_waited_for_if_that_is_likely_enough() -> None:
    def item(chance: float) -> Awaited:
        return Awaited(0, 8, 0.8, 0.003, float("inf"), prepared=chance)

    assert go_or_wait([item(0.8)], 0.0, lambda _: 0.02) == pytest.approx(0.003)
    assert go_or_wait([item(0.01)], 0.0, lambda _: 0.02) == 0.0
    # Among many that are ready it would delay all of them.
    assert go_or_wait([item(0.8)] + [Awaited.ready()] * 40, 0.0, lambda _: 0.02) == 0.0
