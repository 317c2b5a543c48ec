"""A draft replica of several ranks dies as one, with any of them: the service goes on without it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.engine.models import tiny_llama
from tests.integration.conftest import Service, wait_until
from tests.integration.shards import FAULTS, REPLACED_SECONDS, SIZE, ranks, running
from tests.integration.streams import MIDDLE, collect_all, token_ids
from tests.integration.tiny_models import deepened, save

LONGEST_PAUSE_SECONDS = 5.0
"""Far less than it takes to find that a rank hangs."""


@pytest.fixture(scope="module")
def drafted(
    deploy: Callable[..., AbstractContextManager[Service]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    draft = tiny_llama()
    # Dearer than its draft, or there is nothing to gain from one.
    source = save(deepened(draft, 60), tmp_path_factory.mktemp("target"))
    pool: dict[str, Any] = {
        "num_threads": 1,
        "kv_cache": {"num_blocks": 1024},
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
    }
    with deploy(
        {
            "model": source,
            "served_model_name": "tiny",
            "dtype": "float32",
            "draft": {
                "model": save(draft, tmp_path_factory.mktemp("draft")),
                "tensor_parallel_size": SIZE,
                "shard_timeout_s": 8.0,
                **pool,
            },
            "target": pool,
            "speculation": {"num_speculative_tokens": 4, "ngram": {"enabled": False}},
        }
    ) as service:
        yield service


def wait_for_draft(service: Service, former: Collection[int] = ()) -> list[int]:
    """The processes of a whole draft that the target uses, none of them among the former ones."""
    found: list[int] = []

    def there_is_one() -> bool:
        drafts = service.replicas("draft")
        attached = [hello["draft_id"] for target in service.replicas("target") for hello in target["drafts"]]
        if len(drafts) != 1 or drafts[0]["error"] or attached != [drafts[0]["id"]]:
            return False
        found[:] = ranks(drafts[0])
        return len(found) == SIZE and set(found).isdisjoint(former)

    wait_until(there_is_one, timeout_seconds=REPLACED_SECONDS, what="there is a whole draft")
    return found


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("fault", FAULTS)
def test_lost_rank_of_the_only_draft_stops_nothing(
    drafted: Service, fault: signal.Signals, rank: int
) -> None:
    """B62: also where it is alive but stuck. No token changes, nobody waits, and a whole draft comes back."""
    broken = wait_for_draft(drafted)
    seeds = range(4)
    reference = collect_all(drafted, seeds)
    assert any(any(stream.accepted) for stream in reference)
    found = collect_all(drafted, seeds, {MIDDLE: lambda: os.kill(broken[rank], fault)})
    assert token_ids(found) == token_ids(reference)
    assert max(stream.longest_pause for stream in found) < LONGEST_PAUSE_SECONDS
    wait_for_draft(drafted, broken)
    wait_until(
        lambda: not any(running(pid) for pid in broken),
        timeout_seconds=REPLACED_SECONDS,
        what="no rank of the former one is left",
    )
    again = collect_all(drafted, seeds)
    assert token_ids(again) == token_ids(reference)
    assert any(any(stream.accepted) for stream in again)
