"""The only replica, of several ranks, is lost with any of them: nobody waits long, and it comes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import grpc
import pytest

from tests.integration.conftest import Service
from tests.integration.shards import (
    FAULTS,
    SIZE,
    configuration,
    num_placement_groups,
    ranks,
    wait_for_replacement,
)
from tests.integration.streams import MIDDLE, collect, collect_all, token_ids

UNAVAILABLE_SECONDS = 30


@pytest.fixture(scope="module")
def alone(
    deploy: Callable[..., AbstractContextManager[Service]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    with deploy(configuration(tmp_path_factory.mktemp("model"), 1)) as service:
        yield service


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("during", [False, True], ids=["idle", "streams"])
def test_the_only_replica_is_lost(alone: Service, fault: signal.Signals, rank: int, during: bool) -> None:
    """B62: every request ends in time, whole or as UNAVAILABLE, and the group comes back by itself."""
    seeds = range(16)
    reference = token_ids(collect_all(alone, seeds))
    num_groups = num_placement_groups()
    broken = ranks(alone.replicas("target")[0])
    struck = [time.monotonic()]

    def strike() -> None:
        struck[0] = time.monotonic()
        os.kill(broken[rank], fault)

    def run(seed: int) -> tuple[list[int] | grpc.StatusCode, float]:
        try:
            events = {MIDDLE: strike} if during and seed == 0 else None
            return collect(alone, seed, events).token_ids, time.monotonic()
        except grpc.RpcError as error:
            return error.code(), time.monotonic()

    if not during:
        strike()
    with ThreadPoolExecutor(len(seeds)) as pool:
        outcomes = list(pool.map(run, seeds))
    for seed, (outcome, ended) in zip(seeds, outcomes, strict=True):
        assert outcome in (reference[seed], grpc.StatusCode.UNAVAILABLE)
        assert ended - struck[0] < UNAVAILABLE_SECONDS
    assert any(outcome == grpc.StatusCode.UNAVAILABLE for outcome, _ in outcomes)
    wait_for_replacement(alone, broken, num_groups)
    assert token_ids(collect_all(alone, seeds)) == reference
