"""A draft is not caught in a step that can wait when a verdict comes, and is never held up for long."""

from __future__ import annotations

import pytest

from paceline.actors.engine.config import DraftEngineConfig, Hardware, NgramConfig, TargetEngineConfig
from paceline.actors.engine.draft_engine import DraftEngine
from paceline.actors.engine.draft_sequence import DraftSequence
from paceline.actors.engine.messages import Submit
from paceline.actors.engine.parameters import SamplingParams, SpeculationParams, StoppingParams
from paceline.actors.engine.verdict_times import GRACE, PATIENCE, VerdictTimes
from tests.engine.fakes import Clock
from tests.engine.paged_fake import GREEDY, VOCAB_SIZE, PagedFake, chain_after, opened, verdict
from tests.engine.simulation import Simulation

VERIFY, SPARE = 0.020, 0.002


def sequence(
    name: str = "s", *, peer: str = "t", ready_at: float | None = None, window: int = 8
) -> DraftSequence:
    found = DraftSequence(peer, opened(name, [1, 2], window=window), vocab_size=VOCAB_SIZE, max_model_len=100)
    found.ready_at = ready_at
    return found


def learnt(*peers: str) -> VerdictTimes:
    times = VerdictTimes()
    times.note_spare_step(SPARE)
    for peer in peers:
        for _ in range(200):
            times.note_verdict(sequence(peer=peer, ready_at=1.0), True, 1.0 + VERIFY)
    return times


def test_no_step_is_begun_that_would_be_on_when_the_verdict_is_due() -> None:
    times = learnt("t")
    waiting = [sequence(ready_at=5.0)]
    due = 5.0 + VERIFY
    end = due + GRACE * SPARE
    for now in (5.0, due - 1.01 * SPARE, end + 1e-6, due + 1.0):
        assert times.seconds_to_wait(waiting, now) == 0.0
    for now in (due - 0.99 * SPARE, due, end - 1e-4):
        assert times.seconds_to_wait(waiting, now) == pytest.approx(end - now, abs=1e-6)


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_the_fewer_verdicts_correct_the_shorter_they_are_waited_for(share: float) -> None:
    times = learnt("t")
    for index in range(2000):
        times.note_verdict(sequence(ready_at=1.0), index % 5 < 5 * share, 1.0 + VERIFY)
    waiting, due, longest = [sequence(ready_at=5.0)], 5.0 + VERIFY, PATIENCE * share * SPARE
    assert times.seconds_to_wait(waiting, due - 1.3 * longest) == 0.0
    assert times.seconds_to_wait(waiting, due - 0.7 * longest) > 0.0
    assert times.seconds_to_wait(waiting, due + 0.7 * GRACE * longest) > 0.0
    assert times.seconds_to_wait(waiting, due + 1.3 * GRACE * longest) == 0.0


def test_a_verdict_after_a_rest_does_not_say_how_long_the_target_takes() -> None:
    times = learnt("t")
    for _ in range(50):
        times.note_verdict(sequence(ready_at=1.0, window=0), True, 30.0)
    assert times.seconds_to_wait([sequence(ready_at=5.0)], 5.0 + VERIFY) > 0.0


def test_nothing_waits_while_a_target_does_or_nothing_is_known() -> None:
    now = 5.0 + VERIFY
    due = sequence("a", ready_at=5.0)
    assert learnt("t").seconds_to_wait([due], now) > 0.0
    assert learnt("t").seconds_to_wait([due, sequence("b")], now) == 0.0  # b's chain is waited for
    assert learnt("t").seconds_to_wait([due, sequence("b", window=0)], now) > 0.0  # b rests
    assert learnt("other").seconds_to_wait([due], now) == 0.0
    assert learnt().seconds_to_wait([due], now) == 0.0
    assert VerdictTimes().seconds_to_wait([due], now) == 0.0
    forgotten = learnt("t")
    forgotten.forget("t")
    assert forgotten.seconds_to_wait([due], now) == 0.0


def test_of_many_targets_half_must_be_about_to_speak() -> None:
    times = learnt("a", "b", "c")
    now = 5.0 + VERIFY
    due = [sequence(peer=peer, ready_at=5.0) for peer in "ab"]
    others = [sequence(f"{index}", peer="c", ready_at=5.0 + 0.5 * VERIFY) for index in range(3)]
    assert times.seconds_to_wait([*due, *others[:2]], now) > 0.0
    assert times.seconds_to_wait([*due, *others], now) == 0.0


def test_an_engine_that_ran_ahead_rests_shortly_before_its_verdict_and_goes_on_if_none_comes() -> None:
    clock = Clock()
    clock.now = 0.0

    class Timed(PagedFake):
        def forward(self, batch):  # type: ignore[no-untyped-def, override]
            clock.advance(SPARE)
            return super().forward(batch)

    engine = DraftEngine(Timed(), DraftEngineConfig(max_branches=0), clock)
    engine.target_joined("t", VOCAB_SIZE)
    committed = [3, 1, 4]
    engine.open("t", opened("s", committed, window=2))
    ready_at = clock.now
    for _ in range(80):  # what the draft learns from
        while engine.wait_seconds() == 0.0 and clock.now + SPARE < ready_at + VERIFY:
            engine.step()
        clock.now = ready_at + VERIFY
        wrong = (chain_after(committed, GREEDY, 1)[0] + 1) % VOCAB_SIZE
        engine.verdict("t", verdict("s", len(committed), [wrong], window=40, tail_tokens=2), clock.now)
        committed.append(wrong)
        for _ in range(2):
            assert engine.wait_seconds() == 0.0
            engine.step()
        ready_at = clock.now
    num_spare = 0
    while engine.wait_seconds() == 0.0:
        engine.step()
        num_spare += 1
    assert clock.now <= ready_at + VERIFY < clock.now + SPARE
    wait = engine.wait_seconds()
    assert wait == pytest.approx(ready_at + VERIFY + GRACE * SPARE - clock.now, rel=0.05)
    assert num_spare >= 8
    clock.advance(wait)
    assert engine.wait_seconds() == 0.0, "a verdict that is late must not hold the draft up"
    engine.step()
    engine.check_invariants()
    # A verdict says when it came, so that the step that it waited for does not pass for the target's.
    received_at = ready_at + VERIFY
    engine.verdict("t", verdict("s", len(committed), [7], window=40, tail_tokens=0), received_at)
    assert engine.wait_seconds() == 0.0


@pytest.mark.parametrize("max_branches", [0, 32])
def test_a_fresh_start_never_waits_for_a_step_that_nobody_needs(max_branches: int) -> None:
    """In simulated time: from a correction to the first fresh candidate it takes the way there and back and
    one step of the draft, where a step that was on used to add up to another."""
    run = Simulation(
        "emulated://t?base_ms=20&vocab_size=256",
        "emulated://d?base_ms=2&acceptance=0.8&near=0&vocab_size=256",
        TargetEngineConfig(hardware=Hardware.SEPARATE, ngram=NgramConfig(enabled=False)),
        DraftEngineConfig(max_branches=max_branches),
    )
    run.submit(
        Submit(
            "s",
            0,
            tuple(range(16)),
            16,
            SamplingParams(temperature=1.0, seed=3),
            StoppingParams(max_tokens=600),
            SpeculationParams(),
        )
    )
    run.run()
    assert run.target.snapshot().drafts[0].response_seconds == pytest.approx(0.0022, abs=1e-4)
