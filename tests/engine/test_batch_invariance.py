"""A row's logits are the same to the bit whatever shares its step.

Each test computes the same positions in several ways and compares bits, so a kernel that sums in another
order on another processor shows as a failure that names the way (and ``is_batch_invariant`` as a warning at
start-up).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma2ForCausalLM
from transformers.activations import ACT2FN

from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.config import NgramConfig, TargetEngineConfig
from paceline.actors.engine.elementwise import (
    AlignedActivation,
    align_activations,
    shares_are_whole_vectors,
)
from paceline.actors.engine.key_tiles import cut_at_key_ranges, key_ranges
from paceline.actors.engine.loading import load_model
from paceline.actors.engine.messages import Submit
from paceline.actors.engine.model_runner import TransformersRunner
from paceline.actors.engine.packed_linear import PackedLinear, can_pack_linears, single_row_is_alike
from paceline.actors.engine.row_tiles import tile_rows
from paceline.actors.engine.target_engine import TargetEngine
from tests.engine.fakes import Network, make_submit
from tests.engine.models import FAMILIES, VOCAB_SIZE

CPU = torch.device("cpu")
LENGTH = 200
"""Crosses several key ranges, and the window of 16 many times."""
BLOCK_SIZE = 16
NUM_SEQUENCES = 16

needs_bfloat16 = pytest.mark.skipif(
    not can_pack_linears(torch.bfloat16, CPU), reason="this processor has no bfloat16 kernels"
)
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param]().save_pretrained(path)
    return path


def _runner(folder: Path, dtype: torch.dtype, *, deterministic: bool = True) -> TransformersRunner:
    return TransformersRunner(
        load_model(str(folder), dtype, CPU, deterministic=deterministic),
        num_blocks=400,
        block_size=BLOCK_SIZE,
        device=CPU,
        deterministic=deterministic,
    )


class _Sequence:
    """A sequence that is computed bit by bit, and its logits so far."""

    def __init__(self, tokens: Sequence[int], table: Sequence[int]) -> None:
        self.tokens, self.table = list(tokens), list(table)
        self.rows: list[torch.Tensor] = []
        self.computed = 0

    def next_slice(self, size: int) -> SequenceSlice:
        chunk = self.tokens[self.computed : self.computed + size]
        return SequenceSlice(chunk, self.computed, self.table, len(chunk))

    def take(self, rows: torch.Tensor) -> None:
        self.rows.append(rows)
        self.computed += len(rows)

    @property
    def is_done(self) -> bool:
        return self.computed == len(self.tokens)

    @property
    def logits(self) -> torch.Tensor:
        return torch.cat(self.rows)


def _tokens(count: int, seed: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(count)]


def _run(runner: TransformersRunner, sequences: Sequence[_Sequence], next_size: Callable[[], int]) -> None:
    """Compute all in common steps, ``next_size()`` tokens of each at a time."""
    while running := [sequence for sequence in sequences if not sequence.is_done]:
        batch = [sequence.next_slice(next_size()) for sequence in running]
        logits = runner.forward(batch)
        for sequence, rows in zip(
            running, logits.split([len(piece.token_ids) for piece in batch]), strict=True
        ):
            sequence.take(rows)


def _first_difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    differing = (found != expected).any(-1).nonzero().ravel().tolist()
    return f"{len(differing)} of {len(expected)} rows differ, first at position {differing[0]}"


def _ways() -> dict[str, Callable[[], int]]:
    tails = random.Random(5)
    mixed = random.Random(6)
    return {
        "token by token": lambda: 1,
        "tails of 2 to 9": lambda: tails.randint(2, 9),
        "chunks of 7": lambda: 7,
        "chunks of 64": lambda: 64,
        "everything mixed": lambda: mixed.choice([1, 1, 1, 2, 4, 5, 9, 17, 33, 100]),
    }


def _differences(runner: TransformersRunner, *names: str) -> dict[str, str]:
    """Ways (of these names, else all) to compute a sequence whose logits are not those of one whole chunk."""
    tokens = _tokens(LENGTH, 1)
    blocks = -(-LENGTH // BLOCK_SIZE)
    whole = _Sequence(tokens, range(blocks))
    _run(runner, [whole], lambda: LENGTH)
    found: dict[str, str] = {}
    for name, next_size in _ways().items():
        if names and name not in names:
            continue
        order = np.random.default_rng(3).permutation(runner.num_blocks).tolist()
        alone = _Sequence(tokens, order[:blocks])
        _run(runner, [alone], next_size)
        if not torch.equal(alone.logits, whole.logits):
            found[f"{name}, alone"] = _first_difference(alone.logits, whole.logits)
        others = [
            _Sequence(_tokens(length, length), order[at * blocks :][:blocks])
            for at, length in enumerate(range(5, LENGTH, LENGTH // (NUM_SEQUENCES - 1)), 1)
        ]
        among = _Sequence(tokens, order[:blocks])
        _run(runner, [*others[:7], among, *others[7:]], next_size)
        if not torch.equal(among.logits, whole.logits):
            found[f"{name}, among {len(others)}"] = _first_difference(among.logits, whole.logits)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_their_step(folder: Path, dtype: torch.dtype) -> None:
    assert _differences(_runner(folder, dtype)) == {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_nor_do_they_with_other_numbers_of_threads(
    folder: Path, dtype: torch.dtype, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    assert _differences(_runner(folder, dtype), "everything mixed") == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_runner_finds_out_by_itself(folder: Path, dtype: torch.dtype) -> None:
    assert _runner(folder, dtype).is_batch_invariant()


def test_without_the_switch_rows_differ(folder: Path) -> None:
    """The comparison can fail: it does where nothing is done about it."""
    runner = TransformersRunner(
        load_model(str(folder), torch.float32, CPU, pack_weights=False, deterministic=False),
        num_blocks=400,
        block_size=BLOCK_SIZE,
        device=CPU,
        deterministic=False,
    )
    assert len(_differences(runner)) > 3
    assert not runner.is_batch_invariant()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_tiles_do_not_depend_on_their_step(folder: Path, dtype: torch.dtype) -> None:
    """The way of other devices, over this one's plain layers."""
    model = load_model(str(folder), dtype, CPU, pack_weights=False, deterministic=False)
    assert tile_rows(model) > 10
    align_activations(model)
    runner = TransformersRunner(model, num_blocks=400, block_size=BLOCK_SIZE, device=CPU)
    assert _differences(runner, "token by token", "everything mixed") == {}
    assert runner.is_batch_invariant()


