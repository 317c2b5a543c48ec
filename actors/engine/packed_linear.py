"""Linear layers whose weights lie in the order in which the CPU's matrix kernels read them.

A decode step on a CPU is bound by reading the weights. The plain row-major layout of a bfloat16 weight is
read at about 28 GB/s where a blocked one is read at 38 GB/s (two cores, 1 to 16 rows); in float32 several
rows take half the time. The plain copy is dropped, so memory stays as it was, but for an output layer tied
to the embedding: the embedding is looked up by row and must stay plain, so the output layer becomes a packed
copy of it (a fifth of a small model's bytes, and a quarter of its step when it is read unpacked).

A packed layer is also *batch-invariant*: its kernels sum the products of a row in one order, whatever the
number of rows and wherever the row lies among them, given at least two rows. One row alone may take another
kernel (in float32 always, in bfloat16 with more than 1,024 inputs). The plain float32 layer differs at nearly
every number of rows.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

_TRIED_OUT_FEATURES = 16384
"""More outputs are tried as these many: they are divided among more blocks and threads, each summed alike."""


class PackedLinear(nn.Module):
    """Takes the place of an ``nn.Linear`` on the CPU, for inference only.

    Its weight is an opaque tensor, so a packed model cannot be saved, copied or moved to another device.

    Args:
        batch_invariant: where a row that comes alone is computed otherwise than in company, compute it as one
            of two, so that its result is the same to the bit.
    """

    def __init__(self, linear: nn.Linear, *, batch_invariant: bool = False) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._pairs_single_row = batch_invariant and not single_row_is_alike(
            linear.in_features, linear.out_features, linear.weight.dtype, linear.bias is not None
        )
        # Laid out for few rows: a step of a few tokens is what is limited by memory.
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)
        self.register_buffer("_packed", packed, persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self._pairs_single_row and rows.numel() == self.in_features:
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


@functools.cache
def single_row_is_alike(in_features: int, out_features: int, dtype: torch.dtype, has_bias: bool) -> bool:
    """Whether the kernels compute one row as they compute it next to another, found by trying.

    Every true output is zero, since the second half of the products cancels the first in another order: what
    comes out is the rounding of the sums alone, and differs as soon as their order does.
    """
    half, distinct = in_features // 2, 64
    out_features = min(out_features, _TRIED_OUT_FEATURES)
    generator = torch.Generator().manual_seed(half)
    order = torch.randperm(half, generator=generator)
    weight = torch.zeros(distinct, in_features, dtype=dtype)
    weight[:, :half] = torch.randn(distinct, half, generator=generator)
    weight[:, half : 2 * half] = -weight[:, :half][:, order]
    rows = torch.zeros(4, in_features, dtype=dtype)
    rows[:, :half] = torch.randn(4, half, generator=generator)
    rows[:, half : 2 * half] = rows[:, :half][:, order]
    whole = weight.repeat(-(-out_features // distinct), 1)[:out_features].contiguous()
    packed = torch.ops.mkldnn._reorder_linear_weight(whole, 1)
    bias = torch.zeros(out_features, dtype=dtype) if has_bias else None
    single, pair = (
        torch.ops.mkldnn._linear_pointwise(rows[:count], packed, bias, "none", [], "")[0] for count in (1, 2)
    )
    return torch.equal(single, pair)


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
