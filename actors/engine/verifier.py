"""From the logits of one step to what each of its sequences commits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.actors.engine.errors import NonFiniteLogitsError
from paceline.actors.engine.sampling import sample
from paceline.actors.engine.scheduler import ScheduledSequence
from paceline.actors.engine.verification import Verification, verify_coupled


def verify_step(scheduled: Sequence[ScheduledSequence], logits: torch.Tensor) -> list[Verification | None]:
    """What each scheduled sequence commits.

    Args:
        logits: float32 ``[R, vocab_size]``, R = all ``num_logits`` of the step; a sequence's row i is the law
            of the token after its last committed token and i tokens of its tail.

    Returns:
        One entry per scheduled sequence: no tokens for a prompt chunk, None where logits are not numbers.
    """
    counts = [item.num_logits for item in scheduled]
    num_rows = sum(counts)
    if logits.shape[0] != num_rows:
        raise ValueError(f"the model returned {logits.shape[0]} rows of logits, asked for {num_rows}")
    if num_rows == 0:
        return [Verification(0, ())] * len(counts)
    pairs = list(zip(scheduled, counts, strict=True))
    params = [item.sequence.sampling for item, count in pairs for _ in range(count)]
    positions = [len(item.sequence.token_ids) + depth for item, count in pairs for depth in range(count)]
    try:
        samples, bad = sample(logits, params, positions), frozenset[int]()
    except NonFiniteLogitsError as error:
        bad = frozenset(error.rows)
        usable = logits.index_fill(0, torch.tensor(error.rows, device=logits.device), 0.0)
        samples = sample(usable, params, positions)
    verifications: list[Verification | None] = []
    first = 0
    for item, count in pairs:
        if count == 0:
            verifications.append(Verification(0, ()))
        elif bad and not bad.isdisjoint(range(first, first + count)):
            verifications.append(None)
        else:
            verifications.append(verify_coupled(item.tail, samples[first : first + count]))
        first += count
    return verifications
