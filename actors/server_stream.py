"""The server's end of one long-lived bidirectional stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from paceline.actors.engine_loop import EngineFailedError
from paceline.actors.outgoing import Mailbox, Pending

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


@dataclass(frozen=True)
class StreamStatus:
    """How a stream ends: a gRPC status, whose text is fit for the peer's log."""

    code: grpc.StatusCode
    details: str = ""


OK = StreamStatus(grpc.StatusCode.OK)


class StreamEndError(Exception):
    """Raised while serving a stream to end it with a status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.status = StreamStatus(code, details)


class ServerStream(Generic[RequestT, ResponseT]):
    """Reads one peer's messages and writes what is pending for it, until either side ends.

    Whatever happens, the peer gets a status: a handler that ended in a cancellation of its own making
    would leave the peer waiting for ever.
    """

    def __init__(
        self,
        requests: AsyncIterator[RequestT],
        context: grpc.aio.ServicerContext[RequestT, ResponseT],
        pending: Pending[ResponseT],
    ) -> None:
        self._requests = requests
        self._context = context
        self._pending = pending
        self._status = OK
        self._aborted = asyncio.Event()
        self.mailbox = Mailbox()

    async def first_request(self, timeout_seconds: float) -> RequestT:
        """Raises: StreamEndError if the peer says nothing in time, or nothing at all."""
        try:
            async with asyncio.timeout(timeout_seconds):
                return await anext(self._requests)
        except TimeoutError:
            raise StreamEndError(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {timeout_seconds:g} s"
            ) from None
        except StopAsyncIteration:
            raise StreamEndError(
                grpc.StatusCode.INVALID_ARGUMENT, "the stream ended before its hello"
            ) from None
        except DecodeError as error:
            raise StreamEndError(grpc.StatusCode.INVALID_ARGUMENT, f"unreadable message: {error}") from None

    async def write(self, response: ResponseT) -> None:
        """Write past the mailbox: for the answer to the hello, before ``run``."""
        await self._context.write(response)

    def end(self, status: StreamStatus, *, flush: bool) -> None:
        """End the stream. ``flush``: once all that is pending has been written. The first end wins."""
        if self._status is OK:
            self._status = status
        self.mailbox.close()
        if not flush:
            self._aborted.set()

    async def run(self, on_request: Callable[[RequestT], Awaitable[None]]) -> None:
        """Serve until the peer half-closes (returns), or raise ``StreamEndError`` for another end."""
        reader = asyncio.create_task(self._read(on_request))
        writer = asyncio.create_task(self._write())
        aborted = asyncio.create_task(self._aborted.wait())
        tasks = {reader, writer, aborted}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if self._status is not OK:
                raise StreamEndError(self._status.code, self._status.details)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, on_request: Callable[[RequestT], Awaitable[None]]) -> None:
        try:
            async for request in self._requests:
                await on_request(request)
        except DecodeError as error:
            raise StreamEndError(grpc.StatusCode.INVALID_ARGUMENT, f"unreadable message: {error}") from None

    async def _write(self) -> None:
        async for response in self.mailbox.messages(self._pending):
            await self._context.write(response)


@contextlib.asynccontextmanager
async def answering(context: grpc.aio.ServicerContext[RequestT, ResponseT]) -> AsyncIterator[None]:
    """Turn how a handler ends into the status that the peer sees."""
    try:
        yield
        return
    except StreamEndError as end:
        status = end.status
    except EngineFailedError as error:
        status = StreamStatus(grpc.StatusCode.UNAVAILABLE, str(error))
    except Exception:
        logger.exception("serving a stream failed")
        status = StreamStatus(grpc.StatusCode.INTERNAL, "the target failed to serve this stream; see its log")
    if status.code is not grpc.StatusCode.OK:
        await context.abort(status.code, status.details)
