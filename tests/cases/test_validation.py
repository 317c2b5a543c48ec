"""Requests that cannot be served: refused by field, at once, and unnoticed by the others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from paceline.cluster.errors import status_of
from paceline.protos import generation_pb2 as proto
from tests.cases.conftest import DRAFTS, TinyModels
from tests.cases.exercise import BOUNDS, check_every_bound, exercised, until_exercised
from tests.cases.service import Service
from tests.cases.test_output_equality import greedy
from tests.requests import request

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.usefixtures("patient")]


def changed(change: Callable[[proto.GenerateRequest], Any]) -> proto.GenerateRequest:
    message = request("abc", max_tokens=4)
    change(message)
    return message


REFUSED = {
    # B42: ids and values that no engine may see.
    "sampling.logit_bias": [
        changed(lambda message: message.sampling.logit_bias.update({999999: 5.0})),
        changed(lambda message: message.sampling.logit_bias.update({-1: 5.0})),
        changed(lambda message: message.sampling.logit_bias.update({3: 1e9})),
        changed(lambda message: message.sampling.logit_bias.update({3: math.nan})),
        request("abc", logit_bias={3: 100.0}, bad_token_ids=[3]),
        request("abc", logit_bias={3: 100.0}, stop_token_ids=[3], min_tokens=1),
    ],
    "sampling.bad_token_ids": [
        request("abc", bad_token_ids=ids) for ids in ([256], [-1], [3] * 1025, range(256))
    ],
    "sampling.n": [request("abc", n=n) for n in (65, -1, 2**31 - 1)],
    "sampling.presence_penalty": [request("abc", presence_penalty=value) for value in (2.5, math.nan)],
    "sampling.frequency_penalty": [request("abc", frequency_penalty=value) for value in (-3.0, math.inf)],
    "sampling.repetition_penalty": [
        request("abc", repetition_penalty=value) for value in (0.0, -1.2, 1e9, math.nan)
    ],
    "logprobs": [request("abc", logprobs=n) for n in (-1, 21)],
    "constraint": [
        changed(lambda message: message.constraint.SetInParent()),
        changed(lambda message: setattr(message.constraint, "json_schema", '{"type": ')),
        changed(lambda message: setattr(message.constraint, "regex", "(")),
        changed(lambda message: setattr(message.constraint, "grammar", "start: nowhere")),
        changed(lambda message: message.constraint.choice.values.append("")),
    ],
    "speculation.verification": [request("abc", verification=rule) for rule in (4, 99, -1)],
    "speculation.num_speculative_tokens": [request("abc", num_speculative_tokens=n) for n in (-1, 65)],
    # B41
    "sampling.temperature": [
        request("abc", temperature=value) for value in (-1.0, -1e-9, math.nan, math.inf, -math.inf)
    ],
    "sampling.top_p": [request("abc", top_p=value) for value in (0.0, -0.5, 1.5, math.nan)],
    "sampling.min_p": [request("abc", min_p=value) for value in (-0.1, 1.5, math.nan)],
    "sampling.top_k": [request("abc", top_k=-1)],
    "stopping.max_tokens": [request("abc", max_tokens=n) for n in (0, -1, 2**31 - 1)],
    "stopping.min_tokens": [request("abc", max_tokens=4, min_tokens=n) for n in (-1, 5)],
    "stopping.stop_token_ids[1]": [request("abc", stop_token_ids=[1, n]) for n in (256, -1)],
    "token_ids.ids[2]": [request(token_ids=[1, 2, n]) for n in (256, -1, 2**31 - 1)],
    "token_ids.ids": [request(token_ids=[])],
    "prompt": [request("")],
    "input": [changed(lambda message: message.ClearField("prompt"))],
    "request_id": [changed(lambda message: setattr(message, "request_id", "x" * 129))],
}


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_refused_by_field_while_others_go_on(
    services: dict[str, Service], tiny: TinyModels, draft: str
) -> None:
    """B41, B42. None of them comes near a draft; the requests beside them have one, with every bound."""
    service = services[draft]
    neighbours = [greedy([7, 3, 9], 200, bound) for bound in BOUNDS]
    running = asyncio.create_task(service.stream_all(*neighbours))
    for field, messages in REFUSED.items():
        for message in messages:
            for call in (service.logic.generate(message), anext(service.logic.generate_stream(message))):
                with pytest.raises(Exception) as raised:  # noqa: PT011
                    await call
                code, details = status_of(raised.value)
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert details.startswith(field), details
                assert "\n" not in details
    answers = await running
    assert all(answer.token_ids == tiny.reference.greedy([7, 3, 9], 200) for answer in answers)
    check_every_bound(draft, neighbours, answers)
    assert service.gateway.snapshot().num_live == 0


async def test_unknown_model_and_role(services: dict[str, Service]) -> None:
    service = services["equal"]
    message = request("abc")
    message.model = "someone-else"
    with pytest.raises(Exception) as raised:  # noqa: PT011
        await service.logic.generate(message)
    assert status_of(raised.value)[0] is grpc.StatusCode.NOT_FOUND
    message = proto.GenerateRequest()
    message.conversation.messages.add(role="robot", content="hi")
    with pytest.raises(Exception) as raised:  # noqa: PT011
        await service.logic.generate(message)
    assert status_of(raised.value)[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_hardly_any_temperature_is_greedy(
    services: dict[str, Service], tiny: TinyModels, draft: str
) -> None:
    """B41: the draft and the target draw the line at the same place."""
    for temperature in (0.0, 1e-45, 1e-9, 1e-6, 1e-5, 1e-4):
        requests = [greedy([7, 3, 9], 40, bound) | {"temperature": temperature} for bound in BOUNDS]
        answers = await services[draft].stream_all(*requests)
        for answer in answers:
            assert answer.token_ids == tiny.reference.greedy([7, 3, 9], 40), temperature
        check_every_bound(draft, requests, answers)


@pytest.mark.parametrize("temperature", [1e-3, 1.1e-3, 0.01, 100.0])
@until_exercised
async def test_extreme_temperatures_are_numbers_and_the_draft_agrees(
    services: dict[str, Service], temperature: float
) -> None:
    service = services["equal"]
    options = greedy([7, 3, 9], 40) | {"temperature": temperature, "seed": 2**64 - 1}
    plain = await service.stream(**options | {"num_speculative_tokens": 0})
    answer = await service.stream(**options | {"num_speculative_tokens": 4})
    assert answer.token_ids == plain.token_ids
    assert answer.last.seed == 2**64 - 1
    assert answer.speculation.accepted_tokens >= 0.97 * answer.speculation.draft_tokens
    exercised(answer.speculation.draft_tokens > 0, "draft tokens are verified")


async def test_one_request_id_twice_at_the_same_time(services: dict[str, Service], tiny: TinyModels) -> None:
    """The id is the caller's label; it joins nothing."""
    service = services["noised"]
    messages = [request(**greedy([n, n + 1], 40, 4)) for n in (10, 20)]
    for message in messages:
        message.request_id = "same"
    responses = await asyncio.gather(*(service.logic.generate(message) for message in messages))
    assert [list(response.choices[0].token_ids) for response in responses] == [
        tiny.reference.greedy([n, n + 1], 40) for n in (10, 20)
    ]
    assert {response.request_id for response in responses} == {"same"}
