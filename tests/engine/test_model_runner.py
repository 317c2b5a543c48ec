from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from paceline.actors.engine.attention import ATTENTION_NAME
from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.blocks import BlockManager
from paceline.actors.engine.errors import ModelError
from paceline.actors.engine.loading import load_model, resolve_dtype
from paceline.actors.engine.model_runner import TransformersRunner, kv_block_bytes
from paceline.actors.engine.packed_linear import PackedLinear, can_pack_linears, pack_linears
from tests.engine.models import (
    FAMILIES,
    MAX_MODEL_LEN,
    SLIDING_WINDOW,
    VOCAB_SIZE,
    reference_greedy,
    reference_logits,
    tiny_llama,
)

CPU = torch.device("cpu")
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return FAMILIES[request.param]()


def _runner(
    model: PreTrainedModel, *, num_blocks: int = 64, block_size: int = 4, backend: str = "paged"
) -> TransformersRunner:
    return TransformersRunner(
        copy.deepcopy(model),
        num_blocks=num_blocks,
        block_size=block_size,
        device=CPU,
        attention_backend=backend,
    )


def _tokens(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCAB_SIZE) for _ in range(count)]


def _scattered(runner: TransformersRunner, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Block tables in random order."""
    blocks = list(range(runner.num_blocks))
    random.Random(seed).shuffle(blocks)
    return [[blocks.pop() for _ in range(-(-length // runner.block_size))] for length in lengths]


@pytest.mark.parametrize("backend", ["paged", "reference"])
@pytest.mark.parametrize("seed", [0, 1])
def test_ragged_batch_equals_plain_transformers(model: PreTrainedModel, backend: str, seed: int) -> None:
    """Three sequences, scattered slots, chunks split at random, tails: every row is the plain model's.

    The lengths lie across the edge of the sliding window (16).
    """
    runner = _runner(model, backend=backend)
    sequences = [_tokens(length, 10 * seed + length) for length in (61, SLIDING_WINDOW + 1, 34)]
    tables = _scattered(runner, [len(ids) for ids in sequences], seed)
    expected = [reference_logits(model, ids) for ids in sequences]
    generator = random.Random(seed)
    done = [0, 0, 0]
    while any(at < len(ids) for at, ids in zip(done, sequences, strict=True)):
        batch, rows = [], []
        for index, ids in enumerate(sequences):
            left = len(ids) - done[index]
            if not left or (generator.random() < 0.2 and sum(done) % 3):
                continue
            count = min(left, generator.choice([1, 2, 4, 19]))
            num_logits = generator.randint(0, count)
            end = done[index] + count
            batch.append(SequenceSlice(ids[done[index] : end], done[index], tables[index], num_logits))
            rows.append(expected[index][end - num_logits : end])
            done[index] = end
        if batch:
            torch.testing.assert_close(runner.forward(batch), torch.cat(rows), **TOLERANCE)


def test_rejected_tail_leaves_no_trace(model: PreTrainedModel) -> None:
    """Write a tail over the window's edge, truncate, write other tokens: as if the tail had never been."""
    runner = _runner(model)
    manager = BlockManager(runner.num_blocks, runner.block_size)
    prompt, rejected, others = _tokens(SLIDING_WINDOW - 2, 1), _tokens(9, 2), _tokens(12, 3)
    table: list[int] = []
    neighbour: list[int] = []
    assert manager.grow(table, len(prompt))
    runner.forward([SequenceSlice(prompt, 0, table, 0)])
    # A neighbour in between, so that the blocks of the sequence are not consecutive.
    assert manager.grow(neighbour, 6)
    runner.forward([SequenceSlice(_tokens(6, 4), 0, neighbour, 0)])
    assert manager.grow(table, len(prompt) + len(rejected))
    tail = runner.forward([SequenceSlice(rejected, len(prompt), table, len(rejected))])
    torch.testing.assert_close(tail, reference_logits(model, prompt + rejected)[len(prompt) :], **TOLERANCE)

    kept = len(prompt) + 3
    manager.truncate(table, kept)
    sequence = prompt + rejected[:3] + others
    assert manager.grow(table, len(sequence))
    found = runner.forward([SequenceSlice(others, kept, table, len(others))])
    torch.testing.assert_close(found, reference_logits(model, sequence)[kept:], **TOLERANCE)
    manager.free(table)
    manager.free(neighbour)
    assert manager.num_free_blocks == runner.num_blocks


def test_greedy_loop_equals_reference_generate(model: PreTrainedModel) -> None:
    """Three sequences in one batch, one token at a time, across the window's edge."""
    runner = _runner(model)
    prompts = [_tokens(length, length) for length in (3, 13, 20)]
    expected = [reference_greedy(model, prompt, 24) for prompt in prompts]
    tables = _scattered(runner, [len(prompt) + 24 for prompt in prompts], 5)
    known = [list(prompt) for prompt in prompts]
    computed = [0, 0, 0]
    for _ in range(24):
        batch = [
            SequenceSlice(ids[at:], at, table, 1)
            for ids, at, table in zip(known, computed, tables, strict=True)
        ]
        winners = runner.forward(batch).argmax(-1).tolist()
        for index, winner in enumerate(winners):
            computed[index] = len(known[index])
            known[index].append(winner)
    assert [ids[len(prompt) :] for ids, prompt in zip(known, prompts, strict=True)] == expected


def test_poisoned_sequence_does_not_reach_its_neighbours() -> None:
    model = tiny_llama()
    runner = _runner(model)
    ids = _tokens(11, 1)
    tables = _scattered(runner, [11, 9], 0)
    with torch.no_grad():
        weight = runner._model.get_input_embeddings().weight  # the test's own copy
        weight[7] = float("nan")
    ids = [token for token in ids if token != 7]
    poisoned = [7] * 9
    batch = [
        SequenceSlice(ids, 0, tables[0], 1),
        SequenceSlice(poisoned, 0, tables[1], 1),
    ]
    first = runner.forward(batch)
    assert torch.isnan(first[1]).all()
    torch.testing.assert_close(first[0], reference_logits(model, ids)[-1], **TOLERANCE)


def test_no_logits_wanted_gives_no_rows() -> None:
    runner = _runner(tiny_llama())
    assert runner.forward([SequenceSlice([1, 2, 3], 0, [0], 0)]).shape == (0, VOCAB_SIZE)
    assert runner.forward([]).shape == (0, VOCAB_SIZE)


def test_padding_of_the_output_layer_is_cut_off() -> None:
    runner = TransformersRunner(
        tiny_llama(), num_blocks=4, block_size=4, device=CPU, vocab_size=VOCAB_SIZE - 6
    )
    assert runner.vocab_size == VOCAB_SIZE - 6
    assert runner.forward([SequenceSlice([1], 0, [0], 1)]).shape == (1, VOCAB_SIZE - 6)
    with pytest.raises(ValueError, match="token id"):
        runner.forward([SequenceSlice([VOCAB_SIZE - 6], 0, [0], 1)])


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (SequenceSlice([], 0, [0], 0), "must not be empty"),
        (SequenceSlice([1], -1, [0], 0), "max_model_len"),
        (SequenceSlice([1], MAX_MODEL_LEN, list(range(64)) * 3, 0), "max_model_len"),
        (SequenceSlice([1], 0, [0], 2), "num_logits"),
        (SequenceSlice([1], 0, [0], -1), "num_logits"),
        (SequenceSlice([1] * 5, 0, [0], 1), "blocks of 4"),
        (SequenceSlice([1], 0, [64], 1), "block table"),
        (SequenceSlice([1], 0, [-1], 1), "block table"),
        (SequenceSlice([VOCAB_SIZE], 0, [0], 1), "token id"),
        (SequenceSlice([-1], 0, [0], 1), "token id"),
    ],
)
def test_broken_slices_are_refused_before_anything_is_written(piece: SequenceSlice, message: str) -> None:
    model = tiny_llama()
    runner = _runner(model)
    ids = _tokens(4, 0)
    runner.forward([SequenceSlice(ids[:3], 0, [0], 0)])
    with pytest.raises(ValueError, match=message):
        runner.forward([SequenceSlice([9, 9, 9], 0, [0], 0), piece])
    found = runner.forward([SequenceSlice(ids[3:], 3, [0], 1)])
    torch.testing.assert_close(found, reference_logits(model, ids)[3:], **TOLERANCE)


