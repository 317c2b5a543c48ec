"""Layers that are always called with the same number of rows, so that a row's result depends on it alone.

A matrix product or a norm treats its rows apart, but which kernel computes them, and in which order that
sums, is chosen by their number. With one number of rows there is one kernel, and whatever else is in the step
only fills its other rows. This is the way of devices whose kernels are not known to be alike from some number
of rows on; a CPU's are, and ``packed_linear`` is cheaper there.
"""

from __future__ import annotations

import torch
from torch import nn

MIN_TILE_ROWS = 64
"""Rows of a call. A decode step of up to so many tokens reads the weights once, as it would without tiles."""
_TILE_ELEMENTS = 1 << 18
"""A norm is no trouble to a device whatever its size, but its launch is: narrow ones take more rows."""


class RowTiles(nn.Module):
    """``layer``, which must treat every row by itself, in calls of ``tile`` rows: [..., in] -> [..., out]."""

    def __init__(self, layer: nn.Module, tile: int) -> None:
        super().__init__()
        self.layer = layer
        self.tile = tile

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        count = rows.shape[0]
        if padding := -count % self.tile:
            rows = nn.functional.pad(rows, (0, 0, 0, padding))
        pieces = [self.layer(piece) for piece in torch.split(rows, self.tile)]
        outputs = torch.cat(pieces) if len(pieces) != 1 else pieces[0]
        return outputs[:count].view(*inputs.shape[:-1], outputs.shape[-1])


def tile_rows(model: nn.Module) -> int:
    """Replace every linear layer and every norm of ``model`` in place; returns how many.

    Multiplications by weights outside of such layers are not seen.
    """
    replaced = 0
    for parent in list(model.modules()):
        if isinstance(parent, RowTiles):
            continue
        for name, child in list(parent.named_children()):
            tile = _tile_of(child)
            if tile is not None:
                setattr(parent, name, RowTiles(child, tile))
                replaced += 1
    return replaced


def _tile_of(layer: nn.Module) -> int | None:
    """Rows of each call; None = not a layer that needs it."""
    if isinstance(layer, nn.Linear):
        return MIN_TILE_ROWS
    weight = getattr(layer, "weight", None)
    if not type(layer).__name__.endswith("Norm") or not isinstance(weight, torch.Tensor) or weight.ndim != 1:
        return None
    return max(MIN_TILE_ROWS, _TILE_ELEMENTS // weight.shape[0])
