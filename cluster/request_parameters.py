"""The parameters of a request, from the public contract's fields to the engine's, each checked by name.

Every function raises ``InvalidArgumentError`` with the field at fault and what is allowed. ``vocab_size`` and
``room`` are None where they are not known yet: what depends on them is then left for the second look.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.parameters import (
    MAX_BAD_TOKENS,
    MAX_BIASED_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    Constraint,
    SamplingParams,
    SpeculationParams,
    StoppingParams,
    VerificationRule,
)
from paceline.actors.wire import constraint_from_proto, rule_from_proto
from paceline.protos import generation_pb2 as proto

MAX_CHOICES = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 512
"""In characters; bounds what may be held back of a stream."""
MAX_STOP_TOKEN_IDS = 256
MAX_CONSTRAINT_LENGTH = 65536
"""Characters of a schema, expression or grammar, or of all choices together."""
MAX_CONSTRAINT_CHOICES = 1024


def num_choices(sampling: proto.SamplingParams) -> int:
    """How many choices the request has; 0 stands for one."""
    if not 0 <= sampling.n <= MAX_CHOICES:
        raise InvalidArgumentError(
            "sampling.n", f"must be in [0, {MAX_CHOICES}] (0 means one), got {sampling.n}"
        )
    return max(sampling.n, 1)


def num_logprobs(message: proto.GenerateRequest) -> int | None:
    """Top entries to report for each token; None = no logprobs."""
    if not message.HasField("logprobs"):
        return None
    if not 0 <= message.logprobs <= MAX_LOGPROBS:
        raise InvalidArgumentError("logprobs", f"must be in [0, {MAX_LOGPROBS}], got {message.logprobs}")
    return message.logprobs


def constraint_of(message: proto.GenerateRequest) -> Constraint | None:
    """What the text must look like. Whether a vocabulary can follow it is a question for its compiler."""
    if not message.HasField("constraint"):
        return None
    constraint = constraint_from_proto(message.constraint)
    field = f"constraint.{constraint.kind.value}"
    if message.constraint.HasField("choice"):
        if not constraint.choices:
            raise InvalidArgumentError(f"{field}.values", "must have at least one string")
        if len(constraint.choices) > MAX_CONSTRAINT_CHOICES:
            raise InvalidArgumentError(
                f"{field}.values",
                f"may have at most {MAX_CONSTRAINT_CHOICES} strings, got {len(constraint.choices)}",
            )
        for index, choice in enumerate(constraint.choices):
            if not choice:
                raise InvalidArgumentError(f"{field}.values[{index}]", "must not be empty")
    elif not constraint.text.strip():
        raise InvalidArgumentError(field, "must not be empty")
    length = len(constraint.text) + sum(map(len, constraint.choices))
    if length > MAX_CONSTRAINT_LENGTH:
        raise InvalidArgumentError(
            field, f"may have at most {MAX_CONSTRAINT_LENGTH} characters, got {length}"
        )
    return constraint


def sampling_params(
    message: proto.GenerateRequest, seed: int, vocab_size: int | None = None
) -> SamplingParams:
    """``seed`` is taken where the request has none."""
    sampling = message.sampling
    repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    return SamplingParams(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.HasField("seed") else seed,
        repetition_penalty=repetition,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=_logit_bias(sampling, vocab_size),
        bad_token_ids=_bad_token_ids(sampling, vocab_size),
        constraint=constraint_of(message),
    )


def _logit_bias(sampling: proto.SamplingParams, vocab_size: int | None) -> tuple[tuple[int, float], ...]:
    if len(sampling.logit_bias) > MAX_BIASED_TOKENS:
        raise InvalidArgumentError(
            "sampling.logit_bias",
            f"may have at most {MAX_BIASED_TOKENS} tokens, got {len(sampling.logit_bias)}",
        )
    for token_id in sampling.logit_bias:
        _check_token_id(f"sampling.logit_bias[{token_id}]", token_id, vocab_size)
    return tuple(sorted(sampling.logit_bias.items()))


def _bad_token_ids(sampling: proto.SamplingParams, vocab_size: int | None) -> tuple[int, ...]:
    _check_token_ids("sampling.bad_token_ids", sampling.bad_token_ids, MAX_BAD_TOKENS, vocab_size)
    return tuple(sorted(set(sampling.bad_token_ids)))


def _check_token_ids(field: str, token_ids: Sequence[int], most: int, vocab_size: int | None) -> None:
    if len(token_ids) > most:
        raise InvalidArgumentError(field, f"may have at most {most} ids, got {len(token_ids)}")
    for index, token_id in enumerate(token_ids):
        _check_token_id(f"{field}[{index}]", token_id, vocab_size)


def _check_token_id(field: str, token_id: int, vocab_size: int | None) -> None:
    if vocab_size is None:
        if token_id < 0:
            raise InvalidArgumentError(field, f"must be a token id, not negative, got {token_id}")
    elif not 0 <= token_id < vocab_size:
        raise InvalidArgumentError(field, f"must be a token id in [0, {vocab_size - 1}], got {token_id}")


def stopping_params(
    stopping: proto.StoppingParams,
    prompt_length: int,
    room: int,
    vocab_size: int,
    eos_token_ids: Iterable[int],
) -> StoppingParams:
    """``room``: tokens that the model's length leaves after the prompt, and ``max_tokens`` where the request
    has none. The model's end-of-sequence tokens are among the stop tokens unless the request ignores them."""
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else room
    if max_tokens > room:
        raise InvalidArgumentError(
            "stopping.max_tokens",
            f"must be in [1, {room}] for a prompt of {prompt_length} tokens and a model length of "
            f"{prompt_length + room}, got {max_tokens}",
        )
    _check_token_ids("stopping.stop_token_ids", stopping.stop_token_ids, MAX_STOP_TOKEN_IDS, vocab_size)
    eos = () if stopping.ignore_eos else eos_token_ids
    return StoppingParams(
        max_tokens=max_tokens,
        min_tokens=stopping.min_tokens,
        stop_token_ids=frozenset((*stopping.stop_token_ids, *eos)),
    )


