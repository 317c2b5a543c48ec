"""Callers that leave in masses, pings, and replicas that go, through Serve's own proxy."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack

import grpc
import grpc.aio
import pytest

from paceline.protos import generation_pb2 as proto
from paceline.protos import generation_pb2_grpc as rpc
from tests.integration.conftest import Service, wait_until
from tests.requests import request

MODEL = "emulated://puncture?vocab_size=512&base_ms=20&support=6&max_model_len=1024"
NUM_ON_ONE_CONNECTION = 150
STATUS_SECONDS = 10.0
"""A caller without a deadline hears within this time that its answer will not come."""


@pytest.fixture(scope="module")
def lifetime() -> Iterator[ExitStack]:
    """Closing it removes the service."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def service(deploy: Callable[..., AbstractContextManager[Service]], lifetime: ExitStack) -> Service:
    return lifetime.enter_context(deploy(content()))


def content() -> dict[str, object]:
    return {
        "model": MODEL,
        "draft": {"model": MODEL.replace("base_ms=20", "base_ms=3") + "&acceptance=0.7", "num_threads": 1},
        # Long enough for a replica to start on a busy machine.
        "gateway": {"graceful_shutdown_timeout_s": 2.0, "resume_timeout_s": 110.0},
        "target": {
            "kv_cache": {"num_blocks": 1024},
            "num_threads": 1,
            "max_num_waiting": 512,
            "graceful_shutdown_timeout_s": 2.0,
        },
    }


def wait_for_idle(service: Service, timeout_seconds: float) -> None:
    def idle() -> bool:
        (target,) = service.replicas("target")
        (draft,) = service.replicas("draft")
        engine = target["engine"]
        return (
            engine["num_running"] == engine["num_waiting"] == 0
            and engine["free_blocks"] == engine["total_blocks"]
            and draft["engine"]["num_sequences"] == 0
            and draft["engine"]["num_free_blocks"] == draft["engine"]["num_blocks"]
        )

    wait_until(idle, timeout_seconds=timeout_seconds, what="every block of target and draft is free again")


def num_committed(service: Service) -> int:
    (target,) = service.replicas("target")
    return int(target["engine"]["num_committed_tokens_total"])


def behind_haproxy() -> bool:
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"


async def cancel_at_random(address: str, num_streams: int, seed: int) -> list[grpc.StatusCode]:
    """Open so many streams at once and cancel each within half a second; how each ended."""
    rng = random.Random(seed)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)

        async def cancelled(index: int, seconds: float) -> grpc.StatusCode:
            call = stub.GenerateStream(request(f"attack {index}", max_tokens=900))
            asyncio.get_running_loop().call_later(seconds, call.cancel)
            try:
                async for _ in call:
                    pass
            except asyncio.CancelledError:
                pass
            return await call.code()

        return await asyncio.gather(*(cancelled(i, rng.uniform(0.0, 0.5)) for i in range(num_streams)))


@pytest.mark.parametrize(
    "seeds", [[58], pytest.param(range(5), marks=[pytest.mark.heavy, pytest.mark.timeout(600)])]
)
def test_three_hundred_streams_cancelled_at_random_leave_nothing(
    service: Service, seeds: Sequence[int]
) -> None:
    """B58: no cancellation is lost while a call is being set up: soon no token is generated any more."""
    expected = list(service.generate(prompt="peace", max_tokens=40, seed=1).choices[0].token_ids)
    for seed in seeds:
        before = num_committed(service)
        codes = asyncio.run(cancel_at_random(service.address, 300, seed))
        assert set(codes) == {grpc.StatusCode.CANCELLED}
        # Serve's default proxy does not pass every cancellation on: those streams run to their end.
        wait_for_idle(service, 3.0 if behind_haproxy() else 60.0)
        committed = num_committed(service)
        assert committed > before, "every stream was gone before it began"
        time.sleep(0.5)
        assert num_committed(service) == committed
        again = service.generate(prompt="peace", max_tokens=40, seed=1)
        assert list(again.choices[0].token_ids) == expected
        assert again.speculation.accepted_tokens > 0


def test_one_connection_carries_hundreds_of_streams(service: Service) -> None:
    """HAProxy's own limit is 100, and a client library holds back what is above it without a word."""

    def num_here() -> int:
        (target,) = service.replicas("target")
        return int(target["engine"]["num_running"] + target["engine"]["num_waiting"])

    def all_here() -> bool:
        found.append(num_here())
        return found[-1] == NUM_ON_ONE_CONNECTION

    found: list[int] = []
    calls = [
        service.stub.GenerateStream(request(prompt="crowd", max_tokens=1000, seed=seed))
        for seed in range(NUM_ON_ONE_CONNECTION)
    ]
    try:
        wait_until(all_here, timeout_seconds=30, what="all streams are at the target")
        assert found[-1] == NUM_ON_ONE_CONNECTION
        assert not any(call.done() for call in calls)
    finally:
        for call in calls:
            call.cancel()
    wait_for_idle(service, 60)


