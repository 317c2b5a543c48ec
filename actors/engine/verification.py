"""Verification of a tail, as pure functions.

Three rules, all exact. *Coupled* compares the tail with the target's own samples. The two *ratio rules* weigh
each tail token by p/q, where p is the target's law at its position and q the law that the draft drew it from:

* standard, token by token: Leviathan, Kalman, Matias, "Fast inference from transformers via speculative
  decoding", ICML 2023, §2.3 and appendix A; Chen et al., "Accelerating large language model decoding with
  speculative sampling", 2023, algorithm 2;
* block, the tail as a whole, which accepts at least as much: Sun et al., "Block verification accelerates
  speculative decoding", ICLR 2025 (2024), algorithm 2.

Notation: a tail x_1 … x_k; ``target[i]`` = the target's law of the token after x_1 … x_i, so that x_i is
judged by ``target[i − 1]``; ``draft[i − 1]`` = the law that x_i was drawn from. A token that was certain (a
lookup's, a greedy draft's) has the law that holds nothing else: it is accepted with its probability under the
target, and otherwise cannot be what replaces it.

What the ratio rules ask of their caller, beside p and q after all processors:

* x_i was drawn from ``draft[i − 1]``, with randomness that nothing else has used or will use;
* the uniforms given here are independent of the tail and of all that is committed;
* how much of a chain is verified depends on the past only. It may be cut after x_i because of x_1 … x_i, but
  neither because of a later token nor because of its law;
* of a chain, what follows the tail may be kept where the bonus token equals the chain's next. After a
  rejection it dies by itself: a residual law has no mass at the token that was rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.actors.engine.draft_law import SparseLaw
from paceline.actors.engine.messages import TokenLogprobs
from paceline.actors.engine.noise import FloatArray
from paceline.actors.engine.parameters import VerificationRule


@dataclass(frozen=True, slots=True)
class Verification:
    """What one step commits for one sequence."""

    num_accepted: int
    """Tail tokens that were kept; the corrected or bonus token is not one of them."""
    token_ids: tuple[int, ...]
    """The accepted tokens, then the corrected token (or the bonus token, if the whole tail was accepted)."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token where the sequence asked for them, else none."""


def verify_coupled(tail: Sequence[int], samples: Sequence[int]) -> Verification:
    """The shared-noise rule: keep draft tokens for as long as each equals the target's own sample.

    Target and draft add the same Gumbel noise, a function of (seed, position, token id), to their own log
    probabilities and take the argmax; where their laws are close, so are the argmaxes (Gumbel-max coupling;
    Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant speculative decoding",
    2024). What is committed is always the target's sample, so the output is exactly the target's whatever
    the tail holds and wherever it came from; the tail decides only how much of it one step yields.

    Args:
        tail: k >= 0 draft tokens, at positions t … t + k − 1.
        samples: up to k + 1 tokens, the target's own samples at positions t, t + 1, … Sample i is drawn from
            the law that follows the tail's first i tokens, hence is the target's only while those were
            accepted; none behind the first that differs from the tail is looked at, or needed.

    Returns:
        Between 1 and k + 1 tokens to commit.

    Raises:
        ValueError: if all samples agree with the tail and there is not one more of them than tail tokens, or
            if there are even more.
    """
    num_accepted = 0
    while num_accepted < min(len(tail), len(samples)) and tail[num_accepted] == samples[num_accepted]:
        num_accepted += 1
    if not num_accepted < len(samples) <= len(tail) + 1:
        raise ValueError(
            f"a tail of {len(tail)} needs {len(tail) + 1} samples, or those up to one that differs, got "
            f"{len(samples)}"
        )
    return Verification(num_accepted, tuple(samples[: num_accepted + 1]))


