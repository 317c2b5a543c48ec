"""A request of the public contract, checked: either what the gateway can run, or the field at fault."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.noise import derive_seed
from paceline.actors.engine.parameters import (
    SamplingParams,
    SpeculationParams,
    StoppingParams,
    VerificationRule,
)
from paceline.actors.engine.priority import check_priority
from paceline.cluster.errors import ModelNotFoundError
from paceline.cluster.request_parameters import (
    check_something_is_allowed,
    check_stopping,
    num_choices,
    num_logprobs,
    sampling_params,
    speculation_params,
    stop_strings,
    stopping_params,
)
from paceline.cluster.time_limit import TimeLimit, timeout_of
from paceline.cluster.tokenization import ChatMessage
from paceline.protos import generation_pb2 as proto

MAX_REQUEST_ID_LENGTH = 128
MAX_MESSAGES = 4096
"""Of a conversation."""
MESSAGE_SIZE = 64
"""What a message costs besides its text, in characters: role, template, special tokens."""
NORMALISED_MARGIN = 4


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

    @property
    def size(self) -> int:
        """What it costs to turn it into token ids, in characters."""
        if self.token_ids is not None:
            return 0
        if self.conversation is not None:
            return sum(len(message.content) + MESSAGE_SIZE for message in self.conversation)
        return len(self.prompt or "")


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """What to generate, everything resolved: ``n`` sequences that differ in their seeds alone."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingParams
    speculation: SpeculationParams
    stop_strings: tuple[str, ...] = ()
    n: int = 1
    """Number of choices."""
    logprobs: int | None = None
    """Top entries to report for each token; None = no logprobs."""
    priority: int = 0
    """Lower = served earlier."""
    time_limit: TimeLimit | None = None
    """How long all of it may take; None = what the gateway allows, from now on."""

    def choice(self, index: int) -> CheckedRequest:
        """The request of choice ``index`` alone, which gives the same tokens."""
        seed = derive_seed(self.sampling.seed, index)
        return replace(self, n=1, sampling=replace(self.sampling, seed=seed))


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
        if len(message.conversation.messages) > MAX_MESSAGES:
            raise InvalidArgumentError(
                "conversation.messages",
                f"may have at most {MAX_MESSAGES} messages, got {len(message.conversation.messages)}",
            )
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


def check_size(source: GenerationInput, model: ServedModel, max_token_characters: int) -> None:
    """Refuse text that cannot fit whatever its tokens are, before it is tokenised.

    Raises:
        InvalidArgumentError: it is too long for the model.
    """
    if source.prompt is not None:
        field, size = "prompt", len(source.prompt)
    elif source.conversation is not None:
        field = "conversation"
        size = sum(len(message.content) for message in source.conversation)
    else:
        return
    # A tokenizer's normaliser may shorten a text, by composing characters, but not without end.
    most = NORMALISED_MARGIN * max_token_characters * model.max_model_len
    if size > most:
        raise InvalidArgumentError(
            field,
            f"has {size} characters, more than {model.max_model_len} tokens (the model's length) can hold",
        )


def check_parameters(message: proto.GenerateRequest) -> None:
    """What can be refused before the input is tokenised: values that are wrong for any model.

    Raises:
        InvalidArgumentError: naming the field and what is allowed.
    """
    _check_request_id(message.request_id)
    num_choices(message.sampling)
    num_logprobs(message)
    check_priority(message.priority)
    timeout_of(message)
    sampling_params(message, seed=0)
    speculation_params(message.speculation, VerificationRule.COUPLED)
    check_stopping(message.stopping)


def check_request(
    message: proto.GenerateRequest,
    prompt_token_ids: Sequence[int],
    model: ServedModel,
    time_limit: TimeLimit | None = None,
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
    sampling = sampling_params(message, secrets.randbits(64), model.vocab_size)
    stopping = stopping_params(message.stopping, len(prompt), room, model.vocab_size, model.eos_token_ids)
    check_something_is_allowed(sampling, stopping, model.vocab_size)
    return CheckedRequest(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt_token_ids=prompt,
        sampling=sampling,
        stopping=stopping,
        speculation=speculation_params(message.speculation, model.rule),
        stop_strings=stop_strings(message.stopping.stop),
        n=num_choices(message.sampling),
        logprobs=num_logprobs(message),
        priority=message.priority,
        time_limit=time_limit,
    )


def _check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_REQUEST_ID_LENGTH:
        raise InvalidArgumentError(
            "request_id", f"may have at most {MAX_REQUEST_ID_LENGTH} characters, got {len(request_id)}"
        )
