"""Ports of an own cluster, which it must not share with another one."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from paceline.cluster.runtime import INGRESS_PORTS, free_port_range, haproxy_environment

SERVE_PORTS = range(40000, 41000)
"""What Serve gives out in every cluster, unless told otherwise."""


def test_a_range_with_a_listener_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port_range(8)
    draw = random.randrange
    offers = [first]
    monkeypatch.setattr(random, "randrange", lambda *bounds: offers.pop() if offers else draw(*bounds))
    with socket.socket(socket.AF_INET6) as listener:
        # As gRPC listens: on all addresses of both families, and willing to share the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("::", first + 3))
        listener.listen()
        assert free_port_range(8) != first
    assert not offers
    offers.append(first)
    assert free_port_range(8) == first


def test_gateways_do_not_listen_where_those_of_every_cluster_do(tmp_path: Path) -> None:
    environment = haproxy_environment(tmp_path)
    first = int(environment["RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT"])
    end = int(environment["RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT"])
    assert end - first == INGRESS_PORTS - 1
    assert not set(range(first, end)) & set(SERVE_PORTS)
