"""Which target gets the next sequence: a pure decision over what the gateway knows of each."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from paceline.actors.engine.messages import Load

TOKENS_PER_SEQUENCE = 512
"""Tokens still to be prefilled that weigh as much as one running sequence. A step's time grows with its
tokens, so a long queue of prompts delays the next sequence more than its number of requests tells."""


@dataclass(frozen=True, slots=True)
class TargetLoad:
    """What one gateway knows of one target."""

    target_id: str
    own_in_flight: int
    """Sequences that this gateway has there."""
    own_unreported: int
    """Of these, how many were submitted after the target's last report."""
    own_unreported_tokens: int
    """Tokens of the unreported ones (prompt and what is committed)."""
    reported: Load | None
    """The target's last report: sequences of all gateways. None before the first one."""
    leaving: bool = False
    """The target is being taken out of service, whatever it reports itself."""

    @property
    def accepting(self) -> bool:
        return not self.leaving and not (self.reported is not None and self.reported.draining)

    @property
    def queueing(self) -> bool:
        """Sequences wait there, by its last report."""
        return self.reported is not None and self.reported.num_waiting > 0

    @property
    def work(self) -> float:
        """Work ahead of a new sequence, in sequences."""
        reported = self.reported
        sequences = 0 if reported is None else reported.num_running + reported.num_waiting
        tokens = 0 if reported is None else reported.num_pending_tokens
        return (
            max(self.own_in_flight, sequences + self.own_unreported)
            + (tokens + self.own_unreported_tokens) / TOKENS_PER_SEQUENCE
        )


def choose_target(
    targets: Iterable[TargetLoad],
    *,
    excluded: Collection[str] = frozenset(),
    preferred: str | None = None,
    turn: int = 0,
) -> str | None:
    """The preferred target while it has room, else the accepting one with the least work.

    Args:
        excluded: targets that have refused this sequence.
        preferred: a target that knows this sequence's prompt already. It has room as long as it accepts
            and, by its last report, nothing queues there.
        turn: equals take turns by it, so that idle targets are used alike (the number of placements made
            so far, say).

    Returns:
        Its id, or None where no target accepts.
    """
    candidates = [target for target in targets if target.accepting and target.target_id not in excluded]
    if not candidates:
        return None
    if any(target.target_id == preferred and not target.queueing for target in candidates):
        return preferred
    least = min(target.work for target in candidates)
    equals = sorted(target.target_id for target in candidates if target.work == least)
    return equals[turn % len(equals)]
