"""Whether drafts pay, by what steps have shown: the last word over what ``pacing`` foretells.

Forecasts leave out what they cannot know: processors that target, draft and streams have in common, the
interpreter's lock, a network that is slower than its fastest message. So the tokens that steps with drafts
commit are compared with those that the same time would have brought without. Where they are fewer, drafts
rest, and are tried again later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.actors.engine.recent_steps import LONGEST_STEP, RecentSteps

MEASURED_STEPS = 24
"""Steps with drafts before they are judged."""
MEASURED_ROUNDS = 128
"""The same of sequences, added over the steps: many at a time show sooner what drafts bring."""
FEWEST_STEPS = 8
CLEARLY = 3.0
"""As few do where the loss is so many standard errors large."""
FEWEST_LOST_STEPS = 3
MOST_LOST = 20.0
"""As few as those do where they have lost so many plain steps already."""
CATCH_UP_STEPS, CATCH_UP_LOSS = 0.25, 0.04
"""Of the steps of a rest. After it drafts have to read what was committed meanwhile. Steps in which they do
say nothing of what drafts are worth, as long as there are no more of them, and they lose no more time."""
PLAIN_STEPS = 8
"""Steps without drafts that show what such steps take."""
LEAST_GAIN = 1.02
"""Below it drafts are not worth their machines."""
JUDGED_EVERY = 4
"""Steps from one judgement to the next, where drafts go on."""
SURE_GAIN = 3.0
"""From here on it does not matter what steps without them take beside the model."""
PLAIN_KNOWN_STEPS = 4096
"""Steps for which it is known."""
SHORTEST_REST, LONGEST_REST = 64, 1024
"""Steps; each trial that fails doubles the rest."""
TRIAL_SHARE = 0.02
"""Of the time that trials may lose: where one loses much, what follows is longer from the start."""
LONGEST_LEAST_REST = 4 * LONGEST_REST
"""The longest that follows from such a loss."""
FEW_SEQUENCES = 8
DEVIATION = 0.5
"""Of the tokens that a sequence commits in a step with drafts, relative to their mean."""


@dataclass(slots=True)
class _Load:
    """About so many sequences at once."""

    size: int = 0
    """Bit length of their number."""
    plain: RecentSteps = field(default_factory=RecentSteps)
    """Without drafts."""
    plain_at: int = 0
    """The last step without."""
    drafted: RecentSteps = field(default_factory=RecentSteps)
    """With drafts, since the last rest."""
    judge_from: int = 0
    """The step with which drafts that go on are judged again."""
    gain: float | None = None
    least_rest: int = SHORTEST_REST
    """What the last trial was worth."""
    next_rest: int = SHORTEST_REST
    rest_from: int = 0
    rest_until: int = 0
    """In steps that could be drafted, at whatever load."""
    num_arrivals: int = 0
    """Since the rest began."""
    num_catch_ups: int = 0
    catch_up_loss: float = 0.0
    """Steps since the rest in which drafts only caught up, and plain steps that were lost by them."""

    @property
    def loses(self) -> bool:
        """As last judged."""
        return self.gain is not None and self.gain < LEAST_GAIN

    @property
    def is_plain_known(self) -> bool:
        return len(self.plain) >= PLAIN_STEPS

    @property
    def plain_efficiency(self) -> float:
        return self.plain.efficiency if self.is_plain_known else 1.0

    def measured_gain(self) -> float:
        return self.drafted.efficiency / self.plain_efficiency

    def num_lost(self, gain: float) -> float:
        """Plain steps in whose time the steps with drafts brought nothing."""
        return self.drafted.model_steps * max(1.0 - gain, 0.0)

    def forgives(self, num_sequences: int, num_tokens: int, model_steps: float) -> bool:
        """Whether a step in which drafts only catch up is none to judge them by."""
        needed = num_tokens / (num_sequences * self.plain_efficiency)
        loss = self.catch_up_loss + min(max(model_steps - needed, 0.0), LONGEST_STEP)
        rest = self.rest_until - self.rest_from
        if self.num_catch_ups >= CATCH_UP_STEPS * rest or loss > CATCH_UP_LOSS * rest:
            return False
        self.num_catch_ups += 1
        self.catch_up_loss = loss
        return True


class Payoff:
    """Decides whether drafts rest."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        """By size."""
        self._load = _Load()
        """The present one."""
        self._num_steps = 0
        self._num_draftable = 0
        self._draft_noted_at: int | None = None

    @property
    def resting(self) -> bool:
        """At the present load. One that has lost is not tried while a smaller one rests that has, too: loads
        that take turns would each have trials of their own, and lose many times what one may."""
        load = self._load
        return self._rests(load) or (
            load.loses
            and any(
                other.size < load.size and other.loses and self._rests(other)
                for other in self._loads.values()
            )
        )

    @property
    def gain(self) -> float | None:
        """Tokens with drafts / without at the present load, as last judged; None before that."""
        return self._load.gain

    def expect(self, num_running: int) -> None:
        """So many sequences will be in the next step: that is the present load. None: the last one stays."""
        if num_running:
            self._load = self._load_of(num_running)

    def note_arrival(self) -> None:
        """A sequence has come. Others than those that the drafts were judged by may fare better."""
        self._load.num_arrivals += 1

    def note_draft(self) -> None:
        """A draft has come, which may be better than those that were judged: no load rests any more. Not so
        where drafts come and go."""
        noted_at, self._draft_noted_at = self._draft_noted_at, self._num_draftable
        if noted_at is not None and self._num_draftable - noted_at < LONGEST_REST:
            return
        for load in self._loads.values():
            load.rest_until = 0
            load.least_rest = load.next_rest = SHORTEST_REST
            load.drafted = RecentSteps()

    def record(
        self,
        *,
        num_running: int,
        num_sequences: int,
        num_tokens: int,
        num_prompt_tokens: int,
        seconds: float,
        plain_seconds: float,
        drafting: bool,
        draftable: bool = True,
        catching_up: bool = False,
    ) -> None:
        """One step.

        Args:
            num_running: sequences, those whose prompts are being computed included: the load.
            num_sequences: that committed tokens.
            num_tokens: that they committed.
            num_prompt_tokens: computed besides.
            seconds: from the end of the step before to its own end.
            plain_seconds: what the model takes for such a step without tails; 0.0 where nobody knows.
            drafting: any draft was asked for tokens.
            draftable: any could have been. A rest is not over by steps of requests that want no drafts.
            catching_up: most of what drafts were asked for has to wait until they have read what was
                committed while they rested.
        """
        self._num_steps += 1
        if not num_sequences or plain_seconds <= 0.0:
            return
        self.expect(num_running)
        load = self._load
        resting = self.resting
        self._num_draftable += draftable
        model_steps = seconds / plain_seconds
        if not drafting:
            # Prompts are read before drafts begin. Unless they rest, such a step is none that they would have
            # been in.
            if resting or num_prompt_tokens <= num_sequences:
                load.plain.add(num_sequences, num_tokens, model_steps)
                load.plain_at = self._num_steps
            if resting and draftable:
                self._shorten_rest(load, num_running)
            return
        if resting:
            return  # it begins with what was asked for before
        if catching_up and load.forgives(num_sequences, num_tokens, model_steps):
            return
        load.drafted.add(num_sequences, num_tokens, model_steps)
        num_steps = len(load.drafted)
        if num_steps < FEWEST_LOST_STEPS or self._num_steps < load.judge_from:
            return
        rounds = load.drafted.rounds
        error = DEVIATION / math.sqrt(rounds)
        if num_steps >= MEASURED_STEPS or (num_steps >= FEWEST_STEPS and rounds >= MEASURED_ROUNDS):
            self._judge(load, error)
            return
        gain = load.measured_gain()
        if gain < LEAST_GAIN - CLEARLY * error and (
            num_steps >= FEWEST_STEPS or load.num_lost(gain) >= MOST_LOST
        ):
            self._judge(load, CLEARLY * error)

    def _load_of(self, num_running: int) -> _Load:
        size = num_running.bit_length()
        load = self._loads.get(size)
        if load is None:
            load = self._loads[size] = _Load(size)
            judged = [other for other in self._loads if other < size and self._loads[other].gain is not None]
            if judged and self._loads[max(judged)].loses:
                # What does not pay for fewer will hardly pay for more. The further away, the less that says.
                rest = self._loads[max(judged)].least_rest >> (size - max(judged) - 1)
                self._begin_rest(load, max(rest, SHORTEST_REST))
        return load

    def _judge(self, load: _Load, error: float) -> None:
        load.gain = load.measured_gain()
        load.judge_from = self._num_steps + JUDGED_EVERY
        if not load.is_plain_known:
            if load.gain < SURE_GAIN:
                self._begin_rest(load, PLAIN_STEPS)
        elif self._num_steps - load.plain_at > PLAIN_KNOWN_STEPS:
            self._begin_rest(load, PLAIN_STEPS)
        elif load.gain < LEAST_GAIN - error:
            load.least_rest = _least_rest(load.num_lost(load.gain) + load.catch_up_loss)
            rest = max(load.next_rest, load.least_rest)
            self._begin_rest(load, rest)
            load.next_rest = min(2 * rest, LONGEST_REST)
        elif load.gain > LEAST_GAIN:
            load.next_rest = SHORTEST_REST

    def _begin_rest(self, load: _Load, num_steps: int) -> None:
        load.rest_from, load.rest_until = self._num_draftable, self._num_draftable + num_steps
        load.num_arrivals = load.num_catch_ups = load.judge_from = 0
        load.catch_up_loss = 0.0
        load.drafted.restart()

    def _rests(self, load: _Load) -> bool:
        return load.rest_until > self._num_draftable

    def _shorten_rest(self, load: _Load, num_running: int) -> None:
        """None of those that the drafts were judged by is left. (Large crowds are all alike.)"""
        num_rested = self._num_draftable - load.rest_from
        if (
            num_running <= FEW_SEQUENCES
            and num_rested >= load.least_rest
            and load.num_arrivals >= num_running
        ):
            load.rest_until, load.gain = self._num_draftable, None


def _least_rest(num_lost: float) -> int:
    """Plain steps of which those that a trial has lost are no more than ``TRIAL_SHARE``."""
    return min(max(round(num_lost / TRIAL_SHARE), SHORTEST_REST), LONGEST_LEAST_REST)
