"""Configuration of the two engines: frozen, checked on construction."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from paceline.actors.engine.errors import InvalidArgumentError

MAX_SPECULATIVE_TOKENS = 64
"""Largest tail that any configuration or request may ask for."""
MAX_BRANCHES = 256
"""Most corrections that a draft may be told to prepare for one sequence."""


class Hardware(Enum):
    """Whether target and drafts contend for the same processors."""

    AUTO = "auto"
    """Found out from the target's own step times."""
    SHARED = "shared"
    """They do: take turns, a draft rests while the target verifies."""
    SEPARATE = "separate"
    """They do not: a draft runs ahead while the target verifies."""


class LogprobsMode(Enum):
    """Of which law log probabilities are reported."""

    RAW = "raw"
    """The model's, before processors, temperature and truncation."""
    PROCESSED = "processed"
    """The one that the token was drawn from."""


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise InvalidArgumentError(name, f"must be at least {low}, got {value}")


@dataclass(frozen=True)
class NgramConfig:
    """Prompt lookup: propose what followed the last occurrence of the sequence's last n tokens.

    Raises:
        InvalidArgumentError: on construction, naming the field and its range.
    """

    enabled: bool = True
    min_n: int = 2
    """Shortest match, in tokens."""
    max_n: int = 4
    """Longest match tried; longer matches are tried first."""
    num_tokens: int = 8
    """Most tokens proposed by one lookup."""

    def __post_init__(self) -> None:
        _at_least("ngram.min_n", self.min_n, 1)
        if self.max_n < self.min_n:
            raise InvalidArgumentError(
                "ngram.max_n", f"must be at least min_n = {self.min_n}, got {self.max_n}"
            )
        if not 1 <= self.num_tokens <= MAX_SPECULATIVE_TOKENS:
            raise InvalidArgumentError(
                "ngram.num_tokens", f"must be in [1, {MAX_SPECULATIVE_TOKENS}], got {self.num_tokens}"
            )


@dataclass(frozen=True)
class TargetEngineConfig:
    """What bounds the target's steps and its speculation.

    Raises:
        InvalidArgumentError: on construction, naming the field and its range.
    """

    max_num_seqs: int = 64
    """Most sequences computed in one step."""
    max_num_batched_tokens: int = 2048
    """Most tokens computed in one step: prompt chunks, pending tokens and tails together."""
    max_num_waiting: int = 256
    """Most sequences that may queue; one more is refused as RESOURCE_EXHAUSTED."""
    max_model_len: int | None = None
    """Longest prompt + completion in tokens; None = the model's own."""
    enable_prefix_caching: bool = True
    """Whether sequences share the KV of the blocks with which they begin alike."""
    num_speculative_tokens: int | None = None
    """Fixed tail length; 0 = no speculation; None = chosen by measured acceptance and step cost."""
    max_num_speculative_tokens: int = 8
    """Longest tail where ``num_speculative_tokens`` is None."""
    ngram: NgramConfig = field(default_factory=NgramConfig)
    hardware: Hardware = Hardware.AUTO
    wait_for_drafts: bool = True
    """False: every step starts at once with whatever candidates have arrived."""
    logprobs_mode: LogprobsMode = LogprobsMode.RAW

    def __post_init__(self) -> None:
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_waiting", self.max_num_waiting, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidArgumentError(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs = {self.max_num_seqs} (every running sequence computes one "
                f"token a step), got {self.max_num_batched_tokens}",
            )
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        if self.num_speculative_tokens is not None and not (
            0 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS
        ):
            raise InvalidArgumentError(
                "num_speculative_tokens",
                f"must be in [0, {MAX_SPECULATIVE_TOKENS}] or unset, got {self.num_speculative_tokens}",
            )
        if not 1 <= self.max_num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise InvalidArgumentError(
                "max_num_speculative_tokens",
                f"must be in [1, {MAX_SPECULATIVE_TOKENS}], got {self.max_num_speculative_tokens}",
            )

    @property
    def tail_limit(self) -> int:
        """Longest tail that any step of this target verifies for one sequence."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return self.max_num_speculative_tokens

    @property
    def max_window(self) -> int:
        """Most tokens past the committed ones that a draft is ever asked to hold (run-ahead included)."""
        return 3 * self.tail_limit + 2 if self.tail_limit else 0


@dataclass(frozen=True)
class DraftEngineConfig:
    """What bounds the draft's steps.

    Raises:
        InvalidArgumentError: on construction, naming the field and its range.
    """

    max_num_seqs: int = 64
    """Capacity: sequences served at a time, for all targets together."""
    max_num_batched_tokens: int = 2048
    """Most tokens computed in one step: prefill chunks and drafting together."""
    max_model_len: int | None = None
    """Longest sequence followed, in tokens; None = the model's own."""
    enable_prefix_caching: bool = True
    """Whether sequences share the KV of the blocks with which they begin alike."""
    max_branches: int = 32
    """Most likely corrections of a sequence for which a tail is prepared while the target verifies; 0 =
    none."""

    def __post_init__(self) -> None:
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidArgumentError(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs = {self.max_num_seqs} (every sequence drafts one token a "
                f"step), got {self.max_num_batched_tokens}",
            )
        if not 0 <= self.max_branches <= MAX_BRANCHES:
            raise InvalidArgumentError(
                "max_branches", f"must be in [0, {MAX_BRANCHES}], got {self.max_branches}"
            )
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