def test_pings_on_an_idle_channel_are_allowed(service: Service) -> None:
    """B70: far more of them than a gRPC server allows by default, which answers the third with GOAWAY."""
    if not behind_haproxy():
        pytest.skip("Serve's default proxy allows a ping in five minutes")
    options = [
        ("grpc.keepalive_time_ms", 100),
        ("grpc.keepalive_timeout_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_time_between_pings_ms", 100),
        ("grpc.enable_retries", 0),
    ]
    with grpc.insecure_channel(service.address, options=options) as channel:
        stub = rpc.GenerationServiceStub(channel)
        stub.GetModelInfo(proto.GetModelInfoRequest(), timeout=20)
        states: list[grpc.ChannelConnectivity] = []
        channel.subscribe(states.append)
        time.sleep(3.0)
        answer = stub.Generate(request("long", max_tokens=300), timeout=60)
        assert len(answer.choices[0].token_ids) == 300
        assert set(states) <= {grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.IDLE}


class Reader(threading.Thread):
    """Reads one stream, whose caller set no deadline, to its end."""

    def __init__(self, service: Service) -> None:
        super().__init__(daemon=True)
        self._call = service.stub.GenerateStream(request("on", max_tokens=900, seed=4))
        self.num_tokens = 0
        self.finished = False
        self.code: grpc.StatusCode | None = None
        self.start()

    def run(self) -> None:
        try:
            for chunk in self._call:
                self.num_tokens += len(chunk.token_ids)
                self.finished = self.finished or bool(chunk.finish_reason)
        except grpc.RpcError as error:
            self.code = error.code()


def still_waiting(readers: list[Reader], since: float) -> list[Reader]:
    """Those that have heard nothing within the time."""
    for reader in readers:
        reader.join(max(0.0, since + STATUS_SECONDS - time.monotonic()))
    return [reader for reader in readers if reader.is_alive()]


def test_killed_gateway_ends_its_streams_with_a_status(service: Service) -> None:
    """B66, B69: never with what looks like a normal end; the next gateway serves as the one before."""
    readers = [Reader(service) for _ in range(4)]
    wait_until(lambda: all(r.num_tokens for r in readers), timeout_seconds=30, what="the streams run")
    (gateway,) = service.replicas("gateway")
    service.kill(gateway)
    assert still_waiting(readers, time.monotonic()) == []
    assert not {reader.code for reader in readers} & {None, grpc.StatusCode.OK}
    assert not any(reader.finished for reader in readers)

    codes: list[grpc.StatusCode] = []

    def serves_again() -> bool:
        try:
            return len(service.generate(prompt="again", max_tokens=8).choices[0].token_ids) == 8
        except grpc.RpcError as error:
            codes.append(error.code())
            return False

    wait_until(serves_again, timeout_seconds=60, what="another gateway serves")
    assert set(codes) <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL}
    # The targets found that their gateway is gone.
    wait_for_idle(service, 10)


def test_the_only_target_killed_midway_is_replaced_and_no_token_changes(service: Service) -> None:
    """Callers see nothing but a pause: the gateway keeps what is needed to go on elsewhere."""
    expected = [
        list(service.generate(prompt="heal", max_tokens=200, seed=seed).choices[0].token_ids)
        for seed in range(4)
    ]
    with ThreadPoolExecutor(4) as pool:
        running = [
            pool.submit(service.generate, prompt="heal", max_tokens=200, seed=seed) for seed in range(4)
        ]

        def target_is_busy() -> bool:
            (target,) = service.replicas("target")
            return bool(target["engine"]["num_running"] == 4)

        wait_until(target_is_busy, timeout_seconds=10, what="the target runs the requests")
        assert not any(call.done() for call in running)
        service.kill(service.replicas("target")[0])
        answers = [call.result(timeout=120) for call in running]
    assert [list(answer.choices[0].token_ids) for answer in answers] == expected


def test_service_that_is_removed_ends_every_stream_with_a_status(
    service: Service, lifetime: ExitStack
) -> None:
    """B69, the last one: stopping all replicas, in the order that Serve chooses, leaves no caller waiting."""
    readers = [Reader(service) for _ in range(4)]
    wait_until(lambda: all(r.num_tokens for r in readers), timeout_seconds=30, what="the streams run")
    since = time.monotonic()
    lifetime.close()
    assert still_waiting(readers, since) == []
    assert not {reader.code for reader in readers} & {None, grpc.StatusCode.OK}
    assert not any(reader.finished for reader in readers)
