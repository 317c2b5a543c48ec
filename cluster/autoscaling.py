"""How many replicas each pool should have: pure decisions over what its replicas report.

Bounds, delays and damping are applied around them by Ray Serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BUSY = 0.7
"""A draft that computes for so much of its time has nothing left to give. One that is late and idle is far
away or ill, and no other replica would change that."""


@dataclass(frozen=True, slots=True)
class TargetReport:
    """One target's own load, averaged over a while."""

    num_running: float = 0.0
    num_waiting: float = 0.0
    queue_seconds: float = 0.0
    """How long the sequence has been waiting that has waited longest."""
    kv_cache_usage: float = 0.0
    """Share of its KV blocks that live sequences hold."""
    num_wanting_draft: float = 0.0
    """Running sequences for which a draft pays at this load, those that have one included."""
    num_drafted: float = 0.0
    """Running sequences that have a draft."""
    draft_lateness: float = 0.0
    """Share of its drafted sequences' steps that began without a candidate."""

    @property
    def num_sequences(self) -> float:
        return self.num_running + self.num_waiting


@dataclass(frozen=True, slots=True)
class DraftReport:
    """One draft's own load, averaged over a while."""

    num_sequences: float = 0.0
    utilization: float = 0.0
    """Share of its time that it computes."""


@dataclass(frozen=True, slots=True)
class TargetGoals:
    """What the size of the target pool is to bring about."""

    sequences_per_replica: float
    kv_cache_usage: float
    queue_seconds: float


@dataclass(frozen=True, slots=True)
class DraftGoals:
    """What the size of the draft pool is to bring about."""

    sequences_per_replica: float
    lateness: float
    wake_delay: float = 0.0
    """Seconds for which drafts must have been wanted before an empty pool begins."""


def target_replicas(reports: Sequence[TargetReport], num_replicas: int, goals: TargetGoals) -> float:
    """Targets that the load calls for: the most that sequences, KV cache or queue ask for.

    A replica that has not reported yet counts for nothing: the others' sequences are all there are.

    Args:
        num_replicas: replicas that run.
    """
    by_sequences = sum(report.num_sequences for report in reports) / goals.sequences_per_replica
    by_kv_cache = sum(report.kv_cache_usage for report in reports) / goals.kv_cache_usage
    # Against those that run: while the one more is starting, the queue must not ask for yet another.
    queueing = any(report.queue_seconds > goals.queue_seconds for report in reports)
    by_queue = num_replicas + 1 if queueing else 0
    return max(by_sequences, by_kv_cache, by_queue)


def draft_replicas(
    targets: Sequence[TargetReport], drafts: Sequence[DraftReport], num_replicas: int, goals: DraftGoals
) -> float:
    """Drafts that the targets can use: enough for the sequences that a draft pays for, and one more than run
    while those are busy and yet late.

    Args:
        num_replicas: drafts that run.
    """
    num_wanting = sum(report.num_wanting_draft for report in targets)
    wanted = num_wanting / goals.sequences_per_replica
    if num_replicas and lateness(targets) > goals.lateness and utilization(drafts) > BUSY:
        # A sequence has one draft; a replica more than there are sequences would do nothing.
        wanted = max(wanted, min(num_replicas + 1, num_wanting))
    return wanted


def awake_drafts(
    wanted: float, wanted_since: float | None, now: float, goals: DraftGoals
) -> tuple[float, float | None]:
    """The same for an empty pool. To fill it costs a machine and minutes: not for a passing moment, such as
    the beginning of a burst. (Serve itself keeps to no delay there.)

    Args:
        wanted_since: what this returned last, if the pool was empty then, too.

    Returns:
        Drafts that are called for, and since when any were wanted; None = none are.
    """
    if wanted <= 0.0:
        return 0.0, None
    since = now if wanted_since is None else wanted_since
    return (wanted if now - since >= goals.wake_delay else 0.0), since


def lateness(targets: Sequence[TargetReport]) -> float:
    """Share of all drafted sequences' steps that began without a candidate; 0.0 where none is drafted."""
    num_drafted = sum(report.num_drafted for report in targets)
    if not num_drafted:
        return 0.0
    return sum(report.num_drafted * report.draft_lateness for report in targets) / num_drafted


def utilization(drafts: Sequence[DraftReport]) -> float:
    """Mean over the drafts that reported; 0.0 where none did."""
    return sum(report.utilization for report in drafts) / len(drafts) if drafts else 0.0
