"""Quantised laws: what is drawn from is what is sent, small, and checked; and they follow their tokens."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.actors import wire
from paceline.actors.engine.chain import DraftChain, Received
from paceline.actors.engine.config import NgramConfig, TargetEngineConfig
from paceline.actors.engine.draft_law import (
    MAX_LAW_ENTRIES,
    MAX_LAW_WEIGHT,
    DraftLawError,
    SparseLaw,
    check_law,
    draw_token,
    quantize_law,
)
from paceline.actors.engine.draft_sequence import DraftSequence
from paceline.actors.engine.errors import NonFiniteLogitsError
from paceline.actors.engine.messages import Candidates, DraftLaw, Open, Submit
from paceline.actors.engine.noise import (
    Purpose,
    random_integer,
    revision_seed,
    round_seed,
    stay_seed,
    uniform,
)
from paceline.actors.engine.parameters import (
    FinishReason,
    SamplingParams,
    SpeculationParams,
    StoppingParams,
    VerificationRule,
)
from paceline.actors.engine.proposer import NgramProposer
from paceline.actors.engine.ratio_verifier import verify_by_ratio
from paceline.actors.engine.sampling import process_logits
from paceline.actors.engine.sequence import TargetSequence
from paceline.actors.engine.target_engine import DraftOutput, TargetEngine
from tests.engine.fakes import HashLaw, HashRunner, Network, hello

COUPLED, STANDARD, BLOCK = VerificationRule
A, B = DraftLaw((1, 2, 3), (5, 2, 1)), DraftLaw((3, 4), (2, 1))


class TestQuantization:
    def test_probabilities_are_close_and_ordered(self) -> None:
        logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
        row = process_logits(logits, [SamplingParams()])[0].numpy()
        law = quantize_law(row)
        exact = np.exp(row) / np.exp(row).sum()
        sparse = SparseLaw.of(law.token_ids[0], law)
        assert len(law.token_ids) == 50
        assert law.weights[0] == MAX_LAW_WEIGHT
        assert list(law.weights) == sorted(law.weights, reverse=True)
        assert sparse.probabilities.sum() == pytest.approx(1.0)
        assert exact[list(law.token_ids)] == pytest.approx(sparse.probabilities, abs=1e-5)

    def test_only_the_top_entries_stay_ties_by_the_lower_id(self) -> None:
        row = np.zeros(5000)
        assert quantize_law(row).token_ids == tuple(range(MAX_LAW_ENTRIES))
        row = np.linspace(-3.0, 0.0, 5000)
        assert quantize_law(row).token_ids == tuple(range(4999, 4999 - MAX_LAW_ENTRIES, -1))

    def test_removed_and_negligible_tokens_have_no_entry(self) -> None:
        row = np.array([-math.inf, 0.0, -11.0, -12.0, -math.inf])
        law = quantize_law(row)
        assert law == DraftLaw((1, 2), (MAX_LAW_WEIGHT, 1))
        for token_id in law.token_ids:
            check_law(law, token_id, 5)

    def test_size_is_bounded(self) -> None:
        """The figure in the module's text, for the widest entries of a vocabulary below 2**21."""
        ids = tuple(range(2**21 - MAX_LAW_ENTRIES, 2**21))
        law = DraftLaw(ids, (MAX_LAW_WEIGHT,) * MAX_LAW_ENTRIES)
        with_law = Candidates("s", 1, 9, (ids[0],), 0, (law,))
        sizes = [wire.candidates_to_proto(item).ByteSize() for item in (with_law, replace(with_law, laws=()))]
        assert sizes[0] - sizes[1] <= 393

    def test_draws_follow_the_weights_exactly(self) -> None:
        law = DraftLaw((7, 3, 5), (4, 3, 1))
        step = 2**64 // 8
        drawn = [draw_token(law, number * step + offset) for number in range(8) for offset in (0, step - 1)]
        assert drawn == [7] * 8 + [3] * 6 + [5] * 2

    @pytest.mark.parametrize(
        ("law", "reason"),
        [
            (DraftLaw((), ()), "entries"),
            (DraftLaw(tuple(range(65)), (1,) * 65), "entries"),
            (DraftLaw((1, 2), (1,)), "weights"),
            (DraftLaw((1, 2, 1), (1, 1, 1)), "twice"),
            (DraftLaw((1, 32), (1, 1)), "outside"),
            (DraftLaw((1, -1), (1, 1)), "outside"),
            (DraftLaw((1, 2), (1, 0)), "weight"),
            (DraftLaw((1, 2), (1, MAX_LAW_WEIGHT + 1)), "weight"),
            (DraftLaw((2, 3), (1, 1)), "token 1"),
        ],
    )
    def test_impossible_laws_are_refused(self, law: DraftLaw, reason: str) -> None:
        with pytest.raises(DraftLawError, match=reason):
            check_law(law, 1, 32)


