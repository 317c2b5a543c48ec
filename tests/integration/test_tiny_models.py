"""Real (tiny, float32) models through the whole service, against plain ``transformers``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from paceline.actors.engine.errors import IncompatibleDraftError
from paceline.cluster.config import load_config
from paceline.cluster.service_start import check_models
from tests.engine.models import noised, reference_greedy, tiny_llama
from tests.integration.conftest import Service
from tests.integration.tiny_models import deepened, save

PROMPTS = [[7, 3, 9], [200, 201, 202, 203] * 5, list(range(40, 90)), [1]]


@pytest.fixture(scope="module")
def draft_model() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture(scope="module")
def model(draft_model: PreTrainedModel) -> PreTrainedModel:
    return deepened(draft_model, 60)


@pytest.fixture(scope="module")
def service(
    deploy: Callable[..., AbstractContextManager[Service]],
    model: PreTrainedModel,
    draft_model: PreTrainedModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("models")
    with deploy(
        {
            "model": save(model, folder / "target"),
            "served_model_name": "tiny",
            "dtype": "float32",
            "draft": {
                "model": save(noised(draft_model, 0.05), folder / "draft"),
                "num_threads": 1,
                "kv_cache": {"num_blocks": 256},
            },
            "target": {"num_threads": 1, "kv_cache": {"num_blocks": 256}},
            "speculation": {"ngram": {"enabled": False}},
        }
    ) as running:
        yield running


@pytest.mark.parametrize("num_speculative_tokens", [None, 0, 4])
def test_greedy_equals_plain_transformers(
    service: Service, draft_model: PreTrainedModel, num_speculative_tokens: int | None
) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(
            pool.map(
                lambda prompt: service.generate(
                    token_ids=prompt,
                    temperature=0.0,
                    max_tokens=48,
                    num_speculative_tokens=num_speculative_tokens,
                ),
                PROMPTS,
            )
        )
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        # The layers that make the target slower add exactly nothing.
        assert list(answer.choices[0].token_ids) == reference_greedy(draft_model, prompt, 48)
    if num_speculative_tokens != 0:
        drafted = sum(answer.speculation.draft_tokens for answer in answers)
        accepted = sum(answer.speculation.accepted_tokens for answer in answers)
        assert 0 < accepted < drafted


def test_prompt_fills_the_model_to_its_last_position(service: Service) -> None:
    info_length = 512
    answer = service.generate(token_ids=[5] * 300, temperature=0.0, max_tokens=info_length - 300)
    assert answer.usage.completion_tokens == info_length - 300


def test_text_is_what_the_tokenizer_says(service: Service) -> None:
    chunks = list(service.stream(prompt="abc", seed=4, max_tokens=64))
    whole = service.generate(prompt="abc", seed=4, max_tokens=64)
    assert "".join(chunk.text for chunk in chunks) == whole.choices[0].text
    assert whole.usage.prompt_tokens == 3


def test_draft_with_another_vocabulary_is_refused_before_anything_starts(
    draft_model: PreTrainedModel, tmp_path: Path
) -> None:
    model = draft_model
    target = save(model, tmp_path / "target")
    draft = save(model, tmp_path / "draft", reverse_vocabulary=True)
    with pytest.raises(IncompatibleDraftError, match="tokenizers"):
        check_models(load_config({"model": target, "draft": draft}))
    check_models(load_config({"model": target, "draft": save(model, tmp_path / "same")}))
