"""Events in, instructions out: what the engines and their shells say to each other.

One frozen dataclass per wire message (``execution.proto``, ``verification.proto``), without the wire.
Positions are absolute indices into a sequence, prompt included.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.actors.engine.parameters import (
    FinishReason,
    SamplingParams,
    SpeculationParams,
    SpeculationStats,
    StoppingParams,
)

# ---------------------------------------------------------------- gateway -> target


@dataclass(frozen=True, slots=True)
class Submit:
    """Place a sequence on this target, for the first time or resumed after a failover."""

    sequence_id: str
    epoch: int
    token_ids: tuple[int, ...]
    """Prompt, then what is committed so far."""
    prompt_length: int
    sampling: SamplingParams
    stopping: StoppingParams
    speculation: SpeculationParams


@dataclass(frozen=True, slots=True)
class Cancel:
    sequence_id: str
    epoch: int


# ---------------------------------------------------------------- target -> gateway


@dataclass(frozen=True, slots=True)
class Committed:
    sequence_id: str
    epoch: int
    base_position: int
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]
    """Entry i: token_ids[i] was an accepted draft token."""


@dataclass(frozen=True, slots=True)
class Finished:
    sequence_id: str
    epoch: int
    reason: FinishReason
    speculation: SpeculationStats
    cached_prompt_tokens: int = 0
    error: str = ""
    invalid_argument: bool = False
    resource_exhausted: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    num_running: int
    num_waiting: int
    num_pending_tokens: int
    free_blocks: int
    total_blocks: int
    draining: bool


# ---------------------------------------------------------------- draft -> target


@dataclass(frozen=True, slots=True)
class DraftHello:
    """What a draft says of itself when it dials in (checked by the shell before the engine hears it)."""

    draft_id: str
    model: str
    vocab_size: int
    capacity: int
    max_model_len: int
    method: str


@dataclass(frozen=True, slots=True)
class Candidates:
    """A draft's chain at ``base_position``. Within one ``revision`` the chain has no gaps."""

    sequence_id: str
    epoch: int
    base_position: int
    token_ids: tuple[int, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Decline:
    """The draft cannot serve this sequence."""

    sequence_id: str
    epoch: int
    reason: str


# ---------------------------------------------------------------- target -> draft


@dataclass(frozen=True, slots=True)
class Open:
    sequence_id: str
    epoch: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    window: int
    """Tokens past the committed ones that the draft may hold; 0 = rest."""


@dataclass(frozen=True, slots=True)
class Verdict:
    sequence_id: str
    epoch: int
    base_position: int
    num_accepted: int
    committed_token_ids: tuple[int, ...]
    """Everything committed since the last verdict. May be empty: then only ``window`` changes."""
    window: int


@dataclass(frozen=True, slots=True)
class Close:
    sequence_id: str
    epoch: int
