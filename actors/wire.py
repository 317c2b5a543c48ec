"""Conversion between the engine's messages and their protobuf form.

``x_to_proto`` and ``x_from_proto`` are inverse. A ``…_from_proto`` that can meet a bad value raises
``InvalidArgumentError`` with the field; token ids and positions of proposals are passed on as they are,
for the engine to judge, because only it knows the sequence.
"""

from __future__ import annotations

from paceline.actors.engine import messages as m
from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.parameters import (
    MAX_LOGPROBS,
    Constraint,
    ConstraintKind,
    FinishReason,
    SamplingParams,
    SpeculationParams,
    SpeculationStats,
    StoppingParams,
    VerificationRule,
)
from paceline.protos import execution_pb2 as execution
from paceline.protos import generation_pb2 as generation
from paceline.protos import verification_pb2 as verification

MAX_ID_LENGTH = 256
"""Longest sequence, gateway or draft id in characters."""

_RULE_TO_PROTO = {
    VerificationRule.COUPLED: generation.VERIFICATION_RULE_COUPLED,
    VerificationRule.STANDARD: generation.VERIFICATION_RULE_STANDARD,
    VerificationRule.BLOCK: generation.VERIFICATION_RULE_BLOCK,
}
_RULE_FROM_PROTO = {number: rule for rule, number in _RULE_TO_PROTO.items()}

_REASON_TO_PROTO = {
    FinishReason.STOP: generation.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: generation.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: generation.FINISH_REASON_ERROR,
}
_REASON_FROM_PROTO = {number: reason for reason, number in _REASON_TO_PROTO.items()}

# ---------------------------------------------------------------- parameters


def sampling_to_proto(params: SamplingParams) -> generation.SamplingParams:
    """All but the constraint, which travels beside it."""
    return generation.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        bad_token_ids=params.bad_token_ids,
    )


def sampling_from_proto(
    proto: generation.SamplingParams, constraint: Constraint | None = None
) -> SamplingParams:
    for name in ("temperature", "seed"):
        if not proto.HasField(name):
            raise InvalidArgumentError(f"sampling.{name}", "must be resolved before a sequence is placed")
    return SamplingParams(
        temperature=proto.temperature,
        top_k=proto.top_k,
        top_p=proto.top_p if proto.HasField("top_p") else 1.0,
        min_p=proto.min_p,
        seed=proto.seed,
        repetition_penalty=proto.repetition_penalty if proto.HasField("repetition_penalty") else 1.0,
        presence_penalty=proto.presence_penalty,
        frequency_penalty=proto.frequency_penalty,
        logit_bias=tuple(sorted(proto.logit_bias.items())),
        bad_token_ids=tuple(proto.bad_token_ids),
        constraint=constraint,
    )


def constraint_to_proto(constraint: Constraint | None) -> generation.Constraint | None:
    if constraint is None:
        return None
    if constraint.kind is ConstraintKind.CHOICE:
        return generation.Constraint(choice=generation.Constraint.Choices(values=constraint.choices))
    return generation.Constraint(**{constraint.kind.value: constraint.text})  # type: ignore[arg-type]


def constraint_from_proto(proto: generation.Constraint) -> Constraint:
    """Raises: InvalidArgumentError where no kind is set."""
    kind = proto.WhichOneof("kind")
    if kind is None:
        raise InvalidArgumentError("constraint", "one of json_schema, regex, choice and grammar must be set")
    if kind == "choice":
        return Constraint(ConstraintKind.CHOICE, choices=tuple(proto.choice.values))
    return Constraint(ConstraintKind(kind), text=getattr(proto, kind))


def rule_to_proto(rule: VerificationRule) -> generation.VerificationRule:
    return _RULE_TO_PROTO[rule]


def rule_from_proto(field: str, number: int) -> VerificationRule:
    """Unspecified means coupled. Raises: InvalidArgumentError for a rule that this build does not know."""
    if number == generation.VERIFICATION_RULE_UNSPECIFIED:
        return VerificationRule.COUPLED
    rule = _RULE_FROM_PROTO.get(number)  # type: ignore[call-overload]
    if rule is None:
        raise InvalidArgumentError(field, f"unknown rule {number}")
    return rule  # type: ignore[no-any-return]


def speculation_to_proto(params: SpeculationParams) -> generation.SpeculationParams:
    return generation.SpeculationParams(
        num_speculative_tokens=params.num_speculative_tokens, verification=_RULE_TO_PROTO[params.rule]
    )


