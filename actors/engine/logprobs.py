"""Log probabilities of committed tokens and of the most likely ones beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.actors.engine.messages import TokenLogprobs

LogWeights = npt.NDArray[np.float32] | npt.NDArray[np.float64]

_CHUNK: Final = 16_384
"""Entries seen as float64 at a time: a chunk stays in the cache."""


def token_logprobs(
    log_weights: LogWeights, token_ids: Sequence[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Log-softmax at the committed token and at the top entries, computed in float64.

    Args:
        log_weights: ``[n, V]``, row i the unnormalised law of ``token_ids[i]``: logits, or what
            ``process_logits`` made of them. Every row has a finite maximum.
        token_ids: the committed tokens.
        num_top: entries to report besides.

    Returns:
        One per token. ``top`` is sorted by probability, the lower id first among equals; tokens without any
        probability are left out of it, so that it may be shorter than ``num_top``.
    """
    return tuple(
        _of_row(values, token_id, num_top) for values, token_id in zip(log_weights, token_ids, strict=True)
    )


def _of_row(values: LogWeights, token_id: int, num_top: int) -> TokenLogprobs:
    # The best entry is subtracted first: whatever its size, nothing is lost beside it.
    best = float(values.max())
    log_total = _log_total(values, best)
    top = _top_ids(values, num_top) if num_top else []
    return TokenLogprobs(
        logprob=float(values[token_id]) - best - log_total,
        top=tuple((other, float(values[other]) - best - log_total) for other in top),
    )


def _log_total(values: LogWeights, best: float) -> float:
    """log Σ exp(value − best), with no float64 copy of the whole row."""
    total = 0.0
    for begin in range(0, len(values), _CHUNK):
        part = values[begin : begin + _CHUNK].astype(np.float64)
        part -= best
        total += float(np.exp(part, out=part).sum())
    return math.log(total)


def _top_ids(values: LogWeights, num_top: int) -> list[int]:
    """Up to ``num_top`` ids, highest value first, lowest id among equals; none of value −inf."""
    size = len(values)
    if num_top < size:
        threshold = np.partition(values, size - num_top)[size - num_top]
        ids = np.flatnonzero((values >= threshold) & (values > -np.inf))
    else:
        ids = np.flatnonzero(values > -np.inf)
    order = np.lexsort((ids, -values[ids]))[:num_top]
    return [int(token_id) for token_id in ids[order]]
