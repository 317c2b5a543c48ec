"""The draft engine: one batched step proposes the next token of every sequence of every target.

Events of the targets come in (``open``, ``verdict``, ``close``), candidates and declines go out
(``take_outbox``). Nothing a target says can raise here: what does not fit is declined or counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from paceline.actors.engine.batch import ModelRunner, SequenceSlice
from paceline.actors.engine.blocks import BlockManager
from paceline.actors.engine.branches import Branch, Branches, PlannedBranch
from paceline.actors.engine.config import DraftEngineConfig
from paceline.actors.engine.constraint import ConstraintCompiler, make_matcher
from paceline.actors.engine.draft_sampling import BAD_LOGITS, draw_candidates
from paceline.actors.engine.draft_schedule import MAX_DECODE_TOKENS, PlannedSlice, PrefillPace, plan_step
from paceline.actors.engine.draft_sequence import DraftSequence, SequenceKey, VerdictError
from paceline.actors.engine.errors import InvalidArgumentError, ShardGroupError
from paceline.actors.engine.estimates import StepCostModel
from paceline.actors.engine.fan_out import spare_tokens
from paceline.actors.engine.messages import Candidates, Close, Decline, Open, Verdict
from paceline.actors.engine.prefix_cache import BlockKey, PrefixCache
from paceline.actors.engine.verdict_times import VerdictTimes

logger = logging.getLogger(__name__)

URGENT_SLACK = 1.15
"""How much longer a step may take for its branches while a chain does not even fill the next verify."""
SPARE_SLACK = 2.0
"""The same while all chains do: the draft runs ahead, and only an answer to a verdict is delayed."""
MEASURED_FACTOR = 4
"""A step is not made more than so many times larger at once than any that was measured."""


@dataclass(slots=True)
class CandidateOutput:
    """What one target is told: at most one message per step."""

    candidates: list[Candidates] = field(default_factory=list)
    declines: list[Decline] = field(default_factory=list)
    step_seconds: float = 0.0
    """Time of the step that made the candidates."""
    step_tokens: int = 0
    """Tokens that this step computed, for all targets together."""
    num_awake: int = 0
    """Sequences of all targets that the draft has tokens to make for."""


@dataclass(frozen=True, slots=True)
class DraftSnapshot:
    """Counters since the start (``num_…_total``) and gauges, for status and metrics."""

    num_targets: int
    num_sequences: int
    num_resting_sequences: int
    num_free_blocks: int
    num_blocks: int
    num_cached_blocks: int
    """Blocks in the prefix cache, those in use and those that are free until they are found."""
    num_steps_total: int
    num_drafted_tokens_total: int
    num_discarded_tokens_total: int
    """Chain tokens thrown away by verdicts."""
    num_branch_tokens_total: int
    """Tokens drafted for likely corrections, beside the chains."""
    num_corrections_total: int
    """Verdicts that corrected a chain while corrections were being prepared for it."""
    num_prepared_corrections_total: int
    """Of those, where the corrected token was among the prepared, and its tail was sent at once."""
    num_prefill_tokens_total: int
    num_prefix_cache_queries_total: int
    """Tokens that were looked for in the prefix cache: a sequence's committed ones when it is begun, once."""
    num_prefix_cache_hits_total: int
    """Those that were found, and not computed."""
    num_declines_total: int
    num_stale_messages_total: int
    """Messages of an old epoch, of an unknown sequence or of an unknown target."""
    num_faults_total: int
    last_fault: str
    step_seconds: float
    """Time of the last step."""
    busy_seconds_total: float
    """Time of the steps that had a chain to go on with."""


