"""The draft engine: chains, rollback, catch-up, fairness, shortage. Exact against a sequential oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from paceline.actors.engine.batch import ModelRunner, SequenceSlice
from paceline.actors.engine.config import DraftEngineConfig
from paceline.actors.engine.draft_engine import CandidateOutput, DraftEngine
from paceline.actors.engine.draft_schedule import MIN_PREFILL_TOKENS, PrefillPace
from paceline.actors.engine.messages import Close
from paceline.actors.engine.model_runner import TransformersRunner
from paceline.actors.engine.parameters import SamplingParams
from paceline.actors.engine.sampling import sample
from tests.engine.models import reference_logits, tiny_llama
from tests.engine.paged_fake import GREEDY, VOCAB_SIZE, PagedFake, chain_after, opened, verdict


def make_engine(runner: ModelRunner | None = None, **config: int | None) -> DraftEngine:
    limits: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 512, **config}
    engine = DraftEngine(runner or PagedFake(), DraftEngineConfig(**limits))
    engine.target_joined("t", VOCAB_SIZE)
    return engine


def run(engine: DraftEngine, max_steps: int = 200) -> dict[str, CandidateOutput]:
    """Step until the draft rests; return everything that it said."""
    said: dict[str, CandidateOutput] = {}
    for _ in range(max_steps):
        busy = engine.has_work()
        engine.step()
        engine.check_invariants()
        for peer, output in engine.take_outbox().items():
            merged = said.setdefault(peer, CandidateOutput())
            merged.candidates.extend(output.candidates)
            merged.declines.extend(output.declines)
        if not busy:
            return said
    raise AssertionError("the draft never rests")


def tokens_of(output: CandidateOutput, sequence_id: str) -> list[int]:
    """The chain that the messages spell, which must have no gap."""
    tokens: list[int] = []
    position = None
    for message in output.candidates:
        if message.sequence_id == sequence_id:
            assert position is None or message.base_position == position
            tokens.extend(message.token_ids)
            position = message.base_position + len(message.token_ids)
    return tokens


def other_than(token_id: int) -> int:
    return (token_id + 1) % VOCAB_SIZE


# ------------------------------------------------------------------------- chains


def test_chains_of_two_targets_equal_sequential_sampling() -> None:
    engine = make_engine()
    engine.target_joined("u", VOCAB_SIZE)
    prompts = {f"s{index}": list(range(3 + 5 * index)) for index in range(5)}
    params = {
        name: SamplingParams(temperature=0.8 * (index % 3), seed=index) for index, name in enumerate(prompts)
    }
    for peer in ("t", "u"):
        for name, prompt in prompts.items():
            engine.open(peer, opened(name, prompt, window=6, params=params[name]))
    said = run(engine)
    for peer in ("t", "u"):
        for name, prompt in prompts.items():
            assert tokens_of(said[peer], name) == chain_after(prompt, params[name], 6)
    assert engine.snapshot().num_drafted_tokens_total == 60


def test_one_step_serves_all_and_makes_one_message_per_target() -> None:
    runner = PagedFake()
    engine = make_engine(runner)
    engine.target_joined("u", VOCAB_SIZE)
    for peer in ("t", "u"):
        for index in range(3):
            engine.open(peer, opened(f"s{index}", [1, 2, index]))
    engine.step()
    assert len(runner.batches) == 1
    assert len(runner.batches[0]) == 6
    outbox = engine.take_outbox()
    assert sorted(outbox) == ["t", "u"]
    for output in outbox.values():
        assert [message.base_position for message in output.candidates] == [3, 3, 3]
        assert [len(message.token_ids) for message in output.candidates] == [1, 1, 1]
    assert engine.take_outbox() == {}


def test_step_seconds_is_the_time_of_the_step() -> None:
    now = [0.0]

    class SlowFake(PagedFake):
        def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
            now[0] += 0.25
            return super().forward(batch)

    engine = DraftEngine(
        SlowFake(), DraftEngineConfig(max_num_seqs=4, max_num_batched_tokens=64), lambda: now[0]
    )
    engine.target_joined("t", VOCAB_SIZE)
    engine.open("t", opened("a", [1, 2]))
    engine.step()
    assert engine.take_outbox()["t"].step_seconds == pytest.approx(0.25)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tiny_model_drafts_as_it_would_alone(temperature: float) -> None:
    model = tiny_llama()
    runner = TransformersRunner(
        model, num_blocks=64, block_size=8, max_model_len=None, device=torch.device("cpu")
    )
    engine = DraftEngine(runner, DraftEngineConfig(max_num_seqs=8, max_num_batched_tokens=64))
    engine.target_joined("t", runner.vocab_size)
    params = SamplingParams(temperature=temperature, seed=11)
    prompts = {"a": list(range(5, 45)), "b": [7, 8, 9], "c": list(range(100, 190))}
    for name, prompt in prompts.items():
        engine.open("t", opened(name, prompt, window=6, params=params))
    said = run(engine)["t"]
    committed = {}
    for name, prompt in prompts.items():
        chain = tokens_of(said, name)
        assert chain == _alone(model, prompt, params, 6)
        committed[name] = [*chain[:2], (chain[2] + 1) % 256]
        engine.verdict("t", verdict(name, len(prompt), committed[name], window=5, accepted=2))
    said = run(engine)["t"]
    for name, prompt in prompts.items():
        assert tokens_of(said, name) == _alone(model, [*prompt, *committed[name]], params, 5)


@torch.inference_mode()
def _alone(model: PreTrainedModel, prompt: list[int], params: SamplingParams, num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = reference_logits(model, tokens)[-1:]
        tokens.extend(sample(logits, [params], [len(tokens)]))
    return tokens[len(prompt) :]


# ------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize("depth", range(8))
def test_rollback_at_every_depth(depth: int) -> None:
    runner = PagedFake()
    engine = make_engine(runner)
    prompt = [3, 1, 4, 1, 5]
    engine.open("t", opened("a", prompt, window=8))
    chain = tokens_of(run(engine)["t"], "a")
    committed = [*chain[:depth], other_than(chain[depth])]
    engine.verdict("t", verdict("a", 5, committed, window=8, accepted=depth))
    engine.check_invariants()
    said = run(engine)["t"]
    assert tokens_of(said, "a") == chain_after([*prompt, *committed], GREEDY, 8)
    assert {message.revision for message in said.candidates} == {1}
    assert said.candidates[0].base_position == 5 + depth + 1
    assert engine.snapshot().num_discarded_tokens_total == 8 - depth
    # KV of the common prefix was kept: only the corrected token had to be computed again.
    first = runner.batches[-8][0]
    assert (first.start, list(first.token_ids)) == (5 + depth, committed[-1:])


@pytest.mark.parametrize("window", [1, 2, 4, 7])
def test_full_acceptance_leaves_no_hole(window: int) -> None:
    runner = PagedFake()
    engine = make_engine(runner)
    tokens = [2, 7, 1]
    engine.open("t", opened("a", tokens, window=window))
    for _ in range(6):
        chain = tokens_of(run(engine)["t"], "a")
        assert chain == chain_after(tokens, GREEDY, window)
        bonus = chain_after([*tokens, *chain], GREEDY, 1)
        engine.verdict("t", verdict("a", len(tokens), [*chain, *bonus], window=window, accepted=window))
        tokens += [*chain, *bonus]
        first_batch = len(runner.batches)
        engine.step()
        part = runner.batches[first_batch][0]
        # The last chain token never had KV: it is computed together with the bonus token.
        assert (part.start, list(part.token_ids)) == (len(tokens) - 2, tokens[-2:])
    said = run(engine)["t"]
    assert {message.revision for message in said.candidates} == {0}


def test_running_ahead_survives_a_verdict_on_the_head() -> None:
    runner = PagedFake()
    engine = make_engine(runner)
    engine.open("t", opened("a", [1, 2, 3], window=8))
    chain = tokens_of(run(engine)["t"], "a")
    engine.verdict("t", verdict("a", 3, chain[:5], window=8, accepted=4))
    said = run(engine)["t"]
    assert tokens_of(said, "a") == chain_after([1, 2, 3, *chain], GREEDY, 5)
    assert said.candidates[0].base_position == 11  # what was sent is not sent again
    assert said.candidates[0].revision == 0
    assert all(len(part.token_ids) == 1 for batch in runner.batches[1:] for part in batch)


def test_a_draft_that_is_behind_catches_up_without_a_new_revision() -> None:
    engine = make_engine()
    engine.open("t", opened("a", [1, 2, 3], window=2))
    chain = tokens_of(run(engine)["t"], "a")
    committed = [*chain, 9, 8, 7, 6]
    engine.verdict("t", verdict("a", 3, committed, window=3, accepted=2))
    said = run(engine)["t"]
    assert tokens_of(said, "a") == chain_after([1, 2, 3, *committed], GREEDY, 3)
    assert {message.revision for message in said.candidates} == {0}


def test_a_late_verdict_past_the_difference_rolls_back_to_it() -> None:
    """The target went on alone after the difference: tokens past it must not be taken from the chain."""
    engine = make_engine()
    prompt = [1, 2, 3]
    engine.open("t", opened("a", prompt, window=8))
    chain = tokens_of(run(engine)["t"], "a")
    committed = [chain[0], other_than(chain[1]), *chain[2:6]]
    engine.verdict("t", verdict("a", 3, committed, window=8, accepted=1))
    engine.check_invariants()
    said = run(engine)["t"]
    assert tokens_of(said, "a") == chain_after([*prompt, *committed], GREEDY, 8)


def test_overlapping_and_repeated_verdicts_are_trimmed() -> None:
    engine = make_engine()
    engine.open("t", opened("a", [1, 2, 3], window=6))
    chain = tokens_of(run(engine)["t"], "a")
    engine.verdict("t", verdict("a", 3, chain[:3], window=6))
    engine.verdict("t", verdict("a", 3, chain[:3], window=6))
    engine.verdict("t", verdict("a", 4, chain[1:5], window=6))
    assert tokens_of(run(engine)["t"], "a") == chain_after([1, 2, 3, *chain], GREEDY, 5)


@pytest.mark.parametrize(
    ("base", "token_ids", "reason"),
    [(5, [1], "only 3 tokens are known"), (2, [9, 9], "contradicts"), (3, [VOCAB_SIZE], "vocabulary")],
)
def test_a_verdict_that_does_not_fit_declines_its_sequence_only(
    base: int, token_ids: list[int], reason: str
) -> None:
    engine = make_engine()
    engine.open("t", opened("a", [1, 2, 3]))
    engine.open("t", opened("b", [1, 2, 3]))
    engine.verdict("t", verdict("a", base, token_ids))
    said = run(engine)["t"]
    assert [decline.sequence_id for decline in said.declines] == ["a"]
    assert reason in said.declines[0].reason
    assert tokens_of(said, "b") == chain_after([1, 2, 3], GREEDY, 4)


def test_stale_and_unknown_messages_change_nothing() -> None:
    engine = make_engine()
    engine.open("t", opened("a", [1, 2, 3], epoch=2))
    engine.open("t", opened("a", [9], epoch=1))
    engine.open("nobody", opened("a", [9]))
    engine.verdict("t", verdict("a", 3, [5], epoch=1))
    engine.verdict("t", verdict("zzz", 3, [5]))
    engine.close("t", Close("a", 1))
    engine.close("u", Close("a", 2))
    assert tokens_of(run(engine)["t"], "a") == chain_after([1, 2, 3], GREEDY, 4)
    assert engine.snapshot().num_stale_messages_total == 6


def test_a_newer_epoch_replaces_the_sequence() -> None:
    engine = make_engine()
    engine.open("t", opened("a", [1, 2, 3], epoch=1))
    engine.step()
    engine.open("t", opened("a", [4, 5], epoch=2))
    said = run(engine)["t"]
    assert {message.epoch for message in said.candidates} == {2}
    assert tokens_of(said, "a") == chain_after([4, 5], GREEDY, 4)


# ------------------------------------------------------------------------- rest, fairness


def test_window_zero_is_rest() -> None:
    runner = PagedFake()
    engine = make_engine(runner)
    engine.open("t", opened("a", [1, 2, 3], window=0))
    assert not engine.has_work()
    engine.step()
    assert runner.batches == []
    engine.verdict("t", verdict("a", 3, [], window=2))
    assert engine.has_work()
    chain = tokens_of(run(engine)["t"], "a")
    assert chain == chain_after([1, 2, 3], GREEDY, 2)
    engine.verdict("t", verdict("a", 3, [], window=0))
    engine.verdict("t", verdict("a", 3, chain[:1], window=0))
    assert not engine.has_work()
    engine.verdict("t", verdict("a", 4, [], window=3))
    assert tokens_of(run(engine)["t"], "a") == chain_after([1, 2, 3, *chain], GREEDY, 2)


def test_a_smaller_window_stops_the_chain_where_it_is() -> None:
    engine = make_engine()
    engine.open("t", opened("a", [1, 2, 3], window=6))
    chain = tokens_of(run(engine)["t"], "a")
    engine.verdict("t", verdict("a", 3, chain[:1], window=2))
    assert not engine.has_work()


def test_a_long_prefill_does_not_stall_the_others() -> None:
    engine = make_engine(max_num_batched_tokens=256)
    for index in range(4):
        engine.open("t", opened(f"s{index}", [index, 1], window=1000))
    engine.step()
    engine.take_outbox()
    prompt = [index % VOCAB_SIZE for index in range(500)]
    engine.open("t", opened("long", prompt, window=4))
    for _ in range(200):
        engine.step()
        outbox = engine.take_outbox()["t"]
        served = {message.sequence_id: len(message.token_ids) for message in outbox.candidates}
        assert [served.get(f"s{index}") for index in range(4)] == [1, 1, 1, 1]
        if "long" in served:
            assert outbox.candidates[-1].token_ids == tuple(chain_after(prompt, GREEDY, 1))
            return
    raise AssertionError("the long prompt was never computed")


def test_prefill_alone_uses_the_whole_step() -> None:
    runner = PagedFake()
    engine = make_engine(runner, max_num_batched_tokens=256)
    engine.open("t", opened("long", [1] * 500, window=1))
    run(engine)
    assert [len(batch[0].token_ids) for batch in runner.batches] == [256, 244]
    assert [batch[0].num_logits for batch in runner.batches] == [0, 1]


def test_more_sequences_than_a_step_holds_take_turns() -> None:
    engine = make_engine(max_num_seqs=7, max_num_batched_tokens=8)
    for index in range(6):
        engine.open("t", opened(f"s{index}", [index], window=100))
    engine.step()
    engine.take_outbox()
    engine.open("t", opened("long", [1] * 200, window=1))  # takes half of each step for a long time
    served = dict.fromkeys((f"s{index}" for index in range(6)), 0)
    for _ in range(12):
        engine.step()
        for message in engine.take_outbox()["t"].candidates:
            served[message.sequence_id] += len(message.token_ids)
    assert set(served.values()) == {8}  # 12 steps of 4 tokens among 6


def test_prefill_pace_learns_what_a_step_can_carry() -> None:
    pace = PrefillPace()
    assert pace.limit() == MIN_PREFILL_TOKENS
    for _ in range(50):
        pace.record(0.010, 4, 0)
        pace.record(0.010 + 64 * 0.0001, 4, 64)
    assert pace.limit() == pytest.approx(100, abs=2)
    never_alone = PrefillPace()
    never_alone.record(0.1, 0, 1000)
    never_alone.record(0.020 + 16 * 0.0001, 4, 16)
    assert never_alone.limit() == pytest.approx(200, abs=2)
    slow = PrefillPace()
    slow.record(0.010, 1, 0)
    slow.record(1.0, 0, 64)
    assert slow.limit() == MIN_PREFILL_TOKENS


# ------------------------------------------------------------------------- limits and faults


def test_open_is_declined_where_it_cannot_be_served() -> None:
    engine = make_engine(PagedFake(max_model_len=64, num_blocks=10), max_num_seqs=2)
    for name, token_ids, reason in [
        ("empty", [], "no tokens"),
        ("long", [1] * 64, "max_model_len = 64"),
        ("big", [1] * 41, "KV cache"),
        ("alien", [VOCAB_SIZE], "vocabulary"),
        ("negative", [-1], "vocabulary"),
    ]:
        engine.open("t", opened(name, token_ids))
        (decline,) = engine.take_outbox()["t"].declines
        assert (decline.sequence_id, decline.epoch) == (name, 1)
        assert reason in decline.reason
    for index in range(3):
        engine.open("t", opened(f"s{index}", [1]))
    (decline,) = engine.take_outbox()["t"].declines
    assert decline.sequence_id == "s2"
    assert "max_num_seqs = 2" in decline.reason
    engine.close("t", Close("s0", 1))
    engine.open("t", opened("s3", [1]))
    assert engine.snapshot().num_sequences == 2
    engine.check_invariants()


@pytest.mark.parametrize(("model", "configured"), [(12, None), (99, 12), (12, 99)])
def test_the_chain_stops_at_the_length_and_then_the_sequence_is_declined(
    model: int, configured: int | None
) -> None:
    engine = make_engine(PagedFake(max_model_len=model), max_model_len=configured)
    engine.open("t", opened("a", [1] * 8, window=10))
    chain = tokens_of(run(engine)["t"], "a")
    assert chain == chain_after([1] * 8, GREEDY, 4)
    engine.verdict("t", verdict("a", 8, chain[:3], window=10))
    assert not engine.has_work()
    engine.verdict("t", verdict("a", 11, [5, 6], window=10))
    (decline,) = engine.take_outbox()["t"].declines
    assert "max_model_len = 12" in decline.reason
    assert engine.snapshot().num_free_blocks == engine.snapshot().num_blocks


def test_a_draft_with_a_smaller_vocabulary_than_its_target_proposes_only_common_ids() -> None:
    engine = make_engine()
    engine.target_joined("narrow", 3)
    engine.target_joined("wide", 1000)
    for peer in ("t", "narrow", "wide"):
        engine.open(peer, opened("a", [1, 2], window=12, params=SamplingParams(seed=5)))
    said = run(engine)
    assert tokens_of(said["narrow"], "a") == chain_after([1, 2], SamplingParams(seed=5), 12, vocab_size=3)
    assert tokens_of(said["wide"], "a") == tokens_of(said["t"], "a")
    assert max(tokens_of(said["t"], "a")) >= 3


def test_short_of_blocks_one_is_declined_and_the_others_go_on() -> None:
    engine = make_engine(PagedFake(num_blocks=12))  # 48 slots for three chains of 18 + 4
    for index in range(3):
        engine.open("t", opened(f"s{index}", [index] * 4, window=18))
    said = run(engine)["t"]
    declined = {decline.sequence_id for decline in said.declines}
    assert len(declined) == 1
    assert "no free KV blocks" in said.declines[0].reason
    for index in range(3):
        if f"s{index}" not in declined:
            assert tokens_of(said, f"s{index}") == chain_after([index] * 4, GREEDY, 18)


def test_short_of_blocks_a_prefill_yields_to_a_running_chain() -> None:
    engine = make_engine(PagedFake(num_blocks=16))
    engine.open("t", opened("a", [1] * 4, window=40))
    engine.step()
    engine.open("t", opened("long", [2] * 60, window=4))
    said = run(engine)["t"]
    assert [decline.sequence_id for decline in said.declines] == ["long"]
    assert tokens_of(said, "a") == chain_after([1] * 4, GREEDY, 40)


def test_resting_sequences_give_up_their_kv_and_compute_it_again() -> None:
    engine = make_engine(PagedFake(num_blocks=12))
    engine.open("t", opened("rest", [1] * 20, window=4))
    first = tokens_of(run(engine)["t"], "rest")
    engine.verdict("t", verdict("rest", 20, first[:1], window=0))
    engine.open("t", opened("busy", [2] * 30, window=4))
    said = run(engine)["t"]
    assert said.declines == []
    assert tokens_of(said, "busy") == chain_after([2] * 30, GREEDY, 4)
    engine.close("t", Close("busy", 1))
    engine.verdict("t", verdict("rest", 21, [], window=8))
    assert tokens_of(run(engine)["t"], "rest") == chain_after([1] * 20 + first, GREEDY, 5)


def test_a_failing_step_declines_its_sequences_and_the_draft_lives() -> None:
    runner = PagedFake()
    engine = make_engine(runner)
    engine.open("t", opened("a", [1, 2]))
    engine.open("t", opened("rest", [1, 2], window=0))
    runner.fail_next = True
    said = run(engine)["t"]
    assert [decline.sequence_id for decline in said.declines] == ["a"]
    snapshot = engine.snapshot()
    assert (snapshot.num_faults_total, snapshot.last_fault) == (1, "RuntimeError: out of memory")
    assert snapshot.num_free_blocks == snapshot.num_blocks
    engine.verdict("t", verdict("rest", 2, [], window=3))
    assert tokens_of(run(engine)["t"], "rest") == chain_after([1, 2], GREEDY, 3)


def test_logits_without_a_law_cost_their_own_sequence_only() -> None:
    class PoisonedFake(PagedFake):
        def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
            logits = super().forward(batch)
            for row, part in enumerate(batch):
                if part.token_ids[-1] == 7:
                    logits[row, 3] = math.nan
            return logits

    engine = make_engine(PoisonedFake())
    prompts = {"bad": [1, 7], "good": [1, 2]}
    for name, prompt in prompts.items():
        engine.open("t", opened(name, prompt, window=1))
    said = run(engine)["t"]
    assert [decline.sequence_id for decline in said.declines] == ["bad"]
    assert "not finite" in said.declines[0].reason
    assert tokens_of(said, "good") == chain_after([1, 2], GREEDY, 1)


def test_all_blocks_come_back() -> None:
    engine = make_engine()
    engine.target_joined("u", VOCAB_SIZE)
    for index in range(10):
        engine.open("t", opened(f"s{index}", [index] * (index + 1)))
        engine.open("u", opened(f"s{index}", [index] * (index + 1)))
    run(engine)
    assert engine.snapshot().num_free_blocks < engine.snapshot().num_blocks
    for index in range(10):
        engine.close("t", Close(f"s{index}", 1))
    engine.target_left("u")
    snapshot = engine.snapshot()
    assert (snapshot.num_free_blocks, snapshot.num_sequences, snapshot.num_targets) == (
        snapshot.num_blocks,
        0,
        1,
    )
