"""The ratio rules, by exact enumeration: the law of the next tokens is the target's, to the last digits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from paceline.actors.engine.draft_law import SparseLaw
from paceline.actors.engine.noise import FloatArray
from paceline.actors.engine.parameters import VerificationRule
from paceline.actors.engine.verification import (
    Judgement,
    Verification,
    judge_block,
    judge_standard,
    num_accepted_block,
    num_accepted_standard,
    pick,
    residual,
    verify_coupled,
    verify_ratio,
)

STANDARD, BLOCK = VerificationRule.STANDARD, VerificationRule.BLOCK
V, GAMMA = 3, 3
JUDGES = {STANDARD: judge_standard, BLOCK: judge_block}
Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """A law for each history of fewer than ``length`` tokens."""

    laws: dict[Prefix, FloatArray]

    def __getitem__(self, prefix: Prefix) -> FloatArray:
        return self.laws[prefix]


def family(make: Callable[[Prefix], FloatArray], length: int, vocab_size: int = V) -> Family:
    return Family(
        {
            prefix: make(prefix)
            for depth in range(length)
            for prefix in itertools.product(range(vocab_size), repeat=depth)
        }
    )


def random_family(rng: np.random.Generator, length: int, kind: str = "full") -> Family:
    def make(_: Prefix) -> FloatArray:
        if kind == "onehot":
            return np.eye(V)[rng.integers(V)]
        law = rng.dirichlet(np.full(V, rng.choice([0.3, 1.0, 5.0])))
        if kind == "zeros":
            law[rng.integers(V)] = 0.0
        return law / law.sum()

    return family(make, length)


def sparse(law: FloatArray) -> SparseLaw:
    ids = np.flatnonzero(law)
    return SparseLaw(ids, law[ids])


def judged(rule: VerificationRule, tail: Prefix, target: Family, draft: Family) -> Judgement:
    return JUDGES[rule](
        tail,
        [target[tail[:depth]] for depth in range(len(tail) + 1)],
        [sparse(draft[tail[:depth]]) for depth in range(len(tail))],
    )


def lengths(rule: VerificationRule, acceptance: Sequence[float]) -> list[float]:
    """P(τ = i), i = 0 … k, from the definition of what h_i means under each rule."""
    k = len(acceptance)
    if rule is STANDARD:
        return [math.prod(acceptance[:i]) * (1.0 - acceptance[i] if i < k else 1.0) for i in range(k + 1)]
    return [
        (acceptance[i - 1] if i else 1.0) * math.prod(1.0 - h for h in acceptance[i:]) for i in range(k + 1)
    ]


def drafted(draft: Family, tail: Prefix) -> float:
    return math.prod(float(draft[tail[:depth]][token]) for depth, token in enumerate(tail))


def tails(draft: Family, length: int = GAMMA, vocab_size: int = V) -> list[tuple[Prefix, float]]:
    every = [(tail, drafted(draft, tail)) for tail in itertools.product(range(vocab_size), repeat=length)]
    return [(tail, weight) for tail, weight in every if weight > 0.0]


def law_of_next(rule: VerificationRule, target: Family, draft: Family) -> dict[Prefix, float]:
    """Law of the next GAMMA + 1 tokens: one round, then the target's own for what is missing."""
    result = dict.fromkeys(itertools.product(range(V), repeat=GAMMA + 1), 0.0)
    for tail, weight in tails(draft):
        found = judged(rule, tail, target, draft)
        for kept, chance in enumerate(lengths(rule, found.acceptance)):
            if chance == 0.0:
                continue
            last = (
                target[tail]
                if kept == GAMMA
                else residual(target[tail[:kept]], found.scales[kept], sparse(draft[tail[:kept]]))
            )
            last = last / last.sum()
            for rest in itertools.product(range(V), repeat=GAMMA - kept):
                for token in range(V):
                    path = (*tail[:kept], token, *rest)
                    probability = weight * chance * float(last[token])
                    for depth in range(kept + 1, GAMMA + 1):
                        probability *= float(target[path[:depth]][path[depth]])
                    result[path] += probability
    return result


