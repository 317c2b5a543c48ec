"""The gateway's side of ExecutionService: one stream to one target."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import grpc.aio

from paceline.actors import wire
from paceline.actors.channels import PROTOCOL_VERSION, ChannelSettings
from paceline.actors.client_stream import ClientStream, PeerLostError, PeerRefusedError
from paceline.actors.engine.messages import Cancel, Committed, Finished, Load, Submit
from paceline.actors.identity import TargetIdentity
from paceline.actors.outgoing import PendingSubmits
from paceline.protos import execution_pb2 as pb
from paceline.protos import execution_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)


def _attach(
    channel: grpc.aio.Channel,
) -> grpc.aio.StreamStreamCall[pb.ExecutionRequest, pb.ExecutionResponse]:
    return pb_grpc.ExecutionServiceStub(channel).Attach()  # type: ignore[no-any-return,no-untyped-call]


class ExecutionEvents(Protocol):
    """Who hears of a target's output. Called on the event loop; must not block or raise."""

    def on_committed(self, target_id: str, committed: Committed) -> None: ...

    def on_finished(self, target_id: str, finished: Finished) -> None: ...

    def on_load(self, target_id: str, load: Load) -> None: ...

    def on_lost(self, target_id: str, reason: str) -> None:
        """Nothing more will come: place its sequences elsewhere. Not called after ``close``."""


class ExecutionClient:
    """Used once: attach, submit and cancel until it is lost or closed. Another attempt is another client."""

    def __init__(
        self,
        *,
        address: str,
        gateway_id: str,
        events: ExecutionEvents,
        settings: ChannelSettings | None = None,
    ) -> None:
        self.address = address
        self._gateway_id = gateway_id
        self._events = events
        self._pending = PendingSubmits()
        self._stream: ClientStream[pb.ExecutionRequest, pb.ExecutionResponse] = ClientStream(
            address, settings or ChannelSettings(), _attach, self._pending
        )
        self._task: asyncio.Task[None] | None = None
        self._identity: TargetIdentity | None = None
        self._lost = ""

    @property
    def identity(self) -> TargetIdentity:
        """What the target said of itself (its vocabulary hash is not part of this protocol: empty)."""
        if self._identity is None:
            raise RuntimeError("the client is not attached")
        return self._identity

    @property
    def attached(self) -> bool:
        """Whether submits reach the target."""
        return self._task is not None and not self._lost and not self._task.done()

    async def attach(self) -> TargetIdentity:
        """Dial the target.

        Raises:
            PeerRefusedError: another protocol version.
            PeerLostError: not reachable, or leaving.
        """
        hello = pb.GatewayHello(protocol_version=PROTOCOL_VERSION, gateway_id=self._gateway_id)
        try:
            answer = await self._stream.open(pb.ExecutionRequest(hello=hello))
            welcome = answer.welcome
            if welcome.protocol_version != PROTOCOL_VERSION:
                raise PeerRefusedError(
                    f"{self.address} speaks protocol version {welcome.protocol_version}, this gateway speaks "
                    f"{PROTOCOL_VERSION}; run the same release on both"
                )
        except BaseException:
            await self._stream.close()
            raise
        self._identity = TargetIdentity(
            target_id=welcome.target_id,
            model=welcome.model,
            vocabulary_hash=b"",
            vocab_size=welcome.vocab_size,
            max_model_len=welcome.max_model_len,
            kv_capacity_tokens=welcome.kv_capacity_tokens,
        )
        self._task = asyncio.create_task(self._run(), name=f"execution client of {welcome.target_id}")
        await self._on_message(answer)
        return self._identity

    def submit(self, submit: Submit) -> None:
        """Place a sequence. Raises: PeerLostError if the target is gone."""
        if not self.attached:
            raise PeerLostError(f"{self.address}: {self._lost or 'not attached'}")
        self._pending.submit(submit)
        self._stream.mailbox.notify()

    def cancel(self, cancel: Cancel) -> None:
        """End a sequence; its ``Finished`` comes with reason CANCELLED. No effect on a lost target."""
        if self.attached:
            self._pending.cancel(cancel)
            self._stream.mailbox.notify()

    async def close(self) -> None:
        """Leave the target; it cancels what this gateway still has there. Idempotent."""
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.wait({task})
        await self._stream.close()

    async def _run(self) -> None:
        try:
            await self._stream.run(self._on_message)
            self._lost = "the target ended the stream"
        except (PeerLostError, PeerRefusedError) as error:
            self._lost = str(error)
        except Exception as error:
            logger.exception("reading from target %s failed", self.identity.target_id)
            self._lost = f"{type(error).__name__}: {error}"
        self._events.on_lost(self.identity.target_id, self._lost)

    async def _on_message(self, message: pb.ExecutionResponse) -> None:
        target_id = self.identity.target_id
        for committed in message.committed:
            self._events.on_committed(target_id, wire.committed_from_proto(committed))
        for finished in message.finished:
            self._events.on_finished(target_id, wire.finished_from_proto(finished))
        if message.HasField("load"):
            self._events.on_load(target_id, wire.load_from_proto(message.load))
