"""Shared noise: a stateless function of (seed, position, token id), the same in target and draft.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3",
SC'11): a counter goes in, four 32-bit words come out, and nothing is remembered between calls. Every step
from the counter to the Gumbel value uses only operations that IEEE 754 and two's complement fix to the
last bit (integer arithmetic; + − × ÷ and exponent extraction on float64), so two machines, two batch
shapes or a CPU and a GPU cannot disagree; library logarithms, which may differ in the last bit, are not used.

Layout of one call: counter = (token id // 4, position low word, position high word, purpose), key = (seed low
word, seed high word); word ``token id % 4`` of the result belongs to the token.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Final, TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch

from paceline.actors.engine.parameters import MAX_SEED

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Words = TypeVar("Words", int, IntArray, torch.Tensor)
Integers = TypeVar("Integers", IntArray, torch.Tensor)
Floats = TypeVar("Floats", float, FloatArray, torch.Tensor)

IDS_PER_CALL: Final = 4
"""Neighbouring token ids served by one call of the generator."""

_WORD: Final = 0xFFFFFFFF
_MULTIPLIER_0: Final = 0xD2511F53
_MULTIPLIER_1: Final = 0xCD9E8D57
_KEY_STEP_0: Final = 0x9E3779B9
_KEY_STEP_1: Final = 0xBB67AE85
_ROUNDS: Final = 10


class Purpose(IntEnum):
    """What a number is drawn for. Different purposes have disjoint counters, hence independent streams."""

    TOKEN = 0
    """Gumbel noise that picks a token (target's sample and draft's candidates alike)."""
    ACCEPTANCE = 1
    """The u that a ratio rule compares with p/q."""
    RESIDUAL = 2
    """Noise that picks the corrected token from a residual law."""
    SEED = 3
    """Seeds of further choices of one request."""
    BONUS = 4
    """Picks a token from the target's own law under the ratio rules: a bonus token, or one without a tail."""
    DRAFT = 5
    """Picks a draft's token from its quantised law under the ratio rules."""
    ROUND = 6
    """Keys of the rounds of a sequence (``round_seed``)."""
    STAY = 7
    """Keys of its stays at drafts (``stay_seed``)."""
    REVISION = 8
    """Keys of the revisions of a draft's chain (``revision_seed``)."""


def philox4x32(
    c0: Words, c1: Words, c2: Words, c3: Words, k0: Words, k1: Words, ones: int = 1
) -> tuple[Words, Words, Words, Words]:
    """Philox4x32 with ten rounds.

    Args:
        c0, c1, c2, c3: the counter, words in [0, 2**32). Python integers, or int64 arrays or tensors of
            shapes that broadcast.
        k0, k1: the key, words in [0, 2**32); same kinds.
        ones: of integers that are packed words (see ``_ones``), the one that has 1 in each lane.

    Returns:
        Four words in [0, 2**32), of the broadcast shape.
    """
    # A 32x32-bit product wraps around to a negative int64, and >> then copies the sign: upper halves are
    # right only under the mask. Masks are put off until a word is multiplied or returned, since xor keeps
    # the two halves of a number apart. Packed words stay in their lanes: products and sums are below 2**64,
    # and what >> brings in from the next lane is above the mask.
    mask = ones * _WORD
    for number in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0 = ((product_1 >> 32) ^ c1 ^ (k0 + ones * (number * _KEY_STEP_0))) & mask
        c2 = ((product_0 >> 32) ^ c3 ^ (k1 + ones * (number * _KEY_STEP_1))) & mask
        c1 = product_1
        c3 = product_0
    return c0, c1 & mask, c2, c3 & mask


_FEW: Final = 12
"""Up to so many numbers Python's own floats are faster than numpy's operations."""
_FEW_CALLS: Final = 128
"""Up to so many calls one operation on a long integer is faster than one of numpy, which costs most of a
microsecond however little it does."""