class DraftEngine:
    """Drafts for all sequences of all targets. Not thread-safe: events and steps on one thread.

    Args:
        runner: the draft model with its paged KV cache.
        config: limits of the draft.
        clock: seconds, monotonic.
        constraints: makes matchers for structured output; None: sequences with a constraint are declined.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: DraftEngineConfig,
        clock: Callable[[], float] = time.monotonic,
        constraints: ConstraintCompiler | None = None,
    ) -> None:
        self._runner = runner
        self._config = config
        self._clock = clock
        self._constraints = constraints
        self._max_model_len = min(runner.max_model_len, config.max_model_len or runner.max_model_len)
        self._blocks = BlockManager(runner.num_blocks, runner.block_size)
        self._cache = PrefixCache(self._blocks, enabled=config.enable_prefix_caching)
        self._vocab_sizes: dict[str, int] = {}
        """Per target: ids below this one exist in both models."""
        self._sequences: dict[SequenceKey, DraftSequence] = {}
        self._declines: dict[str, list[Decline]] = {}
        self._pace = PrefillPace()
        self._branches = Branches(self._blocks, config.max_branches)
        self._step_cost = StepCostModel()
        self._verdict_times = VerdictTimes()
        self._largest_step = 1
        self._step_seconds = 0.0
        self._step_tokens = 0
        self._busy_seconds = 0.0
        self._num_steps = 0
        self._num_turns = 0
        self._num_drafted = 0
        self._num_discarded = 0
        self._num_prefill = 0
        self._num_prefix_queries = 0
        self._num_prefix_hits = 0
        self._num_declines = 0
        self._num_stale = 0
        self._num_faults = 0
        self._last_fault = ""

    # ------------------------------------------------------------------ events

    def target_joined(self, peer: str, vocab_size: int) -> None:
        """A target's stream is open. ``vocab_size``: rows of the target's output layer."""
        self._forget(peer)
        self._vocab_sizes[peer] = min(vocab_size, self._runner.vocab_size)

    def target_left(self, peer: str) -> None:
        """The target's stream is gone: forget its sequences, free their blocks."""
        self._forget(peer)
        self._vocab_sizes.pop(peer, None)
        self._verdict_times.forget(peer)

    def open(self, peer: str, event: Open) -> None:
        """Take a sequence, or decline it. A newer epoch replaces an older one of the same sequence."""
        vocab_size = self._vocab_sizes.get(peer)
        if vocab_size is None:
            self._num_stale += 1
            return
        present = self._sequences.get(SequenceKey(peer, event.sequence_id))
        if present is not None:
            if event.epoch < present.epoch:
                self._num_stale += 1
                return
            self._remove(present)
        reason = self._reason_to_refuse(event)
        if reason:
            self._decline(peer, event.sequence_id, event.epoch, reason)
            return
        try:
            matcher = make_matcher(
                self._constraints, event.sampling.constraint, event.stopping.stop_token_ids
            )
        except InvalidArgumentError as error:
            self._decline(peer, event.sequence_id, event.epoch, str(error))
            return
        sequence = DraftSequence(
            peer, event, vocab_size=vocab_size, max_model_len=self._max_model_len, matcher=matcher
        )
        self._sequences[sequence.key] = sequence

    def verdict(self, peer: str, event: Verdict, received_at: float | None = None) -> None:
        """Follow the target: commit, roll back what it did not take, set the window.

        Args:
            received_at: when it reached this machine, by the engine's clock; None = now.
        """
        now = self._clock() if received_at is None else received_at
        sequence = self._find(peer, event.sequence_id, event.epoch)
        if sequence is None:
            return
        try:
            self._check_token_ids(event.committed_token_ids)
            num_discarded = self._branches.before_commit(
                sequence, event.base_position, event.committed_token_ids
            )
            num_discarded += sequence.commit(event.base_position, event.committed_token_ids)
        except VerdictError as error:
            self._drop(sequence, str(error))
            return
        self._num_discarded += num_discarded
        if event.committed_token_ids:
            self._verdict_times.note_verdict(sequence, num_discarded > 0, now)
        sequence.window = max(0, event.window)
        sequence.tail_tokens = event.tail_tokens
        sequence.ready_at = None
        sequence.note_ready(now)
        self._branches.after_commit(sequence, event.branch_tokens if sequence.window else 0)
        self._blocks.truncate(sequence.block_table, sequence.num_computed_tokens)
        self._remember(sequence)
        if sequence.num_committed >= self._max_model_len:
            self._drop(sequence, self._too_long(sequence.num_committed))

    def close(self, peer: str, event: Close) -> None:
        """Forget a sequence and free its blocks."""
        sequence = self._find(peer, event.sequence_id, event.epoch)
        if sequence is not None:
            self._remove(sequence)

    # ------------------------------------------------------------------ stepping

    def wait_seconds(self) -> float | None:
        """0.0: step now; None: nothing to do before an event; else wait for one at most so long."""
        if not self.has_work():
            return None
        return self._verdict_times.seconds_to_wait(self._sequences.values(), self._clock())

    def has_work(self) -> bool:
        """Whether ``step`` would compute anything."""
        return any(sequence.wants_token for sequence in self._sequences.values()) or bool(
            self._branches.wanted and self._plan_branches([])
        )

    def step(self) -> None:
        """One forward pass over all sequences that have room for another token, and what branches fit in."""
        started = self._clock()
        plan = plan_step(
            self._begin_sequences(),
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            prefill_limit=self._pace.limit(),
        )
        plan = self._reserve(plan)
        branches = self._plan_branches(plan)
        if not plan and not branches:
            return
        self._branches.begin(branches)
        self._num_steps += 1
        is_spare = all(planned.sequence.ready_at is not None for planned in plan)
        try:
            self._compute(plan, branches)
        except ShardGroupError:
            raise
        except Exception as error:  # whatever a model raises: these sequences go, the draft stays
            logger.exception("a draft step failed")
            self._num_faults += 1
            self._last_fault = f"{type(error).__name__}: {error}"
            computed = [planned.sequence for planned in plan] + [item.branch.sequence for item in branches]
            for sequence in dict.fromkeys(computed):
                self._drop(sequence, f"the draft's step failed ({type(error).__name__})")
            return
        self._step_seconds = self._clock() - started
        self._step_tokens = sum(item.num_tokens for item in plan) + sum(item.num_tokens for item in branches)
        self._step_cost.record(self._step_tokens, self._step_seconds)
        if is_spare:
            self._verdict_times.note_spare_step(self._step_seconds)
        self._largest_step = max(self._largest_step, self._step_tokens)
        if plan:
            # What is done for branches alone is done in spare time.
            self._busy_seconds += self._step_seconds

    def take_outbox(self) -> dict[str, CandidateOutput]:
        """What each target is to be told since the last call; targets with no news are left out."""
        outbox = {peer: CandidateOutput(declines=declines) for peer, declines in self._declines.items()}
        self._declines = {}
        num_awake = sum(sequence.wants_token for sequence in self._sequences.values())
        for key, sequence in self._sequences.items():
            candidates = sequence.take_candidates()
            if candidates is not None:
                output = outbox.setdefault(key.peer, CandidateOutput())
                output.candidates.append(candidates)
                output.step_seconds = self._step_seconds
                output.step_tokens = self._step_tokens
                output.num_awake = num_awake
        return outbox

    def snapshot(self) -> DraftSnapshot:
        return DraftSnapshot(
            num_targets=len(self._vocab_sizes),
            num_sequences=len(self._sequences),
            num_resting_sequences=sum(sequence.window == 0 for sequence in self._sequences.values()),
            num_free_blocks=self._blocks.num_free_blocks,
            num_blocks=self._blocks.num_blocks,
            num_cached_blocks=self._cache.num_blocks,
            num_steps_total=self._num_steps,
            num_drafted_tokens_total=self._num_drafted,
            num_discarded_tokens_total=self._num_discarded,
            num_branch_tokens_total=self._branches.num_tokens,
            num_corrections_total=self._branches.num_corrections,
            num_prepared_corrections_total=self._branches.num_prepared,
            num_prefill_tokens_total=self._num_prefill,
            num_prefix_cache_queries_total=self._num_prefix_queries,
            num_prefix_cache_hits_total=self._num_prefix_hits,
            num_declines_total=self._num_declines,
            num_stale_messages_total=self._num_stale,
            num_faults_total=self._num_faults,
            last_fault=self._last_fault,
            step_seconds=self._step_seconds,
            busy_seconds_total=self._busy_seconds,
        )

    def check_invariants(self) -> None:
        """Assert that sequences and blocks agree (for tests)."""
        for key, sequence in self._sequences.items():
            sequence.check()
            assert sequence.key == key
            assert key.peer in self._vocab_sizes
            needed = self._blocks.blocks_needed(sequence.num_computed_tokens)
            assert len(sequence.block_table) >= needed, (key, len(sequence.block_table), needed)
            if sequence.block_table:
                num_kept = min(sequence.num_computed_tokens, sequence.num_committed)
                self._cache.check_holder(sequence.prefix, sequence.block_table, num_kept)
        self._branches.check(self._sequences.values())
        tables = [sequence.block_table for sequence in self._sequences.values()]
        self._blocks.check_invariants([*tables, *self._branches.tables()])
        self._cache.check_invariants()
        assert len(self._sequences) <= self._config.max_num_seqs

    # ------------------------------------------------------------------ one step's parts

    def _begin_sequences(self) -> list[DraftSequence]:
        """Give sequences that hold nothing the blocks that the prefix cache has of them.

        Returns:
            Those that a step may compute. One whose next block an earlier one is about to compute waits for
            it; the earliest never waits, so that none waits for ever.
        """
        if all(sequence.block_table for sequence in self._sequences.values()):
            return list(self._sequences.values())
        ready: list[DraftSequence] = []
        coming: set[BlockKey] = set()
        for sequence in self._sequences.values():
            if sequence.wants_token:
                if not sequence.block_table and not self._begin(sequence, coming):
                    continue
                key = self._cache.next_key(sequence.prefix, sequence.token_ids, sequence.num_committed)
                if key is not None:
                    coming.add(key)
            ready.append(sequence)
        return ready

    def _begin(self, sequence: DraftSequence, coming: Set[BlockKey]) -> bool:
        """False: the sequence's next block is coming."""
        # The last token is always computed: the next one is drawn from its logits.
        limit = min(sequence.num_committed, len(sequence.token_ids) - 1)
        missing = self._cache.find(sequence.prefix, sequence.token_ids, limit)
        if missing is not None and missing in coming:
            return False
        sequence.num_computed_tokens = self._cache.take(sequence.prefix, sequence.block_table)
        return True

    def _remember(self, sequence: DraftSequence) -> None:
        """Let others find a sequence's full blocks of committed tokens; its chain may be cut off again."""
        num_tokens = min(sequence.num_computed_tokens, sequence.num_committed)
        self._cache.add(sequence.prefix, sequence.block_table, sequence.token_ids, num_tokens)

    def _reserve(self, plan: Sequence[PlannedSlice]) -> list[PlannedSlice]:
        """Give every planned slice its blocks; where there are none left, take the cheapest loss.

        First all branches go, then the KV of resting sequences (it can be computed again), then, for a
        sequence that is drafting, sequences still in prefill are declined, youngest first; else the sequence
        itself is declined. The target goes on without it in any case.
        """
        reserved: list[PlannedSlice] = []
        for planned in plan:
            sequence, num_tokens = planned
            if sequence.key not in self._sequences:
                continue  # declined a moment ago to make room
            while not self._blocks.grow(sequence.block_table, sequence.num_computed_tokens + num_tokens):
                if not self._make_room(sequence):
                    self._drop(sequence, "the draft has no free KV blocks")
                    break
            else:
                reserved.append(planned)
        return [planned for planned in reserved if planned.sequence.key in self._sequences]

    def _plan_branches(self, plan: Sequence[PlannedSlice]) -> list[PlannedBranch]:
        """The branches that this step takes along: as many as hardly slow it down, or, while no chain is in a
        hurry, as fit into idle time."""
        if not self._branches.wanted or not self._step_cost.known:
            return []
        num_tokens = sum(planned.num_tokens for planned in plan)
        urgent = any(self._branches.is_urgent(planned.sequence) for planned in plan)
        limit = min(self._config.max_num_batched_tokens, MEASURED_FACTOR * self._largest_step) - num_tokens
        spare = spare_tokens(
            self._step_cost, num_tokens, URGENT_SLACK if urgent else SPARE_SLACK, max(limit, 0)
        )
        return self._branches.plan(self._sequences.values(), spare)

    def _make_room(self, sequence: DraftSequence) -> bool:
        if self._branches.drop_all():
            return True
        for other in self._sequences.values():
            if other.window == 0 and other.block_table:
                self._blocks.free(other.block_table)
                other.num_computed_tokens = 0
                return True
        if sequence.num_missing_tokens <= MAX_DECODE_TOKENS:
            for other in reversed(self._sequences.values()):
                if other.num_missing_tokens > MAX_DECODE_TOKENS and other.block_table:
                    self._drop(other, "the draft has no free KV blocks")
                    return True
        return False

    def _compute(self, plan: Sequence[PlannedSlice], branches: Sequence[PlannedBranch]) -> None:
        started = self._clock()
        batch: list[SequenceSlice] = []
        sampled: list[DraftSequence | Branch] = []
        num_tokens_total = num_prefill = 0
        for sequence, num_tokens in plan:
            start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
            complete = end == len(sequence.token_ids)
            batch.append(
                SequenceSlice(sequence.token_ids[start:end], start, sequence.block_table, int(complete))
            )
            if complete:
                sampled.append(sequence)
            num_tokens_total += num_tokens
            if sequence.num_missing_tokens > MAX_DECODE_TOKENS:
                num_prefill += num_tokens

        planned_of = {item.branch: item for item in branches}
        for item in branches:
            batch.append(self._branches.slice_of(item))
            sampled.append(item.branch)
            num_tokens_total += item.num_tokens

        logits = self._runner.forward(batch)
        draws = draw_candidates(logits, sampled)

        # Nothing is recorded before the whole pass has succeeded.
        for sequence, num_tokens in plan:
            if self._cache.enabled and not sequence.last_turn:
                self._num_prefix_queries += sequence.num_committed
                self._num_prefix_hits += sequence.num_computed_tokens
            sequence.num_computed_tokens += num_tokens
            self._num_turns += 1
            sequence.last_turn = self._num_turns
        drawn_at = self._clock()
        for drafted, token_id, law, alternatives in draws.chosen:
            if isinstance(drafted, Branch):
                self._branches.extend(planned_of[drafted], token_id, alternatives)
                continue
            self._num_drafted += 1
            drafted.append(token_id, law)
            drafted.note_ready(drawn_at)
            self._branches.note(drafted, len(drafted.token_ids) - 1, alternatives)
        for drafted in draws.stuck:
            if isinstance(drafted, Branch):
                self._branches.give_up(drafted)
                continue
            drafted.num_computed_tokens -= 1  # the last token's KV is computed when its successor is drawn
            drafted.stuck = True
        for drafted, reason in draws.broken:
            if isinstance(drafted, Branch):
                self._branches.give_up(drafted)
                continue
            if reason == BAD_LOGITS:
                # What is wrong may lie in the KV: nobody is to find it again.
                self._cache.forget(drafted.prefix)
            self._drop(drafted, reason)
        for sequence, _ in plan:
            if sequence.block_table:
                self._remember(sequence)
        self._num_prefill += num_prefill
        self._pace.record(self._clock() - started, num_tokens_total - num_prefill, num_prefill)

    # ------------------------------------------------------------------ sequences

    def _reason_to_refuse(self, event: Open) -> str:
        num_tokens = len(event.token_ids)
        if num_tokens == 0:
            return "the sequence has no tokens"
        if len(self._sequences) >= self._config.max_num_seqs:
            return f"the draft is full (max_num_seqs = {self._config.max_num_seqs})"
        if num_tokens >= self._max_model_len:
            return self._too_long(num_tokens)
        if self._blocks.blocks_needed(num_tokens) > self._blocks.num_blocks:
            return f"{num_tokens} tokens do not fit into the draft's KV cache"
        try:
            self._check_token_ids(event.token_ids)
        except VerdictError as error:
            return str(error)
        return ""

    def _check_token_ids(self, token_ids: Sequence[int]) -> None:
        """Raises VerdictError for an id that the draft model cannot read."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._runner.vocab_size):
            raise VerdictError(f"a token id is outside the draft's vocabulary of {self._runner.vocab_size}")

    def _too_long(self, num_tokens: int) -> str:
        return f"{num_tokens} tokens reach the draft's length (max_model_len = {self._max_model_len})"

    def _find(self, peer: str, sequence_id: str, epoch: int) -> DraftSequence | None:
        sequence = self._sequences.get(SequenceKey(peer, sequence_id))
        if sequence is None or sequence.epoch != epoch:
            self._num_stale += 1
            return None
        return sequence

    def _drop(self, sequence: DraftSequence, reason: str) -> None:
        self._remove(sequence)
        self._decline(sequence.key.peer, sequence.key.sequence_id, sequence.epoch, reason)

    def _decline(self, peer: str, sequence_id: str, epoch: int, reason: str) -> None:
        self._num_declines += 1
        self._declines.setdefault(peer, []).append(Decline(sequence_id, epoch, reason))

    def _remove(self, sequence: DraftSequence) -> None:
        del self._sequences[sequence.key]
        self._branches.forget(sequence)
        self._blocks.free(sequence.block_table)

    def _forget(self, peer: str) -> None:
        for sequence in [item for item in self._sequences.values() if item.key.peer == peer]:
            self._remove(sequence)
        self._declines.pop(peer, None)
