"""Real weights in float32: speculation, company and the number of drafts change no token.

Greedy output is compared with plain ``transformers``, sampled output with that of a service without drafts.
A light part runs with every ``make test``, the whole with ``make test-all``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.prompts import BenchPrompt, spec_bench
from paceline.protos import generation_pb2 as proto
from tests.engine.models import noised
from tests.integration.conftest import Service, wait_until
from tests.integration.oracle import Oracle
from tests.requests import request

MODEL = "smollm2-135m-instruct"
NUM_CATEGORIES = 13
CALL_TIMEOUT_SECONDS = 900.0

MOST_SPECULATIVE_TOKENS = 8

NOISE = 0.07
"""Of the noised draft: it then agrees in about seven of ten positions."""

pytestmark = pytest.mark.weights

Deploy = Callable[..., AbstractContextManager[Service]]


@pytest.fixture(scope="session")
def oracle(model_folder: Callable[[str], Path]) -> Oracle:
    return Oracle(model_folder(MODEL))


@pytest.fixture(scope="session")
def noised_draft(
    oracle: Oracle, model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Folder of a draft that is right often and wrong often."""
    folder = tmp_path_factory.mktemp("noised")
    noised(oracle.model, NOISE).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder(MODEL)).save_pretrained(folder)
    return str(folder)


