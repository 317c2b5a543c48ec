"""Sampling: the exact law, the exact filters, and the same token alone or in a batch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.actors.engine.errors import NonFiniteLogitsError
from paceline.actors.engine.noise import gumbel, gumbel_of_bits, random_bits, seed_bits, words_of_blocks
from paceline.actors.engine.parameters import SamplingParams
from paceline.actors.engine.sampling import process_logits, sample

LOWEST_P_VALUE = 1e-5
"""Seeds are fixed, so nothing is flaky: a p-value below this one means a defect."""

FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0),
    SamplingParams(top_k=4),
    SamplingParams(top_k=10_000),
    SamplingParams(top_p=0.3),
    SamplingParams(top_p=0.9),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=0.7, top_k=6, top_p=0.8),
    SamplingParams(temperature=1.5, top_k=8, top_p=0.95, min_p=0.05),
    SamplingParams(temperature=1.5, top_p=0.999, min_p=0.02),
]


def random_logits(rows: int, vocab_size: int, spread: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def expected_log_weights(logits: list[float], params: SamplingParams) -> list[float]:
    """The definition, one row, one step after the other."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    weights = [math.exp((logits[token] - logits[order[0]]) / params.temperature) for token in order]
    kept = sum(1 for weight in weights if weight >= params.min_p)
    if params.top_k:
        kept = min(kept, params.top_k)
    if params.top_p < 1.0:
        total, before, inside = math.fsum(weights[:kept]), 0.0, 0
        while inside < kept and before < params.top_p * total:
            before += weights[inside]
            inside += 1
        kept = inside
    result = [-math.inf] * len(logits)
    for token in order[:kept]:
        result[token] = (logits[token] - logits[order[0]]) / params.temperature
    return result


