"""The coupled rule: lossless whatever the draft, and accepting as much as the theory says."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.actors.engine.noise import IntArray
from paceline.actors.engine.parameters import SamplingParams
from paceline.actors.engine.sampling import sample
from paceline.actors.engine.verification import Verification, verify_coupled

VOCAB_SIZE = 4
DRAWS = 6_000
LENGTH = 3

TARGET = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 1.5
"""The target: a Markov chain, row = logits after that token."""
DRAFTS = {
    "equal": TARGET,
    "noised": TARGET + torch.randn(TARGET.shape, generator=torch.Generator().manual_seed(2)) * 0.8,
    "unrelated": torch.randn(TARGET.shape, generator=torch.Generator().manual_seed(3)) * 3.0,
}


def expected_acceptance_coupled(target: IntArray, draft: IntArray) -> float:
    """P(both argmaxes agree) under shared Gumbel noise: the sum over x of 1 / Σ_y max(p_y/p_x, q_y/q_x)."""
    ratios = np.maximum(target[None, :] / target[:, None], draft[None, :] / draft[:, None])
    return float((1.0 / ratios.sum(axis=1)).sum())


def draw(logits: torch.Tensor, last: list[int], seeds: list[int], positions: list[int]) -> list[int]:
    return sample(logits[last], [SamplingParams(seed=seed) for seed in seeds], positions)


def generate(draft: torch.Tensor, num_speculative_tokens: int) -> tuple[IntArray, float]:
    """Rounds of drafting and verification until each of DRAWS sequences (seed = its number, first token 0)
    has LENGTH more tokens. Returns them, ``[DRAWS, LENGTH]``, and the acceptance rate."""
    sequences = [[0] for _ in range(DRAWS)]
    drafted = accepted = 0
    while open_ones := [seed for seed in range(DRAWS) if len(sequences[seed]) <= LENGTH]:
        starts = [len(sequences[seed]) for seed in open_ones]
        last = [sequences[seed][-1] for seed in open_ones]
        chain = [last]
        for depth in range(num_speculative_tokens):
            chain.append(draw(draft, chain[-1], open_ones, [start + depth for start in starts]))
        samples = [
            draw(TARGET, tokens, open_ones, [start + depth for start in starts])
            for depth, tokens in enumerate(chain)
        ]
        for index, seed in enumerate(open_ones):
            tail = [tokens[index] for tokens in chain[1:]]
            found = verify_coupled(tail, [tokens[index] for tokens in samples])
            sequences[seed].extend(found.token_ids)
            # Depths after a mismatch say nothing of the acceptance rate.
            drafted += min(found.num_accepted + 1, len(tail))
            accepted += found.num_accepted
    tokens = np.array([sequence[1 : LENGTH + 1] for sequence in sequences])
    return tokens, accepted / drafted if drafted else math.nan


def law_z_score(tokens: IntArray) -> float:
    """Chi-square of the joint law of LENGTH tokens against enumeration, as a z score (Wilson–Hilferty)."""
    law = TARGET.double().softmax(dim=1).numpy()
    observed, expected = [], []
    for path in itertools.product(range(VOCAB_SIZE), repeat=LENGTH):
        probability, last = 1.0, 0
        for token in path:
            probability *= law[last, token]
            last = token
        expected.append(probability * len(tokens))
        observed.append(int((tokens == np.array(path)).all(axis=1).sum()))
    cells = np.array(expected)
    counts = np.array(observed)
    rare = cells < 5
    cells = np.append(cells[~rare], cells[rare].sum()) if rare.any() else cells
    counts = np.append(counts[~rare], counts[rare].sum()) if rare.any() else counts
    degrees = len(cells) - 1
    chi_square = float(((counts - cells) ** 2 / cells).sum())
    spread = 2 / (9 * degrees)
    return (math.cbrt(chi_square / degrees) - (1 - spread)) / math.sqrt(spread)


class TestRule:
    @pytest.mark.parametrize(
        ("tail", "samples", "num_accepted", "token_ids"),
        [
            ([], [5], 0, (5,)),
            ([1], [1, 2], 1, (1, 2)),
            ([1], [3, 2], 0, (3,)),
            ([1, 2, 3], [1, 2, 3, 4], 3, (1, 2, 3, 4)),
            ([1, 2, 3], [1, 9, 3, 4], 1, (1, 9)),
            ([1, 2, 3], [1, 2, 9, 4], 2, (1, 2, 9)),
            ([7, 1, 1], [1, 1, 1, 1], 0, (1,)),
            ([7, 1, 1], [1], 0, (1,)),
            ([1, 2, 3], [1, 2, 9], 2, (1, 2, 9)),
        ],
    )
    def test_keeps_the_matching_head_and_one_more(
        self, tail: list[int], samples: list[int], num_accepted: int, token_ids: tuple[int, ...]
    ) -> None:
        assert verify_coupled(tail, samples) == Verification(num_accepted, token_ids)

    def test_exhaustively_commits_a_prefix_of_the_samples(self) -> None:
        for length in range(4):
            for tail in itertools.product(range(2), repeat=length):
                for samples in itertools.product(range(2), repeat=length + 1):
                    found = verify_coupled(tail, samples)
                    assert found.token_ids == samples[: found.num_accepted + 1]
                    assert tail[: found.num_accepted] == samples[: found.num_accepted]
                    whole = found.num_accepted == length
                    assert whole or tail[found.num_accepted] != samples[found.num_accepted]

    @pytest.mark.parametrize(("tail", "samples"), [([], []), ([1], [1]), ([1], [1, 2, 3])])
    def test_counts_must_fit(self, tail: list[int], samples: list[int]) -> None:
        with pytest.raises(ValueError, match="samples"):
            verify_coupled(tail, samples)


@pytest.fixture(scope="module")
def plain() -> IntArray:
    """The tokens of decoding without any draft."""
    return generate(TARGET, 0)[0]


class TestLossless:
    def test_plain_decoding_has_the_target_law(self, plain: IntArray) -> None:
        assert abs(law_z_score(plain)) < 3

    @pytest.mark.parametrize("name", DRAFTS)
    @pytest.mark.parametrize("num_speculative_tokens", [1, 2, 4])
    def test_every_draft_gives_the_tokens_of_plain_decoding(
        self, plain: IntArray, name: str, num_speculative_tokens: int
    ) -> None:
        tokens, _ = generate(DRAFTS[name], num_speculative_tokens)
        assert np.array_equal(tokens, plain)

    def test_the_statistic_notices_draft_tokens_in_the_output(self, plain: IntArray) -> None:
        """A rule that commits the draft's token now and then has another law."""
        drafted = np.array(draw(DRAFTS["noised"], [0] * DRAWS, list(range(DRAWS)), [1] * DRAWS))
        biased = plain.copy()
        biased[::2, 0] = drafted[::2]
        assert law_z_score(biased) > 5


