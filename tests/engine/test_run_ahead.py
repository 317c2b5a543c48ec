"""Pacing in simulated time: what each way to speculate gives on separate devices, and who waits for whom."""

from __future__ import annotations

import random

import pytest

from paceline.actors.engine.config import DraftEngineConfig, Hardware, NgramConfig, TargetEngineConfig
from paceline.actors.engine.messages import Submit
from paceline.actors.engine.pacing import best_tail_lengths, expected_tokens
from paceline.actors.engine.parameters import SamplingParams, SpeculationParams, StoppingParams
from tests.engine.simulation import Simulation

TARGET = "emulated://t?base_ms=20&per_token_ms=0.05&vocab_size=256"
DRAFT = "emulated://d?base_ms=2&acceptance=0.8&vocab_size=256"


def submit(name: str, num_tokens: int, *, prompt: int = 16, drafted: bool = True) -> Submit:
    rng = random.Random(name)
    return Submit(
        name,
        0,
        tuple(rng.choices(range(256), k=prompt)),
        prompt,
        SamplingParams(temperature=1.0, seed=rng.randrange(1 << 60)),
        StoppingParams(max_tokens=num_tokens),
        SpeculationParams(None if drafted else 0),
    )


def simulation(
    hardware: Hardware = Hardware.SEPARATE,
    *,
    max_branches: int = 0,
    num_speculative_tokens: int | None = None,
    draft: str = DRAFT,
) -> Simulation:
    config = TargetEngineConfig(
        hardware=hardware,
        num_speculative_tokens=num_speculative_tokens,
        ngram=NgramConfig(enabled=False),
    )
    return Simulation(TARGET, draft, config, DraftEngineConfig(max_branches=max_branches))


def rate(run: Simulation, names: list[str]) -> float:
    """Tokens per second of the named sequences together."""
    return sum(len(run.tokens[name]) / run.finished_at[name] for name in names)


@pytest.fixture(scope="module")
def rates() -> dict[str, float]:
    """Tokens per second of one sequence, mean of two, and that no way changes what is said."""
    found: dict[str, float] = {}
    said: dict[str, list[int]] = {}
    ways = {
        "plain": (Hardware.SEPARATE, 0, 0),
        "lock-step": (Hardware.SHARED, 0, None),
        "ahead": (Hardware.SEPARATE, 0, None),
        "prepared": (Hardware.SEPARATE, 32, None),
    }
    for way, (hardware, max_branches, tail) in ways.items():
        total = 0.0
        for name in ("a", "b"):
            run = simulation(hardware, max_branches=max_branches, num_speculative_tokens=tail)
            run.submit(submit(name, 300))
            run.run()
            run.target.check_invariants()
            assert run.draft is not None
            run.draft.check_invariants()
            total += rate(run, [name]) / 2
            assert said.setdefault(name, run.tokens[name]) == run.tokens[name]
        found[way] = total
    return found


def test_taking_turns_is_near_its_closed_form(rates: dict[str, float]) -> None:
    best = max(expected_tokens(0.8, n) / (0.0002 + 0.002 * n + 0.02) for n in range(1, 9))
    assert rates["plain"] == pytest.approx(50.0, rel=0.01)
    assert rates["lock-step"] > 0.92 * best  # two times 300 tokens: α itself is known to 2 %


def test_running_ahead_and_preparing_corrections_pay(rates: dict[str, float]) -> None:
    assert rates["ahead"] > 1.06 * rates["lock-step"]
    assert rates["prepared"] > 1.3 * rates["lock-step"]


def test_half_of_the_corrections_and_more_are_prepared_and_none_on_shared_hardware() -> None:
    for hardware, least in ((Hardware.SEPARATE, 0.5), (Hardware.SHARED, 0.0)):
        run = simulation(hardware, max_branches=32)
        run.submit(submit("a", 200))
        run.run()
        assert run.draft is not None
        snapshot = run.draft.snapshot()
        assert (snapshot.num_branch_tokens_total > 0) == (hardware is Hardware.SEPARATE)
        assert snapshot.num_prepared_corrections_total >= least * snapshot.num_corrections_total
        assert snapshot.num_corrections_total > 10 or hardware is Hardware.SHARED
        run.run_on(0.1)
        assert run.draft.snapshot().num_sequences == 0
        assert run.draft.snapshot().num_free_blocks == run.draft.snapshot().num_blocks