def kept_by_sorting(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Which tokens are kept, [V], by sorting all of them; with mass as the sampler counts it."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    log_weights = (logits[order].astype(np.float64) - float(logits[order[0]])) / params.temperature
    kept = int((log_weights >= math.log(params.min_p)).sum()) if params.min_p else len(order)
    kept = min(kept, params.top_k or kept, int((logits > -np.inf).sum()))
    mass = np.floor(np.exp(log_weights[:kept]) * 2.0**40)
    if params.top_p < 1.0:
        kept = int((np.cumsum(mass) - mass < params.top_p * mass.sum()).sum())
    result = np.zeros(len(logits), dtype=np.bool_)
    result[order[:kept]] = True
    return result


def law_of(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    weights = expected_log_weights(logits.double().tolist(), params)
    return torch.tensor(weights, dtype=torch.float64).softmax(0).numpy()


def sample_unpruned(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    """Noise for every token, no shortcut."""
    seeds = torch.tensor([seed_bits(wanted.seed) for wanted in params])
    noise = gumbel(seeds, torch.tensor(positions), torch.arange(logits.shape[1]))
    return (process_logits(logits, params) + noise).argmax(dim=1).tolist()


class TestFilters:
    @pytest.mark.parametrize("options", FILTERS)
    @pytest.mark.parametrize("spread", [0.2, 2.0, 8.0])
    def test_match_the_definition(self, options: SamplingParams, spread: float) -> None:
        logits = random_logits(8, 61, spread)
        found = process_logits(logits, [options] * 8)
        for row in range(8):
            expected = expected_log_weights(logits[row].double().tolist(), options)
            assert found[row].tolist() == expected

    @pytest.mark.parametrize("options", FILTERS)
    def test_match_the_definition_with_many_ties(self, options: SamplingParams) -> None:
        logits = (random_logits(8, 61, 2.0) * 2).round() / 2
        found = process_logits(logits, [options] * 8)
        for row in range(8):
            kept = (found[row] > -math.inf).tolist()
            expected = expected_log_weights(logits[row].double().tolist(), options)
            assert kept == [value > -math.inf for value in expected]

    def test_top_k_keeps_exactly_k_the_lowest_ids_among_equals(self) -> None:
        logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 2.0, 1.0]])
        kept = process_logits(logits, [SamplingParams(top_k=4)])[0] > -math.inf
        assert kept.tolist() == [True, True, True, False, True, False]

    def test_top_p_counts_the_mass_that_top_k_and_min_p_left(self) -> None:
        logits = torch.tensor([[0.5, 0.25, 0.15, 0.10]]).log()
        assert (process_logits(logits, [SamplingParams(top_p=0.7)])[0] > -math.inf).sum() == 2
        # Of the first two, the first alone is 0.667 of the mass.
        cut_by_k = process_logits(logits, [SamplingParams(top_p=0.66, top_k=2)])[0]
        assert (cut_by_k > -math.inf).tolist() == [True, False, False, False]
        cut_by_min_p = process_logits(logits, [SamplingParams(top_p=0.66, min_p=0.4)])[0]
        assert (cut_by_min_p > -math.inf).tolist() == [True, False, False, False]

    def test_min_p_looks_at_the_tempered_law(self) -> None:
        logits = torch.tensor([[0.0, -1.0]])
        cold = process_logits(logits, [SamplingParams(temperature=0.25, min_p=0.1)])[0]
        hot = process_logits(logits, [SamplingParams(temperature=4.0, min_p=0.1)])[0]
        assert cold.tolist() == [0.0, -math.inf]
        assert hot.tolist() == [0.0, -0.25]

    def test_greedy_keeps_the_argmax_only(self) -> None:
        logits = torch.tensor([[1.0, 2.0, 2.0]])
        assert process_logits(logits, [SamplingParams(temperature=0)])[0].tolist() == [
            -math.inf,
            0,
            -math.inf,
        ]

    def test_a_large_vocabulary_matches_a_plain_sort(self) -> None:
        logits = random_logits(3, 50_001, 2.5)
        for options in (
            SamplingParams(top_p=0.9),
            SamplingParams(temperature=0.7, top_p=0.95),
            SamplingParams(top_k=50, top_p=0.9),
        ):
            found = process_logits(logits, [options] * 3) > -math.inf
            for row in range(3):
                expected = expected_log_weights(logits[row].double().tolist(), options)
                assert torch.equal(found[row], torch.tensor(expected) > -math.inf)

    @pytest.mark.parametrize("vocab_size", [9_002, 50_001])
    def test_large_rows_of_every_shape(self, vocab_size: int) -> None:
        """Steep, flat, rounded to few values (as of bfloat16), and with nearly all tokens removed."""
        steep, flat, rounded, removed = random_logits(4, vocab_size, 1.0)
        rounded = (rounded * 2.5).bfloat16().float()
        removed = torch.where(removed > 2.8, removed, -math.inf)
        rows = torch.stack([steep * 6, flat * 0.3, rounded, removed])
        for options in [
            *FILTERS,
            SamplingParams(top_p=0.9999),
            SamplingParams(temperature=0.3, top_p=0.5),
            SamplingParams(top_k=vocab_size // 2),
            SamplingParams(min_p=1e-9),
        ]:
            found = process_logits(rows, [options] * 4) > -math.inf
            for row in range(4):
                assert np.array_equal(found[row].numpy(), kept_by_sorting(rows[row].numpy(), options))
            params = [replace(options, seed=seed) for seed in range(4)]
            assert sample(rows, params, [5] * 4) == sample_unpruned(rows, params, [5] * 4)


class TestLaw:
    DRAWS = 20_000

    @pytest.mark.parametrize("options", FILTERS)
    def test_tokens_follow_the_filtered_softmax(self, options: SamplingParams) -> None:
        logits = random_logits(1, 13, 1.5, seed=3)
        params = [replace(options, seed=seed) for seed in range(self.DRAWS)]
        tokens = sample(logits.expand(self.DRAWS, -1), params, [7] * self.DRAWS)
        law = law_of(logits[0], params[0])
        counts = np.bincount(tokens, minlength=13)
        assert (counts[law == 0] == 0).all(), "a removed token was drawn"
        counts, expected = counts[law > 0], law[law > 0] * self.DRAWS
        pooled = expected < 5
        if pooled.any():
            counts = np.append(counts[~pooled], counts[pooled].sum())
            expected = np.append(expected[~pooled], expected[pooled].sum())
        if len(counts) > 1:
            assert stats.chisquare(counts, expected).pvalue > LOWEST_P_VALUE

    def test_the_check_notices_a_wrong_temperature(self) -> None:
        logits = random_logits(1, 13, 1.5, seed=3)
        params = [SamplingParams(temperature=0.9, seed=seed) for seed in range(self.DRAWS)]
        counts = np.bincount(sample(logits.expand(self.DRAWS, -1), params, [7] * self.DRAWS), minlength=13)
        assert stats.chisquare(counts, logits[0].double().softmax(0).numpy() * self.DRAWS).pvalue < 1e-8

    def test_successive_positions_of_one_seed_follow_the_law(self) -> None:
        logits = random_logits(1, 13, 1.5, seed=3)
        params = [SamplingParams(seed=5)] * self.DRAWS
        tokens = sample(logits.expand(self.DRAWS, -1), params, list(range(self.DRAWS)))
        expected = logits[0].double().softmax(0).numpy() * self.DRAWS
        assert stats.chisquare(np.bincount(tokens, minlength=13), expected).pvalue > LOWEST_P_VALUE
        pairs = np.histogram2d(tokens[:-1], tokens[1:], bins=13)[0]
        common = expected > 500
        assert stats.chi2_contingency(pairs[common][:, common]).pvalue > LOWEST_P_VALUE


class TestPruning:
    @pytest.mark.parametrize("options", FILTERS)
    @pytest.mark.parametrize(
        ("vocab_size", "spread"), [(5, 1.0), (64, 0.0), (64, 3.0), (1021, 0.5), (1021, 6.0), (9_002, 2.5)]
    )
    def test_pruned_is_unpruned(self, options: SamplingParams, vocab_size: int, spread: float) -> None:
        rows = 48
        logits = random_logits(rows, vocab_size, spread)
        params = [replace(options, seed=2**64 - 1 - row) for row in range(rows)]
        positions = list(range(2**32 - 10, 2**32 - 10 + rows))
        expected = sample_unpruned(logits, params, positions)
        assert sample(logits, params, positions) == expected
        alone = [sample(logits, [params[row]], [positions[row]], [row])[0] for row in range(rows)]
        assert alone == expected, "a few numbers do not race like many"
        some = [0, 3, 4, 5, 7, 20, 21, 22, 23, 24, 47]
        chosen = [params[row] for row in some], [positions[row] for row in some]
        assert sample(logits, *chosen, some) == [expected[row] for row in some]

    @pytest.mark.parametrize("gap", [0.01, 0.0])
    def test_a_winner_by_the_very_highest_bits(self, gap: float) -> None:
        """At seed 0 and this position token 10 has bits 2**32 − 3, where the noise is steepest: what the bits
        lack is no bound on 1 − u to the percent there."""
        position = 144_337_849
        bits = random_bits(np.zeros(12, np.int64), np.full(12, position), np.arange(12))
        assert bits[10] == 2**32 - 3
        noise = gumbel_of_bits(bits)
        rival, slow = int(noise[:8].argmax()), int(noise[:8].argmin())
        logits = torch.full((1, 12), -200.0)
        # Token 10 wins by a thirtieth; the rival's own lead is what it has to overcome.
        logits[0, rival], logits[0, slow] = -gap, 0.0
        logits[0, 10] = float(noise[rival] - gap - noise[10]) + 0.1 / 3.0
        params = SamplingParams()
        assert sample_unpruned(logits, [params], [position]) == [10]
        assert sample(logits, [params], [position]) == [10]
        assert sample(logits.expand(5, -1), [params] * 5, [position] * 5) == [10] * 5

    def test_few_tokens_in_reach(self) -> None:
        """Of peaked rows: those that race number by number, equal logits and cuts among them included."""
        ids = torch.tensor([3, 900, 17, 16, 250, 251, 1000, 8])
        logits = torch.full((400, 1021), -40.0)
        logits[:, ids] = torch.tensor([2.0, 2.0, 1.5, 1.0, 1.0, 1.0, 0.0, -1.0])
        for options in [SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.7)]:
            params = [replace(options, seed=row) for row in range(400)]
            positions = [row * 7 for row in range(400)]
            alone = [sample(logits, [params[row]], [positions[row]], [row])[0] for row in range(400)]
            assert alone == sample_unpruned(logits, params, positions)
            assert len(set(alone)) >= 4

    def test_a_vocabulary_of_many_chunks(self) -> None:
        logits = random_logits(2, 151_936, 0.3)
        logits[1] *= 8
        for position in range(12):
            params = [SamplingParams(seed=4), SamplingParams(seed=4, temperature=3.0)]
            positions = [position, position]
            assert sample(logits, params, positions) == sample_unpruned(logits, params, positions)

    def test_the_luckiest_of_many_tokens_wins_exactly_when_it_should(self) -> None:
        """The highest noise of 16 million draws, about 16 nats: its token wins from as far behind."""
        vocab_size, seed, positions = 2**18, 12, np.arange(64)
        words = words_of_blocks(np.array([seed]), positions[:, None], np.arange(vocab_size // 4))
        bits = np.stack(words, axis=-1).reshape(64, vocab_size)
        position, token = divmod(int(bits.argmax()), vocab_size)
        noise = gumbel_of_bits(bits[position])
        first = (token + 1) % vocab_size
        lead = float(noise[token] - noise[first])
        assert lead > 14
        logits = torch.full((1, vocab_size), -math.inf)
        logits[0, first] = 0.0
        for behind, expected in ((lead - 1e-4, token), (lead + 1e-4, first)):
            logits[0, token] = -behind
            assert sample(logits, [SamplingParams(seed=seed)], [position]) == [expected]
            wanted = SamplingParams(seed=seed, temperature=2.0)
            assert sample(logits * 2, [wanted], [position]) == [expected]

    def test_an_unlikely_token_can_still_win(self) -> None:
        """Twelve nats behind: one draw in 160,000 per token, so 20,000 such tokens win about one in nine."""
        logits = torch.full((1, 20_001), -12.0)
        logits[0, 7] = 0.0
        draws = 400
        params = [SamplingParams(seed=seed) for seed in range(draws)]
        wins = sum(token != 7 for token in sample(logits.expand(draws, -1), params, [0] * draws))
        expected = draws * 20_000 * math.exp(-12) / (1 + 20_000 * math.exp(-12))
        assert abs(wins - expected) < 4 * math.sqrt(expected)


class TestGreedy:
    @pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-6, 1e-5, 1e-4])
    def test_temperatures_next_to_zero(self, temperature: float) -> None:
        logits = random_logits(6, 997, 3.0)
        params = [SamplingParams(temperature=temperature, seed=row) for row in range(6)]
        assert sample(logits, params, [row * 3 for row in range(6)]) == logits.argmax(dim=1).tolist()

    @pytest.mark.parametrize(
        "options",
        [
            SamplingParams(top_k=1, temperature=1.5),
            SamplingParams(top_k=1, temperature=100.0, top_p=0.99),
            SamplingParams(top_p=1e-6),
            SamplingParams(top_p=1e-6, temperature=1.5),
            SamplingParams(min_p=0.99, temperature=1.5),
        ],
    )
    def test_filters_that_leave_one_token(self, options: SamplingParams) -> None:
        logits = random_logits(64, 997, 3.0)
        top = logits.topk(2).values
        logits[torch.arange(64), logits.argmax(dim=1)] += (0.1 - (top[:, 0] - top[:, 1])).clamp(min=0)
        params = [replace(options, seed=row) for row in range(64)]
        assert sample(logits, params, list(range(64))) == logits.argmax(dim=1).tolist()

    @pytest.mark.parametrize(
        "options", [SamplingParams(temperature=0.0), SamplingParams(top_k=1), SamplingParams(top_p=1e-6)]
    )
    @pytest.mark.parametrize("vocab_size", [2, 17, 1000, 151_936])
    def test_ties_go_to_the_lowest_id(self, options: SamplingParams, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(vocab_size)
        logits = torch.zeros(20, vocab_size)
        ids = torch.randint(0, vocab_size, (20, 5), generator=generator)
        logits.scatter_(1, ids, 1.0)
        params = [replace(options, seed=row) for row in range(20)]
        assert sample(logits, params, [0] * 20) == ids.amin(dim=1).tolist()

    def test_equal_logits_are_not_greedy_when_sampled(self) -> None:
        params = [SamplingParams(seed=row) for row in range(200)]
        assert len(set(sample(torch.zeros(200, 10), params, [0] * 200))) == 10


class TestBatches:
    def mixed(self) -> tuple[torch.Tensor, list[SamplingParams], list[int]]:
        logits = random_logits(40, 3_001, 3.0)
        params = [replace(FILTERS[row % len(FILTERS)], seed=row) for row in range(39)] + [
            SamplingParams(temperature=0)
        ]
        params[3] = replace(params[3], temperature=0.0)
        return logits, params, [row * 11 for row in range(40)]

    def test_a_row_is_the_same_alone_in_a_batch_and_in_another_order(self) -> None:
        logits, params, positions = self.mixed()
        together = sample(logits, params, positions)
        alone = [
            sample(logits[row : row + 1], [params[row]], [positions[row]])[0] for row in range(len(params))
        ]
        assert alone == together
        order = torch.randperm(40, generator=torch.Generator().manual_seed(2)).tolist()
        shuffled = sample(logits[order], [params[row] for row in order], [positions[row] for row in order])
        assert shuffled == [together[row] for row in order]
        for row in range(40):
            one = process_logits(logits[row : row + 1], [params[row]])[0]
            assert torch.equal(one, process_logits(logits, params)[row])

    def test_the_same_call_gives_the_same_tokens_and_leaves_its_input_alone(self) -> None:
        logits, params, positions = self.mixed()
        before = logits.clone()
        assert sample(logits, params, positions) == sample(logits, params, positions)
        assert torch.equal(logits, before)

    def test_strided_and_empty_inputs(self) -> None:
        logits, params, positions = self.mixed()
        wide = torch.cat([logits, logits], dim=1)
        assert sample(wide[:, :3_001], params, positions) == sample(logits, params, positions)
        assert sample(logits[:0], [], []) == []
        assert process_logits(logits[:0], []).shape == (0, 3_001)

    def test_seed_and_position_matter(self) -> None:
        logits = torch.zeros(1, 1000)
        tokens = {
            (seed, position): sample(logits, [SamplingParams(seed=seed)], [position])[0]
            for seed in (0, 1, 2**63, 2**64 - 1)
            for position in (0, 1, 2**32)
        }
        assert len(set(tokens.values())) > 9


class TestBadInput:
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_row_without_a_law_is_named(self, bad: float, temperature: float) -> None:
        logits = random_logits(4, 100, 1.0)
        logits[1, 17] = bad
        logits[3] = -math.inf
        params = [SamplingParams(temperature=temperature)] * 4
        for call in (lambda: sample(logits, params, [0] * 4), lambda: process_logits(logits, params)):
            with pytest.raises(NonFiniteLogitsError, match="row 1, 3") as caught:
                call()
            assert caught.value.rows == (1, 3)
        with pytest.raises(NonFiniteLogitsError) as caught:
            sample(logits, params[:3], [0] * 3, [0, 1, 2])
        assert caught.value.rows == (1,)
        assert len(sample(logits, params[:2], [0] * 2, [0, 2])) == 2, "a row that is not asked for matters"
        good = [0, 2]
        assert sample(logits[good], params[:2], [0] * 2) == sample_unpruned(logits[good], params[:2], [0] * 2)

    def test_removed_tokens_may_be_minus_infinity(self) -> None:
        logits = torch.full((50, 100), -math.inf)
        logits[:, 40:43] = 0.0
        for options in FILTERS:
            params = [replace(options, seed=row) for row in range(50)]
            assert set(sample(logits, params, [0] * 50)) <= {40, 41, 42}

    def test_extreme_finite_logits(self) -> None:
        logits = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3.1e38]])
        with np.errstate(all="raise"):
            for options in FILTERS:
                tokens = sample(logits, [replace(options, seed=1)] * 2, [0, 0])
                assert tokens[0] == 0
                assert tokens[1] in (0, 1)

    def test_shapes_are_checked(self) -> None:
        logits = torch.zeros(2, 4)
        with pytest.raises(ValueError, match="R = 3"):
            sample(logits, [SamplingParams()] * 3, [0] * 3)
        with pytest.raises(ValueError, match="1 rows but 2 parameters"):
            sample(logits, [SamplingParams()] * 2, [0, 1], [1])
        with pytest.raises(ValueError, match="1 positions"):
            sample(logits, [SamplingParams()] * 2, [0])
        with pytest.raises(ValueError, match="float32"):
            sample(logits.double(), [SamplingParams()] * 2, [0, 0])
