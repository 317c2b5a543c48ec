"""What the target engine hands to its shell: messages per peer, and its counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.actors.engine.config import Hardware
from paceline.actors.engine.messages import Close, Committed, Finished, Open, Verdict
from paceline.actors.engine.step_times import StepTimesSnapshot


@dataclass(slots=True)
class GatewayOutput:
    """For one gateway. ``committed`` goes first: a sequence's last tokens precede its end."""

    committed: list[Committed] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


@dataclass(slots=True)
class DraftOutput:
    """For one draft. To be applied in the order closes, opens, verdicts: what is closed makes the room that
    the opens count on. Never both an Open and a Close of the same sequence and epoch."""

    opens: list[Open] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    closes: list[Close] = field(default_factory=list)


@dataclass(slots=True)
class TargetOutbox:
    """Keyed by peer. Peers without news are left out."""

    gateways: dict[str, GatewayOutput] = field(default_factory=dict)
    drafts: dict[str, DraftOutput] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not self.gateways and not self.drafts


@dataclass(frozen=True, slots=True)
class DraftStatus:
    """One attached draft."""

    peer: str
    draft_id: str
    model: str
    method: str
    capacity: int
    num_sequences: int
    acceptance: float
    """Recent acceptance rate per tested position, over all its sequences."""
    num_tested_total: int
    """Positions at which its chain was compared with what was committed, up to the first difference."""
    num_foretold_total: int
    """Of those, where the two agreed."""
    step_seconds: float
    """Median time of its recent steps; 0.0 before the first."""
    response_seconds: float
    """Median time from a verdict to the candidates that answer it; 0.0 before the first."""


@dataclass(frozen=True, slots=True)
class TargetSnapshot:
    """Gauges, and counters since the start (``num_…_total``), for status and metrics."""

    num_running: int
    num_waiting: int
    queue_seconds: float
    """How long the sequence has been waiting that has waited longest; 0.0 while none waits."""
    num_wanting_draft: int
    """Running sequences for which a draft pays at this load, those that have one included."""
    num_drafted: int
    """Running sequences that have a draft."""
    free_blocks: int
    total_blocks: int
    num_cached_blocks: int
    """Blocks in the prefix cache, those in use and those that are free until they are found."""
    draining: bool
    fault: str
    """Why the engine is unfit to go on; empty while it is healthy."""
    hardware: Hardware
    """Shared or separate, as configured or found; AUTO while not known."""
    overlap_ratio: float
    """Step time with a draft busy / at rest; 0.0 while not known."""
    drafting_gain: float
    """Tokens that steps with drafts committed / what the same time brings without; 0.0 while not known."""
    drafts_rest: bool
    """Drafts rest because that gain was below 1."""
    step_seconds: float
    """Time of the last step."""
    step_times: StepTimesSnapshot
    """What the last steps spent beside the model."""
    drafts: tuple[DraftStatus, ...]
    num_steps_total: int
    num_computed_tokens_total: int
    """Tokens computed, tails and recomputation included."""
    num_prompt_tokens_total: int
    """Tokens of submitted sequences (for a resumed one, its completion so far as well)."""
    num_prefix_cache_queries_total: int
    """Tokens of admitted sequences that were looked for in the prefix cache, the first time."""
    num_prefix_cache_hits_total: int
    """Those that were found, and not computed again."""
    num_committed_tokens_total: int
    """Completion tokens."""
    num_rounds_total: int
    """Steps of a sequence that verified at least one draft token."""
    num_draft_tokens_total: int
    """Draft tokens verified, from drafts and from prompt lookup."""
    num_accepted_tokens_total: int
    """Of those, accepted; without corrected and bonus tokens."""
    num_accepted_per_position_total: tuple[int, ...]
    """The same by the token's place in its tail, the first one first."""
    num_draft_turns_total: int
    """Steps of a sequence whose draft had been asked for tokens, and had begun with it."""
    num_late_drafts_total: int
    """Of those, steps that began without any."""
    num_lookup_tokens_total: int
    """Draft tokens verified that came from prompt lookup."""
    num_accepted_lookup_tokens_total: int
    num_finished_total: int
    num_preemptions_total: int
    num_stale_messages_total: int
    """Candidates dropped: old epoch, dead revision, unknown sequence or not this draft's sequence."""
    num_quarantined_total: int
    """Sequences taken from a draft because it sent impossible tokens."""
