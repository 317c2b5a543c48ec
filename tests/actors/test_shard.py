"""The shard actor: tells what fails, and does not outlive its leader."""

from __future__ import annotations

import threading
import time

from paceline.actors.engine.shard_group import ShardMember
from paceline.actors.model_spec import ModelSpec
from paceline.actors.shard import Shard, ShardReport


def test_what_fails_is_reported() -> None:
    shard = Shard(ModelSpec("/nowhere"), ShardMember(1, 2, "127.0.0.1", 9), lambda code: None)
    shard.start()
    deadline = time.monotonic() + 30.0
    while not (report := ShardReport(**shard.report())).lost:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (report.rank, report.stage) == (1, "failed")
    assert "/nowhere" in report.error


def test_a_shard_that_nobody_asks_ends_its_process() -> None:
    ended = threading.Event()
    member = ShardMember(1, 2, "127.0.0.1", 9, timeout_seconds=2.0)
    shard = Shard(ModelSpec("/nowhere"), member, lambda code: ended.set())
    shard.start()
    began = time.monotonic()
    while time.monotonic() - began < 6.0:
        shard.report()
        assert not ended.wait(0.1), "its leader asks"
    assert ended.wait(30.0)
