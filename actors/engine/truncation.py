"""What min-p, top-k and top-p leave of a row of logits.

Every filter keeps a head of one order, the logit first and the lower token id among equals. So all of them
together are a *cut* in that order. Mass is counted in integers (units of 2**-40 of the most probable token),
hence adds up alike in any order.

A row is looked at as a whole as rarely as possible: its head is found first, and only that is sorted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.actors.engine.noise import FloatArray, IntArray
from paceline.actors.engine.parameters import SamplingParams

Logits = npt.NDArray[np.float32]

_MASS_UNITS: Final = 2.0**40
_NEGLIGIBLE: Final = 40 * math.log(2.0)
"""Tokens this far (in tempered nats) behind the best have less than one unit of mass."""
_GROUP: Final = 64
"""Tokens that are represented by their maximum where a bound on the k-th highest logit is wanted."""
_WIDTHS: Final = (3.0, 5.0, 7.0, 9.0, 12.0, 16.0)
"""Heads that are tried for a nucleus, in tempered nats behind the best."""
_LISTED: Final = 8
"""A cut that leaves at most one token of so many lists them."""
_SHORT: Final = 4096
"""Rows of fewer tokens are sorted as they are."""
_ESTIMATE_MARGIN: Final = 1e-4
"""More than the relative error of a sum of float32 exponentials, arguments in [−30, 0]."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What the filters leave: tokens above ``logit``, and those equal to it up to ``last_id``."""

    logit: float
    last_id: int
    ids: IntArray | None = None
    """The tokens that are left, ascending; None where they are many."""

    def kept_ids(self, values: Logits) -> IntArray:
        """The tokens of the row ``values`` [V] that are left, ascending."""
        if self.ids is not None:
            return self.ids
        ids = np.flatnonzero(values >= np.float32(self.logit))
        return ids[(np.take(values, ids) > np.float32(self.logit)) | (ids <= self.last_id)]


def cut(values: Logits, best: float, params: SamplingParams) -> Cut:
    """Where the filters cut one row.

    Args:
        values: ``[V]``, without NaN or +inf.
        best: its maximum, finite.
    """
    vocab_size = len(values)
    by_top_k = 0 < params.top_k < vocab_size
    by_top_p = params.top_p < 1.0
    if not by_top_k and not by_top_p and params.min_p == 0.0:
        return Cut(-math.inf, vocab_size)
    if by_top_k:
        return _cut_head(values, _ids_of_highest(values, params.top_k), best, params)
    if params.min_p > 0.0:
        ids = _ids_at_least(values, best + (math.log(params.min_p) - 1.0) * params.temperature)
        return _cut_head(values, ids, best, params)
    return _nucleus(values, best, params)


def highest_bound(values: Logits, count: int) -> float:
    """A logit that at least ``count`` tokens of ``values`` [V] reach, and not many more do; −inf for none
    better. The lowest of the ``count`` highest maxima of disjoint groups."""
    num_groups = len(values) // _GROUP
    if count * 4 > num_groups:
        return float(np.partition(values, len(values) - count)[len(values) - count])
    # Groups are interleaved: the maximum of long rows is several times faster than of short ones.
    maxima = values[: num_groups * _GROUP].reshape(_GROUP, num_groups).max(axis=0)
    return float(np.partition(maxima, num_groups - count)[num_groups - count])


def _ids_at_least(values: Logits, threshold: float) -> IntArray:
    found: IntArray = np.flatnonzero(values >= np.float32(threshold))
    return found


def _ids_of_highest(values: Logits, count: int) -> IntArray:
    """At least the ``count`` first tokens of the order, or all that are not removed already."""
    bound = highest_bound(values, count)
    return _ids_at_least(values, bound) if bound > -math.inf else np.flatnonzero(values > -np.inf)


