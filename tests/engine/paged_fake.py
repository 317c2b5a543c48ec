"""A tiny exact "model" whose KV can be wrong, what it samples alone, and a target's words to a draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.messages import Open, Verdict
from paceline.actors.engine.parameters import SamplingParams
from paceline.actors.engine.sampling import sample

VOCAB_SIZE = 32
GREEDY = SamplingParams(temperature=0.0)


def law(context: Sequence[int], vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """Logits ``[vocab_size]`` that depend on every token of the context and on their order."""
    state = 1469598103934665603
    for token_id in context:
        state = ((state ^ (token_id + 1)) * 1099511628211) % 2**63
    return 2.0 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(state))


class PagedFake:
    """A runner whose "KV" is the token in each slot: a stale or foreign slot changes the logits."""

    def __init__(
        self,
        *,
        vocab_size: int = VOCAB_SIZE,
        max_model_len: int = 1024,
        block_size: int = 4,
        num_blocks: int = 512,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.batches: list[list[SequenceSlice]] = []
        self.fail_next = False
        self._slots = [-1] * (num_blocks * block_size)

    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        self.batches.append(list(batch))
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("out of memory")
        rows = []
        for part in batch:
            end = part.start + len(part.token_ids)
            assert part.token_ids
            assert end <= self.max_model_len
            for offset, token_id in enumerate(part.token_ids):
                self._slots[self._slot(part, part.start + offset)] = token_id
            for size in range(end - part.num_logits + 1, end + 1):
                context = [self._slots[self._slot(part, position)] for position in range(size)]
                rows.append(law(context, self.vocab_size))
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def _slot(self, part: SequenceSlice, position: int) -> int:
        block = part.block_table[position // self.block_size]
        return block * self.block_size + position % self.block_size


def chain_after(
    context: Sequence[int], params: SamplingParams, num_tokens: int, vocab_size: int = VOCAB_SIZE
) -> list[int]:
    """What the draft model alone samples after ``context``, one token at a time."""
    tokens = list(context)
    for _ in range(num_tokens):
        row = law(tokens)[None, :vocab_size]
        tokens.extend(sample(row, [params], [len(tokens)]))
    return tokens[len(context) :]


def opened(
    sequence_id: str,
    token_ids: Sequence[int],
    *,
    window: int = 4,
    params: SamplingParams = GREEDY,
    epoch: int = 1,
) -> Open:
    return Open(sequence_id, epoch, tuple(token_ids), params, window)


def verdict(
    sequence_id: str,
    base: int,
    token_ids: Sequence[int],
    *,
    window: int = 4,
    epoch: int = 1,
    accepted: int = 0,
    branch_tokens: int = 0,
    tail_tokens: int = 0,
) -> Verdict:
    return Verdict(sequence_id, epoch, base, accepted, tuple(token_ids), window, branch_tokens, tail_tokens)
