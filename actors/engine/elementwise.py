"""Activation functions whose result for an element does not depend on how many elements there are.

Torch's CPU kernels compute an activation in vectors, and what is left over at the end of a thread's share one
by one, with another exponential that differs in the last bit. Where a share ends depends on the number of
elements, hence on the number of rows of the step. Shares that are whole vectors have no such ends.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

_VECTOR_ELEMENTS = 64
"""What a kernel takes at a time at most: two AVX-512 vectors of 16-bit numbers."""
_GRAIN_SIZE = 32768
"""Fewer elements than this are not divided among threads, ``at::internal::GRAIN_SIZE``."""
_PIECE = 16384
"""Elements that no kernel divides, and a multiple of ``_VECTOR_ELEMENTS``. More are divided among all threads
by a GELU."""

_MODULES = ("torch.nn.modules.activation", "transformers.activations")
_NOT_ELEMENTWISE = (nn.Softmax, nn.LogSoftmax, nn.Softmax2d, nn.Softmin, nn.GLU, nn.MultiheadAttention)


class AlignedActivation(nn.Module):
    """An elementwise ``activation``, computed in whole vectors."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if shares_are_whole_vectors(inputs.numel(), torch.get_num_threads()) and inputs.is_contiguous():
            whole: torch.Tensor = self.activation(inputs)
            return whole
        flat = inputs.reshape(-1)
        whole_pieces = flat.shape[0] // _PIECE
        pieces = [self.activation(flat[at * _PIECE : (at + 1) * _PIECE]) for at in range(whole_pieces)]
        last = flat[whole_pieces * _PIECE :]
        padding = -len(last) % _VECTOR_ELEMENTS
        pieces.append(self.activation(nn.functional.pad(last, (0, padding)))[: len(last)])
        return torch.cat(pieces).view(inputs.shape)


@functools.lru_cache(maxsize=4096)
def shares_are_whole_vectors(num_elements: int, num_threads: int) -> bool:
    """Whether every thread's share of a contiguous tensor is a whole number of vectors."""
    possible = {min(num_threads, max(1, -(-num_elements // _GRAIN_SIZE)))}
    if num_elements > _PIECE:
        possible.add(num_threads)
    return num_elements % _VECTOR_ELEMENTS == 0 and all(
        -(-num_elements // threads) % _VECTOR_ELEMENTS == 0 for threads in possible
    )


def align_activations(model: nn.Module) -> int:
    """Replace every activation module of ``model`` in place; returns how many.

    An activation that a model calls as a function is not seen.
    """
    replaced = 0
    for parent in list(model.modules()):
        if isinstance(parent, AlignedActivation):
            continue
        for name, child in list(parent.named_children()):
            if (
                type(child).__module__ in _MODULES
                and not isinstance(child, _NOT_ELEMENTWISE)
                and not list(child.parameters())
            ):
                setattr(parent, name, AlignedActivation(child))
                replaced += 1
    return replaced
