"""How requests come: so many at a time, or at random moments; and what was seen of each of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from benchmarks.prompts import BenchPrompt


@dataclass(frozen=True)
class Reply:
    """One answer. Times in seconds after the request was sent."""

    num_tokens: int
    first_token: float
    last_token: float
    num_first: int = 1
    """Tokens that came first, together."""
    rounds: int = 0
    """Steps that verified draft tokens; 0 where there are none, or nobody tells."""
    draft_tokens: int = 0
    """Draft tokens verified; 0 where nobody tells."""
    accepted_tokens: int = 0

    @property
    def time_per_token(self) -> float | None:
        """TPOT: seconds per token after the first ones; None where nothing came after them."""
        later = self.num_tokens - self.num_first
        return (self.last_token - self.first_token) / later if later > 0 else None


@dataclass(frozen=True)
class Answered:
    """A reply and the prompt that it is to."""

    question_id: int
    category: str
    sent: float
    """Seconds after the load began."""
    reply: Reply


Ask = Callable[[BenchPrompt], Awaitable[Reply]]


@dataclass(frozen=True)
class FixedConcurrency:
    """So many clients: each sends its next request when the last one is answered."""

    concurrency: int

    @property
    def name(self) -> str:
        return f"{self.concurrency} at a time"

    async def run(self, ask: Ask, prompts: Sequence[BenchPrompt], on_answer: Callable[[], None]) -> Outcome:
        """Send all ``prompts``. Raises: whatever ``ask`` raises first; the others are cancelled."""
        left = iter(prompts)
        answered: list[Answered] = []
        began = time.perf_counter()

        async def client() -> None:
            for prompt in left:  # one iterator for all clients
                sent = time.perf_counter() - began
                reply = await ask(prompt)
                answered.append(Answered(prompt.question_id, prompt.category, sent, reply))
                on_answer()

        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(client())
        return Outcome(answered, time.perf_counter() - began)


@dataclass(frozen=True)
class PoissonArrivals:
    """Open loop: requests come at random moments, whether or not earlier ones are answered."""

    rate: float
    """Requests per second, on average."""
    seed: int

    @property
    def name(self) -> str:
        return f"{self.rate:g} requests/s"

    def times(self, count: int) -> list[float]:
        """Moments of the first ``count`` arrivals, in seconds: sums of exponential intervals."""
        generator = random.Random(self.seed)
        moments: list[float] = []
        at = 0.0
        for _ in range(count):
            at += generator.expovariate(self.rate)
            moments.append(at)
        return moments

    async def run(self, ask: Ask, prompts: Sequence[BenchPrompt], on_answer: Callable[[], None]) -> Outcome:
        """Send all ``prompts``, so that no more than these are ever open. Raises: as above."""
        answered: list[Answered] = []
        began = time.perf_counter()

        async def client(prompt: BenchPrompt, moment: float) -> None:
            await asyncio.sleep(max(began + moment - time.perf_counter(), 0.0))
            sent = time.perf_counter() - began
            reply = await ask(prompt)
            answered.append(Answered(prompt.question_id, prompt.category, sent, reply))
            on_answer()

        async with asyncio.TaskGroup() as group:
            for prompt, moment in zip(prompts, self.times(len(prompts)), strict=True):
                group.create_task(client(prompt, moment))
        return Outcome(answered, time.perf_counter() - began)


Load = FixedConcurrency | PoissonArrivals


@dataclass(frozen=True)
class Outcome:
    """One load on one contender."""

    answered: list[Answered]
    seconds: float
    """From the first request to the last answer (an open loop's first interval included)."""

    @property
    def tokens_per_second(self) -> float:
        """All tokens over all the time."""
        return sum(item.reply.num_tokens for item in self.answered) / self.seconds


def turns(names: list[str], round_number: int) -> list[str]:
    """Who comes when: everybody is first in turn, and every other round goes backwards, so that nobody always
    follows the same one. (A service whose processes have stood idle is slow for a second or two.)"""
    shift = round_number % len(names)
    order = names[shift:] + names[:shift]
    return order[::-1] if round_number % 2 else order
