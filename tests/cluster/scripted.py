"""A target whose every move the test makes: what arrives is recorded, what it says is said by hand.

Its tokens follow a law that depends on the seed and the absolute position only, as a real target's do, so
that a sequence must read the same whichever targets it was on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from paceline.actors.client_stream import PeerLostError
from paceline.actors.engine.messages import Cancel, Committed, Finished, Load, Submit, TokenLogprobs
from paceline.actors.engine.parameters import (
    FinishReason,
    SamplingParams,
    SpeculationParams,
    SpeculationStats,
    StoppingParams,
)
from paceline.actors.engine.stopping import find_stop
from paceline.actors.execution_client import ExecutionEvents
from paceline.actors.identity import TargetIdentity
from paceline.cluster.gateway import Gateway, GatewaySettings
from paceline.cluster.requests import CheckedRequest
from paceline.cluster.sequence_stream import SequenceStream


def token(seed: int, position: int) -> int:
    return (seed * 31 + position * 7) % 251


def completion(request: CheckedRequest, count: int) -> list[int]:
    start = len(request.prompt_token_ids)
    return [token(request.sampling.seed, start + i) for i in range(count)]


def logprobs_at(position: int, token_id: int, num_top: int) -> TokenLogprobs:
    """What a scripted target reports of the token at this absolute position."""
    top = tuple(((token_id + rank) % 256, -0.5 * position - rank) for rank in range(num_top))
    return TokenLogprobs(-0.5 * position, top)


def checked(
    prompt: Sequence[int] = (1, 2, 3),
    *,
    seed: int = 5,
    max_tokens: int = 12,
    stop: tuple[str, ...] = (),
    n: int = 1,
    logprobs: int | None = None,
) -> CheckedRequest:
    return CheckedRequest(
        request_id="r",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(seed=seed),
        stopping=StoppingParams(max_tokens=max_tokens),
        speculation=SpeculationParams(),
        stop_strings=stop,
        n=n,
        logprobs=logprobs,
    )


class ScriptedLink:
    def __init__(self, target_id: str, events: ExecutionEvents, *, refuses: bool, held: bool) -> None:
        self.target_id = target_id
        self.events = events
        self.refuses = refuses
        self.open_gate = asyncio.Event()
        self.submitted = asyncio.Event()
        """Set with its first sequence."""
        if not held:
            self.open_gate.set()
        self.dead = False
        self.closed = False
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []

    # ---- TargetLink

    async def attach(self) -> TargetIdentity:
        await self.open_gate.wait()
        if self.refuses:
            raise PeerLostError(f"{self.target_id}: connection refused")
        return TargetIdentity(
            self.target_id, "toy", b"", vocab_size=256, max_model_len=64, kv_capacity_tokens=64
        )

    def submit(self, submit: Submit) -> None:
        if self.dead:
            raise PeerLostError(f"{self.target_id}: gone")
        self.submits.append(submit)
        self.submitted.set()

    def cancel(self, cancel: Cancel) -> None:
        self.cancels.append(cancel)

    async def close(self) -> None:
        self.closed = True

    # ---- what the test has it say

    def commit(
        self, submit: Submit, count: int, *, base: int | None = None, epoch: int | None = None
    ) -> None:
        """Commit ``count`` tokens from ``base`` on (default: the submit's end) by the law."""
        start = len(submit.token_ids) if base is None else base
        token_ids = tuple(token(submit.sampling.seed, start + i) for i in range(count))
        self.say(submit, start, token_ids, epoch)

    def say(self, submit: Submit, base: int, token_ids: tuple[int, ...], epoch: int | None = None) -> None:
        accepted = tuple(i % 2 == 0 for i in range(len(token_ids)))
        number = submit.epoch if epoch is None else epoch
        logprobs: tuple[TokenLogprobs, ...] = ()
        if submit.logprobs is not None:
            logprobs = tuple(
                logprobs_at(base + i, token_id, submit.logprobs) for i, token_id in enumerate(token_ids)
            )
        message = Committed(submit.sequence_id, number, base, token_ids, accepted, logprobs)
        self.events.on_committed(self.target_id, message)

    def finish(
        self,
        submit: Submit,
        reason: FinishReason = FinishReason.LENGTH,
        *,
        error: str = "",
        invalid: bool = False,
        full: bool = False,
        rounds: int = 0,
    ) -> None:
        stats = SpeculationStats(rounds=rounds, draft_tokens=2 * rounds, accepted_tokens=rounds)
        self.events.on_finished(
            self.target_id,
            Finished(
                submit.sequence_id,
                submit.epoch,
                reason,
                stats,
                error=error,
                invalid_argument=invalid,
                resource_exhausted=full,
            ),
        )

    def report(self, running: int = 0, *, waiting: int = 0, draining: bool = False) -> None:
        self.events.on_load(self.target_id, Load(running, waiting, 0, 10, 10, draining))

    def die(self) -> None:
        self.dead = True
        self.events.on_lost(self.target_id, "connection reset")


class PlayingLink(ScriptedLink):
    """Answers by itself: copies ``tape`` from its start, ``round_size`` tokens in each step, and ends as a
    target does (stop tokens, ``max_tokens``). A tape that is over goes on with its last token."""

    tape: Sequence[int] = (0,)
    round_size: int = 1
    steps: int = 0

    def submit(self, submit: Submit) -> None:
        super().submit(submit)
        self._step_soon(submit, len(submit.token_ids))

    def cancel(self, cancel: Cancel) -> None:
        super().cancel(cancel)
        submit = next(
            s for s in self.submits if (s.sequence_id, s.epoch) == (cancel.sequence_id, cancel.epoch)
        )
        asyncio.get_running_loop().call_soon(self.finish, submit, FinishReason.CANCELLED)

    def tape_of(self, submit: Submit) -> Sequence[int]:
        return self.tape

    def _step_soon(self, submit: Submit, base: int) -> None:
        asyncio.get_running_loop().call_soon(self._step, submit, base)

    def _step(self, submit: Submit, base: int) -> None:
        if self.dead or any(
            (c.sequence_id, c.epoch) == (submit.sequence_id, submit.epoch) for c in self.cancels
        ):
            return
        self.steps += 1
        start = base - submit.prompt_length
        tape = self.tape_of(submit)
        token_ids = [tape[min(start + i, len(tape) - 1)] for i in range(self.round_size)]
        stop = find_stop(token_ids, start, submit.stopping)
        self.say(submit, base, tuple(token_ids[: stop.num_kept]))
        if stop.reason is not None:
            self.finish(submit, stop.reason, rounds=self.steps)
        else:
            self._step_soon(submit, base + stop.num_kept)


class ScriptedTargets:
    """A gateway on scripted targets. ``links[name]`` is the latest link to the target of that name."""

    link_class: type[ScriptedLink] = ScriptedLink

    def __init__(self, **settings: float) -> None:
        self.links: dict[str, ScriptedLink] = {}
        self.refuses: set[str] = set()
        self.held: set[str] = set()
        self.gateway = Gateway("gateway", GatewaySettings(**settings), self._connect)  # type: ignore[arg-type]

    def _connect(self, address: str, events: ExecutionEvents) -> ScriptedLink:
        name = address.removesuffix(":1")
        link = self.link_class(name, events, refuses=name in self.refuses, held=name in self.held)
        self.links[name] = link
        return link

    async def attach(self, *names: str) -> None:
        self.gateway.update_targets({name: f"{name}:1" for name in names})
        await settle()


async def settle() -> None:
    """Let everything that can run now run."""
    for _ in range(10):
        await asyncio.sleep(0)


def assert_clean(scripted: ScriptedTargets) -> None:
    snapshot = scripted.gateway.snapshot()
    assert (snapshot.num_live, snapshot.num_waiting) == (0, 0)
    assert all(load.own_in_flight == 0 and load.own_unreported_tokens == 0 for load in snapshot.targets)


async def collect(stream: SequenceStream) -> list[int]:
    return [token_id async for tokens in stream for token_id in tokens.token_ids]


def placed(scripted: ScriptedTargets) -> tuple[ScriptedLink, Submit]:
    """The one live link that has the latest submit."""
    links = [link for link in scripted.links.values() if link.submits and not link.dead]
    (link,) = links
    return link, link.submits[-1]