def _cut_head(values: Logits, ids: IntArray, best: float, params: SamplingParams) -> Cut:
    """The cut, given a head of the order (``ids`` ascending) that holds all that the filters can keep and all
    that has mass among it."""
    head = np.sort(np.take(values, ids))[::-1]
    log_weights = (head.astype(np.float64) - best) / params.temperature
    num_kept = min(len(head), params.top_k or len(head))
    if params.min_p > 0.0:
        num_kept = min(num_kept, int(np.count_nonzero(log_weights >= math.log(params.min_p))))
    if params.top_p < 1.0:
        mass = _mass(log_weights[:num_kept])
        up_to = np.cumsum(mass)
        num_kept = _in_nucleus(mass, up_to, params.top_p, float(up_to[-1]))
    return _cut_after(values, ids, head, num_kept)


def _nucleus(values: Logits, best: float, params: SamplingParams) -> Cut:
    """Top-p alone. All masses are estimated first: that tells which head to look at, and its total mass well
    enough, but for rare cases, to tell which token is the last. Else the masses of all tokens are added."""
    if len(values) >= _SHORT:
        estimates = _estimates(values, best, params.temperature)
        total = float(estimates.sum())
        for width in _WIDTHS:
            ids = _ids_at_least(values, best - width * params.temperature)
            if float(np.take(estimates, ids).sum()) <= params.top_p * total * (1.0 + _ESTIMATE_MARGIN):
                continue
            head = np.sort(np.take(values, ids))[::-1]
            mass = _mass((head.astype(np.float64) - best) / params.temperature)
            up_to = np.cumsum(mass)
            estimates[ids] = 0.0
            beyond = float(estimates.sum()) * _MASS_UNITS
            # Rounding down takes at most a unit from each token.
            least = float(up_to[-1]) + max(beyond * (1.0 - _ESTIMATE_MARGIN) - len(values), 0.0)
            most = float(up_to[-1]) + beyond * (1.0 + _ESTIMATE_MARGIN) + 1.0
            num_kept = _in_nucleus(mass, up_to, params.top_p, least)
            if up_to[-1] > params.top_p * most and num_kept == _in_nucleus(mass, up_to, params.top_p, most):
                return _cut_after(values, ids, head, num_kept)
            break
    # Whatever has no mass is behind the nucleus; the margin is for rounding.
    ids = _ids_at_least(values, best - (_NEGLIGIBLE + 1.0) * params.temperature)
    return _cut_head(values, ids, best, params)


def _estimates(values: Logits, best: float, temperature: float) -> Logits:
    """Probabilities in units of the best token's, about; 0 for those of no account."""
    with np.errstate(all="ignore"):
        found: Logits = values - np.float32(best)
        found *= np.float32(1.0 / temperature)
        return np.exp(found, out=found)


def _mass(log_weights: FloatArray) -> IntArray:
    found: IntArray = (np.exp(log_weights) * _MASS_UNITS).astype(np.int64)
    return found


def _in_nucleus(mass: IntArray, up_to: IntArray, top_p: float, total: float) -> int:
    """A token is in the nucleus while the mass before it falls short of ``top_p``; the first always is."""
    return int(np.count_nonzero(up_to - mass < top_p * total))


def _cut_after(values: Logits, ids: IntArray, head: Logits, num_kept: int) -> Cut:
    """The cut after ``num_kept`` tokens of ``head`` (the values of ``ids``, descending)."""
    last = head[num_kept - 1]
    equals_kept = num_kept - int(np.count_nonzero(head > last))
    of_ids = np.take(values, ids)
    last_id = int(ids[np.flatnonzero(of_ids == last)[equals_kept - 1]])
    if num_kept * _LISTED > len(values):
        return Cut(float(last), last_id)
    kept = np.flatnonzero(of_ids >= last)
    if len(kept) > num_kept:
        kept = kept[(of_ids[kept] > last) | (ids[kept] <= last_id)]
    return Cut(float(last), last_id, ids[kept])