def test_tiles_leave_the_results_as_they_are(folder: Path) -> None:
    plain, tiled = (
        load_model(str(folder), torch.float32, CPU, pack_weights=False, deterministic=False) for _ in range(2)
    )
    tile_rows(tiled)
    batch = [SequenceSlice(_tokens(150, 1), 0, range(10), 150), SequenceSlice(_tokens(3, 2), 0, [11], 1)]
    logits = [
        TransformersRunner(model, num_blocks=12, block_size=BLOCK_SIZE, device=CPU).forward(batch)
        for model in (plain, tiled)
    ]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=0.0)


def test_soft_cap_is_batch_invariant_too(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=64,
        attn_logit_softcapping=5.0,
        max_position_embeddings=512,
        initializer_range=0.25,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    runner = _runner(tmp_path, torch.float32)
    assert _differences(runner) == {}
    reference = TransformersRunner(
        load_model(str(tmp_path), torch.float32, CPU),
        num_blocks=40,
        block_size=BLOCK_SIZE,
        device=CPU,
        attention_backend="reference",
    )
    batch = [SequenceSlice(_tokens(200, 1), 0, range(13), 200)]
    torch.testing.assert_close(runner.forward(batch), reference.forward(batch), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(64, 256), (576, 192), (1536, 576), (4864, 896), (48, 40), (33, 7)]
)
def test_packed_linear_rows_do_not_depend_on_their_number(
    dtype: torch.dtype, bias: bool, num_threads: int, in_features: int, out_features: int
) -> None:
    """Inputs whose true outputs are zero: what is compared is the order of the sums and nothing else."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    half = in_features // 2
    order = torch.randperm(half)
    linear = torch.nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    rows = torch.randn(1, 300, in_features).to(dtype)
    with torch.inference_mode():
        linear.weight[:, half : 2 * half] = -linear.weight[:, :half][:, order]
        rows[..., half : 2 * half] = rows[..., :half][..., order]
        rows[..., 2 * half :] = 0
        if bias:
            linear.bias.zero_()
        packed = PackedLinear(linear, batch_invariant=True)
        expected = packed(rows)
        assert (expected != 0).any()
        torch.testing.assert_close(expected, linear(rows), atol=1e-4, rtol=0.0)
        for count in [*range(18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255]:
            for first in (0, 1, 45):
                found = packed(rows[:, first : first + count])
                assert torch.equal(found, expected[:, first : first + count]), (count, first)


def test_packed_float32_row_alone_differs_where_nothing_is_done() -> None:
    assert not single_row_is_alike(64, 64, torch.float32, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh", "gelu", "quick_gelu", "relu2"])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4, 7])
def test_activation_of_an_element_does_not_depend_on_their_number(
    dtype: torch.dtype, name: str, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    activation = AlignedActivation(ACT2FN[name])
    values = (3 * torch.randn(300, 1000)).to(dtype)
    expected = torch.cat([activation(row[None]) for row in values])
    torch.testing.assert_close(expected, ACT2FN[name](values))
    for rows in (0, 1, 2, 3, 5, 16, 17, 33, 64, 99, 128, 300):
        assert torch.equal(activation(values[:rows]), expected[:rows]), rows
    # Rows that do not lie end to end.
    assert torch.equal(activation(values[:40, 8:104]), expected[:40, 8:104])


def test_plain_activations_do_depend_on_their_number() -> None:
    torch.manual_seed(0)
    values = 3 * torch.randn(300, 1000)
    alone = torch.cat([torch.nn.functional.silu(row[None]) for row in values])
    assert not torch.equal(torch.nn.functional.silu(values), alone)


def test_shares_are_whole_vectors() -> None:
    assert shares_are_whole_vectors(0, 8)
    assert shares_are_whole_vectors(64 * 3, 8)
    assert not shares_are_whole_vectors(64 * 3 + 32, 1)
    assert shares_are_whole_vectors(64 * 1000, 1)
    assert shares_are_whole_vectors(64 * 1000, 2)
    assert not shares_are_whole_vectors(64 * 1001, 2)
    # 4 threads for a GELU and 2 for any other.
    assert not shares_are_whole_vectors(64 * 1002, 4)


@settings(max_examples=200, deadline=None)
@given(
    slices=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 700)), min_size=1, max_size=8),
    window=st.sampled_from([None, 1, 16, 64, 511, 512, 1000]),
)
def test_keys_of_a_row_depend_on_its_position_alone(
    slices: list[tuple[int, int]], window: int | None
) -> None:
    starts = np.array([start for start, _ in slices])
    counts = np.array([count for _, count in slices])
    pieces = cut_at_key_ranges(starts, counts, window)
    row = 0
    for index in range(len(pieces.starts)):
        piece = pieces.select(np.array([index]))
        first, count, sequence = int(piece.starts[0]), int(piece.num_queries[0]), int(piece.sequences[0])
        assert int(piece.first_rows[0]) == row
        assert first - starts[sequence] == row - (counts.cumsum() - counts)[sequence]
        row += count
        positions = np.arange(first, first + count)
        key_starts, num_keys = key_ranges(positions, window)
        assert (key_starts == piece.key_starts[0]).all()
        assert (num_keys == piece.num_keys[0]).all()
        assert (key_starts + num_keys > positions).all()
        assert (key_starts <= np.maximum(positions + 1 - (window or 10**9), 0)).all()
    assert row == counts.sum()


@pytest.mark.parametrize("window", [None, 16, 600])
def test_key_ranges_are_few_and_close(window: int | None) -> None:
    positions = np.arange(6000)
    _, count = key_ranges(positions, window)
    seen = positions + 1 if window is None else np.minimum(positions + 1, window)
    slack = 64 if window == 16 else 512
    assert (count <= np.maximum(128, 1.5 * (seen + (0 if window is None else slack)))).all()
    assert len(np.unique(count)) <= 20


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_token_and_one_row_of_logits(folder: Path, deterministic: bool) -> None:
    """Matrix products of one row have kernels of their own."""
    runner = _runner(folder, torch.float32, deterministic=deterministic)
    tokens = _tokens(9, 2)
    every = runner.forward([SequenceSlice(tokens, 0, [3], 9)])
    assert every.shape == (9, VOCAB_SIZE)
    last = runner.forward([SequenceSlice(tokens, 0, [4], 1)])
    single = runner.forward([SequenceSlice(tokens[-1:], 8, [4], 1)])
    first = runner.forward([SequenceSlice(tokens[:2], 0, [5], 1)])
    none = runner.forward([SequenceSlice(tokens[:1], 0, [6], 0)])
    assert last.shape == single.shape == first.shape == (1, VOCAB_SIZE)
    assert none.shape == (0, VOCAB_SIZE)
    for found, expected in ((last, every[8:]), (single, every[8:]), (first, every[1:2])):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0.0)
        assert torch.equal(found, expected) or not deterministic


def test_activations_are_replaced_where_the_loader_is_told(folder: Path) -> None:
    def count(deterministic: bool) -> int:
        model = load_model(str(folder), torch.float32, CPU, deterministic=deterministic)
        return sum(isinstance(module, AlignedActivation) for module in model.modules())

    assert count(False) == 0
    assert count(True) == len(load_model(str(folder), torch.float32, CPU).model.layers)


def test_check_needs_room_for_two_sequences(folder: Path) -> None:
    model = copy.deepcopy(FAMILIES["llama"]())
    with pytest.raises(ValueError, match="num_blocks"):
        TransformersRunner(model, num_blocks=1, block_size=4, device=CPU).is_batch_invariant()


# ---------------------------------------------------------------- real weights, through the engine

PROMPTS = (
    "The three largest planets of the solar system are",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time there was a small red boat. The small red boat",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "To make bread you need flour, water, salt and yeast. First, mix the flour, water, salt and yeast. Then",
    "Dear customer, thank you for your letter of the fifth of May. We are sorry to hear that",
)
COMPLETION = 64


def _requests(folder: Path) -> list[Submit]:
    """Each prompt greedily and at temperature 1, of unequal lengths."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for index, text in enumerate(PROMPTS):
        prompt = tokenizer(text).input_ids * (1 + 5 * (index % 3))
        for temperature in (0.0, 1.0):
            name = f"{index} at T={temperature:g}"
            found.append(
                make_submit(name, prompt, max_tokens=COMPLETION, temperature=temperature, seed=index + 11)
            )
    return found


