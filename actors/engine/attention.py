"""Attention over the paged KV cache, registered with ``transformers`` as an attention function.

The model is called with ``input_ids [1, T]``, a ragged batch laid end to end, and hands its keyword
arguments down to every attention layer. Among them is ``paged_batch``, an ``AttentionTarget``: it stores the
new keys and values in their slots and attends, for each sequence, over the slots of that sequence alone.
No attention mask name is registered, so ``transformers`` builds no mask of its own.

Shapes: T tokens of the step, H query heads, K KV heads, G = H / K, D head size, B sequences of a group,
n queries per sequence, L keys per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import AttentionInterface

from paceline.actors.engine.attention_plan import KeyRange, PaddedGroup, SingleSequence, StepLayout
from paceline.actors.engine.errors import ModelError
from paceline.actors.engine.kv_cache import LayerShape, PagedKVCache

ATTENTION_NAME = "paceline_paged"
"""The name under which ``transformers`` knows ``paged_attention``."""

BACKENDS = ("paged", "reference")

# Up to this many query rows (G·n) the query heads of a group are laid out as rows of one KV head, which
# spares the CPU kernel from running each query head on its own (8× faster at one query). Past it the mask,
# which must repeat for each of the G heads, would cost more than it saves.
_MAX_PACKED_ROWS = 1024

_UNSUPPORTED_ARGUMENTS = ("s_aux", "position_bias", "head_mask", "cu_seq_lens_q", "indices")


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention: ``query`` [1, H, T, D], ``key`` and ``value`` [1, K, T, D] of the new tokens."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    sliding_window: int | None
    """Tokens that a query sees, itself included; None = all before it."""
    softcap: float | None


class AttentionTarget(Protocol):
    """What the model's attention layers call."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Returns [1, T, H, D]."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged_batch: AttentionTarget | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that ``transformers`` calls in each layer.

    Raises:
        ModelError: the model was not called by a runner, or asks for a kind of attention that the paged
            cache cannot serve.
    """
    if paged_batch is None:
        raise ModelError("a model with paged attention can only be run by a TransformersRunner")
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} brings its own attention mask, which is not supported")
    for name in _UNSUPPORTED_ARGUMENTS:
        if arguments.get(name) is not None:
            raise ModelError(f"{type(module).__name__} uses {name}, which paged attention does not support")
    call = AttentionCall(
        layer=module.layer_idx,  # type: ignore[arg-type]
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return paged_batch.attend(call), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


class ShapeProbe:
    """Learns, in one forward pass of any tokens, what each layer stores. Its output is meaningless."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}
        self.dtype: torch.dtype | None = None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        num_kv_heads, num_tokens = call.key.shape[1:3]
        shape = LayerShape(num_kv_heads, call.key.shape[-1], call.value.shape[-1])
        if call.layer in self.shapes:
            raise ModelError(f"attention layer {call.layer} runs twice in one pass, which is not supported")
        self.shapes[call.layer] = shape
        self.windows[call.layer] = call.sliding_window
        self.dtype = call.key.dtype
        return call.query.new_zeros(1, num_tokens, call.query.shape[1], shape.value_dim)


class PagedBatch:
    """One step's attention over ``cache``. What all layers share is prepared once, on first use.

    Args:
        layout: where the step's tokens lie.
        reference: compute each sequence by itself with plain float32 operations, to test the fast way.
    """

    def __init__(self, cache: PagedKVCache, layout: StepLayout, *, reference: bool = False) -> None:
        self._cache = cache
        self._layout = layout
        self._reference = reference
        self._slots = layout.slot_mapping

    def attend(self, call: AttentionCall) -> torch.Tensor:
        cache, layer = self._cache, call.layer
        # [1, K, T, D] -> [T, K, D]
        cache.write(layer, self._slots, call.key[0].transpose(0, 1), call.value[0].transpose(0, 1))
        keys, values = cache.keys[layer], cache.values[layer]
        if self._reference or (call.softcap is not None and not self._layout.deterministic):
            parts = self._layout.sequences(call.sliding_window)
            return self._gather_rows(call, parts, values, [_explicit(call, p, keys, values) for p in parts])
        group_size = call.query.shape[1] // keys.shape[1]
        plan = self._layout.plan(call.sliding_window)
        outputs = [
            _single(call, part, keys, values, group_size)
            if isinstance(part, SingleSequence)
            else _padded(call, part, keys, values, group_size)
            for part in plan
        ]
        return self._gather_rows(call, plan, values, outputs)

    def _gather_rows(
        self,
        call: AttentionCall,
        parts: Any,
        values: torch.Tensor,
        outputs: list[torch.Tensor],
    ) -> torch.Tensor:
        """Put the parts' rows, each ``[rows, H, D]``, back into the batch's order: ``[1, T, H, D]``."""
        if len(outputs) == 1 and parts[0].row_index is None:
            return outputs[0].unsqueeze(0)
        num_heads, num_tokens = call.query.shape[1:3]
        output = call.query.new_empty(num_tokens, num_heads, values.shape[-1])
        for part, rows in zip(parts, outputs, strict=True):
            if part.row_index is None:
                output.narrow(0, part.first_row, rows.shape[0]).copy_(rows)
            else:
                output.index_copy_(0, part.row_index, rows)
        return output.unsqueeze(0)


