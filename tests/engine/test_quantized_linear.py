"""Linear layers in int8: close to the float ones, each row for itself, and refused where there are none."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.errors import ModelError
from paceline.actors.engine.loading import load_model
from paceline.actors.engine.model_runner import TransformersRunner
from paceline.actors.engine.quantized_linear import (
    MAX_IN_FEATURES,
    MIN_WEIGHT_ELEMENTS,
    QuantizedLinear,
    can_quantize_linears,
    quantize_linears,
    quantize_rows,
    quantize_weight,
    resolve_quantization,
)
from tests.engine.models import FAMILIES, VOCAB_SIZE, tiny_llama

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
needs_kernels = pytest.mark.skipif(not can_quantize_linears(CPU), reason="this processor has no int8 kernels")

# In and out features on, off and far below the kernels' block sizes; the last is long enough that sums exceed
# what a float32 holds exactly.
SHAPES = [(896, 896), (100, 37), (63, 129), (1, 1), (7, 513), (4864, 200)]
# Around the sizes at which the kernels change their path.
ROW_COUNTS = [1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 127, 128, 129, 255, 257, 512, 600]


@pytest.fixture(autouse=True, params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def make_linear(
    in_features: int, out_features: int, *, bias: bool = True, dtype: torch.dtype = torch.float32
) -> nn.Linear:
    generator = torch.Generator().manual_seed(in_features * 10007 + out_features)
    linear = nn.Linear(in_features, out_features, bias=bias)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return linear.to(dtype)


def make_rows(count: int, in_features: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of very different sizes, as activations are."""
    generator = torch.Generator().manual_seed(in_features)
    sizes = torch.logspace(-3, 3, count)[torch.randperm(count, generator=generator)]
    return (torch.randn(count, in_features, generator=generator) * sizes[:, None]).to(dtype)


# ---------------------------------------------------------------- one layer


def exact(linear: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """The scheme in float64, in which its sums of integers are exact."""
    codes, scales = quantize_weight(linear.weight)
    row_codes, row_scales = quantize_rows(rows)
    output = (row_codes.double() - 128) @ codes.double().T * scales.double() * row_scales.double()
    return output if linear.bias is None else output + linear.bias.double()


@needs_kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_computes_the_scheme_and_comes_close_to_the_float_layer(
    shape: tuple[int, int], bias: bool
) -> None:
    linear, rows = make_linear(*shape, bias=bias), make_rows(40, shape[0])
    output = QuantizedLinear(linear)(rows)
    torch.testing.assert_close(output.double(), exact(linear, rows), rtol=1e-5, atol=1e-4)
    plain = linear(rows)
    relative = (output - plain).norm(dim=1) / plain.norm(dim=1)
    assert relative.max() < 0.05
    assert relative.mean() < 0.02


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_type_and_the_shape_are_those_of_the_float_layer(dtype: torch.dtype) -> None:
    linear, rows = make_linear(96, 40, dtype=dtype), make_rows(6, 96, dtype).view(2, 3, 96)
    output = QuantizedLinear(linear)(rows)
    assert (output.dtype, output.shape) == (dtype, (2, 3, 40))
    # Rows that are no block of memory of their own, as a slice of a wider tensor.
    wide = torch.cat([rows, rows], dim=2)
    assert torch.equal(QuantizedLinear(linear)(wide[..., :96]), output)
    assert QuantizedLinear(linear)(rows[:0]).shape == (0, 3, 40)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_its_neighbours(shape: tuple[int, int], dtype: torch.dtype) -> None:
    layer = QuantizedLinear(make_linear(*shape, dtype=dtype))
    rows = make_rows(ROW_COUNTS[-1], shape[0], dtype)
    alone = torch.cat([layer(row[None]) for row in rows])
    for count in ROW_COUNTS:
        assert torch.equal(layer(rows[:count]), alone[:count]), count
        assert torch.equal(layer(rows[-count:]), alone[-count:]), count


@needs_kernels
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_spoils_only_itself(bad: float) -> None:
    layer = QuantizedLinear(make_linear(100, 37))
    rows = make_rows(20, 100)
    clean = layer(rows)
    rows[7, 3] = bad
    output = layer(rows)
    others = torch.arange(20) != 7
    assert torch.equal(output[others], clean[others])
    assert not output[7].isfinite().any()


@needs_kernels
def test_zeros_stay_zeros() -> None:
    linear = make_linear(64, 10)
    linear.weight[4] = 0.0
    layer, rows = QuantizedLinear(linear), make_rows(3, 64)
    rows[1] = 0.0
    output = layer(rows)
    assert torch.equal(output[1], linear.bias)
    assert torch.equal(output[:, 4], linear.bias[4].expand(3))
    assert output.isfinite().all()


@needs_kernels
def test_the_largest_sums_do_not_saturate() -> None:
    linear = make_linear(MAX_IN_FEATURES, 2, bias=False)
    linear.weight[0], linear.weight[1] = 1.0, -1.0
    output = QuantizedLinear(linear)(torch.ones(1, MAX_IN_FEATURES))
    expected = torch.tensor([[1.0, -1.0]]) * MAX_IN_FEATURES
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=0)


