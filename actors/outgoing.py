"""What waits to be written to a peer, merged by sequence while the stream is blocked.

A stream has one writer. While HTTP/2 holds it back, further output is merged into what waits: its size
is bounded by the live sequences and their lengths, not by how long the peer has been slow.

A message is applied in one fixed order, whatever it was merged from. TargetMessage: closes, opens,
verdicts. ExecutionRequest: submits, cancels. ExecutionResponse: committed, finished, load.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from paceline.actors import wire
from paceline.actors.engine.messages import (
    Cancel,
    Candidates,
    Close,
    Committed,
    Decline,
    Finished,
    Load,
    Open,
    Submit,
    Verdict,
)
from paceline.protos import execution_pb2 as execution
from paceline.protos import verification_pb2 as verification

MessageT_co = TypeVar("MessageT_co", covariant=True)
PendingT = TypeVar("PendingT", bound="Pending[object]")

Key = tuple[str, int]
"""(sequence id, epoch): one placement of a sequence."""

MAX_MESSAGE_TOKENS = 1 << 21
"""Of the new sequences of one message, where it has more than one: some 8 MiB."""


class Pending(Protocol[MessageT_co]):
    """Output that waits for the stream."""

    def take(self) -> MessageT_co | None:
        """What fits of it as one message, or None where nothing waits."""


class Mailbox:
    """Wakes the one writer of a stream. Used on the event loop only."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._closed = False

    def notify(self) -> None:
        """Something may be waiting."""
        self._changed.set()

    def close(self) -> None:
        """End the writer once nothing waits any more."""
        self._closed = True
        self._changed.set()

    async def messages(self, pending: Pending[MessageT_co]) -> AsyncIterator[MessageT_co]:
        """Messages as they become due, until closed."""
        while True:
            message = pending.take()
            if message is not None:
                yield message
            elif self._closed:
                return
            else:
                self._changed.clear()
                await self._changed.wait()


def how_many_fit(num_tokens: Sequence[int]) -> int:
    """How many of the first items go into one message: at least one, together at most so many tokens that
    the message stays far below what a channel carries."""
    total = 0
    for count, tokens in enumerate(num_tokens):
        total += tokens
        if count and total > MAX_MESSAGE_TOKENS:
            return count
    return len(num_tokens)


class PendingCommits:
    """Target -> gateway. Consecutive committed tokens of a sequence are joined; the latest load wins."""

    def __init__(self) -> None:
        self._committed: dict[Key, list[Committed]] = {}
        self._finished: list[Finished] = []
        self._load: Load | None = None

    def add(
        self, committed: Iterable[Committed], finished: Iterable[Finished], load: Load | None = None
    ) -> None:
        for item in committed:
            run = self._committed.setdefault((item.sequence_id, item.epoch), [])
            if run and run[-1].base_position + len(run[-1].token_ids) == item.base_position:
                run[-1] = replace(
                    run[-1],
                    token_ids=run[-1].token_ids + item.token_ids,
                    accepted=run[-1].accepted + item.accepted,
                    logprobs=run[-1].logprobs + item.logprobs,
                )
            else:
                run.append(item)
        self._finished.extend(finished)
        if load is not None:
            self._load = load

    def take(self) -> execution.ExecutionResponse | None:
        if not self._committed and not self._finished and self._load is None:
            return None
        message = execution.ExecutionResponse(
            committed=[wire.committed_to_proto(item) for run in self._committed.values() for item in run],
            finished=[wire.finished_to_proto(item) for item in self._finished],
            load=None if self._load is None else wire.load_to_proto(self._load),
        )
        self._committed, self._finished, self._load = {}, [], None
        return message


class PendingVerdicts:
    """Target -> draft. Per placement at most a close of its former life, an open, and one verdict.

    An open absorbs the verdicts that follow it, and a close cancels whatever waits.
    """

    def __init__(self) -> None:
        self._closes: dict[Key, Close] = {}
        self._opens: dict[Key, Open] = {}
        self._verdicts: dict[Key, list[Verdict]] = {}

    def add(self, opens: Iterable[Open], verdicts: Iterable[Verdict], closes: Iterable[Close]) -> None:
        """One pass of the engine, in which a sequence is opened, ruled on and closed, in this order."""
        for opened in opens:
            key = (opened.sequence_id, opened.epoch)
            self._verdicts.pop(key, None)
            self._opens[key] = opened
        for verdict in verdicts:
            self._add_verdict(verdict)
        for close in closes:
            key = (close.sequence_id, close.epoch)
            self._verdicts.pop(key, None)
            if self._opens.pop(key, None) is None:
                self._closes[key] = close

    def _add_verdict(self, verdict: Verdict) -> None:
        key = (verdict.sequence_id, verdict.epoch)
        opened = self._opens.get(key)
        if opened is not None and len(opened.token_ids) == verdict.base_position:
            self._opens[key] = replace(
                opened, token_ids=opened.token_ids + verdict.committed_token_ids, window=verdict.window
            )
            return
        run = self._verdicts.setdefault(key, [])
        if run and run[-1].base_position + len(run[-1].committed_token_ids) == verdict.base_position:
            run[-1] = replace(
                run[-1],
                num_accepted=run[-1].num_accepted + verdict.num_accepted,
                committed_token_ids=run[-1].committed_token_ids + verdict.committed_token_ids,
                window=verdict.window,
                branch_tokens=verdict.branch_tokens,
                tail_tokens=verdict.tail_tokens,
            )
        else:
            run.append(verdict)

    def take(self) -> verification.TargetMessage | None:
        if not self._closes and not self._opens and not self._verdicts:
            return None
        num_opens = how_many_fit([len(item.token_ids) for item in self._opens.values()])
        opens = list(self._opens.items())
        self._opens = dict(opens[num_opens:])
        waiting = {key: run for key, run in self._verdicts.items() if key in self._opens}
        message = verification.TargetMessage(
            opens=[wire.open_to_proto(item) for _, item in opens[:num_opens]],
            verdicts=[
                wire.verdict_to_proto(item)
                for key, run in self._verdicts.items()
                if key not in waiting
                for item in run
            ],
            closes=[wire.close_to_proto(item) for item in self._closes.values()],
        )
        self._closes, self._verdicts = {}, waiting
        return message


