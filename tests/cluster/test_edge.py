"""What a gateway asks of each call, in which order, and what a refused one is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.cluster.auth import AuthenticationError, TokenFileError
from paceline.cluster.edge import Edge
from paceline.cluster.request_limits import RateLimitedError
from paceline.cluster.security_config import RateLimit, SecurityConfig
from paceline.protos import generation_pb2 as proto

TOKEN = "operator-0123456789abcdef"


class Context:
    """A call's metadata, as Serve hands it on."""

    def __init__(self, token: str | None = TOKEN) -> None:
        self._given = [] if token is None else [("authorization", f"Bearer {token}")]

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._given


@pytest.fixture
def edge(tmp_path: Path) -> Edge:
    (tmp_path / "tokens").write_text(f"operator {TOKEN}\n")
    return Edge(
        SecurityConfig(
            tokens_file=str(tmp_path / "tokens"),
            max_request_bytes=2048,
            rate_limit_per_token=RateLimit(requests_per_second=0.001, burst=2),
        )
    )


def test_strangers_learn_nothing_and_cost_nothing(edge: Edge) -> None:
    large: Any = proto.GenerateRequest(prompt="x" * 4000)
    for _ in range(10):
        with pytest.raises(AuthenticationError):
            edge.check(large, Context(None), 2)
    with pytest.raises(InvalidArgumentError):
        edge.check(large, Context(), 2)
    # None of these was counted.
    edge.check(proto.GenerateRequest(), Context(), 2)
    with pytest.raises(RateLimitedError):
        edge.check(proto.GenerateRequest(), Context(), 1)
    edge.check(proto.GetModelInfoRequest(), Context(), num_sequences=0)


def test_a_gateway_without_its_tokens_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match=r"tokens: cannot be read .* check security.tokens_file"):
        Edge(SecurityConfig(tokens_file=str(tmp_path / "tokens")))


def test_by_default_everybody_may_call() -> None:
    edge = Edge(SecurityConfig())
    for _ in range(1000):
        edge.check(proto.GenerateRequest(prompt="x"), Context(None), 64)
