"""How many guesses of an outcome, where, and with how much of a step; and which tokens they begin with."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from paceline.actors.engine.fan_out import MAX_ALTERNATIVES, MISS_EXPONENT, fan_out, guess_share, spare_tokens
from paceline.actors.engine.noise import gumbel_of_bits, random_bits
from paceline.actors.engine.parameters import SamplingParams
from paceline.actors.engine.runners_up import runners_up
from paceline.actors.engine.sampling import sample


@pytest.mark.parametrize("acceptance", [0.01, 0.3, 0.8, 0.99])
@pytest.mark.parametrize("tail", [1, 5, 8, 16])
@pytest.mark.parametrize("budget", [0, 1, 7, 24, 1000])
def test_fan_out_stays_within_its_bounds(acceptance: float, tail: int, budget: int) -> None:
    counts = fan_out(acceptance, tail, budget)
    assert len(counts) == tail + 1
    assert sum(counts) <= budget
    assert all(0 <= count <= MAX_ALTERNATIVES for count in counts)
    assert list(counts[:tail]) == sorted(counts[:tail], reverse=True), "earlier corrections are likelier"
    if budget <= tail:
        assert sum(counts) == budget


def test_fan_out_is_near_the_fewest_misses_by_brute_force() -> None:
    """At a tail of 3, over all ways to spend the budget; a position without guesses misses always."""
    alpha, tail, budget = 0.7, 3, 8

    def hit(counts: tuple[int, ...]) -> float:
        corrected = [alpha**k * (1 - alpha) for k in range(tail)]
        found = sum(p * (1 - n**-MISS_EXPONENT) for p, n in zip(corrected, counts, strict=False) if n)
        return found + alpha**tail * (1 - (counts[tail] + 1) ** -MISS_EXPONENT)

    best = max(
        hit(counts) for counts in itertools.product(range(budget + 1), repeat=4) if sum(counts) <= budget
    )
    assert hit(fan_out(alpha, tail, budget)) > 0.97 * best


def test_guess_shares_are_those_of_the_miss_law() -> None:
    assert sum(guess_share(rank) for rank in range(1, 4)) == pytest.approx(1 - 4**-MISS_EXPONENT)
    assert guess_share(1) > guess_share(2) > guess_share(3)


def test_spare_tokens_by_brute_force() -> None:
    def stairs(tokens: int) -> float:
        return 0.002 + 0.001 * (tokens // 16)

    for tokens, slack, limit in itertools.product((0, 1, 5, 40), (1.0, 1.15, 2.0), (0, 7, 100)):
        fitting = [n for n in range(limit + 1) if stairs(tokens + n) <= slack * stairs(max(tokens, 1))]
        assert spare_tokens(stairs, tokens, slack, limit) == max(fitting, default=0)


# ---------------------------------------------------------------- the next-best tokens


@pytest.mark.parametrize("vocab_size", [5, 300, 5000])
def test_runners_up_are_the_next_in_the_race(vocab_size: int) -> None:
    logits = torch.randn(24, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits[:, ::3] -= 30.0
    logits[:, 17:] -= 30.0  # few enough to race for it that all of them are looked at
    params = [SamplingParams(temperature=(0.0, 1.0, 0.6)[row % 3], seed=row) for row in range(24)]
    positions = list(range(100, 124))
    chosen = sample(logits, params, positions)
    found = runners_up(logits, params, positions, chosen, [3, 0] * 12)
    assert sorted(found) == list(range(0, 24, 2))
    for row, tokens in found.items():
        scores = logits[row].double().numpy()
        if not params[row].greedy:
            bits = random_bits(np.int64(params[row].seed), np.int64(positions[row]), np.arange(vocab_size))
            scores = scores / params[row].temperature + gumbel_of_bits(bits)
        order = np.argsort(-scores, kind="stable").tolist()
        assert order[0] == chosen[row]
        assert list(tokens) == order[1:4]


def test_runners_up_are_none_that_the_filters_remove() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, -np.inf, 1.0]] * 3)
    params = [
        SamplingParams(temperature=1.0, seed=1, top_k=2),
        SamplingParams(temperature=1.0, seed=1, min_p=0.2),
        SamplingParams(temperature=1.0, seed=1),
    ]
    chosen = sample(logits, params, [7, 8, 9])
    found = runners_up(logits, params, [7, 8, 9], chosen, [6, 6, 6])
    assert set(found[0]) == {0, 1} - {chosen[0]}
    assert set(found[1]) == {0, 1} - {chosen[1]}
    assert set(found[2]) == {0, 1, 2, 3, 5} - {chosen[2]}
