"""A request of the public contract, checked: either what the gateway can run, or the field at fault."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.parameters import (
    SamplingParams,
    SpeculationParams,
    StoppingParams,
    VerificationRule,
)
from paceline.cluster.errors import ModelNotFoundError
from paceline.cluster.tokenization import ChatMessage
from paceline.protos import generation_pb2 as proto

MAX_REQUEST_ID_LENGTH = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 512
"""In characters; bounds what may be held back of a stream."""
MAX_STOP_TOKEN_IDS = 256


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against."""

    name: str
    vocab_size: int
    max_model_len: int
    """Longest prompt + completion in tokens."""
    eos_token_ids: tuple[int, ...]
    rule: VerificationRule = VerificationRule.COUPLED


@dataclass(frozen=True, slots=True)
class GenerationInput:
    """A request's input; exactly one of the three is set."""

    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    conversation: tuple[ChatMessage, ...] | None = None


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """One sequence to generate, everything resolved."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingParams
    speculation: SpeculationParams
    stop_strings: tuple[str, ...] = ()


def check_model(name: str, served: str) -> None:
    """Raises: ModelNotFoundError unless ``name`` is the served model's or empty."""
    if name not in ("", served):
        raise ModelNotFoundError(name, served)


def check_input(message: proto.GenerateRequest | proto.TokenizeRequest) -> GenerationInput:
    """The one input that the request has, not empty.

    Raises:
        InvalidArgumentError: there is none, it is empty, or a role is unknown.
    """
    kind = message.WhichOneof("input")
    if kind == "prompt":
        if not message.prompt:
            raise InvalidArgumentError("prompt", "must not be empty")
        return GenerationInput(prompt=message.prompt)
    if kind == "conversation":
        if not message.conversation.messages:
            raise InvalidArgumentError("conversation.messages", "must have at least one message")
        return GenerationInput(
            conversation=tuple(
                ChatMessage(turn.role, turn.content, index)
                for index, turn in enumerate(message.conversation.messages)
            )
        )
    if isinstance(message, proto.GenerateRequest):
        if kind == "token_ids":
            if not message.token_ids.ids:
                raise InvalidArgumentError("token_ids.ids", "must have at least one token id")
            return GenerationInput(token_ids=tuple(message.token_ids.ids))
        raise InvalidArgumentError("input", "one of prompt, token_ids and conversation must be set")
    raise InvalidArgumentError("input", "one of prompt and conversation must be set")


def check_parameters(message: proto.GenerateRequest) -> None:
    """What can be refused before the input is tokenised: fields of the contract that this version does
    not serve, and values that are wrong for any model.

    Raises:
        InvalidArgumentError: naming the field and what is allowed.
    """
    _check_request_id(message.request_id)
    _refuse_unsupported(message)
    _sampling(message.sampling, seed=0)
    _speculation(message.speculation, VerificationRule.COUPLED)
    _stop_strings(message.stopping.stop)
    stopping = message.stopping
    if stopping.HasField("max_tokens") and stopping.max_tokens < 1:
        raise InvalidArgumentError("stopping.max_tokens", f"must be at least 1, got {stopping.max_tokens}")
    if stopping.min_tokens < 0:
        raise InvalidArgumentError("stopping.min_tokens", f"must not be negative, got {stopping.min_tokens}")


def check_request(
    message: proto.GenerateRequest, prompt_token_ids: Sequence[int], model: ServedModel
) -> CheckedRequest:
    """Resolve a request whose input is known in token ids.

    ``max_tokens`` absent means up to the model's length. A seed that is absent is drawn here. The model's
    end-of-sequence tokens are among ``stopping.stop_token_ids`` unless the request ignores them.

    Raises:
        InvalidArgumentError: naming the field and what is allowed.
    """
    check_parameters(message)
    prompt = tuple(prompt_token_ids)
    field = "token_ids.ids" if message.WhichOneof("input") == "token_ids" else message.WhichOneof("input")
    if not prompt:
        raise InvalidArgumentError(field or "input", "gives no token at all")
    for index, token_id in enumerate(prompt):
        if not 0 <= token_id < model.vocab_size:
            raise InvalidArgumentError(
                f"{field}[{index}]", f"must be a token id in [0, {model.vocab_size - 1}], got {token_id}"
            )
    room = model.max_model_len - len(prompt)
    if room < 1:
        raise InvalidArgumentError(
            field or "input",
            f"has {len(prompt)} tokens; it may have at most {model.max_model_len - 1}, "
            f"one less than the model's length of {model.max_model_len}",
        )
    return CheckedRequest(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt_token_ids=prompt,
        sampling=_sampling(message.sampling, seed=secrets.randbits(64)),
        stopping=_stopping(message.stopping, len(prompt), room, model),
        speculation=_speculation(message.speculation, model.rule),
        stop_strings=_stop_strings(message.stopping.stop),
    )


