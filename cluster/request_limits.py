"""How large and how frequent requests may be."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from google.protobuf.message import Message

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.cluster.errors import OverloadedError
from paceline.cluster.security_config import RateLimit, SecurityConfig

STREAMS_PER_CONNECTION = 4096
MIN_MESSAGE_BYTES = 64 * 1024 * 1024
"""Room for the largest answers in one message."""

MAX_CALLERS = 10_000
"""Buckets kept; more callers than tokens exist for cannot be."""


class RateLimitedError(OverloadedError):
    """Too many requests; ``retry_milliseconds`` later there is room.

    The text says so, since nothing else of a failed call gets through Serve: it drops the trailing metadata.
    """

    def __init__(self, whose: str, retry_seconds: float) -> None:
        milliseconds = math.ceil(retry_seconds * 1000)
        super().__init__(f"{whose} rate limit is reached; try again in {milliseconds / 1000:g} s")
        self.retry_milliseconds = milliseconds


class TokenBucket:
    """``burst`` requests at once, ``requests_per_second`` on average."""

    def __init__(self, limit: RateLimit, clock: Callable[[], float]) -> None:
        self._rate = limit.requests_per_second
        self._burst = float(limit.burst)
        self._clock = clock
        self._level = self._burst
        self._filled_at = clock()

    def wait_seconds(self, amount: float) -> float:
        """How long until ``amount`` can be taken; 0 = now. More than the burst counts as all of it."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._filled_at) * self._rate)
        self._filled_at = now
        return max(0.0, (min(amount, self._burst) - self._level) / self._rate)

    def take(self, amount: float) -> None:
        """More than the burst is paid for in full: what is missing is owed."""
        self._level -= amount


class RequestLimits:
    """The limits of one gateway. What is refused costs nothing of any limit."""

    def __init__(self, security: SecurityConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = security.max_request_bytes
        self._clock = clock
        self._common = None if security.rate_limit is None else TokenBucket(security.rate_limit, clock)
        self._per_caller = security.rate_limit_per_token
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def check_size(self, message: Message) -> None:
        """Raises: InvalidArgumentError if the message is too large."""
        size = message.ByteSize()
        if size > self._max_bytes:
            raise InvalidArgumentError(
                "request", f"has {size} bytes, above the {self._max_bytes} that are allowed; send less"
            )

    def admit(self, caller: str | None, num_sequences: int) -> None:
        """Count a request of so many sequences.

        Raises:
            RateLimitedError: it comes too soon.
        """
        own = None if self._per_caller is None or caller is None else self._bucket(caller, self._per_caller)
        for whose, bucket in (("your", own), ("the service's", self._common)):
            if bucket is not None and (wait := bucket.wait_seconds(num_sequences)) > 0:
                raise RateLimitedError(whose, wait)
        for bucket in (own, self._common):
            if bucket is not None:
                bucket.take(num_sequences)

    def _bucket(self, caller: str, limit: RateLimit) -> TokenBucket:
        if caller not in self._buckets:
            self._buckets[caller] = TokenBucket(limit, self._clock)
            if len(self._buckets) > MAX_CALLERS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(caller)
        return self._buckets[caller]


def message_environment(security: SecurityConfig) -> dict[str, str]:
    """Environment in which Serve's endpoints refuse what is far too large before they hold all of it; their
    own limit is 2 GiB. It counts for answers too."""
    return {"RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(max(2 * security.max_request_bytes, MIN_MESSAGE_BYTES))}


def stream_environment() -> dict[str, str]:
    """Environment in which HAProxy takes as many requests at a time over one connection as a gateway does. By
    default it takes 100, and a client library keeps the others back, untold."""
    return {"RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS": str(STREAMS_PER_CONNECTION)}
