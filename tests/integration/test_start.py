"""B72: the processes of a service begin where channels are open already; twenty times, and none hangs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from paceline.protos import generation_pb2 as proto
from tests.engine.models import reference_greedy, tiny_llama
from tests.integration.conftest import Service
from tests.integration.tiny_models import byte_tokenizer, deepened, save

NUM_STARTS = 20
START_SECONDS = 100.0
CHOICES = ["yes", "no"]


@pytest.mark.heavy
@pytest.mark.timeout(2400)
def test_twenty_starts(deploy: Callable[..., AbstractContextManager[Service]], tmp_path: Path) -> None:
    """Every replica is a new process, in which Ray talks over gRPC before a tokenizer or a model is read; for
    a constraint, gateway, target and draft then start processes of their own or compile beside their
    streams."""
    model = tiny_llama()
    pool = {"num_threads": 1, "kv_cache": {"num_blocks": 256}}
    configuration = {
        # Dearer than its draft, or there is nothing to gain from one.
        "model": save(deepened(model, 60), tmp_path / "target"),
        "served_model_name": "tiny",
        "dtype": "float32",
        "draft": {"model": save(model, tmp_path / "draft"), **pool},
        "target": pool,
        "speculation": {"num_speculative_tokens": 4, "ngram": {"enabled": False}},
        "gateway": {"graceful_shutdown_timeout_s": 2.0},
    }
    expected = reference_greedy(model, byte_tokenizer()("start")["input_ids"], 60)
    constraint = proto.Constraint(choice=proto.Constraint.Choices(values=CHOICES))
    pids: list[int] = []
    num_accepted = 0
    for _ in range(NUM_STARTS):
        with deploy(configuration, timeout_seconds=START_SECONDS) as service:
            answer = service.generate(prompt="start", temperature=0.0, max_tokens=60)
            assert list(answer.choices[0].token_ids) == expected
            num_accepted += answer.speculation.accepted_tokens
            chosen = service.generate(prompt="which?", constraint=constraint, max_tokens=16)
            assert chosen.choices[0].text in CHOICES
            for kind in ("gateway", "target", "draft"):
                (replica,) = service.replicas(kind)
                pids.append(replica["pid"])
    assert len(set(pids)) == 3 * NUM_STARTS
    assert num_accepted > 0
