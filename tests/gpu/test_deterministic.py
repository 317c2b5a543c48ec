"""Batch-invariant numerics on a GPU: a row's logits are the same to the bit whatever shares its step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.loading import load_model
from paceline.actors.engine.model_runner import TransformersRunner
from tests.engine.models import FAMILIES, VOCAB_SIZE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BLOCK_SIZE = 16
LENGTH = 200


def _tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()


def _logits_in_steps(runner: TransformersRunner, sizes: list[int], num_others: int) -> torch.Tensor:
    """Logits of one sequence, computed so many tokens at a time among others of various lengths."""
    tokens, blocks = _tokens(LENGTH, 0), -(-LENGTH // BLOCK_SIZE)
    rows, at = [], 0
    for step, size in enumerate(sizes):
        batch = [SequenceSlice(tokens[at : at + size], at, range(blocks), size)]
        for other in range(num_others):
            length = 1 + (7 * step + 13 * other) % 60
            table = range((other + 1) * blocks, (other + 2) * blocks)
            batch.append(SequenceSlice(_tokens(length, 100 * step + other), 0, table, 1))
        rows.append(runner.forward(batch)[:size].cpu())
        at += size
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_rows_do_not_depend_on_their_step(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    FAMILIES[family]().save_pretrained(tmp_path)
    device = torch.device("cuda")
    runner = TransformersRunner(
        load_model(str(tmp_path), dtype, device, deterministic=True),
        num_blocks=400,
        block_size=BLOCK_SIZE,
        device=device,
        deterministic=True,
    )
    assert runner.is_batch_invariant()
    whole = _logits_in_steps(runner, [LENGTH], 0)
    for sizes in ([1] * LENGTH, [5] * (LENGTH // 5), [64, 1, 1, 34, 100]):
        for num_others in (0, 15):
            assert torch.equal(_logits_in_steps(runner, sizes, num_others), whole), (sizes[:3], num_others)
