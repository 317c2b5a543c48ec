"""What a caller is told: a gRPC status and one clear sentence for each way in which a request can fail."""

from __future__ import annotations

import grpc

from paceline.actors.engine.errors import InvalidArgumentError, PacelineError, QueueFullError

MAX_DETAILS_BYTES = 2048
"""Status details travel in HTTP/2 trailers, which proxies and clients bound (8 KiB is common)."""


class RequestError(PacelineError):
    """A request failed. Subclasses say how; ``code`` is what the caller gets."""

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL


class ModelNotFoundError(RequestError):
    """The request names a model that this service does not serve."""

    code = grpc.StatusCode.NOT_FOUND

    def __init__(self, model: str, served: str) -> None:
        super().__init__(f"model: {model[:128]!r} is not served here; this service serves {served!r}")


class UnavailableError(RequestError):
    """No target can take or go on with the request at present. A later try may succeed."""

    code = grpc.StatusCode.UNAVAILABLE


class OverloadedError(RequestError):
    """Every target's queue is full."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class TimeExceededError(RequestError):
    """The request took longer than the service allows."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class TargetFailedError(RequestError):
    """A target could not compute this request, for a reason that lies with the service."""


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Status code and details for an error that ends a request.

    Errors that are not Paceline's own give INTERNAL without their text, which may hold anything: the
    server's log has it.
    """
    if isinstance(error, InvalidArgumentError):
        return grpc.StatusCode.INVALID_ARGUMENT, _bounded(str(error))
    if isinstance(error, RequestError):
        return error.code, _bounded(str(error))
    if isinstance(error, QueueFullError):
        return grpc.StatusCode.RESOURCE_EXHAUSTED, _bounded(str(error))
    return grpc.StatusCode.INTERNAL, "internal error; the gateway's log has the cause"


def _bounded(details: str) -> str:
    encoded = details.encode("utf-8", errors="replace")
    if len(encoded) <= MAX_DETAILS_BYTES:
        return details
    return encoded[: MAX_DETAILS_BYTES - 4].decode("utf-8", errors="ignore") + " …"