def test_sizes_and_lengths_are_checked() -> None:
    model = tiny_llama()
    with pytest.raises(ModelError, match=f"at most {MAX_MODEL_LEN}"):
        TransformersRunner(model, num_blocks=1, block_size=4, max_model_len=MAX_MODEL_LEN + 1, device=CPU)
    with pytest.raises(ModelError, match="do not belong together"):
        TransformersRunner(model, num_blocks=1, block_size=4, device=CPU, vocab_size=VOCAB_SIZE + 1)
    with pytest.raises(ValueError, match="num_blocks"):
        TransformersRunner(model, num_blocks=0, block_size=4, device=CPU)
    with pytest.raises(ValueError, match="attention_backend"):
        TransformersRunner(model, num_blocks=1, block_size=4, device=CPU, attention_backend="none")
    runner = TransformersRunner(model, num_blocks=1, block_size=4, max_model_len=100, device=CPU)
    assert (runner.max_model_len, runner.num_blocks, runner.block_size) == (100, 1, 4)


def test_rope_that_depends_on_the_batch_bounds_the_length() -> None:
    config = copy.deepcopy(tiny_llama().config)
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config.max_position_embeddings = 128
    model = LlamaForCausalLM(config)
    assert TransformersRunner(model, num_blocks=1, block_size=4, device=CPU).max_model_len == 128
    with pytest.raises(ModelError, match="at most 128"):
        TransformersRunner(model, num_blocks=1, block_size=4, max_model_len=129, device=CPU)


