from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.noise import derive_seed
from paceline.actors.engine.parameters import (
    Constraint,
    ConstraintKind,
    SamplingParams,
    VerificationRule,
)
from paceline.cluster.errors import ModelNotFoundError, status_of
from paceline.cluster.request_parameters import (
    MAX_CHOICES,
    MAX_CONSTRAINT_CHOICES,
    MAX_CONSTRAINT_LENGTH,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
)
from paceline.cluster.requests import (
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


def constraint(**fields: Any) -> proto.GenerateRequest:
    return request(constraint=proto.Constraint(**fields))


def choice(values: Sequence[str]) -> proto.GenerateRequest:
    return constraint(choice=proto.Constraint.Choices(values=values))


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
    ("sampling.n", sampling(n=-1), r"\[0, 64\]"),
    ("sampling.n", sampling(n=MAX_CHOICES + 1), r"\[0, 64\]"),
    ("sampling.repetition_penalty", sampling(repetition_penalty=0), r"\(0, 100\]"),
    ("sampling.repetition_penalty", sampling(repetition_penalty=-1.1), r"\(0, 100\]"),
    ("sampling.repetition_penalty", sampling(repetition_penalty=101), r"\(0, 100\]"),
    ("sampling.repetition_penalty", sampling(repetition_penalty=math.nan), r"\(0, 100\]"),
    ("sampling.presence_penalty", sampling(presence_penalty=-2.5), r"\[-2, 2\]"),
    ("sampling.presence_penalty", sampling(presence_penalty=math.inf), r"\[-2, 2\]"),
    ("sampling.frequency_penalty", sampling(frequency_penalty=2.001), r"\[-2, 2\]"),
    ("sampling.frequency_penalty", sampling(frequency_penalty=math.nan), r"\[-2, 2\]"),
    ("sampling.logit_bias[-1]", sampling(logit_bias={-1: 5.0}), "-1"),
    ("sampling.logit_bias[3]", sampling(logit_bias={3: 1e9}), r"\[-100, 100\]"),
    ("sampling.logit_bias[3]", sampling(logit_bias={3: -100.1}), r"\[-100, 100\]"),
    ("sampling.logit_bias[3]", sampling(logit_bias={3: math.nan}), "nan"),
    ("sampling.logit_bias", sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "at most 1024"),
    ("sampling.bad_token_ids[1]", sampling(bad_token_ids=[3, -3]), "-3"),
    ("sampling.bad_token_ids", sampling(bad_token_ids=range(1025)), "at most 1024"),
    ("priority", request(priority=-101), r"\[-100, 100\]"),
    ("priority", request(priority=101), "101"),
    ("timeout_s", request(timeout_s=0), r"\(0, 31536000\]"),
    ("timeout_s", request(timeout_s=-2), "-2"),
    ("timeout_s", request(timeout_s=math.nan), "nan"),
    ("timeout_s", request(timeout_s=math.inf), "inf"),
    ("logprobs", request(logprobs=-1), r"\[0, 20\]"),
    ("logprobs", request(logprobs=21), r"\[0, 20\]"),
    ("constraint", constraint(), "json_schema, regex, choice and grammar"),
    ("constraint.json_schema", constraint(json_schema=""), "empty"),
    ("constraint.json_schema", constraint(json_schema=" \n"), "empty"),
    ("constraint.regex", constraint(regex=""), "empty"),
    ("constraint.grammar", constraint(grammar=""), "empty"),
    ("constraint.grammar", constraint(grammar="x" * (MAX_CONSTRAINT_LENGTH + 1)), "at most 65536"),
    ("constraint.choice.values", choice([]), "at least one"),
    ("constraint.choice.values[1]", choice(["a", ""]), "empty"),
    ("constraint.choice.values", choice(["a"] * (MAX_CONSTRAINT_CHOICES + 1)), "at most 1024"),
    ("constraint.choice", choice(["a" * 40000] * 2), "at most 65536"),
    ("stopping.max_tokens", stopping(max_tokens=0), "at least 1"),
    ("stopping.max_tokens", stopping(max_tokens=-1), "at least 1"),
    ("stopping.min_tokens", stopping(min_tokens=-1), "negative"),
    ("stopping.stop[1]", stopping(stop=["a", ""]), "1 to"),
    ("stopping.stop[0]", stopping(stop=["a" * (MAX_STOP_STRING_LENGTH + 1)]), "1 to"),
    ("stopping.stop", stopping(stop=["a"] * (MAX_STOP_STRINGS + 1)), "at most 16"),
    ("speculation.num_speculative_tokens", speculation(num_speculative_tokens=-1), r"\[0, 64\]"),
    ("speculation.num_speculative_tokens", speculation(num_speculative_tokens=65), r"\[0, 64\]"),
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
    ("sampling.logit_bias[999999]", sampling(logit_bias={2: 1, 999999: 5.0}), PROMPT, r"\[0, 99\]"),
    ("sampling.bad_token_ids[2]", sampling(bad_token_ids=[99, 4, 100]), PROMPT, r"\[0, 99\]"),
    # What leaves nothing to say.
    ("sampling.bad_token_ids", sampling(bad_token_ids=range(100)), PROMPT, "none of the model's 100"),
    ("sampling.logit_bias", sampling(logit_bias=dict.fromkeys(range(100), -100)), PROMPT, "none of the"),
    (
        "sampling.bad_token_ids",
        sampling(bad_token_ids=range(40), logit_bias=dict.fromkeys(range(40, 100), -100)),
        PROMPT,
        "none of the",
    ),
    ("sampling.logit_bias", sampling(logit_bias={3: 100, 5: 100}, bad_token_ids=[3, 5]), PROMPT, "3, 5"),
    (
        "sampling.logit_bias",
        request(
            sampling=proto.SamplingParams(logit_bias={7: 100}), stopping=proto.StoppingParams(min_tokens=1)
        ),
        PROMPT,
        "allows no token but 7, which may not come before stopping.min_tokens = 1",
    ),
    (
        "stopping.min_tokens",
        request(
            sampling=proto.SamplingParams(bad_token_ids=[i for i in range(100) if i not in (7, 9, 11)]),
            stopping=proto.StoppingParams(min_tokens=2, stop_token_ids=[11]),
        ),
        PROMPT,
        "every token that is allowed at all is a stop token",
    ),
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


def test_neutral_values_ask_for_nothing() -> None:
    message = sampling(n=1, repetition_penalty=1.0, presence_penalty=0.0)
    checked = check_request(message, PROMPT, MODEL)
    assert checked.sampling == replace(SamplingParams(), seed=checked.sampling.seed)
    assert not checked.sampling.processes_logits
    assert (checked.n, checked.logprobs) == (1, None)


def test_every_parameter_survives() -> None:
    message = request(
        sampling=proto.SamplingParams(
            repetition_penalty=1.5,
            presence_penalty=-2,
            frequency_penalty=2,
            logit_bias={9: 100, 2: -100, 5: 0.25},
            bad_token_ids=[8, 3, 8],
            n=5,
        ),
        constraint=proto.Constraint(regex="[a-z]+"),
        logprobs=20,
        priority=-100,
    )
    checked = check_request(message, PROMPT, MODEL)
    sampled = checked.sampling
    assert (sampled.repetition_penalty, sampled.presence_penalty, sampled.frequency_penalty) == (1.5, -2, 2)
    assert sampled.logit_bias == ((2, -100.0), (5, 0.25), (9, 100.0))
    assert sampled.bad_token_ids == (3, 8)
    assert sampled.constraint == Constraint(ConstraintKind.REGEX, "[a-z]+")
    assert (checked.n, checked.logprobs, checked.priority) == (5, 20, -100)
    assert check_request(request(logprobs=0), PROMPT, MODEL).logprobs == 0


@pytest.mark.parametrize(
    "message",
    [
        sampling(logit_bias={7: 100}),
        sampling(logit_bias={7: 100, 3: 100}, bad_token_ids=[3]),
        request(
            sampling=proto.SamplingParams(logit_bias={7: 100, 8: 100}),
            stopping=proto.StoppingParams(min_tokens=9),
        ),
        request(
            sampling=proto.SamplingParams(logit_bias={7: 100}),
            stopping=proto.StoppingParams(min_tokens=9, ignore_eos=True),
        ),
        sampling(bad_token_ids=range(99)),
    ],
)
def test_what_leaves_one_token_is_no_contradiction(message: proto.GenerateRequest) -> None:
    check_request(message, PROMPT, MODEL)


@pytest.mark.parametrize("rule", VerificationRule)
def test_a_request_may_choose_its_rule(rule: VerificationRule) -> None:
    number = proto.VerificationRule.Value(f"VERIFICATION_RULE_{rule.name}")
    assert check_request(speculation(verification=number), PROMPT, MODEL).speculation.rule is rule
    # The service's own holds for requests that choose none.
    assert check_request(request(), PROMPT, replace(MODEL, rule=rule)).speculation.rule is rule


def test_choices_differ_in_their_seeds_alone() -> None:
    checked = check_request(sampling(n=3, seed=11), PROMPT, MODEL)
    choices = [checked.choice(index) for index in range(3)]
    assert [item.sampling.seed for item in choices] == [11, derive_seed(11, 1), derive_seed(11, 2)]
    assert len({item.sampling.seed for item in choices}) == 3
    for item in choices:
        assert replace(item, n=3, sampling=checked.sampling) == checked
        alone = check_request(sampling(seed=item.sampling.seed), PROMPT, MODEL)
        assert replace(alone, request_id=item.request_id) == item


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