def _check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_REQUEST_ID_LENGTH:
        raise InvalidArgumentError(
            "request_id", f"may have at most {MAX_REQUEST_ID_LENGTH} characters, got {len(request_id)}"
        )


def _refuse_unsupported(message: proto.GenerateRequest) -> None:
    sampling = message.sampling
    if sampling.n < 0:
        raise InvalidArgumentError("sampling.n", f"must not be negative, got {sampling.n}")
    if sampling.n > 1:
        raise InvalidArgumentError("sampling.n", f"more than one choice is not supported, got {sampling.n}")
    if sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1.0:
        raise InvalidArgumentError(
            "sampling.repetition_penalty",
            f"is not supported; leave it out or at 1, got {sampling.repetition_penalty}",
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        if value != 0.0:
            raise InvalidArgumentError(f"sampling.{name}", f"is not supported; leave it at 0, got {value}")
    if sampling.logit_bias:
        raise InvalidArgumentError("sampling.logit_bias", "is not supported; leave it empty")
    if message.HasField("logprobs"):
        raise InvalidArgumentError("logprobs", "are not supported; leave the field out")


def _sampling(sampling: proto.SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.HasField("seed") else seed,
    )


def _stopping(
    stopping: proto.StoppingParams, prompt_length: int, room: int, model: ServedModel
) -> StoppingParams:
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else room
    if max_tokens > room:
        raise InvalidArgumentError(
            "stopping.max_tokens",
            f"must be in [1, {room}] for a prompt of {prompt_length} tokens and a model length of "
            f"{model.max_model_len}, got {max_tokens}",
        )
    if len(stopping.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgumentError(
            "stopping.stop_token_ids",
            f"may have at most {MAX_STOP_TOKEN_IDS} ids, got {len(stopping.stop_token_ids)}",
        )
    for index, token_id in enumerate(stopping.stop_token_ids):
        if not 0 <= token_id < model.vocab_size:
            raise InvalidArgumentError(
                f"stopping.stop_token_ids[{index}]",
                f"must be a token id in [0, {model.vocab_size - 1}], got {token_id}",
            )
    eos = () if stopping.ignore_eos else model.eos_token_ids
    return StoppingParams(
        max_tokens=max_tokens,
        min_tokens=stopping.min_tokens,
        stop_token_ids=frozenset((*stopping.stop_token_ids, *eos)),
    )


def _stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidArgumentError(
            "stopping.stop", f"may have at most {MAX_STOP_STRINGS} strings, got {len(stop)}"
        )
    for index, text in enumerate(stop):
        if not 1 <= len(text) <= MAX_STOP_STRING_LENGTH:
            raise InvalidArgumentError(
                f"stopping.stop[{index}]",
                f"must have 1 to {MAX_STOP_STRING_LENGTH} characters, got {len(text)}",
            )
    return tuple(stop)


_RULES = {
    proto.VERIFICATION_RULE_COUPLED: VerificationRule.COUPLED,
    proto.VERIFICATION_RULE_STANDARD: VerificationRule.STANDARD,
    proto.VERIFICATION_RULE_BLOCK: VerificationRule.BLOCK,
}


def _speculation(speculation: proto.SpeculationParams, default: VerificationRule) -> SpeculationParams:
    number = speculation.verification
    rule = default if number == proto.VERIFICATION_RULE_UNSPECIFIED else _RULES.get(number)
    if rule is None:
        raise InvalidArgumentError("speculation.verification", f"is no rule of this contract: {number}")
    if rule is not VerificationRule.COUPLED:
        raise InvalidArgumentError(
            "speculation.verification", f"rule {rule.value!r} is not supported; use 'coupled' or leave it out"
        )
    return SpeculationParams(
        num_speculative_tokens=speculation.num_speculative_tokens
        if speculation.HasField("num_speculative_tokens")
        else None,
        rule=rule,
    )
