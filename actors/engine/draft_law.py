"""The law that a draft draws from under the standard and block rules: sparse, of small integers.

These rules need q, the law that a draft token was drawn from, on the target's side. So it is made small
*before* the draft draws: the most likely tokens of the draft's processed law, with integer weights. The draft
draws from exactly that law, with integer arithmetic, and sends it; nothing is approximated after the draw.
What is left out only lowers acceptance.

Size: at most MAX_LAW_ENTRIES entries of an id and a weight, each at most 3 bytes as a varint for vocabularies
up to 2**21 ids: at most 393 bytes per draft token, lengths and tags included.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np

from paceline.actors.engine.errors import PacelineError
from paceline.actors.engine.messages import DraftLaw
from paceline.actors.engine.noise import FloatArray, IntArray

MAX_LAW_ENTRIES: Final = 64
MAX_LAW_WEIGHT: Final = 2**16
"""Weight of the most likely token. One that is less likely than 2**-17 of it is left out."""

_LEAST: Final = math.log(0.5 / MAX_LAW_WEIGHT)


class DraftLawError(PacelineError):
    """A draft's law is not one that its token can have been drawn from."""


def quantize_law(log_weights: FloatArray) -> DraftLaw:
    """The sparse law that stands for a processed one.

    Args:
        log_weights: ``[V]`` float64, the best token's 0 and removed tokens' −inf (see ``process_logits``).

    Returns:
        At least one entry, the most likely first, ties by the lower id; removed tokens are never among them.
    """
    ids = np.flatnonzero(log_weights > _LEAST)
    weights = np.rint(np.exp(log_weights[ids]) * MAX_LAW_WEIGHT).astype(np.int64)
    if len(ids) > MAX_LAW_ENTRIES:
        # Only those that can be among the first: sorting a flat law whole would be slow.
        floor = np.partition(weights, len(ids) - MAX_LAW_ENTRIES)[len(ids) - MAX_LAW_ENTRIES]
        kept = weights >= floor
        ids, weights = ids[kept], weights[kept]
    order = np.argsort(-weights, kind="stable")[:MAX_LAW_ENTRIES]
    order = order[weights[order] > 0]
    return DraftLaw(tuple(ids[order].tolist()), tuple(weights[order].tolist()))


def draw_token(law: DraftLaw, random: int) -> int:
    """The token that a uniform integer of 64 bits picks: token i with probability weights[i] / sum, exact to
    2**-42."""
    up_to = list(accumulate(law.weights))
    return law.token_ids[bisect_right(up_to, random * up_to[-1] >> 64)]


def check_law(law: DraftLaw, token_id: int, vocab_size: int) -> None:
    """Raises: DraftLawError where ``token_id`` cannot have been drawn from ``law`` by this module's rules."""
    ids, weights = law.token_ids, law.weights
    if not 1 <= len(ids) <= MAX_LAW_ENTRIES:
        raise DraftLawError(f"a law has {len(ids)} entries; 1 to {MAX_LAW_ENTRIES} are allowed")
    if len(weights) != len(ids):
        raise DraftLawError(f"a law has {len(ids)} token ids but {len(weights)} weights")
    if len(set(ids)) != len(ids):
        raise DraftLawError("a law names a token id twice")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise DraftLawError(f"a law names a token id outside [0, {vocab_size - 1}]")
    if min(weights) < 1 or max(weights) > MAX_LAW_WEIGHT:
        raise DraftLawError(f"a law has a weight outside [1, {MAX_LAW_WEIGHT}]")
    if token_id not in ids:
        raise DraftLawError(f"token {token_id} is not in the law it is said to be drawn from")


@dataclass(frozen=True, slots=True, eq=False)
class SparseLaw:
    """A draft's law q as verification reads it."""

    token_ids: IntArray
    """``[K]``, all different."""
    probabilities: FloatArray
    """``[K]``, positive, of sum 1."""

    @classmethod
    def of(cls, token_id: int, law: DraftLaw | None) -> SparseLaw:
        """The law that ``token_id`` was drawn from; None = it was certain (lookups, greedy drafts)."""
        if law is None:
            return cls(np.array([token_id]), np.array([1.0]))
        weights = np.array(law.weights, dtype=np.float64)
        return cls(np.array(law.token_ids, dtype=np.int64), weights / weights.sum())

    def probability(self, token_id: int) -> float:
        return float(self.probabilities[self.token_ids == token_id].sum())
