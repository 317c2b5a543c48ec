"""Which Ray cluster ``paceline serve`` runs on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.config import load_config
from paceline.cluster.runtime import authentication_environment, haproxy_environment, running_cluster
from paceline.cluster.service_start import cluster_to_join


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def noted(tmp_path: Path) -> Iterator[str]:
    """A listener that Ray's note names."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address + "\n")
        yield address


def joined(flag: str | None = None, **ray: Any) -> str | None:
    return cluster_to_join(load_config({"model": "m", "ray": ray}), flag)


def test_none_runs() -> None:
    assert running_cluster() is None
    assert joined() is None


def test_one_runs(noted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert joined() == noted
    assert joined("local") is None
    assert joined(address="local") is None
    assert joined(num_cpus=4) is None
    assert joined("h:1", address="h:2") == "h:1"
    assert joined(address="h:2") == "h:2"
    monkeypatch.setenv("RAY_ADDRESS", "h:3")
    assert joined() == "h:3"
    assert joined(address="h:2") == "h:2"
    assert joined(num_cpus=4) is None


def test_a_note_that_outlived_its_cluster(noted: str, tmp_path: Path) -> None:
    note = tmp_path / "ray" / "ray_current_cluster"
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    note.write_text(f"127.0.0.1:{port}")
    assert joined() is None
    note.write_text("what is this")
    assert joined() is None


def test_a_token_is_sent_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert authentication_environment() == {}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    assert authentication_environment() == {"RAY_AUTH_MODE": "token"}
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert authentication_environment() == {}


def serve_ports(folder: Path) -> set[int]:
    """What Serve would bind in a cluster of its own, and in every other one too."""
    found = haproxy_environment(folder)
    given = {key: int(value) for key, value in found.items() if key.endswith("_PORT")}
    ports = {given[f"RAY_SERVE_FALLBACK_PROXY_{kind}_PORT"] for kind in ("GRPC", "HTTP")}
    for kind in ("GRPC", "HTTP"):
        low, high = (given[f"RAY_SERVE_DIRECT_INGRESS_{end}_{kind}_PORT"] for end in ("MIN", "MAX"))
        assert high - low >= 50
        assert ports.isdisjoint(range(low, high + 1))
        ports.update(range(low, high + 1))
    return ports


def test_two_clusters_of_one_machine_share_no_port(tmp_path: Path) -> None:
    """Serve binds them with SO_REUSEPORT, so that nobody would notice."""
    first = serve_ports(tmp_path / "first")
    with socket.create_server(("0.0.0.0", min(first))):
        for _ in range(50):
            assert first.isdisjoint(serve_ports(tmp_path / "second"))
