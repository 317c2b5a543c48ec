"""Killing one of two drafts, and one of two targets, in the middle of streams: the others take over."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.integration.conftest import Service
from tests.integration.streams import (
    LONGEST_PAUSE_SECONDS,
    MAX_TOKENS,
    MIDDLE,
    collect_all,
    configuration,
    token_ids,
    wait_for_full_strength,
)


@pytest.fixture(scope="module")
def pairs(deploy: Callable[..., AbstractContextManager[Service]]) -> Iterator[Service]:
    """Two targets, two drafts."""
    with deploy(configuration(2, 2)) as running:
        yield running


def test_other_draft_takes_the_sequences_of_a_killed_one(pairs: Service) -> None:
    wait_for_full_strength(pairs)
    # Two on each target, so that every draft has one of each.
    seeds = range(4)
    reference = collect_all(pairs, seeds)
    before = pairs.replicas("draft")
    assert all(draft["engine"]["num_drafted_tokens_total"] for draft in before)
    found = collect_all(pairs, seeds, {MIDDLE: lambda: os.kill(before[0]["pid"], signal.SIGKILL)})
    assert token_ids(found) == token_ids(reference)
    for stream in found:
        assert stream.longest_pause < LONGEST_PAUSE_SECONDS
        assert any(stream.accepted[-50:])
    wait_for_full_strength(pairs)
    (new,) = [
        draft for draft in pairs.replicas("draft") if draft["pid"] not in {old["pid"] for old in before}
    ]
    assert token_ids(collect_all(pairs, seeds)) == token_ids(reference)
    (new,) = [draft for draft in pairs.replicas("draft") if draft["id"] == new["id"]]
    assert new["engine"]["num_drafted_tokens_total"] > 0


def test_killed_target_changes_no_token_of_any_request(pairs: Service) -> None:
    wait_for_full_strength(pairs)
    seeds = range(16)
    reference = collect_all(pairs, seeds)
    (gateway,) = pairs.replicas("gateway")
    num_failovers = gateway["num_failovers"]
    before = pairs.replicas("target")
    found = collect_all(pairs, seeds, {MIDDLE: lambda: os.kill(before[0]["pid"], signal.SIGKILL)})
    assert token_ids(found) == token_ids(reference)
    assert all(len(stream.token_ids) == MAX_TOKENS for stream in found)
    (gateway,) = pairs.replicas("gateway")
    # Placement is even, so that half of them ran there.
    assert gateway["num_failovers"] - num_failovers == len(seeds) // 2
    wait_for_full_strength(pairs)
    new = {target["pid"] for target in pairs.replicas("target")}
    assert before[0]["pid"] not in new
    assert before[1]["pid"] in new
