"""Models whose layers see the last 16 tokens only: rolling back must work after the window has moved on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.cases.exercise import exercised, until_exercised
from tests.cases.reference import Reference
from tests.cases.service import Service
from tests.cases.test_output_equality import greedy
from tests.engine.models import SLIDING_WINDOW, noised, tiny_gemma3, tiny_mistral
from tests.integration.tiny_models import save

pytestmark = pytest.mark.asyncio(loop_scope="package")

PROMPTS = (list(range(8)), [9] * 8, list(range(31, 31 + 3 * SLIDING_WINDOW)))


@pytest.mark.parametrize(
    ("build", "noise"), [(tiny_mistral, 0.05), (tiny_gemma3, 0.15)], ids=["mistral", "gemma3"]
)
@until_exercised
async def test_greedy_is_plain_generation(
    build: Callable[[], PreTrainedModel], noise: float, tmp_path: Path
) -> None:
    """B06. All layers have the window (mistral), or three of four (gemma3)."""
    model = build()
    reference = Reference(model)
    target = save(model, tmp_path / "target")
    for draft in (model, noised(model, noise)):
        async with Service(target, save(draft, tmp_path / "draft")) as service:
            answers = await service.stream_all(
                *(greedy(prompt, 64, bound) for prompt in PROMPTS for bound in (4, 8))
            )
            assert [answer.token_ids for answer in answers] == [
                reference.greedy(prompt, 64) for prompt in PROMPTS for _ in range(2)
            ]
            exercised(
                sum(answer.speculation.accepted_tokens for answer in answers) > 20, "tokens are accepted"
            )
            exercised(
                draft is model or sum(answer.num_rejected for answer in answers) > 5, "tokens are rejected"
            )
