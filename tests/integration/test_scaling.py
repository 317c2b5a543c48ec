"""Pools that grow, shrink and are replaced under load: nobody's request fails, and no token changes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from ray import serve

from paceline.cluster import application
from paceline.cluster.runtime import Runtime, application_progress
from paceline.cluster.service_start import APPLICATION_NAME, ROUTE_PREFIX
from tests.integration.by_hand import PoolByHand
from tests.integration.conftest import Service, wait_until
from tests.requests import request

MODEL = "emulated://peloton?vocab_size=512&base_ms=20&support=6&max_model_len=4096"
SLOW_MODEL = MODEL.replace("base_ms=20", "base_ms=200")
"""So slow that the time which busy processors take from its drafts matters little."""
SLOW_DRAFT = MODEL.replace("base_ms=20", "base_ms=10") + "&acceptance=0.85"
ByHand = Callable[[str, int, int], PoolByHand]

NUM_SEEDS = 8
MAX_TOKENS = 40


def ask(service: Service, seed: int, *, stream: bool) -> list[int]:
    """Token ids of one request."""
    options: dict[str, Any] = {"prompt": f"rider {seed}", "max_tokens": MAX_TOKENS, "seed": seed}
    if stream:
        return [token_id for chunk in service.stream(**options) for token_id in chunk.token_ids]
    return list(service.generate(**options).choices[0].token_ids)


@dataclass
class SteadyLoad:
    """Requests at a steady rate, every other one a stream, from ``start`` until ``stop``."""

    service: Service
    per_second: float
    answers: list[tuple[int, Future[list[int]]]] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with ThreadPoolExecutor(256) as pool:
            began = time.monotonic()
            for number in itertools.count():
                if self._ended.wait(max(began + number / self.per_second - time.monotonic(), 0.0)):
                    return
                seed = number % NUM_SEEDS
                stream = bool(number // NUM_SEEDS % 2)
                self.answers.append((seed, pool.submit(ask, self.service, seed, stream=stream)))

    def __enter__(self) -> SteadyLoad:
        self._thread = threading.Thread(target=self.run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Returns when every request has its answer."""
        self._ended.set()
        self._thread.join()

    def failures(self, expected: dict[int, list[int]]) -> list[str]:
        """What went wrong, one line for each request."""
        found = []
        for seed, answer in self.answers:
            error = answer.exception()
            if isinstance(error, grpc.RpcError):
                found.append(f"{error.code().name}: {error.details()}")
            elif error is not None:
                found.append(repr(error))
            elif answer.result() != expected[seed]:
                found.append(f"seed {seed}: {len(answer.result())} tokens, not the expected ones")
        return found


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ByHand:
    """A function from a pool's name, its first and its largest size to its remote control. To be called
    before the service is deployed."""

    def control(name: str, start: int, most: int) -> PoolByHand:
        pool = PoolByHand(name, tmp_path / name)
        options = pool.autoscaling(start, most)
        monkeypatch.setattr(application, f"{name}_autoscaling", lambda _: options)
        return pool

    return control


def pids(service: Service) -> set[int]:
    """Processes of gateways and targets."""
    return {replica["pid"] for pool in ("gateway", "target") for replica in service.replicas(pool)}


def settled() -> bool:
    """Nothing of the application is on its way."""
    status, _, pools = application_progress(APPLICATION_NAME)
    return status == "RUNNING" and not any(sum(pool.other.values()) for pool in pools)


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_scaling_and_redeploying_targets_under_load_fails_no_request(
    deploy: Callable[..., AbstractContextManager[Service]],
    runtime: Runtime,
    by_hand: ByHand,
) -> None:
    targets = by_hand("target", 3, 3)
    configuration = {
        "model": MODEL,
        "target": {"kv_cache": {"num_blocks": 1024}, "num_threads": 1},
        "speculation": {"ngram": {"enabled": False}},
    }
    with deploy(configuration) as service:
        expected = {seed: ask(service, seed, stream=False) for seed in range(NUM_SEEDS)}
        assert all(len(token_ids) == MAX_TOKENS for token_ids in expected.values())
        with SteadyLoad(service, per_second=20.0) as load:
            time.sleep(2.0)
            seconds = {"3 to 1": targets.resize(1), "1 to 3": targets.resize(3)}
            before = pids(service)
            began = time.monotonic()
            again = application.build_app(service.config)
            serve.run_many(
                [serve.RunTarget(target=again, name=APPLICATION_NAME, route_prefix=ROUTE_PREFIX)],
                wait_for_applications_running=False,
            )
            wait_until(
                lambda: settled() and not before & pids(service),
                timeout_seconds=240,
                what="every replica is another one",
            )
            seconds["redeploy"] = time.monotonic() - began
            time.sleep(2.0)
        failures = load.failures(expected)
        print({"requests": len(load.answers), "failures": len(failures), "seconds": seconds})
        assert failures == []


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_draft_pool_comes_and_goes_and_speed_follows(
    deploy: Callable[..., AbstractContextManager[Service]], by_hand: ByHand
) -> None:
    drafts = by_hand("draft", 0, 4)
    # Targets need not report: the drafts' size is set by hand.
    configuration = {
        "model": SLOW_MODEL,
        "draft": {"model": SLOW_DRAFT, "num_threads": 1, "autoscaling_config": {"max_replicas": 4}},
        "target": {"kv_cache": {"num_blocks": 4096}, "num_threads": 1},
        "speculation": {"num_speculative_tokens": 4, "ngram": {"enabled": False}},
    }
    num_streams = 16
    with deploy(configuration) as service:
        counts = [0] * num_streams
        found: list[list[int]] = [[] for _ in range(num_streams)]
        ended = threading.Event()

        def read(seed: int) -> None:
            message = request(prompt=f"stage {seed}", max_tokens=3500, seed=seed)
            call = service.stub.GenerateStream(message, timeout=500)
            for chunk in call:
                found[seed].extend(chunk.token_ids)
                counts[seed] += len(chunk.token_ids)
                if ended.is_set():
                    call.cancel()
                    return

        def speed(seconds: float) -> float:
            began, tokens = time.monotonic(), sum(counts)
            time.sleep(seconds)
            return (sum(counts) - tokens) / (time.monotonic() - began)

        with ThreadPoolExecutor(num_streams) as pool:
            streams = [pool.submit(read, seed) for seed in range(num_streams)]
            wait_until(lambda: min(counts) > 10, timeout_seconds=60, what="every stream runs")
            speeds = {"without": speed(6.0)}
            seconds = {"0 to 4": drafts.resize(4)}
            wait_until(
                lambda: len(service.replicas("target")[0]["drafts"]) == 4,
                timeout_seconds=60,
                what="four drafts are attached",
            )
            time.sleep(2.0)
            speeds["with four"] = speed(6.0)
            seconds["4 to 0"] = drafts.resize(0)
            speeds["without again"] = speed(6.0)
            ended.set()
            for stream in streams:
                stream.result()
        print({"tokens/s": speeds, "seconds": seconds, "tokens": sum(counts)})

        def alone(seed: int) -> list[int]:
            """What the stream says that never had a draft."""
            message = request(prompt=f"stage {seed}", max_tokens=len(found[seed]), seed=seed)
            return list(service.stub.Generate(message, timeout=300).choices[0].token_ids)

        with ThreadPoolExecutor(num_streams) as pool:
            assert list(pool.map(alone, range(num_streams))) == found
        assert speeds["with four"] > 1.3 * max(speeds["without"], speeds["without again"])