def check_stopping(stopping: proto.StoppingParams) -> None:
    """What is wrong for any model and prompt."""
    stop_strings(stopping.stop)
    if stopping.HasField("max_tokens") and stopping.max_tokens < 1:
        raise InvalidArgumentError("stopping.max_tokens", f"must be at least 1, got {stopping.max_tokens}")
    if stopping.min_tokens < 0:
        raise InvalidArgumentError("stopping.min_tokens", f"must not be negative, got {stopping.min_tokens}")


def stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
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


def speculation_params(speculation: proto.SpeculationParams, default: VerificationRule) -> SpeculationParams:
    """``default``: the service's rule, for requests that name none."""
    number = speculation.verification
    named = number != proto.VERIFICATION_RULE_UNSPECIFIED
    return SpeculationParams(
        num_speculative_tokens=speculation.num_speculative_tokens
        if speculation.HasField("num_speculative_tokens")
        else None,
        rule=rule_from_proto("speculation.verification", number) if named else default,
    )


def check_something_is_allowed(sampling: SamplingParams, stopping: StoppingParams, vocab_size: int) -> None:
    """Refuse what contradicts itself: a request whose bias, bad ids and ``min_tokens`` leave no token at all
    for its first position."""
    bad = {token_id for token_id, value in sampling.logit_bias if value <= -MAX_LOGIT_BIAS}
    bad.update(sampling.bad_token_ids)
    forced = {token_id for token_id, value in sampling.logit_bias if value >= MAX_LOGIT_BIAS}
    early = stopping.stop_token_ids if stopping.min_tokens > 0 else frozenset[int]()
    if forced:
        if forced <= bad:
            raise InvalidArgumentError(
                "sampling.logit_bias",
                f"allows no token but {_some(forced)}, which sampling.bad_token_ids forbid",
            )
        if forced <= bad | early:
            raise InvalidArgumentError(
                "sampling.logit_bias",
                f"allows no token but {_some(forced - bad)}, which may not come before "
                f"stopping.min_tokens = {stopping.min_tokens}",
            )
    elif len(bad) >= vocab_size:
        field = "sampling.bad_token_ids" if sampling.bad_token_ids else "sampling.logit_bias"
        raise InvalidArgumentError(field, f"leaves none of the model's {vocab_size} tokens")
    elif len(bad | early) >= vocab_size:
        raise InvalidArgumentError(
            "stopping.min_tokens",
            f"is {stopping.min_tokens}, yet every token that is allowed at all is a stop token",
        )


def _some(token_ids: set[int]) -> str:
    shown = ", ".join(str(token_id) for token_id in sorted(token_ids)[:5])
    return shown + (", …" if len(token_ids) > 5 else "")
