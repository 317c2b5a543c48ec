"""A replica of several ranks lives and dies as one, whichever of them is lost; the other one takes over."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.integration.conftest import Service
from tests.integration.shards import (
    FAULTS,
    SIZE,
    all_ranks,
    configuration,
    num_placement_groups,
    ranks,
    wait_for_replacement,
)
from tests.integration.streams import MIDDLE, collect_all, token_ids


@pytest.fixture(scope="module")
def pair(
    deploy: Callable[..., AbstractContextManager[Service]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    with deploy(configuration(tmp_path_factory.mktemp("model"), 2)) as service:
        yield service


def test_killed_shard_changes_no_token_of_any_request(pair: Service) -> None:
    """B62."""
    num_groups = num_placement_groups()
    assert len(all_ranks(pair)) == 2 * SIZE
    seeds = range(4)
    reference = collect_all(pair, seeds)
    broken = ranks(pair.replicas("target")[0])
    found = collect_all(pair, seeds, {MIDDLE: lambda: os.kill(broken[1], signal.SIGKILL)})
    assert token_ids(found) == token_ids(reference)
    (gateway,) = pair.replicas("gateway")
    # Placement is even, so that half of them ran there.
    assert gateway["num_failovers"] == len(seeds) // 2
    wait_for_replacement(pair, broken, num_groups)


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("during", [False, True], ids=["idle", "streams"])
def test_every_request_completes_on_the_other_replica(
    pair: Service, fault: signal.Signals, rank: int, during: bool
) -> None:
    """B62: also where a rank is alive but stuck."""
    seeds = range(16)
    reference = collect_all(pair, seeds)
    num_groups = num_placement_groups()
    broken = ranks(pair.replicas("target")[0])

    def strike() -> None:
        os.kill(broken[rank], fault)

    if not during:
        strike()
    found = collect_all(pair, seeds, {MIDDLE: strike} if during else None)
    assert token_ids(found) == token_ids(reference)
    wait_for_replacement(pair, broken, num_groups)
