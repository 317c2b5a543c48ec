"""The next chain token of every sequence that a draft step served."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.actors.engine.draft_sequence import DraftSequence
from paceline.actors.engine.errors import NonFiniteLogitsError
from paceline.actors.engine.sampling import sample


def draw_candidates(
    logits: torch.Tensor, sequences: Sequence[DraftSequence]
) -> tuple[list[tuple[DraftSequence, int]], list[DraftSequence]]:
    """Draw the next token of each sequence from its row; return them, and the sequences without a law."""
    if not sequences:
        return [], []
    restricted = _restrict(logits, [sequence.vocab_size for sequence in sequences])
    params = [sequence.params for sequence in sequences]
    positions = [len(sequence.token_ids) for sequence in sequences]
    try:
        return list(zip(sequences, sample(restricted, params, positions), strict=True)), []
    except NonFiniteLogitsError as error:
        bad = set(error.rows)
    broken = [sequences[row] for row in sorted(bad)]
    good = [row for row in range(len(sequences)) if row not in bad]
    chosen, _ = draw_candidates(logits[good], [sequences[row] for row in good])
    return chosen, broken


def _restrict(logits: torch.Tensor, vocab_sizes: Sequence[int]) -> torch.Tensor:
    """Logits ``[R, V]`` with the ids that a row's target does not have removed (cut off, or −inf)."""
    widest = max(vocab_sizes)
    logits = logits[:, :widest]
    if min(vocab_sizes) == widest:
        return logits
    sizes = torch.tensor(vocab_sizes, device=logits.device)
    outside = torch.arange(widest, device=logits.device) >= sizes[:, None]
    return logits.masked_fill(outside, -math.inf)
