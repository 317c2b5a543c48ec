"""A model that is divided among ranks gives the tokens of the undivided one.

The test leads, further processes are the other ranks. ``tests/gpu`` runs the same on GPUs.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from paceline.actors.engine.batch import ModelRunner, SequenceSlice
from paceline.actors.engine.config import TargetEngineConfig
from paceline.actors.engine.errors import ShardGroupError
from paceline.actors.engine.loading import load_model
from paceline.actors.engine.model_runner import TransformersRunner
from paceline.actors.engine.quantized_linear import can_quantize_linears
from paceline.actors.engine.target_engine import TargetEngine
from tests.engine.fakes import Network, make_submit
from tests.engine.models import noised
from tests.engine.ranks import BLOCK_SIZE, NUM_BLOCKS, Followers, device_of

VOCAB_SIZE = 250
"""No multiple of four: the last rank's part of the vocabulary is shorter than the others'."""

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 132,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _model(kind: type[PreTrainedModel], config: object) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return kind(config).to(torch.float32).eval()


MODELS = {
    "llama": lambda: _model(LlamaForCausalLM, LlamaConfig(**_COMMON, tie_word_embeddings=False)),
    "qwen2": lambda: _model(Qwen2ForCausalLM, Qwen2Config(**_COMMON, tie_word_embeddings=False)),
    "tied": lambda: _model(LlamaForCausalLM, LlamaConfig(**_COMMON, tie_word_embeddings=True)),
    "gemma3": lambda: _model(
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **_COMMON,
            head_dim=8,
            sliding_window=16,
            sliding_window_pattern=2,
            final_logit_softcapping=30.0,
            tie_word_embeddings=True,
        ),
    ),
}

heavy = pytest.mark.heavy


@pytest.fixture(scope="module")
def device() -> str:
    if torch.cuda.is_available():
        pytest.skip("torch divides models on the GPUs that it sees: tests/gpu")
    return "cpu"


@pytest.fixture(scope="module")
def followers(device: str) -> Iterator[Followers]:
    followers = Followers(device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield followers
    torch.set_num_threads(threads)
    followers.stop()


def undivided(folder: Path, device: str, dtype: torch.dtype = torch.float32) -> TransformersRunner:
    where = device_of(device, 0)
    return TransformersRunner(
        load_model(str(folder), dtype, where), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, device=where
    )


def completions(target: ModelRunner, draft: ModelRunner | None = None) -> dict[tuple[str, int], list[int]]:
    """What 16 requests at a time are answered, half of them greedy and half of them drawn with a seed."""
    network = Network(TargetEngine(target, TargetEngineConfig(max_num_seqs=16, max_num_batched_tokens=64)))
    network.target_vocab_size = target.vocab_size
    if draft is not None:
        network.join_runner(draft)
    for index in range(16):
        network.submit(
            make_submit(
                f"s{index}",
                [(7 * index + 11 * place) % VOCAB_SIZE for place in range(5 + 3 * index)],
                max_tokens=24,
                temperature=0.0 if index % 2 else 1.0,
                seed=index,
            )
        )
    network.run()
    assert len(network.gateway.finished) == 16
    if draft is not None:
        accepted = [flag for flags in network.gateway.accepted.values() for flag in flags]
        assert 0 < sum(accepted) < len(accepted), "some drafted tokens are kept and some are not"
    return network.gateway.completions


@pytest.mark.parametrize(
    ("family", "size"),
    [
        pytest.param("llama", 2, marks=heavy),
        ("qwen2", 2),
        ("tied", 2),
        pytest.param("gemma3", 2, marks=heavy),
        *(pytest.param(family, 4, marks=heavy) for family in MODELS),
    ],
)
def test_ids_are_those_of_the_undivided_model(
    family: str, size: int, followers: Followers, device: str, tmp_path: Path
) -> None:
    model = MODELS[family]()
    model.save_pretrained(tmp_path / "target")
    noised(model, 0.03).save_pretrained(tmp_path / "draft")
    whole = undivided(tmp_path / "target", device)
    draft = undivided(tmp_path / "draft", device)
    expected = completions(whole)
    with followers.lead(str(tmp_path / "target"), size) as (rank, others):
        assert completions(rank.runner) == expected
        assert completions(rank.runner, draft) == expected
        assert rank.runner.is_batch_invariant()
        for other in others:
            assert other["kv_cache_bytes"] == rank.runner.kv_cache_bytes == whole.kv_cache_bytes // size
        assert rank.group.times.num_steps >= 2 * 8, "with the draft, several tokens a step"
        assert rank.group.times.num_collectives > rank.group.times.num_steps


def test_a_rank_reads_its_share_of_the_weights(followers: Followers, tmp_path: Path) -> None:
    model = MODELS["tied"]()
    model.save_pretrained(tmp_path)
    whole = sum(parameter.numel() for parameter in model.parameters())
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    with followers.lead(str(tmp_path), 2, pack_weights=False, deterministic=False) as (rank, others):
        assert rank.num_weights == others[0]["weights"] == (whole - vectors) // 2 + vectors


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=heavy)])
def test_bfloat16_is_batch_invariant(size: int, followers: Followers, device: str, tmp_path: Path) -> None:
    MODELS["llama"]().save_pretrained(tmp_path)
    tokens = [(7 * place) % VOCAB_SIZE for place in range(40)]
    whole = undivided(tmp_path, device, torch.bfloat16).forward([SequenceSlice(tokens, 0, range(3), 40)])
    with followers.lead(str(tmp_path), size, dtype=torch.bfloat16) as (rank, _):
        assert rank.runner.is_batch_invariant()
        divided = rank.runner.forward([SequenceSlice(tokens, 0, range(3), 40)])
    # Partial sums are rounded to 8 bits before they are added.
    assert (divided - whole).abs().max() < 0.05 * whole.abs().max()


def test_int8_layers_are_divided_too(followers: Followers, device: str, tmp_path: Path) -> None:
    if not can_quantize_linears(torch.device(device)):
        pytest.skip("int8 layers are not available on this device")
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_hidden_layers": 1,
        "initializer_range": 0.03,
    }
    config = LlamaConfig(**(_COMMON | sizes), tie_word_embeddings=False)
    _model(LlamaForCausalLM, config).save_pretrained(tmp_path)
    batch = [SequenceSlice(list(range(30)), 0, range(2), 30)]
    whole = undivided(tmp_path, device).forward(batch)
    with followers.lead(str(tmp_path), 2, quantization="int8") as (rank, _):
        assert "QuantizedLinear" in repr(rank.model)
        quantized = rank.runner.forward(batch)
    error = (quantized - whole).abs().max() / whole.abs().max()
    assert 0.0 < error < 0.05


def test_a_message_longer_than_the_first_part(followers: Followers, device: str, tmp_path: Path) -> None:
    MODELS["llama"]().save_pretrained(tmp_path)
    # 200 blocks of 4 tokens each for 40 sequences of 64 tokens: 2,560 token ids and 160 blocks.
    batch = [
        SequenceSlice(
            [(index + place) % VOCAB_SIZE for place in range(64)], 0, range(4 * index, 4 * index + 4), 1
        )
        for index in range(40)
    ]
    expected = undivided(tmp_path, device).forward(batch)
    with followers.lead(str(tmp_path), 2) as (rank, _):
        assert torch.allclose(rank.runner.forward(batch), expected, atol=1e-4)


@heavy
@pytest.mark.weights
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "size"), [("smollm2-135m-instruct", 3), ("qwen2.5-coder-0.5b-instruct", 2)])
def test_real_weights(
    name: str, size: int, followers: Followers, device: str, model_folder: Callable[[str], Path]
) -> None:
    folder = model_folder(name)
    expected = completions(undivided(folder, device))
    draft = undivided(folder, device, torch.bfloat16)
    with followers.lead(str(folder), size, timeout_seconds=120.0) as (rank, _):
        assert completions(rank.runner) == expected
        assert completions(rank.runner, draft) == expected


@pytest.mark.parametrize(
    ("number", "steps"),
    [
        (signal.SIGKILL, 3),
        (signal.SIGSTOP, 0),
        pytest.param(signal.SIGKILL, 0, marks=heavy),
        pytest.param(signal.SIGSTOP, 3, marks=heavy),
    ],
)
def test_a_lost_rank_ends_the_step_in_time(
    number: signal.Signals, steps: int, device: str, tmp_path: Path
) -> None:
    """Also before the first step: nobody waits for ever."""
    MODELS["llama"]().save_pretrained(tmp_path)
    own = Followers(device)
    try:
        with own.lead(str(tmp_path), 2, timeout_seconds=2.0, lost=True) as (rank, _):
            _steps(rank.runner, steps)
            own.signal(1, number)
            began = time.monotonic()
            # The message of a first step may still fit into the buffers between the ranks.
            with pytest.raises(ShardGroupError, match="lost or hangs"):
                _steps(rank.runner, 2)
            assert time.monotonic() - began < 6.0
    finally:
        own.stop()


def test_a_lost_rank_is_no_fault_of_the_requests(device: str, tmp_path: Path) -> None:
    """The engine fails as a whole, so that its requests go elsewhere: they do not end with an error."""
    MODELS["llama"]().save_pretrained(tmp_path)
    own = Followers(device)
    try:
        with own.lead(str(tmp_path), 2, timeout_seconds=2.0, lost=True) as (rank, _):
            target = TargetEngine(rank.runner, TargetEngineConfig())
            target.submit("gateway", make_submit(prompt=[1, 2, 3]))
            target.step()
            own.signal(1, signal.SIGKILL)
            with pytest.raises(ShardGroupError):
                _engine_steps(target, 2)
            assert not target.take_outbox().gateways["gateway"].finished
    finally:
        own.stop()


def test_a_step_that_breaks_off_on_the_leader_ends_the_group(
    followers: Followers, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks are in the middle of it: another step would meet them there."""
    MODELS["llama"]().save_pretrained(tmp_path)
    with followers.lead(str(tmp_path), 2, timeout_seconds=2.0, lost=True) as (rank, _):
        with pytest.raises(ValueError, match="token_ids must not be empty"):
            rank.runner.forward([SequenceSlice([], 0, range(1), 0)])
        _steps(rank.runner, 1)
        monkeypatch.setattr(rank.model, "forward", _break_off)
        with pytest.raises(ShardGroupError, match="the leader's step broke off: RuntimeError: no memory"):
            _steps(rank.runner, 1)


def _engine_steps(target: TargetEngine, count: int) -> None:
    for _ in range(count):
        target.step()


def _break_off(*arguments: object, **options: object) -> None:
    raise RuntimeError("no memory")


def _steps(runner: ModelRunner, count: int) -> None:
    for _ in range(count):
        runner.forward([SequenceSlice([1, 2, 3], 0, range(1), 1)])
