"""What the last steps of one kind took and brought, with accidents spread over many steps."""

from __future__ import annotations

from collections import deque
from itertools import islice

REMEMBERED_STEPS = 64
LONGEST_STEP = 2.5
"""Medians. What a step took past that is excess, and no property of that step."""
SPREAD_STEPS = 512
"""Over so many steps excess is spread. What holds up a process once (a stopped machine, a page that is read
from a disk) hardly counts; what holds it up again and again counts in full."""
MOST_EXCESS = 32.0
"""Steps of the model, of one step."""


class RecentSteps:
    """Empty at first, and after each ``restart``."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=REMEMBERED_STEPS)
        """Sequences, the tokens that they committed, and for how many steps of the model it took."""
        self._past_excess: deque[float] = deque(maxlen=SPREAD_STEPS)
        """Of steps before those."""
        self._efficiency: float | None = None
        """None: not known since the last change."""

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, num_sequences: int, num_tokens: int, model_steps: float) -> None:
        if len(self._steps) == REMEMBERED_STEPS:
            self._past_excess.append(_excess(self._steps[0][2], self._longest()))
        self._steps.append((num_sequences, num_tokens, model_steps))
        self._efficiency = None

    def restart(self) -> None:
        """Forget the steps, but not what held them up."""
        longest = self._longest()
        self._past_excess.extend(_excess(step[2], longest) for step in self._steps)
        self._steps.clear()
        self._efficiency = None

    @property
    def rounds(self) -> int:
        """Sequences, added over the steps."""
        return sum(step[0] for step in self._steps)

    @property
    def model_steps(self) -> float:
        """For how many steps of the model they took in all."""
        return sum(self._lengths())

    @property
    def efficiency(self) -> float:
        """The tokens committed / those of the same time, were a token per sequence and step all, and nothing
        done between steps."""
        if self._efficiency is None:
            foretold = sum(
                step[0] * length for step, length in zip(self._steps, self._lengths(), strict=True)
            )
            self._efficiency = sum(step[1] for step in self._steps) / max(foretold, 1e-9)
        return self._efficiency

    def _lengths(self) -> list[float]:
        longest = self._longest()
        lengths = [step[2] for step in self._steps]
        num_past = len(self._past_excess)
        past = islice(self._past_excess, max(num_past + len(lengths) - SPREAD_STEPS, 0), num_past)
        excess = sum(_excess(length, longest) for length in lengths) + sum(past)
        return [min(length, longest) + excess / SPREAD_STEPS for length in lengths]

    def _longest(self) -> float:
        lengths = sorted(step[2] for step in self._steps)
        return LONGEST_STEP * lengths[(len(lengths) - 1) // 2] if lengths else 0.0


def _excess(model_steps: float, longest: float) -> float:
    return min(max(model_steps - longest, 0.0), MOST_EXCESS)
