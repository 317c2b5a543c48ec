"""What the target verifies, how far drafts may go, and how long a step waits for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.actors.engine.config import Hardware, TargetEngineConfig
from paceline.actors.engine.drafts import Draft, DraftBook
from paceline.actors.engine.estimates import StepCostModel
from paceline.actors.engine.messages import DraftLaw
from paceline.actors.engine.pacing import (
    Awaited,
    OverlapProbe,
    allocate_tails,
    best_num_speculative_tokens,
    draft_window,
    expected_tokens,
    go_or_wait,
    next_arrival,
)
from paceline.actors.engine.sequence import Drafting, TargetSequence

INITIAL_TAIL = 4
"""Tail asked for while neither step costs nor the draft's pace are known."""
LATENESS = 2.5
"""A draft that needs so many times longer than usual is late, and no longer waited for."""
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
        self.step_cost = StepCostModel()
        self.probe = OverlapProbe(config.hardware)
        self._best_tails: dict[tuple[str, int, int], int] = {}
        """Memo of one step: (draft, acceptance in 1/64, limit) -> best tail."""

    @property
    def initial_window(self) -> int:
        """Window of a sequence that a draft is just being given."""
        if self._config.num_speculative_tokens is not None:
            return self._config.num_speculative_tokens
        return min(INITIAL_TAIL, self._config.tail_limit)

    # ------------------------------------------------------------------ before the step

    def propose(self, running: Iterable[TargetSequence], elapsed: float) -> dict[TargetSequence, Proposal]:
        """The tails worth verifying in a step that starts now.

        Args:
            elapsed: seconds since the last step ended.
        """
        proposals: dict[TargetSequence, Proposal] = {}
        num_pending = 0
        num_decoding = 0
        for sequence in running:
            num_pending += sequence.num_pending_tokens
            if sequence.is_decoding:
                num_decoding += 1
                if sequence.tail_limit > 0:
                    proposal = self._propose_for(sequence)
                    if proposal is not None:
                        proposals[sequence] = proposal
        if not proposals or self._config.num_speculative_tokens is not None or not self.step_cost.known:
            return proposals
        # Pending tokens without a proposal, and prompt chunks, are computed in any case.
        base_tokens = min(num_pending, self._config.max_num_batched_tokens)
        counts = allocate_tails(
            [len(proposal.token_ids) for proposal in proposals.values()]
            + [0] * (num_decoding - len(proposals)),
            [proposal.acceptance for proposal in proposals.values()]
            + [0.0] * (num_decoding - len(proposals)),
            base_tokens,
            self.step_cost,
            elapsed,
        )
        return {
            sequence: replace(proposal, token_ids=proposal.token_ids[:count], laws=proposal.laws[:count])
            for (sequence, proposal), count in zip(proposals.items(), counts, strict=False)
            if count
        }

    def draft_running(self, running: Iterable[TargetSequence]) -> bool:
        """Whether, as far as is known here, a draft has work to do on one of these sequences."""
        for sequence in running:
            drafting = sequence.drafting
            if drafting is not None and len(drafting.chain.token_ids) < drafting.window:
                return True
        return False

    def seconds_to_wait(self, running: Sequence[TargetSequence], elapsed: float, now: float) -> float:
        """0.0: start the step now. Else look again after so many seconds, or when candidates arrive.

        A sequence that has nothing to do with drafts at present makes the step start at once: a prompt to
        compute, no draft, one that is late, one that has not begun, one that is asked for nothing. A
        sequence whose tail is complete does not: among sequences of lively drafts the round's rate decides,
        in which its tokens count; a tail of fixed length is waited for whatever the rate. (Going as soon as
        any tail is complete gave 8 to 12 % fewer tokens per second with 4 and 8 sequences on emulated
        models.)
        """
        if not self._config.wait_for_drafts or not self.step_cost.known:
            return 0.0
        awaited: list[Awaited] = []
        patience = MAX_WAIT_SECONDS - elapsed
        for sequence in running:
            drafting = sequence.drafting
            if drafting is None or not sequence.is_decoding:
                return 0.0
            draft = self._book.drafts[drafting.peer]
            chain = drafting.chain
            num_ready = len(chain.token_ids)
            limit = min(sequence.tail_target, sequence.tail_limit, drafting.window)
            if limit == 0 or not chain.started or drafting.silent:
                return 0.0
            if num_ready >= limit:
                awaited.append(Awaited(limit, limit, drafting.acceptance.optimistic, math.inf, 1.0))
                continue
            first, deadline = _expected_and_deadline(drafting, draft, now)
            if now >= deadline:
                drafting.silent = True
                return 0.0
            proposal = self._propose_for(sequence)
            if proposal is not None and not proposal.from_draft and len(proposal.token_ids) >= limit:
                return 0.0
            patience = min(patience, deadline - now)
            awaited.append(
                Awaited(num_ready, limit, drafting.acceptance.optimistic, first, draft.seconds_per_token)
            )
        if not awaited or patience <= 0.0:
            return 0.0
        if self._config.num_speculative_tokens is not None:
            wait = next_arrival(awaited)
        else:
            wait = go_or_wait(awaited, elapsed, self.step_cost)
        if wait == 0.0:
            return 0.0
        # A little longer than expected, so that the usual jitter does not cost another look.
        return min(patience, wait + 0.5 * min(item.gap_seconds for item in awaited) + MIN_DEADLINE_SECONDS)

    # ------------------------------------------------------------------ after the step

    def record_step(self, num_tokens: int, seconds: float, draft_running: bool) -> None:
        contended = draft_running and self.probe.hardware is not Hardware.SEPARATE
        self.step_cost.record(num_tokens, seconds, disturbed=contended)
        self.probe.record(num_tokens, draft_running, seconds)
        self._best_tails.clear()

    def update_windows(self, running: Sequence[TargetSequence], now: float) -> None:
        """Tell each sequence's draft what was committed and how far to go from here."""
        num_sequences = len(running)
        run_ahead = self.probe.run_ahead
        for sequence in running:
            draft = self._book.draft_of(sequence)
            if draft is None:
                continue
            best = sequence.tail_target = self._best_tail(sequence, draft, num_sequences)
            window = draft_window(
                best,
                draft.seconds_per_token,
                draft.rtt_seconds,
                self.step_cost((best + 1) * num_sequences),
                run_ahead,
                self._config.max_window,
            )
            self._book.report(sequence, min(window, sequence.tail_room), now)

    # ------------------------------------------------------------------ parts

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
                best = Proposal(lookup, False, acceptance)
        return best

    def _best_tail(self, sequence: TargetSequence, draft: Draft, num_sequences: int) -> int:
        limit = sequence.tail_limit
        if self._config.num_speculative_tokens is not None or limit == 0:
            return limit
        if not self.step_cost.known or draft.step_seconds.value is None:
            return min(limit, INITIAL_TAIL)
        assert sequence.drafting is not None
        acceptance = math.ceil(sequence.drafting.acceptance.optimistic * 64)
        key = (draft.peer, acceptance, limit)
        best = self._best_tails.get(key)
        if best is None:
            best = self._best_tails[key] = best_num_speculative_tokens(
                acceptance / 64,
                draft.seconds_per_token,
                draft.rtt_seconds,
                lambda num_tokens: self.step_cost(num_tokens * num_sequences),
                limit,
                lock_step=self.probe.hardware is not Hardware.SEPARATE,
            )
        if best == 0:
            # At rest nothing is learnt; doubt grows until it is worth another try.
            sequence.drafting.acceptance.fade()
        return best


def _expected_and_deadline(drafting: Drafting, draft: Draft, now: float) -> tuple[float, float]:
    """Seconds until the next candidate is expected, and the moment after which it is late.

    A draft that had nothing to do until it was told answers after its response latency; one that is at work
    goes on at its own pace. One that is overdue is expected to take as long again.
    """
    pace, latency = draft.seconds_per_token, draft.latency
    due = drafting.news_at + pace
    deadline = drafting.news_at + max(LATENESS * pace, MIN_DEADLINE_SECONDS)
    if drafting.owes_answer:
        due = drafting.told_at + latency
        deadline = max(deadline, drafting.told_at + max(LATENESS * latency, MIN_DEADLINE_SECONDS))
    return abs(due - now), deadline
