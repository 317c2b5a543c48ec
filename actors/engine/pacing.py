"""How far to draft, how much to verify, and whether to wait: as pure functions.

Notation: acceptance α = probability that a draft token is accepted given that all before it in the tail
were; T(n) = seconds of a target step of n tokens; a round = one step that verifies a tail.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.actors.engine.config import Hardware
from paceline.actors.engine.estimates import MAX_ACCEPTANCE, RecentMedian, token_bucket

StepCost = Callable[[int], float]

SHARED_RATIO = 1.2
"""Steps that take this much longer while the draft runs betray common hardware."""
LEAST_NEEDED = 0.05
"""A lone sequence's draft runs ahead while a token is needed at least so often."""
MOST_NEEDED = 0.5
PROBE_SAMPLES = 3
PROBE_PERIOD = 64
PROBE_STEPS = 2


def expected_tokens(acceptance: float | Sequence[float], num_tokens: int) -> float:
    """Expected committed tokens of a round with a tail of ``num_tokens``, bonus or corrected included.

    ``(1 − α^(γ+1)) / (1 − α)`` for a constant α (Leviathan et al. 2023, eq. 1); for acceptance per depth
    ``1 + Σ_i Π_{j≤i} a_j`` with the last entry standing for all deeper ones.
    """
    if isinstance(acceptance, (int, float)):
        if acceptance >= 1.0:
            return float(num_tokens + 1)
        return float((1.0 - acceptance ** (num_tokens + 1)) / (1.0 - acceptance))
    total, survival = 1.0, 1.0
    for depth in range(num_tokens):
        survival *= acceptance[min(depth, len(acceptance) - 1)]
        total += survival
    return total


def best_num_speculative_tokens(
    acceptance: float | Sequence[float],
    draft_seconds: float,
    rtt_seconds: float,
    step_cost: StepCost,
    max_tokens: int,
    lock_step: bool,
) -> int:
    """Tail length γ with the most expected tokens per second; the shortest where several are equal.

    A round that takes turns costs ``γ·t_draft + RTT + T(γ+1)``. With run-ahead, a round whose predecessor
    was accepted whole (probability α^(γ+1): the bonus token has to be guessed as well) costs only
    ``max(γ·t_draft, T(γ+1))``; the others pay for the fresh start like one that takes turns.

    Args:
        draft_seconds: per draft token.
        step_cost: T of one sequence's round; for n sequences in a batch pass ``lambda k: T(n * k)``.
        lock_step: the draft rests while the target verifies.
    """
    best, best_rate = 0, 1.0 / max(step_cost(1), 1e-9)
    for num_tokens in range(1, max_tokens + 1):
        verify = step_cost(num_tokens + 1)
        draft = num_tokens * draft_seconds
        seconds = draft + rtt_seconds + verify
        if not lock_step:
            whole = expected_tokens(acceptance, num_tokens + 1) - expected_tokens(acceptance, num_tokens)
            seconds = whole * max(draft, verify) + (1.0 - whole) * seconds
        rate = expected_tokens(acceptance, num_tokens) / max(seconds, 1e-9)
        if rate > best_rate * (1.0 + 1e-9):
            best, best_rate = num_tokens, rate
    return best


@dataclass(frozen=True, slots=True)
class TailLengths:
    """How far to draft for one sequence."""

    fresh: int
    """To wait for after a correction that was not prepared."""
    ready: int
    """To verify where the chain, or a prepared correction, has it ready; 0 = the draft is better at rest."""
    saved_seconds: float = 0.0
    """Where draft and target take turns: how much sooner each token comes than without a draft."""


