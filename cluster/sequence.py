"""What the gateway keeps of one sequence: enough to rebuild it on any target."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum, auto

from paceline.actors.engine.messages import Committed, Submit, TokenLogprobs
from paceline.actors.engine.parameters import FinishReason, SpeculationStats
from paceline.actors.engine.stopping import find_stop
from paceline.cluster.requests import CheckedRequest
from paceline.cluster.time_limit import TimeLimit


@dataclass(frozen=True, slots=True)
class CommittedTokens:
    """What was committed since the last look; final."""

    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]
    """Entry i: token_ids[i] was an accepted draft token."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token where the request asks for them, else none."""


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """How a sequence ended. Speculation covers the placements that lived to report it."""

    reason: FinishReason
    speculation: SpeculationStats
    cached_prompt_tokens: int = 0


class Arrival(Enum):
    """What became of a ``Committed``."""

    APPLIED = auto()
    STALE = auto()
    """Of an older placement, or all known already: dropped."""
    BROKEN = auto()
    """It does not continue what is committed: this placement cannot be believed."""


class Displacement(Enum):
    """How a sequence came to need another target."""

    LOST = auto()
    """Its target was lost, failed it, or could not be believed."""
    GIVEN_BACK = auto()
    """Its target takes no more and has not begun it, or handed it over."""
    MOVED = auto()
    """It left a queue for a target that came later."""


class Wait(Enum):
    """What a sequence without a target waits for."""

    DIALLED = auto()
    """A target that is being dialled."""
    STARTED = auto()
    """A target that was asked for: there is none."""
    ANOTHER = auto()
    """Any in the place of the one that it had."""


class Sequence:
    """Prompt, committed tokens, parameters and seed of one sequence, and where it is placed.

    Invariants: ``committed`` only ever grows; a placement has an epoch of its own, and only messages of
    the present epoch count.
    """

    def __init__(self, sequence_id: str, request: CheckedRequest, limit: TimeLimit | None = None) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.limit = limit
        """How long it may live; None = for ever."""
        self.epoch = 0
        self.num_losses = 0
        """How often it has lost its target; given back is not lost."""
        self.failed_before = False
        """A target could not compute it and did not say that the request is wrong."""
        self.displaced: Displacement | None = None
        """The last one since it made progress."""
        self.seconds_waited: dict[Wait, float] = {}
        """Without a target, since it made progress. Time on a target is not in it, nor does it begin anew
        with one: those that give a sequence back at once must not keep it going for ever."""
        self.committed: list[int] = []
        self.accepted: list[bool] = []
        self.logprobs: list[TokenLogprobs] = []
        """One per committed token where the request asks for them, else none."""
        self.speculation = SpeculationStats()
        self.refused_by: set[str] = set()
        """Targets that were full for it, since it made progress or waited last."""
        self.avoids: set[str] = set()
        """Targets that failed it or gave it back, since it made progress last: the others come first."""
        self.stopping = False
        """The gateway has cancelled it and waits for its statistics only."""
        self.result: SequenceResult | None = None
        self.error: Exception | None = None
        self._end: FinishReason | None = None
        """Why the committed tokens themselves end it."""
        self._changed = asyncio.Event()
        self._submitted = False

    @property
    def ended(self) -> bool:
        return self.result is not None or self.error is not None

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.committed)

    @property
    def resuming(self) -> bool:
        """It had a target, which is its target no more, and made no progress since."""
        return self.displaced is not None

    async def wait(self) -> None:
        """Until something changes that a reader may wait for."""
        self._changed.clear()
        await self._changed.wait()

    def next_submit(self, now: float) -> Submit:
        """Begin a new placement: its epoch fences the messages of the former ones.

        Args:
            now: by the event loop's clock; what is left of the limit goes along.
        """
        if self._submitted:
            self.epoch += 1
        self._submitted = True
        request = self.request
        return Submit(
            sequence_id=self.sequence_id,
            epoch=self.epoch,
            token_ids=(*request.prompt_token_ids, *self.committed),
            prompt_length=len(request.prompt_token_ids),
            sampling=request.sampling,
            stopping=request.stopping,
            speculation=request.speculation,
            logprobs=request.logprobs,
            priority=request.priority,
            ttl_seconds=None if self.limit is None else self.limit.deadline - now,
        )

    def read(self, start: int) -> CommittedTokens:
        """Everything committed from the ``start``-th completion token on."""
        return CommittedTokens(
            tuple(self.committed[start:]), tuple(self.accepted[start:]), tuple(self.logprobs[start:])
        )

    def apply(self, message: Committed) -> Arrival:
        """Append newly committed tokens.

        Tokens that are known already are compared and trimmed, as tails are: addressed by absolute
        position, never by order of arrival.
        """
        if message.epoch != self.epoch or self.ended:
            return Arrival.STALE
        known = self.num_tokens - message.base_position
        start = message.base_position - len(self.request.prompt_token_ids)
        if known < 0 or start < 0 or len(message.accepted) != len(message.token_ids):
            return Arrival.BROKEN
        if self.request.logprobs is not None and len(message.logprobs) != len(message.token_ids):
            return Arrival.BROKEN
        overlap = message.token_ids[:known]
        if tuple(self.committed[start : start + len(overlap)]) != overlap:
            return Arrival.BROKEN
        token_ids = message.token_ids[known:]
        if not token_ids:
            return Arrival.STALE
        stop = find_stop(token_ids, len(self.committed), self.request.stopping)
        if stop.num_kept < len(token_ids):
            return Arrival.BROKEN
        self._end = self._end or stop.reason
        self.committed.extend(token_ids)
        self.accepted.extend(message.accepted[known:])
        if self.request.logprobs is not None:
            self.logprobs.extend(message.logprobs[known:])
        self.refused_by.clear()
        self.avoids.clear()
        self.displaced = None
        self.seconds_waited.clear()
        self._changed.set()
        return Arrival.APPLIED

    def find_end(self) -> FinishReason | None:
        """The reason to end that the committed tokens themselves give (a target may die between its last
        ``Committed`` and its ``Finished``)."""
        return self._end

    def finish(self, reason: FinishReason, cached_prompt_tokens: int = 0) -> None:
        self.result = SequenceResult(
            reason, self.speculation, min(cached_prompt_tokens, len(self.request.prompt_token_ids))
        )
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._changed.set()
