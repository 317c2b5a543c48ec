"""The target engine: owns sequences, steps the model, verifies, and says what is committed.

Start reading at ``TargetEngine.step``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from paceline.actors.engine.admission import check_submit
from paceline.actors.engine.batch import ModelRunner, SequenceSlice
from paceline.actors.engine.blocks import BlockManager
from paceline.actors.engine.config import TargetEngineConfig
from paceline.actors.engine.constraint import ConstraintCompiler, make_matcher, stop_at_end
from paceline.actors.engine.deadlines import Deadlines
from paceline.actors.engine.drafts import DraftBook
from paceline.actors.engine.errors import InvalidArgumentError, ShardGroupError
from paceline.actors.engine.messages import (
    Cancel,
    Candidates,
    Committed,
    Decline,
    DraftHello,
    Finished,
    Load,
    Submit,
)
from paceline.actors.engine.parameters import FinishReason, SpeculationStats
from paceline.actors.engine.prefix_cache import PrefixCache
from paceline.actors.engine.processors import LogitProcessors
from paceline.actors.engine.proposer import NgramProposer
from paceline.actors.engine.scheduler import Plan, ScheduledSequence, Scheduler
from paceline.actors.engine.sequence import SequenceStatus, TargetSequence
from paceline.actors.engine.speculation import Proposal, Speculator
from paceline.actors.engine.step_times import StepTimes
from paceline.actors.engine.stopping import Stop, find_stop
from paceline.actors.engine.target_output import (
    DraftOutput,
    DraftStatus,
    GatewayOutput,
    TargetOutbox,
    TargetSnapshot,
)
from paceline.actors.engine.verification import Verification
from paceline.actors.engine.verifier import Unverified, verify_step

__all__ = [
    "DraftOutput",
    "DraftStatus",
    "GatewayOutput",
    "TargetEngine",
    "TargetOutbox",
    "TargetSnapshot",
]

logger = logging.getLogger(__name__)

STEP_FAILED = "the target could not compute this step"
TIME_OVER = "the time that the request was given is over"

MEASURED_SIZES = (1, 2, 3, 4, 5, 7, 9)
"""Tokens of the steps that are measured at start-up: one sequence with tails up to the usual limit."""
MEASURED_REPEATS = 3


class TargetEngine:
    """Not thread-safe: events, steps and ``take_outbox`` on one thread.

    Nothing that a peer says raises here: a request that cannot be served is answered with ``Finished``,
    what is stale is dropped and counted, what is impossible costs a draft the sequence it concerns.

    Args:
        runner: the target model with its paged KV cache.
        config: limits of the target.
        clock: seconds, monotonic.
        constraints: makes matchers for structured output; None: sequences with a constraint are refused.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: TargetEngineConfig,
        clock: Callable[[], float] = time.monotonic,
        constraints: ConstraintCompiler | None = None,
    ) -> None:
        self._runner = runner
        self._config = config
        self._clock = clock
        self._constraints = constraints
        self._blocks = BlockManager(runner.num_blocks, runner.block_size)
        self._cache = PrefixCache(self._blocks, enabled=config.enable_prefix_caching)
        self._scheduler = Scheduler(
            self._blocks, config.max_num_seqs, config.max_num_batched_tokens, self._cache
        )
        self._book = DraftBook(runner.vocab_size, config.max_window)
        self._speculator = Speculator(config, self._book)
        self._sequences: dict[str, TargetSequence] = {}
        """Live ones (waiting or running), by sequence id."""
        self._deadlines = Deadlines()
        self._gateways: dict[str, GatewayOutput] = {}
        self._draining = False
        self._fault = ""
        self._round_started = 0.0
        """When the last step ended, or work arrived after idleness."""
        self._step_seconds = 0.0
        self._step_times = StepTimes()
        self._num_steps = 0
        self._num_computed = 0
        self._num_prompt = 0
        self._num_committed = 0
        self._num_lookup = 0
        self._num_accepted_lookup = 0
        self._num_finished = 0
        self._num_preemptions = 0
        self._num_stale = 0
        self._totals = SpeculationStats()

    @property
    def max_model_len(self) -> int:
        """Longest prompt + completion, in tokens."""
        return min(self._runner.max_model_len, self._config.max_model_len or self._runner.max_model_len)

    @property
    def kv_capacity_tokens(self) -> int:
        """Longest prompt + completion that the KV pool holds for one sequence alone, in tokens."""
        return self._blocks.num_blocks * self._blocks.block_size

    @property
    def fault(self) -> str:
        """Why this engine should not be trusted any further; empty while it is healthy."""
        return self._fault

    def measure_step_costs(self) -> None:
        """Run steps of a few tokens, so that the first request is already paced by measured costs.

        To be called before the first event. What is written to the cache is never read.
        """
        most = min(MEASURED_SIZES[-1], self.max_model_len, self.kv_capacity_tokens)
        table: list[int] = []
        self._blocks.grow(table, most)
        for size in [size for size in MEASURED_SIZES if size <= most] * MEASURED_REPEATS:
            started = self._clock()
            self._runner.forward([SequenceSlice([0] * size, 0, table, size)])
            self._speculator.step_cost.record(1, size - 1, 0, self._clock() - started)
        self._blocks.free(table)

    # ------------------------------------------------------------------ the step

    def wait_seconds(self) -> float | None:
        """0.0: step now; None: nothing to do before an event; else wait for one at most so long."""
        running = self._scheduler.running
        if not running:
            return 0.0 if self._scheduler.waiting else None
        now = self._clock()
        return self._speculator.seconds_to_wait(running, now - self._round_started, now)

    def step(self) -> None:
        """One pass over everything that is running: plan, forward, verify, update."""
        started = self._clock()
        self._end_overdue(started)
        self._admit()
        proposals = self._speculator.propose(self._scheduler.running, started - self._round_started)
        plan = self._scheduler.schedule(
            {sequence: proposal.token_ids for sequence, proposal in proposals.items()}
        )
        self._num_preemptions += len(plan.preempted)
        for sequence in plan.preempted:
            sequence.waiting_since = started
        if not plan.scheduled:
            return
        draft_running = self._speculator.draft_running(self._scheduler.running)
        drafting = self._speculator.drafting(self._scheduler.running)
        catching_up = drafting and self._speculator.catching_up(self._scheduler.running)
        num_running, num_committed = len(self._scheduler.running), self._num_committed
        batch = [item.to_slice() for item in plan.scheduled]
        computing = self._clock()
        try:
            logits = self._runner.forward(batch)
            model_seconds = self._clock() - computing
            verifications = verify_step(
                plan.scheduled,
                logits,
                self._config.logprobs_mode,
                {sequence: proposal.laws for sequence, proposal in proposals.items() if proposal.laws},
            )
        except ShardGroupError:
            raise
        except Exception as error:  # whatever a model raises: these sequences end, the process stays
            self._fail(plan, error)
            return
        self._update(plan, proposals, verifications)
        self._step_seconds = self._clock() - started
        num_drafted = sum(len(item.tail) for item in plan.scheduled)
        num_decoding = sum(item.num_tokens == 1 for item in plan.scheduled)
        num_prompt = plan.num_tokens - num_drafted - num_decoding
        # First what such a step takes, then what it was worth: a size may be new.
        self._speculator.record_step(num_decoding, num_drafted, num_prompt, self._step_seconds, draft_running)
        self._speculator.payoff.record(
            num_running=num_running,
            num_sequences=sum(
                isinstance(item, Verification) and bool(item.token_ids) for item in verifications
            ),
            num_tokens=self._num_committed - num_committed,
            num_prompt_tokens=num_prompt,
            seconds=self._clock() - self._round_started,
            plain_seconds=self._speculator.step_cost.plain(num_decoding, num_prompt),
            drafting=drafting,
            draftable=any(item.sequence.drafting is not None for item in plan.scheduled),
            catching_up=catching_up,
        )
        self._end_step(plan, started, model_seconds)

    def take_outbox(self) -> TargetOutbox:
        """What to publish since the last call."""
        gateways, self._gateways = self._gateways, {}
        return TargetOutbox(gateways, self._book.take_output())

    # ------------------------------------------------------------------ the step's parts

    def _end_overdue(self, now: float) -> None:
        """A cancellation may be lost on its way; what nobody waits for must end all the same."""
        for sequence in self._deadlines.passed(self._sequences.values(), now):
            self._finish(sequence, FinishReason.ERROR, error=TIME_OVER, deadline_exceeded=True)

    def _admit(self) -> None:
        self._scheduler.admit()
        self._book.place(self._scheduler.running, self._speculator.initial_window)

    def _update(
        self,
        plan: Plan,
        proposals: dict[TargetSequence, Proposal],
        verifications: Sequence[Verification | Unverified],
    ) -> None:
        """Commit, truncate, finish, free."""
        for item, verification in zip(plan.scheduled, verifications, strict=True):
            if isinstance(verification, Unverified):
                if not verification.invalid_argument:
                    # What is wrong may lie in the KV: nobody is to find it again.
                    self._cache.forget(item.sequence.prefix)
                self._finish(
                    item.sequence,
                    FinishReason.ERROR,
                    error=verification.error,
                    invalid_argument=verification.invalid_argument,
                )
            elif not verification.token_ids:
                item.sequence.num_computed_tokens += item.num_tokens
                self._scheduler.settle(item.sequence)
            else:
                self._commit(item, proposals.get(item.sequence), verification)

    def _commit(self, item: ScheduledSequence, proposal: Proposal | None, verification: Verification) -> None:
        sequence = item.sequence
        num_drafted = len(item.tail)
        base_position = len(sequence.token_ids)
        stop = find_stop(verification.token_ids, sequence.num_completion_tokens, sequence.stopping)
        stop = stop_at_end(stop, verification.token_ids, sequence.matcher)
        token_ids = verification.token_ids[: stop.num_kept]
        num_accepted = min(verification.num_accepted, stop.num_kept)
        sequence.token_ids.extend(token_ids)
        # The rollback rule: KV of the accepted tokens stays; the last committed token has none yet.
        held = item.start + item.num_tokens + num_drafted
        sequence.num_computed_tokens = min(held, len(sequence.token_ids) - 1)
        self._scheduler.settle(sequence)

        self._num_committed += len(token_ids)
        if num_drafted:
            assert proposal is not None
            sequence.stats.record(num_drafted, num_accepted)
            self._totals.record(num_drafted, num_accepted)
            if not proposal.from_draft:
                self._num_lookup += num_drafted
                self._num_accepted_lookup += num_accepted
                sequence.proposer.record(num_drafted, verification.num_accepted)
                self._speculator.lookup_acceptance.record(num_drafted, verification.num_accepted)
        self._output(sequence.gateway).committed.append(
            Committed(
                sequence_id=sequence.sequence_id,
                epoch=sequence.epoch,
                base_position=base_position,
                token_ids=token_ids,
                accepted=(True,) * num_accepted + (False,) * (len(token_ids) - num_accepted),
                logprobs=verification.logprobs[: stop.num_kept],
            )
        )
        if stop.reason is not None:
            self._speculator.answer_lengths.add(sequence.num_completion_tokens)
            self._finish(sequence, stop.reason)
            return
        from_draft = proposal is not None and proposal.from_draft
        self._book.follow(
            sequence, base_position, num_drafted if from_draft else 0, num_accepted if from_draft else 0
        )

    def _end_step(self, plan: Plan, started: float, model_seconds: float) -> None:
        self._num_steps += 1
        self._num_computed += plan.num_tokens
        self._speculator.update_windows(self._scheduler.running, self._clock())
        # What finished made room: drafts hear of newcomers now, not after another step.
        self._admit()
        ended = self._clock()
        self._step_times.record(ended - self._round_started, model_seconds, started - self._round_started)
        self._round_started = ended

    def _fail(self, plan: Plan, error: Exception) -> None:
        logger.error("a target step failed", exc_info=error)
        self._fault = f"{type(error).__name__}: {error}"
        for item in plan.scheduled:
            self._finish(item.sequence, FinishReason.ERROR, error=STEP_FAILED)
        self._round_started = self._clock()

    # ------------------------------------------------------------------ events of gateways

    def submit(self, peer: str, event: Submit, received_at: float | None = None) -> None:
        """Take a sequence, or answer at once why not. A newer epoch replaces an older one of the same id.

        Args:
            received_at: when it reached this machine, by the engine's clock; None = now. Its waiting and its
                time to live begin then, also while a step is computing.
        """
        present = self._sequences.get(event.sequence_id)
        if present is not None:
            if event.epoch <= present.epoch:
                self._num_stale += 1
                return
            self._drop(present)
        try:
            check_submit(event, self._runner.vocab_size, self.max_model_len, self.kv_capacity_tokens)
            matcher = make_matcher(
                self._constraints, event.sampling.constraint, event.stopping.stop_token_ids
            )
            processors = LogitProcessors.create(
                event.sampling, event.stopping, event.prompt_length, self._runner.vocab_size, matcher
            )
        except InvalidArgumentError as error:
            self._refuse(peer, event, str(error), invalid_argument=True)
            return
        completion = event.token_ids[event.prompt_length :]
        if completion:
            # Resumed: what is committed already may be all there is to say.
            stop = find_stop(completion[-1:], len(completion) - 1, event.stopping)
            if matcher is not None and matcher.find_end(completion) is not None:
                stop = Stop(1, FinishReason.STOP)
            if stop.reason is not None:
                self._num_finished += 1
                finished = Finished(event.sequence_id, event.epoch, stop.reason, SpeculationStats())
                self._output(peer).finished.append(finished)
                return
        if self._draining:
            # Its gateway has not heard of it yet. Nothing is full: given back, it may wait for another.
            self._refuse(peer, event, "", reason=FinishReason.CANCELLED)
            return
        if self._scheduler.num_queued >= self._config.max_num_waiting:
            self._refuse(
                peer,
                event,
                f"the target's queue is full (max_num_waiting = {self._config.max_num_waiting})",
                resource_exhausted=True,
            )
            return
        now = self._clock() if received_at is None else received_at
        bound = event.speculation.num_speculative_tokens
        tail_limit = self._config.tail_limit
        sequence = TargetSequence.from_submit(
            peer,
            event,
            max_tail=tail_limit if bound is None else min(bound, tail_limit),
            proposer=NgramProposer(self._config.ngram, self._speculator.lookup_acceptance.rate),
            processors=processors,
            matcher=matcher,
            now=now,
        )
        if not self._scheduler.running:
            self._round_started = self._clock()
        sequence.waiting_since = now
        self._sequences[sequence.sequence_id] = sequence
        self._deadlines.watch(sequence)
        self._speculator.payoff.note_arrival()
        self._num_prompt += len(sequence.token_ids)
        self._scheduler.add(sequence, now)
        self._admit()

    def cancel(self, peer: str, event: Cancel) -> None:
        sequence = self._sequences.get(event.sequence_id)
        if sequence is None or sequence.gateway != peer or sequence.epoch != event.epoch:
            self._num_stale += 1
            return
        self._finish(sequence, FinishReason.CANCELLED)

    def gateway_left(self, peer: str) -> None:
        """Nobody hears of this gateway's sequences any more: forget them."""
        for sequence in [item for item in self._sequences.values() if item.gateway == peer]:
            self._drop(sequence)
        self._gateways.pop(peer, None)

    def start_draining(self) -> None:
        """Refuse new sequences from now on; go on with those that are here."""
        self._draining = True

    # ------------------------------------------------------------------ events of drafts

    def draft_joined(self, peer: str, hello: DraftHello) -> None:
        """A draft attached: it is given the sequences without a draft, then its share of the others."""
        self.draft_left(peer)
        self._book.join(peer, hello)
        self._speculator.payoff.note_draft()
        window = self._speculator.initial_window
        self._book.place(self._scheduler.running, window)
        self._book.rebalance(peer, window)

    def draft_left(self, peer: str) -> None:
        """A draft is gone: its sequences are given to others at once, or go on without."""
        self._book.leave(peer)
        self._book.forget_draft(peer, self._sequences.values())
        self._book.place(self._scheduler.running, self._speculator.initial_window)

    def candidates(
        self,
        peer: str,
        messages: Sequence[Candidates],
        step_seconds: float,
        received_at: float | None = None,
        step_tokens: int = 0,
        num_awake: int = 0,
    ) -> None:
        """One message of a draft.

        Args:
            step_seconds: how long the draft's step took that made them; 0.0 where unknown.
            received_at: when they reached this machine, by the engine's clock; None = now. A message that
                came in while a step was computing would else seem to be late by that step.
            step_tokens: how many tokens that step computed; 0 where unknown.
            num_awake: for how many sequences of all targets the draft had tokens to make then.
        """
        draft = self._book.drafts.get(peer)
        if draft is None:
            self._num_stale += len(messages)
            return
        now = self._clock() if received_at is None else received_at
        answers = [
            self._book.receive(peer, self._sequences.get(message.sequence_id), message, now)
            for message in messages
        ]
        draft.hear(
            step_tokens or max(len(messages), 1),
            step_seconds,
            [answer for answer in answers if answer is not None],
            num_awake,
            disturbed=self._speculator.shares_hardware and now - step_seconds < self._round_started,
        )

    def decline(self, peer: str, event: Decline) -> None:
        """A draft cannot serve a sequence: another one may, this one is not asked again."""
        sequence = self._sequences.get(event.sequence_id)
        if sequence is None or sequence.epoch != event.epoch:
            self._num_stale += 1
            return
        if sequence.drafting is None or sequence.drafting.peer != peer:
            self._num_stale += 1
            return
        self._book.close(sequence, bar=True, tell=False)
        if sequence.status is SequenceStatus.RUNNING:
            self._book.place([sequence], self._speculator.initial_window)

    # ------------------------------------------------------------------ state

    def load(self) -> Load:
        return Load(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_pending_tokens=sum(sequence.num_pending_tokens for sequence in self._sequences.values()),
            free_blocks=self._blocks.num_free_blocks,
            total_blocks=self._blocks.num_blocks,
            draining=self._draining,
        )

    def snapshot(self) -> TargetSnapshot:
        now = self._clock()
        running = self._scheduler.running
        return TargetSnapshot(
            num_running=len(running),
            num_waiting=len(self._scheduler.waiting),
            queue_seconds=max((now - item.waiting_since for item in self._scheduler.waiting), default=0.0),
            num_wanting_draft=self._speculator.num_wanting_draft(running, now),
            num_drafted=sum(sequence.drafting is not None for sequence in running),
            free_blocks=self._blocks.num_free_blocks,
            total_blocks=self._blocks.num_blocks,
            num_cached_blocks=self._cache.num_blocks,
            draining=self._draining,
            fault=self._fault,
            hardware=self._speculator.hardware,
            overlap_ratio=self._speculator.probe.ratio or 0.0,
            drafting_gain=self._speculator.payoff.gain or 0.0,
            drafts_rest=self._speculator.payoff.resting,
            step_seconds=self._step_seconds,
            step_times=self._step_times.snapshot(),
            drafts=tuple(draft.status() for draft in self._book.drafts.values()),
            num_steps_total=self._num_steps,
            num_computed_tokens_total=self._num_computed,
            num_prompt_tokens_total=self._num_prompt,
            num_prefix_cache_queries_total=self._scheduler.num_prefix_queries,
            num_prefix_cache_hits_total=self._scheduler.num_prefix_hits,
            num_committed_tokens_total=self._num_committed,
            num_rounds_total=self._totals.rounds,
            num_draft_tokens_total=self._totals.draft_tokens,
            num_accepted_tokens_total=self._totals.accepted_tokens,
            num_accepted_per_position_total=tuple(self._totals.accepted_per_position),
            num_draft_turns_total=self._speculator.num_draft_turns,
            num_late_drafts_total=self._speculator.num_late_drafts,
            num_lookup_tokens_total=self._num_lookup,
            num_accepted_lookup_tokens_total=self._num_accepted_lookup,
            num_finished_total=self._num_finished,
            num_preemptions_total=self._num_preemptions,
            num_stale_messages_total=self._num_stale + self._book.num_stale,
            num_quarantined_total=self._book.num_quarantined,
        )

    def check_invariants(self) -> None:
        """Assert that sequences, blocks and drafts agree (for tests)."""
        running, waiting = self._scheduler.running, self._scheduler.waiting
        assert {*running, *waiting} == set(self._sequences.values())
        assert len(running) <= self._config.max_num_seqs
        for sequence in running:
            assert sequence.status is SequenceStatus.RUNNING
            assert 0 <= sequence.num_computed_tokens < len(sequence.token_ids)
            needed = self._blocks.blocks_needed(sequence.num_computed_tokens)
            assert needed <= len(sequence.block_table) <= self._blocks.blocks_needed(len(sequence.token_ids))
            assert sequence.num_completion_tokens < sequence.stopping.max_tokens
            self._cache.check_holder(sequence.prefix, sequence.block_table, sequence.num_computed_tokens)
        for sequence in waiting:
            assert sequence.status is SequenceStatus.WAITING
            assert sequence.num_computed_tokens == 0
            assert not sequence.block_table
        self._blocks.check_invariants(sequence.block_table for sequence in running)
        self._cache.check_invariants()
        self._book.check_invariants(self._sequences.values())

    # ------------------------------------------------------------------ ends

    def _finish(
        self,
        sequence: TargetSequence,
        reason: FinishReason,
        *,
        error: str = "",
        invalid_argument: bool = False,
        deadline_exceeded: bool = False,
    ) -> None:
        self._drop(sequence)
        self._num_finished += 1
        self._output(sequence.gateway).finished.append(
            Finished(
                sequence.sequence_id,
                sequence.epoch,
                reason,
                sequence.stats,
                cached_prompt_tokens=sequence.cached_prompt_tokens or 0,
                error=error,
                invalid_argument=invalid_argument,
                deadline_exceeded=deadline_exceeded,
            )
        )

    def _drop(self, sequence: TargetSequence) -> None:
        """Forget a sequence, here and at its draft, and free its blocks."""
        self._book.close(sequence)
        self._scheduler.remove(sequence)
        del self._sequences[sequence.sequence_id]

    def _refuse(
        self,
        peer: str,
        event: Submit,
        error: str,
        *,
        reason: FinishReason = FinishReason.ERROR,
        invalid_argument: bool = False,
        resource_exhausted: bool = False,
    ) -> None:
        self._output(peer).finished.append(
            Finished(
                event.sequence_id,
                event.epoch,
                reason,
                SpeculationStats(),
                error=error,
                invalid_argument=invalid_argument,
                resource_exhausted=resource_exhausted,
            )
        )

    def _output(self, peer: str) -> GatewayOutput:
        return self._gateways.setdefault(peer, GatewayOutput())
