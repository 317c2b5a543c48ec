"""Which sequences the next step computes, and how many tokens of each."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.blocks import BlockManager
from paceline.actors.engine.pacing import fit_tails
from paceline.actors.engine.prefix_cache import BlockKey, PrefixCache
from paceline.actors.engine.priority import turn_of
from paceline.actors.engine.sequence import SequenceStatus, TargetSequence

_turn = attrgetter("turn")


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

    Turns: sequences are admitted, computed and given blocks in the order of ``priority.turn_of``: the lower
    priority number first, equals as they arrived, and whoever waits long enough before everybody. A turn
    never changes, also not by preemption. So the first one of all that are here is served until it ends,
    then the next is the first: nobody starves.

    Blocks: admission reserves a sequence's known tokens, each step what its pending token and tail need.
    When they run short tails are shortened first; then the running sequence whose turn is the last is
    preempted (its KV is computed again later). A sequence that fits into the pool alone always finishes.

    Prefixes: an admitted sequence begins with the blocks that the prefix cache has of it. One whose next
    block a running sequence is about to compute is *deferred*: it waits for that block, and those behind it
    are admitted meanwhile only where they leave it its place. What it waits for comes, since the first
    running sequence moves on in every step; if the one that computes it goes, nothing is waited for.

    Invariants: ``running`` and ``waiting`` are in the order of turns; who waits holds no block.

    Args:
        cache: of the same blocks; None: no prefix caching.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        cache: PrefixCache | None = None,
    ) -> None:
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._cache = cache or PrefixCache(blocks, enabled=False)
        self._deferred: set[TargetSequence] = set()
        self._num_arrivals = 0
        self.running: list[TargetSequence] = []
        self.waiting: list[TargetSequence] = []
        self.num_prefix_queries = 0
        """Tokens of admitted sequences that were looked for in the prefix cache, the first time."""
        self.num_prefix_hits = 0
        """Those that were found."""

    @property
    def num_queued(self) -> int:
        """Waiting sequences for which there is no place yet."""
        return len(self.waiting) - len(self._deferred)

    def add(self, sequence: TargetSequence, now: float = 0.0) -> None:
        """Queue a sequence that arrives ``now``."""
        self._num_arrivals += 1
        sequence.turn = (turn_of(sequence.priority, now), self._num_arrivals)
        insort(self.waiting, sequence, key=_turn)

    def remove(self, sequence: TargetSequence) -> None:
        """Forget a sequence that is finished, wherever it is, and free its blocks."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
            self._deferred.discard(sequence)
        self._blocks.free(sequence.block_table)
        sequence.status = SequenceStatus.FINISHED

    def admit(self) -> list[TargetSequence]:
        """Move waiting sequences to running, in their turns, while limits and blocks allow.

        One free block is left for each sequence that runs already: admitting up to the last block would
        only have the newcomer preempted by the others' growth.
        """
        admitted: list[TargetSequence] = []
        self._deferred.clear()
        coming = self._coming_blocks(self.running) if self.waiting else set()
        deferred_blocks = 0
        for sequence in tuple(self.waiting):
            places = len(self.running) + len(self._deferred)
            if places >= self._max_num_seqs:
                break
            length = len(sequence.token_ids)
            if sequence.missing is None or sequence.missing not in coming:
                # The last token is always computed: the next one is drawn from its logits.
                sequence.missing = self._cache.find(sequence.prefix, sequence.token_ids, length - 1)
            needed = self._blocks.blocks_needed(length) - len(sequence.prefix)
            if sequence.missing is not None and sequence.missing in coming:
                self._deferred.add(sequence)
                deferred_blocks += needed
                continue
            needed += self._cache.num_idle(sequence.prefix)
            if needed + deferred_blocks + places > self._blocks.num_free_blocks:
                break
            self._start(sequence)
            admitted.append(sequence)
            coming |= self._coming_blocks([sequence])
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
        for item in scheduled:
            # A step writes behind the cached blocks only: those may be others' as well.
            assert item.start >= len(item.sequence.prefix) * self._blocks.block_size
        return Plan(scheduled, preempted, self._max_num_batched_tokens - budget)

    def settle(self, sequence: TargetSequence) -> None:
        """After each step of a sequence: free the blocks past the committed tokens (a rejected tail's), then
        let others find those that are full and computed."""
        self._blocks.truncate(sequence.block_table, len(sequence.token_ids))
        self._cache.add(
            sequence.prefix, sequence.block_table, sequence.token_ids, sequence.num_computed_tokens
        )

    def _coming_blocks(self, running: Iterable[TargetSequence]) -> set[BlockKey]:
        """Of each sequence the next block, where its tokens are known."""
        if not self._cache.enabled:
            return set()
        keys = (self._cache.next_key(s.prefix, s.token_ids, len(s.token_ids)) for s in running)
        return {key for key in keys if key is not None}

    def _start(self, sequence: TargetSequence) -> None:
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_turn)
        sequence.status = SequenceStatus.RUNNING
        num_cached = self._cache.take(sequence.prefix, sequence.block_table)
        enough = self._blocks.grow(sequence.block_table, len(sequence.token_ids))
        assert enough, f"sequence {sequence.sequence_id} was admitted without blocks"
        sequence.num_computed_tokens = num_cached
        if sequence.cached_prompt_tokens is None:
            sequence.cached_prompt_tokens = min(num_cached, sequence.prompt_length)
            if self._cache.enabled:
                self.num_prefix_queries += len(sequence.token_ids)
                self.num_prefix_hits += num_cached

    def _reserve_pending_tokens(self) -> list[TargetSequence]:
        """Give every running sequence a slot for each known token; preempt those of the last turns if
        short."""
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
        sequence.missing = None
        sequence.status = SequenceStatus.WAITING
        insort(self.waiting, sequence, key=_turn)
