"""Exact stand-ins for a model, and an in-process network of one target and many drafts."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.actors.engine.batch import ModelRunner, SequenceSlice
from paceline.actors.engine.config import DraftEngineConfig
from paceline.actors.engine.constraint import ConstraintCompiler
from paceline.actors.engine.draft_engine import DraftEngine
from paceline.actors.engine.messages import Candidates, Committed, DraftHello, Finished, Submit
from paceline.actors.engine.parameters import (
    FinishReason,
    SamplingParams,
    SpeculationParams,
    StoppingParams,
)
from paceline.actors.engine.sampling import sample
from paceline.actors.engine.target_engine import TargetEngine

_MASK = 2**64 - 1


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True)
class HashLaw:
    """Logits as a hash of the last ``order`` tokens (None: of all). Four tokens stand out of ``vocab_size``.

    ``noise`` > 0 makes a draft of it: in that share of contexts the law is another one.
    """

    vocab_size: int = 32
    order: int | None = None
    noise: float = 0.0
    seed: int = 1

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        context = 0x9E3779B97F4A7C15
        for token_id in token_ids if self.order is None else token_ids[-self.order :]:
            context = ((context ^ (token_id + 1)) * 0x2545F4914F6CDD1D + 0x1405) & _MASK
            context ^= context >> 29
        rng = random.Random(context)
        if self.noise and rng.random() < self.noise:
            rng = random.Random(context ^ self.seed * 0xABCDEF)
        else:
            rng.random()
        logits = np.full(self.vocab_size, -20.0, dtype=np.float32)
        for rank in range(4):
            logits[rng.randrange(self.vocab_size)] = 2.0 - 0.7 * rank + rng.random() * 0.3
        return logits


@dataclass
class HashRunner:
    """A model whose KV cache holds token ids, and whose logits are ``law`` of what the cache holds.

    So a slot never written, written for another sequence or not rolled back changes the output.
    """

    law: HashLaw = field(default_factory=HashLaw)
    num_blocks: int = 256
    block_size: int = 4
    max_model_len: int = 256
    on_forward: Callable[[Sequence[SequenceSlice]], None] | None = None

    def __post_init__(self) -> None:
        self.cache = np.full((self.num_blocks, self.block_size), -1, dtype=np.int64)
        self.batches: list[list[tuple[int, int]]] = []
        """(start, number of tokens) of each slice of each batch."""

    @property
    def vocab_size(self) -> int:
        return self.law.vocab_size

    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        if self.on_forward is not None:
            self.on_forward(batch)
        self.batches.append([(item.start, len(item.token_ids)) for item in batch])
        rows: list[np.ndarray] = []
        for item in batch:
            end = item.start + len(item.token_ids)
            assert item.token_ids
            assert end <= self.max_model_len
            for offset, token_id in enumerate(item.token_ids):
                block, slot = divmod(item.start + offset, self.block_size)
                self.cache[item.block_table[block], slot] = token_id
            table = np.asarray(item.block_table, dtype=np.int64)
            held = self.cache[table].reshape(-1)[:end].tolist()
            assert -1 not in held, "a slot was never written"
            rows.extend(self.law.logits(held[: end - i]) for i in reversed(range(item.num_logits)))
        if not rows:
            return torch.zeros(0, self.vocab_size)
        return torch.from_numpy(np.stack(rows))


def processed(
    logits: np.ndarray,
    sampling: SamplingParams,
    stopping: StoppingParams,
    token_ids: Sequence[int],
    prompt_length: int,
) -> np.ndarray:
    """The logits of the position after ``token_ids``, token by token and from nothing: the definition."""
    completion = list(token_ids[prompt_length:])
    seen = set(token_ids)
    bias = dict(sampling.logit_bias)
    forced = {token_id for token_id, value in bias.items() if value == 100.0}
    result = np.full_like(logits, -np.inf)
    for token_id, logit in enumerate(logits):
        if token_id in sampling.bad_token_ids or bias.get(token_id) == -100.0 or logit == -np.inf:
            continue
        if token_id in stopping.stop_token_ids and len(completion) < stopping.min_tokens:
            continue
        if forced and token_id not in forced:
            continue
        value = np.float32(logit)
        if token_id in bias and token_id not in forced:
            value = value + np.float32(bias[token_id])
        precise = float(value)
        if token_id in seen:
            factor = sampling.repetition_penalty
            precise = precise / factor if precise > 0 else precise * factor
        count = completion.count(token_id)
        precise -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
        result[token_id] = np.float32(precise)
    return result


def reference(law: HashLaw, event: Submit) -> tuple[list[int], FinishReason]:
    """The completion, token by token, with nothing but the law, the processors and the sampler."""
    token_ids = list(event.token_ids)
    stopping = event.stopping
    while True:
        values = processed(law.logits(token_ids), event.sampling, stopping, token_ids, event.prompt_length)
        if not np.isfinite(values).any():
            return token_ids[event.prompt_length :], FinishReason.ERROR
        token_id = sample(torch.from_numpy(values)[None], [event.sampling], [len(token_ids)])[0]
        token_ids.append(token_id)
        count = len(token_ids) - event.prompt_length
        if token_id in stopping.stop_token_ids and count > stopping.min_tokens:
            return token_ids[event.prompt_length :], FinishReason.STOP
        if count == stopping.max_tokens:
            return token_ids[event.prompt_length :], FinishReason.LENGTH


def make_submit(
    sequence_id: str = "s",
    prompt: Sequence[int] = (1, 2, 3),
    *,
    max_tokens: int = 16,
    min_tokens: int = 0,
    stop_token_ids: Sequence[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
    num_speculative_tokens: int | None = None,
    epoch: int = 1,
    completion: Sequence[int] = (),
    sampling: SamplingParams | None = None,
    logprobs: int | None = None,
) -> Submit:
    """``sampling``: in place of ``temperature`` and ``seed``."""
    return Submit(
        sequence_id=sequence_id,
        epoch=epoch,
        token_ids=(*prompt, *completion),
        prompt_length=len(prompt),
        sampling=sampling or SamplingParams(temperature=temperature, seed=seed),
        stopping=StoppingParams(max_tokens, min_tokens, frozenset(stop_token_ids)),
        speculation=SpeculationParams(num_speculative_tokens),
        logprobs=logprobs,
    )


def hello(
    draft_id: str = "d", *, capacity: int = 16, max_model_len: int = 256, vocab_size: int = 32
) -> DraftHello:
    return DraftHello(draft_id, "draft-model", vocab_size, capacity, max_model_len, "model")


class Gateway:
    """Collects a target's output, and checks what every gateway may rely on."""

    def __init__(self) -> None:
        self.completions: dict[tuple[str, int], list[int]] = {}
        self.accepted: dict[tuple[str, int], list[bool]] = {}
        self.base: dict[tuple[str, int], int] = {}
        self.finished: dict[tuple[str, int], Finished] = {}

    def submitted(self, event: Submit) -> None:
        key = (event.sequence_id, event.epoch)
        self.base[key] = len(event.token_ids)
        self.completions[key] = list(event.token_ids[event.prompt_length :])
        self.accepted[key] = []

    def take(self, committed: Sequence[Committed], finished: Sequence[Finished]) -> None:
        for item in committed:
            key = (item.sequence_id, item.epoch)
            assert key not in self.finished, "committed after the end"
            assert item.base_position == self.base[key], "a gap or an overlap"
            assert item.token_ids
            assert len(item.accepted) == len(item.token_ids)
            self.base[key] += len(item.token_ids)
            self.completions[key].extend(item.token_ids)
            self.accepted[key].extend(item.accepted)
        for end in finished:
            key = (end.sequence_id, end.epoch)
            assert key not in self.finished, "finished twice"
            self.finished[key] = end


