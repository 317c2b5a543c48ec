"""The target's side of VerificationService: drafts attach, candidates come in, verdicts go out."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import grpc
import grpc.aio

from paceline.actors import wire
from paceline.actors.channels import PROTOCOL_VERSION, ChannelSettings
from paceline.actors.engine.errors import IncompatibleDraftError, InvalidArgumentError
from paceline.actors.engine.messages import DraftHello
from paceline.actors.engine.target_engine import DraftOutput, TargetEngine
from paceline.actors.engine_loop import EngineLoop
from paceline.actors.identity import TargetIdentity
from paceline.actors.machine import Cores, num_usable_cores, share_cores
from paceline.actors.outgoing import PendingVerdicts
from paceline.actors.server_stream import ServerStream, StreamEndError, StreamStatus, answering
from paceline.actors.vocabulary import check_compatible
from paceline.protos import verification_pb2 as pb
from paceline.protos import verification_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

OutputT = TypeVar("OutputT")


@dataclass
class AttachedDraft:
    """One draft's stream. A draft that dials again gets another peer name."""

    peer: str
    hello: DraftHello
    pending: PendingVerdicts
    stream: ServerStream[pb.DraftMessage, pb.TargetMessage]


class VerificationServicer(pb_grpc.VerificationServiceServicer):
    """Serves the draft pool of one target. All methods run on the event loop."""

    def __init__(
        self,
        identity: TargetIdentity,
        engine_loop: EngineLoop[TargetEngine, OutputT],
        settings: ChannelSettings,
    ) -> None:
        self._identity = identity
        self._engine_loop = engine_loop
        self._settings = settings
        self._drafts: dict[str, AttachedDraft] = {}
        self._counter = itertools.count()
        self._closing: StreamStatus | None = None

    @property
    def drafts(self) -> list[DraftHello]:
        """The drafts that are attached now."""
        return [draft.hello for draft in self._drafts.values()]

    def publish(self, outputs: Mapping[str, DraftOutput]) -> None:
        """Hand each draft what the engine has for it."""
        for peer, output in outputs.items():
            draft = self._drafts.get(peer)
            if draft is not None:
                draft.pending.add(output.opens, output.verdicts, output.closes)
                draft.stream.mailbox.notify()

    def end_streams(self, status: StreamStatus, *, flush: bool) -> None:
        """End every stream with ``status``, and refuse new ones with it."""
        self._closing = status
        for draft in self._drafts.values():
            draft.stream.end(status, flush=flush)

    async def Attach(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.DraftMessage],
        context: grpc.aio.ServicerContext[pb.DraftMessage, pb.TargetMessage],
    ) -> None:
        """One draft, from its hello to its end."""
        async with answering(context):
            pending = PendingVerdicts()
            stream = ServerStream(aiter(request_iterator), context, pending)
            first = await stream.first_request(self._settings.hello_timeout_seconds)
            hello = self._admit(first)
            await stream.write(
                pb.TargetMessage(
                    welcome=pb.Welcome(
                        protocol_version=PROTOCOL_VERSION,
                        target_id=self._identity.target_id,
                        model=self._identity.model,
                        vocab_size=self._identity.vocab_size,
                    )
                )
            )
            draft = AttachedDraft(f"{hello.draft_id}#{next(self._counter)}", hello, pending, stream)
            await self._serve(draft)

    def _admit(self, first: pb.DraftMessage) -> DraftHello:
        """Raises: StreamEndError, whose text tells the draft's operator what to change."""
        if self._closing is not None:
            raise StreamEndError(self._closing.code, self._closing.details)
        if not first.HasField("hello"):
            raise StreamEndError(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello")
        proto = first.hello
        if proto.protocol_version != PROTOCOL_VERSION:
            raise StreamEndError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"draft {proto.draft_id!r} speaks protocol version {proto.protocol_version}, target "
                f"{self._identity.target_id!r} speaks {PROTOCOL_VERSION}; run the same release on both",
            )
        try:
            hello = self._compared(wire.hello_from_proto(proto))
            check_compatible(
                draft_model=proto.model,
                draft_vocabulary=proto.vocabulary_hash,
                target_model=self._identity.model,
                target_vocabulary=self._identity.vocabulary_hash,
            )
        except InvalidArgumentError as error:
            raise StreamEndError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        except IncompatibleDraftError as error:
            logger.error("refused draft %s: %s", proto.draft_id, error)
            raise StreamEndError(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None
        return hello

    def _compared(self, hello: DraftHello) -> DraftHello:
        theirs = Cores(hello.host, hello.num_threads)
        shares_cores = share_cores(self._identity.cores, theirs, num_usable_cores())
        if shares_cores:
            logger.info("draft %s computes with the cores of this target: they take turns", hello.draft_id)
        return replace(hello, shares_cores=shares_cores)

    async def _serve(self, draft: AttachedDraft) -> None:
        for other in list(self._drafts.values()):
            if other.hello.draft_id == draft.hello.draft_id:
                # Its former connection is dead, only not noticed yet.
                other.stream.end(
                    StreamStatus(grpc.StatusCode.ABORTED, "a newer stream of the same draft took over"),
                    flush=False,
                )
        self._drafts[draft.peer] = draft
        self._engine_loop.post(lambda engine: engine.draft_joined(draft.peer, draft.hello))
        logger.info("draft %s attached (%s)", draft.peer, draft.hello.model)

        async def on_request(message: pb.DraftMessage) -> None:
            self._handle(draft, message)
            await self._engine_loop.relieve()

        try:
            await draft.stream.run(on_request)
        finally:
            del self._drafts[draft.peer]
            self._engine_loop.post(lambda engine: engine.draft_left(draft.peer))
            logger.info("draft %s left", draft.peer)

    def _handle(self, draft: AttachedDraft, message: pb.DraftMessage) -> None:
        peer = draft.peer
        candidates = [wire.candidates_from_proto(item) for item in message.candidates]
        declines = [wire.decline_from_proto(item) for item in message.declines]
        step_seconds, step_tokens = message.step_microseconds * 1e-6, message.step_tokens
        num_awake = message.num_awake
        received_at = time.monotonic()

        def event(engine: TargetEngine) -> None:
            if candidates:
                engine.candidates(
                    peer, candidates, step_seconds, received_at, step_tokens=step_tokens, num_awake=num_awake
                )
            for decline in declines:
                engine.decline(peer, decline)

        if candidates or declines:
            self._engine_loop.post(event)
        if message.HasField("goodbye"):
            logger.info("draft %s says goodbye: %s", peer, message.goodbye.reason)
            draft.stream.end(StreamStatus(grpc.StatusCode.OK, "goodbye"), flush=False)
