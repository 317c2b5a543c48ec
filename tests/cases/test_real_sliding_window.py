"""A real model with a window: prompts that end before its edge, at it and past it, and tails across it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cases.exercise import exercised, until_exercised
from tests.cases.reference import Reference
from tests.cases.service import Service
from tests.cases.test_output_equality import greedy
from tests.engine.models import noised

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.weights, pytest.mark.heavy]

MODEL = "gemma-3-270m"
NOISE = 0.1
NUM_TOKENS = 64
TEXT = (
    "The pace line rolled out of the village before the sun was up. Each rider took a turn at the front, "
    "held it while the road rose, and drifted back along the others to the end of the row, out of the wind. "
)


@until_exercised
async def test_greedy_is_plain_generation(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """B06 on real weights: float32, three kinds of length, a draft of the same weights and a noised one."""
    folder = model_folder(MODEL)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    window = model.config.sliding_window
    tokenizer = AutoTokenizer.from_pretrained(folder)
    token_ids = tokenizer(TEXT * 20)["input_ids"]
    lengths = [40, window - NUM_TOKENS // 2, window - 1, window, window + 150]
    assert len(token_ids) >= max(lengths)
    reference = Reference(model)
    prompts = reference.clear([token_ids[:length] for length in lengths], NUM_TOKENS)
    assert len(prompts) >= 4
    noised(model, NOISE).save_pretrained(tmp_path / "noised")
    tokenizer.save_pretrained(tmp_path / "noised")
    for draft in (str(folder), str(tmp_path / "noised")):
        async with Service(str(folder), draft) as service:
            answers = await service.stream_all(
                *(greedy(prompt, NUM_TOKENS, bound) for prompt in prompts for bound in (0, 1, 4, 8))
            )
        assert [answer.token_ids for answer in answers] == [
            reference.greedy(prompt, NUM_TOKENS) for prompt in prompts for _ in range(4)
        ]
        exercised(sum(answer.speculation.accepted_tokens for answer in answers) > 100, "tokens are accepted")
        exercised(
            draft == str(folder) or sum(answer.num_rejected for answer in answers) > 20, "tokens are rejected"
        )
