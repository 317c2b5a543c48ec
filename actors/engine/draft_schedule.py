"""Which sequences a draft computes in its next step, and how many tokens of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from paceline.actors.engine.draft_sequence import DraftSequence

MAX_DECODE_TOKENS = 16
"""A sequence with at most this many tokens to compute is decoding (a pending token, or a short catch-up
after a verdict); one with more is in prefill."""

MIN_PREFILL_TOKENS = 16
"""Prefill always moves by at least this much in a step."""


class PlannedSlice(NamedTuple):
    sequence: DraftSequence
    num_tokens: int


def plan_step(
    sequences: Iterable[DraftSequence], *, max_num_batched_tokens: int, prefill_limit: int
) -> list[PlannedSlice]:
    """Plan one batched step: decoding sequences first, prefill chunks in what remains.

    While any other sequence is awake, all prefill together gets at most ``prefill_limit`` tokens of the
    step, so that a long prompt slows the others' drafting by a bounded factor and never stops it. Decoding
    sequences go in least-recently-served order, prefill in order of arrival: neither can starve.

    Args:
        sequences: all of the draft's sequences, in order of arrival.
        max_num_batched_tokens: most tokens of one step.
        prefill_limit: most prefill tokens of one step while others draft.
    """
    decoding: list[DraftSequence] = []
    prefilling: list[DraftSequence] = []
    others_awake = False
    for sequence in sequences:
        if sequence.window == 0:
            continue
        in_prefill = sequence.num_missing_tokens > MAX_DECODE_TOKENS
        others_awake = others_awake or not in_prefill
        if sequence.wants_token:
            (prefilling if in_prefill else decoding).append(sequence)

    prefill_budget = 0
    if prefilling:
        prefill_budget = max_num_batched_tokens
        if others_awake:
            prefill_budget = min(prefill_limit, max(1, max_num_batched_tokens // 2))

    decoding.sort(key=lambda sequence: sequence.last_turn)
    decode_budget = max_num_batched_tokens - (prefill_budget if decoding else 0)
    return [*_fill(decoding, decode_budget), *_fill(prefilling, prefill_budget)]


def _fill(sequences: Iterable[DraftSequence], budget: int) -> Iterable[PlannedSlice]:
    for sequence in sequences:
        if budget <= 0:
            return
        num_tokens = min(sequence.num_missing_tokens, budget)
        budget -= num_tokens
        yield PlannedSlice(sequence, num_tokens)


class PrefillPace:
    """How much prefill a step can carry without more than doubling its time.

    The step time is taken as ``decode + per_token * prefill_tokens``; both are running averages of what
    was measured, so the limit is small on a CPU and large on an accelerator without being configured.
    """

    def __init__(self) -> None:
        self._decode_seconds: float | None = None
        self._seconds_per_token: float | None = None

    def limit(self) -> int:
        """Most prefill tokens for a step in which other sequences draft."""
        if self._decode_seconds is None or self._seconds_per_token is None:
            return MIN_PREFILL_TOKENS
        affordable = self._decode_seconds / max(self._seconds_per_token, 1e-9)
        return max(MIN_PREFILL_TOKENS, int(affordable))

    def record(self, seconds: float, num_decode_tokens: int, num_prefill_tokens: int) -> None:
        """Learn from a step that took ``seconds``."""
        if num_prefill_tokens == 0:
            self._decode_seconds = _average(self._decode_seconds, seconds)
        elif num_decode_tokens == 0:
            self._learn_prefill(seconds / num_prefill_tokens)
        elif self._decode_seconds is not None:
            self._learn_prefill(max(0.0, seconds - self._decode_seconds) / num_prefill_tokens)
        elif self._seconds_per_token is not None:
            self._decode_seconds = max(0.0, seconds - self._seconds_per_token * num_prefill_tokens)

    def _learn_prefill(self, seconds_per_token: float) -> None:
        self._seconds_per_token = _average(self._seconds_per_token, seconds_per_token)


def _average(old: float | None, new: float, weight: float = 0.2) -> float:
    return new if old is None else old + weight * (new - old)
