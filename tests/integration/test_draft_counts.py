"""The same seeds give the same tokens: with any number of drafts, any tail length, alone or in company."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from tests.integration.conftest import Service, wait_until

MODEL = "emulated://peloton?vocab_size=512&base_ms=8&support=6&max_model_len=1024"
DRAFT_MODEL = MODEL.replace("base_ms=8", "base_ms=1") + "&acceptance=0.5"
SEEDS = range(17)
MAX_TOKENS = 48


def sample(service: Service, seed: int, num_speculative_tokens: int) -> tuple[list[int], int]:
    """Token ids at temperature 1, and how many of them a draft had foretold."""
    answer = service.generate(
        prompt="team",
        temperature=1.0,
        seed=seed,
        max_tokens=MAX_TOKENS,
        num_speculative_tokens=num_speculative_tokens,
    )
    return list(answer.choices[0].token_ids), answer.speculation.accepted_tokens


def test_ids_depend_on_the_seed_alone(deploy: Callable[..., AbstractContextManager[Service]]) -> None:
    expected: list[list[int]] = []
    for num_drafts in (0, 1, 3):
        content: dict[str, object] = {
            "model": MODEL,
            "target": {"num_threads": 1},
            # Fixed, so that drafts are asked however busy the machine is. A request may ask for less.
            "speculation": {"num_speculative_tokens": 8, "ngram": {"enabled": False}},
        }
        if num_drafts:
            content["draft"] = {"model": DRAFT_MODEL, "num_replicas": num_drafts, "num_threads": 1}
        with deploy(content) as service:

            def attached(service: Service = service, expected: int = num_drafts) -> bool:
                return len(service.replicas("target")[0]["drafts"]) == expected

            wait_until(attached, timeout_seconds=30, what=f"{num_drafts} drafts are attached")
            for count in (0, 1, 4, 8):
                alone = sample(service, SEEDS[0], count)[0]
                with ThreadPoolExecutor(len(SEEDS)) as pool:
                    answers = list(
                        pool.map(
                            lambda seed, stub=service, count=count: sample(stub, seed, count),
                            SEEDS,
                        )
                    )
                found = [token_ids for token_ids, _ in answers]
                expected = expected or found
                assert found == expected, f"{num_drafts} drafts, {count} speculative tokens"
                assert alone == expected[0], f"{num_drafts} drafts, {count} speculative tokens"
                assert (sum(accepted for _, accepted in answers) > 0) == (num_drafts > 0 and count > 0)
            if num_drafts:
                drafts = service.replicas("draft")
                assert len(drafts) == num_drafts
                assert all(draft["engine"]["num_drafted_tokens_total"] for draft in drafts)
    assert len({tuple(token_ids) for token_ids in expected}) == len(SEEDS)
