"""What holds for every combination of parameters, and for every request that the wire can carry."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.cluster.errors import ModelNotFoundError, status_of
from paceline.protos import generation_pb2 as proto
from tests.cases.conftest import DRAFTS, TinyModels
from tests.cases.mixtures import malformed_requests, valid_requests
from tests.cases.service import Service
from tests.cases.test_output_equality import greedy
from tests.engine.models import MAX_MODEL_LEN

pytestmark = pytest.mark.asyncio(loop_scope="package")

BATCH = 6


def examples(strategy: Any, count: int) -> list[Any]:
    """``count`` examples, the same in every run."""
    found: list[Any] = []

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found[:count]


Outcome = list[tuple[Any, ...]] | str
"""Ids, text, finish reason and logprobs of every choice; or why it was refused."""


async def outcome(service: Service, message: proto.GenerateRequest) -> Outcome:
    try:
        response = await service.logic.generate(message)
    except InvalidArgumentError as error:
        return str(error)
    assert response.usage.completion_tokens == sum(len(choice.token_ids) for choice in response.choices)
    choices: list[tuple[Any, ...]] = []
    for choice in response.choices:
        assert not set(message.sampling.bad_token_ids) & set(choice.token_ids)
        assert len(choice.token_ids) >= message.stopping.min_tokens
        assert len(choice.logprobs) == (len(choice.token_ids) if message.HasField("logprobs") else 0)
        logprobs = [
            (item.chosen.token_id, round(item.chosen.logprob, 3), [entry.token_id for entry in item.top])
            for item in choice.logprobs
        ]
        choices.append((list(choice.token_ids), choice.text, choice.finish_reason, logprobs))
    return choices


async def check_batch(services: dict[str, Service], batch: list[proto.GenerateRequest]) -> int:
    """Returns: how many draft tokens were verified."""
    alone: list[Outcome] = []
    for message in batch:
        plain = proto.GenerateRequest()
        plain.CopyFrom(message)
        plain.speculation.num_speculative_tokens = 0
        alone.append(await outcome(services["equal"], plain))
    verified = 0
    for draft, num_speculative_tokens in zip(DRAFTS, (4, 8, 1), strict=True):
        service = services[draft]
        (before,) = await service.target_state()
        drafted = []
        for message in batch:
            copy = proto.GenerateRequest()
            copy.CopyFrom(message)
            copy.speculation.num_speculative_tokens = num_speculative_tokens
            drafted.append(copy)
        together = await asyncio.gather(*(outcome(service, message) for message in drafted))
        for message, first, second in zip(batch, alone, together, strict=True):
            assert first == second, f"{draft}, {num_speculative_tokens}: {message}"
        await service.wait_until_idle()
        (after,) = await service.target_state()
        verified += after["num_draft_tokens_total"] - before["num_draft_tokens_total"]
    return verified


async def check_mixtures(services: dict[str, Service], count: int) -> None:
    messages = examples(valid_requests(), count)
    verified = 0
    for start in range(0, len(messages), BATCH):
        verified += await check_batch(services, messages[start : start + BATCH])
    assert verified > count, "draft tokens are verified"


async def test_any_mixture_is_what_each_request_is_alone(services: dict[str, Service]) -> None:
    """Every parameter at once, in batches, with three kinds of draft: ids, text and logprobs as alone."""
    await check_mixtures(services, 36)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
async def test_any_mixture_is_what_each_request_is_alone_at_length(services: dict[str, Service]) -> None:
    await check_mixtures(services, 600)


async def check_malformed(service: Service, tiny: TinyModels, count: int) -> None:
    expected = tiny.reference.greedy([5, 6, 7], 24)
    refused = served = 0

    async def send(message: proto.GenerateRequest) -> None:
        nonlocal refused, served
        try:
            response = await service.logic.generate(message)
        except ModelNotFoundError:
            assert message.model not in ("", "tiny")
            refused += 1
        except Exception as error:
            code, details = status_of(error)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, (code, details, message)
            assert 0 < len(details) < 4096
            assert "Traceback" not in details
            refused += 1
        else:
            wanted = max(message.sampling.n, 1)
            assert [choice.index for choice in response.choices] == list(range(wanted))
            for choice in response.choices:
                assert choice.finish_reason in (proto.FINISH_REASON_STOP, proto.FINISH_REASON_LENGTH)
                assert len(choice.token_ids) < MAX_MODEL_LEN
            served += 1

    messages = examples(malformed_requests(), count)
    for start in range(0, len(messages), 32):
        async with asyncio.timeout(120):
            *_, good = await asyncio.gather(
                *(send(message) for message in messages[start : start + 32]),
                service.stream(**greedy([5, 6, 7], 24, 4)),
            )
        assert good.token_ids == expected, "a neighbour is not disturbed"
    assert refused > count / 4
    assert served > count / 20


async def test_what_is_malformed_is_refused_by_field(services: dict[str, Service], tiny: TinyModels) -> None:
    """Each is refused as INVALID_ARGUMENT or served rightly, and the good one beside them as ever."""
    await check_malformed(services["noised"], tiny, 600)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
async def test_ten_thousand_malformed_requests(services: dict[str, Service], tiny: TinyModels) -> None:
    await check_malformed(services["noised"], tiny, 10_000)