def _read(rows: torch.Tensor, keys: KeyRange) -> torch.Tensor:
    """The cache rows of one sequence, [L, K, D]: a view if its slots are consecutive."""
    if keys.slots is None:
        return rows.narrow(0, keys.first_slot, keys.length)
    return rows.index_select(0, keys.slots)


def _single(
    call: AttentionCall, part: SingleSequence, keys: torch.Tensor, values: torch.Tensor, group_size: int
) -> torch.Tensor:
    """One sequence: [n, H, D]."""
    num_queries = part.num_rows
    num_heads, head_dim = call.query.shape[1], call.query.shape[3]
    query = call.query if part.whole_batch else call.query.narrow(2, part.first_row, num_queries)
    key = _read(keys, part.keys).transpose(0, 1).unsqueeze(0)
    value = _read(values, part.keys).transpose(0, 1).unsqueeze(0)
    if group_size * num_queries > _MAX_PACKED_ROWS:
        mask = None if part.causal_from_zero else part.mask(1, call.query.dtype)
        output = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=part.causal_from_zero,
            scale=call.scaling,
            enable_gqa=group_size > 1,
        )
    else:
        packed = query.reshape(1, keys.shape[1], group_size * num_queries, head_dim)
        mask = None if part.unmasked else part.mask(group_size, call.query.dtype)
        output = functional.scaled_dot_product_attention(
            packed, key, value, attn_mask=mask, scale=call.scaling
        )
    return output.reshape(num_heads, num_queries, values.shape[2]).transpose(0, 1)


def _padded(
    call: AttentionCall, part: PaddedGroup, keys: torch.Tensor, values: torch.Tensor, group_size: int
) -> torch.Tensor:
    """Sequences padded to n queries and L keys: [rows, H, D]."""
    batch, num_queries, length = part.batch_size, part.max_queries, part.max_keys
    num_kv_heads, head_dim = keys.shape[1:]
    value_dim = values.shape[2]
    num_heads = num_kv_heads * group_size
    query = call.query[0].transpose(0, 1)
    if part.query_index is not None:
        query = query.index_select(0, part.query_index)
    elif part.first_row or query.shape[0] != batch * num_queries:
        query = query.narrow(0, part.first_row, batch * num_queries)
    # [B·n, H, D] -> [B, K, G·n, D]
    packed = query.reshape(batch, num_queries, num_kv_heads, group_size, head_dim).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(batch, num_kv_heads, group_size * num_queries, head_dim)
    if padding := part.num_padding_rows(group_size):
        packed = functional.pad(packed, (0, 0, 0, padding))
    key = keys.index_select(0, part.slots).view(batch, length, num_kv_heads, head_dim).transpose(1, 2)
    value = values.index_select(0, part.slots).view(batch, length, num_kv_heads, value_dim).transpose(1, 2)
    if call.softcap is None:
        mask = part.mask(group_size, call.query.dtype)
        output = functional.scaled_dot_product_attention(
            packed, key, value, attn_mask=mask, scale=call.scaling
        )
    else:
        mask = part.mask(group_size, torch.float32)
        output = _by_definition(packed.float(), key.float(), value.float(), mask, call.scaling, call.softcap)
        output = output.to(call.query.dtype)
    # [B, K, G·n, D] -> [B·n, H, D]
    if padding:
        output = output.narrow(2, 0, group_size * num_queries)
    output = output.reshape(batch, num_kv_heads, group_size, num_queries, value_dim).permute(0, 3, 1, 2, 4)
    output = output.reshape(batch * num_queries, num_heads, value_dim)
    return output if part.valid_rows is None else output.index_select(0, part.valid_rows)


def _by_definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention by plain operations, scores capped at ±``softcap`` by tanh: [..., rows, D]."""
    scores = torch.matmul(query, key.transpose(-1, -2)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1), value)


def _explicit(
    call: AttentionCall, part: SingleSequence, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """One sequence by the definition, in float32: [n, H, D].

    The reference, and the way of soft caps in the fast plan.
    """
    query = call.query[0].narrow(1, part.first_row, part.num_rows).float()
    group_size = query.shape[0] // keys.shape[1]
    key = _read(keys, part.keys).float().transpose(0, 1).repeat_interleave(group_size, 0)
    value = _read(values, part.keys).float().transpose(0, 1).repeat_interleave(group_size, 0)
    output = _by_definition(query, key, value, part.mask(1, torch.float32), call.scaling, call.softcap)
    return output.transpose(0, 1).to(call.query.dtype)
