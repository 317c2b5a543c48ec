"""What a request asks for: sampling, stopping and speculation parameters, checked on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from paceline.actors.engine.errors import InvalidArgumentError

GREEDY_TEMPERATURE = 1e-3
"""Temperatures below this one are greedy: dividing by them would overflow float32 logits long before
it changed which token wins. One threshold for target, draft and every rule."""

MAX_SEED = 2**64 - 1
MAX_LOGIT_BIAS = 100.0
"""A bias of this size is absolute: −100 forbids a token, +100 allows no other."""
MAX_BIASED_TOKENS = 1024
MAX_BAD_TOKENS = 1024
MAX_LOGPROBS = 20
"""Most top entries reported for a token."""


class VerificationRule(Enum):
    """How draft tokens are accepted (VERIFICATION rules; ``coupled`` is the default)."""

    COUPLED = "coupled"
    STANDARD = "standard"
    BLOCK = "block"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


def _check(name: str, value: float, low: float, high: float, shown: str) -> None:
    if math.isnan(value) or not low <= value <= high:
        raise InvalidArgumentError(name, f"must be {shown}, got {value}")


class ConstraintKind(Enum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True)
class Constraint:
    """What the completion's text must look like."""

    kind: ConstraintKind
    text: str = ""
    """The schema, expression or grammar; empty for a choice."""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class SamplingParams:
    """The law that a token is drawn from, given the target's logits.

    Raises:
        InvalidArgumentError: on construction, naming the field and its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit), ids ascending and different."""
    bad_token_ids: tuple[int, ...] = ()
    """Ascending and different; never drawn."""
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        _check("sampling.temperature", self.temperature, 0.0, 100.0, "a number in [0, 100]")
        if self.top_k < 0:
            raise InvalidArgumentError("sampling.top_k", f"must be 0 (off) or positive, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidArgumentError("sampling.top_p", f"must be a number in (0, 1], got {self.top_p}")
        _check("sampling.min_p", self.min_p, 0.0, 1.0, "a number in [0, 1]")
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidArgumentError(
                "sampling.seed", f"must be an unsigned 64-bit integer, got {self.seed}"
            )
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise InvalidArgumentError(
                "sampling.repetition_penalty", f"must be a number in (0, 100], got {self.repetition_penalty}"
            )
        _check("sampling.presence_penalty", self.presence_penalty, -2.0, 2.0, "a number in [-2, 2]")
        _check("sampling.frequency_penalty", self.frequency_penalty, -2.0, 2.0, "a number in [-2, 2]")
        self._check_logit_bias()
        self._check_bad_token_ids()

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise InvalidArgumentError(
                "sampling.logit_bias",
                f"may have at most {MAX_BIASED_TOKENS} tokens, got {len(self.logit_bias)}",
            )
        previous = -1
        for token_id, value in self.logit_bias:
            if token_id <= previous:
                raise InvalidArgumentError(
                    "sampling.logit_bias", f"must have ascending ids >= 0, got {token_id} after {previous}"
                )
            previous = token_id
            name = f"sampling.logit_bias[{token_id}]"
            _check(name, value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, "a number in [-100, 100]")

    def _check_bad_token_ids(self) -> None:
        ids = self.bad_token_ids
        if len(ids) > MAX_BAD_TOKENS:
            raise InvalidArgumentError(
                "sampling.bad_token_ids", f"may have at most {MAX_BAD_TOKENS} ids, got {len(ids)}"
            )
        if any(second <= first for first, second in zip((-1, *ids), ids, strict=False)):
            raise InvalidArgumentError("sampling.bad_token_ids", "must be ascending ids >= 0")

    @property
    def processes_logits(self) -> bool:
        """Whether anything besides temperature and truncation changes the logits (``min_tokens`` apart)."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.bad_token_ids
            or self.constraint
        )

    @property
    def greedy(self) -> bool:
        """Argmax, ties to the lowest token id."""
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True)
class StoppingParams:
    """When a sequence ends, as far as token ids can tell (stop strings are the gateway's).

    Raises:
        InvalidArgumentError: on construction, naming the field and its range.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    """Token ids that end the sequence: the request's own and, unless it ignores them, the model's."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidArgumentError("stopping.max_tokens", f"must be at least 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidArgumentError(
                "stopping.min_tokens",
                f"must be in [0, max_tokens = {self.max_tokens}], got {self.min_tokens}",
            )


@dataclass(frozen=True)
class SpeculationParams:
    """Bounds of speculation for one request."""

    num_speculative_tokens: int | None = None
    """Most draft tokens verified in one step; 0 = none; None = what the target decides."""
    rule: VerificationRule = VerificationRule.COUPLED

    def __post_init__(self) -> None:
        if self.num_speculative_tokens is not None and not 0 <= self.num_speculative_tokens <= 64:
            raise InvalidArgumentError(
                "speculation.num_speculative_tokens", f"must be in [0, 64], got {self.num_speculative_tokens}"
            )


@dataclass
class SpeculationStats:
    """What speculation did for one sequence. Accepted counts exclude corrected and bonus tokens."""

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds, which does include the corrected or bonus token; 0.0 before any round."""
        return 1.0 + self.accepted_tokens / self.rounds if self.rounds else 0.0

    def add(self, other: SpeculationStats) -> None:
        """Count another sequence's, or another stay's, in."""
        self.rounds += other.rounds
        self.draft_tokens += other.draft_tokens
        self.accepted_tokens += other.accepted_tokens
        missing = len(other.accepted_per_position) - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * max(0, missing))
        for depth, count in enumerate(other.accepted_per_position):
            self.accepted_per_position[depth] += count

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Count one round in which ``num_drafted`` (> 0) tokens were verified."""
        self.rounds += 1
        self.draft_tokens += num_drafted
        self.accepted_tokens += num_accepted
        missing = num_drafted - len(self.accepted_per_position)
        if missing > 0:
            self.accepted_per_position.extend([0] * missing)
        for depth in range(num_accepted):
            self.accepted_per_position[depth] += 1
