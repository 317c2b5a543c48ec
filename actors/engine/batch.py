"""The ragged batch: what one forward pass computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's part of a forward pass: ``token_ids`` at positions ``start``, ``start + 1``, …

    Invariants: KV of positions [0, start) is already in the cache, and ``block_table`` has a slot for
    every position below ``start + len(token_ids)``.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    num_logits: int
    """Logits are wanted for this many of the last tokens (0 for a prompt chunk that is not the last)."""


class ModelRunner(Protocol):
    """A model with a paged KV cache. Not thread-safe: one thread steps it."""

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer that are real tokens ids (0 … vocab_size − 1), padding excluded
        where it is known."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        """Compute the slices, write their KV, return logits.

        Returns:
            float32 ``[R, vocab_size]`` with R = the sum of ``num_logits``; rows in the batch's order,
            and in position order within a slice. Row for position i is the law of token i + 1.
        """
