"""How long a request may live: its own limit or the service's, whichever is shorter."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.cluster.errors import TimeExceededError
from paceline.protos import generation_pb2 as proto

MAX_TIMEOUT_SECONDS = 365 * 86400.0


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """A request's life, from its arrival on."""

    seconds: float
    arrived_at: float
    """By the event loop's clock."""
    own: bool = False
    """The request asked for it; else it is the service's."""

    @property
    def deadline(self) -> float:
        """By the event loop's clock."""
        return self.arrived_at + self.seconds

    def exceeded(self) -> TimeExceededError:
        """What its caller is told afterwards."""
        if self.own:
            return TimeExceededError(f"the request took longer than its timeout_s = {self.seconds:g}")
        return TimeExceededError(f"the request took longer than the service's limit of {self.seconds:g} s")


def timeout_of(message: proto.GenerateRequest) -> float | None:
    """The request's own limit in seconds.

    Raises:
        InvalidArgumentError: no time that can pass.
    """
    if not message.HasField("timeout_s"):
        return None
    if not 0.0 < message.timeout_s <= MAX_TIMEOUT_SECONDS:
        raise InvalidArgumentError(
            "timeout_s",
            f"must be in (0, {MAX_TIMEOUT_SECONDS:.0f}] seconds, got {message.timeout_s:g}",
        )
    return message.timeout_s


def time_limit(
    message: proto.GenerateRequest, service_seconds: float | None, arrived_at: float
) -> TimeLimit | None:
    """What holds for a request; None = it may take as long as it takes.

    Args:
        service_seconds: the service's own limit.
        arrived_at: by the event loop's clock.

    Raises:
        InvalidArgumentError: see ``timeout_of``.
    """
    own = timeout_of(message)
    if own is not None and (service_seconds is None or own <= service_seconds):
        return TimeLimit(own, arrived_at, own=True)
    return None if service_seconds is None else TimeLimit(service_seconds, arrived_at)