def test_kv_block_bytes_is_what_the_cache_takes(model: PreTrainedModel) -> None:
    runner = _runner(model, num_blocks=5, block_size=8)
    assert runner.kv_cache_bytes == 5 * kv_block_bytes(model.config, torch.float32, 8)


@pytest.mark.parametrize("max_tokens", [1, 40, 300, 5000])
def test_warm_up_runs_and_leaves_no_trace(max_tokens: int) -> None:
    model = tiny_llama()
    runner = _runner(model)
    assert runner.warm_up(max_tokens) > 0.0
    ids = _tokens(9, 0)
    torch.testing.assert_close(
        runner.forward([SequenceSlice(ids, 0, [3, 9, 1], 9)]), reference_logits(model, ids), **TOLERANCE
    )


# ---------------------------------------------------------------- loading


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(path)
    return path


def test_loaded_model_is_ready_for_the_runner(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = load_model(str(folder), torch.float32, CPU)
    assert not model.training
    assert model.config._attn_implementation == ATTENTION_NAME
    assert model.dtype == torch.float32
    ids = _tokens(20, 0)
    runner = TransformersRunner(model, num_blocks=8, block_size=4, device=CPU)
    found = runner.forward([SequenceSlice(ids, 0, list(range(5)), 20)])
    torch.testing.assert_close(found, reference_logits(tiny_llama(), ids), **TOLERANCE)
    output = capfd.readouterr()
    assert output.out + output.err == ""


def test_tied_embeddings_stay_one_tensor(tmp_path: Path) -> None:
    config = copy.deepcopy(tiny_llama().config)
    config.tie_word_embeddings = True
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(str(tmp_path), dtype, CPU, pack_weights=False)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_dtype_is_resolved(folder: Path, tmp_path: Path) -> None:
    assert resolve_dtype("bfloat16", "anything") is torch.bfloat16
    assert resolve_dtype("auto", str(folder)) is torch.float32
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path)
    assert resolve_dtype("auto", str(tmp_path)) is torch.bfloat16
    with pytest.raises(ModelError, match="dtype must be auto, float32"):
        resolve_dtype("int3", str(folder))


def test_what_cannot_be_loaded_says_why(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def message(source: str) -> str:
        with pytest.raises(ModelError) as caught:
            load_model(source, torch.float32, CPU)
        return str(caught.value)

    assert "no such folder" in message(str(tmp_path / "absent"))
    assert "no config.json" in message(str(tmp_path))
    file = tmp_path / "weights.bin"
    file.write_bytes(b"")
    assert "is a file" in message(str(file))
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    assert "architecture is unknown" in message(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "is the folder complete?" in message(str(tmp_path))
    file.unlink()
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert "is the folder complete?" in message(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "clip_vision_model"}')
    assert "no causal language model" in message(str(tmp_path))
    # A closed local port in place of the hub: nothing answers.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "check the network, or give a local folder" in message("organisation/absent-model")


def test_recurrent_layers_are_refused() -> None:
    config = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 4,
        "time_step_rank": 4,
    }
    from transformers import MambaConfig

    model = AutoModelForCausalLM.from_config(MambaConfig(**config))
    with pytest.raises(ModelError, match="attention"):
        TransformersRunner(model, num_blocks=1, block_size=4, max_model_len=64, device=CPU)


# ---------------------------------------------------------------- packed weights

needs_packing = pytest.mark.skipif(
    not can_pack_linears(torch.bfloat16, CPU), reason="this processor has no bfloat16 kernels to pack for"
)


@needs_packing
@pytest.mark.parametrize("rows", [0, 1, 3, 17])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_equals_plain_to_the_bit(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 160, bias=bias, dtype=torch.bfloat16)
    inputs = torch.randn(1, rows, 96, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(PackedLinear(linear)(inputs), linear(inputs))


@needs_packing
def test_packing_changes_no_logits_and_keeps_the_embedding(tmp_path: Path) -> None:
    config = LlamaConfig(**{**tiny_llama().config.to_dict(), "tie_word_embeddings": True})
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    plain = load_model(str(tmp_path), torch.bfloat16, CPU, pack_weights=False)
    packed = load_model(str(tmp_path), torch.bfloat16, CPU)
    assert pack_linears(packed) == 0
    assert sum(isinstance(module, PackedLinear) for module in packed.modules()) == 15
    assert torch.equal(packed.get_input_embeddings().weight, plain.get_input_embeddings().weight)
    batch = [SequenceSlice(_tokens(12, 0), 0, [0, 1, 2], 12)]
    found = [
        TransformersRunner(model, num_blocks=4, block_size=4, device=CPU).forward(batch)
        for model in (plain, packed)
    ]
    assert torch.equal(*found)