class TestAcceptance:
    @pytest.mark.parametrize("name", DRAFTS)
    def test_rate_is_that_of_the_gumbel_coupling(self, name: str) -> None:
        target = TARGET[0].double().softmax(0).numpy()
        draft = DRAFTS[name][0].double().softmax(0).numpy()
        draws = 20_000
        seeds, positions = list(range(draws)), [1] * draws
        ours = np.array(draw(TARGET, [0] * draws, seeds, positions))
        theirs = np.array(draw(DRAFTS[name], [0] * draws, seeds, positions))
        expected = expected_acceptance_coupled(target, draft)
        deviation = math.sqrt(max(expected * (1 - expected), 1e-12) / draws)
        assert abs((ours == theirs).mean() - expected) < 4 * deviation + 1e-9
        variation = 0.5 * np.abs(target - draft).sum()
        assert (1 - variation) / (1 + variation) - 1e-12 <= expected <= 1 - variation + 1e-12

    def test_drafts_rank_as_they_should(self) -> None:
        rates = {name: generate(logits, 2)[1] for name, logits in DRAFTS.items()}
        assert rates["equal"] == 1.0
        assert 0.5 < rates["noised"] < 1.0
        assert rates["unrelated"] < rates["noised"]

    def test_other_noise_accepts_less(self) -> None:
        """Acceptance comes from sharing the noise: equal laws with independent noise agree only Σ p²."""
        draws = 20_000
        ours = np.array(draw(TARGET, [0] * draws, list(range(draws)), [1] * draws))
        other = np.array(draw(TARGET, [0] * draws, list(range(draws)), [2] * draws))
        law = TARGET[0].double().softmax(0).numpy()
        expected = float((law**2).sum())
        assert abs((ours == other).mean() - expected) < 4 * math.sqrt(expected * (1 - expected) / draws)


def test_statistic_is_calibrated() -> None:
    """Draws straight from the law score like a standard normal."""
    rng = np.random.default_rng(5)
    law = TARGET.double().softmax(dim=1).numpy()
    scores = []
    for _ in range(20):
        columns = [np.zeros(2_000, dtype=np.int64)]
        for _ in range(LENGTH):
            cumulated = law[columns[-1]].cumsum(axis=1)
            columns.append((rng.random((2_000, 1)) > cumulated[:, :-1]).sum(axis=1))
        scores.append(law_z_score(np.stack(columns[1:], axis=1)))
    assert abs(np.mean(scores)) < 1
    assert stats.kstest(scores, "norm").pvalue > 1e-4
