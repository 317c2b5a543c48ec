"""Linear layers whose weights lie in the order in which the CPU's matrix kernels read them.

A decode step on a CPU is bound by reading the weights. The plain row-major layout of a bfloat16 weight is
read at about 28 GB/s where a blocked one is read at 38 GB/s (two cores, 1 to 16 rows); in float32 several
rows take half the time. The plain copy is dropped, so memory stays as it was, but for an output layer tied
to the embedding: the embedding is looked up by row and must stay plain, so the output layer becomes a packed
copy of it (a fifth of a small model's bytes, and a quarter of its step when it is read unpacked).

A packed layer is also *batch-invariant*: its kernels sum the products of a row in one order, whatever the
number of rows and wherever the row lies among them, given at least two rows. (One row alone is a
matrix-vector product, which has kernels of its own. The plain float32 layer differs at nearly every number
of rows.)
"""

from __future__ import annotations

import torch
from torch import nn


class PackedLinear(nn.Module):
    """Takes the place of an ``nn.Linear`` on the CPU, for inference only.

    Its weight is an opaque tensor, so a packed model cannot be saved, copied or moved to another device.

    Args:
        batch_invariant: compute a row that comes alone as one of two, so that its result is the same to the
            bit as in company.
    """

    def __init__(self, linear: nn.Linear, *, batch_invariant: bool = False) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.batch_invariant = batch_invariant
        # Laid out for few rows: a step of a few tokens is what is limited by memory.
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.batch_invariant and rows.numel() == self.in_features:
            return self._multiply(torch.cat((rows, rows), -2)).narrow(-2, 0, 1)
        return self._multiply(rows)

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
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
        and dtype in (torch.bfloat16, torch.float32)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and (dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def pack_linears(model: nn.Module, *, batch_invariant: bool = False) -> int:
    """Replace every plain ``nn.Linear`` of ``model`` that can be packed in place; returns how many.

    Each layer's own weight is freed before the next layer's is packed.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or not can_pack_linears(child.weight.dtype, child.weight.device):
                continue
            if child._forward_hooks or child._forward_pre_hooks:
                continue
            setattr(parent, name, PackedLinear(child, batch_invariant=batch_invariant))
            replaced += 1
    return replaced