def turn_tail_lengths(
    acceptance: float, draft_seconds: float, rtt_seconds: float, step_cost: StepCost, max_tokens: int
) -> TailLengths:
    """The best tail of a draft that takes turns with its target, and what it saves; arguments as of
    ``best_num_speculative_tokens``."""
    best = best_num_speculative_tokens(
        acceptance, draft_seconds, rtt_seconds, step_cost, max_tokens, lock_step=True
    )
    if best == 0:
        return TailLengths(0, 0)
    seconds = best * draft_seconds + rtt_seconds + step_cost(best + 1)
    return TailLengths(best, best, step_cost(1) - seconds / expected_tokens(acceptance, best))


def best_tail_lengths(
    acceptance: float,
    draft_seconds: float,
    rtt_seconds: float,
    step_cost: StepCost,
    max_tokens: int,
    prepared: float = 0.0,
    prepared_seconds: float = 0.0,
) -> TailLengths:
    """The tails with the most expected tokens per second for a draft that runs ahead.

    Rounds are of two kinds. A *ready* one finds its tail of m there, and takes ``max(m·t_draft, T(m+1))``; a
    *fresh* one waits for a tail of γ and takes ``RTT + γ·t_draft + T(γ+1)``. The next round is ready if tail
    and bonus token were as the chain has it (α^(n+1) for a tail of n), or if their correction was prepared.
    So shorter fresh tails are verified sooner, and leave the chain whole more often. With w ready rounds to
    each fresh one the rate is ``(E(γ) + w·E(m)) / (t_fresh + w·t_ready)``; all γ <= m are tried.

    Args:
        prepared: probability that a correction was prepared.
        prepared_seconds: until a prepared tail is there, and until it is known that there is none.
    """
    expected = [expected_tokens(acceptance, n) for n in range(max_tokens + 2)]
    costs = [step_cost(n + 1) for n in range(max_tokens + 1)]
    best, best_rate = TailLengths(0, 0), 1.0 / max(costs[0], 1e-9)
    for ready in range(1, max_tokens + 1):
        whole = expected[ready + 1] - expected[ready]
        again = whole + (1.0 - whole) * prepared
        late = prepared_seconds * (1.0 - whole) * prepared / again
        ready_seconds = max(ready * draft_seconds, costs[ready]) + late
        for fresh in range(ready + 1):
            whole = expected[fresh + 1] - expected[fresh]
            follows = (whole + (1.0 - whole) * prepared) / max(1.0 - again, 1e-9)
            fresh_seconds = costs[fresh] + (rtt_seconds + fresh * draft_seconds if fresh else 0.0)
            seconds = prepared_seconds + fresh_seconds + follows * ready_seconds
            rate = (expected[fresh] + follows * expected[ready]) / max(seconds, 1e-9)
            if rate > best_rate * (1.0 + 1e-9):
                best, best_rate = TailLengths(fresh, ready), rate
    return best


def useful_depth(acceptance: float, num_sequences: int) -> int:
    """How far past the committed tokens a draft token is worth its making: where it is needed with a
    probability α^depth above ``LEAST_NEEDED``, and above more the more sequences pay for it: each token of
    one is computed, sent and read at the expense of all."""
    least = min(LEAST_NEEDED * math.sqrt(num_sequences), MOST_NEEDED)
    return max(math.floor(math.log(least) / math.log(min(acceptance, MAX_ACCEPTANCE))), 1)


def draft_window(
    best: int,
    draft_seconds: float,
    rtt_seconds: float,
    verify_seconds: float,
    run_ahead: bool,
    limit: int,
    depth: int,
) -> int:
    """Tokens past the committed ones that a draft is asked to hold, for a best tail of ``best`` tokens.

    Taking turns: exactly the tail. Running ahead: the tail, and enough for the draft not to run dry while
    a verify and its round trip are on (at least the bonus position and the next tail), as far as ``depth``
    (see ``useful_depth``), but at least to the bonus position.
    """
    if best <= 0:
        return 0
    if not run_ahead:
        return min(best, limit)
    ahead = best + 1
    if draft_seconds > 0.0:
        ahead = max(ahead, math.ceil(min((verify_seconds + rtt_seconds) / draft_seconds, limit)))
    return min(best + ahead, max(depth, best + 1), limit)


