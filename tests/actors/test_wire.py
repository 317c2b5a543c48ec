"""Every message survives the wire, and what cannot be read is refused with its field."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors import wire
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

UINT32 = st.integers(0, 2**32 - 1)
IDS = st.text(min_size=1, max_size=40)
TOKEN_IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20).map(tuple)
ANY_TOKEN_IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20).map(tuple)

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
VOCABULARY_IDS = st.integers(0, 2**31 - 1)

CONSTRAINTS = st.builds(
    Constraint,
    st.sampled_from([kind for kind in ConstraintKind if kind is not ConstraintKind.CHOICE]),
    st.text(max_size=30),
) | st.builds(
    lambda choices: Constraint(ConstraintKind.CHOICE, choices=choices),
    st.lists(st.text(max_size=10), max_size=4).map(tuple),
)
LOGPROBS = st.builds(
    m.TokenLogprobs, FLOATS, st.lists(st.tuples(VOCABULARY_IDS, FLOATS), max_size=20).map(tuple)
)
LAWS = st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**32 - 1)), max_size=20).map(
    lambda pairs: m.DraftLaw(tuple(i for i, _ in pairs), tuple(weight for _, weight in pairs))
)

SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0.0, 100.0, width=32),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(2.0**-20, 1.0, width=32),
    min_p=st.floats(0.0, 1.0, width=32),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.floats(2.0**-20, 100.0, width=32),
    presence_penalty=st.floats(-2.0, 2.0, width=32),
    frequency_penalty=st.floats(-2.0, 2.0, width=32),
    logit_bias=st.dictionaries(VOCABULARY_IDS, st.floats(-100.0, 100.0, width=32), max_size=9).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    bad_token_ids=st.frozensets(VOCABULARY_IDS, max_size=9).map(lambda ids: tuple(sorted(ids))),
    constraint=st.none() | CONSTRAINTS,
)
STOPPING = st.integers(1, 2**31 - 1).flatmap(
    lambda most: st.builds(
        StoppingParams,
        max_tokens=st.just(most),
        min_tokens=st.integers(0, most),
        stop_token_ids=st.frozensets(st.integers(0, 2**31 - 1), max_size=5),
    )
)
SPECULATION = st.builds(
    SpeculationParams,
    num_speculative_tokens=st.none() | st.integers(0, 64),
    rule=st.sampled_from(VerificationRule),
)
STATS = st.builds(
    SpeculationStats,
    rounds=st.integers(0, 2**40),
    draft_tokens=st.integers(0, 2**40),
    accepted_tokens=st.integers(0, 2**40),
    accepted_per_position=st.lists(st.integers(0, 2**40), max_size=8),
)


@st.composite
def submits(draw: st.DrawFn) -> m.Submit:
    token_ids = draw(TOKEN_IDS)
    return m.Submit(
        sequence_id=draw(IDS),
        epoch=draw(UINT32),
        token_ids=token_ids,
        prompt_length=draw(st.integers(1, len(token_ids))),
        sampling=draw(SAMPLING),
        stopping=draw(STOPPING),
        speculation=draw(SPECULATION),
        logprobs=draw(st.none() | st.integers(0, 20)),
        priority=draw(st.integers(-100, 100)),
        ttl_seconds=draw(st.none() | st.integers(0, 2**40).map(lambda milliseconds: milliseconds / 1000)),
    )


@st.composite
def committed(draw: st.DrawFn) -> m.Committed:
    token_ids = draw(TOKEN_IDS)
    flags = draw(st.lists(st.booleans(), min_size=len(token_ids), max_size=len(token_ids)))
    size = draw(st.sampled_from([0, len(token_ids)]))
    logprobs = draw(st.lists(LOGPROBS, min_size=size, max_size=size))
    return m.Committed(draw(IDS), draw(UINT32), draw(UINT32), token_ids, tuple(flags), tuple(logprobs))


@given(submits())
def test_submit_round_trip(submit: m.Submit) -> None:
    encoded = execution.Submit.FromString(wire.submit_to_proto(submit).SerializeToString())
    assert wire.submit_from_proto(encoded) == submit


@given(committed())
def test_committed_round_trip(item: m.Committed) -> None:
    encoded = execution.Committed.FromString(wire.committed_to_proto(item).SerializeToString())
    assert wire.committed_from_proto(encoded) == item
    # The token that a position's chosen entry names is the one that was committed there.
    assert [entry.chosen.token_id for entry in encoded.logprobs] in ([], list(item.token_ids))


@given(
    st.builds(
        m.Finished,
        sequence_id=IDS,
        epoch=UINT32,
        reason=st.sampled_from(FinishReason),
        speculation=STATS,
        cached_prompt_tokens=UINT32,
        error=st.text(max_size=50),
        invalid_argument=st.booleans(),
        resource_exhausted=st.booleans(),
        deadline_exceeded=st.booleans(),
    )
)
def test_finished_round_trip(item: m.Finished) -> None:
    assert wire.finished_from_proto(wire.finished_to_proto(item)) == item


@given(st.builds(m.Load, UINT32, UINT32, st.integers(0, 2**63), UINT32, UINT32, st.booleans()))
def test_load_round_trip(item: m.Load) -> None:
    assert wire.load_from_proto(wire.load_to_proto(item)) == item


@given(
    st.builds(m.DraftHello, IDS, st.text(max_size=20), *[st.integers(1, 2**32 - 1)] * 3, st.just("model")),
    st.binary(min_size=32, max_size=32),
)
def test_hello_round_trip(item: m.DraftHello, vocabulary: bytes) -> None:
    proto = wire.hello_to_proto(item, protocol_version=1, vocabulary_hash=vocabulary)
    assert wire.hello_from_proto(proto) == item
    assert proto.vocabulary_hash == vocabulary


@given(
    st.builds(
        m.Candidates,
        IDS,
        UINT32,
        UINT32,
        ANY_TOKEN_IDS,
        UINT32,
        st.lists(LAWS, max_size=5).map(tuple),
        st.booleans(),
    )
)
def test_candidates_round_trip(item: m.Candidates) -> None:
    encoded = verification.Candidates.FromString(wire.candidates_to_proto(item).SerializeToString())
    assert wire.candidates_from_proto(encoded) == item


@st.composite
def opens(draw: st.DrawFn) -> m.Open:
    token_ids = draw(TOKEN_IDS)
    min_tokens = draw(st.integers(0, 2**31 - 1))
    return m.Open(
        sequence_id=draw(IDS),
        epoch=draw(UINT32),
        token_ids=token_ids,
        sampling=draw(SAMPLING),
        window=draw(UINT32),
        prompt_length=draw(st.integers(0, len(token_ids))),
        stopping=StoppingParams(
            max_tokens=max(min_tokens, 1),
            min_tokens=min_tokens,
            stop_token_ids=draw(st.frozensets(VOCABULARY_IDS, max_size=5)),
        ),
        rule=draw(st.sampled_from(VerificationRule)),
        draft_seed=draw(st.integers(0, 2**64 - 1)),
    )


@given(opens())
def test_open_round_trip(item: m.Open) -> None:
    encoded = verification.Open.FromString(wire.open_to_proto(item).SerializeToString())
    assert wire.open_from_proto(encoded) == item


@given(st.builds(m.Verdict, IDS, UINT32, UINT32, UINT32, ANY_TOKEN_IDS, UINT32, UINT32))
def test_verdict_round_trip(item: m.Verdict) -> None:
    assert wire.verdict_from_proto(wire.verdict_to_proto(item)) == item


@given(IDS, UINT32, st.text(max_size=20))
def test_small_messages_round_trip(sequence_id: str, epoch: int, reason: str) -> None:
    cancel, close = m.Cancel(sequence_id, epoch), m.Close(sequence_id, epoch)
    decline = m.Decline(sequence_id, epoch, reason)
    assert wire.cancel_from_proto(wire.cancel_to_proto(cancel)) == cancel
    assert wire.close_from_proto(wire.close_to_proto(close)) == close
    assert wire.decline_from_proto(wire.decline_to_proto(decline)) == decline


def _submit() -> execution.Submit:
    return execution.Submit(
        sequence_id="a",
        token_ids=[1, 2, 3],
        prompt_length=3,
        sampling=generation.SamplingParams(temperature=1.0, seed=1),
        stopping=generation.StoppingParams(max_tokens=5),
    )


def test_a_plain_submit_is_accepted() -> None:
    submit = wire.submit_from_proto(_submit())
    assert submit.speculation == SpeculationParams()
    assert submit.sampling.top_p == 1.0


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("sequence_id", ""),
        ("prompt_length", 0),
        ("prompt_length", 4),
        ("sampling.top_k", -1),
        ("sampling.top_p", 0.0),
        ("sampling.temperature", float("nan")),
        ("sampling.temperature", -1.0),
        ("sampling.min_p", 1.5),
        ("sampling.presence_penalty", 2.5),
        ("sampling.frequency_penalty", float("nan")),
        ("sampling.repetition_penalty", 0.0),
        ("stopping.max_tokens", 0),
        ("stopping.min_tokens", 6),
        ("speculation.num_speculative_tokens", -1),
        ("speculation.verification", 17),
    ],
)
def test_a_bad_field_is_named(path: str, value: object) -> None:
    proto = _submit()
    owner, _, name = path.rpartition(".")
    setattr(getattr(proto, owner) if owner else proto, name, value)
    with pytest.raises(InvalidArgumentError) as caught:
        wire.submit_from_proto(proto)
    assert caught.value.field == path


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("token_ids", lambda proto: proto.ClearField("token_ids")),
        ("token_ids", lambda proto: proto.token_ids.append(-1)),
        ("sampling.seed", lambda proto: proto.sampling.ClearField("seed")),
        ("sampling.temperature", lambda proto: proto.sampling.ClearField("temperature")),
        ("sampling.logit_bias[3]", lambda proto: proto.sampling.logit_bias.update({3: 101.0})),
        ("sampling.bad_token_ids", lambda proto: proto.sampling.bad_token_ids.extend([2, 1])),
        ("constraint", lambda proto: proto.constraint.SetInParent()),
        ("stopping.stop", lambda proto: proto.stopping.stop.append("x")),
        ("stopping.max_tokens", lambda proto: proto.ClearField("stopping")),
    ],
)
def test_a_missing_or_foreign_field_is_named(path: str, change: object) -> None:
    proto = _submit()
    change(proto)  # type: ignore[operator]
    with pytest.raises(InvalidArgumentError) as caught:
        wire.submit_from_proto(proto)
    assert caught.value.field == path


def test_more_logprobs_than_there_may_be_are_fewer() -> None:
    proto = _submit()
    proto.logprobs = 2**31
    assert wire.submit_from_proto(proto).logprobs == MAX_LOGPROBS


def test_eos_ids_stop_unless_they_are_ignored() -> None:
    proto = _submit()
    proto.stopping.stop_token_ids.append(7)
    proto.eos_token_ids.append(9)
    assert wire.submit_from_proto(proto).stopping.stop_token_ids == {7, 9}
    proto.stopping.ignore_eos = True
    assert wire.submit_from_proto(proto).stopping.stop_token_ids == {7}
