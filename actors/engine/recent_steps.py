"""What the last steps of one kind took and brought, with accidents spread over many steps."""

from __future__ import annotations

from collections import deque

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

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, num_sequences: int, num_tokens: int, model_steps: float) -> None:
        if len(self._steps) == REMEMBERED_STEPS:
            self._past_excess.append(self._excess()[0])
        self._steps.append((num_sequences, num_tokens, model_steps))

    def restart(self) -> None:
        """Forget the steps, but not what held them up."""
        if self._steps:
            self._past_excess.extend(self._excess())
            self._steps.clear()

    @property
    def rounds(self) -> int:
        """Sequences, added over the steps."""
        return sum(num_sequences for num_sequences, _, _ in self._steps)

    @property
    def model_steps(self) -> float:
        """For how many steps of the model they took in all."""
        return sum(self._lengths())

    @property
    def efficiency(self) -> float:
        """The tokens committed / those of the same time, were a token per sequence and step all, and nothing
        done between steps."""
        foretold = sum(step[0] * length for step, length in zip(self._steps, self._lengths(), strict=True))
        return sum(num_tokens for _, num_tokens, _ in self._steps) / max(foretold, 1e-9)

    def _lengths(self) -> list[float]:
        longest = self._longest()
        past = list(self._past_excess)[len(self._steps) - SPREAD_STEPS :]
        excess = (sum(self._excess()) + sum(past)) / SPREAD_STEPS
        return [min(model_steps, longest) + excess for _, _, model_steps in self._steps]

    def _excess(self) -> list[float]:
        longest = self._longest()
        return [min(max(model_steps - longest, 0.0), MOST_EXCESS) for _, _, model_steps in self._steps]

    def _longest(self) -> float:
        lengths = sorted(model_steps for _, _, model_steps in self._steps)
        return LONGEST_STEP * lengths[(len(lengths) - 1) // 2] if lengths else 0.0
