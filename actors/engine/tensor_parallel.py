"""Whether a model can be divided among N ranks, from its configuration alone."""

from __future__ import annotations

import math
from typing import Any

from paceline.actors.engine.errors import ModelError

COLUMN_WISE = frozenset({"colwise", "packed_colwise"})
GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
ROW_WISE = frozenset({"rowwise"})
ROW_WISE_OF_WHOLE_INPUT = frozenset({"rowwise_split_input", "rowwise_rep"})
EMBEDDING = frozenset({"embedding_rowwise"})
UNSHARDED = frozenset({"replicated_with_grad_allreduce", "replicate"})
"""Only training needs an exchange there."""

SUPPORTED_STYLES = COLUMN_WISE | GATHERED | ROW_WISE | ROW_WISE_OF_WHOLE_INPUT | EMBEDDING | UNSHARDED
"""What ``sharded_layers`` knows of the styles in the plans of ``transformers``."""

_KEY_LAYERS = ("k_proj", "qkv_proj", "query_key_value")


def check_tensor_parallel(config: Any, size: int, model: str) -> None:
    """See that every rank gets as many heads as the others.

    Args:
        config: a ``transformers`` configuration; that of the text part is used if it has several.
        size: the number of ranks.
        model: what to call the model.

    Raises:
        ModelError: it cannot be divided so; the text says which sizes are possible.
    """
    if size == 1:
        return
    if not tensor_parallel_plan(config):
        kind = getattr(config, "model_type", type(config).__name__)
        raise ModelError(
            f"{model}: models of type {kind} have no tensor-parallel plan in transformers: set "
            "tensor_parallel_size to 1"
        )
    if unknown := set(tensor_parallel_plan(config).values()) - SUPPORTED_STYLES:
        raise ModelError(
            f"{model}: its layers are sharded by {', '.join(sorted(unknown))}, which is not supported: set "
            "tensor_parallel_size to 1"
        )
    sizes = possible_sizes(config)
    if kv_ranks(config, size) == size and size not in sizes:
        heads, kv_heads = _heads(config)
        shown = ", ".join(map(str, sizes))
        raise ModelError(
            f"{model}: its {heads} attention heads and {kv_heads} KV heads do not divide among {size} ranks: "
            f"set tensor_parallel_size to {f'one of {shown}' if len(sizes) > 1 else shown}"
        )


def possible_sizes(config: Any) -> list[int]:
    """Numbers of ranks among which the heads divide evenly, in ascending order, from 1 on."""
    common = math.gcd(*_heads(config))
    return [size for size in range(1, common + 1) if common % size == 0]


def kv_ranks(config: Any, size: int) -> int:
    """Among how many of ``size`` ranks the KV cache is divided: all, or 1 where each one holds all heads."""
    plan = tensor_parallel_plan(config)
    divided = any(
        name.rsplit(".", 1)[-1] in _KEY_LAYERS and style == "colwise" for name, style in plan.items()
    )
    return size if divided else 1


def tensor_parallel_plan(config: Any) -> dict[str, str]:
    """The plan of a model's layers: name with ``*`` for the layer's number → style. Empty = there is none."""
    return dict(getattr(config.get_text_config(), "base_model_tp_plan", None) or {})


def _heads(config: Any) -> tuple[int, int]:
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    return heads, int(getattr(text, "num_key_value_heads", None) or heads)
