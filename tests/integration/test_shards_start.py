"""A rank that is lost while its group comes up, before the first collective: the start begins again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.integration.conftest import Service
from tests.integration.shards import FAULTS, configuration, ranks, running

TITLE = b"ray::ShardActor"


def shards() -> set[int]:
    """Process ids of all shards on this machine that this user may look at."""
    found = set()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "cmdline").read_bytes().startswith(TITLE):
                found.add(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_shard_is_lost_before_it_has_joined(
    deploy: Callable[..., AbstractContextManager[Service]], tmp_path: Path, fault: signal.Signals
) -> None:
    before, struck, over = shards(), [], threading.Event()

    def strike() -> None:
        while not over.wait(0.05):
            if new := shards() - before:
                struck.extend(new)
                for pid in new:
                    os.kill(pid, fault)
                return

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        with deploy(configuration(tmp_path, 1), timeout_seconds=300.0) as service:
            assert len(struck) == 1
            (replica,) = service.replicas("target")
            assert struck[0] not in ranks(replica)
            assert not running(struck[0])
            assert len(service.generate(token_ids=[1, 2, 3], max_tokens=8).choices[0].token_ids) == 8
    finally:
        over.set()
        thread.join()
