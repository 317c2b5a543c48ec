"""Which drafts a service takes: the same token map, whatever its padding, and no other."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from paceline.cluster.application import build_app
from paceline.cluster.cli_status import collect_status
from paceline.cluster.config import load_config
from paceline.cluster.runtime import Runtime, RuntimeStartError, free_port
from paceline.cluster.service_start import APPLICATION_NAME, ROUTE_PREFIX
from tests.engine.models import VOCAB_SIZE, noised, reference_greedy, tiny_llama
from tests.integration.conftest import Service
from tests.integration.tiny_models import padded, save

PROMPTS = [[7, 3, 9], list(range(40, 90)), [1]]
REFUSAL_TIMEOUT_SECONDS = 120.0


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama()


def test_command_line_refuses_another_vocabulary_before_it_starts_anything(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    target = save(model, tmp_path / "target")
    draft = save(model, tmp_path / "draft", reverse_vocabulary=True)
    command = [sys.executable, "-m", "paceline.cluster.cli", "serve"]
    command += ["--model", target, "--draft", draft, "--port", str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    told = " ".join(done.stderr.split())
    assert "their tokenizers map tokens to different ids" in told
    assert "use a draft of the target's own family" in told
    assert "Traceback" not in told
    assert "starting Ray" not in told
    assert done.stdout == ""


def test_application_with_another_vocabulary_fails_and_says_why(runtime: Runtime) -> None:
    """Deployed without the command line's look at the models: the pools find out when they meet."""
    config = load_config(
        {
            "model": "emulated://rider?vocab_size=512",
            "target": {"num_threads": 1},
            "draft": {"model": "emulated://stranger?vocab_size=500", "num_threads": 1},
        }
    )
    started = time.monotonic()
    runtime.deploy(build_app(config), name=APPLICATION_NAME, route_prefix=ROUTE_PREFIX)
    try:
        with pytest.raises(RuntimeStartError) as raised:
            runtime.wait_until_ready(
                APPLICATION_NAME,
                on_progress=lambda pools: None,
                timeout_seconds=REFUSAL_TIMEOUT_SECONDS,
            )
        assert time.monotonic() - started < REFUSAL_TIMEOUT_SECONDS
        told = str(raised.value)
        assert "the application did not start: draft: " in told
        assert "'emulated://stranger?vocab_size=500' cannot propose for target model 'rider'" in told
        assert "every target refuses this draft" in told
        assert "their tokenizers map tokens to different ids" in told
        assert "\n" not in told
        status = collect_status()
        assert status["status"] == "DEPLOY_FAILED"
        assert "their tokenizers map tokens to different ids" in status["pools"]["draft"]["message"]
    finally:
        runtime.remove(APPLICATION_NAME)


def test_same_vocabulary_with_other_padding_works(
    deploy: Callable[..., AbstractContextManager[Service]], model: PreTrainedModel, tmp_path: Path
) -> None:
    content = {
        "model": save(padded(model, VOCAB_SIZE + 1), tmp_path / "target"),
        "dtype": "float32",
        "target": {"num_threads": 1, "kv_cache": {"num_blocks": 64}},
        "draft": {
            "model": save(padded(noised(model, 0.05), VOCAB_SIZE + 64), tmp_path / "draft"),
            "num_threads": 1,
            "kv_cache": {"num_blocks": 64},
        },
        "speculation": {"num_speculative_tokens": 4, "ngram": {"enabled": False}},
    }
    with deploy(content) as service:
        answers = [service.generate(token_ids=prompt, temperature=0.0, max_tokens=48) for prompt in PROMPTS]
        sampled = [
            list(
                service.generate(prompt="a", seed=1, max_tokens=48, num_speculative_tokens=count)
                .choices[0]
                .token_ids
            )
            for count in (0, 4)
        ]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        # Of the model without padding, whose rows would win nearly every time.
        assert list(answer.choices[0].token_ids) == reference_greedy(model, prompt, 48)
    drafted = sum(answer.speculation.draft_tokens for answer in answers)
    accepted = sum(answer.speculation.accepted_tokens for answer in answers)
    assert 0 < accepted < drafted
    assert sampled[0] == sampled[1]
    assert max(sampled[0]) < VOCAB_SIZE
