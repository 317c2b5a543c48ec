"""What the target verifies, how far drafts may go, and how long a step waits for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.actors.engine.attached_draft import Draft, NextStep, Pace
from paceline.actors.engine.config import Hardware, TargetEngineConfig
from paceline.actors.engine.draft_demand import UNKNOWN_PACE, DraftPace, draft_pays, faded
from paceline.actors.engine.drafts import DraftBook
from paceline.actors.engine.estimates import MAX_ACCEPTANCE, AcceptanceEstimate, StepCosts
from paceline.actors.engine.messages import DraftLaw
from paceline.actors.engine.pacing import (
    Awaited,
    OverlapProbe,
    TailLengths,
    allocate_tails,
    best_tail_lengths,
    draft_window,
    expected_tokens,
    go_or_wait,
    next_arrival,
    turn_tail_lengths,
    useful_depth,
)
from paceline.actors.engine.payoff import Payoff
from paceline.actors.engine.reading import AnswerLengths, Reading, worth_reading
from paceline.actors.engine.sequence import Drafting, TargetSequence

INITIAL_TAIL = 4
"""Tail asked for while neither step costs nor the draft's pace are known."""
LATENESS = 2.5
"""A draft that needs so many times longer than usual is late, and no longer waited for."""
PREPARED_LATENESS = 1.75
"""A prepared answer that needs so many times longer than usual was not prepared."""
PATIENT_TOKENS = 16
"""A sequence that has so many tokens is given its draft although others' prompts are being read."""
MIN_DEADLINE_SECONDS = 0.001
MAX_WAIT_SECONDS = 0.5
"""Nothing is worth a longer pause, however slow the draft says it is."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens for the positions after the committed ones."""

    token_ids: Sequence[int]
    from_draft: bool
    """False: from the target's own prompt lookup."""
    acceptance: float
    laws: Sequence[DraftLaw | None] = ()
    """What each token was drawn from; none at all: all of them were certain."""


