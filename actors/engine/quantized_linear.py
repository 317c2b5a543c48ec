"""Linear layers in 8-bit integers on the CPU: half the bytes of bfloat16 to read for each step.

Weights are quantised once, symmetrically, with one scale per output channel; activations as they come,
symmetrically, with one scale per token (row): the vector-wise quantisation of LLM.int8() (Dettmers et al.
2022), without its outlier part. Products are summed in 32-bit integers, which is exact, and all that follows
acts on single elements: a row's result depends on nothing but that row, to the bit, and a row that is not
finite spoils only itself.

This changes the model's law a little. For a draft it costs no measurable acceptance; a target that is
quantised serves the quantised model.
"""

from __future__ import annotations

from typing import Literal, TypeGuard, cast, get_args

import torch
from torch import nn

from paceline.actors.engine.errors import ModelError

Quantization = Literal["none", "int8"]

MAX_CODE = 127
ZERO_POINT = 128
"""Activations go to the kernels as unsigned bytes: code + 128, in 1 … 255."""
MAX_IN_FEATURES = (2**31 - 1) // ((MAX_CODE + ZERO_POINT) * MAX_CODE)
"""With more, a sum might exceed 32 bits."""
MIN_WEIGHT_ELEMENTS = 1 << 19
"""Smaller layers stay as they are: quantising their inputs costs more time than is saved on their weights
(measured at 1 to 128 rows; with all its layers in int8, a model of 135M parameters is slower than
in bfloat16)."""
_CHUNK_ROWS = 4096
"""Weight rows quantised at a time: bounds the float32 copies of a large output layer."""


class QuantizedLinear(nn.Module):
    """Takes the place of an ``nn.Linear`` on the CPU, for inference only.

    Rows ``[..., in_features]`` of any float type give ``[..., out_features]`` of the same type. The weight is
    an opaque tensor: a quantised model cannot be saved, copied or moved to another device.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        codes, scales = quantize_weight(linear.weight.detach())
        # Laid out for one row; the kernels use the same layout for any number of them.
        packed = torch.ops.onednn.qlinear_prepack(codes, [1, self.in_features])
        self.bias: torch.Tensor | None
        # Buffers, since a compiler takes no other tensors for constants.
        for name, tensor in (
            ("bias", None if linear.bias is None else linear.bias.detach().float()),
            ("_packed", packed),
            ("_scales", scales),
            ("_zero_points", torch.zeros(self.out_features, dtype=torch.int64)),
        ):
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, self.in_features)
        codes, scales = quantize_rows(rows)
        # The rows' scales come last: the kernel takes one activation scale for all rows, here 1.
        output: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            codes,
            1.0,
            ZERO_POINT,
            self._packed,
            self._scales,
            self._zero_points,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        # Two operators, each rounded once: a fused one may round differently at the end of a vector.
        output.mul_(scales)
        if self.bias is not None:
            output.add_(self.bias)
        return output.to(inputs.dtype).view(*inputs.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 ``[out, in]`` and scales float32 ``[out]`` with ``codes * scales[:, None] ≈ weight``."""
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    for first in range(0, weight.shape[0], _CHUNK_ROWS):
        rows = weight[first : first + _CHUNK_ROWS].float()
        scale = rows.abs().amax(1).div_(MAX_CODE)
        scales[first : first + _CHUNK_ROWS] = scale
        # A row of zeros has codes of zero.
        scale.clamp_min_(torch.finfo(torch.float32).tiny)
        codes[first : first + _CHUNK_ROWS] = torch.div(rows, scale[:, None]).round_()
    return codes, scales


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 ``[R, in]`` and scales float32 ``[R, 1]`` with ``(codes − 128) * scales ≈ rows``.

    A row of zeros has scale 0 and a row with a NaN or an infinity has such a scale, so that what their codes
    are does not matter.
    """
    scales = rows.abs().amax(1, keepdim=True).float().div_(MAX_CODE)
    # The codes' conversion drops the fraction, hence the half.
    codes = torch.div(rows, scales).add_(ZERO_POINT + 0.5).to(torch.uint8)
    return codes, scales


def resolve_quantization(name: str, device: torch.device) -> Quantization:
    """What ``name`` means on ``device``: "auto" is int8 where this processor has the kernels, else none.

    Raises:
        ModelError: an unknown name, or int8 where there are no kernels for it; the text names the remedy.
    """
    if name == "auto":
        return "int8" if can_quantize_linears(device) else "none"
    if name not in get_args(Quantization):
        raise ModelError(f"quantization: must be auto, none or int8; got {name!r}")
    if name == "int8" and device.type != "cpu":
        raise ModelError(
            f"quantization: int8 is not available on {device.type} — set it to none, or device to cpu"
        )
    if name == "int8" and not can_quantize_linears(device):
        raise ModelError(
            "quantization: int8 needs a processor with AVX-512 VNNI and a build of torch with oneDNN, and "
            "one of them is missing — set it to none"
        )
    return cast(Quantization, name)


def can_quantize_linears(device: torch.device) -> bool:
    """Whether this build of torch and this processor have the kernels, and they compute exactly."""
    has_vnni = getattr(torch.cpu, "_is_vnni_supported", None)
    return (
        device.type == "cpu"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.onednn, "qlinear_prepack")
        and hasattr(torch.ops.onednn, "qlinear_pointwise")
        and has_vnni is not None
        and bool(has_vnni())
        and _is_exact()
    )


def _is_exact() -> bool:
    """Whether the largest codes are summed exactly; kernels for processors without VNNI saturate."""
    linear = nn.Linear(64, 2, bias=False, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        linear.weight[0], linear.weight[1] = 1.0, -1.0
        try:
            output = QuantizedLinear(linear)(torch.ones(1, 64))
        except RuntimeError:
            return False
    return torch.allclose(output, torch.tensor([[64.0, -64.0]]), rtol=1e-4)


def quantize_linears(model: nn.Module, *, min_weight_elements: int = MIN_WEIGHT_ELEMENTS) -> int:
    """Replace every plain ``nn.Linear`` of ``model`` that has so many weights in place; returns how many.

    The output layer is one of them; an embedding that shares its weight keeps it. Each layer's own weight is
    freed before the next layer's is quantised.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _can_quantize(child) and child.weight.numel() >= min_weight_elements:
                setattr(parent, name, QuantizedLinear(child))
                replaced += 1
    return replaced


def _can_quantize(module: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(module) is nn.Linear
        and module.weight.is_floating_point()
        and module.in_features <= MAX_IN_FEATURES
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )
