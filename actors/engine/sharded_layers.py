"""The layers of a model that ``transformers`` has sharded, as plain modules over this rank's slice.

``transformers`` distributes a model by its tensor-parallel plan while it loads it: each rank reads its slice
of a weight, and wraps the layer's forward so that ranks exchange what they must. Its wrappers hide the slices
within distributed tensors, which costs more per layer than a small step's arithmetic, and keeps layers from
being packed or quantised. So the slices are taken out and the exchange is made explicit:

- *column-wise*: this rank computes its share of the outputs (its heads, its part of an MLP);
- *row-wise*: this rank holds the matching share of the inputs, and the ranks' products are summed;
- *gathered*: column-wise, and the outputs are put together (the output layer);
- *embedding*: this rank holds some rows of the table, and the ranks' rows are summed.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from paceline.actors.engine.errors import ModelError
from paceline.actors.engine.shard_group import ShardGroup
from paceline.actors.engine.tensor_parallel import (
    EMBEDDING,
    GATHERED,
    ROW_WISE,
    ROW_WISE_OF_WHOLE_INPUT,
    SUPPORTED_STYLES,
    UNSHARDED,
)


class RowWiseLinear(nn.Module):
    """A linear layer whose inputs are divided among the ranks.

    Args:
        linear: this rank's columns of the weight, without a bias.
        bias: of the whole layer, added once.
        columns: where the input comes whole, the columns of it that are this rank's.
    """

    def __init__(
        self,
        linear: nn.Linear,
        bias: nn.Parameter | None,
        group: ShardGroup,
        columns: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.linear = linear
        self.bias = bias
        self._group = group
        self._columns = columns

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self._columns is not None:
            rows = rows[..., self._columns[0] : self._columns[1]].contiguous()
        output = self._group.sum(self.linear(rows))
        return output if self.bias is None else output + self.bias


class GatheredLinear(nn.Module):
    """A linear layer whose outputs are divided among the ranks, and put together on each of them.

    Args:
        linear: this rank's outputs; ranks may differ in their number.
        out_features: of the whole layer.
        width: outputs of a rank, but for the last ones.
    """

    def __init__(self, linear: nn.Linear, out_features: int, width: int, group: ShardGroup) -> None:
        super().__init__()
        self.linear = linear
        self.out_features = out_features
        self._width = width
        self._group = group

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        part = self.linear(rows)
        if part.shape[-1] < self._width:
            part = functional.pad(part, (0, self._width - part.shape[-1]))
        parts = self._group.gather(part)
        # [size, …, width] -> […, size · width]
        whole = parts.movedim(0, -2).reshape(*part.shape[:-1], -1)
        return whole[..., : self.out_features]


class ShardedEmbedding(nn.Module):
    """A table of which this rank holds the rows from ``first_row`` on.

    The ranks' answers are summed: all but one are zero, so the sum is exact.
    """

    def __init__(self, embedding: nn.Embedding, first_row: int, group: ShardGroup) -> None:
        super().__init__()
        self.embedding = embedding
        self._first_row = first_row
        self._group = group

    @property
    def weight(self) -> torch.Tensor:
        return self.embedding.weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = token_ids - self._first_row
        held = (rows >= 0) & (rows < self.embedding.weight.shape[0])
        vectors = self.embedding(torch.where(held, rows, 0))
        return self._group.sum(vectors.masked_fill(~held[..., None], 0.0))


def localize_layers(model: nn.Module, plan: dict[str, str], group: ShardGroup) -> None:
    """Replace the layers that ``plan`` (layer name with ``*`` for numbers → style) names, in place.

    Weights that were one tensor, as tied embeddings are, stay one.

    Raises:
        ModelError: a layer is sharded in a way that is not known here.
    """
    local: dict[int, nn.Parameter] = {}

    def own(parameter: Any) -> Any:
        if not isinstance(parameter, DTensor):
            return parameter
        if id(parameter) not in local:
            local[id(parameter)] = nn.Parameter(parameter.to_local().detach(), requires_grad=False)
        return local[id(parameter)]

    for name, layer in list(model.named_modules()):
        style = plan.get(_with_wildcards(name))
        if style is None:
            continue
        if style not in SUPPORTED_STYLES:
            raise ModelError(
                f"{type(model).__name__} shards {name} by {style!r}, which is not supported: set "
                "tensor_parallel_size to 1"
            )
        # The wrapper of transformers is an attribute of the instance that hides the class's method.
        layer.__dict__.pop("forward", None)
        whole = {key: None if value is None else value.shape for key, value in layer._parameters.items()}
        for key, value in list(layer._parameters.items()):
            layer._parameters[key] = own(value)
        replacement = _replacement(layer, style, whole, group)
        if replacement is not layer:
            parent_name, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent_name), child, replacement)
    _check_local(model)


def _replacement(layer: nn.Module, style: str, whole: dict[str, Any], group: ShardGroup) -> nn.Module:
    if style in UNSHARDED:
        return layer
    if style in EMBEDDING:
        assert isinstance(layer, nn.Embedding)
        width = _ceil_div(whole["weight"][0], group.size)
        # A row that is looked up in place of one that others hold must not be this table's padding.
        layer.padding_idx = None
        return ShardedEmbedding(layer, group.rank * width, group)
    if not isinstance(layer, nn.Linear):
        raise ModelError(
            f"{type(layer).__name__} is sharded by {style!r}, which is supported for linear layers only: set "
            "tensor_parallel_size to 1"
        )
    out_features, in_features = whole["weight"]
    layer.out_features, layer.in_features = layer.weight.shape
    if style in GATHERED:
        return GatheredLinear(layer, out_features, _ceil_div(out_features, group.size), group)
    if style in ROW_WISE | ROW_WISE_OF_WHOLE_INPUT:
        bias = layer.bias
        layer.register_parameter("bias", None)
        columns = None
        if style in ROW_WISE_OF_WHOLE_INPUT:
            first = group.rank * _ceil_div(in_features, group.size)
            columns = (first, first + layer.in_features)
        return RowWiseLinear(layer, bias, group, columns)
    return layer


def _check_local(model: nn.Module) -> None:
    left = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if left:
        raise ModelError(
            f"{type(model).__name__} shards {left[0]} in a way that is not supported: set "
            "tensor_parallel_size to 1"
        )


def _with_wildcards(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _ceil_div(total: int, parts: int) -> int:
    return -(-total // parts)
