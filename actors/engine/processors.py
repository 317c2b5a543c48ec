"""What a request does to the logits of a position before the temperature: masks, bans, bias, penalties.

The order is vLLM's: constraint mask, bad ids, ``min_tokens``, logit bias, repetition, frequency and presence
penalty. What one of them removes has logit −inf and stays removed. ``docs/sampling.md`` has the definitions.

A position's history is the committed tokens and the tail's tokens before it, and nothing else is kept: what
a rejected tail did is gone with it, and a sequence that is resumed elsewhere has the same edits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.actors.engine.constraint import ConstraintMatcher
from paceline.actors.engine.parameters import MAX_LOGIT_BIAS, SamplingParams, StoppingParams
from paceline.actors.engine.sampling import LogitEdit
from paceline.actors.engine.truncation import Logits

Ids = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.uint32]

_LARGEST: Final = float(np.finfo(np.float32).max)
_NONE: Final[Ids] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Penalties:
    """Of the tokens that a position's history holds."""

    repetition: float
    frequency: float
    presence: float

    @classmethod
    def of(cls, params: SamplingParams) -> _Penalties | None:
        if params.repetition_penalty == 1.0 and not params.frequency_penalty and not params.presence_penalty:
            return None
        return cls(params.repetition_penalty, params.frequency_penalty, params.presence_penalty)

    def apply(self, values: Logits, ids: Ids, counts: Counts) -> None:
        """``ids``: the tokens of prompt and completion, each once; ``counts``: how often the completion has
        each. Computed in float64 and rounded once; a finite logit stays finite."""
        before = values[ids].astype(np.float64)
        with np.errstate(over="ignore"):
            after = np.where(before > 0.0, before / self.repetition, before * self.repetition)
        after -= self.frequency * counts + self.presence * (counts > 0)
        values[ids] = np.where(np.isfinite(before), np.clip(after, -_LARGEST, _LARGEST), before)


@dataclass(frozen=True, slots=True)
class _Bias:
    """What is added, and the only tokens that remain; both the same at every position."""

    ids: Ids
    amounts: Logits
    forced: Ids | None
    """Ascending; None: no token is forced."""

    def apply(self, values: Logits) -> None:
        values[self.ids] += self.amounts
        if self.forced is not None:
            kept = values[self.forced]
            values.fill(-np.inf)
            values[self.forced] = kept


@dataclass(frozen=True, slots=True)
class PositionEdit:
    """The edit of one position (a ``LogitEdit``). Removals come last here: they absorb whatever else is done
    to a logit, so that the result is the same in any order."""

    bias: _Bias | None
    penalties: _Penalties | None
    ids: Ids
    counts: Counts
    removed: Ids
    mask: Mask | None
    """Bit i % 32 of word i // 32: token i is allowed. Tokens past the last word are not."""

    @property
    def changes_anything(self) -> bool:
        return bool(
            self.bias is not None
            or (self.penalties is not None and len(self.ids))
            or len(self.removed)
            or self.mask is not None
        )

    def apply(self, values: Logits) -> None:
        """Change ``values`` [V] float32 in place."""
        if self.bias is not None:
            self.bias.apply(values)
        if self.penalties is not None and len(self.ids):
            self.penalties.apply(values, self.ids, self.counts)
        if len(self.removed):
            values[self.removed] = -np.inf
        if self.mask is not None:
            octets = self.mask.astype("<u4", copy=False).view(np.uint8)
            allowed = np.unpackbits(octets, count=len(values), bitorder="little")
            np.putmask(values, allowed == 0, -np.inf)


class _History:
    """The different tokens of a sequence, and how often its completion has each. It only grows."""

    def __init__(self, prompt_length: int, with_prompt: bool) -> None:
        self._prompt_length = prompt_length
        self._with_prompt = with_prompt
        self._slots: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.empty(64, dtype=np.int64)

    def append(self, position: int, token_ids: Sequence[int]) -> None:
        """Committed tokens, the first of them at ``position``."""
        for offset, token_id in enumerate(token_ids, position):
            in_completion = offset >= self._prompt_length
            if not in_completion and not self._with_prompt:
                continue
            slot = self._slots.get(token_id)
            if slot is None:
                slot = self._slots[token_id] = len(self._slots)
                if slot == len(self._ids):
                    self._ids = np.concatenate([self._ids, self._ids])
                    self._counts = np.concatenate([self._counts, self._counts])
                self._ids[slot] = token_id
                self._counts[slot] = 0
            self._counts[slot] += in_completion

    def before(self, tail: Sequence[int], first: int) -> list[tuple[Ids, Counts]]:
        """Ids and counts before each of the positions ``first`` … ``len(tail)`` of a tail."""
        size = len(self._slots)
        # Slices of one array: a slot is written before the first slice that holds it, and then stays.
        ids = np.concatenate([self._ids[:size], np.zeros(len(tail), dtype=np.int64)])
        counts = np.concatenate([self._counts[:size], np.zeros(len(tail), dtype=np.int64)])
        fresh: dict[int, int] = {}
        found: list[tuple[Ids, Counts]] = []
        for depth in range(len(tail) + 1):
            end = size + len(fresh)
            if depth >= first:
                found.append((ids[:end], counts[:end].copy()))
            if depth < len(tail):
                token_id = int(tail[depth])
                slot = self._slots.get(token_id)
                if slot is None:
                    slot = fresh.setdefault(token_id, end)
                    ids[slot] = token_id
                counts[slot] += 1
        return found