def test_a_sequence_without_a_draft_does_not_cost_its_neighbours_their_tails() -> None:
    """Four drafted streams and one that is not: a wait delays the one, and brings the four more."""
    names = ["a", "b", "c", "d"]
    alone = simulation(Hardware.SHARED)
    mixed = simulation(Hardware.SHARED)
    for name in names:
        alone.submit(submit(name, 100))
        mixed.submit(submit(name, 100))
    mixed.submit(submit("undrafted", 300, drafted=False))
    alone.run()
    mixed.run()
    assert rate(mixed, names) > 0.9 * rate(alone, names)
    # Its pace at worst halves, and then only because the total rises.
    assert rate(mixed, ["undrafted"]) > 25.0


def test_a_crowd_without_drafts_is_not_held_up_by_one_with() -> None:
    crowd = [f"plain {index}" for index in range(20)]
    run = simulation(Hardware.SHARED)
    run.submit(submit("drafted", 50))
    for name in crowd:
        run.submit(submit(name, 50, drafted=False))
    run.run()
    assert rate(run, crowd) > 0.95 * 20 * 50.0


def test_new_prompts_do_not_cost_a_stream_its_tails() -> None:
    quiet, busy = simulation(Hardware.SHARED), simulation(Hardware.SHARED)
    for run in (quiet, busy):
        run.submit(submit("a", 120))
    for index in range(20):
        busy.submit(submit(f"new {index}", 1, prompt=8, drafted=False), time=0.05 * index)
    quiet.run()
    busy.run()
    assert rate(busy, ["a"]) > 0.85 * rate(quiet, ["a"])
    # Each of them waits for the step that is on, and at most one more.
    for index in range(20):
        assert busy.finished_at[f"new {index}"] - 0.05 * index < 0.085


def test_hardware_shows_although_prompts_are_always_being_read() -> None:
    """Answers are too short for a draft to be begun while the target reads prompts, but for one at a time."""
    config = TargetEngineConfig(ngram=NgramConfig(enabled=False), max_num_batched_tokens=256)
    run = Simulation(TARGET, DRAFT, config)
    for index in range(60):
        run.submit(submit(f"b{index}", 14, prompt=600), index * 0.05)
    run.run()
    found = run.target.snapshot()
    assert found.hardware is Hardware.SEPARATE
    assert found.num_accepted_tokens_total > 200


def test_a_large_batch_after_small_ones_is_waited_for() -> None:
    """A draft whose step takes 0.3 ms a sequence: with one it is fast, with many it is not late."""
    draft = DRAFT + "&free_tokens=1&per_token_ms=0.3"
    run = simulation(Hardware.SHARED, draft=draft)
    run.submit(submit("first", 150))
    names = [f"later {index}" for index in range(15)]
    for name in names:
        run.submit(submit(name, 80), time=0.3)
    run.run(until=1.3)  # it has computed their prompts by now, and the target knows what it is worth
    before = run.target.snapshot()
    run.run(until=1.7)
    after = run.target.snapshot()
    turns = after.num_draft_turns_total - before.num_draft_turns_total
    assert turns > 40
    assert after.num_late_drafts_total - before.num_late_drafts_total < 0.3 * turns
    run.run()


def test_one_slow_answer_does_not_put_a_draft_to_rest_for_good() -> None:
    """It was busy with prompts of others for half a second; afterwards it is as fast as ever."""
    run = simulation(Hardware.SHARED)
    run.submit(submit("a", 300))
    run.run(until=0.3)
    run.draft_device.clock.now = run.now + 0.5
    run.draft_device.busy = True
    run.at(run.now + 0.5, lambda: run.look(run.draft_device))
    run.run()
    assert rate(run, ["a"]) > 75.0


# ---------------------------------------------------------------- how long tails are to be


def test_tail_lengths_of_a_draft_that_runs_ahead() -> None:
    def flat(_: int) -> float:
        return 0.02

    turns = max(range(9), key=lambda n: expected_tokens(0.8, n) / (0.0002 + 0.002 * n + 0.02))
    lengths = best_tail_lengths(0.8, 0.002, 0.0002, flat, 8)
    assert 0 < lengths.fresh < turns, "verified sooner, the chain is left whole more often"
    assert lengths.ready == 8, "what is there costs nothing"
    assert best_tail_lengths(0.8, 0.002, 0.0002, flat, 8, prepared=0.8).ready == 8


def test_a_draft_that_does_not_pay_rests_also_ahead() -> None:
    lengths = best_tail_lengths(0.9, 0.001, 0.0, lambda tokens: 0.001 * tokens, 8)
    assert (lengths.fresh, lengths.ready) == (0, 0)
    # One as slow as the target still helps, as it works meanwhile.
    assert best_tail_lengths(0.9, 0.02, 0.0, lambda _: 0.02, 8).ready > 0
