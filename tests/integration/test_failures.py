"""Killing what may die: two targets, two drafts, emulated."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from tests.integration.conftest import Service, wait_until

MODEL = "emulated://breakaway?vocab_size=512&base_ms=20&support=6&max_model_len=1024"
MAX_TOKENS = 250


@pytest.fixture(scope="module")
def service(deploy: Callable[..., AbstractContextManager[Service]]) -> Iterator[Service]:
    with deploy(
        {
            "model": MODEL,
            "draft": {
                "model": MODEL.replace("base_ms=20", "base_ms=4") + "&acceptance=0.6",
                "num_replicas": 2,
                "num_threads": 1,
            },
            "target": {"num_replicas": 2, "kv_cache": {"num_blocks": 2048}, "num_threads": 1},
            "speculation": {"ngram": {"enabled": False}},
        }
    ) as running:
        yield running


def collect(service: Service, seed: int) -> tuple[list[int], list[bool], list[float]]:
    """Token ids, which of them a draft proposed, and when each chunk came."""
    token_ids: list[int] = []
    accepted: list[bool] = []
    times: list[float] = []
    for chunk in service.stream(prompt="attack", max_tokens=MAX_TOKENS, seed=seed):
        token_ids.extend(chunk.token_ids)
        accepted.extend(chunk.accepted)
        times.append(time.monotonic())
    return token_ids, accepted, times


def all_attached(service: Service) -> bool:
    """Both targets have both drafts."""
    targets = service.replicas("target")
    return [len(target["drafts"]) for target in targets] == [2, 2]


def wait_for_full_strength(service: Service) -> None:
    wait_until(lambda: all_attached(service), timeout_seconds=60, what="every target has both drafts")


def test_killed_draft_changes_no_token_and_is_replaced(service: Service) -> None:
    wait_for_full_strength(service)
    reference, drafted, _ = collect(service, seed=1)
    assert any(drafted)
    busy_before = {draft["pid"] for draft in service.replicas("draft")}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(collect, service, 1)
        serving: list[dict[str, object]] = []

        def a_draft_serves() -> bool:
            serving[:] = [draft for draft in service.replicas("draft") if draft["engine"]["num_sequences"]]
            return bool(serving)

        wait_until(a_draft_serves, timeout_seconds=10, what="a draft has the sequence")
        service.kill(serving[0])
        killed_at = time.monotonic()
        token_ids, accepted, times = running.result()
    assert token_ids == reference
    after = [moment for moment in times if moment > killed_at]
    gaps = [later - earlier for earlier, later in itertools.pairwise(after)]
    assert after, "the stream was over before the draft was killed"
    assert max(gaps, default=0.0) < 1.0
    # The other draft took over before the stream ended.
    assert any(accepted[-50:])
    wait_for_full_strength(service)
    assert {draft["pid"] for draft in service.replicas("draft")} != busy_before
    again, drafted, _ = collect(service, seed=1)
    assert again == reference
    assert any(drafted)


def test_killed_target_changes_no_token_of_any_request(service: Service) -> None:
    wait_for_full_strength(service)
    seeds = range(16)
    with ThreadPoolExecutor(16) as pool:
        reference = [found[0] for found in pool.map(lambda seed: collect(service, seed), seeds)]
        running = [pool.submit(collect, service, seed) for seed in seeds]
        targets: list[dict[str, object]] = []

        def both_are_busy() -> bool:
            targets[:] = service.replicas("target")
            return len(targets) == 2 and all(
                target["engine"]["num_running"] and target["engine"]["num_committed_tokens_total"]
                for target in targets
            )

        wait_until(both_are_busy, timeout_seconds=10, what="both targets run requests")
        assert not any(call.done() for call in running)
        service.kill(targets[0])
        found = [call.result()[0] for call in running]
    assert found == reference
    assert all(len(token_ids) == MAX_TOKENS for token_ids in found)
    (gateway,) = service.replicas("gateway")
    assert gateway["num_failovers"] > 0
    wait_for_full_strength(service)