class TestStreams:
    def test_no_two_keys_or_purposes_share_a_number(self) -> None:
        keys = [
            *(round_seed(5, epoch, base) for epoch in range(4) for base in range(40)),
            *(stay_seed(5, epoch, stay) for epoch in range(4) for stay in range(40)),
            *(revision_seed(5, revision) for revision in range(40)),
            5,
        ]
        assert len(set(keys)) == len(keys)
        numbers = {
            random_integer(key, position, purpose)
            for key in keys[:50]
            for position in range(10)
            for purpose in (Purpose.ACCEPTANCE, Purpose.RESIDUAL, Purpose.BONUS, Purpose.DRAFT)
        }
        assert len(numbers) == 50 * 10 * 4

    @pytest.mark.parametrize("varied", ["seed", "epoch", "base", "position", "purpose"])
    def test_uniforms_are_uniform_and_neighbours_independent(self, varied: str) -> None:
        def number(index: int) -> float:
            at = {"seed": 3, "epoch": 1, "base": 20, "position": 20, "purpose": 1} | {varied: index}
            key = round_seed(at["seed"], at["epoch"], at["base"])
            return uniform(key, at["position"], Purpose(at["purpose"] % len(Purpose)))

        if varied == "purpose":
            values = [uniform(round_seed(3, 1, b), 20, p) for b in range(500) for p in Purpose]
        else:
            values = [number(index) for index in range(4000)]
        assert 0.0 < min(values) < max(values) < 1.0
        assert stats.kstest(values, "uniform").pvalue > 1e-3
        pairs = np.histogram2d(values[:-1], values[1:], bins=5, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(pairs.ravel()).pvalue > 1e-3


class TestChain:
    """Laws stay parallel to tokens on both sides."""

    def test_trimmed_and_dropped_like_the_tokens(self) -> None:
        chain = DraftChain()
        laws = [DraftLaw((token,), (1,)) for token in (5, 6, 7, 8)]
        assert chain.receive(0, 1, (5, 6, 7), (9, 5), 8, laws[:3]) is Received.KEPT
        assert (chain.token_ids, chain.laws) == ([6, 7], laws[1:3])
        assert chain.receive(0, 3, (7, 8), (9, 5), 3, laws[2:]) is Received.KEPT
        assert (chain.token_ids, chain.laws) == ([6, 7, 8], laws[1:])
        assert chain.receive(0, 5, (1, 1), (9, 5), 4) is Received.KEPT
        assert (chain.token_ids, chain.laws) == ([6, 7, 8, 1], [*laws[1:], None])
        assert chain.advance((6, 7)) == 2
        assert (chain.token_ids, chain.laws) == ([8, 1], [laws[3], None])
        assert chain.advance((4,)) == 0
        assert (chain.token_ids, chain.laws) == ([], [])
        assert chain.receive(1, 3, (5,), (9, 5, 6), 4, laws[:1]) is Received.KEPT
        assert chain.receive(2, 3, (6,), (9, 5, 6), 4, laws[1:2]) is Received.KEPT
        assert (chain.token_ids, chain.laws) == ([6], laws[1:2])

    def test_a_drafts_own(self) -> None:
        opened = Open("s", 1, (1, 2), SamplingParams(), 8, rule=BLOCK, draft_seed=3)
        sequence = DraftSequence("t", opened, vocab_size=32, max_model_len=64)
        for token_id, law in ((3, A), (4, B), (3, B)):
            sequence.append(token_id, law)
            sequence.check()
        assert sequence.take_candidates() == Candidates("s", 1, 2, (3, 4, 3), 0, (A, B, B))
        sequence.commit(2, (3,))
        sequence.check()
        assert sequence.laws == [B, B]
        sequence.append(1, A)
        assert sequence.take_candidates() == Candidates("s", 1, 5, (1,), 0, (A,))
        assert sequence.commit(3, (4, 9)) == 2
        sequence.check()
        assert sequence.laws == []
        sequence.append(2, A)
        assert sequence.take_candidates() == Candidates("s", 1, 5, (2,), 1, (A,))
        sequence.commit(5, (2, 6, 7))
        sequence.check()
        assert sequence.laws == []

    def test_a_stay_takes_no_tokens_of_a_former_stay(self) -> None:
        first, second = (
            Open("s", 1, (9,), SamplingParams(), 8, rule=BLOCK, draft_seed=stay_seed(1, 1, stay))
            for stay in range(2)
        )
        assert set(first.revisions).isdisjoint(second.revisions)
        chain = DraftChain.of_stay(second, reopened=True)
        assert chain.receive(first.revisions[3], 1, (3,), (9,), 8, (A,)) is Received.STALE
        assert not chain.started
        assert chain.receive(second.revisions[0], 1, (3,), (9,), 8, (A,)) is Received.KEPT
        assert chain.receive(first.revisions[3], 1, (4,), (9,), 8, (B,)) is Received.STALE
        assert chain.receive(second.revisions[-1] + 1, 1, (4,), (9,), 8, (B,)) is Received.STALE
        assert (chain.token_ids, chain.laws) == ([3], [A])
        draft = DraftSequence("t", second, vocab_size=32, max_model_len=64)
        draft.append(3, A)
        draft.append(4, B)
        assert draft.commit(1, (5,)) == 2
        assert draft.revision == second.revisions[1]

    def test_under_the_coupled_rule_revisions_count_from_zero(self) -> None:
        opened = Open("s", 1, (9,), SamplingParams(), 8, draft_seed=stay_seed(1, 1, 1))
        assert opened.revisions == range(2**32)
        assert DraftSequence("t", opened, vocab_size=32, max_model_len=64).revision == 0

    def test_greedy_and_coupled_drafts_send_none(self) -> None:
        for rule, temperature, wanted in ((BLOCK, 0.0, False), (COUPLED, 1.0, False), (STANDARD, 1.0, True)):
            opened = Open("s", 1, (1,), SamplingParams(temperature=temperature), 8, rule=rule)
            assert DraftSequence("t", opened, vocab_size=9, max_model_len=9).sends_laws is wanted


# ---------------------------------------------------------------- rows without a law


def verify_rows(
    rule: VerificationRule, rows: Sequence[Sequence[float]], tail: Sequence[int], seed: int
) -> tuple[int, ...] | int:
    """What is committed, or how many tokens were accepted before the row without a law was reached."""
    event = Submit(
        "s", 1, (1,), 1, SamplingParams(seed=seed), StoppingParams(9), SpeculationParams(rule=rule)
    )
    sequence = TargetSequence.from_submit("g", event, 8, NgramProposer(NgramConfig()))
    try:
        return verify_by_ratio(sequence, tail, (), torch.tensor(rows, dtype=torch.float32)).token_ids
    except NonFiniteLogitsError as error:
        return error.rows[0]


@pytest.mark.parametrize("rule", [STANDARD, BLOCK])
@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_a_row_without_a_law_matters_only_where_it_is_reached(rule: VerificationRule, bad: float) -> None:
    half, broken = [0.0, 0.0], [bad, bad]
    assert verify_rows(rule, [broken], [], 0) == 0
    outcomes = [verify_rows(rule, [half, broken, half], [1, 1], seed) for seed in range(400)]
    # Half of the time the token before it is kept, and there is nothing to go on with.
    assert set(outcomes) == {1, (0,)}
    assert 150 < outcomes.count(1) < 250


# ---------------------------------------------------------------- engines


def test_requests_of_all_rules_share_a_step_and_coupled_ones_are_unmoved() -> None:
    def run(rules: Sequence[VerificationRule], temperature: float) -> list[list[int]]:
        target = TargetEngine(HashRunner(), TargetEngineConfig(num_speculative_tokens=3))
        network = Network(target)
        network.join(HashLaw(noise=0.4))
        for index, rule in enumerate(rules):
            network.submit(ratio_submit(str(index), rule, temperature, seed=index))
        network.run()
        return [network.gateway.completions[(str(index), 1)] for index in range(len(rules))]

    alone, mixed = run([COUPLED] * 6, 1.0), run([COUPLED, STANDARD, BLOCK] * 2, 1.0)
    assert [mixed[0], mixed[3]] == [alone[0], alone[3]]
    assert mixed[1] != alone[1]
    assert run([COUPLED, STANDARD, BLOCK] * 2, 0.0) == run([COUPLED] * 6, 0.0)


@pytest.mark.parametrize("rule", [STANDARD, BLOCK])
def test_a_perfect_draft_is_accepted_whole(rule: VerificationRule) -> None:
    """Up to what quantisation leaves out."""
    network = Network(
        TargetEngine(
            HashRunner(), TargetEngineConfig(num_speculative_tokens=4, ngram=NgramConfig(enabled=False))
        )
    )
    network.join(HashLaw())
    for index in range(20):
        network.submit(ratio_submit(str(index), rule, 1.0, seed=index, max_tokens=40))
    network.run()
    snapshot = network.target.snapshot()
    assert snapshot.num_accepted_tokens_total > 0.995 * snapshot.num_draft_tokens_total > 400


@pytest.mark.parametrize("rule", [STANDARD, BLOCK])
def test_a_drafts_acceptance_counts_verified_tokens_only(rule: VerificationRule) -> None:
    """What a bonus token says of a chain's next token is whether two draws agree, not how good the draft is:
    a perfect draft's next token would be missed about half of the time."""
    network = Network(
        TargetEngine(
            HashRunner(), TargetEngineConfig(num_speculative_tokens=2, ngram=NgramConfig(enabled=False))
        )
    )
    network.join(HashLaw())
    for index in range(10):
        network.submit(ratio_submit(str(index), rule, 1.0, seed=index, max_tokens=40))
    network.run()
    (draft,) = network.target.snapshot().drafts
    snapshot = network.target.snapshot()
    assert draft.acceptance > 0.97
    assert draft.num_foretold_total <= draft.num_tested_total <= snapshot.num_draft_tokens_total


def ratio_submit(
    sequence_id: str,
    rule: VerificationRule,
    temperature: float,
    *,
    seed: int = 0,
    epoch: int = 1,
    max_tokens: int = 16,
    num_prompt: int = 3,
) -> Submit:
    return Submit(
        sequence_id=sequence_id,
        epoch=epoch,
        token_ids=tuple(range(1, num_prompt + 1)),
        prompt_length=num_prompt,
        sampling=SamplingParams(temperature=temperature, seed=seed, top_k=random.Random(seed).choice([0, 2])),
        stopping=StoppingParams(max_tokens),
        speculation=SpeculationParams(rule=rule),
    )


BAD_LAWS = {
    "too few": ((3, 4), (A,)),
    "too many": ((3,), (A, B)),
    "empty": ((3,), (DraftLaw((), ()),)),
    "unequal": ((3,), (DraftLaw((3, 4), (1,)),)),
    "duplicate": ((3,), (DraftLaw((3, 3), (1, 1)),)),
    "foreign id": ((3,), (DraftLaw((3, 32), (1, 1)),)),
    "no weight": ((3,), (DraftLaw((3, 4), (1, 0)),)),
    "huge weight": ((3,), (DraftLaw((3, 4), (2**32 - 1, 1)),)),
    "token missing": ((5,), (A,)),
}


@pytest.mark.parametrize("name", BAD_LAWS)
@pytest.mark.parametrize("rule", VerificationRule)
def test_bad_laws_cost_the_draft_the_sequence_and_nobody_else(rule: VerificationRule, name: str) -> None:
    token_ids, laws = BAD_LAWS[name]
    target = TargetEngine(HashRunner(), TargetEngineConfig(num_speculative_tokens=4))
    target.draft_joined("d", hello("d"))
    for sequence_id in ("bad", "good"):
        target.submit("g", ratio_submit(sequence_id, rule, 1.0))
    revisions = {item.sequence_id: item.revisions[0] for item in target.take_outbox().drafts["d"].opens}
    messages = [
        Candidates("bad", 1, 3, token_ids, revisions["bad"], laws),
        Candidates("good", 1, 3, (3, 4), revisions["good"], (A, B)),
    ]
    target.candidates("d", messages, 0.01)
    target.check_invariants()
    # The coupled rule has no use for laws, and does not read them.
    quarantined = rule is not COUPLED
    assert target.snapshot().num_quarantined_total == quarantined
    assert target.snapshot().drafts[0].num_sequences == 2 - quarantined
    told = target.take_outbox().drafts.get("d", DraftOutput())
    assert [item.sequence_id for item in told.closes] == ["bad"] * quarantined
    while target.wait_seconds() is not None:
        target.step()
        target.check_invariants()
    assert target.snapshot().num_finished_total == 2


def test_every_stay_has_a_draft_seed_of_its_own() -> None:
    target = TargetEngine(HashRunner(), TargetEngineConfig(num_speculative_tokens=2))
    seeds = []
    for epoch, peer in itertools.product((1, 2), ("d", "e", "d")):
        target.submit("g", ratio_submit("s", BLOCK, 1.0, epoch=epoch))
        target.draft_joined(peer, hello(peer))
        opens = target.take_outbox().drafts[peer].opens
        assert [item.rule for item in opens] == [BLOCK]
        seeds.extend(item.draft_seed for item in opens)
        target.draft_left(peer)
    assert len(set(seeds)) == len(seeds) == 6


@pytest.mark.parametrize("seed", range(24))
def test_lateness_departures_and_hostile_messages(seed: int) -> None:
    rng = random.Random(seed)
    config = TargetEngineConfig(
        num_speculative_tokens=rng.choice([1, 2, 4, 8, None]),
        max_num_seqs=rng.choice([2, 16]),
        ngram=NgramConfig(enabled=rng.random() < 0.5, min_n=1, max_n=2),
    )
    network = Network(TargetEngine(HashRunner(num_blocks=rng.choice([14, 64])), config), rng)
    waiting = [
        ratio_submit(
            f"s{index}",
            rng.choice([STANDARD, BLOCK, BLOCK, COUPLED]),
            rng.choice([0.0, 0.7, 1.0]),
            seed=rng.getrandbits(64),
            max_tokens=rng.randint(1, 20),
            num_prompt=rng.randint(1, 12),
        )
        for index in range(6)
    ]
    events = list(waiting)
    for _ in range(1500):
        chance = rng.random()
        if waiting and chance < 0.1:
            network.submit(waiting.pop())
        elif chance < 0.12 and len(network.drafts) < 3:
            network.join(HashLaw(noise=rng.choice([0.0, 0.4, 1.0])), capacity=rng.choice([1, 3, 8]))
        elif chance < 0.13 and network.drafts:
            network.leave(rng.choice(list(network.drafts)))
        elif chance < 0.17 and network.seen_candidates and network.drafts:
            _, old = rng.choice(network.seen_candidates)
            network.target.candidates(rng.choice(list(network.drafts)), [twist(old, rng)], 0.01)
            network.pump_target()
        else:
            network.random_action()
        network.check()
        if not waiting and network.target.wait_seconds() is None:
            break
    network.run()
    for event in events:
        finished = network.gateway.finished[(event.sequence_id, 1)]
        assert finished.reason is FinishReason.LENGTH
        assert len(network.gateway.completions[(event.sequence_id, 1)]) == event.stopping.max_tokens
    load = network.target.load()
    assert load.free_blocks == load.total_blocks
    network.settle_drafts()
    for draft in network.drafts.values():
        assert draft.snapshot().num_sequences == 0


def twist(old: Candidates, rng: random.Random) -> Candidates:
    """A message of the past, as it was or with something wrong."""
    laws = old.laws
    if laws:
        law = laws[0]
        laws = rng.choice(
            [
                laws,
                laws[:-1],
                laws + laws,
                (),
                (replace(law, weights=law.weights[:-1]), *laws[1:]),
                (replace(law, weights=(0,) * len(law.weights)), *laws[1:]),
                (DraftLaw((31,), (1,)), *laws[1:]),
            ]
        )
    return replace(
        old,
        epoch=old.epoch + rng.choice([0, 0, 0, -1, 1]),
        base_position=max(0, old.base_position + rng.choice([0, 0, 0, -2, 1])),
        revision=max(0, old.revision + rng.choice([0, 0, -1, 1])),
        laws=laws,
    )
