"""Linear layers whose weights lie in the order in which the CPU's matrix kernels read them.

A decode step on a CPU is bound by reading the weights. The plain row-major layout of a bfloat16 weight is
read at about 28 GB/s where a blocked one is read at 38 GB/s (two cores, 1 to 16 rows); the products are the
same to the bit. The plain copy is dropped, so memory stays as it was, but for an output layer tied to the
embedding: the embedding is looked up by row and must stay plain, so the output layer becomes a packed copy of
it (a fifth of a small model's bytes, and a quarter of its step when it is read unpacked).
"""

from __future__ import annotations

import torch
from torch import nn


class PackedLinear(nn.Module):
    """Takes the place of a bfloat16 ``nn.Linear`` on the CPU, for inference only.

    Its weight is an opaque tensor, so a packed model cannot be saved, copied or moved to another device.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # Laid out for few rows: a step of a few tokens is what is limited by memory.
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self.bias, "none", [], ""
        )
        return output

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


def can_pack_linears(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of torch and this processor have the kernels that packing is for."""
    return (
        device.type == "cpu"
        and dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def pack_linears(model: nn.Module) -> int:
    """Replace every plain bfloat16 ``nn.Linear`` of ``model`` in place; returns how many."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.weight.dtype is not torch.bfloat16:
                continue
            if child._forward_hooks or child._forward_pre_hooks:
                continue
            setattr(parent, name, PackedLinear(child))
            replaced += 1
    return replaced
