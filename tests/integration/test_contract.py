"""The public contract over real gRPC, on emulated models: one target, one draft."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from paceline.protos import generation_pb2 as proto
from tests.integration.conftest import Service, wait_until
from tests.requests import request

MODEL = "emulated://cyclist?vocab_size=512&base_ms=20&support=6&max_model_len=1024"
MAX_ONGOING = 24


@pytest.fixture(scope="module")
def service(deploy: Callable[..., AbstractContextManager[Service]]) -> Iterator[Service]:
    with deploy(
        {
            "model": MODEL,
            "draft": {"model": MODEL.replace("base_ms=20", "base_ms=3") + "&acceptance=0.7"},
            "gateway": {"max_ongoing_requests": MAX_ONGOING, "max_queued_requests": 0},
            "target": {"kv_cache": {"num_blocks": 512}, "num_threads": 1},
        }
    ) as running:
        yield running


def used_blocks(service: Service) -> int:
    (target,) = service.replicas("target")
    return int(target["engine"]["total_blocks"] - target["engine"]["free_blocks"])


def wait_for_idle(service: Service) -> None:
    def idle() -> bool:
        (target,) = service.replicas("target")
        return (
            target["engine"]["num_running"] == target["engine"]["num_waiting"] == 0
            and used_blocks(service) == 0
        )

    wait_until(idle, timeout_seconds=10, what="every block is free again")


def test_info_and_reflection(service: Service) -> None:
    info = service.stub.GetModelInfo(proto.GetModelInfoRequest(), timeout=10)
    assert (info.model, info.vocab_size, info.max_model_len) == ("cyclist", 512, 1024)
    assert info.draft_model.startswith("emulated://cyclist")
    assert info.num_targets == 1
    assert not info.has_chat_template
    with grpc.insecure_channel(service.address) as channel:
        names = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert "paceline.v1.GenerationService" in list(names)


def test_tokenize(service: Service) -> None:
    answer = service.stub.Tokenize(proto.TokenizeRequest(prompt="aé"), timeout=10)
    assert list(answer.token_ids) == [0x61, 0xC3, 0xA9]


def test_unary_and_stream_agree_and_a_seed_replays(service: Service) -> None:
    first = service.generate(prompt="pull", max_tokens=40)
    (choice,) = first.choices
    assert len(choice.token_ids) == 40
    assert choice.finish_reason == proto.FINISH_REASON_LENGTH
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (4, 40)
    assert first.speculation.draft_tokens > 0
    assert 0 < first.speculation.accepted_tokens <= first.speculation.draft_tokens
    assert first.speculation.mean_acceptance_length == pytest.approx(
        1 + first.speculation.accepted_tokens / first.speculation.rounds
    )
    chunks = list(service.stream(prompt="pull", max_tokens=40, seed=first.seed))
    assert [i for chunk in chunks for i in chunk.token_ids] == list(choice.token_ids)
    assert "".join(chunk.text for chunk in chunks) == choice.text
    assert all(len(chunk.accepted) == len(chunk.token_ids) for chunk in chunks)
    assert chunks[-1].seed == first.seed
    assert chunks[-1].usage.completion_tokens == 40
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [0] * (len(chunks) - 1)
    accepted = sum(sum(chunk.accepted) for chunk in chunks)
    assert accepted == chunks[-1].speculation.accepted_tokens
    other = service.generate(prompt="pull", max_tokens=40, seed=first.seed ^ 1)
    assert list(other.choices[0].token_ids) != list(choice.token_ids)


@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 4, 8])
def test_ids_do_not_depend_on_speculation_or_company(service: Service, num_speculative_tokens: int) -> None:
    def run(seed: int, **options: Any) -> list[int]:
        answer = service.generate(prompt="echelon", max_tokens=32, seed=seed, **options)
        return list(answer.choices[0].token_ids)

    alone = [run(seed, num_speculative_tokens=0) for seed in range(4)]
    with ThreadPoolExecutor(16) as pool:
        together = list(
            pool.map(lambda seed: run(seed % 4, num_speculative_tokens=num_speculative_tokens), range(16))
        )
    assert together == alone * 4
    assert len({tuple(ids) for ids in alone}) == 4


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        ({"model": "nobody"}, "NOT_FOUND", "cyclist"),
        ({"prompt": ""}, "INVALID_ARGUMENT", "prompt"),
        ({"max_tokens": -1}, "INVALID_ARGUMENT", "stopping.max_tokens"),
        ({"max_tokens": 2000}, "INVALID_ARGUMENT", "stopping.max_tokens"),
        ({"temperature": -1.0}, "INVALID_ARGUMENT", "sampling.temperature"),
        ({"temperature": float("nan")}, "INVALID_ARGUMENT", "sampling.temperature"),
        ({"top_p": 0.0}, "INVALID_ARGUMENT", "sampling.top_p"),
        ({"top_k": -3}, "INVALID_ARGUMENT", "sampling.top_k"),
        ({"min_p": 1.5}, "INVALID_ARGUMENT", "sampling.min_p"),
        ({"n": 65}, "INVALID_ARGUMENT", "sampling.n"),
        ({"presence_penalty": 3.0}, "INVALID_ARGUMENT", "sampling.presence_penalty"),
        ({"logit_bias": {512: 1.0}}, "INVALID_ARGUMENT", "sampling.logit_bias[512]"),
        ({"logprobs": 21}, "INVALID_ARGUMENT", "logprobs"),
        ({"token_ids": [1, 512]}, "INVALID_ARGUMENT", "[0, 511]"),
        ({"token_ids": [1, -1]}, "INVALID_ARGUMENT", "[0, 511]"),
        ({"num_speculative_tokens": 65}, "INVALID_ARGUMENT", "num_speculative_tokens"),
        ({"prompt": "x" * 5000}, "INVALID_ARGUMENT", "prompt"),
        ({"stop": [""]}, "INVALID_ARGUMENT", "stopping.stop[0]"),
    ],
)
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_errors_have_a_code_and_a_sentence(
    service: Service, method: str, change: dict[str, Any], code: str, told: str
) -> None:
    """B64."""
    options = {"prompt": "a", **change}
    model = options.pop("model", "")
    message = request(**options)
    message.model = model
    call = getattr(service.stub, method)
    with pytest.raises(grpc.RpcError) as raised:
        list(call(message, timeout=20))
    assert raised.value.code().name == code
    assert told in raised.value.details()
    assert "Traceback" not in raised.value.details()
    assert "\n" not in raised.value.details()
    assert len(raised.value.details()) < 4096


def test_conversation_without_a_template_and_unknown_role(service: Service) -> None:
    for role, told in (("user", "chat template"), ("robot", "role")):
        message = proto.GenerateRequest()
        message.conversation.messages.add(role=role, content="hi")
        with pytest.raises(grpc.RpcError) as raised:
            service.stub.Generate(message, timeout=10)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert told in raised.value.details()


def test_five_megabytes_of_prompt_get_a_clean_status(service: Service) -> None:
    """B64."""
    with pytest.raises(grpc.RpcError) as raised:
        service.generate(prompt="x" * 5_000_000)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(raised.value.details()) < 4096
    assert len(service.generate(prompt="still here").choices[0].token_ids) == 16


def test_too_many_requests_are_refused_and_the_others_unharmed(service: Service) -> None:
    """B64."""
    reference = list(service.generate(prompt="full", max_tokens=200, seed=3).choices[0].token_ids)

    def run(index: int) -> str | list[int]:
        try:
            return list(service.generate(prompt="full", max_tokens=200, seed=3).choices[0].token_ids)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"

    with ThreadPoolExecutor(3 * MAX_ONGOING) as pool:
        found = list(pool.map(run, range(3 * MAX_ONGOING)))
    refused = [answer for answer in found if isinstance(answer, str)]
    assert all(answer.startswith("RESOURCE_EXHAUSTED: the gateway is full") for answer in refused)
    assert refused
    assert all(answer == reference for answer in found if not isinstance(answer, str))
    assert len(found) - len(refused) >= MAX_ONGOING
    wait_for_idle(service)


def test_cancelled_streams_free_their_blocks_and_a_normal_request_follows(service: Service) -> None:
    reference = list(service.generate(prompt="go", max_tokens=8, seed=1).choices[0].token_ids)
    for num_chunks in range(1, 11):
        call = service.stream(prompt="go", max_tokens=900, seed=1)
        for _ in range(num_chunks):
            next(call)
        call.cancel()  # type: ignore[attr-defined]
        again = service.generate(prompt="go", max_tokens=8, seed=1)
        assert list(again.choices[0].token_ids) == reference
    wait_for_idle(service)


def test_cancelling_many_at_random_moments_leaves_nothing_running(service: Service) -> None:
    def cancelled_after(seconds: float) -> None:
        call = service.stream(prompt="break", max_tokens=900)
        timer = threading.Timer(seconds, call.cancel)  # type: ignore[attr-defined]
        timer.start()
        with pytest.raises(grpc.RpcError) as raised:
            for _ in call:
                pass
        timer.join()
        assert raised.value.code() is grpc.StatusCode.CANCELLED

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(cancelled_after, [index / 200 for index in range(60)]))
    started = time.monotonic()
    wait_for_idle(service)
    assert time.monotonic() - started < 5


def test_deadline_ends_the_stream_and_frees_it(service: Service) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        list(service.stub.GenerateStream(request("late", max_tokens=900), timeout=0.5))
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for_idle(service)


def test_the_requests_own_limit_ends_it_and_frees_it(service: Service) -> None:
    """B69: also where the caller sets no deadline, or it is lost on its way."""
    with pytest.raises(grpc.RpcError) as raised:
        list(service.stub.GenerateStream(request("late", max_tokens=900, timeout_s=0.5)))
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert raised.value.details() == "the request took longer than its timeout_s = 0.5"
    wait_for_idle(service)


def test_status_shows_the_pools(service: Service) -> None:
    (target,) = service.replicas("target")
    (draft,) = service.replicas("draft")
    (gateway,) = service.replicas("gateway")
    assert target["engine"]["num_accepted_tokens_total"] > 0
    assert [status["draft_id"] for status in target["drafts"]] == [draft["id"]]
    assert draft["engine"]["num_targets"] == 1
    assert gateway["num_ongoing"] == 0
    assert [load["target_id"] for load in gateway["targets"]] == [target["id"]]