def allocate_tails(
    available: Sequence[int],
    acceptance: Sequence[float],
    base_tokens: int,
    step_cost: StepCost,
    elapsed: float = 0.0,
) -> list[int]:
    """How many tail tokens of each sequence to verify, so that the step's goodput is highest.

    A slot brings its survival α^depth and costs ΔT. Slots are taken in order of survival (a tail's head
    always before what follows it), and the prefix with the most expected tokens per second wins. That is
    the marginal rule ``survival / ΔT > goodput`` where T is convex, and does not stop at a single dear
    token where T has steps.

    Args:
        available: tail tokens in hand per sequence.
        acceptance: α per sequence, each below 1.
        base_tokens: tokens computed anyway (pending tokens and prompt chunks).
        elapsed: seconds of this round that are spent already.
    """
    slots: list[tuple[float, int]] = []
    for index, (num_available, alpha) in enumerate(zip(available, acceptance, strict=True)):
        survival = 1.0
        for _ in range(num_available):
            survival *= alpha
            slots.append((survival, index))
    slots.sort(key=lambda slot: -slot[0])
    expected = float(len(available))
    best_rate = expected / max(elapsed + step_cost(base_tokens), 1e-9)
    best_count = 0
    for count, (survival, _) in enumerate(slots, start=1):
        expected += survival
        rate = expected / max(elapsed + step_cost(base_tokens + count), 1e-9)
        if rate >= best_rate:
            best_rate, best_count = rate, count
    taken = [0] * len(available)
    for _, index in slots[:best_count]:
        taken[index] += 1
    return taken