def speculation_from_proto(proto: generation.SpeculationParams) -> SpeculationParams:
    bounded = proto.HasField("num_speculative_tokens")
    return SpeculationParams(
        num_speculative_tokens=proto.num_speculative_tokens if bounded else None,
        rule=rule_from_proto("speculation.verification", proto.verification),
    )


def speculation_stats_to_proto(stats: SpeculationStats) -> generation.SpeculationStats:
    return generation.SpeculationStats(
        rounds=stats.rounds,
        draft_tokens=stats.draft_tokens,
        accepted_tokens=stats.accepted_tokens,
        accepted_per_position=stats.accepted_per_position,
        mean_acceptance_length=stats.mean_acceptance_length,
    )


def speculation_stats_from_proto(proto: generation.SpeculationStats) -> SpeculationStats:
    return SpeculationStats(
        rounds=proto.rounds,
        draft_tokens=proto.draft_tokens,
        accepted_tokens=proto.accepted_tokens,
        accepted_per_position=list(proto.accepted_per_position),
    )


def finish_reason_to_proto(reason: FinishReason) -> generation.FinishReason:
    return _REASON_TO_PROTO[reason]


def finish_reason_from_proto(number: int) -> FinishReason:
    """A reason of a newer peer that this build does not know counts as an error."""
    return _REASON_FROM_PROTO.get(number, FinishReason.ERROR)  # type: ignore[call-overload,no-any-return]


def _checked_id(field: str, value: str) -> str:
    if not value or len(value) > MAX_ID_LENGTH:
        raise InvalidArgumentError(field, f"must have 1 to {MAX_ID_LENGTH} characters, got {len(value)}")
    return value


# ---------------------------------------------------------------- gateway <-> target


def submit_to_proto(submit: m.Submit) -> execution.Submit:
    """Stop token ids travel merged (the model's own ones included), so ``eos_token_ids`` is empty."""
    return execution.Submit(
        sequence_id=submit.sequence_id,
        epoch=submit.epoch,
        token_ids=submit.token_ids,
        prompt_length=submit.prompt_length,
        sampling=sampling_to_proto(submit.sampling),
        stopping=generation.StoppingParams(
            max_tokens=submit.stopping.max_tokens,
            min_tokens=submit.stopping.min_tokens,
            stop_token_ids=sorted(submit.stopping.stop_token_ids),
        ),
        speculation=speculation_to_proto(submit.speculation),
        logprobs=submit.logprobs,
        constraint=constraint_to_proto(submit.sampling.constraint),
        priority=submit.priority,
        ttl_milliseconds=None if submit.ttl_seconds is None else round(max(submit.ttl_seconds, 0.0) * 1000),
    )


def submit_from_proto(proto: execution.Submit) -> m.Submit:
    """Raises: InvalidArgumentError, with the field and its range."""
    _checked_id("sequence_id", proto.sequence_id)
    token_ids = tuple(proto.token_ids)
    if not token_ids:
        raise InvalidArgumentError("token_ids", "must not be empty")
    if min(token_ids) < 0:
        raise InvalidArgumentError("token_ids", f"must not be negative, got {min(token_ids)}")
    if not 1 <= proto.prompt_length <= len(token_ids):
        raise InvalidArgumentError(
            "prompt_length", f"must be in [1, {len(token_ids)}] (all token_ids), got {proto.prompt_length}"
        )
    if not proto.stopping.HasField("max_tokens"):
        raise InvalidArgumentError("stopping.max_tokens", "must be resolved before a sequence is placed")
    if proto.stopping.stop:
        raise InvalidArgumentError("stopping.stop", "stop strings are matched by the gateway, not a target")
    stop_token_ids = set(proto.stopping.stop_token_ids)
    if not proto.stopping.ignore_eos:
        stop_token_ids.update(proto.eos_token_ids)
    return m.Submit(
        sequence_id=proto.sequence_id,
        epoch=proto.epoch,
        token_ids=token_ids,
        prompt_length=proto.prompt_length,
        sampling=sampling_from_proto(
            proto.sampling, constraint_from_proto(proto.constraint) if proto.HasField("constraint") else None
        ),
        stopping=StoppingParams(
            max_tokens=proto.stopping.max_tokens,
            min_tokens=proto.stopping.min_tokens,
            stop_token_ids=frozenset(stop_token_ids),
        ),
        speculation=speculation_from_proto(proto.speculation),
        logprobs=min(proto.logprobs, MAX_LOGPROBS) if proto.HasField("logprobs") else None,
        priority=proto.priority,
        ttl_seconds=proto.ttl_milliseconds / 1000 if proto.HasField("ttl_milliseconds") else None,
    )