class LogitProcessors:
    """The processors of one sequence at one engine, for all of its positions.

    Use: ``advance`` to what is committed, then ``edits`` of a tail; as often as wanted, in this order. Tails
    leave no trace. Made once per stay, since only what is new is looked at.
    """

    def __init__(
        self,
        params: SamplingParams,
        stopping: StoppingParams,
        prompt_length: int,
        vocab_size: int,
        matcher: ConstraintMatcher | None,
    ) -> None:
        self._prompt_length = prompt_length
        self._matcher = matcher
        self._min_tokens = stopping.min_tokens
        forbidden = [token_id for token_id, value in params.logit_bias if value == -MAX_LOGIT_BIAS]
        self._removed = _ids_below(vocab_size, [*params.bad_token_ids, *forbidden])
        self._removed_early = _ids_below(
            vocab_size, [*params.bad_token_ids, *forbidden, *stopping.stop_token_ids]
        )
        self._bias = _bias_of(params, vocab_size)
        self._penalties = _Penalties.of(params)
        self._history = _History(prompt_length, with_prompt=params.repetition_penalty != 1.0)
        self._length = 0

    @classmethod
    def create(
        cls,
        params: SamplingParams,
        stopping: StoppingParams,
        prompt_length: int,
        vocab_size: int,
        matcher: ConstraintMatcher | None = None,
    ) -> LogitProcessors | None:
        """The processors that a request asks for; None where no position of it is ever edited.

        Args:
            prompt_length: where the completion begins.
            vocab_size: ids past it are no tokens here, and left out.
            matcher: of ``params.constraint``, at the start of the completion; it belongs to this object.
        """
        held_back = stopping.min_tokens > 0 and bool(stopping.stop_token_ids)
        if not params.processes_logits and not held_back:
            return None
        return cls(params, stopping, prompt_length, vocab_size, matcher)

    def advance(self, committed: Sequence[int]) -> None:
        """Take in what was committed since the last call.

        Args:
            committed: all committed tokens, prompt included; begins with those of the last call.

        Raises:
            ConstraintError: the completion does not satisfy the constraint.
        """
        if len(committed) < self._length:
            raise ValueError(f"{self._length} tokens were committed before, now there are {len(committed)}")
        fresh = committed[self._length :]
        if not fresh:
            return
        if self._matcher is not None:
            completion = fresh[max(self._prompt_length - self._length, 0) :]
            if completion:
                self._matcher.advance(completion)
        if self._penalties is not None:
            self._history.append(self._length, fresh)
        self._length = len(committed)

    def edits(self, tail: Sequence[int], first: int = 0) -> list[LogitEdit | None]:
        """Edits of the positions after the committed tokens and ``first`` … ``len(tail)`` tokens of ``tail``.

        Returns:
            ``len(tail) + 1 - first`` of them; None = the logits stay as they are.
        """
        masks = self._matcher.masks(tail) if self._matcher is not None else None
        histories: list[tuple[Ids, Counts]] | None = None
        if self._penalties is not None:
            histories = self._history.before(tail, first)
        found: list[LogitEdit | None] = []
        for depth in range(first, len(tail) + 1):
            early = self._length - self._prompt_length + depth < self._min_tokens
            ids, counts = histories[depth - first] if histories is not None else (_NONE, _NONE)
            edit = PositionEdit(
                bias=self._bias,
                penalties=self._penalties,
                ids=ids,
                counts=counts,
                removed=self._removed_early if early else self._removed,
                mask=masks[depth] if masks is not None else None,
            )
            found.append(edit if edit.changes_anything else None)
        return found


def _ids_below(vocab_size: int, token_ids: Iterable[int]) -> Ids:
    return np.array(sorted({token_id for token_id in token_ids if token_id < vocab_size}), dtype=np.int64)


def _bias_of(params: SamplingParams, vocab_size: int) -> _Bias | None:
    added = [
        (token_id, value)
        for token_id, value in params.logit_bias
        if token_id < vocab_size and value and abs(value) != MAX_LOGIT_BIAS
    ]
    forced = [token_id for token_id, value in params.logit_bias if value == MAX_LOGIT_BIAS]
    if not added and not forced:
        return None
    return _Bias(
        ids=np.array([token_id for token_id, _ in added], dtype=np.int64),
        amounts=np.array([value for _, value in added], dtype=np.float32),
        # Forced tokens that are not in this vocabulary leave nothing, rather than everything.
        forced=_ids_below(vocab_size, forced) if forced else None,
    )
