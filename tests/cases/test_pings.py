"""B70: pings on connections that carry nothing else, counted on the wire between processes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import grpc
import grpc.aio
import pytest

from paceline.actors.channels import ChannelSettings, open_channel
from paceline.actors.execution_client import ExecutionClient
from paceline.cluster.gateway import Gateway
from paceline.cluster.service import GenerationLogic, ServiceInfo
from paceline.cluster.tokenization import EmulatedCodec
from paceline.protos import generation_pb2 as proto
from paceline.protos import generation_pb2_grpc as rpc
from tests.actors.link import Link
from tests.cases.process import Process
from tests.cases.service import Answer, until
from tests.cases.test_failures import DRAFT_SOURCE, TARGET_SOURCE
from tests.requests import request

pytestmark = pytest.mark.asyncio(loop_scope="package")

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PING, GOAWAY = 6, 7
ACK = 1
FRAME_HEADER_BYTES = 9

DEFAULT_PINGS = 5
"""By then a server with gRPC's defaults has hung up: two that come too soon are forgiven, and some are there
to measure the connection."""

FASTEST_SECONDS = 1.0
"""Core sends pings no faster."""


class Frames:
    """One direction of an HTTP/2 connection, cut into frames."""

    def __init__(self) -> None:
        self._unread = bytearray()
        self._begun = False
        self.is_client = False
        self.num_pings = 0
        """Without answers to the other side's."""
        self.num_goaways = 0

    def feed(self, data: bytes) -> None:
        self._unread += data
        if not self._begun:
            if len(self._unread) < FRAME_HEADER_BYTES or (
                PREFACE.startswith(self._unread[: len(PREFACE)]) and len(self._unread) < len(PREFACE)
            ):
                return
            self._begun = True
            if self._unread.startswith(PREFACE):
                self.is_client = True
                del self._unread[: len(PREFACE)]
        while len(self._unread) >= FRAME_HEADER_BYTES:
            length, kind, flags = int.from_bytes(self._unread[:3]), self._unread[3], self._unread[4]
            if len(self._unread) < FRAME_HEADER_BYTES + length:
                return
            del self._unread[: FRAME_HEADER_BYTES + length]
            self.num_pings += kind == PING and not flags & ACK
            self.num_goaways += kind == GOAWAY


class WatchedLink(Link):
    """A link that tells what passed over it."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.directions: list[Frames] = []

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        frames = Frames()
        self.directions.append(frames)
        while data := await source.read(65536):
            frames.feed(data)
            sink.write(data)

    @property
    def num_connections(self) -> int:
        return sum(frames.is_client for frames in self.directions)

    @property
    def num_client_pings(self) -> int:
        return sum(frames.num_pings for frames in self.directions if frames.is_client)

    @property
    def num_goaways(self) -> int:
        return sum(frames.num_goaways for frames in self.directions)


class Trio:
    """A target and a draft, each a process, and a gateway here, which reach the target over links."""

    def __init__(self, keepalive_seconds: float) -> None:
        self._channels = ChannelSettings(keepalive_seconds=keepalive_seconds)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Trio:
        async with AsyncExitStack() as stack:
            target = await Process.target("a", TARGET_SOURCE, self._channels)
            stack.push_async_callback(target.end)
            self.from_draft = await stack.enter_async_context(WatchedLink(target.line))
            self.from_gateway = await stack.enter_async_context(WatchedLink(target.line))
            draft = await Process.draft("draft", DRAFT_SOURCE, self._channels, {"a": self.from_draft.address})
            stack.push_async_callback(draft.end)
            self.gateway = Gateway(
                "gateway",
                connect=lambda address, events: ExecutionClient(
                    address=address, gateway_id="gateway", events=events, settings=self._channels
                ),
            )
            stack.push_async_callback(self.gateway.close)
            self._logic = GenerationLogic(self.gateway, EmulatedCodec(256), ServiceInfo("tiny"))
            stack.callback(self._logic.close)
            self.gateway.update_targets({"a": self.from_gateway.address})
            await until(lambda: self.gateway.snapshot().targets, what="the target is attached", seconds=30)
            await until(lambda: self.from_draft.num_connections, what="the draft has dialled", seconds=30)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def links(self) -> list[WatchedLink]:
        return [self.from_draft, self.from_gateway]

    async def collect(self, num_tokens: int) -> Answer:
        answer = Answer()
        async for chunk in self._logic.generate_stream(request("go", max_tokens=num_tokens, seed=1)):
            answer.add(chunk)
        return answer


async def check_idle_streams_are_kept(trio: Trio, idle_seconds: float) -> list[int]:
    """Before and after a time without a request: the same tokens over the same connections, and the draft is
    of use. Returns how many pings each end that dials sent meanwhile: a ping of the other end, too, puts off
    its next one."""
    before = await trio.collect(200)
    assert before.speculation.accepted_tokens > 0
    pings = [link.num_client_pings for link in trio.links]
    await asyncio.sleep(idle_seconds)
    pings = [link.num_client_pings - sent for link, sent in zip(trio.links, pings, strict=True)]
    after = await trio.collect(1500)
    assert after.token_ids[:200] == before.token_ids
    assert after.speculation.accepted_tokens > 0
    assert [link.num_goaways for link in trio.links] == [0, 0]
    assert [link.num_connections for link in trio.links] == [1, 1]
    assert trio.gateway.snapshot().num_failovers == 0
    return pings


async def test_far_more_pings_than_a_server_allows_by_default() -> None:
    async with Trio(FASTEST_SECONDS) as trio:
        pings = await check_idle_streams_are_kept(trio, 12.0)
    assert min(pings) > DEFAULT_PINGS


@pytest.mark.heavy
@pytest.mark.timeout(800)
async def test_streams_outlive_ten_idle_minutes() -> None:
    """At the settings that a service has, and with ten times as many pings."""
    real = ChannelSettings().keepalive_seconds
    async with Trio(real) as usual, Trio(FASTEST_SECONDS) as eager:
        usual_pings, eager_pings = await asyncio.gather(
            check_idle_streams_are_kept(usual, 600.0),
            check_idle_streams_are_kept(eager, 600.0),
        )
    assert min(usual_pings) > 2 * DEFAULT_PINGS
    assert min(eager_pings) > 40 * DEFAULT_PINGS
    print(f"pings in ten minutes: {usual_pings} and {eager_pings}")


class Silent(rpc.GenerationServiceServicer):
    """Answers nothing until it is told to."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def GetModelInfo(  # noqa: N802
        self, message: proto.GetModelInfoRequest, context: object
    ) -> proto.GetModelInfoResponse:
        await self.released.wait()
        return proto.GetModelInfoResponse()


async def test_a_server_left_at_its_defaults_hangs_up() -> None:
    """What these cases are about does happen where nothing is done about it, and is seen on the link."""
    server = grpc.aio.server()
    silent = Silent()
    rpc.add_GenerationServiceServicer_to_server(silent, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with WatchedLink(address) as link:
            channel = open_channel(link.address, ChannelSettings(keepalive_seconds=FASTEST_SECONDS))
            async with channel:
                call = rpc.GenerationServiceStub(channel).GetModelInfo(proto.GetModelInfoRequest())
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call
                assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
                assert "too_many_pings" in (raised.value.details() or "").lower().replace(" ", "_")
            assert link.num_goaways == 1
            assert link.num_client_pings <= DEFAULT_PINGS
    finally:
        silent.released.set()
        await server.stop(None)
