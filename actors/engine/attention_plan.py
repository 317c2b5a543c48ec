"""Where the tokens of one step lie in the paged cache, and which sequences attend together.

Built once per step with numpy, one operation for all tokens, and shared by all layers. Layers differ only
in their sliding window, so there is one plan per distinct window, made when the first such layer runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.key_tiles import Pieces, cut_at_key_ranges

IntArray = npt.NDArray[np.int64]

MAX_GROUP_QUERIES = 16
"""Sequences with more new tokens than this attend on their own: a prompt chunk fills a kernel by itself."""

FIXED_ROW_MULTIPLE = 8
"""Kernel calls of a deterministic plan have a multiple of this many rows. From four rows on, the matrix
kernels (AVX-512, float32 and bfloat16) compute a row the same whatever their number; below they do not."""

_MAX_PADDING = 2.0
_FREE_PADDING = 1 << 14
"""Padding to a common length wastes at most this factor of scores (past the first ``_FREE_PADDING``, which
cost less than another launch)."""


class KeyRange:
    """The slots of one sequence's visible keys: consecutive (``slots`` is None) or listed (int64 [L])."""

    __slots__ = ("first_slot", "length", "slots")

    def __init__(self, slots: IntArray, device: torch.device) -> None:
        self.first_slot = int(slots[0])
        self.length = len(slots)
        consecutive = slots[-1] - slots[0] == len(slots) - 1 and bool((np.diff(slots) == 1).all())
        self.slots = None if consecutive else torch.from_numpy(slots).to(device)


