from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.cluster.errors import ModelNotFoundError, status_of
from paceline.cluster.requests import (
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    ServedModel,
    check_input,
    check_model,
    check_parameters,
    check_request,
)
from paceline.protos import generation_pb2 as proto

MODEL = ServedModel("toy", vocab_size=100, max_model_len=32, eos_token_ids=(7, 9))
PROMPT = [1, 2, 3]


def request(**fields: Any) -> proto.GenerateRequest:
    return proto.GenerateRequest(**{"prompt": "x", **fields})


def sampling(**fields: Any) -> proto.GenerateRequest:
    return request(sampling=proto.SamplingParams(**fields))


def stopping(**fields: Any) -> proto.GenerateRequest:
    return request(stopping=proto.StoppingParams(**fields))


def speculation(**fields: Any) -> proto.GenerateRequest:
    return request(speculation=proto.SpeculationParams(**fields))


BAD_WHATEVER_THE_MODEL: list[tuple[str, proto.GenerateRequest, str]] = [
    ("request_id", request(request_id="r" * 129), "128"),
    ("sampling.temperature", sampling(temperature=-1), r"\[0, 100\]"),
    ("sampling.temperature", sampling(temperature=math.nan), "nan"),
    ("sampling.temperature", sampling(temperature=math.inf), r"\[0, 100\]"),
    ("sampling.top_k", sampling(top_k=-1), "-1"),
    ("sampling.top_p", sampling(top_p=0), r"\(0, 1\]"),
    ("sampling.top_p", sampling(top_p=1.5), r"\(0, 1\]"),
    ("sampling.top_p", sampling(top_p=math.nan), r"\(0, 1\]"),
    ("sampling.min_p", sampling(min_p=-0.1), r"\[0, 1\]"),
    ("sampling.min_p", sampling(min_p=math.nan), r"\[0, 1\]"),
    ("sampling.n", sampling(n=2), "not supported"),
    ("sampling.n", sampling(n=-1), "negative"),
    ("sampling.repetition_penalty", sampling(repetition_penalty=1.1), "not supported"),
    ("sampling.repetition_penalty", sampling(repetition_penalty=math.nan), "not supported"),
    ("sampling.presence_penalty", sampling(presence_penalty=-0.5), "not supported"),
    ("sampling.frequency_penalty", sampling(frequency_penalty=math.nan), "not supported"),
    ("sampling.logit_bias", sampling(logit_bias={999999: 5.0}), "not supported"),
    ("logprobs", request(logprobs=0), "not supported"),
    ("logprobs", request(logprobs=5), "not supported"),
    ("stopping.max_tokens", stopping(max_tokens=0), "at least 1"),
    ("stopping.max_tokens", stopping(max_tokens=-1), "at least 1"),
    ("stopping.min_tokens", stopping(min_tokens=-1), "negative"),
    ("stopping.stop[1]", stopping(stop=["a", ""]), "1 to"),
    ("stopping.stop[0]", stopping(stop=["a" * (MAX_STOP_STRING_LENGTH + 1)]), "1 to"),
    ("stopping.stop", stopping(stop=["a"] * (MAX_STOP_STRINGS + 1)), "at most 16"),
    ("speculation.num_speculative_tokens", speculation(num_speculative_tokens=-1), r"\[0, 64\]"),
    ("speculation.num_speculative_tokens", speculation(num_speculative_tokens=65), r"\[0, 64\]"),
    ("speculation.verification", speculation(verification=proto.VERIFICATION_RULE_STANDARD), "standard"),
    ("speculation.verification", speculation(verification=proto.VERIFICATION_RULE_BLOCK), "block"),
    ("speculation.verification", speculation(verification=77), "77"),
]

BAD_FOR_THE_MODEL: list[tuple[str, proto.GenerateRequest, list[int], str]] = [
    ("stopping.max_tokens", stopping(max_tokens=30), PROMPT, r"\[1, 29\]"),
    ("stopping.min_tokens", stopping(max_tokens=4, min_tokens=5), PROMPT, "max_tokens = 4"),
    ("stopping.min_tokens", stopping(min_tokens=30), PROMPT, "max_tokens = 29"),
    ("stopping.stop_token_ids[1]", stopping(stop_token_ids=[1, 100]), PROMPT, r"\[0, 99\]"),
    ("stopping.stop_token_ids[0]", stopping(stop_token_ids=[-1]), PROMPT, r"\[0, 99\]"),
    ("stopping.stop_token_ids", stopping(stop_token_ids=[1] * 300), PROMPT, "at most 256"),
    ("prompt", request(), [1] * 32, "at most 31"),
    ("prompt", request(), [], "no token"),
    ("token_ids.ids[1]", request(token_ids=proto.TokenIds(ids=[1, 100])), [1, 100], r"\[0, 99\]"),
    ("token_ids.ids[0]", request(token_ids=proto.TokenIds(ids=[-1])), [-1], r"\[0, 99\]"),
]