# ---------------------------------------------------------------- ratio rules


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a ratio rule makes of a tail of k tokens, before any uniform is drawn."""

    acceptance: tuple[float, ...]
    """k probabilities h_1 … h_k. Standard: that x_i is kept, given that all before it were. Block: that the
    tail is kept at least as far as x_i, given that it ends nowhere behind it."""
    scales: tuple[float, ...]
    """k + 1 factors: the token after x_1 … x_i has, where x_{i+1} is not kept, the law
    norm((scales[i] · target[i] − draft[i])+). All 1 under standard."""


def judge_standard(
    tail: Sequence[int], target: Sequence[FloatArray], draft: Sequence[SparseLaw]
) -> Judgement:
    """h_i = min(1, p_i(x_i) / q_i(x_i)).

    Args:
        tail: k >= 0 tokens.
        target: at least k laws, each ``[V]`` of sum 1.
        draft: k laws, each with its token in it.
    """
    return Judgement(
        tuple(
            min(1.0, float(law[token_id]) / q.probability(token_id))
            for token_id, law, q in zip(tail, target, draft, strict=False)
        ),
        (1.0,) * (len(tail) + 1),
    )


def judge_block(tail: Sequence[int], target: Sequence[FloatArray], draft: Sequence[SparseLaw]) -> Judgement:
    """With P_0 = 1 and P_i = min(1, P_{i−1} · p_i(x_i) / q_i(x_i)), the scales:
    h_i = R / (R + 1 − P_i), R = Σ_x (P_i · p_{i+1}(x) − q_{i+1}(x))+, and h_k = P_k. So x_1 … x_i are kept
    with probability P_i, on average over what follows them.

    Args: as of ``judge_standard``.
    """
    scales = [1.0]
    for token_id, law, q in zip(tail, target, draft, strict=False):
        scales.append(min(1.0, scales[-1] * float(law[token_id]) / q.probability(token_id)))
    acceptance: list[float] = []
    for number in range(1, len(tail)):
        scale = scales[number]
        if scale in (0.0, 1.0):
            acceptance.append(scale)
            continue
        # The same sum that the corrected token would be drawn from: where it is 0 the tail cannot end.
        left = float(residual(target[number], scale, draft[number]).sum())
        acceptance.append(left / (left + 1.0 - scale))
    if tail:
        acceptance.append(scales[-1])
    return Judgement(tuple(acceptance), tuple(scales))


def num_accepted_standard(acceptance: Sequence[float], uniforms: Sequence[float]) -> int:
    """Tokens kept: those before the first whose uniform in (0, 1) is not below its probability."""
    for index, (probability, uniform) in enumerate(zip(acceptance, uniforms, strict=True)):
        if uniform >= probability:
            return index
    return len(acceptance)


def num_accepted_block(acceptance: Sequence[float], uniforms: Sequence[float]) -> int:
    """Tokens kept: all up to the last whose uniform in (0, 1) is below its probability, whatever became of
    those before it."""
    for index in reversed(range(len(acceptance))):
        if uniforms[index] < acceptance[index]:
            return index + 1
    return 0


def residual(law: FloatArray, scale: float, q: SparseLaw) -> FloatArray:
    """Weights ``[V]`` of the corrected token: (scale · law − q)+, not normalised. ``law`` is not changed."""
    weights = scale * law
    weights[q.token_ids] = np.maximum(weights[q.token_ids] - q.probabilities, 0.0)
    return weights


def pick(weights: FloatArray, uniform: float) -> int:
    """The token that ``uniform`` in (0, 1) picks from ``weights`` [V] >= 0, of any positive sum."""
    up_to = np.cumsum(weights)
    # The first token whose running sum is above: it has a positive weight itself.
    return int(np.searchsorted(up_to, uniform * up_to[-1], side="right"))


def verify_ratio(
    rule: VerificationRule,
    tail: Sequence[int],
    target: Sequence[FloatArray],
    draft: Sequence[SparseLaw],
    uniforms: Sequence[float],
    residual_uniform: float,
    bonus_uniform: float,
) -> Verification:
    """The standard or the block rule, given all that is random. See the module for what it asks.

    Args:
        tail: k >= 0 draft tokens.
        target: k + 1 laws, each ``[V]`` of sum 1.
        draft: k laws.
        uniforms: k numbers in (0, 1), one for each tail token.
        residual_uniform: picks the corrected token.
        bonus_uniform: picks the bonus token.

    Returns:
        Between 1 and k + 1 tokens to commit.

    Raises:
        ValueError: if the numbers of laws or uniforms do not fit the tail, or the rule is coupled.
    """
    length = len(tail)
    if (len(target), len(draft), len(uniforms)) != (length + 1, length, length):
        raise ValueError(
            f"a tail of {length} needs {length + 1} target laws, {length} draft laws and {length} uniforms, "
            f"got {len(target)}, {len(draft)} and {len(uniforms)}"
        )
    if rule is VerificationRule.STANDARD:
        judgement = judge_standard(tail, target, draft)
        kept = num_accepted_standard(judgement.acceptance, uniforms)
    elif rule is VerificationRule.BLOCK:
        judgement = judge_block(tail, target, draft)
        kept = num_accepted_block(judgement.acceptance, uniforms)
    else:
        raise ValueError(f"{rule.value} is not a ratio rule")
    if kept == length:
        last = pick(target[kept], bonus_uniform)
    else:
        weights = residual(target[kept], judgement.scales[kept], draft[kept])
        # Where p and q agree to the last bit there is no residual, and rejection was a rounding error.
        last = pick(weights if weights.any() else target[kept], residual_uniform)
    return Verification(kept, (*tail[:kept], last))
