"""The same seeds with 0, 1 and 3 drafts give the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from tests.integration.conftest import Service, wait_until

MODEL = "emulated://peloton?vocab_size=512&base_ms=25&support=6&max_model_len=1024"


def test_ids_do_not_depend_on_the_number_of_drafts(
    deploy: Callable[..., AbstractContextManager[Service]],
) -> None:
    found = {}
    for num_drafts in (0, 1, 3):
        content: dict[str, object] = {
            "model": MODEL,
            "target": {"num_threads": 1},
            "speculation": {"ngram": {"enabled": False}},
        }
        if num_drafts:
            draft = {"model": MODEL.replace("base_ms=25", "base_ms=3") + "&acceptance=0.5"}
            content["draft"] = {**draft, "num_replicas": num_drafts, "num_threads": 1}
        with deploy(content) as service:

            def attached(service: Service = service, expected: int = num_drafts) -> bool:
                return len(service.replicas("target")[0]["drafts"]) == expected

            wait_until(attached, timeout_seconds=30, what=f"{num_drafts} drafts are attached")
            with ThreadPoolExecutor(8) as pool:
                answers = list(
                    pool.map(
                        lambda seed, stub=service: stub.generate(prompt="team", max_tokens=64, seed=seed),
                        range(8),
                    )
                )
            found[num_drafts] = [list(answer.choices[0].token_ids) for answer in answers]
            accepted = sum(answer.speculation.accepted_tokens for answer in answers)
            assert (accepted > 0) == (num_drafts > 0)
            if num_drafts:
                busy = [
                    draft
                    for draft in service.replicas("draft")
                    if draft["engine"]["num_drafted_tokens_total"]
                ]
                assert len(busy) == num_drafts
    assert found[0] == found[1] == found[3]
