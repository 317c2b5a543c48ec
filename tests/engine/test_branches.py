"""Likely corrections: a prepared one is answered at once, nothing is left of others, none delay a chain."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.actors.engine.config import DraftEngineConfig, Hardware, NgramConfig, TargetEngineConfig
from paceline.actors.engine.draft_engine import DraftEngine
from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.messages import Close, Open
from paceline.actors.engine.parameters import SamplingParams, VerificationRule
from paceline.actors.engine.runners_up import runners_up
from paceline.actors.engine.target_engine import TargetEngine
from tests.engine.fakes import Clock, HashLaw, HashRunner, Network, make_submit, reference
from tests.engine.paged_fake import VOCAB_SIZE, PagedFake, chain_after, law, opened, verdict

PROMPT = [3, 1, 4, 1, 5]
SAMPLED = SamplingParams(temperature=1.0, seed=11)


def make_engine(runner: PagedFake | None = None, *, max_branches: int = 12, **config: int) -> DraftEngine:
    """Steps take no time by its clock, so that any width is free."""
    limits = DraftEngineConfig(max_branches=max_branches, **config)
    engine = DraftEngine(runner or PagedFake(), limits, lambda: 0.0)
    engine.target_joined("t", VOCAB_SIZE)
    return engine


def prepare(engine: DraftEngine, *, tail: int = 4, params: SamplingParams = SAMPLED) -> list[int]:
    """Have a chain of 6 and all that the draft prepares for it; the chain."""
    engine.open("t", opened("s", PROMPT, window=6, params=params))
    first = chain_after(PROMPT, params, 1)
    engine.step()
    engine.verdict("t", verdict("s", len(PROMPT), first, window=6, branch_tokens=tail))
    for _ in range(100):
        engine.step()
        engine.check_invariants()
    assert not engine.has_work()
    engine.take_outbox()
    return chain_after([*PROMPT, *first], params, 6)


def next_best(context: list[int], params: SamplingParams) -> int:
    """The draft's second choice after ``context``."""
    row = law(context)[None]
    chosen = chain_after(context, params, 1)
    return runners_up(row, [params], [len(context)], chosen, [1])[0][0]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prepared_correction_is_answered_without_a_step(depth: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=5)
    runner = PagedFake()
    engine = make_engine(runner)
    chain = prepare(engine, params=params)
    committed = [*PROMPT, *chain_after(PROMPT, params, 1)]
    known = len(committed)
    corrected = next_best([*committed, *chain[:depth]], params)
    steps = len(runner.batches)
    engine.verdict("t", verdict("s", known, [*chain[:depth], corrected], window=6, branch_tokens=4))
    engine.check_invariants()
    (message,) = engine.take_outbox()["t"].candidates
    assert len(runner.batches) == steps
    assert message.prepared
    assert message.base_position == known + depth + 1
    committed += [*chain[:depth], corrected]
    assert list(message.token_ids) == chain_after(committed, params, 4)
    # It goes on from there as any chain, with KV that is its own.
    for _ in range(100):
        engine.step()
        engine.check_invariants()
    (later,) = engine.take_outbox()["t"].candidates[:1]
    assert not later.prepared
    assert later.revision == message.revision
    tail = [*message.token_ids, *later.token_ids]
    assert tail == chain_after(committed, params, len(tail))
    snapshot = engine.snapshot()
    assert (snapshot.num_corrections_total, snapshot.num_prepared_corrections_total) == (1, 1)
    assert snapshot.num_branch_tokens_total > 0


def test_the_next_round_is_prepared_from_a_branch_s_own_second_choices() -> None:
    engine = make_engine(max_branches=24)
    chain = prepare(engine)
    committed = [*PROMPT, *chain_after(PROMPT, SAMPLED, 1)]
    for _ in range(3):
        corrected = next_best([*committed, *chain[:2]], SAMPLED)
        engine.verdict("t", verdict("s", len(committed), [*chain[:2], corrected], window=6, branch_tokens=4))
        committed += [*chain[:2], corrected]
        for _ in range(60):
            engine.step()
            engine.check_invariants()
        chain = chain_after(committed, SAMPLED, 6)
    assert engine.snapshot().num_prepared_corrections_total == 3