def cancel_to_proto(cancel: m.Cancel) -> execution.Cancel:
    return execution.Cancel(sequence_id=cancel.sequence_id, epoch=cancel.epoch)


def cancel_from_proto(proto: execution.Cancel) -> m.Cancel:
    return m.Cancel(sequence_id=proto.sequence_id, epoch=proto.epoch)


def committed_to_proto(committed: m.Committed) -> execution.Committed:
    return execution.Committed(
        sequence_id=committed.sequence_id,
        epoch=committed.epoch,
        base_position=committed.base_position,
        token_ids=committed.token_ids,
        accepted=committed.accepted,
        logprobs=[
            generation.PositionLogprobs(
                chosen=generation.TokenLogprob(token_id=token_id, logprob=item.logprob),
                top=[generation.TokenLogprob(token_id=other, logprob=value) for other, value in item.top],
            )
            for token_id, item in zip(committed.token_ids, committed.logprobs, strict=False)
        ],
    )


def committed_from_proto(proto: execution.Committed) -> m.Committed:
    return m.Committed(
        sequence_id=proto.sequence_id,
        epoch=proto.epoch,
        base_position=proto.base_position,
        token_ids=tuple(proto.token_ids),
        accepted=tuple(proto.accepted),
        logprobs=tuple(
            m.TokenLogprobs(item.chosen.logprob, tuple((entry.token_id, entry.logprob) for entry in item.top))
            for item in proto.logprobs
        ),
    )


def finished_to_proto(finished: m.Finished) -> execution.Finished:
    return execution.Finished(
        sequence_id=finished.sequence_id,
        epoch=finished.epoch,
        reason=finish_reason_to_proto(finished.reason),
        error=finished.error,
        speculation=speculation_stats_to_proto(finished.speculation),
        cached_prompt_tokens=finished.cached_prompt_tokens,
        invalid_argument=finished.invalid_argument,
        resource_exhausted=finished.resource_exhausted,
        deadline_exceeded=finished.deadline_exceeded,
    )


def finished_from_proto(proto: execution.Finished) -> m.Finished:
    return m.Finished(
        sequence_id=proto.sequence_id,
        epoch=proto.epoch,
        reason=finish_reason_from_proto(proto.reason),
        speculation=speculation_stats_from_proto(proto.speculation),
        cached_prompt_tokens=proto.cached_prompt_tokens,
        error=proto.error,
        invalid_argument=proto.invalid_argument,
        resource_exhausted=proto.resource_exhausted,
        deadline_exceeded=proto.deadline_exceeded,
    )


def load_to_proto(load: m.Load) -> execution.Load:
    return execution.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_pending_tokens=load.num_pending_tokens,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        draining=load.draining,
    )


def load_from_proto(proto: execution.Load) -> m.Load:
    return m.Load(
        num_running=proto.num_running,
        num_waiting=proto.num_waiting,
        num_pending_tokens=proto.num_pending_tokens,
        free_blocks=proto.free_blocks,
        total_blocks=proto.total_blocks,
        draining=proto.draining,
    )


# ---------------------------------------------------------------- draft <-> target


def hello_to_proto(
    hello: m.DraftHello, *, protocol_version: int, vocabulary_hash: bytes
) -> verification.Hello:
    return verification.Hello(
        protocol_version=protocol_version,
        draft_id=hello.draft_id,
        model=hello.model,
        vocabulary_hash=vocabulary_hash,
        vocab_size=hello.vocab_size,
        capacity=hello.capacity,
        max_model_len=hello.max_model_len,
        method=hello.method,
        host=hello.host,
        num_threads=hello.num_threads,
    )


def hello_from_proto(proto: verification.Hello) -> m.DraftHello:
    """Raises: InvalidArgumentError, with the field. Version and vocabulary are compared elsewhere."""
    _checked_id("hello.draft_id", proto.draft_id)
    for name in ("vocab_size", "capacity", "max_model_len"):
        if getattr(proto, name) < 1:
            raise InvalidArgumentError(f"hello.{name}", "must be at least 1, got 0")
    return m.DraftHello(
        draft_id=proto.draft_id,
        model=proto.model,
        vocab_size=proto.vocab_size,
        capacity=proto.capacity,
        max_model_len=proto.max_model_len,
        method=proto.method,
        host=proto.host,
        num_threads=proto.num_threads,
    )


