"""One sequence as a draft sees it: committed tokens, then the chain that the draft made up itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.actors.engine.constraint import ConstraintMatcher
from paceline.actors.engine.errors import PacelineError
from paceline.actors.engine.messages import Candidates, DraftLaw, Open
from paceline.actors.engine.noise import revision_seed
from paceline.actors.engine.parameters import SamplingParams, VerificationRule
from paceline.actors.engine.prefix_cache import CachedPrefix
from paceline.actors.engine.processors import LogitProcessors


class SequenceKey(NamedTuple):
    """Two targets may use the same sequence id, so the target is part of the name."""

    peer: str
    sequence_id: str


class VerdictError(PacelineError):
    """A verdict does not fit what the draft was told before; the draft can no longer follow."""


class DraftSequence:
    """Tokens, KV bookkeeping and stream position of one sequence on a draft.

    Invariants (``check`` asserts them):
        * ``token_ids[:num_committed]`` is committed, the rest is the chain;
        * KV of ``token_ids[:num_computed_tokens]`` is in the cache, and it is never all of them: the last
          token is computed by the step that samples its successor;
        * ``num_committed <= num_reported <= len(token_ids)``: tokens below ``num_reported`` need not be
          told to the target (it knows them, or they were sent);
        * ``laws`` has one entry for each chain token: what it was drawn from.
    """

    __slots__ = (
        "block_table",
        "draft_seed",
        "epoch",
        "key",
        "last_turn",
        "laws",
        "max_model_len",
        "num_alternatives",
        "num_committed",
        "num_computed_tokens",
        "num_reported",
        "params",
        "prefix",
        "prepared",
        "processors",
        "ready_at",
        "revision",
        "rule",
        "stuck",
        "tail_tokens",
        "token_ids",
        "vocab_size",
        "window",
    )

    def __init__(
        self,
        peer: str,
        event: Open,
        *,
        vocab_size: int,
        max_model_len: int,
        matcher: ConstraintMatcher | None = None,
    ) -> None:
        self.key = SequenceKey(peer, event.sequence_id)
        self.epoch = event.epoch
        self.params: SamplingParams = event.sampling
        self.vocab_size = vocab_size
        """Ids below this one exist in both models; no other is ever proposed."""
        self.max_model_len = max_model_len
        self.processors = LogitProcessors.create(
            event.sampling,
            event.stopping,
            event.prompt_length or len(event.token_ids),
            vocab_size,
            matcher,
        )
        """What the request does to the logits of its positions; None: nothing."""
        self.rule = event.rule
        self.draft_seed = event.draft_seed
        """Key of all numbers that are drawn for this stay under the standard and block rules."""
        self.token_ids: list[int] = list(event.token_ids)
        self.laws: list[DraftLaw | None] = []
        self.num_committed = len(self.token_ids)
        self.num_reported = self.num_committed
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.prefix = CachedPrefix()
        """Of the draft's prefix cache; the head of ``block_table`` unless that is empty."""
        self.revision = event.revisions[0]
        self.window = max(0, event.window)
        self.tail_tokens = self.window
        """Chain tokens that the target waits for."""
        self.ready_at: float | None = None
        """When it had so many; None: it has not."""
        self.last_turn = 0
        """When this sequence was last computed, in turns; no two sequences share a turn."""
        self.stuck = False
        """No token may follow the chain; it rests until the target commits something."""
        self.num_alternatives = 0
        """Next-best tokens wanted beside each token that is drawn for the chain."""
        self.prepared = False
        """The chain was a branch when the verdict came, and the target was not told of it yet."""

    @property
    def num_chain_tokens(self) -> int:
        return len(self.token_ids) - self.num_committed

    @property
    def num_missing_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled. At least 1."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def next_position(self) -> int:
        """Of the token that is drawn next."""
        return len(self.token_ids)

    @property
    def law_seed(self) -> int:
        """Key of the numbers that this revision's tokens are drawn with under the standard and block
        rules."""
        return revision_seed(self.draft_seed, self.revision)

    @property
    def wants_token(self) -> bool:
        """Whether the window and the model's length leave room for one more chain token."""
        return (
            not self.stuck
            and self.num_chain_tokens < self.window
            and len(self.token_ids) < self.max_model_len
        )

    def note_ready(self, now: float) -> None:
        """To be told whenever the chain has grown, or another tail is waited for."""
        if self.ready_at is None and self.num_chain_tokens >= self.tail_tokens:
            self.ready_at = now

    def split(self) -> tuple[list[int], list[int]]:
        """Committed tokens, chain tokens."""
        return self.token_ids[: self.num_committed], self.token_ids[self.num_committed :]

    @property
    def sends_laws(self) -> bool:
        """Whether the target has to hear what a token was drawn from. A greedy token was certain."""
        return self.rule is not VerificationRule.COUPLED and not self.params.greedy

    def append(self, token_id: int, law: DraftLaw | None = None) -> None:
        """Add a sampled token to the chain."""
        self.token_ids.append(token_id)
        self.laws.append(law)

    def first_difference(self, base_position: int, committed: Sequence[int]) -> int | None:
        """Position of the first chain token that is not what the target committed; None where all that can be
        compared agree, or the verdict does not fit."""
        known = self.num_committed - base_position
        if known < 0:
            return None
        end = min(base_position + len(committed), len(self.token_ids))
        common = _common_length(self.token_ids, self.num_committed, committed[known:])
        return common if common < end else None

    def adopt(self, position: int, token_ids: Sequence[int], num_computed_tokens: int) -> int:
        """Replace the chain from ``position`` on by what was prepared for this case.

        Args:
            num_computed_tokens: of the sequence that results.

        Returns:
            Chain tokens thrown away.
        """
        num_discarded = len(self.token_ids) - position
        self.token_ids[position:] = token_ids
        self.laws[position - self.num_committed :] = [None] * len(token_ids)
        self.num_computed_tokens = num_computed_tokens
        self.num_reported = max(min(self.num_reported, position), self.num_committed)
        self.revision += 1
        self.prepared = True
        self.stuck = False
        return num_discarded

    def commit(self, base_position: int, committed: Sequence[int]) -> int:
        """Take in what the target committed at ``base_position``; return how many chain tokens were lost.

        Tokens are compared by absolute position. The part of the chain that equals the committed tokens
        becomes committed; what follows it stays as the chain. From the first difference on the chain is
        discarded, the revision rises, and the committed tokens take its place. Committed tokens past the
        chain's end (the draft is behind) are appended, and computed by the next steps.

        KV rule: the cache keeps the common prefix, and never the last token's KV (after full acceptance
        that is one token less than committed).

        Raises:
            VerdictError: there is a gap before ``base_position``, or tokens committed before differ. The
                sequence is unchanged.
        """
        if base_position > self.num_committed:
            raise VerdictError(
                f"verdict starts at position {base_position}, but only {self.num_committed} tokens are known"
            )
        known = self.num_committed - base_position
        if (
            list(committed[:known])
            != self.token_ids[base_position : base_position + min(known, len(committed))]
        ):
            raise VerdictError(f"verdict at position {base_position} contradicts an earlier one")
        fresh = committed[known:]
        if not fresh:
            return 0
        self.stuck = False
        start, end = self.num_committed, self.num_committed + len(fresh)
        common = _common_length(self.token_ids, start, fresh)
        num_discarded = 0
        if common < min(end, len(self.token_ids)):
            num_discarded = len(self.token_ids) - common
            self.revision += 1
            self.prepared = False
            del self.token_ids[common:], self.laws[common - start :]
            self.num_computed_tokens = min(self.num_computed_tokens, common)
            self.num_reported = end
        # Past a difference or the chain's end the target's tokens go on; a longer chain stays as it is.
        self.token_ids.extend(fresh[len(self.token_ids) - start :])
        self.num_committed = end
        del self.laws[: len(fresh)]
        self.num_reported = max(self.num_reported, end)
        return num_discarded

    def take_candidates(self) -> Candidates | None:
        """The chain tokens that the target has not been told yet, once."""
        base_position = self.num_reported
        token_ids = tuple(self.token_ids[base_position:])
        if not token_ids:
            return None
        laws = tuple(law for law in self.laws[base_position - self.num_committed :] if law is not None)
        self.num_reported = len(self.token_ids)
        prepared, self.prepared = self.prepared, False
        return Candidates(
            self.key.sequence_id, self.epoch, base_position, token_ids, self.revision, laws, prepared
        )

    def check(self) -> None:
        """Assert the invariants (for tests)."""
        size = len(self.token_ids)
        assert 0 < self.num_committed <= self.num_reported <= size, (
            self.num_committed,
            self.num_reported,
            size,
        )
        assert 0 <= self.num_computed_tokens < size, (self.num_computed_tokens, size)
        assert len(self.laws) == self.num_chain_tokens, (len(self.laws), self.num_chain_tokens)
        assert self.revision >= 0
        assert self.window >= 0


def _common_length(token_ids: Sequence[int], start: int, fresh: Sequence[int]) -> int:
    """Length of the prefix of ``token_ids`` that agrees with ``fresh`` placed at ``start``."""
    limit = min(len(token_ids), start + len(fresh))
    for position in range(start, limit):
        if token_ids[position] != fresh[position - start]:
            return position
    return limit