def configuration(draft: str | None, *, num_drafts: int = 1, ngram: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {
        "model": MODEL,
        "dtype": "float32",
        "target": {"num_threads": 1, "kv_cache": {"memory_gb": 1.5}},
        # Fixed: drafts as dear as the target would be asked for nothing.
        "speculation": {"num_speculative_tokens": MOST_SPECULATIVE_TOKENS, "ngram": {"enabled": ngram}},
    }
    if draft is not None:
        content["draft"] = {
            "model": draft,
            "num_replicas": num_drafts,
            "num_threads": 1,
            "kv_cache": {"memory_gb": 1.5},
        }
    return content


def wait_for_drafts(service: Service, num_drafts: int) -> None:
    wait_until(
        lambda: [len(target["drafts"]) for target in service.replicas("target")] == [num_drafts],
        timeout_seconds=60,
        what=f"{num_drafts} drafts are attached",
    )


def ask(service: Service, text: str, **options: Any) -> proto.GenerateResponse:
    """One request whose prompt is the first turn of a conversation."""
    message = request(**options)
    message.conversation.messages.add(role="user", content=text)
    response: proto.GenerateResponse = service.stub.Generate(message, timeout=CALL_TIMEOUT_SECONDS)
    return response


# ---------------------------------------------------------------------------------------------- greedy


@dataclass
class Comparison:
    """Answers of one run against the reference's."""

    num_equal: int = 0
    near_ties: int = 0
    """Prompts whose first difference is at a near tie."""
    drafted: int = 0
    accepted: int = 0
    num_tokens: int = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


def compare_greedy(
    service: Service,
    oracle: Oracle,
    prompts: Sequence[BenchPrompt],
    max_tokens: int,
    *,
    at_a_time: int,
    num_speculative_tokens: int | None,
) -> Comparison:
    references = [oracle.greedy(prompt.text, max_tokens) for prompt in prompts]

    def run(prompt: BenchPrompt) -> proto.GenerateResponse:
        return ask(
            service,
            prompt.text,
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=False,
            num_speculative_tokens=num_speculative_tokens,
        )

    started = time.monotonic()
    with ThreadPoolExecutor(at_a_time) as pool:
        answers = list(pool.map(run, prompts))
    seconds = time.monotonic() - started
    result = Comparison()
    differing = []
    for prompt, reference, answer in zip(prompts, references, answers, strict=True):
        assert answer.usage.prompt_tokens == reference.num_prompt_tokens
        found = list(answer.choices[0].token_ids)
        result.num_tokens += len(found)
        result.drafted += answer.speculation.draft_tokens
        result.accepted += answer.speculation.accepted_tokens
        index = reference.first_difference(found)
        if index is None:
            result.num_equal += 1
        elif reference.is_near_tie(index):
            result.near_ties += 1
        else:
            gap = reference.gaps[index] if index < len(reference.gaps) else None
            differing.append((prompt.category, prompt.question_id, index, gap))
    sys.stdout.write(
        f"{at_a_time} at a time, {num_speculative_tokens} speculative tokens: {result.num_equal} of "
        f"{len(prompts)} equal, {result.near_ties} near ties, acceptance {result.acceptance:.2f}, "
        f"{result.num_tokens} tokens in {seconds:.0f} s\n"
    )
    assert not differing, f"(category, question, token, gap of the reference's two best logits): {differing}"
    return result


class TestNoisedDraft:
    """Some tokens are accepted, some rejected."""

    @pytest.fixture(scope="class")
    def noised_service(
        self, deploy: Deploy, model_folder: Callable[[str], Path], noised_draft: str
    ) -> Iterator[Service]:
        model_folder(MODEL)
        with deploy(configuration(noised_draft)) as service:
            wait_for_drafts(service, 1)
            yield service

    @pytest.mark.parametrize("num_speculative_tokens", [0, 4])
    @pytest.mark.parametrize("at_a_time", [1, 4])
    def test_prompts(
        self, noised_service: Service, oracle: Oracle, at_a_time: int, num_speculative_tokens: int
    ) -> None:
        result = compare_greedy(
            noised_service,
            oracle,
            spec_bench(4),
            24,
            at_a_time=at_a_time,
            num_speculative_tokens=num_speculative_tokens,
        )
        assert (0 < result.accepted < result.drafted) == (num_speculative_tokens > 0)

    @pytest.mark.heavy
    @pytest.mark.timeout(3600)
    @pytest.mark.parametrize("num_speculative_tokens", [0, 4])
    @pytest.mark.parametrize("at_a_time", [1, 16])
    def test_spec_bench(
        self, noised_service: Service, oracle: Oracle, at_a_time: int, num_speculative_tokens: int
    ) -> None:
        prompts = spec_bench(40)
        assert len({prompt.category for prompt in prompts}) == NUM_CATEGORIES
        result = compare_greedy(
            noised_service,
            oracle,
            prompts,
            64,
            at_a_time=at_a_time,
            num_speculative_tokens=num_speculative_tokens,
        )
        if num_speculative_tokens:
            assert 0.4 < result.acceptance < 0.8
        else:
            assert result.drafted == 0


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_greedy_equals_transformers_with_a_draft_of_its_own_weights(deploy: Deploy, oracle: Oracle) -> None:
    """None of its tokens is rejected, so that the bonus position matters most. Prompt lookup takes part."""
    with deploy(configuration(MODEL, ngram=True)) as service:
        wait_for_drafts(service, 1)
        for at_a_time, count in ((1, 4), (16, 4), (16, None)):
            result = compare_greedy(
                service, oracle, spec_bench(40), 64, at_a_time=at_a_time, num_speculative_tokens=count
            )
            # Lookups are wrong more often.
            assert 0.3 < result.acceptance < 1.0


# --------------------------------------------------------------------------------------------- sampled

SEEDS = range(17)
NUM_SAMPLED_TOKENS = 32


def sample(service: Service, seed: int, num_speculative_tokens: int) -> tuple[list[int], int]:
    """Ids at temperature 1, and how many of them drafts foretold. Each seed has a prompt of its own."""
    answer = ask(
        service,
        f"Write one sentence about the number {seed}.",
        temperature=1.0,
        seed=seed,
        max_tokens=NUM_SAMPLED_TOKENS,
        num_speculative_tokens=num_speculative_tokens,
    )
    return list(answer.choices[0].token_ids), answer.speculation.accepted_tokens


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_seeded_ids_do_not_depend_on_drafts_lengths_or_company(
    deploy: Deploy, model_folder: Callable[[str], Path], noised_draft: str
) -> None:
    model_folder(MODEL)
    reference: list[list[int]] = []
    for num_drafts in (0, 1, 3):
        draft = noised_draft if num_drafts else None
        with deploy(configuration(draft, num_drafts=max(num_drafts, 1), ngram=not num_drafts)) as service:
            wait_for_drafts(service, num_drafts)
            num_accepted = 0
            for count in (0, 1, 4, 8):
                alone = [sample(service, seed, count) for seed in SEEDS[:2]]
                with ThreadPoolExecutor(len(SEEDS)) as pool:
                    together = list(
                        pool.map(lambda seed, stub=service, count=count: sample(stub, seed, count), SEEDS)
                    )
                found = [token_ids for token_ids, _ in together]
                reference = reference or found
                assert found == reference, (num_drafts, count)
                assert [token_ids for token_ids, _ in alone] == reference[: len(alone)], (num_drafts, count)
                accepted = sum(accepted for _, accepted in alone + together)
                assert accepted == 0 or count > 0
                num_accepted += accepted
            sys.stdout.write(f"{num_drafts} drafts: {num_accepted} accepted\n")
            if num_drafts:
                drafts = service.replicas("draft")
                assert all(status["engine"]["num_drafted_tokens_total"] for status in drafts)
                assert len(drafts) == num_drafts
                assert num_accepted > 0
            # The same prompt with another seed.
            other = ask(
                service,
                f"Write one sentence about the number {SEEDS[0]}.",
                temperature=1.0,
                seed=99,
                max_tokens=NUM_SAMPLED_TOKENS,
            )
            assert list(other.choices[0].token_ids) != reference[0]
