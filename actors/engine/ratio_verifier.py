"""One sequence's step under the standard and block rules: its laws, and the numbers that decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from paceline.actors.engine.draft_law import SparseLaw
from paceline.actors.engine.errors import NonFiniteLogitsError
from paceline.actors.engine.messages import DraftLaw
from paceline.actors.engine.noise import FloatArray, Purpose, round_seed, uniform
from paceline.actors.engine.sampling import process_logits
from paceline.actors.engine.sequence import TargetSequence
from paceline.actors.engine.verification import Verification, verify_ratio

_UNDERFLOW: Final = -745.2
"""The exponential of what is below is 0."""


def verify_by_ratio(
    sequence: TargetSequence, tail: Sequence[int], laws: Sequence[DraftLaw | None], logits: torch.Tensor
) -> Verification:
    """What a sequence commits, drawn with the streams of its present round (see ``noise.round_seed``).

    Args:
        tail: k >= 0 draft tokens after the committed ones.
        laws: what they were drawn from, at least k; or none at all: they were certain.
        logits: float32 ``[k + 1, V]`` after the sequence's edits; row i follows i tokens of the tail.

    Raises:
        NonFiniteLogitsError: the row that the next token has to be drawn from has no law. Rows past it, and
            rows that are not reached, do not matter.
    """
    num_usable = _num_usable(logits)
    if num_usable == 0:
        raise NonFiniteLogitsError((0,))
    # Whether row i has a law is decided by the tail's first i tokens, so the tail may end there, all of
    # those i tokens included: it would be biased to leave out the last because of what it is.
    tail = tail[:num_usable]
    target = list(_probabilities(process_logits(logits[:num_usable], [sequence.sampling] * num_usable)))
    if len(target) == len(tail):
        target.append(np.zeros_like(target[0]))
    base_position = len(sequence.token_ids)
    seed = round_seed(sequence.sampling.seed, sequence.epoch, base_position)
    found = verify_ratio(
        sequence.rule,
        tail,
        target,
        [SparseLaw.of(token_id, laws[index] if laws else None) for index, token_id in enumerate(tail)],
        [uniform(seed, base_position + depth, Purpose.ACCEPTANCE) for depth in range(len(tail))],
        uniform(seed, base_position, Purpose.RESIDUAL),
        uniform(seed, base_position, Purpose.BONUS),
    )
    if found.num_accepted == num_usable:
        raise NonFiniteLogitsError((num_usable,))
    return found


def _num_usable(logits: torch.Tensor) -> int:
    """Rows before the first without a law."""
    # A NaN wins the maximum.
    finite: list[bool] = torch.isfinite(logits.max(dim=1).values).tolist()
    return finite.index(False) if False in finite else len(finite)


def _probabilities(log_weights: torch.Tensor) -> FloatArray:
    """``[R, V]``, each row of sum 1, of log weights whose best is 0. ``log_weights`` is used up."""
    probabilities: FloatArray = log_weights.cpu().numpy()
    for row in probabilities:
        kept = np.flatnonzero(row > _UNDERFLOW)
        if 2 * len(kept) < len(row):  # an exponential costs more than finding out who needs one
            weights = np.exp(row[kept])
            row.fill(0.0)
            row[kept] = weights / weights.sum()
        else:
            np.exp(row, out=row)
            row /= row.sum()
    return probabilities