class SingleSequence:
    """A sequence that attends by itself: rows ``first_row … first_row + num_rows − 1`` of the batch."""

    row_index: torch.Tensor | None = None

    def __init__(
        self,
        keys: KeyRange,
        *,
        first_row: int,
        num_rows: int,
        start: int,
        key_start: int,
        window: int | None,
        whole_batch: bool,
        device: torch.device,
    ) -> None:
        self.keys = keys
        self.first_row = first_row
        self.num_rows = num_rows
        self.whole_batch = whole_batch
        self.unmasked = num_rows == 1
        """The only query sees every key of the range."""
        self.causal_from_zero = start == 0 and window is None
        """The queries are the keys' positions 0, 1, …: a kernel's own causal mask is right."""
        self._start = start
        self._key_start = key_start
        self._window = window
        self._device = device
        self._masks: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def mask(self, group_size: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask [G·n, L], the same for each of the G query heads of a KV head."""
        found = self._masks.get((group_size, dtype))
        if found is None:
            query_positions = torch.arange(self._start, self._start + self.num_rows, device=self._device)
            key_positions = torch.arange(
                self._key_start, self._key_start + self.keys.length, device=self._device
            )
            found = _additive_mask(
                query_positions[None], key_positions[None], self._window, group_size, dtype
            )
            found = found[0, 0]
            self._masks[group_size, dtype] = found
        return found


class PaddedGroup:
    """Sequences with few queries each that attend in one call, padded to n queries and L keys.

    A padding query repeats the sequence's last query and a padding key its last slot, so that padded rows
    are never NaN and no sequence reads another's slots.
    """

    def __init__(
        self, pieces: Pieces, layout: StepLayout, window: int | None, *, row_multiple: int = 1
    ) -> None:
        starts, num_queries = pieces.starts, pieces.num_queries
        first_rows, key_starts = pieces.first_rows, pieces.key_starts
        lengths = starts + num_queries - key_starts
        device = layout.device
        self.batch_size = len(starts)
        self.max_queries = int(num_queries.max())
        self.max_keys = int(pieces.num_keys.max())
        self.row_multiple = row_multiple
        self.first_row = int(first_rows[0])
        even_queries = bool((num_queries == self.max_queries).all())
        adjacent = bool((first_rows[1:] == first_rows[:-1] + num_queries[:-1]).all())

        offsets = np.minimum(np.arange(self.max_queries)[None], num_queries[:, None] - 1)
        query_rows = first_rows[:, None] + offsets
        self.query_index = None if even_queries and adjacent else _tensor(query_rows.ravel(), device)
        real = np.arange(self.max_queries)[None] < num_queries[:, None]
        self.valid_rows = None if even_queries else _tensor(np.flatnonzero(real), device)
        self.row_index = None if adjacent else _tensor(query_rows[real], device)

        key_offsets = np.minimum(np.arange(self.max_keys)[None], lengths[:, None] - 1)
        self.slots = _tensor(
            layout.slots_of(pieces.sequences[:, None], key_starts[:, None] + key_offsets).ravel(), device
        )

        self._query_positions = _tensor(starts[:, None] + offsets, device)
        # A padding key counts on past the last query's position, where the causal mask hides it.
        self._key_positions = _tensor(key_starts[:, None] + np.arange(self.max_keys)[None], device)
        self._window = window
        self._unmasked = (
            row_multiple == 1 and self.max_queries == 1 and bool((lengths == self.max_keys).all())
        )
        self._masks: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def num_padding_rows(self, group_size: int) -> int:
        """Rows that a kernel call gets on top of the G·n of a KV head."""
        return -(group_size * self.max_queries) % self.row_multiple

    def mask(self, group_size: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask [B, 1, G·n + padding rows, L]; None if every query sees every key."""
        if self._unmasked:
            return None
        found = self._masks.get((group_size, dtype))
        if found is None:
            found = _additive_mask(
                self._query_positions, self._key_positions, self._window, group_size, dtype
            )
            if padding := self.num_padding_rows(group_size):
                # Padding rows see all keys: a row that sees none would be NaN.
                found = torch.nn.functional.pad(found, (0, 0, 0, padding))
            self._masks[group_size, dtype] = found
        return found


class StepLayout:
    """The positions and slots of a ragged batch, laid end to end.

    Args:
        batch: not empty, and checked: each slice has tokens, and slots for them.
        deterministic: plan such that a row is computed alike in every batch (see ``key_tiles``).
    """

    def __init__(
        self,
        batch: Sequence[SequenceSlice],
        block_size: int,
        device: torch.device,
        *,
        deterministic: bool = False,
    ) -> None:
        self.device = device
        self.deterministic = deterministic
        self._block_size = block_size
        count = len(batch)
        self.starts: IntArray = np.fromiter((s.start for s in batch), np.int64, count)
        self.num_queries: IntArray = np.fromiter((len(s.token_ids) for s in batch), np.int64, count)
        self._ends = self.starts + self.num_queries
        self.first_rows: IntArray = np.cumsum(self.num_queries) - self.num_queries
        self.num_tokens = int(self.num_queries.sum())

        needed = -(-self._ends // block_size)
        self._tables = np.zeros((count, int(needed.max())), np.int64)
        for row, (piece, blocks) in enumerate(zip(batch, needed.tolist(), strict=True)):
            self._tables[row, :blocks] = piece.block_table[:blocks]

        sequence_of_row = np.repeat(np.arange(count), self.num_queries)
        positions = np.arange(self.num_tokens) + (self.starts - self.first_rows)[sequence_of_row]
        self.positions = _tensor(positions, device)
        self.slot_mapping = _tensor(self.slots_of(sequence_of_row, positions), device)
        self._plans: dict[int | None, list[SingleSequence | PaddedGroup]] = {}
        self._sequences: dict[int | None, list[SingleSequence]] = {}

    @property
    def block_tables(self) -> IntArray:
        """[B, blocks of the longest]; entries past a sequence's own are 0."""
        return self._tables

    def slots_of(self, sequences: IntArray, positions: IntArray) -> IntArray:
        """The slots of ``positions`` (any shape) of ``sequences`` (of a shape that broadcasts with it)."""
        blocks: IntArray = self._tables[sequences, positions // self._block_size]
        return blocks * self._block_size + positions % self._block_size

    def key_starts(self, window: int | None) -> IntArray:
        """Per sequence the first position that any of its queries sees."""
        if window is None:
            return np.zeros_like(self.starts)
        return np.maximum(self.starts + 1 - window, 0)

    def plan(self, window: int | None) -> list[SingleSequence | PaddedGroup]:
        """How to attend in layers whose queries see ``window`` tokens (None = all), fast."""
        window = self._effective(window)
        found = self._plans.get(window)
        if found is None:
            found = self._fixed_plan(window) if self.deterministic else self._fast_plan(window)
            self._plans[window] = found
        return found

    def _fast_plan(self, window: int | None) -> list[SingleSequence | PaddedGroup]:
        key_starts = self.key_starts(window)
        lengths = self._ends - key_starts
        plan: list[SingleSequence | PaddedGroup] = []
        for members in group_sequences(self.num_queries, lengths):
            if len(members) == 1:
                plan.append(self._sequence(int(members[0]), window))
                continue
            group = lengths[members]
            pieces = Pieces(
                members,
                self.first_rows[members],
                self.starts[members],
                self.num_queries[members],
                key_starts[members],
                np.full_like(group, group.max()),
            )
            plan.append(PaddedGroup(pieces, self, window))
        return plan

    def _fixed_plan(self, window: int | None) -> list[SingleSequence | PaddedGroup]:
        pieces = cut_at_key_ranges(self.starts, self.num_queries, window)
        plan: list[SingleSequence | PaddedGroup] = []
        for num_keys in np.unique(pieces.num_keys).tolist():
            alike = np.flatnonzero(pieces.num_keys == num_keys)
            plan += [
                PaddedGroup(pieces.select(alike[members]), self, window, row_multiple=FIXED_ROW_MULTIPLE)
                for members in group_sequences(pieces.num_queries[alike], pieces.num_keys[alike])
            ]
        return plan

    def sequences(self, window: int | None) -> list[SingleSequence]:
        """The same, each sequence by itself."""
        window = self._effective(window)
        found = self._sequences.get(window)
        if found is None:
            found = [self._sequence(member, window) for member in range(len(self.starts))]
            self._sequences[window] = found
        return found

    def _effective(self, window: int | None) -> int | None:
        """A window that no sequence has outgrown is none."""
        return None if window is None or window >= int(self._ends.max()) else window

    def _sequence(self, member: int, window: int | None) -> SingleSequence:
        start, end = int(self.starts[member]), int(self._ends[member])
        key_start = int(self.key_starts(window)[member])
        slots = self.slots_of(np.array(member), np.arange(key_start, end))
        return SingleSequence(
            KeyRange(slots, self.device),
            first_row=int(self.first_rows[member]),
            num_rows=end - start,
            start=start,
            key_start=key_start,
            window=window,
            whole_batch=len(self.starts) == 1,
            device=self.device,
        )


def group_sequences(num_queries: IntArray, lengths: IntArray) -> list[IntArray]:
    """Which sequences attend together: lists of indices, each index once.

    One padded call costs B · max n · max L scores where its members need the sum of n · L, and each call
    costs a fixed launch. Sequences of like size are put together while padding stays small.
    """
    short = np.flatnonzero(num_queries <= MAX_GROUP_QUERIES)
    groups = [np.array([index]) for index in np.flatnonzero(num_queries > MAX_GROUP_QUERIES)]
    if not len(short):
        return groups
    if _padding_is_small(
        len(short),
        int(num_queries[short].max()),
        int(lengths[short].max()),
        int((num_queries * lengths)[short].sum()),
    ):
        return [*groups, short]
    # By queries in steps of a power of two, then by keys.
    order = short[np.lexsort((lengths[short], np.ceil(np.log2(num_queries[short]))))]
    members: list[int] = []
    most_queries = most_keys = needed = 0
    for index in order.tolist():
        queries, keys = int(num_queries[index]), int(lengths[index])
        wide, long, total = max(most_queries, queries), max(most_keys, keys), needed + queries * keys
        if members and not _padding_is_small(len(members) + 1, wide, long, total):
            groups.append(np.sort(np.array(members)))
            members, wide, long, total = [], queries, keys, queries * keys
        members.append(index)
        most_queries, most_keys, needed = wide, long, total
    groups.append(np.sort(np.array(members)))
    return groups


def _padding_is_small(batch_size: int, max_queries: int, max_keys: int, needed: int) -> bool:
    return batch_size * max_queries * max_keys <= max(_MAX_PADDING * needed, needed + _FREE_PADDING)


def _additive_mask(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    window: int | None,
    group_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[B, n] and [B, L] positions -> [B, 1, G·n, L]: 0 where the query sees the key, else −inf."""
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    batch, num_queries, length = hidden.shape
    mask = torch.zeros(batch, group_size, num_queries, length, dtype=dtype, device=hidden.device)
    mask.masked_fill_(hidden[:, None], float("-inf"))
    return mask.view(batch, 1, group_size * num_queries, length)


def _tensor(array: IntArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)
