"""How many guesses of a verify's outcome to prepare, and with how much of a draft's time: pure functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

MISS_EXPONENT = 1.5
"""r of: F guesses of a correction miss it with probability about F^−r. On real pairs under shared noise three
guesses miss 0.17 to 0.25 of the corrections."""
MAX_ALTERNATIVES = 6
"""Most guesses at one position."""


def fan_out(acceptance: float, tail: int, budget: int) -> tuple[int, ...]:
    """Branches per position of a tail that is being verified.

    Of F_k guesses at position k a verify's outcome needs one, with probability α^k (1 − α) for a correction
    at k < tail, and α^tail for the bonus position. The fewest misses have F_k ∝ α^(k/(1+r)), and (1 −
    α)^(−1/(1+r)) times that at k = tail (Kumar, Dao, May: Speculative speculative decoding, 2026). The chain
    itself is the first guess of the bonus token, so that one branch fewer is needed there.

    Args:
        acceptance: α, in (0, 1).
        tail: tokens of the chain that are being verified.
        budget: branches in all.

    Returns:
        ``tail + 1`` numbers that add up to ``budget`` at most, each at most ``MAX_ALTERNATIVES``.
    """
    return _fan_out(round(acceptance * 64), tail, budget)


@lru_cache(maxsize=1024)
def _fan_out(acceptance_in_64ths: int, tail: int, budget: int) -> tuple[int, ...]:
    if budget <= 0:
        return (0,) * (tail + 1)
    alpha = min(max(acceptance_in_64ths, 1), 63) / 64
    exponent = 1.0 / (1.0 + MISS_EXPONENT)
    weights = [alpha ** (position * exponent) for position in range(tail + 1)]
    weights[tail] *= (1.0 - alpha) ** -exponent
    scale = (budget + 1) / sum(weights)
    wanted = [min(weight * scale, MAX_ALTERNATIVES) for weight in weights]
    wanted[tail] = max(wanted[tail] - 1.0, 0.0)
    counts = [int(number) for number in wanted]
    # What rounding down has left goes where it took most, the earlier position first.
    left = budget - sum(counts)
    for position in sorted(range(tail + 1), key=lambda place: counts[place] - wanted[place]):
        if left <= 0 or wanted[position] <= counts[position]:
            break
        counts[position] += 1
        left -= 1
    return tuple(counts)


@lru_cache(maxsize=64)
def guess_share(rank: int) -> float:
    """Probability that guess number ``rank`` (1, 2, …) of a correction is the right one."""
    return float(rank**-MISS_EXPONENT - (rank + 1) ** -MISS_EXPONENT)


def spare_tokens(step_cost: Callable[[int], float], num_tokens: int, slack: float, limit: int) -> int:
    """Tokens that a step of ``num_tokens`` takes along for at most ``slack`` times its time.

    Args:
        step_cost: seconds of a step of so many tokens, non-decreasing.
        num_tokens: computed in any case; 0 = the step would not be made.
        limit: most tokens to take along.
    """
    allowed = slack * step_cost(max(num_tokens, 1))
    low, high = 0, max(limit, 0)
    while low < high:
        middle = (low + high + 1) // 2
        if step_cost(num_tokens + middle) <= allowed:
            low = middle
        else:
            high = middle - 1
    return low
