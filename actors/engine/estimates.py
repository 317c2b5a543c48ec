"""Running estimates of what was measured: durations, acceptance, the cost of a step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable

MEDIAN_SAMPLES = 9
EXPIRY_RECORDS = 2000
"""A step cost that was not measured for so many steps is forgotten: the machine may have changed."""
LONE_RECORDS = 64
"""One that was measured a single time counts for so many steps. The first step of a size is often slow, and a
size that seems dear is not tried again."""
LONE_RISE = 3.0
"""Nor is it believed where it is so many times what the next smaller size takes, and more than the tokens
explain."""
READ_TOKENS = 16
"""A draft's step of so many tokens reads prompts, or what was committed during a rest."""
LEAST_TRIALS = 0.05
"""What is known of an acceptance that fades for ever."""

MIN_ACCEPTANCE, MAX_ACCEPTANCE = 0.01, 0.99


class RecentMedian:
    """Median of the last few values: one outlier (a page fault, a collection) changes nothing."""

    __slots__ = ("_recent", "value")

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=MEDIAN_SAMPLES)
        self.value: float | None = None
        """None before the first value."""

    def add(self, value: float) -> None:
        self._recent.append(value)
        self.value = sorted(self._recent)[(len(self._recent) - 1) // 2]

    def __len__(self) -> int:
        return len(self._recent)


class AcceptanceEstimate:
    """Recent probability that a draft token is accepted, given that all before it in its tail were.

    Exponentially forgetting counts of accepted tokens and of trials: a tail of k with a < k accepted is
    a + 1 trials (what came after the first rejection says nothing), one accepted whole is k.
    """

    __slots__ = (
        "_accepted",
        "_decay",
        "_trials",
        "cautious",
        "num_accepted",
        "num_trials",
        "optimistic",
        "rate",
    )

    def __init__(self, prior: float = 0.7, prior_trials: float = 4.0, decay: float = 0.96) -> None:
        self._accepted = prior * prior_trials
        self._trials = prior_trials
        self._decay = decay
        self.num_accepted = 0
        """All that were recorded, none forgotten."""
        self.num_trials = 0
        self.rate = prior
        self.optimistic = prior
        """The rate and half a standard error. To decide by it tries what little is known of: a few early
        rejections do not end speculation for good."""
        self.cautious = prior
        """The rate less half a standard error. Of several things little known, those that seem best are worse
        than they seem."""
        self._update()

    def record(self, num_drafted: int, num_accepted: int) -> None:
        self._accepted = self._decay * self._accepted + num_accepted
        num_trials = num_accepted + (num_accepted < num_drafted)
        self._trials = self._decay * self._trials + num_trials
        self.num_accepted += num_accepted
        self.num_trials += num_trials
        self._update()

    def fade(self, factor: float = 0.98) -> None:
        """Trust the past less, without a new trial: the rate stays, the standard error grows."""
        if self._trials < LEAST_TRIALS:
            return
        self._accepted *= factor
        self._trials *= factor
        self._update()

    def _update(self) -> None:
        self.rate = min(max(self._accepted / self._trials, MIN_ACCEPTANCE), MAX_ACCEPTANCE)
        error = math.sqrt(self.rate * (1.0 - self.rate) / self._trials)
        self.optimistic = min(self.rate + 0.5 * error, MAX_ACCEPTANCE)
        self.cautious = max(self.rate - 0.5 * error, MIN_ACCEPTANCE)


def token_bucket(num_tokens: int) -> int:
    """The measured size that stands for ``num_tokens``: exact to 16, then rounded up by at most a quarter."""
    if num_tokens <= 16:
        return num_tokens
    shift = num_tokens.bit_length() - 3
    return -(-num_tokens >> shift) << shift


class StepCostModel:
    """T(tokens): seconds of one target step that computes so many tokens, learnt from the steps themselves.

    Medians per token bucket, linear in between. A step of fewer tokens cannot cost more than one of more,
    so a bucket whose median is above a larger one's (a slow first step, never measured again) is read as
    the larger one's, and one that was measured but once counts only for a while. Outside the sizes measured
    the nearest slope goes on; with a single size measured more tokens are assumed to be free, which makes
    the engine try and learn better.

    Steps that a draft slowed down, on cores that both use, say what contention costs and not what a tail
    costs: they count only for sizes that were never measured undisturbed.
    """

    def __init__(self) -> None:
        self._medians: dict[int, RecentMedian] = {}
        self._disturbed: set[int] = set()
        """Buckets that hold only disturbed steps."""
        self._recorded_at: dict[int, int] = {}
        self._num_records = 0
        self._sizes: list[int] = []
        self._seconds: list[float] = []
        self._cache: dict[int, float] = {}

    @property
    def known(self) -> bool:
        return bool(self._sizes)

    @property
    def largest_size(self) -> int:
        """Of those measured, in tokens."""
        return self._sizes[-1]

    def record(self, num_tokens: int, seconds: float, *, disturbed: bool = False) -> None:
        """One step. A clock that jumped says nothing."""
        if not 0.0 <= seconds < math.inf:
            return
        self._num_records += 1
        bucket = token_bucket(num_tokens)
        if disturbed:
            if bucket in self._medians and bucket not in self._disturbed:
                if bucket in self._sizes:
                    return
                del self._medians[bucket]  # a lone one that is believed no more
            self._disturbed.add(bucket)
        elif bucket in self._disturbed:
            self._disturbed.remove(bucket)
            del self._medians[bucket]
        self._medians.setdefault(bucket, RecentMedian()).add(seconds)
        self._recorded_at[bucket] = self._num_records
        if self._num_records % 256 == 0:
            for old in [b for b, at in self._recorded_at.items() if self._num_records - at > EXPIRY_RECORDS]:
                del self._medians[old], self._recorded_at[old]
                self._disturbed.discard(old)
        self._sizes = self._believed_sizes()
        lowest = float("inf")
        seconds_by_size: list[float] = []
        for size in reversed(self._sizes):
            lowest = min(lowest, self._medians[size].value or 0.0)
            seconds_by_size.append(lowest)
        seconds_by_size.reverse()
        if seconds_by_size != self._seconds:
            self._seconds = seconds_by_size
        self._cache.clear()

    def _believed_sizes(self) -> list[int]:
        sizes: list[int] = []
        for bucket in sorted(self._medians):
            if len(self._medians[bucket]) > 1 or self._is_lone_believed(bucket, sizes[-1] if sizes else None):
                sizes.append(bucket)
        return sizes

    def _is_lone_believed(self, bucket: int, smaller: int | None) -> bool:
        if self._num_records - self._recorded_at[bucket] >= LONE_RECORDS:
            return False
        if smaller is None:
            return True
        highest = (self._medians[smaller].value or 0.0) * max(LONE_RISE, bucket / smaller)
        return (self._medians[bucket].value or 0.0) <= highest

    def __call__(self, num_tokens: int) -> float:
        """Seconds of a step of ``num_tokens`` tokens; 0.0 while nothing is known."""
        cached = self._cache.get(num_tokens)
        if cached is None:
            cached = self._cache[num_tokens] = self._interpolate(num_tokens)
        return cached

    def _interpolate(self, num_tokens: int) -> float:
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return 0.0
        upper = bisect_left(sizes, num_tokens)
        if len(sizes) == 1:
            return seconds[0]
        upper = min(max(upper, 1), len(sizes) - 1)
        low, high = sizes[upper - 1], sizes[upper]
        slope = (seconds[upper] - seconds[upper - 1]) / (high - low)
        # Fewer tokens than were ever measured cost at least their share.
        return max(
            seconds[upper - 1] + slope * (num_tokens - low), seconds[0] * min(num_tokens / sizes[0], 1.0)
        )


class StepCosts:
    """T of a target's steps: of those that decode and verify, and of those that read prompts besides.

    Every token of the former needs its logits, of a prompt only the last does. Where logits and attention
    count (16 rows of a 1.5B model on a processor: 6 ms for each further tail token, 3.5 for one of a prompt)
    sizes of one kind say little of the other.
    """

    def __init__(self) -> None:
        self._decode = StepCostModel()
        self._with_prompts = StepCostModel()
        """By the tokens without tails."""

    @property
    def known(self) -> bool:
        return self._decode.known or self._with_prompts.known

    def __call__(self, num_tokens: int) -> float:
        """Seconds of a step that verifies ``num_tokens`` tokens; 0.0 while nothing is known.

        Past the largest that was measured it rises by what prompts of that size cost more, at the least.
        """
        if not self._decode.known:
            return self._with_prompts(num_tokens)
        found = self._decode(num_tokens)
        largest = self._decode.largest_size
        if num_tokens > largest and self._with_prompts.known:
            rise = self._with_prompts(num_tokens) - self._with_prompts(largest)
            found = max(found, self._decode(largest) + rise)
        return found

    def plain(self, num_decoding: int, num_prompt_tokens: int) -> float:
        """Seconds of a step without tails."""
        if num_prompt_tokens and self._with_prompts.known:
            return self._with_prompts(num_decoding + num_prompt_tokens)
        return self(num_decoding + num_prompt_tokens)

    def beside(self, num_decoding: int, num_prompt_tokens: int) -> Callable[[int], float]:
        """T(tokens), tails included, of steps with so many prompt tokens among them."""
        if not num_prompt_tokens:
            return self
        base = self.plain(num_decoding, num_prompt_tokens) - self(num_decoding)
        return lambda num_tokens: base + self(num_tokens - num_prompt_tokens)

    def record(
        self,
        num_decoding: int,
        num_tail_tokens: int,
        num_prompt_tokens: int,
        seconds: float,
        *,
        disturbed: bool = False,
    ) -> None:
        """One step, see ``StepCostModel.record``."""
        if not num_prompt_tokens:
            self._decode.record(num_decoding + num_tail_tokens, seconds, disturbed=disturbed)
            return
        of_decoding = self(num_decoding)
        of_tails = self(num_decoding + num_tail_tokens) - of_decoding
        plain = min(max(seconds - of_tails, of_decoding), seconds)
        self._with_prompts.record(num_decoding + num_prompt_tokens, plain, disturbed=disturbed)


class DraftStepCost:
    """How long a draft's steps take, by the tokens that they hold."""

    def __init__(self) -> None:
        self._cost = StepCostModel()
        self._smallest = 0
        self._largest = 1

    @property
    def known(self) -> bool:
        return self._cost.known

    def record(self, num_tokens: int, seconds: float, *, disturbed: bool = False) -> None:
        """One step. ``disturbed``: the target may have slowed it down. It is no slower than that, then."""
        slowed = disturbed and seconds >= self.expected(num_tokens)
        self._cost.record(num_tokens, seconds, disturbed=slowed)
        self._smallest = min(self._smallest or num_tokens, num_tokens)
        self._largest = max(self._largest, num_tokens)

    def expected(self, num_tokens: int) -> float:
        """Seconds of a step of ``num_tokens``; 0.0 while nothing is known.

        While only steps that read much were measured (the first one does) one that reads little is taken to
        need its share, the least that it can: else a draft would rest before it has shown what it can do.
        """
        share = num_tokens / self._smallest if num_tokens < READ_TOKENS <= self._smallest else 1.0
        return self._cost(num_tokens) * share

    def bound(self, num_tokens: int) -> float:
        """The same for a step that surprises nobody: past the sizes measured, in proportion to its tokens."""
        return self._cost(num_tokens) * max(num_tokens / self._largest, 1.0)
