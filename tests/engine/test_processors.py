"""Processors: each position by its own history, whatever was tried and rejected before."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from paceline.actors.engine.config import NgramConfig, TargetEngineConfig
from paceline.actors.engine.messages import Submit
from paceline.actors.engine.parameters import (
    FinishReason,
    SamplingParams,
    StoppingParams,
)
from paceline.actors.engine.processors import LogitProcessors
from paceline.actors.engine.target_engine import TargetEngine
from paceline.actors.engine.verifier import NO_TOKEN
from tests.engine.fakes import HashLaw, HashRunner, Network, make_submit, processed, reference

VOCAB_SIZE = 70
"""No multiple of 32: the last word of a mask has bits of no token."""
TARGET = HashLaw()
NO_NGRAM = NgramConfig(enabled=False)
LARGEST = float(np.finfo(np.float32).max)


class ParityMatcher:
    """A constraint with a state: after a completion of even sum only even ids may follow, else only ids that
    three divides."""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self.vocab_size = vocab_size
        self.total = 0

    def advance(self, token_ids: Sequence[int]) -> None:
        self.total += sum(token_ids)

    def find_end(self, token_ids: Sequence[int]) -> int | None:
        return None

    def allowed(self, total: int) -> npt.NDArray[np.bool_]:
        return np.arange(self.vocab_size) % (3 if total % 2 else 2) == 0

    def masks(self, tail: Sequence[int]) -> npt.NDArray[np.uint32]:
        totals = np.cumsum([self.total, *tail])
        words = np.zeros((len(totals), -(-self.vocab_size // 32)), dtype=np.uint32)
        for row, total in enumerate(totals):
            for token_id in np.flatnonzero(self.allowed(int(total))):
                words[row, token_id // 32] |= np.uint32(1 << int(token_id) % 32)
        return words


def random_sampling(rng: random.Random, vocab_size: int = VOCAB_SIZE, **options: object) -> SamplingParams:
    """Each processor in half of the requests, often several together."""

    def maybe(value: object, otherwise: object) -> object:
        return value if rng.random() < 0.5 else otherwise

    biased = sorted(rng.sample(range(vocab_size), 6))
    values = [rng.choice([-100.0, 3.5, -7.25, 0.1, rng.uniform(-5, 5)]) for _ in biased]
    if rng.random() < 0.15:
        values[0] = values[-1] = 100.0
    bad = sorted(set(rng.sample(range(vocab_size), 4)) - {biased[0]})
    return SamplingParams(
        repetition_penalty=maybe(rng.choice([0.4, 1.3, 2.0, 50.0]), 1.0),  # type: ignore[arg-type]
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),  # type: ignore[arg-type]
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),  # type: ignore[arg-type]
        logit_bias=maybe(tuple(zip(biased, values, strict=True)), ()),  # type: ignore[arg-type]
        bad_token_ids=maybe(tuple(bad), ()),  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


def apply(
    processors: LogitProcessors | None, logits: np.ndarray, tail: Sequence[int] = (), first: int = 0
) -> list[np.ndarray]:
    rows = [logits.copy() for _ in range(first, len(tail) + 1)]
    if processors is not None:
        for row, edit in zip(rows, processors.edits(tail, first), strict=True):
            if edit is not None:
                edit.apply(row)
    return rows


def single(
    logits: Sequence[float],
    params: SamplingParams,
    stopping: StoppingParams | None = None,
    prompt: Sequence[int] = (0,),
    completion: Sequence[int] = (),
) -> list[float]:
    """One position of a small vocabulary."""
    processors = LogitProcessors.create(params, stopping or StoppingParams(50), len(prompt), len(logits))
    assert processors is not None
    processors.advance([*prompt, *completion])
    found: list[float] = apply(processors, np.array(logits, dtype=np.float32))[0].tolist()
    return found


class TestAgainstTheDefinition:
    @pytest.mark.parametrize("seed", range(60))
    def test_random_tails_and_rejections(self, seed: int) -> None:
        """One object follows a sequence through tails that are kept in part or not at all; at every
        position the logits are those computed from nothing."""
        rng = random.Random(seed)
        params = random_sampling(rng)
        stops = frozenset(rng.sample(range(VOCAB_SIZE), 3))
        stopping = StoppingParams(60, rng.choice([0, 0, 5, 12]), stops)
        constrained = rng.random() < 0.3
        prompt_length = rng.randint(1, 20)
        token_ids = [rng.randrange(VOCAB_SIZE) for _ in range(prompt_length)]
        if constrained and not params.processes_logits:
            params = SamplingParams(bad_token_ids=(1,))
        processors = LogitProcessors.create(
            params, stopping, prompt_length, VOCAB_SIZE, ParityMatcher() if constrained else None
        )
        logits = np.random.default_rng(seed).normal(0, 4, VOCAB_SIZE).astype(np.float32)
        logits[rng.sample(range(VOCAB_SIZE), 3)] = -np.inf
        for _ in range(25):
            tail = [
                rng.choice([*token_ids[-3:], rng.randrange(VOCAB_SIZE)]) for _ in range(rng.randint(0, 5))
            ]
            if processors is not None:
                processors.advance(token_ids)
            first = rng.choice([0, 0, len(tail)])
            for depth, row in enumerate(apply(processors, logits, tail, first), first):
                history = [*token_ids, *tail[:depth]]
                expected = processed(logits, params, stopping, history, prompt_length)
                if constrained:
                    matcher = ParityMatcher()
                    expected[~matcher.allowed(sum(history[prompt_length:]))] = -np.inf
                assert np.array_equal(row, expected), (depth, params)
            token_ids += tail[: rng.randint(0, len(tail))]
            token_ids += [rng.randrange(VOCAB_SIZE)]

    def test_a_resumed_sequence_has_the_same_edits(self) -> None:
        rng = random.Random(3)
        logits = np.random.default_rng(3).normal(0, 4, VOCAB_SIZE).astype(np.float32)
        for _ in range(20):
            params, stopping = random_sampling(rng), StoppingParams(60, 9, frozenset({4, 5}))
            token_ids = [rng.randrange(VOCAB_SIZE) for _ in range(30)]
            followed = LogitProcessors.create(params, stopping, 6, VOCAB_SIZE, ParityMatcher())
            resumed = LogitProcessors.create(params, stopping, 6, VOCAB_SIZE, ParityMatcher())
            assert followed is not None
            assert resumed is not None
            for end in range(6, 31):
                followed.advance(token_ids[:end])
                followed.edits([1, 2, 3])
            resumed.advance(token_ids)
            tail = [7, 7, 2]
            pairs = zip(apply(followed, logits, tail), apply(resumed, logits, tail), strict=True)
            assert all(np.array_equal(one, other) for one, other in pairs)

    def test_committed_tokens_never_shrink(self) -> None:
        processors = LogitProcessors.create(
            SamplingParams(presence_penalty=1.0), StoppingParams(5), 1, VOCAB_SIZE
        )
        assert processors is not None
        processors.advance([1, 2, 3])
        with pytest.raises(ValueError, match="3 tokens"):
            processors.advance([1, 2])


class TestEachProcessor:
    def test_nothing_to_do(self) -> None:
        plain = SamplingParams(temperature=0.3, top_k=4, top_p=0.5, min_p=0.1, seed=9)
        assert LogitProcessors.create(plain, StoppingParams(9, 0, frozenset({1})), 3, 10) is None
        assert LogitProcessors.create(plain, StoppingParams(9, 4), 3, 10) is None

    def test_positions_that_nothing_changes_have_no_edit(self) -> None:
        early = LogitProcessors.create(SamplingParams(), StoppingParams(9, 2, frozenset({1})), 1, 10)
        assert early is not None
        early.advance([3])
        assert [edit is None for edit in early.edits([5, 5, 5])] == [False, False, True, True]
        late = LogitProcessors.create(SamplingParams(presence_penalty=1.0), StoppingParams(9), 1, 10)
        assert late is not None
        late.advance([3])
        assert [edit is None for edit in late.edits([5])] == [True, False]

    def test_repetition_divides_what_is_positive_and_multiplies_what_is_not(self) -> None:
        found = single([2.0, -2.0, 0.0, 2.0], SamplingParams(repetition_penalty=2.0), prompt=(0, 1, 2))
        assert found == [1.0, -4.0, 0.0, 2.0]

    def test_repetition_sees_prompt_and_completion_the_others_the_completion_only(self) -> None:
        options = {"prompt": (0, 0), "completion": (1, 1, 2)}
        logits = [1.0, 1.0, 1.0, 1.0]
        assert single(logits, SamplingParams(repetition_penalty=2.0), **options) == [0.5, 0.5, 0.5, 1.0]
        assert single(logits, SamplingParams(frequency_penalty=0.5), **options) == [1.0, 0.0, 0.5, 1.0]
        assert single(logits, SamplingParams(presence_penalty=0.5), **options) == [1.0, 0.5, 0.5, 1.0]

    def test_penalties_follow_the_bias(self) -> None:
        params = SamplingParams(
            repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.25, logit_bias=((1, 3.0),)
        )
        assert single([0.0, -1.0], params, completion=(1, 1))[1] == (-1.0 + 3.0) / 2.0 - 2.0 - 0.25

    def test_a_bias_of_a_hundred_forbids_or_forces(self) -> None:
        params = SamplingParams(logit_bias=((0, -100.0), (2, 5.0)))
        assert single([500.0, 1.0, 2.0], params) == [-math.inf, 1.0, 7.0]
        params = SamplingParams(logit_bias=((0, 5.0), (1, 100.0), (2, 100.0)))
        assert single([500.0, 1.0, 2.0], params) == [-math.inf, 1.0, 2.0]

    def test_stop_tokens_are_held_back_until_min_tokens_precede(self) -> None:
        stopping = StoppingParams(9, 2, frozenset({1, 7}))
        logits = [0.0, 5.0, 1.0]
        for completion, expected in (((), -math.inf), ((2,), -math.inf), ((2, 2), 5.0), ((2, 2, 2), 5.0)):
            processors = LogitProcessors.create(SamplingParams(), stopping, 1, 3)
            assert processors is not None
            processors.advance([0, *completion])
            row = apply(processors, np.array(logits, dtype=np.float32))[0]
            assert row.tolist() == [0.0, expected, 1.0]

    @pytest.mark.parametrize(
        ("params", "stopping"),
        [
            (SamplingParams(logit_bias=((1, 100.0),), bad_token_ids=(1,)), StoppingParams(9)),
            (SamplingParams(logit_bias=((1, 100.0),)), StoppingParams(9, 3, frozenset({1}))),
            (SamplingParams(logit_bias=((9, 100.0),)), StoppingParams(9)),
            (SamplingParams(bad_token_ids=(0, 1), logit_bias=((2, -100.0),)), StoppingParams(9)),
        ],
    )
    def test_contradictions_leave_nothing(self, params: SamplingParams, stopping: StoppingParams) -> None:
        assert single([1.0, 2.0, 3.0], params, stopping) == [-math.inf] * 3

    def test_tokens_past_the_vocabulary_are_left_out(self) -> None:
        params = SamplingParams(logit_bias=((1, 2.0), (50, 3.0)), bad_token_ids=(0, 60))
        assert single([1.0, 2.0, 3.0], params) == [-math.inf, 4.0, 3.0]

    @pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-40, 1e-10, 100.0])
    def test_penalties_of_any_size_leave_numbers(self, penalty: float) -> None:
        logits = [LARGEST, 30.0, 0.0, -30.0, -LARGEST, -math.inf]
        with np.errstate(invalid="raise", divide="raise"):
            found = single(
                logits,
                SamplingParams(repetition_penalty=penalty, frequency_penalty=2.0, presence_penalty=-2.0),
                prompt=range(6),
                completion=range(6),
            )
        assert np.isfinite(found[:5]).all()
        assert found[5] == -math.inf
        assert found == sorted(found, reverse=True)


# ---------------------------------------------------------------- in the engines


def make_network(config: TargetEngineConfig, **options: int) -> Network:
    return Network(TargetEngine(HashRunner(TARGET, **options), config), random.Random(0))


def random_events(count: int, seed: int) -> list[Submit]:
    rng = random.Random(seed)
    return [
        make_submit(
            f"s{index}",
            [rng.randrange(32) for _ in range(rng.randint(1, 9))],
            max_tokens=rng.randint(12, 30),
            min_tokens=rng.choice([0, 6, 12]),
            stop_token_ids=rng.sample(range(32), 3),
            sampling=random_sampling(
                rng, 32, temperature=rng.choice([0.0, 0.7, 1.5]), seed=rng.getrandbits(64)
            ),
        )
        for index in range(count)
    ]


def check(network: Network, events: Sequence[Submit]) -> None:
    for event in events:
        key = (event.sequence_id, event.epoch)
        expected, reason = reference(TARGET, event)
        assert network.gateway.completions[key] == expected, event
        finished = network.gateway.finished[key]
        assert finished.reason is reason
        assert finished.invalid_argument == (reason is FinishReason.ERROR)
        assert finished.error == (NO_TOKEN if reason is FinishReason.ERROR else "")
    network.check()
    assert network.target.load().free_blocks == network.target.load().total_blocks


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("noise", [0.0, 0.4, 1.0], ids=["perfect", "noised", "unrelated"])
def test_ids_are_those_of_the_definition(noise: float, num_tokens: int) -> None:
    network = make_network(TargetEngineConfig(num_speculative_tokens=num_tokens, ngram=NO_NGRAM))
    network.join(HashLaw(noise=noise))
    events = random_events(12, seed=num_tokens)
    for event in events:
        network.submit(event)
    network.run()
    check(network, events)
    # What follows a stop token in a tail is not accepted, whoever drafted it.
    ends = [end for end in network.gateway.finished.values() if end.reason is FinishReason.LENGTH]
    drafted = sum(end.speculation.draft_tokens for end in ends)
    accepted = sum(end.speculation.accepted_tokens for end in ends)
    assert (drafted > 20) == (num_tokens > 0)
    if noise == 0.0:
        assert accepted == drafted, "the draft does not apply what the target applies"
    elif num_tokens:
        assert accepted < drafted


@pytest.mark.parametrize("seed", range(4))
def test_ids_survive_preemption_and_any_interleaving(seed: int) -> None:
    network = make_network(TargetEngineConfig(), num_blocks=14, block_size=4)
    network.rng.seed(seed)
    network.join(HashLaw(noise=0.3))
    network.join(TARGET)
    events = random_events(8, seed=100 + seed)
    for event in events:
        network.submit(event)
    for _ in range(400):
        network.random_action()
        network.check()
    network.run()
    check(network, events)
    assert network.target.snapshot().num_preemptions_total > 0


@pytest.mark.parametrize("num_kept", [1, 5, 11])
def test_ids_survive_a_failover(num_kept: int) -> None:
    """Placed anew with what was committed so far: penalties, min_tokens and bias go on where they were."""
    for event in random_events(12, seed=7):
        expected, reason = reference(TARGET, event)
        if len(expected) <= num_kept:
            continue
        network = make_network(TargetEngineConfig(num_speculative_tokens=4, ngram=NO_NGRAM))
        network.join(HashLaw(noise=0.4))
        resumed = Submit(
            event.sequence_id,
            2,
            (*event.token_ids, *expected[:num_kept]),
            len(event.token_ids),
            event.sampling,
            event.stopping,
            event.speculation,
        )
        network.submit(resumed)
        network.run()
        assert network.gateway.completions[(event.sequence_id, 2)] == expected
        assert network.gateway.finished[(event.sequence_id, 2)].reason is reason


def test_a_contradiction_ends_its_own_sequence_only() -> None:
    network = make_network(TargetEngineConfig(num_speculative_tokens=4, ngram=NO_NGRAM))
    network.join(TARGET)
    good = random_events(6, seed=1)
    wrong = make_submit(
        "wrong", sampling=SamplingParams(logit_bias=((4, 100.0),), bad_token_ids=(4,)), max_tokens=5
    )
    for event in (*good[:3], wrong, *good[3:]):
        network.submit(event)
    network.run()
    check(network, [*good, wrong])
    assert network.gateway.completions[("wrong", 1)] == []
    assert network.gateway.finished[("wrong", 1)].reason is FinishReason.ERROR
    assert network.target.fault == ""


@pytest.mark.parametrize("num_tokens", [0, 3, 8])
def test_a_forced_token_repeats(num_tokens: int) -> None:
    network = make_network(TargetEngineConfig(num_speculative_tokens=num_tokens, ngram=NO_NGRAM))
    network.join(HashLaw(noise=1.0))
    event = make_submit(sampling=SamplingParams(logit_bias=((9, 100.0),), seed=1), max_tokens=20)
    network.submit(event)
    network.run()
    check(network, [event])
    assert network.gateway.completions[("s", 1)] == [9] * 20
    if num_tokens:
        stats = network.gateway.finished[("s", 1)].speculation
        assert stats.accepted_tokens == stats.draft_tokens > 0