@cache
def _ones(num_lanes: int) -> int:
    """1 in each lane of an integer that holds so many words, 64 bits for each: one operation on it is one on
    all of them (Lamport: "Multiple byte processing with full-word instructions", 1975)."""
    return _packed(array("Q", (1,) * num_lanes))


def _packed(words: array[int] | IntArray) -> int:
    return int.from_bytes(words.tobytes(), sys.byteorder)


def _unpacked(number: int, num_lanes: int) -> bytes:
    return number.to_bytes(8 * num_lanes, sys.byteorder)


def _words_of_few(
    seeds: IntArray, positions: IntArray, blocks: IntArray, purpose: Purpose
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """``words_of_blocks`` of arrays of one shape, with long integers."""
    count, shape = blocks.size, blocks.shape
    ones = _ones(count)
    words = philox4x32(
        _packed(blocks),
        _packed(positions & _WORD),
        _packed((positions >> 32) & _WORD),
        ones * purpose,
        _packed(seeds & _WORD),
        _packed((seeds >> 32) & _WORD),
        ones,
    )
    w0, w1, w2, w3 = (np.frombuffer(_unpacked(word, count), np.int64).reshape(shape) for word in words)
    return w0, w1, w2, w3


def words_of_blocks(
    seeds: Integers, positions: Integers, blocks: Integers, purpose: Purpose = Purpose.TOKEN
) -> tuple[Integers, Integers, Integers, Integers]:
    """Random words of the token ids 4·block … 4·block + 3.

    Args:
        seeds: int64, the bits of the unsigned 64-bit seeds.
        positions: int64, absolute positions of the tokens being drawn.
        blocks: int64, token id // 4. The three shapes broadcast.

    Returns:
        Four int64 words in [0, 2**32), one per id of the block, each of the broadcast shape.
    """
    if isinstance(blocks, np.ndarray) and 0 < np.broadcast(seeds, positions, blocks).size <= _FEW_CALLS:
        seeds, positions, blocks = np.broadcast_arrays(seeds, positions, blocks)
        return _words_of_few(seeds, positions, blocks, purpose)
    return philox4x32(
        blocks,
        positions & _WORD,
        (positions >> 32) & _WORD,
        (positions & 0) + int(purpose),
        seeds & _WORD,
        (seeds >> 32) & _WORD,
    )


def random_bits(
    seeds: Integers, positions: Integers, token_ids: Integers, purpose: Purpose = Purpose.TOKEN
) -> Integers:
    """The random word of each token id: ``words_of_blocks`` without the sharing, for scattered ids.

    Args:
        seeds, positions, token_ids: int64, of shapes that broadcast.

    Returns:
        int64 in [0, 2**32), of the broadcast shape.
    """
    w0, w1, w2, w3 = words_of_blocks(seeds, positions, token_ids >> 2, purpose)
    low = -(token_ids & 1)
    high = -((token_ids >> 1) & 1)
    even = w0 ^ ((w0 ^ w1) & low)
    odd = w2 ^ ((w2 ^ w3) & low)
    return even ^ ((even ^ odd) & high)


def bits_of_tokens(seed: int, position: int, token_ids: Sequence[int]) -> list[int]:
    """``random_bits`` of some tokens at one position, by Python's own integers."""
    count = len(token_ids)
    ones = _ones(count)
    words = philox4x32(
        _packed(array("Q", [token_id >> 2 for token_id in token_ids])),
        ones * (position & _WORD),
        ones * (position >> 32 & _WORD),
        ones * Purpose.TOKEN,
        ones * (seed & _WORD),
        ones * (seed >> 32 & _WORD),
        ones,
    )
    lanes = [memoryview(_unpacked(word, count)).cast("Q") for word in words]
    return [lanes[token_id & 3][index] for index, token_id in enumerate(token_ids)]


# log m = 2 artanh(s), s = (m − 1)/(m + 1), as a series in s². With m in [√½, √2), s² < 0.0295 and what is
# left out is below 1e-18 of the sum.
_ARTANH: Final = tuple(2.0 / (2 * power + 1) for power in range(11, 0, -1))
_SQRT_HALF: Final = 0.7071067811865476
_LN2_HIGH: Final = float.fromhex("0x1.62e42fee00000p-1")
"""Upper bits of log 2: its product with an exponent is exact."""
_LN2_LOW: Final = float.fromhex("0x1.a39ef35793c76p-33")


def _log_array(x: FloatArray) -> FloatArray:
    mantissa, exponent = np.frexp(x)
    small = (mantissa < _SQRT_HALF).astype(np.float64)
    return _log_of_parts(mantissa + mantissa * small, exponent.astype(np.float64) - small)


def _log_number(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    if mantissa < _SQRT_HALF:
        mantissa, exponent = mantissa + mantissa, exponent - 1
    return _log_of_parts(mantissa, float(exponent))


def _log_tensor(x: torch.Tensor) -> torch.Tensor:
    parts = torch.frexp(x)
    small = (parts.mantissa < _SQRT_HALF).to(torch.float64)
    return _log_of_parts(parts.mantissa + parts.mantissa * small, parts.exponent.to(torch.float64) - small)


def _log_of_parts(mantissa: Floats, exponent: Floats) -> Floats:
    """log(mantissa · 2**exponent), mantissa in [√½, √2). For exponent 0, mantissa − 1 is exact, so
    arguments next to 1 keep all their precision: this is log1p there."""
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = z * _ARTANH[0]
    for coefficient in _ARTANH[1:]:
        series = (series + coefficient) * z
    return exponent * _LN2_HIGH + (s * 2.0 + (s * series + exponent * _LN2_LOW))


def gumbel_of_number(bits: int) -> float:
    """``gumbel_of_bits`` of one number."""
    return -_log_number(-_log_number((bits + 0.5) * 2.0**-32))


@overload
def gumbel_of_bits(bits: IntArray) -> FloatArray: ...
@overload
def gumbel_of_bits(bits: torch.Tensor) -> torch.Tensor: ...
def gumbel_of_bits(bits: IntArray | torch.Tensor) -> FloatArray | torch.Tensor:
    """Standard Gumbel values −log(−log u) of u = (bits + ½) / 2**32, which reaches neither 0 nor 1.

    Args:
        bits: int64 in [0, 2**32), any shape.

    Returns:
        float64 of the same shape and kind, in [MIN_GUMBEL, MAX_GUMBEL], non-decreasing in ``bits``.
    """
    # u has 33 significant bits: it and 1 − u are exact in float64, so −log u is precise at both ends.
    if isinstance(bits, torch.Tensor):
        return -_log_tensor(-_log_tensor((bits.to(torch.float64) + 0.5) * 2.0**-32))
    if bits.size <= _FEW:
        numbers = [gumbel_of_number(word) for word in bits.reshape(-1).tolist()]
        return np.array(numbers, dtype=np.float64).reshape(bits.shape)
    return -_log_array(-_log_array((bits.astype(np.float64) + 0.5) * 2.0**-32))


MAX_GUMBEL: Final = float(gumbel_of_bits(np.array([_WORD], dtype=np.int64))[0])
"""No Gumbel value is above this one (33 log 2, about 22.87): a token further behind cannot win."""
MIN_GUMBEL: Final = float(gumbel_of_bits(np.array([0], dtype=np.int64))[0])


def gumbel(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    purpose: Purpose = Purpose.TOKEN,
) -> torch.Tensor:
    """Gumbel noise of each row's tokens.

    Args:
        seeds: int64 ``[R]``, the bits of the unsigned 64-bit seeds (see ``seed_bits``).
        positions: int64 ``[R]``, absolute position of the token that each row draws.
        token_ids: int64 ``[R, K]``, or ``[K]`` for the same ids in every row.

    Returns:
        float64 ``[R, K]`` on the device of ``token_ids``; bit-identical on all devices.
    """
    device = token_ids.device
    row_seeds, row_positions = seeds.to(device)[:, None], positions.to(device)[:, None]
    if device.type == "cpu":  # the same operations at a third of the cost per call
        bits = random_bits(row_seeds.numpy(), row_positions.numpy(), token_ids.numpy(), purpose)
        return torch.from_numpy(gumbel_of_bits(bits))
    return gumbel_of_bits(random_bits(row_seeds, row_positions, token_ids, purpose))


def seed_bits(seed: int) -> int:
    """An unsigned 64-bit seed as the int64 of the same bits, the form that tensors hold."""
    return seed - 2**64 if seed >= 2**63 else seed


def derive_seed(seed: int, index: int) -> int:
    """The seed of choice ``index`` of a request with several; choice 0 has the request's own.

    Args:
        seed: unsigned 64-bit.
        index: 0, 1, …

    Returns:
        An unsigned 64-bit seed.
    """
    if not 0 <= seed <= MAX_SEED or not 0 <= index <= MAX_SEED:
        raise ValueError(f"seed and index must be unsigned 64-bit integers, got {seed} and {index}")
    if index == 0:
        return seed
    low, high, _, _ = philox4x32(index & _WORD, index >> 32, 0, int(Purpose.SEED), seed & _WORD, seed >> 32)
    return high << 32 | low


# ---------------------------------------------------------------- streams of the ratio rules


def round_seed(seed: int, epoch: int, base_position: int) -> int:
    """The key of everything that a target draws in one round of the standard and block rules.

    Under these rules what is committed is not a function of (seed, position): whether a round stops at
    some position depends, under block verification, on the uniforms of later positions too. A number of one
    round that was used again in a later one, for the same position, would be a number that the history was
    selected by, and the output would be biased. So no number is used twice: a round is named by the epoch
    and by the number of tokens that were committed before it. Every round commits at least one token, so
    that length differs between all rounds of a placement (preemption changes neither); a placement that is
    resumed elsewhere, and may draw a position again whose token was lost, has another epoch. Within a round
    ACCEPTANCE, RESIDUAL and BONUS are disjoint.

    Args:
        seed: of the sequence, unsigned 64-bit.
        epoch: of its placement.
        base_position: tokens committed when the round began.

    Returns:
        An unsigned 64-bit key.
    """
    return _branch(seed, Purpose.ROUND, epoch, base_position)


def stay_seed(seed: int, epoch: int, stay: int) -> int:
    """The key of what a draft draws while it holds a sequence, under the standard and block rules.

    Tokens that two stays propose for one position must be independent, given what is committed: the first
    proposal has taken part in a verdict that the second one's history depends on. Hence a key for each stay,
    ``stay`` being the number of stays at any draft before it in this epoch.

    Returns:
        An unsigned 64-bit key.
    """
    return _branch(seed, Purpose.STAY, epoch, stay)


def revision_seed(draft_seed: int, revision: int) -> int:
    """The key of one revision of a draft's chain. A draft that discards part of its chain draws those
    positions again, after a verdict that depended on what stood there; within a revision it draws each
    position once.

    Returns:
        An unsigned 64-bit key.
    """
    return _branch(draft_seed, Purpose.REVISION, revision, 0)


def _branch(seed: int, purpose: Purpose, first: int, second: int) -> int:
    low, high, _, _ = philox4x32(
        first & _WORD, second & _WORD, second >> 32 & _WORD, int(purpose), seed & _WORD, seed >> 32
    )
    return high << 32 | low


def random_integer(seed: int, position: int, purpose: Purpose) -> int:
    """A uniform integer in [0, 2**64), one for each (seed, position, purpose)."""
    low, high, _, _ = philox4x32(
        0, position & _WORD, position >> 32 & _WORD, int(purpose), seed & _WORD, seed >> 32
    )
    return high << 32 | low


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """A uniform number in (0, 1), with 52 random bits; it reaches neither end."""
    return ((random_integer(seed, position, purpose) >> 12) + 0.5) * 2.0**-52
