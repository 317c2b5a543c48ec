"""The target's own proposals, without a draft: prompt lookup (n-gram)."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.actors.engine.config import NgramConfig
from paceline.actors.engine.estimates import AcceptanceEstimate

MAX_PAUSE_ROUNDS = 64
PASSED_OVER_ROUNDS = 32
"""Lookups of a sequence that seem not worth their tokens before one token is tried all the same: nothing else
would show that they have become better, and it costs no more than a token in as many steps."""


class NgramIndex:
    """What followed the last occurrence of each n-gram of one sequence.

    Prompt lookup decoding (Saxena 2023), with an index that grows by O(max_n − min_n) per token instead
    of a scan. An n-gram is entered only once its continuation is known, so a lookup of the sequence's own
    end finds an earlier occurrence.
    """

    __slots__ = ("_max_n", "_min_n", "_next", "_num_indexed")

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n = min_n
        self._max_n = max_n
        self._next: dict[tuple[int, ...], int] = {}
        """n-gram -> position of the token after its last occurrence."""
        self._num_indexed = 0
        """n-grams that are followed by one of the first so many tokens are in the index."""

    def update(self, token_ids: Sequence[int]) -> None:
        """Enter what was appended to ``token_ids`` since the last call."""
        following = self._next
        for position in range(max(self._num_indexed, self._min_n), len(token_ids)):
            for n in range(self._min_n, min(self._max_n, position) + 1):
                following[tuple(token_ids[position - n : position])] = position
        self._num_indexed = len(token_ids)

    def propose(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Up to ``num_tokens`` tokens that followed the longest known n-gram at the end; [] without match.

        ``token_ids`` is what ``update`` saw last. A continuation that runs into the sequence's end goes on
        with itself, as the text would if it repeated.
        """
        for n in range(min(self._max_n, len(token_ids)), self._min_n - 1, -1):
            start = self._next.get(tuple(token_ids[len(token_ids) - n :]))
            if start is not None:
                period = len(token_ids) - start
                return [token_ids[start + offset % period] for offset in range(num_tokens)]
        return []


class NgramProposer:
    """Prompt lookup for one sequence, which stops looking where lookups do not pay.

    After a lookup whose first token was rejected the next 1, 2, 4, … 64 steps make none; one accepted
    token ends the series.

    Args:
        acceptance: expected of its lookups, by how those of others fared.
    """

    __slots__ = (
        "_config",
        "_index",
        "_misses",
        "_passed_over",
        "_pause",
        "_proposal",
        "_proposed_at",
        "acceptance",
    )

    def __init__(self, config: NgramConfig, acceptance: float = 0.5) -> None:
        self._config = config
        self._index: NgramIndex | None = None
        self._misses = 0
        self._passed_over = 0
        self._pause = 0
        self._proposal: list[int] = []
        self._proposed_at = -1
        self.acceptance = AcceptanceEstimate(prior=acceptance, prior_trials=2.0, decay=0.9)

    def propose(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Candidates for the positions after ``token_ids``; the same answer until tokens are appended."""
        if num_tokens <= 0 or not self._config.enabled:
            return []
        if self._proposed_at != len(token_ids):
            self._proposed_at = len(token_ids)
            self._proposal = []
            if self._pause > 0:
                self._pause -= 1
            else:
                if self._index is None:
                    self._index = NgramIndex(self._config.min_n, self._config.max_n)
                self._index.update(token_ids)
                self._proposal = self._index.propose(token_ids, self._config.num_tokens)
        return self._proposal[:num_tokens]

    def pass_over(self) -> bool:
        """A proposal is not worth a token of the step. Returns whether to try one token all the same."""
        self._passed_over = (self._passed_over + 1) % PASSED_OVER_ROUNDS
        return self._passed_over == 0

    def record(self, num_proposed: int, num_accepted: int) -> None:
        """A proposal was verified."""
        self.acceptance.record(num_proposed, num_accepted)
        if num_accepted:
            self._misses = 0
        else:
            self._pause = min(2**self._misses, MAX_PAUSE_ROUNDS)
            self._misses += 1
