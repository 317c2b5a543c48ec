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

from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.elementwise import AlignedActivation, shares_are_whole_vectors
from paceline.actors.engine.key_tiles import cut_at_key_ranges, key_ranges
from paceline.actors.engine.loading import load_model
from paceline.actors.engine.model_runner import TransformersRunner
from paceline.actors.engine.packed_linear import PackedLinear, can_pack_linears
from tests.engine.models import FAMILIES, VOCAB_SIZE

CPU = torch.device("cpu")
LENGTH = 290
"""Crosses several key ranges, and the window of 16 many times."""
BLOCK_SIZE = 16
NUM_SEQUENCES = 16
NUM_THREADS = [1, 2, 3]

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


def _differences(runner: TransformersRunner) -> dict[str, str]:
    """Ways to compute a sequence whose logits are not those of one whole chunk."""
    tokens = _tokens(LENGTH, 1)
    blocks = -(-LENGTH // BLOCK_SIZE)
    whole = _Sequence(tokens, range(blocks))
    _run(runner, [whole], lambda: LENGTH)
    found: dict[str, str] = {}
    for name, next_size in _ways().items():
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
@pytest.mark.parametrize("num_threads", NUM_THREADS)
def test_rows_do_not_depend_on_their_step(folder: Path, dtype: torch.dtype, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    assert _differences(_runner(folder, dtype)) == {}


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