def refused(error: pytest.ExceptionInfo[InvalidArgumentError], field: str, text: str) -> None:
    assert error.value.field == field
    assert error.match(text)
    code, details = status_of(error.value)
    assert code.name == "INVALID_ARGUMENT"
    assert details.startswith(field + ": ")


@pytest.mark.parametrize(("field", "message", "text"), BAD_WHATEVER_THE_MODEL)
def test_wrong_parameters_are_refused_by_name(field: str, message: proto.GenerateRequest, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        check_parameters(message)
    refused(error, field, text)
    with pytest.raises(InvalidArgumentError):
        check_request(message, PROMPT, MODEL)


@pytest.mark.parametrize(("field", "message", "prompt", "text"), BAD_FOR_THE_MODEL)
def test_what_the_model_cannot_serve_is_refused_by_name(
    field: str, message: proto.GenerateRequest, prompt: list[int], text: str
) -> None:
    check_parameters(message)
    with pytest.raises(InvalidArgumentError) as error:
        check_request(message, prompt, MODEL)
    refused(error, field, text)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("input", proto.GenerateRequest()),
        ("input", proto.TokenizeRequest()),
        ("prompt", proto.GenerateRequest(prompt="")),
        ("prompt", proto.TokenizeRequest(prompt="")),
        ("token_ids.ids", proto.GenerateRequest(token_ids=proto.TokenIds())),
        ("conversation.messages", proto.GenerateRequest(conversation=proto.Conversation())),
        (
            "conversation.messages[0].role",
            proto.GenerateRequest(conversation=proto.Conversation(messages=[proto.Message(role="robot")])),
        ),
    ],
)
def test_empty_input_is_refused(field: str, message: proto.GenerateRequest) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        check_input(message)
    assert error.value.field == field


def test_unknown_model_is_not_found() -> None:
    check_model("", "toy")
    check_model("toy", "toy")
    with pytest.raises(ModelNotFoundError, match="'other' is not served") as error:
        check_model("other", "toy")
    assert status_of(error.value)[0].name == "NOT_FOUND"


def test_defaults() -> None:
    checked = check_request(request(), PROMPT, MODEL)
    assert checked.prompt_token_ids == (1, 2, 3)
    assert (checked.sampling.temperature, checked.sampling.top_k, checked.sampling.top_p) == (1.0, 0, 1.0)
    assert checked.stopping.max_tokens == 29
    assert checked.stopping.stop_token_ids == {7, 9}
    assert checked.speculation.num_speculative_tokens is None
    assert checked.request_id


def test_neutral_values_of_later_fields_are_taken() -> None:
    message = sampling(n=1, repetition_penalty=1.0, presence_penalty=0.0)
    assert check_request(message, PROMPT, MODEL).sampling.temperature == 1.0


def test_an_absent_seed_is_drawn_and_a_given_one_kept() -> None:
    seeds = {check_request(request(), PROMPT, MODEL).sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert max(seeds) > 2**32
    for seed in (0, 2**64 - 1):
        assert check_request(sampling(seed=seed), PROMPT, MODEL).sampling.seed == seed


def test_explicit_values_survive() -> None:
    message = proto.GenerateRequest(
        prompt="x",
        request_id="mine",
        sampling=proto.SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.25),
        stopping=proto.StoppingParams(
            max_tokens=29, min_tokens=2, stop=["END"], stop_token_ids=[4], ignore_eos=True
        ),
        speculation=proto.SpeculationParams(num_speculative_tokens=0),
    )
    checked = check_request(message, PROMPT, MODEL)
    assert checked.request_id == "mine"
    assert checked.sampling.greedy
    assert (checked.sampling.top_k, checked.sampling.top_p, checked.sampling.min_p) == (5, 0.5, 0.25)
    assert (checked.stopping.max_tokens, checked.stopping.min_tokens) == (29, 2)
    assert checked.stopping.stop_token_ids == {4}
    assert checked.stop_strings == ("END",)
    assert checked.speculation.num_speculative_tokens == 0


def test_details_are_bounded_and_tell_nothing_of_foreign_errors() -> None:
    assert len(status_of(InvalidArgumentError("prompt", "é" * 9000))[1].encode()) <= 2048
    code, details = status_of(RuntimeError("Traceback: secret"))
    assert code.name == "INTERNAL"
    assert "secret" not in details
