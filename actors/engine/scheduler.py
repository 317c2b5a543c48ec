"""Which sequences the next step computes, and how many tokens of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.blocks import BlockManager
from paceline.actors.engine.pacing import fit_tails
from paceline.actors.engine.sequence import SequenceStatus, TargetSequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """``num_tokens`` committed tokens from ``start`` on, then ``tail``. A tail only follows the last
    committed token."""

    sequence: TargetSequence
    start: int
    num_tokens: int
    tail: Sequence[int]

    @property
    def num_logits(self) -> int:
        """One row for the last committed token and one for each of the tail; 0 if prompt tokens remain."""
        complete = self.start + self.num_tokens == len(self.sequence.token_ids)
        return len(self.tail) + 1 if complete else 0

    def to_slice(self) -> SequenceSlice:
        known = self.sequence.token_ids[self.start : self.start + self.num_tokens]
        return SequenceSlice([*known, *self.tail], self.start, self.sequence.block_table, self.num_logits)


@dataclass(frozen=True, slots=True)
class Plan:
    scheduled: list[ScheduledSequence]
    preempted: list[TargetSequence]
    num_tokens: int


class Scheduler:
    """Closes the gap between known and computed tokens, within the limits of a step and of the KV pool.

    There is no prefill or decode phase: a prompt chunk, a pending token, and a pending token with a tail
    are all tokens to compute. Decoding sequences go first, so that a long prompt (computed in chunks of
    what remains of the step) never stalls them.

    Blocks: admission reserves a sequence's known tokens, each step what its pending token and tail need.
    When they run short tails are shortened first; then the latest admitted sequence is preempted (its KV
    is computed again later), never the oldest. A sequence that fits into the pool alone always finishes.

    Invariants: ``running`` is in order of admission; ``waiting`` is in order of arrival and holds no block.
    """

    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.running: list[TargetSequence] = []
        self.waiting: deque[TargetSequence] = deque()

    def add(self, sequence: TargetSequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: TargetSequence) -> None:
        """Forget a sequence that is finished, wherever it is, and free its blocks."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._blocks.free(sequence.block_table)
        sequence.status = SequenceStatus.FINISHED

    def admit(self) -> list[TargetSequence]:
        """Move waiting sequences to running, first come first served, while limits and blocks allow.

        One free block is left for each sequence that runs already: admitting up to the last block would
        only have the newcomer preempted by the others' growth.
        """
        admitted: list[TargetSequence] = []
        while self.waiting and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            needed = self._blocks.blocks_needed(len(sequence.token_ids))
            if needed + len(self.running) > self._blocks.num_free_blocks:
                break
            self._blocks.grow(sequence.block_table, len(sequence.token_ids))
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.status = SequenceStatus.RUNNING
            admitted.append(sequence)
        return admitted

    def schedule(self, tails: Mapping[TargetSequence, Sequence[int]]) -> Plan:
        """Plan a step and reserve its blocks.

        Args:
            tails: draft tokens on offer, per decoding sequence.
        """
        preempted = self._reserve_pending_tokens()
        decoding = [sequence for sequence in self.running if sequence.is_decoding]
        prefilling = [sequence for sequence in self.running if not sequence.is_decoding]

        budget = self._max_num_batched_tokens - len(decoding)
        offered = [tails.get(sequence, ()) for sequence in decoding]
        # With prompts to compute, tails get at most half of the rest, so that neither starves the other.
        lengths = fit_tails([len(tail) for tail in offered], budget // 2 if prefilling else budget)
        scheduled: list[ScheduledSequence] = []
        for sequence, tail, length in zip(decoding, offered, lengths, strict=True):
            length = self._reserve_tail(sequence, length)
            budget -= length
            scheduled.append(
                ScheduledSequence(sequence, sequence.num_computed_tokens, 1, tail[:length] if length else ())
            )
        for sequence in prefilling:
            chunk = min(sequence.num_pending_tokens, budget)
            if chunk <= 0:
                break
            budget -= chunk
            scheduled.append(ScheduledSequence(sequence, sequence.num_computed_tokens, chunk, ()))
        return Plan(scheduled, preempted, self._max_num_batched_tokens - budget)

    def truncate(self, sequence: TargetSequence) -> None:
        """Free the blocks past the committed tokens (a rejected tail's)."""
        self._blocks.truncate(sequence.block_table, len(sequence.token_ids))

    def _reserve_pending_tokens(self) -> list[TargetSequence]:
        """Give every running sequence a slot for each known token; preempt the latest admitted if short."""
        preempted: list[TargetSequence] = []
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            if self._blocks.grow(sequence.block_table, len(sequence.token_ids)):
                index += 1
                continue
            victim = self.running[-1]
            assert len(self.running) > 1, (
                f"sequence {sequence.sequence_id} does not fit into the KV pool alone"
            )
            self._preempt(victim)
            preempted.append(victim)
        return preempted

    def _reserve_tail(self, sequence: TargetSequence, length: int) -> int:
        """Reserve slots for as much of the tail as there are blocks; the length that fits."""
        if length == 0:
            return 0
        known = len(sequence.token_ids)
        if self._blocks.grow(sequence.block_table, known + length):
            return length
        capacity = (len(sequence.block_table) + self._blocks.num_free_blocks) * self._blocks.block_size
        length = min(length, capacity - known)
        self._blocks.grow(sequence.block_table, known + length)
        return length

    def _preempt(self, sequence: TargetSequence) -> None:
        self.running.remove(sequence)
        self._blocks.free(sequence.block_table)
        sequence.num_computed_tokens = 0
        sequence.status = SequenceStatus.WAITING
        # The latest admitted arrived last among the running ones, and before all that wait.
        self.waiting.appendleft(sequence)
