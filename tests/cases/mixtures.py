"""Random requests: valid ones of every parameter at once, and malformed ones."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import strategies as st

from paceline.protos import generation_pb2 as proto

VOCAB_SIZE = 256
"""Of the tiny models; every id is a byte."""

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)


def _sometimes(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


token_ids = st.integers(0, VOCAB_SIZE - 1)


def constraints() -> st.SearchStrategy[proto.Constraint]:
    return st.sampled_from(
        [
            proto.Constraint(regex="[0-9]{3}-[a-f]+"),
            proto.Constraint(json_schema=SCHEMA),
            proto.Constraint(choice=proto.Constraint.Choices(values=["yes", "no", "yesterday"])),
            proto.Constraint(grammar='start: "a"+ "b"*'),
        ]
    )


@st.composite
def valid_requests(draw: st.DrawFn) -> proto.GenerateRequest:
    """Any combination that a service of tiny models must serve. The seed is always given."""
    message = proto.GenerateRequest()
    message.token_ids.ids.extend(draw(st.lists(token_ids, min_size=1, max_size=40)))
    sampling = message.sampling
    sampling.seed = draw(st.integers(0, 2**64 - 1))
    sampling.temperature = draw(st.sampled_from([0.0, 0.0, 1e-5, 0.3, 1.0, 2.0]))
    options: dict[str, st.SearchStrategy[Any]] = {
        "top_k": st.sampled_from([1, 2, 5, 40, 255, 256, 1000]),
        "top_p": st.sampled_from([1e-6, 0.3, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.99, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.2, 5.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.5, 2.0]),
    }
    for name, strategy in options.items():
        value = draw(_sometimes(strategy))
        if value is not None:
            setattr(sampling, name, value)
    biased = draw(st.dictionaries(token_ids, st.sampled_from([-100.0, -5.0, 3.0, 20.0]), max_size=4))
    sampling.logit_bias.update(biased)
    sampling.bad_token_ids.extend(draw(st.lists(token_ids, max_size=4, unique=True)))
    constraint = draw(_sometimes(constraints()))
    if constraint is not None and not biased and not sampling.bad_token_ids:
        message.constraint.CopyFrom(constraint)
    sampling.n = draw(st.sampled_from([0, 1, 1, 2, 3]))
    stopping = message.stopping
    stopping.max_tokens = draw(st.integers(1, 40))
    stopping.min_tokens = 0 if constraint is not None else draw(st.integers(0, stopping.max_tokens))
    stopping.ignore_eos = draw(st.booleans())
    stopping.stop_token_ids.extend(draw(st.lists(token_ids, max_size=3)))
    stopping.stop.extend(draw(st.lists(st.sampled_from(["a", "\x80", "zz", "e", "ab"]), max_size=2)))
    message.priority = draw(st.sampled_from([-100, -1, 0, 0, 1]))
    if draw(st.booleans()):
        message.logprobs = draw(st.sampled_from([0, 1, 5, 20]))
    return message


def _wild_numbers() -> st.SearchStrategy[float]:
    return st.sampled_from([math.nan, math.inf, -math.inf, -1.0, -0.0, 1e-38, 3e38, 101.0]) | st.floats(
        width=32
    )


_INT32 = st.sampled_from([-(2**31), -1, 0, 1, 2, 63, 64, 65, 255, 256, 2**31 - 1]) | st.integers(
    -(2**31), 2**31 - 1
)
_TEXT = st.text(max_size=30)


@st.composite
def malformed_requests(draw: st.DrawFn) -> proto.GenerateRequest:
    """A small valid request with one to four fields set to anything that the wire can carry."""
    message = proto.GenerateRequest()
    message.prompt = "abc"
    message.stopping.max_tokens = 4
    message.sampling.seed = 1
    for change in draw(st.lists(st.sampled_from(sorted(_CHANGES)), min_size=1, max_size=4)):
        _CHANGES[change](draw, message)
    return message


def _set(path: str, strategy: st.SearchStrategy[Any]) -> Any:
    *parts, name = path.split(".")

    def change(draw: st.DrawFn, message: proto.GenerateRequest) -> None:
        owner: Any = message
        for part in parts:
            owner = getattr(owner, part)
        setattr(owner, name, draw(strategy))

    return change


def _extend(path: str, strategy: st.SearchStrategy[Any], most: int) -> Any:
    *parts, name = path.split(".")

    def change(draw: st.DrawFn, message: proto.GenerateRequest) -> None:
        owner: Any = message
        for part in parts:
            owner = getattr(owner, part)
        getattr(owner, name).extend(draw(st.lists(strategy, max_size=most)))

    return change


def _conversation(draw: st.DrawFn, message: proto.GenerateRequest) -> None:
    message.conversation.SetInParent()
    for role, content in draw(
        st.lists(st.tuples(st.sampled_from(["user", "system", "wizard", ""]), _TEXT), max_size=3)
    ):
        message.conversation.messages.add(role=role, content=content)


def _token_ids(draw: st.DrawFn, message: proto.GenerateRequest) -> None:
    message.token_ids.SetInParent()
    message.token_ids.ids.extend(draw(st.lists(_INT32, max_size=4)))


def _many_token_ids(draw: st.DrawFn, message: proto.GenerateRequest) -> None:
    message.token_ids.ids.extend([1] * draw(st.sampled_from([255, 256, 257, 5000])))


def _bias(draw: st.DrawFn, message: proto.GenerateRequest) -> None:
    message.sampling.logit_bias.update(draw(st.dictionaries(_INT32, _wild_numbers(), max_size=3)))


def _constraint(draw: st.DrawFn, message: proto.GenerateRequest) -> None:
    kind = draw(st.sampled_from(["none", "json_schema", "regex", "grammar", "choice"]))
    message.constraint.SetInParent()
    if kind == "choice":
        message.constraint.choice.SetInParent()
        message.constraint.choice.values.extend(draw(st.lists(_TEXT, max_size=3)))
    elif kind != "none":
        text = draw(
            _TEXT | st.sampled_from(["{", '{"type": "nothing"}', "(", "[", "start: start", "{}", "a*"])
        )
        setattr(message.constraint, kind, text)


def _nothing(draw: st.DrawFn, message: proto.GenerateRequest) -> None:
    message.ClearField(draw(st.sampled_from(["prompt", "sampling", "stopping"])))


_CHANGES: dict[str, Any] = {
    "nothing": _nothing,
    "model": _set("model", _TEXT),
    "prompt": _set("prompt", _TEXT),
    "token_ids": _token_ids,
    "many_token_ids": _many_token_ids,
    "conversation": _conversation,
    "temperature": _set("sampling.temperature", _wild_numbers()),
    "top_k": _set("sampling.top_k", _INT32),
    "top_p": _set("sampling.top_p", _wild_numbers()),
    "min_p": _set("sampling.min_p", _wild_numbers()),
    "repetition_penalty": _set("sampling.repetition_penalty", _wild_numbers()),
    "presence_penalty": _set("sampling.presence_penalty", _wild_numbers()),
    "frequency_penalty": _set("sampling.frequency_penalty", _wild_numbers()),
    "logit_bias": _bias,
    "bad_token_ids": _extend("sampling.bad_token_ids", _INT32, 3),
    "n": _set("sampling.n", st.sampled_from([-(2**31), -1, 0, 1, 2, 5, 65, 2**31 - 1])),
    "max_tokens": _set("stopping.max_tokens", _INT32.filter(lambda n: not 8 < n < 253)),
    "min_tokens": _set("stopping.min_tokens", _INT32),
    "stop": _extend("stopping.stop", _TEXT, 3),
    "many_stops": _extend("stopping.stop", st.just("x"), 40),
    "stop_token_ids": _extend("stopping.stop_token_ids", _INT32, 3),
    "ignore_eos": _set("stopping.ignore_eos", st.booleans()),
    "logprobs": _set("logprobs", _INT32),
    "num_speculative_tokens": _set("speculation.num_speculative_tokens", _INT32),
    "verification": _set("speculation.verification", st.sampled_from([0, 1, 2, 3, 4, -1, 2**31 - 1])),
    "priority": _set("priority", _INT32),
    "timeout_s": _set("timeout_s", _wild_numbers().filter(lambda n: not 0.0 < n < 100.0)),
    "request_id": _set("request_id", st.text(max_size=200)),
    "constraint": _constraint,
}
