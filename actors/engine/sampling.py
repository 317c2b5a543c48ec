"""One token per row of logits, by the shared-noise rule; exact, and the same alone or in any batch.

Order of the filters, each on the law that the one before it left, renormalised: temperature, min-p, top-k,
top-p. It is vLLM's (v1 sampler: temperature, then the argmax-invariant processors, min-p among them, then
top-k and top-p); min-p therefore compares *tempered* probabilities.

Every filter keeps a head of one order, the logit first and the lower token id among equals. So all of them
together are a *cut* in that order, top-k keeps exactly k tokens, and top_k = 1 is greedy. Probability mass is
counted in integers (units of 2**-40 of the most probable token), hence adds up alike in any order.

A token is drawn as the argmax of log weight + Gumbel noise (Gumbel-max). Almost no token needs its noise: the
best token's own noise is a score that others have to reach, noise is bounded, and what a token needs is
compared with its random bits before any logarithm is taken. All three shortcuts only ever drop losers.

Array work is done with numpy on host memory: on a CPU its kernels for these shapes are several times
faster than torch's. Rows of another device are copied to the host, except for greedy rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from paceline.actors.engine.errors import NonFiniteLogitsError
from paceline.actors.engine.noise import (
    IDS_PER_CALL,
    MAX_GUMBEL,
    FloatArray,
    IntArray,
    gumbel_of_bits,
    random_bits,
    seed_bits,
    words_of_blocks,
)
from paceline.actors.engine.parameters import SamplingParams

Logits = npt.NDArray[np.float32]

_MASS_UNITS: Final = 2.0**40
_NEGLIGIBLE: Final = 40 * math.log(2.0)
"""Tokens this far (in tempered nats) behind the best have less than one unit of mass."""
_BLOCKS_PER_CHUNK: Final = 8192
"""Calls of the generator at once: its arrays stay in the cache, and call overhead is small."""
_BITS_MARGIN: Final = math.log(1.01 * 2.0**32)
"""Turns a bound on 1 − u into one on random bits, one percent wider."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """What the filters leave of one row: tokens above ``logit``, those equal to it up to ``last_id``."""

    logit: float
    last_id: int


class LogitEdit(Protocol):
    """What a sequence's processors do to the logits of one position, before the temperature."""

    def apply(self, values: Logits) -> None:
        """Change ``values`` [V] float32 in place."""


Edits = Sequence[LogitEdit | None]
"""One per row; None = the row stays as it is."""


def process_logits(
    logits: torch.Tensor, params: Sequence[SamplingParams], edits: Edits | None = None
) -> torch.Tensor:
    """Log weights after edits, temperature, min-p, top-k and top-p.

    Args:
        logits: ``[R, V]`` float32, not changed.
        params: one per row.

    Returns:
        float64 ``[R, V]`` on the device of ``logits``, unnormalised: the best token of a row has 0, removed
        tokens −inf. A greedy row keeps its argmax only.

    Raises:
        NonFiniteLogitsError: naming the rows without a law.
    """
    _check_shapes(logits, len(params))
    logits = edited(logits, edits)
    best_ids = _best_ids(logits)
    host = _to_host(logits)
    weights = np.full(host.shape, -np.inf)
    for row, (values, best_id, wanted) in enumerate(zip(host, best_ids, params, strict=True)):
        best = float(values[best_id])
        if wanted.greedy:
            weights[row, best_id] = 0.0
            continue
        cut = _cut(values, best, wanted)
        ids = np.flatnonzero(values >= np.float32(cut.logit))
        ids = ids[(values[ids] > np.float32(cut.logit)) | (ids <= cut.last_id)]
        weights[row, ids] = (values[ids].astype(np.float64) - best) / wanted.temperature
    return torch.from_numpy(weights).to(logits.device)


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    edits: Edits | None = None,
) -> list[int]:
    """Draw one token per row.

    Args:
        logits: ``[R, V]`` float32, not changed.
        params: one per row.
        positions: one per row, the absolute index in its sequence of the token being drawn.

    Returns:
        R token ids. Row r depends on the r-th entry of each argument only. Greedy rows have
        the argmax, ties to the lowest id.

    Raises:
        NonFiniteLogitsError: naming the rows without a law; no row is drawn then.
    """
    _check_shapes(logits, len(params))
    if len(positions) != len(params):
        raise ValueError(f"{len(params)} rows but {len(positions)} positions")
    logits = edited(logits, edits)
    tokens = _best_ids(logits)
    random_rows = [row for row, wanted in enumerate(params) if not wanted.greedy and wanted.top_k != 1]
    if not random_rows:
        return tokens
    if len(random_rows) < len(params):
        logits = logits[torch.tensor(random_rows, device=logits.device)]
    drawn = _draw(
        _to_host(logits),
        np.array([tokens[row] for row in random_rows], dtype=np.int64),
        [params[row] for row in random_rows],
        np.array([positions[row] for row in random_rows], dtype=np.int64),
    )
    for row, token in zip(random_rows, drawn, strict=True):
        tokens[row] = token
    return tokens