def fit_tails(lengths: Sequence[int], budget: int) -> list[int]:
    """Shorten tails to a total of ``budget`` tokens, the longest first, so that none starves."""
    total = sum(lengths)
    if total <= budget:
        return list(lengths)
    fitted = [0] * len(lengths)
    left = max(budget, 0)
    for rank, index in enumerate(sorted(range(len(lengths)), key=lambda i: lengths[i])):
        fitted[index] = min(lengths[index], left // (len(lengths) - rank))
        left -= fitted[index]
    return fitted


@dataclass(frozen=True, slots=True)
class Awaited:
    """One running sequence, as far as it matters for the moment at which a step begins."""

    num_ready: int
    """Tail tokens in hand."""
    limit: int
    """Longest tail worth waiting for; ``num_ready``: nothing more is expected."""
    acceptance: float
    first_seconds: float
    """Until the next candidate is expected."""
    gap_seconds: float
    """Between candidates after that."""
    num_pending: int = 1
    """Tokens computed besides the tail: the last one committed, or a chunk of a prompt."""
    prepared: float | None = None
    """Its whole tail may be ready at the draft, with this probability, and then comes at once; else nothing
    does. None: it comes one by one."""

    @classmethod
    def ready(cls, num_ready: int = 0, acceptance: float = 0.0, num_pending: int = 1) -> Awaited:
        """One that expects nothing, and that every wait delays."""
        return cls(num_ready, num_ready, acceptance, math.inf, math.inf, num_pending)

    @property
    def complete(self) -> bool:
        return self.num_ready >= self.limit


def next_arrival(awaited: Sequence[Awaited]) -> float:
    """Seconds until an incomplete tail expects its next candidate; 0.0 where every tail is complete."""
    return min((max(i.first_seconds, 1e-6) for i in awaited if not i.complete), default=0.0)


def go_or_wait(awaited: Sequence[Awaited], elapsed: float, step_cost: StepCost) -> float:
    """Seconds worth waiting for more candidates; 0.0 = start the step now.

    Compares the round's rate if it starts now, ``E(tails) / (elapsed + T)``, with its rate at each moment
    when another candidate is expected, ``E(tails then) / (elapsed + wait + T(tails then))``. A first
    candidate that alone is not worth its wait may be worth it with those that follow. A sequence that expects
    nothing counts with its one token, or with what its tail promises: each wait delays it, and has to bring
    the others more than that.
    """
    coming = Counter(item for item in awaited if not item.complete)
    if not coming:
        return 0.0
    first = min(item.first_seconds for item in coming)
    gap = max(min(item.gap_seconds for item in coming), 1e-6)
    horizon = max(item.limit - item.num_ready for item in coming)
    base_expected = sum(expected_tokens(i.acceptance, i.num_ready) for i in awaited if i.complete)
    base_tokens = sum(item.num_ready + item.num_pending for item in awaited if item.complete)

    def rate(wait: float) -> float:
        expected, tokens = base_expected, base_tokens
        for item, count in coming.items():
            arrived = 0
            if wait > 0.0 and wait >= item.first_seconds - 1e-9:
                arrived = 1
                if item.prepared is None:
                    arrived += int((wait - item.first_seconds) / max(item.gap_seconds, 1e-6) + 1e-9)
            tail = min(item.limit, item.num_ready + arrived)
            if item.prepared is not None and arrived:
                tail = item.limit
                expected += count * (1.0 - item.prepared) * (1.0 - expected_tokens(item.acceptance, tail))
            expected += count * expected_tokens(item.acceptance, tail)
            tokens += count * (tail + item.num_pending)
        return expected / max(elapsed + wait + step_cost(tokens), 1e-9)

    rate_now = rate(0.0)
    waits = [max(item.first_seconds, 1e-6) for item in coming]
    if math.isfinite(gap):
        waits += [max(first, 1e-6) + step * gap for step in range(horizon)]
    for wait in waits:
        if rate(wait) > rate_now * (1.0 + 1e-9):
            return max(first, 1e-6)
    return 0.0


class OverlapProbe:
    """Finds out whether target and drafts share hardware: do the target's steps rise when a draft is busy?

    At first every other step is one in which the drafts run ahead. Once both kinds were measured at some
    size the better way is taken, and the other is tried again for 2 steps of every 64.
    """

    def __init__(self, configured: Hardware = Hardware.AUTO) -> None:
        self._configured = configured
        self._seconds: dict[tuple[int, bool], RecentMedian] = {}
        self._num_steps = 0

    def record(self, num_tokens: int, draft_running: bool, seconds: float) -> None:
        """One step of ``num_tokens`` tokens; ``draft_running``: a draft had work when it began."""
        # Fine sizes: busy steps tend to be the larger ones, which must not pass for contention.
        key = (token_bucket(num_tokens), draft_running)
        self._seconds.setdefault(key, RecentMedian()).add(seconds)
        self._num_steps += 1

    @property
    def ratio(self) -> float | None:
        """Step time with a draft busy / with drafts at rest, over all sizes measured in both ways."""
        weight, total = 0, 0.0
        for (bucket, running), busy in self._seconds.items():
            rest = self._seconds.get((bucket, False))
            if not running or rest is None or min(len(busy), len(rest)) < PROBE_SAMPLES:
                continue
            samples = min(len(busy), len(rest))
            weight += samples
            total += samples * (busy.value or 0.0) / max(rest.value or 0.0, 1e-9)
        return total / weight if weight else None

    @property
    def hardware(self) -> Hardware:
        """AUTO while nothing is known."""
        if self._configured is not Hardware.AUTO:
            return self._configured
        ratio = self.ratio
        if ratio is None:
            return Hardware.AUTO
        return Hardware.SHARED if ratio > SHARED_RATIO else Hardware.SEPARATE

    @property
    def run_ahead(self) -> bool:
        """Whether drafts should be given a window beyond the next tail, now."""
        if self._configured is not Hardware.AUTO:
            return self._configured is Hardware.SEPARATE
        hardware = self.hardware
        if hardware is Hardware.AUTO:
            return self._num_steps % 2 == 0
        separate = hardware is Hardware.SEPARATE
        return separate != (self._num_steps % PROBE_PERIOD < PROBE_STEPS)
