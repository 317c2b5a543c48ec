"""The next-best tokens of the shared-noise rule: where the target's choice is likely to be if it is not the
draft's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from paceline.actors.engine.noise import FloatArray, IntArray, gumbel_of_bits, random_bits, seed_bits
from paceline.actors.engine.parameters import SamplingParams
from paceline.actors.engine.truncation import Logits, cut

_POOL: Final = 16
"""Most likely tokens of a row that are looked at. Others win the race now and then, but seldom; a guess that
is missed costs a draft step, and hashing a whole vocabulary costs more."""
_GROUP: Final = 64
"""Tokens that are represented by their maximum at first."""
_GROUPED: Final = 4096
"""Rows of fewer tokens are partitioned as they are."""


def runners_up(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    chosen: Sequence[int],
    counts: Sequence[int],
) -> dict[int, tuple[int, ...]]:
    """The tokens with the highest log weight + noise after the chosen one.

    Args:
        logits: ``[R, V]`` float32, edits applied, each row with a law.
        positions: one per row, of the token that was drawn.
        chosen: one per row, the token that was drawn.
        counts: one per row, how many are wanted.

    Returns:
        Row -> up to so many token ids, the best first. Rows of which none are wanted are left out. Only the
        most likely tokens are considered, and none that the row's filters remove.
    """
    rows = [row for row, count in enumerate(counts) if count]
    if not rows:
        return {}
    if len(rows) < logits.shape[0]:
        logits = logits[torch.tensor(rows, device=logits.device)]
    top = _most_likely(logits)
    heads: Logits = top.values.cpu().numpy()
    ids: IntArray = top.indices.cpu().numpy()
    scores = heads.astype(np.float64)
    random_rows = [index for index, row in enumerate(rows) if not params[row].greedy]
    if random_rows:
        wanted = [params[rows[index]] for index in random_rows]
        seeds = np.array([seed_bits(item.seed) for item in wanted], dtype=np.int64)
        places = np.array([positions[rows[index]] for index in random_rows], dtype=np.int64)
        noise: FloatArray = gumbel_of_bits(random_bits(seeds[:, None], places[:, None], ids[random_rows]))
        scores[random_rows] /= np.array([item.temperature for item in wanted])[:, None]
        scores[random_rows] += noise
        for index, item in zip(random_rows, wanted, strict=True):
            if item.top_k or item.top_p < 1.0 or item.min_p > 0.0:
                values: Logits = logits[index].cpu().numpy()
                kept = cut(values, float(heads[index].max()), item)
                out = (heads[index] < kept.logit) | (
                    (heads[index] == kept.logit) & (ids[index] > kept.last_id)
                )
                scores[index, out] = -np.inf
    chosen_ids = np.array([chosen[row] for row in rows], dtype=np.int64)
    scores[ids == chosen_ids[:, None]] = -np.inf
    most = min(max(counts), ids.shape[1])
    order = np.argsort(-scores, axis=1, kind="stable")[:, :most]
    found = np.take_along_axis(ids, order, axis=1).tolist()
    finite = np.isfinite(np.take_along_axis(scores, order, axis=1)).sum(axis=1).tolist()
    return {
        row: tuple(tokens[: min(counts[row], num_finite)])
        for row, tokens, num_finite in zip(rows, found, finite, strict=True)
    }


def _most_likely(logits: torch.Tensor) -> torch.return_types.topk:
    """Values and ids ``[R, P]`` of the P most likely tokens of each row of ``logits`` [R, V], in no order."""
    vocab_size = logits.shape[1]
    if vocab_size < _GROUPED or logits.device.type != "cpu":
        return torch.topk(logits, min(_POOL, vocab_size), dim=1, sorted=False)
    # The highest tokens lie in the groups with the highest maxima, which are found several times faster.
    # Groups are interleaved, so that a maximum is taken along long rows. What fills no group is one more
    # each.
    num_groups = vocab_size // _GROUP
    rest = torch.arange(num_groups * _GROUP, vocab_size)
    maxima = logits[:, : num_groups * _GROUP].view(-1, _GROUP, num_groups).amax(dim=1)
    groups = torch.topk(maxima, _POOL, dim=1, sorted=False).indices
    members = (groups[:, :, None] + torch.arange(_GROUP) * num_groups).flatten(1)
    ids = torch.cat([members, rest.expand(len(logits), -1)], dim=1)
    top = torch.topk(logits.gather(1, ids), _POOL, dim=1, sorted=False)
    return torch.return_types.topk((top.values, ids.gather(1, top.indices)))
