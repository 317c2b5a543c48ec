"""The paged KV cache: per layer one tensor of keys and one of values, addressed by slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.actors.engine.errors import ModelError


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores for one token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_elements(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class PagedKVCache:
    """Keys and values of all layers. Tensors only: who owns which block is the block manager's affair.

    Slot ``block * block_size + offset`` is one row of ``keys[layer]`` ``[num_slots, num_kv_heads, key_dim]``
    and of ``values[layer]`` ``[num_slots, num_kv_heads, value_dim]``. Layers with a sliding window keep all
    their tokens too, so that cutting a sequence back to any length is always right.

    Rows start as zeros: whatever is read past a sequence's end is finite.

    Raises:
        ModelError: the cache does not fit into the memory of ``device``.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_bytes = kv_block_bytes_of(layers, dtype, block_size) * num_blocks
        num_slots = num_blocks * block_size
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        try:
            for layer, shape in layers.items():
                rows = (num_slots, shape.num_kv_heads)
                self.keys[layer] = torch.zeros(*rows, shape.key_dim, dtype=dtype, device=device)
                self.values[layer] = torch.zeros(*rows, shape.value_dim, dtype=dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            raise ModelError(
                f"the KV cache of {num_blocks} blocks takes {self.num_bytes / 2**30:.2f} GiB, which does not "
                f"fit on {device}: lower kv_cache (its memory or num_blocks)"
            ) from error

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store ``key`` and ``value`` ``[T, num_kv_heads, dim]`` in ``slots`` ``[T]`` (distinct, int64)."""
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)


def kv_block_bytes_of(layers: Mapping[int, LayerShape], dtype: torch.dtype, block_size: int) -> int:
    """Bytes of one block over ``layers``."""
    return sum(shape.num_elements for shape in layers.values()) * dtype.itemsize * block_size


def kv_block_bytes(config: Any, dtype: torch.dtype, block_size: int) -> int:
    """Bytes of one block over all layers, from a model's configuration alone (to size a cache by memory).

    Args:
        config: a ``transformers`` configuration; that of the text part is used if it has several.
    """
    text = config.get_text_config()
    num_heads = text.num_attention_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    per_token = 2 * text.num_hidden_layers * num_kv_heads * head_dim
    return int(per_token * dtype.itemsize * block_size)