def candidates_to_proto(candidates: m.Candidates) -> verification.Candidates:
    return verification.Candidates(
        sequence_id=candidates.sequence_id,
        epoch=candidates.epoch,
        base_position=candidates.base_position,
        token_ids=candidates.token_ids,
        revision=candidates.revision,
        laws=[verification.DraftLaw(token_ids=law.token_ids, weights=law.weights) for law in candidates.laws],
        prepared=candidates.prepared,
    )


def candidates_from_proto(proto: verification.Candidates) -> m.Candidates:
    return m.Candidates(
        sequence_id=proto.sequence_id,
        epoch=proto.epoch,
        base_position=proto.base_position,
        token_ids=tuple(proto.token_ids),
        revision=proto.revision,
        laws=tuple(m.DraftLaw(tuple(law.token_ids), tuple(law.weights)) for law in proto.laws),
        prepared=proto.prepared,
    )


def decline_to_proto(decline: m.Decline) -> verification.Decline:
    return verification.Decline(sequence_id=decline.sequence_id, epoch=decline.epoch, reason=decline.reason)


def decline_from_proto(proto: verification.Decline) -> m.Decline:
    return m.Decline(sequence_id=proto.sequence_id, epoch=proto.epoch, reason=proto.reason)


def open_to_proto(opened: m.Open) -> verification.Open:
    return verification.Open(
        sequence_id=opened.sequence_id,
        epoch=opened.epoch,
        token_ids=opened.token_ids,
        sampling=sampling_to_proto(opened.sampling),
        window=opened.window,
        prompt_length=opened.prompt_length,
        stopping=generation.StoppingParams(
            min_tokens=opened.stopping.min_tokens, stop_token_ids=sorted(opened.stopping.stop_token_ids)
        ),
        constraint=constraint_to_proto(opened.sampling.constraint),
        rule=rule_to_proto(opened.rule),
        draft_seed=opened.draft_seed,
    )


def open_from_proto(proto: verification.Open) -> m.Open:
    """Raises: InvalidArgumentError, with the field: the draft then declines this sequence."""
    token_ids = tuple(proto.token_ids)
    if not token_ids or min(token_ids) < 0:
        raise InvalidArgumentError("token_ids", "must be token ids, at least one")
    return m.Open(
        sequence_id=proto.sequence_id,
        epoch=proto.epoch,
        token_ids=token_ids,
        sampling=sampling_from_proto(
            proto.sampling, constraint_from_proto(proto.constraint) if proto.HasField("constraint") else None
        ),
        window=proto.window,
        prompt_length=min(proto.prompt_length, len(token_ids)),
        stopping=StoppingParams(
            # The draft ends nothing; the bound only has to admit min_tokens.
            max_tokens=max(proto.stopping.min_tokens, 1),
            min_tokens=proto.stopping.min_tokens,
            stop_token_ids=frozenset(proto.stopping.stop_token_ids),
        ),
        rule=rule_from_proto("rule", proto.rule),
        draft_seed=proto.draft_seed,
    )


def verdict_to_proto(verdict: m.Verdict) -> verification.Verdict:
    return verification.Verdict(
        sequence_id=verdict.sequence_id,
        epoch=verdict.epoch,
        base_position=verdict.base_position,
        num_accepted=verdict.num_accepted,
        committed_token_ids=verdict.committed_token_ids,
        window=verdict.window,
        branch_tokens=verdict.branch_tokens,
        tail_tokens=verdict.tail_tokens,
    )


def verdict_from_proto(proto: verification.Verdict) -> m.Verdict:
    return m.Verdict(
        sequence_id=proto.sequence_id,
        epoch=proto.epoch,
        base_position=proto.base_position,
        num_accepted=proto.num_accepted,
        committed_token_ids=tuple(proto.committed_token_ids),
        window=proto.window,
        branch_tokens=proto.branch_tokens,
        tail_tokens=proto.tail_tokens,
    )


def close_to_proto(close: m.Close) -> verification.Close:
    return verification.Close(sequence_id=close.sequence_id, epoch=close.epoch)


def close_from_proto(proto: verification.Close) -> m.Close:
    return m.Close(sequence_id=proto.sequence_id, epoch=proto.epoch)
