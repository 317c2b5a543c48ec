"""Killing and freezing the only draft in the middle of a stream: nobody waits for it, and it comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest

from tests.integration.conftest import Service, wait_until
from tests.integration.streams import (
    LONGEST_PAUSE_SECONDS,
    MIDDLE,
    REPLACED_SECONDS,
    collect,
    configuration,
    wait_for_full_strength,
)

THAWED = MIDDLE + 100
"""Tokens: a hundred steps of the target alone, two seconds."""


@pytest.fixture(scope="module")
def single(deploy: Callable[..., AbstractContextManager[Service]]) -> Iterator[Service]:
    """One target, one draft."""
    with deploy(configuration(1, 1)) as running:
        yield running


def wait_for_another_draft(service: Service, former_id: str) -> dict[str, Any]:
    """The status of the draft that serves in the place of one that is gone."""

    def replaced() -> bool:
        attached = [hello["draft_id"] for target in service.replicas("target") for hello in target["drafts"]]
        running = [draft["id"] for draft in service.replicas("draft")]
        return len(running) == 1 and running == attached and former_id not in running

    wait_until(replaced, timeout_seconds=REPLACED_SECONDS, what="the draft was replaced")
    (draft,) = service.replicas("draft")
    return draft


def num_accepted(service: Service) -> int:
    return sum(target["engine"]["num_accepted_tokens_total"] for target in service.replicas("target"))


def test_killed_draft_is_replaced_and_the_new_one_is_used(single: Service) -> None:
    """B62."""
    wait_for_full_strength(single)
    reference = collect(single, seed=1)
    assert any(reference.accepted)
    (draft,) = single.replicas("draft")
    found = collect(single, 1, {MIDDLE: lambda: os.kill(draft["pid"], signal.SIGKILL)})
    assert found.token_ids == reference.token_ids
    assert found.longest_pause < LONGEST_PAUSE_SECONDS
    # Some tails were still at hand; then the target went on alone.
    assert any(found.accepted[:MIDDLE])
    new = wait_for_another_draft(single, draft["id"])
    assert new["pid"] != draft["pid"]
    accepted_before = num_accepted(single)
    again = collect(single, seed=1)
    assert again.token_ids == reference.token_ids
    # There is no other draft.
    assert sum(again.accepted) > 0
    assert num_accepted(single) - accepted_before == sum(again.accepted)


def test_frozen_draft_holds_nobody_up_and_catches_up_once_it_thaws(single: Service) -> None:
    """B62: a process that is alive but stuck resets no connection: only its silence tells."""
    wait_for_full_strength(single)
    reference = collect(single, seed=2)
    (draft,) = single.replicas("draft")
    freeze = partial(os.kill, draft["pid"], signal.SIGSTOP)
    thaw = partial(os.kill, draft["pid"], signal.SIGCONT)
    try:
        found = collect(single, 2, {MIDDLE: freeze, THAWED: thaw})
    finally:
        thaw()
    assert found.token_ids == reference.token_ids
    assert found.longest_pause < LONGEST_PAUSE_SECONDS
    # What it had sent before is used up soon; then the target goes on alone.
    assert not any(found.accepted[MIDDLE + 30 : THAWED])
    # It is the same draft still, and of use again to the same stream.
    assert any(found.accepted[-50:])
    assert [status["pid"] for status in single.replicas("draft")] == [draft["pid"]]


@pytest.mark.heavy
def test_draft_that_stays_frozen_is_replaced(single: Service) -> None:
    wait_for_full_strength(single)
    reference = collect(single, seed=3)
    (draft,) = single.replicas("draft")
    found = collect(single, 3, {MIDDLE: lambda: os.kill(draft["pid"], signal.SIGSTOP)})
    assert found.token_ids == reference.token_ids
    assert found.longest_pause < LONGEST_PAUSE_SECONDS
    wait_for_another_draft(single, draft["id"])
    again = collect(single, seed=3)
    assert again.token_ids == reference.token_ids
    assert any(again.accepted)
