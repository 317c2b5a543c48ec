"""Verification of a tail, as pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verification:
    """What one step commits for one sequence."""

    num_accepted: int
    """Tail tokens that were kept; the corrected or bonus token is not one of them."""
    token_ids: tuple[int, ...]
    """The accepted tokens, then the corrected token (or the bonus token, if the whole tail was accepted)."""


def verify_coupled(tail: Sequence[int], samples: Sequence[int]) -> Verification:
    """The shared-noise rule: keep draft tokens for as long as each equals the target's own sample.

    Target and draft add the same Gumbel noise, a function of (seed, position, token id), to their own log
    probabilities and take the argmax; where their laws are close, so are the argmaxes (Gumbel-max coupling;
    Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant speculative decoding",
    2024). What is committed is always the target's sample, so the output is exactly the target's whatever
    the tail holds and wherever it came from; the tail decides only how much of it one step yields.

    Args:
        tail: k >= 0 draft tokens, at positions t … t + k − 1.
        samples: k + 1 tokens, the target's own samples at positions t … t + k. Sample i is drawn from the law
            that follows the tail's first i tokens, hence is the target's only while those were accepted;
            later ones are not looked at.

    Returns:
        Between 1 and k + 1 tokens to commit.

    Raises:
        ValueError: if there is not one sample more than tail tokens.
    """
    if len(samples) != len(tail) + 1:
        raise ValueError(f"a tail of {len(tail)} needs {len(tail) + 1} samples, got {len(samples)}")
    num_accepted = 0
    while num_accepted < len(tail) and tail[num_accepted] == samples[num_accepted]:
        num_accepted += 1
    return Verification(num_accepted, tuple(samples[: num_accepted + 1]))
