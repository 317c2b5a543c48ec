"""The draft's side of VerificationService: one stream to one target."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TypeVar

import grpc.aio

from paceline.actors import wire
from paceline.actors.channels import PROTOCOL_VERSION, ChannelSettings
from paceline.actors.client_stream import ClientStream, PeerLostError, PeerRefusedError
from paceline.actors.engine.draft_engine import CandidateOutput, DraftEngine
from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.messages import Decline, DraftHello, Open
from paceline.actors.engine_loop import EngineLoop
from paceline.actors.grammar import GrammarCompiler, prepare_constraint
from paceline.actors.outgoing import PendingCandidates
from paceline.protos import verification_pb2 as pb
from paceline.protos import verification_pb2_grpc as pb_grpc

OutputT = TypeVar("OutputT")

_counter = itertools.count()


def _attach(channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[pb.DraftMessage, pb.TargetMessage]:
    return pb_grpc.VerificationServiceStub(channel).Attach()  # type: ignore[no-any-return,no-untyped-call]


class VerificationClient:
    """Feeds the draft engine with one target's sequences and sends what it proposes.

    Used once: ``run`` from dialling to the end of the stream. Another attempt is another client.

    Args:
        on_attached: called when the target has taken this draft in.
    """

    def __init__(
        self,
        *,
        target_id: str,
        address: str,
        hello: DraftHello,
        vocabulary_hash: bytes,
        engine_loop: EngineLoop[DraftEngine, OutputT],
        settings: ChannelSettings,
        constraints: GrammarCompiler | None = None,
        on_attached: Callable[[], None] = lambda: None,
    ) -> None:
        self.target_id = target_id
        self.address = address
        self.peer = f"{target_id}#{next(_counter)}"
        """The engine's name for this target; a target that is dialled again gets another one."""
        self._hello = pb.DraftMessage(
            hello=wire.hello_to_proto(
                hello, protocol_version=PROTOCOL_VERSION, vocabulary_hash=vocabulary_hash
            )
        )
        self._engine_loop = engine_loop
        self._constraints = constraints
        self._pending = PendingCandidates()
        self._stream: ClientStream[pb.DraftMessage, pb.TargetMessage] = ClientStream(
            address, settings, _attach, self._pending
        )
        self._on_attached = on_attached
        self.attached = False
        self.was_attached = False

    def publish(self, output: CandidateOutput) -> None:
        """Send what the engine has for this target."""
        if self.attached:
            self._pending.add(
                output.candidates,
                output.declines,
                output.step_seconds,
                output.step_tokens,
                output.num_awake,
            )
            self._stream.mailbox.notify()

    def leave(self, reason: str) -> None:
        """Say goodbye; the target then ends the stream, and ``run`` returns."""
        self._pending.say_goodbye(reason)
        self._stream.mailbox.close()

    async def run(self) -> None:
        """Serve the target until ``leave`` (returns).

        Raises:
            PeerRefusedError: the target refuses this draft (another vocabulary or protocol).
            PeerLostError: the target cannot be reached, or the stream broke.
        """
        try:
            welcome = (await self._stream.open(self._hello)).welcome
            if welcome.protocol_version != PROTOCOL_VERSION:
                raise PeerRefusedError(
                    f"{self.address} speaks protocol version {welcome.protocol_version}, this draft speaks "
                    f"{PROTOCOL_VERSION}; run the same release on both"
                )
            if welcome.target_id != self.target_id:
                raise PeerLostError(
                    f"{self.address} is target {welcome.target_id!r} now, not {self.target_id!r}"
                )
            self._engine_loop.post(lambda engine: engine.target_joined(self.peer, welcome.vocab_size))
            self.attached = self.was_attached = True
            self._on_attached()
            await self._stream.run(self._on_message)
        finally:
            if self.attached:
                self.attached = False
                self._engine_loop.post(lambda engine: engine.target_left(self.peer))
            await self._stream.close()

    async def _on_message(self, message: pb.TargetMessage) -> None:
        """Closes first, then opens, then verdicts: the order that a merged message is made for."""
        closes = [wire.close_from_proto(item) for item in message.closes]
        opens = [opened for item in message.opens if (opened := await self._read_open(item)) is not None]
        verdicts = [wire.verdict_from_proto(item) for item in message.verdicts]
        received_at = time.monotonic()
        for close in closes:
            self._pending.forget(close.sequence_id, close.epoch)

        def event(engine: DraftEngine) -> None:
            for close in closes:
                engine.close(self.peer, close)
            for opened in opens:
                engine.open(self.peer, opened)
            for verdict in verdicts:
                engine.verdict(self.peer, verdict, received_at)

        self._engine_loop.post(event)
        await self._engine_loop.relieve()

    async def _read_open(self, proto: pb.Open) -> Open | None:
        """An open that cannot be read is declined alone."""
        try:
            opened = wire.open_from_proto(proto)
            # Here, not on the engine's thread: a step of everybody would wait for it.
            await prepare_constraint(self._constraints, opened.sampling.constraint)
            return opened
        except InvalidArgumentError as error:
            self._pending.add([], [Decline(proto.sequence_id, proto.epoch, str(error))])
            self._stream.mailbox.notify()
            return None
