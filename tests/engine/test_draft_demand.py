"""How many sequences a draft would pay for, and how many of a draft's turns were late."""

from __future__ import annotations

import pytest

from paceline.actors.engine.config import NgramConfig, TargetEngineConfig
from paceline.actors.engine.draft_demand import (
    HALF_LIFE_SECONDS,
    UNKNOWN_PACE,
    DraftPace,
    draft_pays,
    faded,
)
from paceline.actors.engine.messages import Candidates
from paceline.actors.engine.target_engine import TargetEngine
from tests.engine.fakes import Clock, HashLaw, HashRunner, hello, make_submit, reference

NO_NGRAM = NgramConfig(enabled=False)


def memory_bound(num_tokens: int) -> float:
    """Up to 64 tokens cost as much as one."""
    return 0.02 * max(num_tokens, 64) / 64


@pytest.mark.parametrize(
    ("num_sequences", "pace", "pays"),
    [
        (1, UNKNOWN_PACE, True),
        (16, UNKNOWN_PACE, True),
        # Full: each tail token costs what a committed one does.
        (64, UNKNOWN_PACE, False),
        (400, UNKNOWN_PACE, False),
        (1, DraftPace(acceptance=0.7, seconds_per_token=0.002, rtt_seconds=0.001), True),
        # As slow as the target, or hardly ever right.
        (1, DraftPace(acceptance=0.7, seconds_per_token=0.02), False),
        (1, DraftPace(acceptance=0.02, seconds_per_token=0.002), False),
    ],
)
def test_a_draft_pays_while_steps_have_room(num_sequences: int, pace: DraftPace, pays: bool) -> None:
    assert draft_pays(pace, memory_bound, num_sequences, 8, lock_step=True) == pays


def test_what_drafts_were_like_fades() -> None:
    bad = DraftPace(acceptance=0.1, seconds_per_token=0.1, rtt_seconds=0.1)
    assert faded(bad, 0.0) == bad
    half = faded(bad, HALF_LIFE_SECONDS)
    assert half.acceptance == pytest.approx((0.1 + UNKNOWN_PACE.acceptance) / 2)
    assert half.seconds_per_token == pytest.approx(0.05)
    assert faded(bad, 100 * HALF_LIFE_SECONDS).acceptance == pytest.approx(UNKNOWN_PACE.acceptance)


def timed_target(clock: Clock, config: TargetEngineConfig, **runner: int) -> TargetEngine:
    def pass_time(batch: object) -> None:
        num_tokens = sum(len(item.token_ids) for item in batch)  # type: ignore[attr-defined]
        clock.advance(memory_bound(num_tokens))

    return TargetEngine(HashRunner(on_forward=pass_time, **runner), config, clock)


def test_a_target_at_leisure_wants_drafts_and_a_full_one_wants_none() -> None:
    clock = Clock()
    target = timed_target(
        clock,
        TargetEngineConfig(ngram=NO_NGRAM, max_num_seqs=128, max_num_batched_tokens=512),
        num_blocks=2048,
    )
    assert target.snapshot().num_wanting_draft == 0
    target.submit("gateway", make_submit("first", max_tokens=200))
    target.step()
    target.step()
    assert target.snapshot().num_wanting_draft == 1
    for index in range(100):
        target.submit("gateway", make_submit(str(index), max_tokens=200))
    for _ in range(12):
        target.step()
    snapshot = target.snapshot()
    assert snapshot.num_running == 101
    assert snapshot.num_wanting_draft == 0


def test_sequences_that_want_no_tails_want_no_draft() -> None:
    clock = Clock()
    target = timed_target(clock, TargetEngineConfig(ngram=NO_NGRAM, num_speculative_tokens=0))
    target.submit("gateway", make_submit(max_tokens=20))
    target.step()
    assert target.snapshot().num_wanting_draft == 0


def test_turns_that_begin_without_a_candidate_are_late() -> None:
    clock = Clock()
    target = timed_target(
        clock, TargetEngineConfig(ngram=NO_NGRAM, num_speculative_tokens=2, wait_for_drafts=False)
    )
    target.draft_joined("d", hello())
    event = make_submit(max_tokens=40)
    whole, _ = reference(HashLaw(), event)
    target.submit("gateway", event)
    target.step()
    target.step()
    assert target.snapshot().num_draft_turns_total == 0, "it has not begun"
    length = len(event.token_ids) + 2
    target.candidates("d", [Candidates("s", 1, length, tuple(whole[2:4]), 0)], 0.005)
    target.step()
    assert target.snapshot().num_draft_turns_total == 1
    assert target.snapshot().num_late_drafts_total == 0
    target.step()
    target.step()
    snapshot = target.snapshot()
    assert (snapshot.num_draft_turns_total, snapshot.num_late_drafts_total) == (3, 2)
    assert snapshot.num_drafted == 1


def test_the_oldest_waiting_sequence_tells_how_long_the_queue_is() -> None:
    clock = Clock()
    target = timed_target(clock, TargetEngineConfig(ngram=NO_NGRAM, max_num_seqs=1))
    target.submit("gateway", make_submit("a", max_tokens=30))
    assert target.snapshot().queue_seconds == 0.0
    target.submit("gateway", make_submit("b", max_tokens=30))
    clock.advance(2.0)
    target.submit("gateway", make_submit("c", max_tokens=30))
    clock.advance(1.0)
    assert target.snapshot().num_waiting == 2
    assert target.snapshot().queue_seconds == pytest.approx(3.0)
