"""The dialling end of one long-lived bidirectional stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]

from paceline.actors.channels import ChannelSettings, open_channel
from paceline.actors.engine.errors import PacelineError
from paceline.actors.outgoing import Mailbox, Pending
from paceline.actors.tls import TlsError

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

_REFUSALS = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)


class PeerRefusedError(PacelineError):
    """The peer will not serve this client, however often it dials."""


class PeerLostError(PacelineError):
    """The peer cannot be reached, or its stream broke. Dialling again may help."""


class ClientStream(Generic[RequestT, ResponseT]):
    """One stream on a channel of its own. Used once: open, run, close.

    Args:
        method: makes the call on a channel, for example ``lambda channel: Stub(channel).Attach()``.
        pending: what is to be written.
    """

    def __init__(
        self,
        address: str,
        settings: ChannelSettings,
        method: Callable[[grpc.aio.Channel], grpc.aio.StreamStreamCall[RequestT, ResponseT]],
        pending: Pending[RequestT],
    ) -> None:
        self.address = address
        self._settings = settings
        self._method = method
        self._pending = pending
        self._channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.StreamStreamCall[RequestT, ResponseT] | None = None
        self.mailbox = Mailbox()

    async def open(self, hello: RequestT) -> ResponseT:
        """Dial, say hello and return the answer.

        Raises:
            PeerRefusedError: the peer said no, with its reason.
            PeerLostError: there was no answer in time.
        """
        timeout = self._settings.hello_timeout_seconds
        try:
            self._channel = open_channel(self.address, self._settings)
        except TlsError as error:
            raise PeerLostError(f"{self.address} cannot be dialled: {error}") from None
        self._call = self._method(self._channel)
        try:
            async with asyncio.timeout(timeout):
                try:
                    await self._call.write(hello)
                    answer = await self._call.read()
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    # The call is over; its status says why.
                    answer = EOF
                if answer is EOF:
                    raise await self._ended()
        except TimeoutError:
            raise PeerLostError(f"{self.address} did not answer within {timeout:g} s") from None
        return answer  # type: ignore[return-value]

    async def run(self, on_response: Callable[[ResponseT], Awaitable[None]]) -> None:
        """Read and write until the mailbox is closed and the peer ends the stream (returns).

        Raises: PeerRefusedError or PeerLostError where the stream ends in another way.
        """
        assert self._call is not None, "open the stream first"
        reader = asyncio.create_task(self._read(self._call, on_response))
        writer = asyncio.create_task(self._write(self._call))
        try:
            # A writer that fails means that the call is over: the reader then finds its status.
            await reader
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def close(self) -> None:
        """Drop the stream and its channel, whatever state they are in. Idempotent."""
        if self._call is not None:
            self._call.cancel()
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close(None)

    async def _read(
        self,
        call: grpc.aio.StreamStreamCall[RequestT, ResponseT],
        on_response: Callable[[ResponseT], Awaitable[None]],
    ) -> None:
        while True:
            try:
                response = await call.read()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                response = EOF
            if response is EOF:
                if await call.code() is grpc.StatusCode.OK:
                    return
                raise await self._ended()
            await on_response(response)  # type: ignore[arg-type]

    async def _write(self, call: grpc.aio.StreamStreamCall[RequestT, ResponseT]) -> None:
        try:
            async for request in self.mailbox.messages(self._pending):
                await call.write(request)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return

    async def _ended(self) -> PeerRefusedError | PeerLostError:
        assert self._call is not None
        code, details = await self._call.code(), await self._call.details()
        if code in _REFUSALS:
            return PeerRefusedError(details or f"{self.address} refused the stream ({code.name})")
        return PeerLostError(f"{self.address}: {code.name}: {details or 'the stream ended'}")