def _completions(
    runner: TransformersRunner, groups: Sequence[Sequence[Submit]], *, draft: TransformersRunner | None = None
) -> tuple[dict[str, list[int]], int]:
    """Completions by request, each group submitted together, and how many draft tokens were accepted."""
    completions: dict[str, list[int]] = {}
    accepted = 0
    for group in groups:
        speculation = 0 if draft is None else 4
        config = TargetEngineConfig(
            max_num_batched_tokens=96,
            num_speculative_tokens=speculation,
            ngram=NgramConfig(enabled=draft is not None),
            wait_for_drafts=False,
        )
        network = Network(TargetEngine(runner, config))
        network.target_vocab_size = runner.vocab_size
        if draft is not None:
            network.join_runner(draft, max_model_len=draft.max_model_len)
        for request in group:
            network.submit(request)
        network.run()
        for (name, _), tokens in network.gateway.completions.items():
            completions[name] = tokens
        accepted += sum(sum(flags) for flags in network.gateway.accepted.values())
    return completions, accepted


@pytest.mark.weights
@pytest.mark.heavy
@needs_bfloat16
def test_real_tokens_do_not_depend_on_neighbours_or_tails(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("smollm2-135m-instruct")
    runner = _runner(folder, torch.bfloat16)
    draft = _runner(folder, torch.bfloat16, deterministic=False)
    assert runner.is_batch_invariant()
    requests = _requests(folder)
    solo, _ = _completions(runner, [[request] for request in requests])
    assert all(len(tokens) == COMPLETION for tokens in solo.values())
    fillers = [
        make_submit(f"filler {index}", _tokens(40 + 13 * index, index, 1000), max_tokens=70, temperature=1.0)
        for index in range(16 - len(requests))
    ]
    together, _ = _completions(runner, [[*fillers[:2], *requests, *fillers[2:]]])
    drafted, accepted_alone = _completions(runner, [[request] for request in requests], draft=draft)
    crowded, accepted_among = _completions(runner, [[*requests, *fillers]], draft=draft)
    assert accepted_alone > 100
    assert accepted_among > 100
    for way, found in (("together", together), ("drafted", drafted), ("drafted, together", crowded)):
        different = [name for name, tokens in solo.items() if found[name] != tokens]
        assert different == [], way