def edited(logits: torch.Tensor, edits: Edits | None) -> torch.Tensor:
    """``logits`` [R, V] with the edits applied: itself where there are none, else a copy on the host."""
    if edits is None or not any(edits):
        return logits
    host = _to_host(logits).copy()
    for values, edit in zip(host, edits, strict=True):
        if edit is not None:
            edit.apply(values)
    return torch.from_numpy(host)


def _check_shapes(logits: torch.Tensor, num_rows: int) -> None:
    if logits.dim() != 2 or logits.shape[0] != num_rows or logits.shape[1] == 0:
        raise ValueError(f"logits must be [R = {num_rows}, V > 0], got {list(logits.shape)}")
    if logits.dtype != torch.float32:
        raise ValueError(f"logits must be float32, got {logits.dtype}")


def _to_host(logits: torch.Tensor) -> Logits:
    host: Logits = logits.detach().cpu().contiguous().numpy()
    return host


def _best_ids(logits: torch.Tensor) -> list[int]:
    """Argmax per row, ties to the lowest id. Both numpy and torch promise the first maximum and let a NaN
    win, so that the winner's value alone tells whether the row has a law.

    Raises:
        NonFiniteLogitsError: for rows whose maximum is not finite.
    """
    if logits.shape[0] == 0:
        return []
    if logits.device.type == "cpu":
        host = _to_host(logits)
        best_ids = host.argmax(axis=1)
        finite = np.isfinite(host[np.arange(len(host)), best_ids])
    else:
        device_ids = logits.argmax(dim=1)
        maxima = logits.gather(1, device_ids[:, None])[:, 0]
        best_ids, finite = device_ids.cpu().numpy(), torch.isfinite(maxima).cpu().numpy()
    if not finite.all():
        raise NonFiniteLogitsError(tuple(int(row) for row in np.flatnonzero(~finite)))
    return [int(token) for token in best_ids]


def _at_least(values: Logits, threshold: float) -> Logits:
    head: Logits = values[np.flatnonzero(values >= np.float32(threshold))]  # faster than by booleans
    return head


def _cut(values: Logits, best: float, params: SamplingParams) -> _Cut:
    """Where min-p, top-k and top-p cut one row (``values`` [V], maximum ``best``). Only values are sorted,
    and only those that can be kept or have mass."""
    vocab_size = len(values)
    by_top_k = 0 < params.top_k < vocab_size
    by_top_p = params.top_p < 1.0
    if not by_top_k and not by_top_p and params.min_p == 0.0:
        return _Cut(-math.inf, vocab_size)
    if by_top_k:
        head = np.partition(values, vocab_size - params.top_k)[vocab_size - params.top_k :]
    elif by_top_p:
        # Whatever has no mass is behind the nucleus; the margin is for rounding.
        head = _at_least(values, best - (_NEGLIGIBLE + 1.0) * params.temperature)
    else:
        head = _at_least(values, best + (math.log(params.min_p) - 1.0) * params.temperature)
    head = np.sort(head)[::-1]
    log_weights = (head.astype(np.float64) - best) / params.temperature
    num_kept = len(head)
    if params.min_p > 0.0:
        num_kept = int(np.count_nonzero(log_weights >= math.log(params.min_p)))
    if by_top_p:
        mass = (np.exp(log_weights[:num_kept]) * _MASS_UNITS).astype(np.int64)
        up_to = np.cumsum(mass)
        # A token is in the nucleus while the mass before it falls short of top_p; the first always is.
        num_kept = int(np.count_nonzero(up_to - mass < params.top_p * float(up_to[-1])))
    last = head[num_kept - 1]
    equals_kept = num_kept - int(np.count_nonzero(head > last))
    equals = np.flatnonzero(values == last)
    return _Cut(float(last), int(equals[equals_kept - 1]))


