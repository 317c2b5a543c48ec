"""How large and how frequent requests may be, on a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.cluster.config import load_config
from paceline.cluster.config_errors import ConfigError
from paceline.cluster.request_limits import RateLimitedError, RequestLimits, message_environment
from paceline.cluster.security_config import RateLimit, SecurityConfig
from paceline.protos import generation_pb2 as proto
from tests.cluster.test_auth import Clock


def _limits(clock: Clock, **security: Any) -> RequestLimits:
    return RequestLimits(SecurityConfig(tokens_file="tokens", **security), clock)


def _let_in(limits: RequestLimits, caller: str | None, num: int, size: int = 1) -> int:
    """How many of ``num`` requests are let in."""
    count = 0
    for _ in range(num):
        try:
            limits.admit(caller, size)
            count += 1
        except RateLimitedError:
            continue
    return count


def test_a_burst_and_then_the_rate() -> None:
    clock = Clock()
    limits = _limits(clock, rate_limit=RateLimit(requests_per_second=2.0, burst=5))
    assert _let_in(limits, None, 20) == 5
    clock.now += 1.0
    assert _let_in(limits, None, 20) == 2
    # A long pause gives no more than a burst.
    clock.now += 1000.0
    assert _let_in(limits, None, 20) == 5
    admitted = 0
    for _ in range(1000):
        clock.now += 0.05
        admitted += _let_in(limits, None, 1)
    assert admitted == pytest.approx(100, abs=1)


def test_the_hint_is_when_there_is_room() -> None:
    clock = Clock()
    limits = _limits(clock, rate_limit_per_token=RateLimit(requests_per_second=0.5, burst=1))
    limits.admit("alice", 1)
    with pytest.raises(RateLimitedError, match=r"your rate limit is reached; try again in 2 s") as caught:
        limits.admit("alice", 1)
    assert caught.value.code.name == "RESOURCE_EXHAUSTED"
    assert caught.value.retry_milliseconds == 2000
    clock.now += 1.999
    with pytest.raises(RateLimitedError):
        limits.admit("alice", 1)
    clock.now += 0.001
    limits.admit("alice", 1)


def test_callers_do_not_pay_for_each_other() -> None:
    limits = _limits(Clock(), rate_limit_per_token=RateLimit(requests_per_second=1.0, burst=3))
    assert _let_in(limits, "alice", 10) == 3
    assert _let_in(limits, "bob", 10) == 3


def test_both_limits_hold_and_a_refusal_costs_nothing() -> None:
    clock = Clock()
    limits = _limits(
        clock,
        rate_limit=RateLimit(requests_per_second=1.0, burst=4),
        rate_limit_per_token=RateLimit(requests_per_second=1.0, burst=3),
    )
    assert _let_in(limits, "alice", 100) == 3
    # Her 97 refused ones did not use up the service's.
    assert _let_in(limits, "bob", 100) == 1
    # Nor did his use up his own: when the service has room again, he has two left.
    clock.now += 3.0
    assert _let_in(limits, "bob", 100) == 3


def test_choices_count_as_so_many() -> None:
    clock = Clock()
    limits = _limits(clock, rate_limit=RateLimit(requests_per_second=1.0, burst=4))
    limits.admit(None, 3)
    with pytest.raises(RateLimitedError):
        limits.admit(None, 2)
    limits.admit(None, 1)
    # More than a burst waits for a full one, and is paid for in full.
    clock.now += 4.0
    limits.admit(None, 8)
    clock.now += 4.0
    assert _let_in(limits, None, 5) == 0
    clock.now += 1.0
    assert _let_in(limits, None, 5) == 1


def test_a_request_that_is_too_large() -> None:
    limits = _limits(Clock(), max_request_bytes=2048)
    limits.check_size(proto.GenerateRequest(prompt="x" * 2000))
    with pytest.raises(
        InvalidArgumentError, match="request: has 3003 bytes, above the 2048 that are allowed"
    ):
        limits.check_size(proto.GenerateRequest(prompt="x" * 3000))


def test_the_endpoints_own_limit_leaves_room_for_ours() -> None:
    small, large = SecurityConfig(), SecurityConfig(max_request_bytes=100 * 1024 * 1024)
    assert message_environment(small) == {"RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(64 * 1024 * 1024)}
    assert message_environment(large) == {"RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(200 * 1024 * 1024)}


def test_a_limit_per_token_needs_tokens() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"model": "m", "security": {"rate_limit_per_token": {"requests_per_second": 1}}})
    assert caught.value.problems == (
        "security.rate_limit_per_token: needs tokens to tell callers apart — set tokens_file, or use "
        "rate_limit",
    )
