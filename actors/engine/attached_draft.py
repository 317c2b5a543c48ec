"""One attached draft as its target knows it: what it holds, how fast it is, how often it is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from paceline.actors.engine.balance import Occupancy
from paceline.actors.engine.estimates import READ_TOKENS, AcceptanceEstimate, DraftStepCost, RecentMedian
from paceline.actors.engine.messages import DraftHello
from paceline.actors.engine.reading import Trials
from paceline.actors.engine.sequence import TargetSequence
from paceline.actors.engine.target_output import DraftStatus

TRUST_KEPT = 0.98
"""Per step."""
READ_SHARE = 4
"""A step of so many times the sequences that it has tokens to make for mostly reads."""


class Answer(NamedTuple):
    """Candidates that answer a verdict."""

    seconds: float
    """Since the verdict was sent."""
    prepared: bool


@dataclass(frozen=True, slots=True)
class NextStep:
    """Of a draft, in seconds."""

    expected: float
    bound: float
    """The most that it takes, if all goes well."""


class Pace(NamedTuple):
    """Of a draft with all its sequences, in seconds."""

    seconds_per_token: float
    """Of a step; 0.0 while nothing is known."""
    rtt_seconds: float
    """What a fresh start costs beyond the draft's own step."""


@dataclass(slots=True, eq=False)
class Draft:
    peer: str
    hello: DraftHello
    sequences: dict[str, TargetSequence] = field(default_factory=dict)
    step_cost: DraftStepCost = field(default_factory=DraftStepCost)
    read_seconds: RecentMedian = field(default_factory=RecentMedian)
    """Of steps that read much, by their tokens."""
    response_seconds: RecentMedian = field(default_factory=RecentMedian)
    """From a verdict to the candidates that answer it, where they were not prepared: round trip and the
    draft's next step."""
    prepared_seconds: RecentMedian = field(default_factory=RecentMedian)
    """The same where they were prepared: round trip and whatever step is on."""
    preparedness: AcceptanceEstimate = field(
        default_factory=lambda: AcceptanceEstimate(prior=0.0, prior_trials=8.0, decay=0.98)
    )
    """How often a corrected token was among those that it had prepared a tail for."""
    num_others: int = 0
    """Sequences of other targets that it is busy with, by its last word."""
    trials: Trials = field(default_factory=Trials)
    _is_tried: bool = False
    """No answer has come since the last trial began."""
    trust: float = 1.0
    """In what is known of its speed. While it rests nothing is learnt, and what slowed it down may be over:
    doubt grows until it is worth another try."""
    acceptance: AcceptanceEstimate = field(default_factory=lambda: AcceptanceEstimate(decay=0.99))

    @property
    def load(self) -> Occupancy:
        return Occupancy(len(self.sequences), self.hello.capacity)

    @property
    def num_awake(self) -> int:
        """Sequences of this target that it has tokens to make for, as far as is known here."""
        drafted = (sequence.drafting for sequence in self.sequences.values())
        return sum(item is not None and len(item.chain.token_ids) < item.window for item in drafted)

    @property
    def pace(self) -> Pace:
        """As it is expected to be now."""
        return self._pace(self.trust)

    @property
    def known_pace(self) -> Pace:
        """As it was when it was last heard of."""
        return self._pace(1.0)

    def _pace(self, trust: float) -> Pace:
        step = trust * self.step_cost.expected(self._batch(len(self.sequences), trust))
        return Pace(step, max(trust * self._latency(step) - step, 0.0))

    def _latency(self, step_seconds: float) -> float:
        return self.response_seconds.value or 2.0 * step_seconds

    def reading_seconds(self, num_tokens: int) -> float:
        """Until it has read so many tokens; nothing before it has read any."""
        return (self.read_seconds.value or 0.0) * num_tokens

    def next_step(self) -> NextStep:
        """How long its next step takes."""
        num_tokens = self._batch(self.num_awake, self.trust)
        return NextStep(self.step_cost.expected(num_tokens), self.step_cost.bound(num_tokens))

    def _batch(self, num_ours: int, trust: float) -> int:
        return max(num_ours + round(trust * self.num_others), 1)

    def hear(
        self,
        num_tokens: int,
        seconds: float,
        answers: Sequence[Answer],
        num_awake: int,
        *,
        disturbed: bool = False,
    ) -> None:
        """A message of it has been read.

        Args:
            num_tokens, seconds: of the step that it is of; 0.0 seconds where unknown.
            answers: those to verdicts that it holds. They count as one, as they were made in one step.
            num_awake: for how many sequences of all targets it had tokens to make.
            disturbed: the target computed meanwhile, on hardware that both use.
        """
        self.trust = 1.0
        self.trials.note_news()
        if seconds > 0.0:
            if num_tokens >= max(READ_TOKENS, READ_SHARE * num_awake):
                others = self.step_cost.expected(max(num_awake, 1))
                self.read_seconds.add(max(seconds - others, 0.0) / num_tokens)
            self.step_cost.record(num_tokens, seconds, disturbed=disturbed)
        if self._is_tried and any(not answer.prepared for answer in answers):
            self._is_tried = False
            self.response_seconds = RecentMedian()
        for prepared, known in ((False, self.response_seconds), (True, self.prepared_seconds)):
            times = [answer.seconds for answer in answers if answer.prepared is prepared]
            if times:
                known.add(median_low(times))
        self.num_others = max(num_awake - self.num_awake, 0)

    def begin_trial(self, now: float) -> None:
        """It is asked to find out what it is like now: its next answer counts instead of those before."""
        self.trials.begin(now)
        self._is_tried = True

    def doubt(self, now: float) -> None:
        """A step has passed in which it rested."""
        self.trust *= TRUST_KEPT
        self.trials.note_rest(now)

    @property
    def latency(self) -> float:
        """Expected time from a verdict to the next candidates; before it was measured, two steps."""
        return self._latency(self.pace.seconds_per_token)

    def can_follow(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens leaves it room to propose any."""
        return num_tokens < self.hello.max_model_len

    def status(self) -> DraftStatus:
        return DraftStatus(
            peer=self.peer,
            draft_id=self.hello.draft_id,
            model=self.hello.model,
            method=self.hello.method,
            capacity=self.hello.capacity,
            num_sequences=len(self.sequences),
            acceptance=self.acceptance.rate,
            num_tested_total=self.acceptance.num_trials,
            num_foretold_total=self.acceptance.num_accepted,
            step_seconds=self.pace.seconds_per_token,
            response_seconds=self.response_seconds.value or 0.0,
        )
