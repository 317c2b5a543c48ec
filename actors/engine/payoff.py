"""Whether drafts pay, by what steps have shown: the last word over what ``pacing`` foretells.

Forecasts leave out what they cannot know: processors that target, draft and streams have in common, the
interpreter's lock, a network that is slower than its fastest message. So the tokens that steps with drafts
commit are compared with those that the same time would have brought without. Where they are fewer, drafts
rest, and are tried again later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MEASURED_STEPS = 24
"""Steps with drafts before they are judged, those included in which drafts only catch up: they cost, too."""
MEASURED_ROUNDS = 128
"""The same of sequences, added over the steps: many at a time show sooner what drafts bring."""
FEWEST_STEPS = 8
CLEARLY = 3.0
"""As few do where the loss is so many standard errors large."""
REMEMBERED_STEPS = 64
"""Steps after which what was measured counts half."""
PLAIN_STEPS = 8
"""Steps without drafts that show what such steps take."""
LEAST_GAIN = 1.02
"""Below it drafts are not worth their machines."""
SURE_GAIN = 3.0
"""From here on it does not matter how exactly that is known."""
PLAIN_KNOWN_STEPS = 4096
"""Steps for which it is known."""
SHORTEST_REST, LONGEST_REST = 64, 1024
"""Steps; each trial that fails doubles the rest."""
TRIAL_SHARE = 0.02
"""Of the time that trials may lose: where one loses much, what follows is longer from the start."""
FEW_SEQUENCES = 8
DEVIATION = 0.5
"""Of the tokens that a sequence commits in a step with drafts, relative to their mean."""


@dataclass(slots=True)
class _Sums:
    """Of steps with drafts, or without; what is past counts ever less."""

    steps: float = 0.0
    rounds: float = 0.0
    """Sequences, added over the steps."""
    tokens: float = 0.0
    foretold: float = 0.0
    """What the same time would have brought, were a token per sequence and step all, and nothing done between
    steps."""

    def add(self, num_sequences: int, num_tokens: int, foretold: float) -> None:
        if self.steps >= REMEMBERED_STEPS:
            self.steps /= 2.0
            self.rounds /= 2.0
            self.tokens /= 2.0
            self.foretold /= 2.0
        self.steps += 1.0
        self.rounds += num_sequences
        self.tokens += num_tokens
        self.foretold += foretold

    @property
    def efficiency(self) -> float:
        """Tokens / foretold."""
        return self.tokens / max(self.foretold, 1e-9)


@dataclass(slots=True)
class _Load:
    """About so many sequences at once."""

    plain: _Sums = field(default_factory=_Sums)
    """Without drafts."""
    plain_at: int | None = None
    """The last step without."""
    sums: _Sums = field(default_factory=_Sums)
    """With drafts."""
    gain: float | None = None
    least_rest: int = SHORTEST_REST
    """What the last trial was worth."""
    next_rest: int = SHORTEST_REST
    rest_left: int = 0
    num_rested: int = 0
    num_arrivals: int = 0
    """Since the rest began."""


class Payoff:
    """Decides whether drafts rest."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        """By the bit length of the number of sequences."""
        self._load = _Load()
        """The present one."""
        self._num_steps = 0

    @property
    def resting(self) -> bool:
        return self._load.rest_left > 0

    @property
    def gain(self) -> float | None:
        """Tokens with drafts / without at the present load, as last judged; None before that."""
        return self._load.gain

    def note_arrival(self) -> None:
        """A sequence has come. Others than those that the drafts were judged by may fare better."""
        self._load.num_arrivals += 1

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
        load = self._load = self._load_of(num_running)
        foretold = num_sequences * seconds / plain_seconds
        if not drafting:
            # Prompts are read before drafts begin. Unless they rest, such a step is none that they would have
            # been in.
            if load.rest_left or num_prompt_tokens <= num_sequences:
                load.plain.add(num_sequences, num_tokens, foretold)
                load.plain_at = self._num_steps
            if draftable:
                _pass_rest(load, num_running)
            return
        sums = load.sums
        sums.add(num_sequences, num_tokens, foretold)
        if load.rest_left:
            return  # the rest begins with what was asked for before
        error = DEVIATION / math.sqrt(sums.rounds)
        if sums.steps < FEWEST_STEPS:
            return
        if sums.steps >= MEASURED_STEPS or sums.rounds >= MEASURED_ROUNDS:
            self._judge(load, error)
        elif _gain(load) < LEAST_GAIN - CLEARLY * error:
            self._judge(load, CLEARLY * error)

    def _load_of(self, num_running: int) -> _Load:
        size = num_running.bit_length()
        load = self._loads.get(size)
        if load is None:
            load = self._loads[size] = _Load()
            judged = [other for other in self._loads if other < size and self._loads[other].gain is not None]
            if judged and (self._loads[max(judged)].gain or LEAST_GAIN) < LEAST_GAIN:
                # What does not pay for fewer will hardly pay for more.
                _begin_rest(load, self._loads[max(judged)].least_rest)
        return load

    def _judge(self, load: _Load, error: float) -> None:
        load.gain = _gain(load)
        known_at = load.plain_at if load.plain.steps >= PLAIN_STEPS else None
        if known_at is None or self._num_steps - known_at > PLAIN_KNOWN_STEPS:
            if load.gain < SURE_GAIN:
                _begin_rest(load, PLAIN_STEPS)
        elif load.gain < LEAST_GAIN - error:
            load.least_rest = _least_rest(load.sums, load.gain)
            rest = max(load.next_rest, load.least_rest)
            _begin_rest(load, rest)
            load.next_rest = min(2 * rest, LONGEST_REST)
        elif load.gain > LEAST_GAIN:
            load.next_rest = SHORTEST_REST


def _gain(load: _Load) -> float:
    is_plain_known = load.plain.steps >= PLAIN_STEPS
    return load.sums.efficiency / (load.plain.efficiency if is_plain_known else 1.0)


def _least_rest(sums: _Sums, gain: float) -> int:
    """Plain steps of which those that a trial has lost are no more than ``TRIAL_SHARE``."""
    num_plain = sums.steps * sums.foretold / sums.rounds
    lost = num_plain * max(1.0 - gain, 0.0)
    return min(max(round(lost / TRIAL_SHARE), SHORTEST_REST), LONGEST_REST)


def _begin_rest(load: _Load, num_steps: int) -> None:
    load.rest_left = num_steps
    load.num_rested = load.num_arrivals = 0


def _pass_rest(load: _Load, num_running: int) -> None:
    if not load.rest_left:
        return
    load.rest_left -= 1
    load.num_rested += 1
    if (
        num_running <= FEW_SEQUENCES
        and load.num_rested >= load.least_rest
        and load.num_arrivals >= num_running
    ):
        # None of those that the drafts were judged by is left. (Large crowds are all alike.)
        load.rest_left = 0
    if not load.rest_left:
        load.sums = _Sums()
