from __future__ import annotations

import copy
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from paceline.actors.engine import compiled_step
from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.compiled_step import MAX_COMPILED_TOKENS
from paceline.actors.engine.errors import ModelError
from paceline.actors.engine.model_runner import TransformersRunner
from paceline.actors.engine.packed_linear import pack_linears
from paceline.actors.engine.quantized_linear import can_quantize_linears, quantize_linears
from paceline.actors.model_spec import ModelSpec
from tests.engine.models import FAMILIES, tiny_gemma3, tiny_llama

CPU = torch.device("cpu")
BLOCKS = 32


def _runner(model: PreTrainedModel, *, enforce_eager: bool) -> TransformersRunner:
    return TransformersRunner(
        model, num_blocks=64, block_size=16, device=CPU, deterministic=False, enforce_eager=enforce_eager
    )


def _steps(runner: TransformersRunner) -> list[torch.Tensor]:
    """Logits of a prompt, of decode steps of one and of several sequences, of tails, and of a chunk of which
    the last rows alone are wanted, past the window of 16 tokens."""
    first, second = range(8), range(8, 16)
    prompt = [3 + 7 * index % 200 for index in range(MAX_COMPILED_TOKENS + 1)]
    batches = [
        [SequenceSlice(prompt, 0, first, 1)],
        [SequenceSlice([5], 65, first, 1)],
        [SequenceSlice([6], 66, first, 1), SequenceSlice(prompt[:9], 0, second, 1)],
        [SequenceSlice([7, 8, 9], 67, first, 3), SequenceSlice([1, 2], 9, second, 2)],
        [SequenceSlice([4], 70, first, 1), SequenceSlice([4], 11, second, 1)],
        [SequenceSlice(prompt[:MAX_COMPILED_TOKENS], 0, second, 2)],
    ]
    return [runner.forward(batch) for batch in batches]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """One process compiles a function for eight models at most; a service has one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiled_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that no compiled one fits fail, where in a service they are run eagerly."""
    monkeypatch.setattr(compiled_step, "_LATER", "fail_on_recompile")


def _compiled_and_eager(model: PreTrainedModel) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    eager = _steps(_runner(copy.deepcopy(model), enforce_eager=True))
    runner = _runner(model, enforce_eager=False)
    runner.compile()
    compiled: list[torch.Tensor] = []
    # The engine's thread is not the one that loads.
    thread = threading.Thread(target=lambda: compiled.extend(_steps(runner)))
    thread.start()
    thread.join()
    return compiled, eager


@pytest.mark.usefixtures("compiled_only")
def test_compiled_steps_compute_what_eager_ones_do_and_leave_nothing_behind() -> None:
    folder = Path(tempfile.gettempdir())
    before = set(folder.glob("paceline-compile-*"))
    compiled, eager = _compiled_and_eager(tiny_llama())
    torch.testing.assert_close(compiled, eager, atol=1e-4, rtol=0.0)
    assert set(folder.glob("paceline-compile-*")) == before


@pytest.mark.heavy
@pytest.mark.usefixtures("compiled_only")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_compiled(family: str) -> None:
    compiled, eager = _compiled_and_eager(FAMILIES[family]())
    torch.testing.assert_close(compiled, eager, atol=1e-4, rtol=0.0)


def _packed(model: PreTrainedModel) -> int:
    return pack_linears(model)


def _quantized(model: PreTrainedModel) -> int:
    return quantize_linears(model, min_weight_elements=1 << 13)


@pytest.mark.heavy
@pytest.mark.usefixtures("compiled_only")
@pytest.mark.parametrize("prepare", [_packed, _quantized])
def test_layers_of_the_kernels_of_the_processor_are_compiled(
    prepare: Callable[[PreTrainedModel], int],
) -> None:
    if prepare is _quantized and not can_quantize_linears(CPU):
        pytest.skip("this processor has no instructions for int8")
    model, plain = tiny_gemma3(), tiny_gemma3()
    assert prepare(model) == prepare(plain) > 0
    runner = _runner(model, enforce_eager=False)
    runner.compile()
    # A code of int8 may round to its neighbour.
    tolerance = 0.05 if prepare is _quantized else 1e-5
    for compiled, eager in zip(_steps(runner), _steps(_runner(plain, enforce_eager=True)), strict=True):
        assert float((compiled - eager).norm() / eager.norm()) < tolerance


def test_a_step_that_is_not_compiled_is_eager() -> None:
    model = tiny_llama()
    eager = _steps(_runner(copy.deepcopy(model), enforce_eager=True))
    for ours, theirs in zip(_steps(_runner(model, enforce_eager=False)), eager, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0.0)


def test_without_a_compiler_the_error_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    runner = _runner(tiny_llama(num_hidden_layers=1), enforce_eager=False)
    with pytest.raises(ModelError, match="enforce_eager: the model cannot be compiled here"):
        runner.compile()


def test_compiled_steps_are_not_deterministic() -> None:
    with pytest.raises(ModelError, match="enforce_eager"):
        ModelSpec("m", deterministic=True, enforce_eager=False)
    with pytest.raises(ModelError, match="enforce_eager"):
        TransformersRunner(
            tiny_llama(), num_blocks=1, block_size=4, device=CPU, deterministic=True, enforce_eager=False
        )
