"""Which keys a query is computed with, as a function of its position alone.

A row of attention is the same to the bit in every step only if its kernel sums over the same number of keys,
those past the query masked. That number may depend on the row's own position, and on nothing else that is
in the step: not on the other rows of its sequence, nor on the other sequences. So the keys' range is rounded
outwards to a few sizes, and a sequence's rows are cut into pieces where the range changes. What is left to
differ is the number of rows that share a kernel call, which the kernels do not mind from four rows on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_SIZES: IntArray = np.array([64, 128, 192, 256, 384, 512, 768, 1024], np.int64)
"""Numbers of keys: past 128, at most half as many again as are seen. Few, since a step makes one call per
size."""
_LARGE_STEP = 512
"""Above them: multiples of this."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Consecutive rows of single sequences. Arrays ``[P]``, in the order of the batch's rows."""

    sequences: IntArray
    """Index of the slice that the rows are of."""
    first_rows: IntArray
    """First row in the batch."""
    starts: IntArray
    """Position of that row."""
    num_queries: IntArray
    key_starts: IntArray
    """Position of the first key."""
    num_keys: IntArray
    """Keys to compute with; those past the piece's last query are padding."""

    def select(self, indices: IntArray) -> Pieces:
        """The pieces of these indices, in their order."""
        return Pieces(
            self.sequences[indices],
            self.first_rows[indices],
            self.starts[indices],
            self.num_queries[indices],
            self.key_starts[indices],
            self.num_keys[indices],
        )


def key_ranges(positions: IntArray, window: int | None) -> tuple[IntArray, IntArray]:
    """First key and number of keys, for queries at ``positions`` that see ``window`` tokens (None = all)."""
    if window is None:
        first = np.zeros_like(positions)
    else:
        step = _LARGE_STEP if window >= _LARGE_STEP else int(_SIZES[0])
        first = np.maximum(positions + 1 - window, 0) // step * step
    return first, _round_up(positions + 1 - first)


def cut_at_key_ranges(starts: IntArray, num_queries: IntArray, window: int | None) -> Pieces:
    """Cut slices of ``num_queries`` rows from position ``starts`` on, where their queries' keys change."""
    first_rows = np.cumsum(num_queries) - num_queries
    sequences = np.repeat(np.arange(len(starts)), num_queries)
    positions = np.arange(len(sequences)) + (starts - first_rows)[sequences]
    key_starts, num_keys = key_ranges(positions, window)
    changes = (
        (np.diff(sequences, prepend=-1) != 0)
        | (np.diff(key_starts, prepend=-1) != 0)
        | (np.diff(num_keys, prepend=-1) != 0)
    )
    rows = np.flatnonzero(changes)
    return Pieces(
        sequences=sequences[rows],
        first_rows=rows,
        starts=positions[rows],
        num_queries=np.diff(rows, append=len(sequences)),
        key_starts=key_starts[rows],
        num_keys=num_keys[rows],
    )


def _round_up(lengths: IntArray) -> IntArray:
    small = _SIZES[np.minimum(np.searchsorted(_SIZES, lengths), len(_SIZES) - 1)]
    large = -(-lengths // _LARGE_STEP) * _LARGE_STEP
    rounded: IntArray = np.where(lengths <= _SIZES[-1], small, large)
    return rounded
