"""Whether drafts pay, by what steps have shown: the last word over what ``pacing`` foretells.

Forecasts leave out what they cannot know: processors that target, draft and streams have in common, the
interpreter's lock, a network that is slower than its fastest message. So the tokens that steps with drafts
commit are compared with those that the same time would have brought without. Where they are fewer, drafts
rest, and are tried again later.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

MEASURED_STEPS = 24
"""Steps with drafts before they are judged, those included in which drafts only catch up: they cost, too."""
MEASURED_ROUNDS = 128
"""The same of sequences, added over the steps: many at a time show sooner what drafts bring."""
FEWEST_STEPS = 8
CLEARLY = 3.0
"""As few do where the loss is so many standard errors large."""
REMEMBERED_STEPS = 64
"""By which a load is judged."""
LONGEST_STEP = 2.5
"""A step counts as that many medians of its kind at most: what holds up a process (a stopped machine, a page
that is read from a disk) is neither the drafts' doing nor to be set against theirs."""
PLAIN_STEPS = 8
"""Steps without drafts that show what such steps take."""
LEAST_GAIN = 1.02
"""Below it drafts are not worth their machines."""
SURE_GAIN = 3.0
"""From here on it does not matter what steps without them take beside the model."""
PLAIN_KNOWN_STEPS = 4096
"""Steps for which it is known."""
SHORTEST_REST, LONGEST_REST = 64, 1024
"""Steps; each trial that fails doubles the rest."""
TRIAL_SHARE = 0.02
"""Of the time that trials may lose: where one loses much, what follows is longer from the start."""
FEW_SEQUENCES = 8
DEVIATION = 0.5
"""Of the tokens that a sequence commits in a step with drafts, relative to their mean."""


class _Recent:
    """The last steps with drafts, or the last without."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=REMEMBERED_STEPS)
        """Sequences, the tokens that they committed, and for how many steps of the model it took."""

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, num_sequences: int, num_tokens: int, model_steps: float) -> None:
        self._steps.append((num_sequences, num_tokens, model_steps))

    @property
    def rounds(self) -> int:
        """Sequences, added over the steps."""
        return sum(num_sequences for num_sequences, _, _ in self._steps)

    @property
    def model_steps(self) -> float:
        """For how many steps of the model they took in all, outliers cut."""
        return sum(self._cut())

    @property
    def efficiency(self) -> float:
        """The tokens committed / those of the same time, were a token per sequence and step all, and nothing
        done between steps."""
        foretold = sum(step[0] * length for step, length in zip(self._steps, self._cut(), strict=True))
        return sum(num_tokens for _, num_tokens, _ in self._steps) / max(foretold, 1e-9)

    def _cut(self) -> list[float]:
        lengths = [model_steps for _, _, model_steps in self._steps]
        longest = LONGEST_STEP * sorted(lengths)[(len(lengths) - 1) // 2]
        return [min(length, longest) for length in lengths]


@dataclass(slots=True)
class _Load:
    """About so many sequences at once."""

    size: int = 0
    """Bit length of their number."""
    plain: _Recent = field(default_factory=_Recent)
    """Without drafts."""
    plain_at: int = 0
    """The last step without."""
    drafted: _Recent = field(default_factory=_Recent)
    """With drafts, since the last rest."""
    gain: float | None = None
    least_rest: int = SHORTEST_REST
    """What the last trial was worth."""
    next_rest: int = SHORTEST_REST
    rest_from: int = 0
    rest_until: int = 0
    """In steps that could be drafted, at whatever load."""
    num_arrivals: int = 0
    """Since the rest began."""

    @property
    def loses(self) -> bool:
        """As last judged."""
        return self.gain is not None and self.gain < LEAST_GAIN

    @property
    def is_plain_known(self) -> bool:
        return len(self.plain) >= PLAIN_STEPS

    def measured_gain(self) -> float:
        return self.drafted.efficiency / (self.plain.efficiency if self.is_plain_known else 1.0)


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
            load.drafted = _Recent()

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
        load.drafted.add(num_sequences, num_tokens, model_steps)
        num_steps, rounds = len(load.drafted), load.drafted.rounds
        error = DEVIATION / math.sqrt(rounds)
        if num_steps < FEWEST_STEPS:
            return
        if num_steps >= MEASURED_STEPS or rounds >= MEASURED_ROUNDS:
            self._judge(load, error)
        elif load.measured_gain() < LEAST_GAIN - CLEARLY * error:
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
        if not load.is_plain_known:
            if load.gain < SURE_GAIN:
                self._begin_rest(load, PLAIN_STEPS)
        elif self._num_steps - load.plain_at > PLAIN_KNOWN_STEPS:
            self._begin_rest(load, PLAIN_STEPS)
        elif load.gain < LEAST_GAIN - error:
            load.least_rest = _least_rest(load.drafted, load.gain)
            rest = max(load.next_rest, load.least_rest)
            self._begin_rest(load, rest)
            load.next_rest = min(2 * rest, LONGEST_REST)
        elif load.gain > LEAST_GAIN:
            load.next_rest = SHORTEST_REST

    def _begin_rest(self, load: _Load, num_steps: int) -> None:
        load.rest_from, load.rest_until = self._num_draftable, self._num_draftable + num_steps
        load.num_arrivals = 0
        load.drafted = _Recent()

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


def _least_rest(drafted: _Recent, gain: float) -> int:
    """Plain steps of which those that a trial has lost are no more than ``TRIAL_SHARE``."""
    lost = drafted.model_steps * max(1.0 - gain, 0.0)
    return min(max(round(lost / TRIAL_SHARE), SHORTEST_REST), LONGEST_REST)
