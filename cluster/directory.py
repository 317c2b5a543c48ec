"""Asking every replica of a Serve deployment at once: how targets are found, how status is gathered.

The only module that uses ``DeploymentHandle.broadcast`` (new in Ray 2.60).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

ENDPOINT_METHOD = "endpoint"
STATUS_METHOD = "status"
DRAIN_METHOD = "drain"


@dataclass(frozen=True)
class Answers:
    """What the replicas of one deployment said, in no particular order."""

    values: tuple[Any, ...]
    num_silent: int
    """Replicas that failed or did not answer in time."""


@contextlib.contextmanager
def lent(handle: DeploymentHandle[Any]) -> Iterator[DeploymentHandle[Any]]:
    """A handle for the length of a block. One to a pool that follows the load has a thread that tells Serve's
    autoscaler of its calls; it would go on when the process has left Ray, and look for another one."""
    try:
        yield handle
    finally:
        handle.shutdown()


def ask_replicas(handle: DeploymentHandle[Any], method: str, *, timeout_seconds: float) -> Answers:
    """Call ``method`` on every replica that takes traffic, and take what comes in time.

    Blocks for at most about ``timeout_seconds``: a replica that is stuck costs its own answer only. Must
    not be called on an event loop (use ``ask_replicas_async`` there).
    """
    try:
        results = handle.broadcast(method).results(timeout_s=timeout_seconds, return_exceptions=True)
    except DeploymentUnavailableError:
        # No replica takes traffic yet, or any more.
        return Answers((), 0)
    except TimeoutError:
        # Serve's controller has not told yet which replicas there are.
        return Answers((), 1)
    values = tuple(result for result in results if not isinstance(result, BaseException))
    return Answers(values, len(results) - len(values))


async def ask_replicas_async(
    handle: DeploymentHandle[Any], method: str, *, timeout_seconds: float
) -> Answers:
    """As ``ask_replicas``, on a thread: the asynchronous collection of Ray is all or nothing on a timeout."""
    return await asyncio.to_thread(ask_replicas, handle, method, timeout_seconds=timeout_seconds)


class TargetDirectory:
    """Where the targets of one application listen.

    A target that fails to answer once stays listed for as long as ``num_misses_allowed`` further looks:
    whether it is alive is for its streams to find out, not for a slow answer.
    """

    def __init__(
        self, handle: DeploymentHandle[Any], *, timeout_seconds: float = 2.0, num_misses_allowed: int = 5
    ) -> None:
        self._handle = handle
        self._timeout_seconds = timeout_seconds
        self._num_misses_allowed = num_misses_allowed
        self._addresses: dict[str, str] = {}
        self._misses: dict[str, int] = {}

    async def discover(self) -> Mapping[str, str]:
        """target_id → ``host:port`` of every target that takes new work."""
        answers = await ask_replicas_async(
            self._handle, ENDPOINT_METHOD, timeout_seconds=self._timeout_seconds
        )
        found = {str(target_id): str(address) for target_id, address in answers.values}
        self._addresses, self._misses = merge_endpoints(
            self._addresses,
            self._misses,
            found,
            num_silent=answers.num_silent,
            num_misses_allowed=self._num_misses_allowed,
        )
        return dict(self._addresses)


def merge_endpoints(
    known: Mapping[str, str],
    misses: Mapping[str, int],
    found: Mapping[str, str],
    *,
    num_silent: int,
    num_misses_allowed: int,
) -> tuple[dict[str, str], dict[str, int]]:
    """The directory after one look: (addresses, misses).

    A known target that is missing is kept only while some replica was silent (it may be that one), and
    for ``num_misses_allowed`` looks in a row at most.
    """
    addresses = dict(found)
    counts: dict[str, int] = {}
    for target_id, address in known.items():
        if target_id in found or num_silent == 0:
            continue
        count = misses.get(target_id, 0) + 1
        if count <= num_misses_allowed:
            addresses[target_id] = address
            counts[target_id] = count
    return addresses, counts
