"""The law of the next token as the documentation has it, one token at a time, in plain loops and float64."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.protos import generation_pb2 as proto
from tests.cases.reference import NEAR_TIE, NearTieError, Reference

Law = npt.NDArray[np.float64]


@dataclass(frozen=True)
class NaiveLaw:
    """Parameters of a request, and what they make of plain logits."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_token_ids: Sequence[int] = ()
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    constraint: proto.Constraint | None = None
    allowed: Callable[[Sequence[int]], Collection[int]] | None = None
    """What the constraint says: which tokens may follow a completion."""

    @property
    def options(self) -> dict[str, Any]:
        """The same for a request."""
        return {name: value for name, value in vars(self).items() if name != "allowed"}

    def edit(self, logits: Law, prompt: Sequence[int], completion: Sequence[int]) -> Law:
        """Constraint, bans, bias and penalties."""
        logits = logits.copy()
        forbidden = set(self.bad_token_ids)
        if len(completion) < self.min_tokens:
            forbidden.update(self.stop_token_ids)
        if self.allowed is not None:
            forbidden.update(set(range(len(logits))) - set(self.allowed(completion)))
        for token_id, value in self.logit_bias.items():
            if value == -100.0:
                forbidden.add(token_id)
            elif value != 100.0:
                logits[token_id] += value
        forced = {token_id for token_id, value in self.logit_bias.items() if value == 100.0}
        for token_id in {*prompt, *completion}:
            if logits[token_id] > 0:
                logits[token_id] /= self.repetition_penalty
            else:
                logits[token_id] *= self.repetition_penalty
        for token_id in set(completion):
            logits[token_id] -= self.frequency_penalty * list(completion).count(token_id)
            logits[token_id] -= self.presence_penalty
        for token_id in range(len(logits)):
            if token_id in forbidden or (forced and token_id not in forced):
                logits[token_id] = -np.inf
        return logits

    def probabilities(self, logits: Law, prompt: Sequence[int], completion: Sequence[int]) -> Law:
        """Of the next token, [V]: edits, temperature, then min-p, top-k and top-p, each of what the one
        before has left."""
        logits = self.edit(logits, prompt, completion)
        if self.temperature == 0.0:
            law = np.zeros_like(logits)
            law[logits.argmax()] = 1.0
            return law
        law = softmax(logits / self.temperature)
        law[law < self.min_p * law.max()] = 0.0
        # The likeliest first, the lower id first among equals.
        order = sorted(range(len(law)), key=lambda token_id: (-law[token_id], token_id))
        if self.top_k:
            law[order[self.top_k :]] = 0.0
        law /= law.sum()
        mass = 0.0
        for token_id in order:
            if mass >= self.top_p:
                law[token_id] = 0.0
            mass += law[token_id]
        return law / law.sum()

    def greedy(self, reference: Reference, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The likeliest token again and again.

        Raises:
            NearTieError: the two best tokens of a position are too close to tell.
        """
        completion: list[int] = []
        for _ in range(num_tokens):
            logits = self.edit(reference.logits([*prompt, *completion]), prompt, completion)
            first, second = np.sort(logits)[::-1][:2]
            if first - second <= NEAR_TIE:
                raise NearTieError(f"{prompt} has a near tie within {num_tokens} tokens: take another prompt")
            completion.append(int(logits.argmax()))
        return completion


def softmax(logits: Law) -> Law:
    weights = np.exp(logits - logits.max())
    total: Law = weights / weights.sum()
    return total
