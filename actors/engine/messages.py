"""Events in, instructions out: what the engines and their shells say to each other.

One frozen dataclass per wire message (``execution.proto``, ``verification.proto``), without the wire.
Positions are absolute indices into a sequence, prompt included.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.actors.engine.parameters import (
    FinishReason,
    SamplingParams,
    SpeculationParams,
    SpeculationStats,
    StoppingParams,
    VerificationRule,
)

MAX_REVISIONS = 2**32
REVISIONS_PER_STAY = 2**16

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
    logprobs: int | None = None
    """Top entries to report for each committed token; None = no logprobs."""
    priority: int = 0
    """Lower = served earlier."""
    ttl_seconds: float | None = None
    """Time to live: the target ends the sequence by itself when it is over. None = no limit."""


@dataclass(frozen=True, slots=True)
class Cancel:
    sequence_id: str
    epoch: int


# ---------------------------------------------------------------- target -> gateway


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position."""

    logprob: float
    """Of the committed token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log probability), most likely first."""


@dataclass(frozen=True, slots=True)
class Committed:
    sequence_id: str
    epoch: int
    base_position: int
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]
    """Entry i: token_ids[i] was an accepted draft token."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token where the sequence asked for them, else none."""


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
    deadline_exceeded: bool = False


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
    host: str = ""
    """The machine whose cores it computes with."""
    num_threads: int = 0
    """On these cores; 0: it computes elsewhere."""
    shares_cores: bool = False
    """The target computes with the same ones (not told, but found out where the hello is read)."""


@dataclass(frozen=True, slots=True)
class DraftLaw:
    """A sparse law, quantised before the draft drew from it: probability i is weights[i] / sum(weights)."""

    token_ids: tuple[int, ...]
    weights: tuple[int, ...]
    """Positive integers."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """A draft's chain at ``base_position``. Within one ``revision`` the chain has no gaps."""

    sequence_id: str
    epoch: int
    base_position: int
    token_ids: tuple[int, ...]
    revision: int
    laws: tuple[DraftLaw, ...] = ()
    """One per token under the standard and block rules; none under coupled, and for tokens without a law."""
    prepared: bool = False
    """The first tokens of this revision were ready before the verdict that they answer came in."""


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
    prompt_length: int = 0
    """Where the completion begins; 0 = all of ``token_ids`` are prompt."""
    stopping: StoppingParams = field(default_factory=lambda: StoppingParams(max_tokens=1))
    """Of which ``min_tokens`` and ``stop_token_ids`` shape the law."""
    rule: VerificationRule = VerificationRule.COUPLED
    draft_seed: int = 0
    """What the draft draws with under the standard and block rules; no other stay at any draft shares it."""

    @property
    def revisions(self) -> range:
        """What the draft's revisions are taken from, in ascending order.

        Under the standard and block rules every stay has a range of its own: what a former stay at the same
        draft left under way must not meet this stay's tokens. Were a chain kept where two draws agree, and
        dropped where they do not, its tokens would no longer have the law that they were drawn from.
        """
        if self.rule is VerificationRule.COUPLED:
            return range(MAX_REVISIONS)
        first = (self.draft_seed >> 48) * REVISIONS_PER_STAY
        return range(first, first + REVISIONS_PER_STAY)


@dataclass(frozen=True, slots=True)
class Verdict:
    sequence_id: str
    epoch: int
    base_position: int
    num_accepted: int
    committed_token_ids: tuple[int, ...]
    """Everything committed since the last verdict. May be empty: then only ``window`` changes."""
    window: int
    branch_tokens: int = 0
    """How long a tail it is worth preparing for each likely correction of the chain; 0 = for none."""
    tail_tokens: int = 0
    """How many tokens past the committed ones the target waits for."""


@dataclass(frozen=True, slots=True)
class Close:
    sequence_id: str
    epoch: int
