"""An accident hardly counts; what happens again and again counts in full, also across restarts."""

from __future__ import annotations

import pytest

from paceline.actors.engine.recent_steps import (
    LONGEST_STEP,
    MOST_EXCESS,
    REMEMBERED_STEPS,
    SPREAD_STEPS,
    RecentSteps,
)


def steps_of(*lengths: float) -> RecentSteps:
    """Of four sequences, three tokens for each."""
    found = RecentSteps()
    for length in lengths:
        found.add(4, 12, length)
    return found


def test_efficiency_is_tokens_by_those_of_plain_steps_without_any_gap() -> None:
    found = steps_of(1.5, 1.5, 1.5)
    assert len(found) == 3
    assert found.rounds == 12
    assert found.model_steps == pytest.approx(4.5)
    assert found.efficiency == pytest.approx(3 / 1.5)
    found.add(1, 1, 1.5)
    assert found.efficiency == pytest.approx((36 + 1) / (12 * 1.5 + 1 * 1.5))


def test_only_the_last_steps_count() -> None:
    found = steps_of(*[3.0] * 100, *[1.5] * REMEMBERED_STEPS)
    assert len(found) == REMEMBERED_STEPS
    assert found.efficiency == pytest.approx(2.0)


@pytest.mark.parametrize("length", [10.0, 1e6])
@pytest.mark.parametrize("place", [0, 5, 19])
def test_an_accident_is_spread_over_many_steps(length: float, place: int) -> None:
    lengths = [1.0] * 20
    lengths[place] = length
    excess = min(length - LONGEST_STEP, MOST_EXCESS) / SPREAD_STEPS
    assert steps_of(*lengths).model_steps == pytest.approx(19 + LONGEST_STEP + 20 * excess)


@pytest.mark.parametrize("restart_every", [None, 8])
def test_what_happens_again_and_again_counts_in_full(restart_every: int | None) -> None:
    """Every eighth step takes 21 instead of 1."""
    found = RecentSteps()
    for index in range(10 * SPREAD_STEPS):
        if restart_every and index % restart_every == 0:
            found.restart()
            assert len(found) == 0
        found.add(1, 1, 21.0 if index % 8 == 0 else 1.0)
    assert found.model_steps / len(found) == pytest.approx((7 * 1.0 + 21.0) / 8, rel=0.02)


def test_what_no_longer_happens_is_forgotten() -> None:
    found = steps_of(*[1.0, 1.0, 1.0, 30.0] * 100, *[1.0] * SPREAD_STEPS)
    assert found.efficiency == pytest.approx(3.0)


def test_no_steps_say_nothing() -> None:
    found = RecentSteps()
    found.restart()
    assert found.model_steps == 0.0
    assert found.efficiency == 0.0
