"""Who holds how many sequences, and how many should move to one that has just come: pure decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Occupancy:
    """What matters for who is given sequences."""

    num_sequences: int
    capacity: int

    @property
    def share(self) -> float:
        return self.num_sequences / self.capacity if self.capacity else float("inf")


def even_out(
    newcomer: str, loads: Mapping[str, Occupancy], movable: Mapping[str, int] | None = None
) -> dict[str, int]:
    """How many sequences each should hand to ``newcomer`` so that no two shares differ needlessly.

    The fewest moves: one at a time from the fullest that can spare any, while that leaves it no emptier
    (relative to capacity) than it makes the newcomer. Each move costs the newcomer a prefill.

    Args:
        loads: of all, the newcomer included; not changed.
        movable: most sequences that each may hand over, none where it is left out; None = all may.
    """
    held = {name: Occupancy(load.num_sequences, load.capacity) for name, load in loads.items()}
    new = held.pop(newcomer)
    left = {name: load.num_sequences for name, load in held.items()}
    if movable is not None:
        left = {name: movable.get(name, 0) for name in held}
    moves: dict[str, int] = {}
    while new.num_sequences < new.capacity:
        name = max((name for name in held if left[name] > 0), key=lambda n: held[n].share, default=None)
        if name is None:
            break
        fullest = held[name]
        if (new.num_sequences + 1) / new.capacity > (fullest.num_sequences - 1) / fullest.capacity:
            break
        fullest.num_sequences -= 1
        new.num_sequences += 1
        left[name] -= 1
        moves[name] = moves.get(name, 0) + 1
    return moves
