"""Where newly committed tokens end a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.actors.engine.parameters import FinishReason, StoppingParams


class Stop(NamedTuple):
    num_kept: int
    """How many of the new tokens stay, the one that ended the sequence included."""
    reason: FinishReason | None
    """None: the sequence goes on."""


def find_stop(token_ids: Sequence[int], num_completion_tokens: int, stopping: StoppingParams) -> Stop:
    """Scan new tokens in order, as if they had been generated one by one.

    A stop token ends the sequence once ``min_tokens`` tokens precede it; before that it is not drawn (see
    ``LogitProcessors``), and would be a token like any other. The stop token itself is kept. Otherwise the
    completion ends at ``max_tokens``. A stop token in the last allowed place counts as STOP.

    Args:
        token_ids: the new tokens.
        num_completion_tokens: completion tokens before them.
    """
    room = stopping.max_tokens - num_completion_tokens
    for index, token_id in enumerate(token_ids[: max(room, 0)]):
        if token_id in stopping.stop_token_ids and num_completion_tokens + index >= stopping.min_tokens:
            return Stop(index + 1, FinishReason.STOP)
    if len(token_ids) >= room:
        return Stop(max(room, 0), FinishReason.LENGTH)
    return Stop(len(token_ids), None)