def test_a_verdict_that_goes_past_the_prepared_tail_s_first_error() -> None:
    """Merged from several steps: the branch is right at first, and is corrected itself."""
    engine = make_engine()
    chain = prepare(engine)
    committed = [*PROMPT, *chain_after(PROMPT, SAMPLED, 1)]
    known = len(committed)
    corrected = next_best([*committed, *chain[:1]], SAMPLED)
    tail = chain_after([*committed, chain[0], corrected], SAMPLED, 3)
    other = (tail[1] + 1) % VOCAB_SIZE
    engine.verdict("t", verdict("s", known, [chain[0], corrected, tail[0], other], window=3, branch_tokens=3))
    engine.check_invariants()
    assert engine.take_outbox() == {}
    committed += [chain[0], corrected, tail[0], other]
    for _ in range(60):
        engine.step()
        engine.check_invariants()
    said = [token for item in engine.take_outbox()["t"].candidates for token in item.token_ids]
    assert said == chain_after(committed, SAMPLED, 3)


@pytest.mark.parametrize("end", ["close", "rest", "leave", "unwanted"])
def test_all_blocks_come_back(end: str) -> None:
    runner = PagedFake()
    engine = make_engine(runner, enable_prefix_caching=False)
    start = engine.snapshot().num_free_blocks
    chain = prepare(engine)
    held = start - engine.snapshot().num_free_blocks
    known = len(PROMPT) + 1
    if end == "close":
        engine.close("t", Close("s", 1))
    elif end == "leave":
        engine.target_left("t")
    elif end == "rest":
        engine.verdict("t", verdict("s", known, [], window=0, branch_tokens=4))
    else:
        engine.verdict("t", verdict("s", known, chain[:1], window=6))
    engine.check_invariants()
    left = start - engine.snapshot().num_free_blocks
    own = -(-(len(PROMPT) + 7) // runner.block_size)
    assert held > own
    assert left <= (own if end in ("rest", "unwanted") else 0)


def test_a_sequence_that_needs_blocks_gets_those_of_branches() -> None:
    engine = make_engine(PagedFake(num_blocks=20, block_size=4), enable_prefix_caching=False)
    prepare(engine)
    assert engine.snapshot().num_free_blocks < 8
    engine.open("t", opened("other", list(range(24)) + list(range(8)), window=4))
    for _ in range(60):
        engine.step()
        engine.check_invariants()
    outbox = engine.take_outbox()["t"]
    assert not outbox.declines
    said = [token for item in outbox.candidates if item.sequence_id == "other" for token in item.token_ids]
    assert said == chain_after(list(range(24)) + list(range(8)), opened("x", [0]).sampling, 4)


def test_none_without_a_word_of_the_target_and_none_where_they_are_switched_off() -> None:
    for engine, tail in ((make_engine(), 0), (make_engine(max_branches=0), 4)):
        prepare(engine, tail=tail)
        snapshot = engine.snapshot()
        assert snapshot.num_branch_tokens_total == 0
        assert snapshot.num_corrections_total == 0


def test_none_under_a_rule_that_shares_no_noise() -> None:
    engine = make_engine()
    event = Open("s", 1, tuple(PROMPT), SAMPLED, 4, rule=VerificationRule.STANDARD, draft_seed=1 << 48)
    engine.open("t", event)
    engine.step()
    engine.verdict("t", verdict("s", len(PROMPT), [1], window=4, branch_tokens=4))
    for _ in range(20):
        engine.step()
    assert engine.snapshot().num_branch_tokens_total == 0


def test_a_step_that_gets_dearer_takes_fewer_along() -> None:
    """Where each token costs, a chain is not held up for what may never be needed."""

    def widths(per_token: float) -> list[int]:
        now = [0.0]

        class Timed(PagedFake):
            def forward(self, batch):  # type: ignore[no-untyped-def]
                now[0] += 0.002 + per_token * sum(len(part.token_ids) for part in batch)
                return super().forward(batch)

        runner = Timed()
        engine = DraftEngine(runner, DraftEngineConfig(max_branches=12), lambda: now[0])
        engine.target_joined("t", VOCAB_SIZE)
        engine.open("t", opened("s", PROMPT, window=8, params=SAMPLED))
        committed = list(PROMPT)
        for _ in range(30):
            first = chain_after(committed, SAMPLED, 1)[0]
            wrong = (first + 1) % VOCAB_SIZE  # the chain starts afresh each time
            engine.verdict("t", verdict("s", len(committed), [wrong], window=8, branch_tokens=8))
            committed.append(wrong)
            for _ in range(4):
                engine.step()
            engine.take_outbox()
        return [sum(len(part.token_ids) for part in batch) for batch in runner.batches[-40:]]

    assert max(widths(0.0)) > 8
    assert max(widths(0.002)) <= 2


def test_a_failed_step_costs_the_sequences_it_was_for() -> None:
    runner = PagedFake()
    engine = make_engine(runner, enable_prefix_caching=False)
    start = engine.snapshot().num_free_blocks
    engine.open("t", opened("s", PROMPT, window=6, params=SAMPLED))
    engine.step()
    first = chain_after(PROMPT, SAMPLED, 1)
    engine.verdict("t", verdict("s", len(PROMPT), first, window=6, branch_tokens=4))
    for _ in range(8):
        engine.step()
    runner.fail_next = True
    engine.step()
    engine.check_invariants()
    assert engine.snapshot().num_free_blocks == start
    assert [item.sequence_id for item in engine.take_outbox()["t"].declines] == ["s"]


def test_broken_logits_of_a_branch_cost_the_branch_alone() -> None:
    class Broken(PagedFake):
        poisoned = False

        def forward(self, batch):  # type: ignore[no-untyped-def]
            logits = super().forward(batch)
            if self.poisoned and len(batch) > 1:
                logits[1:] = torch.nan
            return logits

    runner = Broken()
    engine = make_engine(runner)
    runner.poisoned = True
    prepare(engine)
    assert engine.snapshot().num_declines_total == 0
    assert engine.snapshot().num_sequences == 1


def test_the_number_of_branches_is_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="max_branches"):
        DraftEngineConfig(max_branches=-1)
    with pytest.raises(InvalidArgumentError, match="max_branches"):
        DraftEngineConfig(max_branches=257)