@dataclass(slots=True)
class _Race:
    """The Gumbel-max race of some rows. All fields have one entry per row."""

    seeds: IntArray
    positions: IntArray
    temperatures: FloatArray
    best: FloatArray
    """Highest logit, which has log weight 0."""
    cut_logits: Logits
    cut_ids: IntArray
    leaders: IntArray
    """Token with the highest score seen so far, the lowest id among equals."""
    scores: FloatArray
    """Its score, log weight + noise."""

    def enter(self, rows: IntArray, token_ids: IntArray, values: Logits, bits: IntArray) -> None:
        """Let tokens compete: row, token id, logit and random bits of each. Cut tokens are turned away.
        Whatever the order of calls, the result is the same."""
        cut_logits = self.cut_logits[rows]
        kept = (values > cut_logits) | ((values == cut_logits) & (token_ids <= self.cut_ids[rows]))
        rows, token_ids, values, bits = rows[kept], token_ids[kept], values[kept], bits[kept]
        log_weights = (values.astype(np.float64) - self.best[rows]) / self.temperatures[rows]
        scores = log_weights + gumbel_of_bits(bits)
        previous = self.scores.copy()
        np.maximum.at(self.scores, rows, scores)
        self.leaders[self.scores > previous] = np.iinfo(np.int64).max
        winners = scores == self.scores[rows]
        np.minimum.at(self.leaders, rows[winners], token_ids[winners])


def _draw(
    logits: Logits, best_ids: IntArray, params: Sequence[SamplingParams], positions: IntArray
) -> list[int]:
    """Gumbel-max over what the cuts leave. ``logits`` [R, V]; the rest one per row."""
    seeds = np.array([seed_bits(wanted.seed) for wanted in params], dtype=np.int64)
    best = logits[np.arange(len(logits)), best_ids].astype(np.float64)
    cuts = [_cut(logits[row], float(best[row]), wanted) for row, wanted in enumerate(params)]
    race = _Race(
        seeds=seeds,
        positions=positions,
        temperatures=np.array([wanted.temperature for wanted in params]),
        best=best,
        cut_logits=np.array([cut.logit for cut in cuts], dtype=np.float32),
        cut_ids=np.array([cut.last_id for cut in cuts], dtype=np.int64),
        leaders=best_ids.copy(),
        # No filter removes the best token, so its score is one that the others have to reach.
        scores=gumbel_of_bits(random_bits(seeds, positions, best_ids)),
    )
    _run(race, logits)
    return [int(token) for token in race.leaders]


def _run(race: _Race, logits: Logits) -> None:
    """Enter every token that can still win. ``logits`` [R, V].

    A token of log weight w reaches score s only if its noise g >= s − w, where g <= MAX_GUMBEL and, with
    g = −log(−log u) < −log(1 − u), only if 1 − u <= exp(w − s). Both are tested for a block of four ids at
    once, by the highest logit and the highest bits in it, with a margin that outweighs float32 rounding.
    """
    num_rows, vocab_size = logits.shape
    if missing := -vocab_size % IDS_PER_CALL:
        logits = np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf)
    blocks_per_row = logits.shape[1] // IDS_PER_CALL
    lanes = logits.reshape(num_rows * blocks_per_row, IDS_PER_CALL)

    slack = 1e-3 * race.temperatures + 1e-6 * np.abs(race.best)
    reachable = race.best - race.temperatures * (MAX_GUMBEL - race.scores) - slack
    thresholds = np.maximum(race.cut_logits, reachable.astype(np.float32))
    # Four booleans seen as one integer: nonzero if any id of the block is at or above the threshold.
    chosen = np.flatnonzero((logits >= thresholds[:, None]).view(np.uint32))
    best = race.best.astype(np.float32)
    inverse = (1.0 / race.temperatures).astype(np.float32)

    for begin in range(0, len(chosen), _BLOCKS_PER_CHUNK):
        part = chosen[begin : begin + _BLOCKS_PER_CHUNK]
        rows, blocks = np.divmod(part, blocks_per_row)
        # One entry instead of one per block, where that is all there is (rows are ascending).
        owner = rows[:1] if rows[0] == rows[-1] else rows
        words = words_of_blocks(race.seeds[owner], race.positions[owner], blocks)
        highest_bits = np.maximum(np.maximum(words[0], words[1]), np.maximum(words[2], words[3]))
        values = lanes[part]
        highest = np.maximum(np.maximum(values[:, 0], values[:, 1]), np.maximum(values[:, 2], values[:, 3]))
        offsets = (_BITS_MARGIN - race.scores).astype(np.float32)
        bound = np.exp((highest - best[owner]) * inverse[owner] + offsets[owner])
        hits = np.flatnonzero(2**32 - highest_bits <= bound)
        ids = blocks[hits, None] * IDS_PER_CALL + np.arange(IDS_PER_CALL)
        bits = np.stack([word[hits] for word in words], axis=1)
        # Ids of the padding come along; with a log weight of −inf they cannot win.
        owners = np.repeat(rows[hits], IDS_PER_CALL)
        race.enter(owners, ids.reshape(-1), values[hits].reshape(-1), bits.reshape(-1))
