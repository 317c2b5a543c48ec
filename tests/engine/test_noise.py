"""The noise: bit-exact against the published generator, and random enough to sample with."""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.actors.engine.noise import (
    MAX_GUMBEL,
    MIN_GUMBEL,
    Purpose,
    bits_of_tokens,
    derive_seed,
    gumbel,
    gumbel_of_bits,
    philox4x32,
    random_bits,
    seed_bits,
    words_of_blocks,
)

WORD = 2**32 - 1
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD, WORD, WORD, WORD), (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""Counter, key and answer of the Random123 distribution's known-answer file (philox4x32, 10 rounds)."""

LOWEST_P_VALUE = 1e-5
"""Seeds are fixed, so nothing is flaky: a p-value below this one means a defect."""


def reference(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 as the paper writes it, on unbounded integers."""
    (a, b, c, d), (low, high) = counter, key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (
            (right // 2**32) ^ b ^ low,
            right % 2**32,
            (left // 2**32) ^ d ^ high,
            left % 2**32,
        )
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return a, b, c, d


def bits_of(seed: int, position: int, token_id: int, purpose: Purpose = Purpose.TOKEN) -> int:
    counter = (token_id // 4, position % 2**32, position // 2**32, int(purpose))
    return reference(counter, (seed % 2**32, seed // 2**32))[token_id % 4]


def int64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def uniforms(seeds: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    return (random_bits(seeds, positions, token_ids).reshape(-1) + 0.5) / 2.0**32


def uniformity_p_value(u: np.ndarray, cells: int = 256) -> float:
    counts = np.bincount((u * cells).astype(np.int64), minlength=cells)
    return float(stats.chisquare(counts).pvalue)


def independence_p_value(u: np.ndarray, v: np.ndarray, cells: int = 16) -> float:
    """Chi-square of the joint law of two uniforms against the uniform law on the square."""
    cell = (u * cells).astype(np.int64) * cells + (v * cells).astype(np.int64)
    return float(stats.chisquare(np.bincount(cell, minlength=cells * cells)).pvalue)


class TestGenerator:
    @pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
    def test_known_answers_in_each_arithmetic(
        self, counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
    ) -> None:
        assert reference(counter, key) == answer
        assert philox4x32(*counter, *key) == answer
        arrays = philox4x32(*(int64(word) for word in counter + key))
        assert tuple(int(word[0]) for word in arrays) == answer
        tensors = philox4x32(*(torch.tensor([word]) for word in counter + key))
        assert tuple(int(word[0]) for word in tensors) == answer
        # Packed: between the words of two others, whose products must not reach over.
        lanes = [(2**32 - 1) << 128 | word << 64 | 2**32 - 1 for word in counter + key]
        packed = philox4x32(*lanes, 1 << 128 | 1 << 64 | 1)
        assert tuple(word >> 64 & 2**64 - 1 for word in packed) == answer

    def test_arrays_and_tensors_equal_unbounded_integers(self) -> None:
        rng = np.random.default_rng(7)
        words = rng.integers(0, 2**32, (6, 500), dtype=np.int64)
        expected = np.array([reference(tuple(column[:4]), tuple(column[4:])) for column in words.T.tolist()])
        assert np.array_equal(np.stack(philox4x32(*words), axis=1), expected)
        tensors = philox4x32(*torch.from_numpy(words))
        assert np.array_equal(torch.stack(tensors, dim=1).numpy(), expected)

    def test_the_layout_of_the_counter_is_fixed(self) -> None:
        """Target and draft may run different versions: the layout is part of the protocol."""
        for seed in (0, 1, 2**63 - 1, 2**63, 2**64 - 1):
            for position in (0, 5, 2**32 - 1, 2**32, 2**40 + 3):
                for token_id in (0, 1, 2, 3, 4, 151_935, 262_143):
                    for purpose in Purpose:
                        found = random_bits(int64(seed_bits(seed)), int64(position), int64(token_id), purpose)
                        assert int(found[0]) == bits_of(seed, position, token_id, purpose)

    def test_blocks_and_scattered_ids_agree(self) -> None:
        seeds, positions = int64(3, -4)[:, None], int64(10, 2**33)[:, None]
        words = words_of_blocks(seeds, positions, np.arange(50))
        by_block = np.stack(words, axis=-1).reshape(2, 200)
        assert np.array_equal(by_block, random_bits(seeds, positions, np.arange(200)))

    def test_few_calls_equal_many(self) -> None:
        """Python's own integers and floats do the first, numpy the second."""
        rng = np.random.default_rng(4)
        seeds, positions, ids = rng.integers(0, 2**31, (3, 4096)) << np.array([[33], [8], [0]])
        bits = random_bits(seeds, positions, ids)
        noise = gumbel_of_bits(bits)
        for start in range(0, 4096, 5):
            few = slice(start, start + 5)
            some = random_bits(seeds[few], positions[few], ids[few])
            assert (some == bits[few]).all()
            assert (gumbel_of_bits(some).view(np.int64) == noise[few].view(np.int64)).all()

    @pytest.mark.parametrize("count", [1, 2, 31, 127, 128, 129])
    def test_up_to_the_last_few_calls_equal_many(self, count: int) -> None:
        rng = np.random.default_rng(count)
        seeds, positions = rng.integers(-(2**63), 2**63, 300), rng.integers(0, 2**62, 300)
        ids = rng.integers(0, 2**24, 300)
        some = random_bits(seeds[:count], positions[:count], ids[:count])
        assert (some == random_bits(seeds, positions, ids)[:count]).all()

    def test_numbers_of_one_position_equal_arrays(self) -> None:
        ids = np.random.default_rng(5).integers(0, 2**24, 200)
        for seed in (0, 1, 2**63 - 1, 2**63, 2**64 - 1):
            for position in (0, 2**32 - 1, 2**32, 2**40 + 3):
                expected = random_bits(int64(seed_bits(seed)), int64(position), ids).tolist()
                for count in (0, 1, 2, 9, 200):
                    assert bits_of_tokens(seed, position, ids[:count].tolist()) == expected[:count]
                    assert bits_of_tokens(seed_bits(seed), position, ids[:count].tolist()) == expected[:count]

    def test_few_calls_have_the_shape_of_many(self) -> None:
        seeds, positions = np.array([[5], [-6]]), np.array([[7], [8]])
        few = words_of_blocks(seeds, positions, np.arange(3)[None])
        many = words_of_blocks(seeds, positions, np.arange(300)[None])
        for some, more in zip(few, many, strict=True):
            assert (some == more[:, :3]).all()

    def test_purposes_do_not_share_words(self) -> None:
        ids = np.arange(1000)
        streams = [set(random_bits(int64(1), int64(2), ids, purpose).tolist()) for purpose in Purpose]
        assert len(set.union(*streams)) == sum(len(stream) for stream in streams)


class TestGumbel:
    def test_values_are_right_at_both_ends_and_between(self) -> None:
        bits = np.concatenate(
            [int64(0, 1, 2, WORD - 2, WORD - 1, WORD), np.arange(0, 2**32, 40_000_003)]
        ).astype(np.int64)
        values = gumbel_of_bits(bits)
        with localcontext() as context:
            context.prec = 40
            for word, value in zip(bits.tolist(), values.tolist(), strict=True):
                u = (Decimal(word) + Decimal("0.5")) / Decimal(2**32)
                exact = -(-(u.ln())).ln()
                assert abs(Decimal(value) - exact) < Decimal("4e-16") * max(Decimal(1), abs(exact))

    def test_values_rise_with_the_bits_up_to_the_stated_ends(self) -> None:
        near_one = gumbel_of_bits(np.arange(2**32 - 4096, 2**32))
        assert (np.diff(near_one) > 0).all(), "large values lose precision"
        assert near_one[-1] == MAX_GUMBEL == pytest.approx(33 * np.log(2), abs=1e-6)
        near_zero = gumbel_of_bits(np.arange(4096))
        assert (np.diff(near_zero) > 0).all()
        assert near_zero[0] == MIN_GUMBEL == pytest.approx(-np.log(33 * np.log(2)))

    def test_arrays_and_tensors_are_bit_identical(self) -> None:
        bits = np.random.default_rng(1).integers(0, 2**32, 20_000)
        assert np.array_equal(gumbel_of_bits(bits), gumbel_of_bits(torch.from_numpy(bits)).numpy())

    def test_a_value_depends_on_its_own_row_and_id_only(self) -> None:
        seeds = torch.tensor([5, 6, -7, 8])
        positions = torch.tensor([0, 1, 100, 2**35])
        ids = torch.arange(1003)
        whole = gumbel(seeds, positions, ids)
        assert whole.shape == (4, 1003)
        assert whole.dtype == torch.float64
        assert torch.equal(whole, gumbel(seeds, positions, ids)), "not a pure function"
        for row in range(4):
            alone = gumbel(seeds[row : row + 1], positions[row : row + 1], ids)
            assert torch.equal(alone[0], whole[row])
        own_ids = torch.randperm(1003, generator=torch.Generator().manual_seed(0))[:12].view(4, 3)
        assert torch.equal(gumbel(seeds, positions, own_ids), whole.gather(1, own_ids))

    def test_purpose_changes_the_values(self) -> None:
        arguments = torch.tensor([5]), torch.tensor([6]), torch.arange(8)
        assert not torch.equal(gumbel(*arguments), gumbel(*arguments, purpose=Purpose.RESIDUAL))

    def test_the_law_is_gumbel(self) -> None:
        values = gumbel(torch.tensor([11]), torch.tensor([3]), torch.arange(200_000))[0].numpy()
        assert stats.kstest(values, stats.gumbel_r.cdf).pvalue > LOWEST_P_VALUE

    def test_argmax_reproduces_a_softmax_law(self) -> None:
        logits = torch.tensor([2.0, 0.5, 0.0, -1.0, 1.9, -3.0, 0.2], dtype=torch.float64)
        draws = 60_000
        for seeds, positions in (
            (torch.arange(draws), torch.zeros(draws, dtype=torch.int64)),
            (torch.full((draws,), 99), torch.arange(draws)),
        ):
            winners = (logits + gumbel(seeds, positions, torch.arange(7))).argmax(dim=1)
            counts = torch.bincount(winners, minlength=7).numpy()
            expected = torch.softmax(logits, dim=0).numpy() * draws
            assert stats.chisquare(counts, expected).pvalue > LOWEST_P_VALUE


class TestQuality:
    LENGTH = 400_000

    def test_uniform_along_ids_positions_and_seeds(self) -> None:
        line = np.arange(self.LENGTH)
        for u in (
            uniforms(int64(0), int64(0), line),
            uniforms(int64(0), line, int64(0)),
            uniforms(line, int64(0), int64(0)),
            uniforms(line << 40, int64(1), int64(2)),
        ):
            assert uniformity_p_value(u) > LOWEST_P_VALUE
            assert uniformity_p_value((u * 2**24) % 1.0) > LOWEST_P_VALUE, "low bits"

    @pytest.mark.parametrize("shift", [1, 2, 3, 4, 5, 8, 1024])
    def test_neighbours_are_independent(self, shift: int) -> None:
        line = np.arange(self.LENGTH)
        base = int64(17)
        pairs = {
            "ids": (uniforms(base, base, line), uniforms(base, base, line + shift)),
            "positions": (uniforms(base, line, base), uniforms(base, line + shift, base)),
            "seeds": (uniforms(line, base, base), uniforms(line + shift, base, base)),
            "seed for position": (uniforms(base, line, base), uniforms(base + shift, line, base)),
            "position for id": (uniforms(base, base, line), uniforms(base, base + shift, line)),
            "next position, next id": (uniforms(base, line, line), uniforms(base, line + 1, line + shift)),
        }
        for name, (u, v) in pairs.items():
            assert independence_p_value(u, v) > LOWEST_P_VALUE, name
            correlation = np.corrcoef(u, v)[0, 1] * np.sqrt(self.LENGTH)
            assert abs(correlation) < 4.5, name

    def test_the_checks_notice_a_weak_hash(self) -> None:
        """A linear congruence is uniform along a line, yet its neighbours are anything but independent."""
        line = np.arange(self.LENGTH)
        weak = ((line * 2654435761) % 2**32 + 0.5) / 2.0**32
        assert independence_p_value(weak[:-1], weak[1:]) < 1e-100

    def test_no_two_arguments_share_a_stream(self) -> None:
        seeds, positions, blocks = np.meshgrid(np.arange(40), np.arange(40), np.arange(40), indexing="ij")
        words = words_of_blocks(seeds, positions, blocks)
        assert len(np.unique((words[0] << 31) ^ words[1])) == 40**3


class TestSeeds:
    def test_choice_0_has_the_seed_itself(self) -> None:
        for seed in (0, 1, 2**64 - 1):
            assert derive_seed(seed, 0) == seed

    def test_choices_of_neighbouring_seeds_differ(self) -> None:
        derived = {derive_seed(seed, index) for seed in range(300) for index in range(100)}
        assert len(derived) == 300 * 100
        assert all(0 <= seed < 2**64 for seed in derived)

    def test_derived_seeds_are_uniform(self) -> None:
        seeds = np.array([derive_seed(42, index) for index in range(1, 20_001)], dtype=np.uint64)
        for shift in (0, 24, 32, 56):
            counts = np.bincount(((seeds >> np.uint64(shift)) & np.uint64(255)).astype(np.int64))
            assert stats.chisquare(counts).pvalue > LOWEST_P_VALUE

    @pytest.mark.parametrize(("seed", "index"), [(-1, 0), (2**64, 0), (0, -1)])
    def test_out_of_range_is_refused(self, seed: int, index: int) -> None:
        with pytest.raises(ValueError, match="unsigned 64-bit"):
            derive_seed(seed, index)

    def test_seed_bits_keep_all_64_bits(self) -> None:
        for seed in (0, 1, 2**63 - 1, 2**63, 2**64 - 1):
            assert seed_bits(seed) % 2**64 == seed
            assert -(2**63) <= seed_bits(seed) < 2**63