def test_codes_use_their_whole_range_and_no_more() -> None:
    codes, scales = quantize_weight(torch.tensor([[1.0, -1.0, 0.5], [0.0, 0.0, 0.0], [2e-9, 1e-9, 0.0]]))
    assert codes.tolist() == [[127, -127, 64], [0, 0, 0], [127, 64, 0]]
    torch.testing.assert_close(scales, torch.tensor([1 / 127, 0.0, 2e-9 / 127]))
    row_codes, row_scales = quantize_rows(make_rows(500, 100))
    assert row_codes.min() == 1
    assert row_codes.max() == 255
    error = (row_codes.float() - 128) * row_scales - make_rows(500, 100)
    assert (error.abs() <= 0.501 * row_scales).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_itself_is_not_touched(dtype: torch.dtype) -> None:
    weight = make_linear(64, 10, dtype=dtype).weight
    before = weight.clone()
    quantize_weight(weight)
    assert torch.equal(weight, before)


def test_a_weight_larger_than_a_chunk_is_quantised_whole() -> None:
    weight = make_linear(3, 9001).weight
    codes, scales = quantize_weight(weight)
    assert ((codes * scales[:, None] - weight).abs() <= 0.501 * scales[:, None]).all()


# ---------------------------------------------------------------- a whole model


def prompt_batch(num_blocks: int, length: int) -> list[SequenceSlice]:
    generator = torch.Generator().manual_seed(length)
    token_ids = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
    return [SequenceSlice(token_ids, 0, list(range(num_blocks)), length)]


@needs_kernels
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_computes_nearly_the_same_law(family: str) -> None:
    model = FAMILIES[family]()
    quantized = copy.deepcopy(model)
    linears = sum(type(module) is nn.Linear for module in quantized.modules())
    assert quantize_linears(quantized, min_weight_elements=0) == linears > 7
    # Their float weights are gone.
    assert not any(type(module) is nn.Linear for module in quantized.modules())
    logits = [
        TransformersRunner(each, num_blocks=8, block_size=16, device=CPU).forward(prompt_batch(8, 100))
        for each in (model, quantized)
    ]
    overlap = torch.minimum(*(each.softmax(-1) for each in logits)).sum(-1)
    assert overlap.mean() > 0.8
    assert not torch.equal(*logits)


@needs_kernels
def test_an_output_layer_leaves_the_embedding_it_shares(tmp_path: Path) -> None:
    config = copy.deepcopy(tiny_llama().config)
    config.vocab_size, config.tie_word_embeddings = MIN_WEIGHT_ELEMENTS // config.hidden_size, True
    tied = LlamaForCausalLM(config)
    tied.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), torch.float32, CPU, quantization="int8")
    assert isinstance(model.get_output_embeddings(), QuantizedLinear)
    assert torch.equal(model.get_input_embeddings().weight, tied.get_input_embeddings().weight)
    # Small layers are not worth it.
    assert sum(type(module) is QuantizedLinear for module in model.modules()) == 1


@needs_kernels
def test_layers_that_are_watched_or_made_otherwise_stay() -> None:
    class Own(nn.Linear):
        pass

    model = nn.ModuleList([nn.Linear(4, 4), Own(4, 4), nn.Linear(4, 4)])
    model[2].register_forward_hook(lambda *_: None)
    assert quantize_linears(model, min_weight_elements=0) == 1
    assert [type(layer) for layer in model] == [QuantizedLinear, Own, nn.Linear]


# ---------------------------------------------------------------- where it is available


def test_auto_takes_what_the_device_has() -> None:
    assert resolve_quantization("auto", CPU) == ("int8" if can_quantize_linears(CPU) else "none")
    assert resolve_quantization("auto", CUDA) == "none"
    assert resolve_quantization("none", CUDA) == "none"


def test_what_is_not_available_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"quantization: int8 is not available on cuda — set it to none"):
        resolve_quantization("int8", CUDA)
    with pytest.raises(ModelError, match=r"quantization: must be auto, none or int8; got 'int4'"):
        resolve_quantization("int4", CPU)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    assert resolve_quantization("auto", CPU) == "none"
    with pytest.raises(ModelError, match="VNNI"):
        resolve_quantization("int8", CPU)
    # Refused before anything is read.
    with pytest.raises(ModelError, match="quantization"):
        load_model("./no/such-folder", torch.float32, CUDA, quantization="int8")
