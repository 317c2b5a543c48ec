"""One sequence as its target sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from paceline.actors.engine.chain import DraftChain
from paceline.actors.engine.constraint import ConstraintMatcher
from paceline.actors.engine.estimates import AcceptanceEstimate
from paceline.actors.engine.messages import Submit
from paceline.actors.engine.parameters import (
    SamplingParams,
    SpeculationStats,
    StoppingParams,
    VerificationRule,
)
from paceline.actors.engine.prefix_cache import BlockKey, CachedPrefix
from paceline.actors.engine.processors import LogitProcessors
from paceline.actors.engine.proposer import NgramProposer

MAX_TOLD = 16


class SequenceStatus(Enum):
    WAITING = "waiting"
    """Not admitted yet, or preempted: holds no blocks."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Drafting:
    """A sequence's side of its assignment to one draft."""

    peer: str
    reported_length: int
    """The draft has been told the committed tokens below this position."""
    window: int
    """What the draft was told last: how many tokens past the committed ones it may hold."""
    chain: DraftChain
    acceptance: AcceptanceEstimate
    num_accepted: int = 0
    """Tokens of this draft's chain accepted since the last verdict."""
    news_at: float = 0.0
    """When it was last heard of."""
    told: dict[int, float] = field(default_factory=dict)
    """The last few verdicts: when the draft was told of the committed tokens below each position. An answer
    begins there."""
    told_at: float = 0.0
    """When it was sent its last verdict."""
    resumes_at: int | None = None
    """Where it goes on, having filled its window before it was told of more; None once it did."""
    silent: bool = False
    """It let a deadline pass: not waited for until it is heard of again."""
    branch_tokens: int = 0
    """What it was told last: how long a tail to prepare for likely corrections."""
    catching_up: bool = False
    """It was told to go on after a rest, and has not been heard of since."""

    @property
    def owes_answer(self) -> bool:
        """Whether it had nothing valid left to do before its last verdict, so that what comes next takes a
        round trip."""
        return self.chain.broken or self.resumes_at is not None

    @property
    def busy(self) -> bool:
        """Whether, as far as is known here, the draft has something to compute for it."""
        return len(self.chain.token_ids) < self.window or self.branch_tokens > 0

    def tell(self, length: int, window: int, now: float, branch_tokens: int = 0) -> None:
        """It is sent a verdict: ``length`` tokens are committed, and so many more it may hold."""
        if self.chain.started and length + len(self.chain.token_ids) >= self.reported_length + self.window:
            self.resumes_at = max(length, self.reported_length + self.window)
        if len(self.told) >= MAX_TOLD:
            del self.told[min(self.told)]
        self.told[length] = self.told_at = now
        self.reported_length = length
        self.num_accepted = 0
        self.catching_up = window > 0 and (self.catching_up or self.window == 0)
        self.window = window
        self.branch_tokens = branch_tokens

    def hear(self, base_position: int, is_new_revision: bool, now: float) -> float | None:
        """Candidates came that say something of the chain.

        Returns:
            Seconds since the draft was told what they answer; None where they answer nothing.
        """
        self.catching_up = False
        told_at: float | None = None
        if is_new_revision:
            told_at = self.told.get(base_position)
        elif base_position == self.resumes_at:
            told_at = self.told.get(base_position, self.told_at)
        if is_new_revision or (self.resumes_at is not None and base_position >= self.resumes_at):
            self.resumes_at = None
        for position in [position for position in self.told if position <= base_position]:
            del self.told[position]
        return None if told_at is None else now - told_at


@dataclass(slots=True, eq=False)
class TargetSequence:
    """Invariants while running: ``0 <= num_computed_tokens < len(token_ids)`` (the last committed token is
    computed by the next step), and ``block_table`` has a slot for every computed token. While waiting:
    nothing is computed and no block is held."""

    sequence_id: str
    epoch: int
    gateway: str
    """Peer that submitted it and hears of it."""
    token_ids: list[int]
    """Committed: prompt, then completion."""
    prompt_length: int
    sampling: SamplingParams
    stopping: StoppingParams
    max_tail: int
    """Longest tail this sequence may ever have verified: the request's bound and the target's."""
    proposer: NgramProposer
    processors: LogitProcessors | None = None
    """What the request does to the logits of its positions; None: nothing."""
    matcher: ConstraintMatcher | None = None
    """Of the request's constraint, shared with ``processors``, which advance it; None: no constraint."""
    logprobs: int | None = None
    """Top entries to report for each committed token; None = no logprobs."""
    rule: VerificationRule = VerificationRule.COUPLED
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    prefix: CachedPrefix = field(default_factory=CachedPrefix)
    """Of the prefix cache: while running, the head of ``block_table``; while waiting, what was found last."""
    missing: BlockKey | None = None
    """While waiting: the first full block that was not found in the prefix cache."""
    cached_prompt_tokens: int | None = None
    """Prompt tokens that were in the prefix cache when it was first admitted; None before."""
    priority: int = 0
    """Lower = served earlier; see ``priority``."""
    turn: tuple[float, int] = (0.0, 0)
    """Its place in the scheduler's order: ``turn_of`` it, then the number of its arrival."""
    deadline: float = math.inf
    """By the engine's clock: when it is ended by itself, whether anybody cancels it or not."""
    waiting_since: float = 0.0
    """By the engine's clock, while waiting: since it arrived or was preempted."""
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    drafting: Drafting | None = None
    barred_drafts: set[str] = field(default_factory=set)
    """Peers of drafts that must not be given this sequence (again): they declined it or misbehaved."""
    former_drafts: set[str] = field(default_factory=set)
    """Peers of drafts that held this sequence at this epoch before."""
    num_stays: int = 0
    """How often it was given to a draft at this epoch."""
    tail_target: int = 0
    """Best tail length at present; a step is not delayed for more."""

    @classmethod
    def from_submit(
        cls,
        gateway: str,
        event: Submit,
        max_tail: int,
        proposer: NgramProposer,
        processors: LogitProcessors | None = None,
        matcher: ConstraintMatcher | None = None,
        now: float = 0.0,
    ) -> TargetSequence:
        """``now``: by the engine's clock; its time to live begins."""
        return cls(
            sequence_id=event.sequence_id,
            epoch=event.epoch,
            gateway=gateway,
            token_ids=list(event.token_ids),
            prompt_length=event.prompt_length,
            sampling=event.sampling,
            stopping=event.stopping,
            max_tail=max_tail,
            proposer=proposer,
            processors=processors,
            matcher=matcher,
            logprobs=event.logprobs,
            rule=event.speculation.rule,
            priority=event.priority,
            deadline=math.inf if event.ttl_seconds is None else now + event.ttl_seconds,
        )

    @property
    def shares_noise(self) -> bool:
        """Whether target and draft draw with the same noise, so that tails are compared with the target's own
        samples. Greedy ones are under every rule: their law holds one token."""
        return self.rule is VerificationRule.COUPLED or self.sampling.greedy

    @property
    def num_pending_tokens(self) -> int:
        """The gap between known and computed tokens. At least 1."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Only the last committed token is to be computed, so that a tail may follow it."""
        return self.num_pending_tokens == 1

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def tail_room(self) -> int:
        """Longest tail that leaves a place for the bonus token before ``max_tokens``."""
        return max(self.stopping.max_tokens - self.num_completion_tokens - 1, 0)

    @property
    def tail_limit(self) -> int:
        """Longest tail of the next step."""
        return min(self.max_tail, self.tail_room)
