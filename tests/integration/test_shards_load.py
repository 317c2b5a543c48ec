"""Target and draft both divided among ranks, under load: nothing stalls, and the tokens are the model's."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.engine.models import noised, reference_greedy, tiny_llama
from tests.integration.conftest import Service
from tests.integration.tiny_models import save

CLIENTS = [2, 8]
"""At a time, one number after the other."""
REQUESTS = 50
MAX_TOKENS = 24
LONGEST_STALL_SECONDS = 30.0


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_many_requests_and_no_stall(
    deploy: Callable[..., AbstractContextManager[Service]], tmp_path: Path
) -> None:
    """B56."""
    model = tiny_llama()
    ranks = {
        "tensor_parallel_size": 2,
        "num_threads": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_cache": {"num_blocks": 512},
    }
    configuration = {
        "model": save(model, tmp_path / "target"),
        "served_model_name": "tiny",
        "dtype": "float32",
        "draft": {"model": save(noised(model, 0.05), tmp_path / "draft"), **ranks},
        "target": ranks,
        # Fixed, lest on busy processors the draft be found not worth it.
        "speculation": {"num_speculative_tokens": 3, "ngram": {"enabled": False}},
    }
    prompts = [[(client * 31 + place * 7) % 256 for place in range(20)] for client in range(max(CLIENTS))]
    references = [reference_greedy(model, prompt, MAX_TOKENS) for prompt in prompts]
    with deploy(configuration) as service:

        def run(client: int) -> float:
            """Fifty requests, one after the other; returns the longest wait for a chunk."""
            longest = 0.0
            for _ in range(REQUESTS):
                tokens: list[int] = []
                last = time.monotonic()
                for chunk in service.stream(
                    token_ids=prompts[client], temperature=0.0, max_tokens=MAX_TOKENS
                ):
                    tokens.extend(chunk.token_ids)
                    now = time.monotonic()
                    longest, last = max(longest, now - last), now
                assert tokens == references[client]
            return longest

        for num_clients in CLIENTS:
            with ThreadPoolExecutor(num_clients) as pool:
                longest = list(pool.map(run, range(num_clients)))
            assert max(longest) < LONGEST_STALL_SECONDS
        (target,) = service.replicas("target")
        (draft,) = service.replicas("draft")
        for replica in (target, draft):
            assert [shard["stage"] for shard in replica["shards"]] == ["following"]
            assert replica["kv_cache"]["num_ranks"] == 2
        assert 0 < target["engine"]["num_accepted_tokens_total"] < target["engine"]["num_draft_tokens_total"]
