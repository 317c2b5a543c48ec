"""A shard actor: one rank of a group that is not the leader. No Ray in here."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from paceline.actors import model_spec
from paceline.actors.engine.memory import is_out_of_memory
from paceline.actors.engine.shard_group import ShardMember
from paceline.actors.model_spec import ModelSpec

logger = logging.getLogger(__name__)

ORPHAN_FACTOR = 2.0
"""A shard that its leader has not asked for this many times ``timeout_seconds`` ends itself."""


@dataclass(frozen=True)
class ShardReport:
    """What a shard tells its leader."""

    rank: int
    pid: int
    stage: str
    """starting, loading, following, stopped (as the leader asked) or failed."""
    error: str = ""

    @property
    def lost(self) -> bool:
        """Whether this rank takes part in no further step."""
        return self.stage in ("stopped", "failed")


class Shard:
    """Loads its share of the model and computes every step that the leader announces, on a thread of its own.

    ``report`` answers at any time. A shard that is asked by nobody any more (its leader is stopped, or cut
    off) ends its process, so that nothing waits for ever and what it holds is free again.
    """

    def __init__(
        self, spec: ModelSpec, member: ShardMember, end_process: Callable[[int], object] = os._exit
    ) -> None:
        self._end_process = end_process
        self._spec = spec
        self._member = member
        self._stage = "starting"
        self._error = ""
        self._asked_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"shard {member.rank}", daemon=True)

    def start(self) -> None:
        """Begin to load. Returns at once."""
        self._asked_at = time.monotonic()
        self._thread.start()
        threading.Thread(target=self._watch, name="orphan watch", daemon=True).start()

    def report(self) -> dict[str, Any]:
        """How far this rank is: a ``ShardReport``'s fields. Also tells it that its leader lives."""
        self._asked_at = time.monotonic()
        return asdict(ShardReport(self._member.rank, os.getpid(), self._stage, self._error))

    def _run(self) -> None:
        try:
            self._stage = "loading"
            runner, group = model_spec.load_shard(self._spec, self._member)
            self._stage = "following"
            while (batch := group.receive()) is not None:
                runner.forward(batch)
            self._stage = "stopped"
        except Exception as error:
            logger.exception("rank %d failed", self._member.rank)
            self._error = f"{type(error).__name__}: {error}"
            if self._stage == "following" and is_out_of_memory(error):
                self._error = (
                    "a step does not fit into its memory: lower max_num_batched_tokens, or kv_cache "
                    f"({type(error).__name__})"
                )
            self._stage = "failed"

    def _watch(self) -> None:
        patience = ORPHAN_FACTOR * self._member.timeout_seconds
        while time.monotonic() - self._asked_at < patience:
            time.sleep(1.0)
        logger.error("rank %d: its leader has been silent for %g s", self._member.rank, patience)
        self._end_process(1)
