"""Where a pool's policy, in Serve's controller, leaves what another pool's policy needs.

Serve calls the policy of each deployment with that deployment's reports only, and a pool without replicas has
none: how many drafts are wanted is known to the targets alone. Both policies are called by one process, the
controller, several times a second; this is its memory between the two calls. It holds nothing that the next
reports do not bring again, so a controller that starts anew has lost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cluster.autoscaling import TargetReport

STALE_SECONDS = 10.0
"""Serve calls the policies ten times a second. What is older was left by a pool that is no more."""


@dataclass(frozen=True, slots=True)
class TargetsSeen:
    """The target pool of one application, as its policy saw it."""

    at: float
    """Seconds, by the controller's clock."""
    num_replicas: int
    """Replicas that run."""
    reports: tuple[TargetReport, ...]


class Board:
    """What was seen last, by application."""

    def __init__(self) -> None:
        self._seen: dict[str, TargetsSeen] = {}

    def post(self, application: str, seen: TargetsSeen) -> None:
        self._seen = {
            name: other for name, other in self._seen.items() if seen.at - other.at <= STALE_SECONDS
        }
        self._seen[application] = seen

    def read(self, application: str, now: float) -> TargetsSeen | None:
        """None where nobody has looked for a while."""
        seen = self._seen.get(application)
        return seen if seen is not None and now - seen.at <= STALE_SECONDS else None


BOARD = Board()
"""The controller's own."""
