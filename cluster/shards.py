"""The ranks of one replica whose model is divided: where they run, and that they live and die together.

A replica asks Serve for a placement group with one bundle per rank. It sits in the first itself, as the
leader, and starts one shard actor in each of the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.actors import model_spec
from paceline.actors.engine.errors import ModelError, PacelineError, ShardGroupError
from paceline.actors.engine.shard_group import ShardGroup, ShardMember, open_store
from paceline.actors.engine_loop import EngineFailedError
from paceline.actors.model_spec import LoadedModel, Loader, ModelSpec
from paceline.actors.shard import Shard, ShardReport
from paceline.cluster.config import ModelPool
from paceline.cluster.replica_options import actor_options

logger = logging.getLogger("ray.serve")

ResultT = TypeVar("ResultT")

WATCH_SECONDS = 1.0
"""How often each shard is asked whether it lives."""

FIRST_REPORT_SECONDS = 120.0
"""How long a shard's process may take to come up, its bundle being reserved already."""


class ShardActor:
    """A Ray actor around ``Shard``."""

    def __init__(self, spec: ModelSpec, member: ShardMember) -> None:
        self._shard = Shard(spec, member)
        self._shard.start()

    def report(self) -> dict[str, Any]:
        """A ``ShardReport``'s fields."""
        return self._shard.report()