class Speculator:
    """The decisions of ``pacing`` over live sequences, and the measurements that feed them."""

    def __init__(self, config: TargetEngineConfig, book: DraftBook) -> None:
        self._config = config
        self._book = book
        self.step_cost = StepCosts()
        self.payoff = Payoff()
        self.lookup_acceptance = AcceptanceEstimate(prior=0.5)
        """Of the lookups of all sequences."""
        self.probe = OverlapProbe(config.hardware)
        self.answer_lengths = AnswerLengths()
        self._best_tails: dict[tuple[str, bool, int, int], TailLengths] = {}
        """Memo of one step: (draft, whether without doubt in it, acceptance in 1/32, limit) -> best tails."""
        self._all_told_to_rest = False
        """No draft has been asked for anything since a rest began."""
        self._pace = UNKNOWN_PACE
        self._pace_at = 0.0
        """What drafts were like when there were some last, and when that was."""
        self.num_draft_turns = 0
        """Steps of a sequence whose draft had been asked for tokens, and had begun with it."""
        self.num_late_drafts = 0
        """Of those, steps that began without any."""

    @property
    def initial_window(self) -> int:
        """Window of a sequence that a draft is just being given."""
        if self._config.num_speculative_tokens is not None:
            return self._config.num_speculative_tokens
        if self.payoff.resting or self.shares_hardware:
            return 0  # until ``update_windows`` finds that the moment has come
        return min(INITIAL_TAIL, self._config.tail_limit)

    @property
    def hardware(self) -> Hardware:
        """As configured, or as drafts say where they compute, else as step times show; AUTO while nothing is
        known."""
        return Hardware.SHARED if self._shares_cores else self.probe.hardware

    @property
    def shares_hardware(self) -> bool:
        """Whether target and drafts do, or may."""
        return self.hardware is not Hardware.SEPARATE

    @property
    def _shares_cores(self) -> bool:
        if self._config.hardware is not Hardware.AUTO:
            return False
        drafts = self._book.drafts.values()
        return any(draft.hello.shares_cores and draft.sequences for draft in drafts)

    # ------------------------------------------------------------------ before the step

    def propose(self, running: Iterable[TargetSequence], elapsed: float) -> dict[TargetSequence, Proposal]:
        """The tails worth verifying in a step that starts now.

        Args:
            elapsed: seconds since the last step ended.
        """
        proposals: dict[TargetSequence, Proposal] = {}
        num_prompt_tokens = num_decoding = 0
        for sequence in running:
            if not sequence.is_decoding:
                num_prompt_tokens += sequence.num_pending_tokens
            else:
                num_decoding += 1
                if sequence.tail_limit > 0:
                    self._note_lateness(sequence)
                    proposal = self._propose_for(sequence)
                    if proposal is not None:
                        proposals[sequence] = proposal
        if not proposals or self._config.num_speculative_tokens is not None or not self.step_cost.known:
            return proposals
        # Pending tokens without a proposal, and prompt chunks, are computed in any case.
        num_prompt_tokens = min(num_prompt_tokens, self._config.max_num_batched_tokens - num_decoding)
        counts = allocate_tails(
            [len(proposal.token_ids) for proposal in proposals.values()]
            + [0] * (num_decoding - len(proposals)),
            [proposal.acceptance for proposal in proposals.values()]
            + [0.0] * (num_decoding - len(proposals)),
            num_decoding + num_prompt_tokens,
            self.step_cost.beside(num_decoding, num_prompt_tokens),
            elapsed,
        )
        chosen: dict[TargetSequence, Proposal] = {}
        for (sequence, proposal), count in zip(proposals.items(), counts, strict=False):
            if not count and not proposal.from_draft:
                count = int(sequence.proposer.pass_over())
            if count:
                chosen[sequence] = replace(
                    proposal, token_ids=proposal.token_ids[:count], laws=proposal.laws[:count]
                )
        return chosen

    def draft_running(self, running: Iterable[TargetSequence]) -> bool:
        """Whether, as far as is known here, a draft has work to do on one of these sequences."""
        return any(sequence.drafting is not None and sequence.drafting.busy for sequence in running)

    def drafting(self, running: Iterable[TargetSequence]) -> bool:
        """Whether a draft is asked for tokens of any of these sequences."""
        if self._all_told_to_rest:
            return False
        return any(sequence.drafting is not None and sequence.drafting.window > 0 for sequence in running)

    def catching_up(self, running: Iterable[TargetSequence]) -> bool:
        """Whether most of the sequences that drafts are asked for wait until these have caught up with what
        was committed during a rest."""
        awake = [s.drafting for s in running if s.drafting is not None and s.drafting.window > 0]
        return 2 * sum(drafting.catching_up for drafting in awake) > len(awake)

    def seconds_to_wait(self, running: Sequence[TargetSequence], elapsed: float, now: float) -> float:
        """0.0: start the step now. Else look again after so many seconds, or when candidates arrive.

        The round's rate decides, in which every running sequence counts: one with a complete tail with what
        it promises, one that has nothing to do with drafts at present (a prompt to compute, no draft, one
        that is late, has not begun or is asked for nothing) with one token. The latter are never held up by
        more than the time of a step. (Going as soon as any tail is complete gave 8 to 12 % fewer tokens per
        second with 4 and 8 sequences on emulated models.) A tail of fixed length is waited for whatever the
        rate, where all have drafts.
        """
        if not self._config.wait_for_drafts or not self.step_cost.known or not self.drafting(running):
            return 0.0
        awaited: list[Awaited] = []
        patience = MAX_WAIT_SECONDS - elapsed
        num_without = num_growing = 0
        next_steps = {peer: draft.next_step() for peer, draft in self._book.drafts.items()}
        for sequence in running:
            drafting = sequence.drafting
            if drafting is not None and sequence.is_decoding:
                item, deadline = self._prepared(sequence, drafting, now)
                if item is not None:
                    num_growing += 1
                    patience = min(patience, deadline - now)
                    awaited.append(item)
                    continue
            limit = 0
            if drafting is not None and sequence.is_decoding and drafting.chain.started:
                limit = min(sequence.tail_target, sequence.tail_limit, drafting.window)
            if drafting is None or limit == 0 or drafting.silent:
                awaited.append(self._without_tail(sequence))
                num_without += 1
                continue
            # In steps, so that many sequences make few different items.
            acceptance = math.ceil(drafting.acceptance.optimistic * 64) / 64
            num_ready = len(drafting.chain.token_ids)
            if num_ready >= limit:
                awaited.append(Awaited.ready(limit, acceptance))
                continue
            draft = self._book.drafts[drafting.peer]
            next_step = next_steps[drafting.peer]
            first, deadline = _expected_and_deadline(drafting, draft, next_step, now)
            if now >= deadline:
                drafting.silent = True
                awaited.append(self._without_tail(sequence))
                num_without += 1
                continue
            proposal = self._propose_for(sequence)
            if proposal is not None and not proposal.from_draft and len(proposal.token_ids) >= limit:
                awaited.append(Awaited.ready(len(proposal.token_ids), proposal.acceptance))
                continue
            num_growing += 1
            patience = min(patience, deadline - now)
            awaited.append(Awaited(num_ready, limit, acceptance, first, next_step.expected))
        num_decoding = sum(sequence.is_decoding for sequence in running)
        num_prompt_tokens = sum(item.num_pending for item in awaited) - num_decoding
        if num_without:
            patience = min(patience, self.step_cost.plain(num_decoding, num_prompt_tokens) - elapsed)
        if not num_growing or patience <= 0.0:
            return 0.0
        if self._config.num_speculative_tokens is not None and not num_without:
            wait = next_arrival(awaited)
        else:
            wait = go_or_wait(awaited, elapsed, self.step_cost.beside(num_decoding, num_prompt_tokens))
        if wait == 0.0:
            return 0.0
        # A little longer than expected, so that the usual jitter does not cost another look.
        margin = min([0.5 * item.gap_seconds for item in awaited] + [wait])
        return min(patience, wait + margin + MIN_DEADLINE_SECONDS)

    # ------------------------------------------------------------------ after the step

    def record_step(
        self,
        num_decoding: int,
        num_tail_tokens: int,
        num_prompt_tokens: int,
        seconds: float,
        draft_running: bool,
    ) -> None:
        contended = draft_running and self.shares_hardware
        self.step_cost.record(num_decoding, num_tail_tokens, num_prompt_tokens, seconds, disturbed=contended)
        self.probe.record(num_decoding + num_tail_tokens + num_prompt_tokens, draft_running, seconds)
        self._best_tails.clear()

    def update_windows(self, running: Sequence[TargetSequence], now: float) -> None:
        """Tell each sequence's draft what was committed and how far to go from here.

        While drafts rest there is nothing to tell: newcomers are given to them with a window of 0.
        """
        self.payoff.expect(len(running))
        resting = self.payoff.resting and self._config.num_speculative_tokens is None
        awake = set() if resting and self._all_told_to_rest else self._tell_windows(running, now)
        self._all_told_to_rest = resting
        for peer, draft in self._book.drafts.items():
            if draft.sequences and peer not in awake:
                draft.doubt(now)

    def _tell_windows(self, running: Sequence[TargetSequence], now: float) -> set[str]:
        """Returns: the drafts that are asked for anything."""
        num_sequences = len(running)
        run_ahead = self.probe.run_ahead and not self._shares_cores
        prepares = run_ahead and not self.shares_hardware
        # On common hardware a draft that reads a prompt delays the prompts that the target reads.
        waits_for_prompts = self.shares_hardware and any(not item.is_decoding for item in running)
        # But while nobody knows whether hardware is common, one at a time does not wait, so that it shows.
        is_probe_due = self.hardware is Hardware.AUTO
        awake: set[str] = set()
        tails: dict[TargetSequence, TailLengths] = {}
        for sequence in running:
            draft = self._book.draft_of(sequence)
            if draft is None or sequence.drafting is None:
                continue
            wanted = self._best_tails_of(sequence, draft, num_sequences)
            sequence.tail_target = wanted.fresh
            if wanted.ready:
                if waits_for_prompts and not is_probe_due and _may_wait(sequence, sequence.drafting):
                    awake.add(draft.peer)
                else:
                    is_probe_due = False
                    tails[sequence] = wanted
        tails = self._without_dear_readers(tails, num_sequences, now)
        for sequence in running:
            draft = self._book.draft_of(sequence)
            if draft is None or sequence.drafting is None:
                continue
            window = branch_tokens = 0
            best = tails.get(sequence)
            if best is not None:
                awake.add(draft.peer)
                window = draft_window(
                    best.ready,
                    *draft.pace,
                    self.step_cost((best.ready + 1) * num_sequences),
                    run_ahead,
                    self._config.max_window,
                    useful_depth(sequence.drafting.acceptance.optimistic, num_sequences),
                )
                branch_tokens = best.ready if prepares and sequence.shares_noise else 0
            self._book.report(sequence, min(window, sequence.tail_room), now, branch_tokens)
        return awake

    def _without_dear_readers(
        self, tails: dict[TargetSequence, TailLengths], num_sequences: int, now: float
    ) -> dict[TargetSequence, TailLengths]:
        """``tails`` without the sequences that a draft had better not begin with, for what it would have to
        read first.

        That must pay as the draft was when it was last heard of. Where nothing is known of it, or it has
        rested long enough, one sequence at a time is tried all the same.
        """
        if not self.shares_hardware or self._config.num_speculative_tokens is not None:
            return tails
        asked = {item for item in tails if item.drafting is not None and item.drafting.window > 0}
        waiting: dict[str, list[TargetSequence]] = {}
        for sequence in tails:
            if sequence.drafting is not None and sequence not in asked:
                waiting.setdefault(sequence.drafting.peer, []).append(sequence)
        for peer, sequences in waiting.items():
            draft = self._book.drafts[peer]
            readings = [self._reading_of(sequence, draft, num_sequences) for sequence in sequences]
            chosen = worth_reading(readings, num_sequences) if draft.step_cost.known else []
            if chosen:
                draft.trials.note_paying()
            else:
                least = min(range(len(readings)), key=lambda index: readings[index].seconds)
                left_seconds = readings[least].num_left * self.step_cost(num_sequences)
                if draft.trials.due(readings[least].seconds, left_seconds, now):
                    draft.begin_trial(now)
                    chosen = [least]
            asked.update(sequences[index] for index in chosen)
        return {sequence: best for sequence, best in tails.items() if sequence in asked}

    def _reading_of(self, sequence: TargetSequence, draft: Draft, num_sequences: int) -> Reading:
        drafting = sequence.drafting
        assert drafting is not None
        num_known = drafting.reported_length if drafting.chain.started else sequence.cached_prompt_tokens
        best = self._best_tails_of(sequence, draft, num_sequences, as_known=True)
        return Reading(
            seconds=draft.reading_seconds(len(sequence.token_ids) - (num_known or 0)),
            num_left=self.answer_lengths.expected_left(sequence.num_completion_tokens, sequence.tail_room),
            saved_seconds=best.saved_seconds,
        )

    # ------------------------------------------------------------------ for the size of the draft pool

    def num_wanting_draft(self, running: Sequence[TargetSequence], now: float) -> int:
        """Of the running sequences those for which a draft pays at this load, whether they have one or not.

        Judged by what drafts are like on average, or were like when there were some last.
        """
        drafts = [d for d in self._book.drafts.values() if d.step_cost.known]
        if drafts:
            self._pace_at = now
            paces = [draft.pace for draft in drafts]
            self._pace = DraftPace(
                acceptance=sum(draft.acceptance.optimistic for draft in drafts) / len(drafts),
                seconds_per_token=sum(pace.seconds_per_token for pace in paces) / len(drafts),
                rtt_seconds=sum(pace.rtt_seconds for pace in paces) / len(drafts),
            )
        limits = [sequence.tail_limit for sequence in running if sequence.tail_limit > 0]
        if self._config.num_speculative_tokens is not None or not self.step_cost.known:
            return len(limits)
        pace = faded(self._pace, now - self._pace_at)
        lock_step = self.shares_hardware
        pays = {
            limit: draft_pays(pace, self.step_cost, len(running), limit, lock_step=lock_step)
            for limit in set(limits)
        }
        return sum(pays[limit] for limit in limits)

    # ------------------------------------------------------------------ parts

    def _prepared(
        self, sequence: TargetSequence, drafting: Drafting, now: float
    ) -> tuple[Awaited | None, float]:
        """A sequence whose chain was corrected, while the draft may still turn out to have been prepared for
        it; and until when it may."""
        draft = self._book.drafts[drafting.peer]
        latency = draft.prepared_seconds.value
        limit = min(drafting.branch_tokens, sequence.tail_limit)
        if latency is None or limit == 0 or not drafting.chain.broken or not drafting.chain.started:
            return None, 0.0
        deadline = drafting.told_at + max(PREPARED_LATENESS * latency, MIN_DEADLINE_SECONDS)
        if now >= deadline:
            return None, 0.0
        acceptance = math.ceil(drafting.acceptance.optimistic * 64) / 64
        due = abs(drafting.told_at + latency - now)
        return (
            Awaited(0, limit, acceptance, due, math.inf, prepared=draft.preparedness.rate),
            deadline,
        )

    def _without_tail(self, sequence: TargetSequence) -> Awaited:
        """A sequence that expects no candidates."""
        num_pending = min(sequence.num_pending_tokens, self._config.max_num_batched_tokens)
        return Awaited.ready(num_pending=num_pending)

    def _note_lateness(self, sequence: TargetSequence) -> None:
        drafting = sequence.drafting
        if drafting is None or not drafting.chain.started or drafting.window == 0:
            return
        self.num_draft_turns += 1
        self.num_late_drafts += not drafting.chain.token_ids

    def _propose_for(self, sequence: TargetSequence) -> Proposal | None:
        """The draft's tail or the lookup's, whichever promises more tokens.

        Decided by what is past: lengths, and how earlier tails fared. To look at the tokens at hand or at
        their laws would bias the output under the standard and block rules; the same holds for whatever
        else here shortens a tail.
        """
        limit = sequence.tail_limit
        best: Proposal | None = None
        drafting = sequence.drafting
        if drafting is not None and drafting.chain.token_ids:
            chain = drafting.chain
            best = Proposal(chain.token_ids[:limit], True, drafting.acceptance.optimistic, chain.laws[:limit])
        lookup = sequence.proposer.propose(sequence.token_ids, limit)
        if lookup:
            acceptance = sequence.proposer.acceptance.rate
            if best is None or expected_tokens(acceptance, len(lookup)) > expected_tokens(
                best.acceptance, len(best.token_ids)
            ):
                best = Proposal(lookup, False, sequence.proposer.acceptance.cautious)
        return best

    def _best_tails_of(
        self, sequence: TargetSequence, draft: Draft, num_sequences: int, *, as_known: bool = False
    ) -> TailLengths:
        """``as_known``: without any doubt in what the draft was like when it was last heard of."""
        limit = sequence.tail_limit
        if self._config.num_speculative_tokens is not None or limit == 0:
            return TailLengths(limit, limit)
        if self.payoff.resting:
            return TailLengths(0, 0)
        if not self.step_cost.known or not draft.step_cost.known:
            initial = min(limit, INITIAL_TAIL)
            return TailLengths(initial, initial)
        assert sequence.drafting is not None
        acceptance = math.ceil(sequence.drafting.acceptance.optimistic * 32)
        # Of a draft in which there is no doubt both are the same.
        undoubted = as_known or draft.trust == 1.0
        key = (draft.peer, undoubted, acceptance, limit)
        best = self._best_tails.get(key)
        if best is None:
            pace = draft.known_pace if undoubted else draft.pace
            best = self._best_tails[key] = self._compute_best_tails(
                draft, pace, min(acceptance / 32, MAX_ACCEPTANCE), limit, num_sequences
            )
        if best.ready == 0 and not as_known:
            # At rest nothing is learnt; doubt grows until it is worth another try.
            sequence.drafting.acceptance.fade()
        return best

    def _compute_best_tails(
        self, draft: Draft, pace: Pace, acceptance: float, limit: int, num_sequences: int
    ) -> TailLengths:
        def step_cost(num_tokens: int) -> float:
            return self.step_cost(num_tokens * num_sequences)

        if not self.shares_hardware:
            return best_tail_lengths(
                acceptance,
                *pace,
                step_cost,
                limit,
                draft.preparedness.rate,
                draft.prepared_seconds.value or 0.0,
            )
        return turn_tail_lengths(acceptance, *pace, step_cost, limit)


def _may_wait(sequence: TargetSequence, drafting: Drafting) -> bool:
    """Whether its draft has yet to be asked to read its prompt, and may be a little later."""
    is_begun = drafting.window > 0 or drafting.chain.started
    return not is_begun and sequence.num_completion_tokens < PATIENT_TOKENS


def _expected_and_deadline(
    drafting: Drafting, draft: Draft, next_step: NextStep, now: float
) -> tuple[float, float]:
    """Seconds until the next candidate is expected, and the moment after which it is late.

    A draft that had nothing to do until it was told answers after its response latency; one that is at work
    goes on at its own pace. One that is overdue is expected to take as long again.
    """
    latency = draft.latency
    # A step larger than any so far may take longer than all of them.
    bound = next_step.bound
    due = drafting.news_at + next_step.expected
    deadline = drafting.news_at + max(LATENESS * bound, MIN_DEADLINE_SECONDS)
    if drafting.owes_answer:
        due = drafting.told_at + latency
        longest = LATENESS * max(latency, bound)
        deadline = max(deadline, drafting.told_at + max(longest, MIN_DEADLINE_SECONDS))
    return abs(due - now), deadline