# ---------------------------------------------------------------- with a target, messages moving at random


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_messages_leaves_the_output_as_it_is_and_nothing_behind(seed: int) -> None:
    """A target that prepares corrections with two drafts of hardware of their own, one of them leaving."""
    rng = random.Random(seed)
    config = TargetEngineConfig(
        hardware=Hardware.SEPARATE, num_speculative_tokens=4, ngram=NgramConfig(enabled=False)
    )
    network = Network(TargetEngine(HashRunner(), config, Clock()), rng)
    network.draft_clock = Clock()  # steps take no time, so that any width is free
    penalised = SamplingParams(temperature=1.0, seed=3, presence_penalty=0.6)
    sampled = [
        make_submit(
            f"s{index}",
            [rng.randrange(32) for _ in range(rng.randint(1, 12))],
            max_tokens=rng.randint(8, 40),
            temperature=index % 2,
            seed=index,
            sampling=penalised if index == 3 else None,
        )
        for index in range(4)
    ]
    first = network.join(HashLaw(noise=0.4, seed=3))
    network.join(HashLaw(noise=0.6, seed=4))
    for event in sampled:
        network.submit(event)
    for step in range(2500):
        network.random_action()
        network.check()
        if step == 200 + 40 * seed:
            network.leave(first)
            network.check()
    network.run()
    network.settle_drafts()
    network.check()
    for event in sampled:
        whole, reason = reference(HashLaw(), event)
        key = (event.sequence_id, event.epoch)
        assert network.gateway.completions[key] == whole
        assert network.gateway.finished[key].reason is reason
    snapshots = [engine.snapshot() for engine in network.drafts.values()]
    assert sum(snapshot.num_branch_tokens_total for snapshot in snapshots) > 20
    assert all(snapshot.num_free_blocks == snapshot.num_blocks for snapshot in snapshots)
    assert all(snapshot.num_sequences == 0 for snapshot in snapshots)
