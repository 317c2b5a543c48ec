"""Requests of the public contract, in one line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.protos import generation_pb2 as proto


def request(
    prompt: str = "",
    *,
    token_ids: Sequence[int] | None = None,
    max_tokens: int | None = 16,
    num_speculative_tokens: int | None = None,
    ignore_eos: bool = True,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    min_tokens: int = 0,
    logprobs: int | None = None,
    verification: int = proto.VERIFICATION_RULE_UNSPECIFIED,
    logit_bias: Mapping[int, float] | None = None,
    bad_token_ids: Sequence[int] = (),
    constraint: proto.Constraint | None = None,
    priority: int = 0,
    timeout_s: float | None = None,
    **sampling: Any,
) -> proto.GenerateRequest:
    """A request with one of ``prompt`` and ``token_ids``; ``sampling`` names fields of SamplingParams."""
    message = proto.GenerateRequest()
    if token_ids is not None:
        message.token_ids.ids.extend(token_ids)
    else:
        message.prompt = prompt
    for name, value in sampling.items():
        setattr(message.sampling, name, value)
    message.sampling.logit_bias.update(logit_bias or {})
    message.sampling.bad_token_ids.extend(bad_token_ids)
    if constraint is not None:
        message.constraint.CopyFrom(constraint)
    message.priority = priority
    if timeout_s is not None:
        message.timeout_s = timeout_s
    if logprobs is not None:
        message.logprobs = logprobs
    message.speculation.verification = verification
    if max_tokens is not None:
        message.stopping.max_tokens = max_tokens
    message.stopping.min_tokens = min_tokens
    message.stopping.ignore_eos = ignore_eos
    message.stopping.stop.extend(stop)
    message.stopping.stop_token_ids.extend(stop_token_ids)
    if num_speculative_tokens is not None:
        message.speculation.num_speculative_tokens = num_speculative_tokens
    return message