class ShardGang:
    """The leader's view of the other ranks: starts them, watches them, ends them.

    The gang fails as one: as soon as one rank is lost (it died, it does not answer within
    ``pool.shard_timeout_s``, it says that it failed), the others are killed, ``on_lost`` is called, and
    ``check`` raises, so that Serve replaces the replica.
    """

    def __init__(self, pool: ModelPool, spec: ModelSpec) -> None:
        self._pool = pool
        self._spec = spec
        self._size = pool.tensor_parallel_size
        self._shards: list[Any] = []
        self._reports: dict[int, ShardReport] = {}
        self._store: Any = None
        self._member: ShardMember | None = None
        self._group: ShardGroup | None = None
        self._failure = ""
        self._on_lost: Callable[[str], None] = lambda reason: None
        self._lost = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    async def start(self, host: str) -> None:
        """Start a shard in each bundle but the first. They load while the leader does.

        Args:
            host: this node's address, at which the other ranks dial the leader.

        Raises:
            ShardGroupError: there is no free port, or no placement group.
        """
        placement = ray.util.get_current_placement_group()
        if placement is None:
            raise ShardGroupError("a replica of several ranks needs a placement group, and has none")
        member = ShardMember(0, self._size, host, 0, timeout_seconds=self._pool.shard_timeout_s)
        self._store = open_store(host, member.start_timeout_seconds)
        members = [
            ShardMember(rank, self._size, host, self._store.port, self._pool.shard_timeout_s)
            for rank in range(self._size)
        ]
        self._member = members[0]
        options = actor_options(self._pool)
        actor = ray.remote(ShardActor)
        for other in members[1:]:
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=placement, placement_group_bundle_index=other.rank
            )
            self._shards.append(
                actor.options(
                    **options, scheduling_strategy=strategy, max_restarts=0, max_concurrency=2
                ).remote(self._spec, other)
            )
        self._watch = asyncio.create_task(self._run_watch(), name="shard watch")

    def load(self, spec: ModelSpec, *, max_num_batched_tokens: int) -> LoadedModel:
        """``model_spec.load`` as the leader of the gang."""
        loaded = model_spec.load(
            spec, max_num_batched_tokens=max_num_batched_tokens, member=self._member, store=self._store
        )
        self._group = loaded.group
        return loaded

    async def bring_up(self, start: Coroutine[Any, Any, ResultT], on_lost: Callable[[str], None]) -> ResultT:
        """Run ``start``, which loads the leader, unless a rank is lost meanwhile.

        Args:
            on_lost: called on the event loop once a rank is lost, from the end of ``start`` on.

        Raises: ModelError: a rank is lost; the text says why. Else what ``start`` raises.
        """
        starting = asyncio.ensure_future(start)
        lost = asyncio.create_task(self._lost.wait())
        waited: set[asyncio.Future[Any]] = {starting, lost}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not self._failure:
                result = starting.result()
                self._on_lost = on_lost
                return result
            if starting.done():
                # What the leader met may be no more than an echo of the loss.
                logger.info("the leader's start ended with %r", starting.exception())
            raise ModelError(self._failure)
        except BaseException:
            await self.stop()
            raise
        finally:
            lost.cancel()
            if not starting.done():
                starting.cancel()

    def check(self) -> None:
        """Raises: EngineFailedError once a rank is lost."""
        if self._failure:
            raise EngineFailedError(self._failure)

    def status(self) -> dict[str, Any]:
        """For ``paceline status``: plain values."""
        return {
            "shards": [asdict(report) for _, report in sorted(self._reports.items())],
            "group": asdict(self._group.times) if self._group is not None else None,
        }

    async def stop(self) -> None:
        """End the other ranks. Idempotent."""
        if self._watch is not None and self._watch is not asyncio.current_task():
            self._watch.cancel()
            await asyncio.wait({self._watch})
        self._kill_shards()

    def _kill_shards(self) -> None:
        for shard in self._shards:
            ray.kill(shard, no_restart=True)
        self._shards.clear()

    async def _run_watch(self) -> None:
        try:
            await asyncio.gather(
                *(self._watch_shard(rank, shard) for rank, shard in enumerate(self._shards, start=1))
            )
        except PacelineError as error:
            self._lose(str(error))
        except Exception as error:
            logger.exception("watching the shards failed")
            self._lose(f"watching the shards failed: {type(error).__name__}: {error}")

    async def _watch_shard(self, rank: int, shard: Any) -> None:
        """Ask again and again. Raises: ShardGroupError once the rank is lost."""
        patience = FIRST_REPORT_SECONDS
        while True:
            try:
                async with asyncio.timeout(patience):
                    report = ShardReport(**await shard.report.remote())
            except TimeoutError:
                known = self._reports.get(rank)
                process = f" (process {known.pid})" if known is not None else ""
                raise ShardGroupError(
                    f"rank {rank} of {self._size}{process} has not answered for {patience:g} s"
                ) from None
            except ray.exceptions.RayActorError as error:
                raise ShardGroupError(f"rank {rank} of {self._size} died: {_first_line(error)}") from error
            self._reports[rank] = report
            if report.lost:
                raise ShardGroupError(f"rank {rank} of {self._size} {report.stage}: {report.error}")
            patience = self._pool.shard_timeout_s
            await asyncio.sleep(WATCH_SECONDS)

    def _lose(self, reason: str) -> None:
        logger.error("%s: this replica ends", reason)
        self._failure = reason
        self._lost.set()
        self._kill_shards()
        self._on_lost(reason)


async def gang_of(pool: ModelPool, spec: ModelSpec) -> ShardGang | None:
    """The other ranks of this replica, started; None where it has its model to itself."""
    if pool.tensor_parallel_size == 1:
        return None
    gang = ShardGang(pool, spec)
    await gang.start(ray.util.get_node_ip_address())
    return gang


def loader_of(gang: ShardGang | None) -> Loader:
    """How a replica with this gang loads its model."""
    return model_spec.load if gang is None else gang.load


async def bring_up(
    gang: ShardGang | None, start: Coroutine[Any, Any, ResultT], on_lost: Callable[[str], None]
) -> ResultT:
    """``ShardGang.bring_up``; without a gang just ``start``."""
    return await start if gang is None else await gang.bring_up(start, on_lost)


def check_gang(gang: ShardGang | None) -> None:
    """Raises: EngineFailedError once a rank is lost."""
    if gang is not None:
        gang.check()


def gang_status(gang: ShardGang | None) -> dict[str, Any]:
    """What a replica's status has on its other ranks."""
    return {} if gang is None else gang.status()


async def end_gang(gang: ShardGang | None) -> None:
    """End the other ranks."""
    if gang is not None:
        await gang.stop()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