class Network:
    """One target and any number of drafts. Links are FIFO; when a message moves is the caller's choice."""

    def __init__(self, target: TargetEngine, rng: random.Random | None = None) -> None:
        self.target = target
        self.rng = rng or random.Random(0)
        self.gateway = Gateway()
        self.drafts: dict[str, DraftEngine] = {}
        self.to_draft: dict[str, deque[Callable[[DraftEngine], None]]] = {}
        self.to_target: dict[str, deque[Callable[[], None]]] = {}
        self.seen_candidates: list[tuple[str, Candidates]] = []
        self._joined = 0

    def submit(self, event: Submit, peer: str = "gateway") -> None:
        self.gateway.submitted(event)
        self.target.submit(peer, event)
        self.pump_target()

    def join(
        self, law: HashLaw, *, capacity: int = 16, max_model_len: int = 256, num_blocks: int = 256
    ) -> str:
        runner = HashRunner(law, num_blocks=num_blocks, max_model_len=max_model_len)
        return self.join_runner(runner, capacity=capacity, max_model_len=max_model_len)

    def join_runner(self, runner: ModelRunner, *, capacity: int = 16, max_model_len: int = 256) -> str:
        self._joined += 1
        peer = f"draft-{self._joined}"
        config = DraftEngineConfig(max_num_seqs=capacity)
        engine = DraftEngine(runner, config, self.draft_clock, constraints=self.constraints)
        engine.target_joined("target", self.target_vocab_size)
        self.drafts[peer] = engine
        self.to_draft[peer] = deque()
        self.to_target[peer] = deque()
        greeting = hello(
            peer, capacity=capacity, max_model_len=max_model_len, vocab_size=self.target_vocab_size
        )
        self.target.draft_joined(peer, greeting)
        self.pump_target()
        return peer

    target_vocab_size = 32
    constraints: ConstraintCompiler | None = None
    """Of the drafts."""
    draft_clock: Callable[[], float] = staticmethod(time.monotonic)

    def leave(self, peer: str) -> None:
        self.drafts.pop(peer).target_left("target")
        del self.to_draft[peer], self.to_target[peer]
        self.target.draft_left(peer)
        self.pump_target()

    def pump_target(self) -> None:
        """Take the target's outbox: gateways hear at once, drafts when ``deliver`` says."""
        outbox = self.target.take_outbox()
        for output in outbox.gateways.values():
            self.gateway.take(output.committed, output.finished)
        for peer, told in outbox.drafts.items():
            assert peer in self.drafts, "told a draft that is gone"
            link = self.to_draft[peer]
            for closed in told.closes:
                link.append(lambda engine, event=closed: engine.close("target", event))  # type: ignore[misc]
            for opened in told.opens:
                link.append(lambda engine, event=opened: engine.open("target", event))  # type: ignore[misc]
            for verdict in told.verdicts:
                link.append(lambda engine, event=verdict: engine.verdict("target", event))  # type: ignore[misc]

    def step_target(self) -> None:
        self.target.step()
        self.pump_target()

    def step_draft(self, peer: str) -> None:
        engine = self.drafts[peer]
        engine.step()
        for output in engine.take_outbox().values():
            self.seen_candidates.extend((peer, message) for message in output.candidates)

            def arrive(output=output, peer=peer) -> None:  # type: ignore[no-untyped-def]
                self.target.candidates(peer, output.candidates, output.step_seconds)
                for decline in output.declines:
                    self.target.decline(peer, decline)

            self.to_target[peer].append(arrive)

    def deliver_to_draft(self, peer: str) -> None:
        if self.to_draft[peer]:
            self.to_draft[peer].popleft()(self.drafts[peer])

    def deliver_to_target(self, peer: str) -> None:
        if self.to_target[peer]:
            self.to_target[peer].popleft()()
            self.pump_target()

    def settle_drafts(self) -> None:
        """Let every draft hear everything and draft to its window, and the target hear of it."""
        while True:
            busy = False
            for peer, engine in self.drafts.items():
                while self.to_draft[peer]:
                    self.deliver_to_draft(peer)
                if engine.has_work():
                    self.step_draft(peer)
                    busy = True
                while self.to_target[peer]:
                    self.deliver_to_target(peer)
            if not busy:
                return

    def run(self, *, max_steps: int = 2000) -> None:
        """Lock-step to the end: drafts settle, the target steps."""
        for _ in range(max_steps):
            if self.target.wait_seconds() is None:
                return
            self.settle_drafts()
            self.step_target()
            self.check()
        raise AssertionError("it does not come to an end")

    def random_action(self) -> None:
        """One of: target step, draft step, one message moves (either way)."""
        peers = list(self.drafts)
        choice = self.rng.random()
        if choice < 0.25 or not peers:
            self.step_target()
            return
        peer = self.rng.choice(peers)
        if choice < 0.5:
            self.step_draft(peer)
        elif choice < 0.75:
            self.deliver_to_draft(peer)
        else:
            self.deliver_to_target(peer)

    def check(self) -> None:
        self.target.check_invariants()
        for engine in self.drafts.values():
            engine.check_invariants()