class PendingCandidates:
    """Draft -> target. Chains of one revision are joined; a newer revision replaces the older one,
    whose remaining tokens are committed by now."""

    def __init__(self) -> None:
        self._candidates: dict[Key, list[Candidates]] = {}
        self._declines: dict[Key, Decline] = {}
        self._step_seconds = 0.0
        self._step_tokens = self._num_awake = 0
        self._goodbye: str | None = None

    def add(
        self,
        candidates: Iterable[Candidates],
        declines: Iterable[Decline],
        step_seconds: float = 0.0,
        step_tokens: int = 0,
        num_awake: int = 0,
    ) -> None:
        for item in candidates:
            self._add_candidates(item)
        for decline in declines:
            key = (decline.sequence_id, decline.epoch)
            self._candidates.pop(key, None)
            self._declines[key] = decline
        self._step_seconds, self._step_tokens, self._num_awake = step_seconds, step_tokens, num_awake

    def forget(self, sequence_id: str, epoch: int) -> None:
        """The target has closed this placement: nothing of it is worth sending."""
        self._candidates.pop((sequence_id, epoch), None)
        self._declines.pop((sequence_id, epoch), None)

    def say_goodbye(self, reason: str) -> None:
        """Nothing but a goodbye is still to be said."""
        self._candidates, self._declines, self._goodbye = {}, {}, reason

    def _add_candidates(self, item: Candidates) -> None:
        run = self._candidates.setdefault((item.sequence_id, item.epoch), [])
        if run and run[-1].revision < item.revision:
            run.clear()
        follows = run and run[-1].base_position + len(run[-1].token_ids) == item.base_position
        # Laws are one per token or none at all.
        if follows and bool(run[-1].laws) == bool(item.laws):
            run[-1] = replace(
                run[-1], token_ids=run[-1].token_ids + item.token_ids, laws=run[-1].laws + item.laws
            )
        else:
            run.append(item)

    def take(self) -> verification.DraftMessage | None:
        if not self._candidates and not self._declines and self._goodbye is None:
            return None
        message = verification.DraftMessage(
            candidates=[wire.candidates_to_proto(item) for run in self._candidates.values() for item in run],
            declines=[wire.decline_to_proto(item) for item in self._declines.values()],
            goodbye=None if self._goodbye is None else verification.Goodbye(reason=self._goodbye),
            step_microseconds=max(0, round(self._step_seconds * 1e6)),
            step_tokens=self._step_tokens,
            num_awake=self._num_awake,
        )
        self._candidates, self._declines, self._goodbye = {}, {}, None
        return message


class PendingSubmits:
    """Gateway -> target. Bounded by the gateway's own live requests."""

    def __init__(self) -> None:
        self._submits: list[Submit] = []
        self._cancels: dict[Key, Cancel] = {}

    def submit(self, submit: Submit) -> None:
        self._submits.append(submit)

    def cancel(self, cancel: Cancel) -> None:
        self._cancels[(cancel.sequence_id, cancel.epoch)] = cancel

    def take(self) -> execution.ExecutionRequest | None:
        if not self._submits and not self._cancels:
            return None
        num_submits = how_many_fit([len(item.token_ids) for item in self._submits])
        submits, self._submits = self._submits[:num_submits], self._submits[num_submits:]
        # What is cancelled has to be known first.
        waiting = {(item.sequence_id, item.epoch) for item in self._submits}
        message = execution.ExecutionRequest(
            submits=[wire.submit_to_proto(item) for item in submits],
            cancels=[wire.cancel_to_proto(item) for key, item in self._cancels.items() if key not in waiting],
        )
        self._cancels = {key: item for key, item in self._cancels.items() if key in waiting}
        return message
