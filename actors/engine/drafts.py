"""The target's book of attached drafts: who holds which sequence, what each was told, how each performs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.actors.engine.attached_draft import Answer, Draft
from paceline.actors.engine.balance import Occupancy, even_out
from paceline.actors.engine.chain import DraftChain, Received
from paceline.actors.engine.draft_law import DraftLawError, check_law
from paceline.actors.engine.estimates import AcceptanceEstimate
from paceline.actors.engine.messages import Candidates, Close, DraftHello, Open, Verdict
from paceline.actors.engine.noise import stay_seed
from paceline.actors.engine.parameters import VerificationRule
from paceline.actors.engine.sequence import Drafting, TargetSequence
from paceline.actors.engine.target_output import DraftOutput


def assign(wanting: Iterable[Sequence[str]], loads: Mapping[str, Occupancy]) -> list[str | None]:
    """Give sequences to drafts, one after the other, each to the least loaded that may have it.

    Args:
        wanting: per sequence, the drafts that may be given it.
        loads: all drafts; not changed.

    Returns:
        A draft per sequence, or None where no allowed draft has room. Load is relative to capacity; ties go
        to the draft with fewer sequences, then to the first in ``loads``.
    """
    held = {peer: Occupancy(load.num_sequences, load.capacity) for peer, load in loads.items()}
    given: list[str | None] = []
    for allowed in wanting:
        open_peers = [peer for peer in allowed if held[peer].num_sequences < held[peer].capacity]
        peer = min(open_peers, key=lambda p: (held[p].share, held[p].num_sequences), default=None)
        if peer is not None:
            held[peer].num_sequences += 1
        given.append(peer)
    return given


class DraftBook:
    """Invariant: ``sequence.drafting`` names a draft exactly when that draft's ``sequences`` hold it.

    Every method that tells a draft something appends to the outbox; ``take_output`` empties it.
    """

    def __init__(self, vocab_size: int, max_window: int) -> None:
        self._vocab_size = vocab_size
        self._max_window = max_window
        self._drafts: dict[str, Draft] = {}
        self._output: dict[str, DraftOutput] = {}
        self.num_stale = 0
        self.num_quarantined = 0

    @property
    def drafts(self) -> Mapping[str, Draft]:
        return self._drafts

    def draft_of(self, sequence: TargetSequence) -> Draft | None:
        return self._drafts[sequence.drafting.peer] if sequence.drafting is not None else None

    def take_output(self) -> dict[str, DraftOutput]:
        output, self._output = self._output, {}
        return {peer: told for peer, told in output.items() if told.opens or told.verdicts or told.closes}

    # ------------------------------------------------------------------ drafts come and go

    def join(self, peer: str, hello: DraftHello) -> None:
        """A draft attached. It holds nothing yet."""
        self.leave(peer)
        self._drafts[peer] = Draft(peer, hello)

    def leave(self, peer: str) -> None:
        """A draft is gone; its sequences are free for others at once."""
        draft = self._drafts.pop(peer, None)
        self._output.pop(peer, None)
        if draft is not None:
            for sequence in draft.sequences.values():
                sequence.drafting = None

    def forget_draft(self, peer: str, sequences: Iterable[TargetSequence]) -> None:
        """Drop what live sequences remember of a draft that is gone."""
        for sequence in sequences:
            sequence.barred_drafts.discard(peer)
            sequence.former_drafts.discard(peer)

    # ------------------------------------------------------------------ sequences come and go

    def place(self, sequences: Iterable[TargetSequence], window: int) -> None:
        """Open those of ``sequences`` that have no draft and can use one, where drafts have room."""
        if not any(len(draft.sequences) < draft.hello.capacity for draft in self._drafts.values()):
            return
        wanting = [s for s in sequences if s.drafting is None and s.tail_limit > 0]
        if not wanting:
            return
        loads = {peer: draft.load for peer, draft in self._drafts.items()}
        given = assign([self._allowed(sequence) for sequence in wanting], loads)
        for sequence, peer in zip(wanting, given, strict=True):
            if peer is not None:
                self._open(sequence, self._drafts[peer], window)

    def rebalance(self, newcomer: str, window: int) -> None:
        """Move sequences to a draft that has just arrived, as far as that evens out the load."""
        target = self._drafts[newcomer]
        moves = even_out(newcomer, {peer: draft.load for peer, draft in self._drafts.items()})
        for peer, count in moves.items():
            movable = [
                sequence
                for sequence in self._drafts[peer].sequences.values()
                if newcomer in self._allowed(sequence) and sequence.tail_limit > 0
            ]
            # The shortest are the cheapest to prefill again.
            movable.sort(key=lambda sequence: len(sequence.token_ids))
            for sequence in movable[:count]:
                self.close(sequence)
                self._open(sequence, target, window)

    def close(self, sequence: TargetSequence, *, bar: bool = False, tell: bool = True) -> None:
        """Take a sequence from its draft, if it has one.

        Args:
            bar: never give it to that draft again.
            tell: False where the draft has dropped it already.
        """
        drafting = sequence.drafting
        if drafting is None:
            return
        sequence.drafting = None
        del self._drafts[drafting.peer].sequences[sequence.sequence_id]
        sequence.former_drafts.add(drafting.peer)
        if bar:
            sequence.barred_drafts.add(drafting.peer)
        output = self._output.setdefault(drafting.peer, DraftOutput())
        # Closes are applied first, so nothing about this stay may be left to be told.
        output.opens = [event for event in output.opens if event.sequence_id != sequence.sequence_id]
        output.verdicts = [event for event in output.verdicts if event.sequence_id != sequence.sequence_id]
        if tell:
            output.closes.append(Close(sequence.sequence_id, sequence.epoch))

    def _allowed(self, sequence: TargetSequence) -> list[str]:
        length = len(sequence.token_ids)
        return [
            peer
            for peer, draft in self._drafts.items()
            if peer not in sequence.barred_drafts and draft.can_follow(length)
        ]

    def _open(self, sequence: TargetSequence, draft: Draft, window: int) -> None:
        length = len(sequence.token_ids)
        window = min(window, sequence.tail_limit, draft.hello.max_model_len - length)
        opened = Open(
            sequence_id=sequence.sequence_id,
            epoch=sequence.epoch,
            token_ids=tuple(sequence.token_ids),
            sampling=sequence.sampling,
            window=window,
            prompt_length=sequence.prompt_length,
            stopping=sequence.stopping,
            rule=sequence.rule,
            draft_seed=stay_seed(sequence.sampling.seed, sequence.epoch, sequence.num_stays),
        )
        sequence.num_stays += 1
        sequence.drafting = Drafting(
            peer=draft.peer,
            reported_length=length,
            window=window,
            chain=DraftChain.of_stay(opened, reopened=draft.peer in sequence.former_drafts),
            acceptance=AcceptanceEstimate(prior=draft.acceptance.rate, prior_trials=8.0),
        )
        draft.sequences[sequence.sequence_id] = sequence
        output = self._output.setdefault(draft.peer, DraftOutput())
        # An Open replaces what the draft still holds of the sequence, so a Close before it says nothing.
        close = Close(sequence.sequence_id, sequence.epoch)
        output.closes = [event for event in output.closes if event != close]
        output.opens.append(opened)

    def check_invariants(self, live: Iterable[TargetSequence]) -> None:
        """Assert that sequences and drafts agree (for tests)."""
        held = {id(s) for draft in self._drafts.values() for s in draft.sequences.values()}
        count = 0
        for sequence in live:
            drafting = sequence.drafting
            if drafting is not None:
                count += 1
                assert id(sequence) in held
                assert self._drafts[drafting.peer].sequences[sequence.sequence_id] is sequence
                assert drafting.reported_length <= len(sequence.token_ids)
                assert len(drafting.chain.token_ids) <= self._max_window
                assert len(drafting.chain.laws) == len(drafting.chain.token_ids)
        assert count == len(held), "a draft holds a sequence that is not live"
        for draft in self._drafts.values():
            assert len(draft.sequences) <= draft.hello.capacity

    # ------------------------------------------------------------------ what drafts say

    def receive(
        self, peer: str, sequence: TargetSequence | None, message: Candidates, now: float
    ) -> Answer | None:
        """Take candidates in. Whatever they hold, committed tokens stay what the target's samples say.

        Returns:
            How they answer a verdict; None where they answer none.
        """
        if sequence is None or sequence.epoch != message.epoch:
            self.num_stale += 1
            return None
        drafting = sequence.drafting
        if drafting is None or drafting.peer != peer:
            self.num_stale += 1
            return None
        token_ids = message.token_ids
        if not token_ids:
            return None
        if not self._is_possible(message, sequence.rule):
            self.num_quarantined += 1
            self.close(sequence, bar=True)
            return None
        chain = drafting.chain
        started, revision = chain.started, chain.revision
        caught_up = not drafting.catching_up
        received = chain.receive(
            message.revision,
            message.base_position,
            token_ids,
            sequence.token_ids,
            self._max_window,
            # Under the coupled rule a law says nothing that the target could use.
            () if sequence.rule is VerificationRule.COUPLED else message.laws,
        )
        drafting.silent = False
        drafting.news_at = now
        answer: Answer | None = None
        if received is not Received.STALE:
            seconds = drafting.hear(message.base_position, chain.revision != revision, now)
            # The first of a stay comes after a prefill, and the first after a rest after what was committed
            # meanwhile has been read, which is not how long an answer takes.
            if started and caught_up and seconds is not None and seconds > 0.0:
                draft = self._drafts[peer]
                if chain.revision != revision:
                    draft.preparedness.record(1, int(message.prepared))
                answer = Answer(seconds, message.prepared)
        if received in (Received.STALE, Received.DIFFERS, Received.GAP):
            # Made before the draft heard of what is committed by now: of use is what answers that.
            self.num_stale += 1
        return answer

    def _is_possible(self, message: Candidates, rule: VerificationRule) -> bool:
        """Whether an honest draft can have sent these tokens and laws."""
        token_ids, laws = message.token_ids, message.laws
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            return False
        if rule is VerificationRule.COUPLED or not laws:
            return True
        if len(laws) != len(token_ids):
            return False
        try:
            for token_id, law in zip(token_ids, laws, strict=True):
                check_law(law, token_id, self._vocab_size)
        except DraftLawError:
            return False
        return True

    # ------------------------------------------------------------------ what drafts are told

    def follow(
        self, sequence: TargetSequence, base_position: int, num_verified: int, num_accepted: int
    ) -> None:
        """Bring the chain up to the tokens committed from ``base_position`` on, and learn how good it was.

        Where target and draft share their noise, chain tokens that were not verified (a bonus position, a
        lookup's tail in their place) tell as much. Where they do not, two draws of the same law may differ.

        Args:
            num_verified: tokens of this chain that were verified.
            num_accepted: those of them that were accepted.
        """
        drafting = sequence.drafting
        if drafting is None:
            return
        drafting.num_accepted += num_accepted
        committed = sequence.token_ids[base_position:]
        num_compared = min(len(drafting.chain.token_ids), len(committed))
        if num_compared:
            num_foretold = drafting.chain.advance(committed)
            if sequence.shares_noise:
                num_verified, num_accepted = num_compared, num_foretold
        if num_verified:
            drafting.acceptance.record(num_verified, num_accepted)
            self._drafts[drafting.peer].acceptance.record(num_verified, num_accepted)

    def report(self, sequence: TargetSequence, window: int, now: float, branch_tokens: int = 0) -> None:
        """Tell the draft what was committed since it was last told, its window, how long a tail is waited
        for, and how long a one to prepare for likely corrections.

        A draft at rest that is to stay at rest is told nothing: without speculation there is no traffic.
        A sequence that outgrew its draft is taken from it.
        """
        drafting = sequence.drafting
        if drafting is None:
            return
        length = len(sequence.token_ids)
        max_model_len = self._drafts[drafting.peer].hello.max_model_len
        if length >= max_model_len or sequence.tail_room == 0:
            self.close(sequence)
            return
        window = min(window, max_model_len - length, self._max_window)
        branch_tokens = min(branch_tokens, window)
        known = drafting.reported_length
        if window == drafting.window and (window == 0 or known == length):
            return
        output = self._output.setdefault(drafting.peer, DraftOutput())
        output.verdicts.append(
            Verdict(
                sequence_id=sequence.sequence_id,
                epoch=sequence.epoch,
                base_position=known,
                num_accepted=drafting.num_accepted,
                committed_token_ids=tuple(sequence.token_ids[known:]),
                window=window,
                branch_tokens=branch_tokens,
                tail_tokens=min(sequence.tail_target, window),
            )
        )
        drafting.tell(length, window, now, branch_tokens)
