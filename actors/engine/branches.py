"""Run-ahead on likely outcomes: what would follow a draft's chain, were one of its tokens corrected.

While a target verifies a chain, its draft keeps for each undecided position its own next-best tokens there
(under the noise that it shares with the target they are likely corrections), and drafts *branches* that begin
with one of them. When the verdict's corrected token is a branch's head, the branch becomes the chain, and its
tail is sent at once instead of a draft step per token later. Whatever is guessed, what is committed stays the
target's own samples.

KV of a branch: the sequence's blocks for the full ones before its head, which a verdict that leaves the
branch valid never cuts off, and blocks of its own from there on. Tokens of the block that the head is in are
computed again, into the branch's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.blocks import BlockManager
from paceline.actors.engine.draft_sequence import DraftSequence
from paceline.actors.engine.estimates import AcceptanceEstimate
from paceline.actors.engine.fan_out import MAX_ALTERNATIVES, fan_out, guess_share
from paceline.actors.engine.parameters import SamplingParams
from paceline.actors.engine.processors import LogitProcessors


@dataclass(slots=True, eq=False)
class Branch:
    """A likely correction and its tail.

    Invariants: ``head`` is the position of a chain token, which the branch would replace; the sequence holds
    the KV of all tokens before it.
    """

    sequence: DraftSequence
    head: int
    token_ids: list[int]
    """From ``head`` on."""
    value: float
    """Probability that, given the chain before it is accepted, it is the one that is needed."""
    num_computed_tokens: int
    """Tokens whose KV is in the cache, the sequence's before ``head`` included."""
    blocks: list[int] = field(default_factory=list)
    alternatives: list[tuple[int, ...]] = field(default_factory=list)
    """Entry i: next-best tokens in place of ``token_ids[i + 1]``."""
    num_alternatives: int = MAX_ALTERNATIVES

    @property
    def vocab_size(self) -> int:
        return self.sequence.vocab_size

    @property
    def params(self) -> SamplingParams:
        return self.sequence.params

    @property
    def processors(self) -> LogitProcessors | None:
        return self.sequence.processors

    @property
    def sends_laws(self) -> bool:
        return False

    @property
    def law_seed(self) -> int:
        return self.sequence.law_seed

    @property
    def next_position(self) -> int:
        return self.head + len(self.token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.next_position - self.num_computed_tokens

    def split(self) -> tuple[list[int], list[int]]:
        """Committed tokens; the chain before the head and the branch."""
        committed, chain = self.sequence.split()
        return committed, chain[: self.head - len(committed)] + self.token_ids

    def wants_token(self, tail: int) -> bool:
        """Whether it is to grow, where a tail of ``tail`` tokens is worth preparing."""
        return len(self.token_ids) <= tail and self.next_position < self.sequence.max_model_len


class PlannedBranch(NamedTuple):
    branch: Branch
    num_tokens: int


class _Offer(NamedTuple):
    """A branch that might be computed in the next step: one that is there, or one that would be begun."""

    value: float
    num_tokens: int
    num_blocks: int
    """Free blocks that it would take."""
    sequence: DraftSequence
    branch: Branch | None = None
    head: int = 0
    token_id: int = 0
    rank: int = 0


@dataclass(slots=True)
class _State:
    """What is kept of one sequence."""

    tail: int
    """Tokens worth preparing past each correction; also how far the verify that is on may reach."""
    alternatives: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Position of a chain token -> next-best tokens in its place."""
    branches: dict[tuple[int, int], Branch] = field(default_factory=dict)
    """By head position and token."""
    acceptance: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)


class Branches:
    """The branches of all sequences of a draft.

    Args:
        blocks: the draft's pool.
        max_branches: most branches of one sequence; 0 = none are made.
    """

    def __init__(self, blocks: BlockManager, max_branches: int) -> None:
        self._blocks = blocks
        self._max_branches = max_branches
        self._states: dict[DraftSequence, _State] = {}
        self.num_corrections = 0
        """Verdicts that corrected a chain for which branches were wanted."""
        self.num_prepared = 0
        """Those whose corrected token headed a branch with a tail."""
        self.num_tokens = 0
        """Branch tokens drafted."""

    def __len__(self) -> int:
        return sum(len(state.branches) for state in self._states.values())

    @property
    def wanted(self) -> bool:
        """Whether any sequence is to have some."""
        return bool(self._states)

    # ------------------------------------------------------------------ verdicts

    def before_commit(self, sequence: DraftSequence, base_position: int, committed: Sequence[int]) -> int:
        """A verdict is about to be applied: if it corrects the chain as a branch has guessed, that branch
        takes the chain's place.

        Returns:
            Chain tokens thrown away.
        """
        state = self._states.get(sequence)
        if state is None:
            return 0
        known, length = sequence.num_committed, base_position + len(committed)
        difference = sequence.first_difference(base_position, committed)
        if difference is None:
            num_compared = min(length, len(sequence.token_ids)) - known
            if num_compared > 0:
                state.acceptance.record(num_compared, num_compared)
            return 0
        num_agreed = difference - known
        state.acceptance.record(num_agreed + 1, num_agreed)
        self.num_corrections += 1
        key = (difference, committed[difference - base_position])
        branch = state.branches.get(key)
        if branch is None or len(branch.token_ids) < 2:
            self._clear(state)
            return 0
        del state.branches[key]
        self._clear(state)
        self.num_prepared += 1
        num_shared = branch.head // self._blocks.block_size
        self._blocks.truncate(sequence.block_table, num_shared * self._blocks.block_size)
        sequence.block_table.extend(branch.blocks)
        state.alternatives.update(enumerate(branch.alternatives, branch.head + 1))
        return sequence.adopt(branch.head, branch.token_ids, branch.num_computed_tokens)

    def after_commit(self, sequence: DraftSequence, tail: int) -> None:
        """The verdict is applied. ``tail``: tokens worth preparing from now on; 0 = none."""
        tail = tail if self._max_branches and not sequence.sends_laws else 0
        state = self._states.get(sequence)
        if state is not None:
            first, end = sequence.num_committed, len(sequence.token_ids)
            for key in [key for key in state.branches if not first <= key[0] < end]:
                self._blocks.free(state.branches.pop(key).blocks)
            for position in [place for place in state.alternatives if not first <= place < end]:
                del state.alternatives[position]
        if not tail:
            self.forget(sequence)
        elif state is None:
            self._states[sequence] = _State(tail)
            sequence.num_alternatives = MAX_ALTERNATIVES
        else:
            state.tail = tail

    def forget(self, sequence: DraftSequence) -> None:
        """The sequence has none any more."""
        state = self._states.pop(sequence, None)
        if state is not None:
            sequence.num_alternatives = 0
            self._clear(state)

    def drop(self, sequence: DraftSequence) -> bool:
        """Free the blocks of a sequence's branches; whether there were any."""
        state = self._states.get(sequence)
        if state is None or not state.branches:
            return False
        self._clear(state)
        return True

    def drop_all(self) -> bool:
        """Free the blocks of all branches; whether there were any."""
        dropped = [self.drop(sequence) for sequence in self._states]
        return any(dropped)

    # ------------------------------------------------------------------ steps

    def is_urgent(self, sequence: DraftSequence) -> bool:
        """Whether the sequence's own chain does not reach as far yet as a verify does."""
        state = self._states.get(sequence)
        return state is None or sequence.num_chain_tokens < state.tail

    def plan(self, sequences: Iterable[DraftSequence], budget: int) -> list[PlannedBranch]:
        """The branches to compute in a step, the most promising first, as far as there are blocks for them.

        Args:
            sequences: all that the draft has; each is left a free block.
            budget: most tokens in all. Less than one for each sequence: the draft is loaded, and makes none.
        """
        if budget < max(len(self._states), 1):
            return []
        # No new one takes less than a token.
        most_new = 2 * budget // max(len(self._states), 1)
        offers: list[_Offer] = []
        free_blocks = self._blocks.num_free_blocks
        for sequence in sequences:
            free_blocks -= 1
            state = self._states.get(sequence)
            if state is not None and sequence.window > 0:
                offers += self._offers(sequence, state, most_new)
        offers.sort(key=lambda offer: -offer.value)
        planned: list[PlannedBranch] = []
        for offer in offers:
            if budget <= 0:
                break
            if offer.num_tokens <= budget and offer.num_blocks <= free_blocks:
                budget -= offer.num_tokens
                free_blocks -= offer.num_blocks
                planned.append(PlannedBranch(offer.branch or self._begin(offer), offer.num_tokens))
        return planned

    def begin(self, planned: Iterable[PlannedBranch]) -> None:
        """Give planned branches their blocks; nothing else took any since they were planned."""
        for branch, _ in planned:
            grown = self._blocks.grow(branch.blocks, self._num_own_tokens(branch))
            assert grown, "a branch was planned without blocks"
            self._states[branch.sequence].branches[branch.head, branch.token_ids[0]] = branch

    def slice_of(self, planned: PlannedBranch) -> SequenceSlice:
        """What the model is to compute."""
        branch, table = planned.branch, planned.branch.sequence.block_table
        start = branch.num_computed_tokens
        token_ids = branch.sequence.token_ids[start : branch.head]
        token_ids += branch.token_ids[max(start - branch.head, 0) :]
        num_shared = branch.head // self._blocks.block_size
        return SequenceSlice(token_ids, start, table[:num_shared] + branch.blocks, 1)

    def note(self, sequence: DraftSequence, position: int, alternatives: tuple[int, ...]) -> None:
        """Next-best tokens in place of the chain token at ``position``."""
        state = self._states.get(sequence)
        if state is not None and alternatives:
            state.alternatives[position] = alternatives

    def extend(self, planned: PlannedBranch, token_id: int, alternatives: tuple[int, ...]) -> None:
        """A planned branch was computed, and ``token_id`` drawn."""
        branch = planned.branch
        branch.num_computed_tokens += planned.num_tokens
        branch.token_ids.append(token_id)
        branch.alternatives.append(alternatives)
        self.num_tokens += 1

    def give_up(self, branch: Branch) -> None:
        """Nothing can follow a branch."""
        state = self._states.get(branch.sequence)
        if state is not None and state.branches.pop((branch.head, branch.token_ids[0]), None) is not None:
            self._blocks.free(branch.blocks)
            # Never tried again: the position's next-best are forgotten.
            state.alternatives.pop(branch.head, None)

    # ------------------------------------------------------------------ checks

    def tables(self) -> list[list[int]]:
        return [branch.blocks for state in self._states.values() for branch in state.branches.values()]

    def check(self, live: Iterable[DraftSequence]) -> None:
        """Assert the invariants (for tests)."""
        assert self._states.keys() <= set(live)
        size = self._blocks.block_size
        for sequence, state in self._states.items():
            assert len(state.branches) <= self._max_branches
            assert all(sequence.num_committed <= p < len(sequence.token_ids) for p in state.alternatives)
            for (head, token_id), branch in state.branches.items():
                assert (branch.head, branch.token_ids[0]) == (head, token_id)
                assert branch.sequence is sequence
                assert sequence.num_committed <= head < len(sequence.token_ids)
                assert token_id != sequence.token_ids[head]
                assert head <= sequence.num_computed_tokens
                assert head // size * size <= branch.num_computed_tokens < branch.next_position
                assert (head // size + len(branch.blocks)) * size >= branch.num_computed_tokens
                assert len(branch.alternatives) == len(branch.token_ids) - 1

    # ------------------------------------------------------------------ parts

    def _offers(self, sequence: DraftSequence, state: _State, most_new: int) -> list[_Offer]:
        """Branches that are to grow: those that are there, and those that are to be begun."""
        first, alpha = sequence.num_committed, state.acceptance.rate
        offers: list[_Offer] = []
        for branch in state.branches.values():
            if branch.wants_token(state.tail):
                depth = branch.head - first + len(branch.token_ids) - 1
                missing = self._blocks.blocks_needed(self._num_own_tokens(branch)) - len(branch.blocks)
                value = branch.value * alpha**depth
                offers.append(_Offer(value, branch.num_missing_tokens, missing, sequence, branch))
        room = min(self._max_branches - len(state.branches), most_new)
        if room <= 0 or not state.alternatives:
            return offers
        counts = fan_out(alpha, state.tail, self._max_branches)
        reach = 1.0
        for position, count in enumerate(counts, first):
            for rank, token_id in enumerate(state.alternatives.get(position, ())[:count], 1):
                if (position, token_id) in state.branches:
                    continue
                num_tokens = position % self._blocks.block_size + 1
                value = guess_share(rank) * reach
                offers.append(_Offer(value, num_tokens, 1, sequence, None, position, token_id, rank))
                room -= 1
                if not room:
                    return offers
            reach *= alpha
        return offers

    def _begin(self, offer: _Offer) -> Branch:
        start = offer.head // self._blocks.block_size * self._blocks.block_size
        return Branch(offer.sequence, offer.head, [offer.token_id], guess_share(offer.rank), start)

    def _num_own_tokens(self, branch: Branch) -> int:
        """Tokens that a branch's own blocks have to hold."""
        return branch.next_position - branch.head // self._blocks.block_size * self._blocks.block_size

    def _clear(self, state: _State) -> None:
        for branch in state.branches.values():
            self._blocks.free(branch.blocks)
        state.branches.clear()
        state.alternatives.clear()
