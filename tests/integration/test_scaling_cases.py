"""Faults of autoscaling that others met: a pool that stays large after the load, and one that never grows."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import grpc
import pytest

from paceline.cluster.runtime import application_progress
from paceline.cluster.service_start import APPLICATION_NAME
from paceline.protos import generation_pb2 as proto
from tests.integration.conftest import Service, sizes, wait_until
from tests.integration.streams import asking
from tests.integration.test_pools import FOLLOWING

MODEL = "emulated://keirin?vocab_size=512&base_ms=20&support=6&max_model_len=4096"
BOUNDS = {"min_replicas": 1, "max_replicas": 3}
LOAD_SECONDS = 60.0
DOWN_SECONDS = FOLLOWING["look_back_period_s"] + FOLLOWING["downscale_delay_s"] + 60.0
UP_SECONDS = 120.0


def following(target_ongoing_requests: int) -> dict[str, Any]:
    return {**BOUNDS, **FOLLOWING, "target_ongoing_requests": target_ongoing_requests}


def states() -> dict[str, Counter[str]]:
    """Replicas by state, by pool."""
    return {
        pool.name: +Counter({"RUNNING": pool.running, **pool.other})
        for pool in application_progress(APPLICATION_NAME)[2]
    }


@pytest.mark.heavy
@pytest.mark.timeout(480)
def test_pools_of_a_streaming_service_go_back_to_one_replica_after_the_load(
    deploy: Callable[..., AbstractContextManager[Service]],
) -> None:
    """B59: what was refused at the ingress does not count as running for ever, nor does what was streamed."""
    configuration = {
        "model": MODEL,
        # The first gateway alone must refuse some of the streams.
        "gateway": {
            "autoscaling_config": following(4),
            "max_ongoing_requests": 6,
            "max_queued_requests": 0,
        },
        "target": {"autoscaling_config": following(4), "kv_cache": {"num_blocks": 1024}, "num_threads": 1},
        "speculation": {"ngram": {"enabled": False}},
    }
    one_each = {pool: Counter(RUNNING=1) for pool in ("gateway", "target")}
    ends: Counter[str] = Counter()
    most: Counter[str] = Counter()
    with deploy(configuration) as service:

        def ask(seed: int, ended: threading.Event) -> None:
            while not ended.is_set():
                try:
                    chunks = list(service.stream(prompt=f"round {seed}", max_tokens=50, seed=seed))
                except grpc.RpcError as error:
                    ends[error.code().name] += 1
                    ended.wait(0.5)
                else:
                    ends[proto.FinishReason.Name(chunks[-1].finish_reason)] += 1

        assert states() == one_each
        with asking(12, ask):
            until = time.monotonic() + LOAD_SECONDS
            while time.monotonic() < until:
                most |= Counter(sizes())
                time.sleep(0.5)
        stopped = time.monotonic()
        wait_until(
            lambda: states() == one_each, timeout_seconds=DOWN_SECONDS, what="one replica of each pool"
        )
        print({"most": most, "streams": ends, "seconds until one": time.monotonic() - stopped})
    assert most == Counter(gateway=3, target=3)
    assert ends.keys() == {"FINISH_REASON_LENGTH", "RESOURCE_EXHAUSTED"}


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("pool", "options"), [("gateway", {"max_ongoing_requests": 1}), ("target", {"max_num_seqs": 1})]
)
def test_a_burst_on_replicas_that_take_one_request_at_a_time_adds_replicas(
    deploy: Callable[..., AbstractContextManager[Service]], pool: str, options: dict[str, Any]
) -> None:
    """B60: those that wait count."""
    content: dict[str, Any] = {
        "model": MODEL,
        "target": {"kv_cache": {"num_blocks": 1024}, "num_threads": 1},
        "speculation": {"ngram": {"enabled": False}},
    }
    content[pool] = content.get(pool, {}) | options | {"autoscaling_config": following(1)}
    with deploy(content) as service, ThreadPoolExecutor(20) as threads:
        assert sizes()[pool] == 1

        def ask(seed: int) -> int:
            """A replica needs half a minute for all twenty."""
            answer = service.generate(prompt=f"sprint {seed}", max_tokens=80, seed=seed)
            return len(answer.choices[0].token_ids)

        began = time.monotonic()
        answers = [threads.submit(ask, seed) for seed in range(20)]
        wait_until(lambda: sizes()[pool] == 3, timeout_seconds=UP_SECONDS, what=f"three replicas of {pool}")
        seconds = time.monotonic() - began
        num_waiting = sum(not answer.done() for answer in answers)
        print({"pool": pool, "seconds until three": seconds, "unanswered then": num_waiting})
        assert [answer.result() for answer in answers] == [80] * 20