def mean_accepted(
    rule: VerificationRule, target: Family, draft: Family, length: int, vocab_size: int
) -> float:
    total = 0.0
    for tail, weight in tails(draft, length, vocab_size):
        chances = lengths(rule, judged(rule, tail, target, draft).acceptance)
        total += weight * sum(kept * chance for kept, chance in enumerate(chances))
    return total


class TestLaw:
    @pytest.mark.parametrize("kind", ["full", "zeros", "onehot", "equal"])
    @pytest.mark.parametrize("target_kind", ["full", "zeros", "onehot"])
    @pytest.mark.parametrize("rule", [STANDARD, BLOCK])
    def test_next_tokens_have_the_targets_law(
        self, rule: VerificationRule, target_kind: str, kind: str
    ) -> None:
        rng = np.random.default_rng(hash_of(rule.value, target_kind, kind))
        for _ in range(6):
            target = random_family(rng, GAMMA + 1, target_kind)
            draft = target if kind == "equal" else random_family(rng, GAMMA + 1, kind)
            for path, probability in law_of_next(rule, target, draft).items():
                assert probability == pytest.approx(drafted(target, path), abs=1e-12)

    def test_coupled_commits_the_targets_samples(self) -> None:
        """With any samples, so with any law of them: what is committed is a head of the samples."""
        for tail in itertools.product(range(V), repeat=GAMMA):
            for samples in itertools.product(range(V), repeat=GAMMA + 1):
                found = verify_coupled(tail, samples)
                assert found.token_ids == samples[: len(found.token_ids)]

    @pytest.mark.parametrize("wrong", ["target", "next row", "unscaled"])
    def test_the_enumeration_notices_a_wrong_residual(
        self, wrong: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rng = np.random.default_rng(5)
        target, draft = random_family(rng, GAMMA + 1), random_family(rng, GAMMA + 1)
        right = residual

        def biased(law: FloatArray, scale: float, q: SparseLaw) -> FloatArray:
            if wrong == "target":
                return law
            if wrong == "next row":
                return right(target[(0,)], scale, q)
            return right(law, 1.0, q)

        monkeypatch.setitem(globals(), "residual", biased)
        law = law_of_next(BLOCK, target, draft)
        assert max(abs(chance - drafted(target, path)) for path, chance in law.items()) > 1e-3


class TestAcceptance:
    def test_the_known_case(self) -> None:
        target = family(lambda _: np.array([1 / 3, 2 / 3]), 3, 2)
        draft = family(lambda _: np.array([2 / 3, 1 / 3]), 3, 2)
        assert mean_accepted(BLOCK, target, draft, 2, 2) == pytest.approx(11 / 9, abs=1e-12)
        assert mean_accepted(STANDARD, target, draft, 2, 2) == pytest.approx(10 / 9, abs=1e-12)

    def test_block_accepts_at_least_as_much(self) -> None:
        rng = np.random.default_rng(7)
        gains = []
        for _ in range(200):
            target = random_family(rng, GAMMA + 1, rng.choice(["full", "zeros"]))
            draft = random_family(rng, GAMMA + 1, rng.choice(["full", "zeros"]))
            block = mean_accepted(BLOCK, target, draft, GAMMA, V)
            standard = mean_accepted(STANDARD, target, draft, GAMMA, V)
            assert block >= standard - 1e-12
            gains.append(block - standard)
        assert max(gains) > 0.05

    def test_one_step_of_standard_is_one_minus_total_variation(self) -> None:
        rng = np.random.default_rng(3)
        for _ in range(50):
            target, draft = random_family(rng, 2), random_family(rng, 2)
            overlap = float(np.minimum(target[()], draft[()]).sum())
            for rule in (STANDARD, BLOCK):
                assert mean_accepted(rule, target, draft, 1, V) == pytest.approx(overlap, abs=1e-12)

    def test_block_keeps_i_tokens_with_the_probability_of_its_scale(self) -> None:
        rng = np.random.default_rng(9)
        for _ in range(30):
            target, draft = random_family(rng, GAMMA + 1), random_family(rng, GAMMA + 1, "zeros")
            kept = dict.fromkeys((tail[:i] for tail, _ in tails(draft) for i in range(GAMMA + 1)), 0.0)
            scales = {}
            for tail, weight in tails(draft):
                found = judged(BLOCK, tail, target, draft)
                chances = lengths(BLOCK, found.acceptance)
                for number in range(GAMMA + 1):
                    head = tail[:number]
                    kept[head] += weight * sum(chances[number:]) / drafted(draft, head)
                    scales[head] = found.scales[number]
            for head, scale in scales.items():
                assert kept[head] == pytest.approx(scale, abs=1e-12)
                ratios = (target[head[:i]][t] / draft[head[:i]][t] for i, t in enumerate(head))
                assert scale >= math.prod(min(1.0, ratio) for ratio in ratios) - 1e-12

    @pytest.mark.parametrize("target_kind", ["full", "onehot"])
    def test_block_is_standard_for_certain_drafts_and_certain_targets(self, target_kind: str) -> None:
        rng = np.random.default_rng(13)
        for _ in range(30):
            target = random_family(rng, GAMMA + 1, target_kind)
            draft = random_family(rng, GAMMA + 1, "onehot" if target_kind == "full" else "full")
            for tail, _ in tails(draft):
                standard, block = (judged(rule, tail, target, draft) for rule in (STANDARD, BLOCK))
                assert lengths(BLOCK, block.acceptance) == pytest.approx(
                    lengths(STANDARD, standard.acceptance), abs=1e-12
                )
                for kept in range(GAMMA):
                    if lengths(BLOCK, block.acceptance)[kept] < 1e-12:
                        continue
                    q = sparse(draft[tail[:kept]])
                    rests = [
                        residual(target[tail[:kept]], found.scales[kept], q) for found in (standard, block)
                    ]
                    assert rests[0] / rests[0].sum() == pytest.approx(rests[1] / rests[1].sum(), abs=1e-12)

    def test_a_certain_token_is_accepted_with_its_probability_and_else_never_drawn(self) -> None:
        law = np.array([0.2, 0.5, 0.3])
        q = SparseLaw.of(1, None)
        for judge in (judge_standard, judge_block):
            assert judge([1], [law, law], [q]).acceptance == (0.5,)
        rest = residual(law, 1.0, q)
        assert rest / rest.sum() == pytest.approx([0.4, 0.0, 0.6])


class TestComposition:
    """From uniforms to tokens."""

    def test_standard_stops_at_the_first_failure_and_block_at_the_last_success(self) -> None:
        for outcomes in itertools.product([True, False], repeat=4):
            uniforms = [0.25 if success else 0.75 for success in outcomes]
            acceptance = [0.5] * 4
            first_failure = outcomes.index(False) if False in outcomes else 4
            last_success = max((i + 1 for i, success in enumerate(outcomes) if success), default=0)
            assert num_accepted_standard(acceptance, uniforms) == first_failure
            assert num_accepted_block(acceptance, uniforms) == last_success

    def test_certain_and_impossible_tokens_do_not_depend_on_the_uniform(self) -> None:
        for uniform in (2.0**-53, 0.5, 1.0 - 2.0**-53):
            for count in (num_accepted_standard, num_accepted_block):
                assert count([1.0], [uniform]) == 1
                assert count([0.0], [uniform]) == 0

    def test_pick_follows_the_weights(self) -> None:
        weights = np.array([0.0, 2.0, 0.0, 6.0, 0.0])
        grid = (np.arange(8000) + 0.5) / 8000
        counts = np.bincount([pick(weights, u) for u in grid], minlength=5)
        assert counts.tolist() == [0, 2000, 0, 6000, 0]
        for uniform in (2.0**-53, 1.0 - 2.0**-53):
            assert weights[pick(weights, uniform)] > 0.0

    @pytest.mark.parametrize("rule", [STANDARD, BLOCK])
    def test_whole_rule_over_a_grid_of_uniforms_has_the_enumerated_law(self, rule: VerificationRule) -> None:
        rng = np.random.default_rng(21)
        target, draft = random_family(rng, 3), random_family(rng, 3)
        tail = tails(draft, 2)[3][0]
        found = judged(rule, tail, target, draft)
        expected = lengths(rule, found.acceptance)
        n = 60
        grid = (np.arange(n) + 0.5) / n
        counts = np.zeros(3)
        for first in grid:
            for second in grid:
                outcome = self.verify(rule, target, draft, tail, [first, second])
                counts[outcome.num_accepted] += 1
                assert outcome.token_ids[: outcome.num_accepted] == tail[: outcome.num_accepted]
                assert len(outcome.token_ids) == outcome.num_accepted + 1
                if outcome.num_accepted < 2:
                    # A chain dies of a rejection: what replaces the token is never the token.
                    assert outcome.token_ids[-1] != tail[outcome.num_accepted]
        assert counts / n**2 == pytest.approx(expected, abs=0.04)

    @pytest.mark.parametrize("rule", [STANDARD, BLOCK])
    def test_a_rejected_token_is_never_its_own_replacement(self, rule: VerificationRule) -> None:
        rng = np.random.default_rng(22)
        num_rejected = 0
        for _ in range(3000):
            kind = rng.choice(["full", "zeros", "onehot"])
            target, draft = random_family(rng, 3), random_family(rng, 3, kind)
            choices = tails(draft, 2)
            tail = choices[rng.integers(len(choices))][0]
            found = verify_ratio(
                rule,
                tail,
                [target[tail[:i]] for i in range(3)],
                [sparse(draft[tail[:i]]) for i in range(2)],
                rng.random(2).tolist(),
                rng.random(),
                rng.random(),
            )
            if found.num_accepted < 2:
                num_rejected += 1
                assert found.token_ids[-1] != tail[found.num_accepted]
        assert num_rejected > 500

    def test_bonus_and_corrected_tokens_have_their_own_uniform(self) -> None:
        law = np.array([0.5, 0.5])
        q = SparseLaw(np.array([0, 1]), np.array([0.9, 0.1]))
        kept = verify_ratio(STANDARD, [1], [law, law], [q], [0.5], 0.1, 0.9)
        assert kept == Verification(1, (1, 1))
        corrected = verify_ratio(STANDARD, [0], [law, law], [q], [0.9], 0.1, 0.9)
        assert corrected == Verification(0, (1,))

    def test_without_a_tail_the_target_draws(self) -> None:
        law = np.array([0.25, 0.75])
        for rule in (STANDARD, BLOCK):
            assert verify_ratio(rule, [], [law], [], [], 0.9, 0.2) == Verification(0, (0,))
            assert verify_ratio(rule, [], [law], [], [], 0.1, 0.3) == Verification(0, (1,))

    def test_what_does_not_fit_is_refused(self) -> None:
        law = np.array([1.0])
        q = SparseLaw.of(0, None)
        with pytest.raises(ValueError, match="target laws"):
            verify_ratio(STANDARD, [0], [law], [q], [0.5], 0.5, 0.5)
        with pytest.raises(ValueError, match="uniforms"):
            verify_ratio(BLOCK, [0], [law, law], [q], [], 0.5, 0.5)
        with pytest.raises(ValueError, match="coupled"):
            verify_ratio(VerificationRule.COUPLED, [], [law], [], [], 0.5, 0.5)

    @staticmethod
    def verify(
        rule: VerificationRule, target: Family, draft: Family, tail: Prefix, uniforms: Sequence[float]
    ) -> Verification:
        return verify_ratio(
            rule,
            tail,
            [target[tail[:depth]] for depth in range(len(tail) + 1)],
            [sparse(draft[tail[:depth]]) for depth in range(len(tail))],
            uniforms,
            0.37,
            0.61,
        )


def hash_of(*parts: str) -> int:
    return sum(ord(character) * (index + 1) for index, character in enumerate("/".join(parts)))
