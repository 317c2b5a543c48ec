"""Structured output in the engines: masks at every drafted position, and where the text ends.

The constraint is a set of token sequences, small enough to be a definition.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.actors.engine.config import NgramConfig, TargetEngineConfig
from paceline.actors.engine.constraint import Masks, make_matcher, stop_at_end
from paceline.actors.engine.errors import ConstraintError, InvalidArgumentError
from paceline.actors.engine.messages import Submit
from paceline.actors.engine.parameters import (
    Constraint,
    ConstraintKind,
    FinishReason,
    SamplingParams,
    SpeculationParams,
    StoppingParams,
    VerificationRule,
)
from paceline.actors.engine.sampling import sample
from paceline.actors.engine.stopping import Stop
from paceline.actors.engine.target_engine import TargetEngine
from tests.engine.fakes import HashLaw, HashRunner, Network, make_submit, processed

TARGET = HashLaw()
EOS = 31
NO_NGRAM = NgramConfig(enabled=False)


@dataclass
class SetMatcher:
    """Allows what begins one of some texts, which are token sequences."""

    texts: frozenset[tuple[int, ...]]
    ends: frozenset[int]
    said: tuple[int, ...] = ()

    def allowed(self, said: tuple[int, ...]) -> set[int]:
        found = {
            text[len(said)] for text in self.texts if text[: len(said)] == said and len(text) > len(said)
        }
        return found | (self.ends if said in self.texts else set())

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if token_id not in self.allowed(self.said):
                raise ConstraintError(f"constraint: token {len(self.said)} does not satisfy it")
            self.said = (*self.said, token_id)

    def masks(self, tail: Sequence[int]) -> Masks:
        rows = np.full((len(tail) + 1, 1), 0xFFFFFFFF, dtype=np.uint32)
        for depth in range(len(tail) + 1):
            said = (*self.said, *tail[:depth])
            if depth and tail[depth - 1] not in self.allowed(said[:-1]) - self.ends:
                break
            if self.find_end(tail[:depth]):
                break
            rows[depth] = sum(1 << token_id for token_id in self.allowed(said))
        return rows

    def find_end(self, token_ids: Sequence[int]) -> int | None:
        for count in range(1, len(token_ids) + 1):
            said = (*self.said, *token_ids[:count])
            if said in self.texts and not self.allowed(said) - self.ends:
                return count
        return None


@dataclass
class SetCompiler:
    """A choice of texts, each written as numbers."""

    matchers: list[SetMatcher] = field(default_factory=list)

    def matcher(self, constraint: Constraint, stop_token_ids: Collection[int]) -> SetMatcher:
        if not constraint.choices:
            raise InvalidArgumentError("constraint.choice", "must have a string")
        texts = frozenset(tuple(map(int, choice.split())) for choice in constraint.choices)
        found = SetMatcher(texts, frozenset({EOS}) & frozenset(stop_token_ids))
        self.matchers.append(found)
        return found


class ConstrainedNetwork(Network):
    def __init__(self, config: TargetEngineConfig, **options: int) -> None:
        super().__init__(TargetEngine(HashRunner(TARGET, **options), config, constraints=SetCompiler()))
        self.constraints = SetCompiler()


def texts(seed: int, count: int = 12) -> tuple[str, ...]:
    """Some texts with beginnings in common, some of them beginnings of others."""
    rng = random.Random(seed)
    found: list[list[int]] = [[rng.randrange(31)]]
    while len(found) < count:
        start = rng.choice(found)
        start = start[: rng.randint(1, len(start))]
        found.append([*start, *(rng.randrange(31) for _ in range(rng.randint(1, 9)))])
    return tuple(" ".join(map(str, text)) for text in found)


def submit(
    sequence_id: str,
    seed: int,
    choices: Sequence[str] | None = None,
    *,
    rule: VerificationRule = VerificationRule.COUPLED,
    **options: Any,
) -> Submit:
    rng = random.Random(seed)
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 0.8, 1.5]),
        seed=seed,
        constraint=Constraint(ConstraintKind.CHOICE, choices=tuple(choices)) if choices is not None else None,
    )
    prompt = [rng.randrange(32) for _ in range(rng.randint(1, 9))]
    event = make_submit(sequence_id, prompt, sampling=sampling, **{"max_tokens": 24} | options)
    return replace(event, speculation=SpeculationParams(rule=rule))


def definition(event: Submit) -> tuple[list[int], FinishReason]:
    """Token by token: the law, what the texts allow, the sampler."""
    said: list[int] = []
    constraint = event.sampling.constraint
    matcher = SetCompiler().matcher(constraint, event.stopping.stop_token_ids) if constraint else None
    token_ids = list(event.token_ids[: event.prompt_length])
    while True:
        values = processed(
            TARGET.logits(token_ids), event.sampling, event.stopping, token_ids, event.prompt_length
        )
        if matcher is not None:
            outside = set(range(32)) - matcher.allowed(tuple(said))
            values[sorted(outside)] = -np.inf
        if not np.isfinite(values).any():
            return said, FinishReason.ERROR
        token_id = sample(torch.from_numpy(values)[None], [event.sampling], [len(token_ids)])[0]
        token_ids.append(token_id)
        said.append(token_id)
        if matcher is not None and matcher.find_end(said) == len(said):
            return said, FinishReason.STOP
        if token_id in event.stopping.stop_token_ids and len(said) > event.stopping.min_tokens:
            return said, FinishReason.STOP
        if len(said) == event.stopping.max_tokens:
            return said, FinishReason.LENGTH


def events(seed: int, count: int = 10) -> list[Submit]:
    """Different constraints beside sequences without one; every kind of end."""
    rng = random.Random(seed)
    return [
        submit(
            f"s{index}",
            seed * 100 + index,
            texts(seed + index) if index % 4 else None,
            max_tokens=rng.choice([3, 24, 24]),
            stop_token_ids=rng.choice([[], [EOS], [EOS], [EOS, 5]]),
        )
        for index in range(count)
    ]


def check(network: Network, given: Sequence[Submit]) -> list[FinishReason]:
    reasons: list[FinishReason] = []
    for event in given:
        key = (event.sequence_id, event.epoch)
        expected, reason = definition(event)
        assert network.gateway.completions[key] == expected, event
        assert network.gateway.finished[key].reason is reason, event
        reasons.append(reason)
    network.check()
    assert network.target.load().free_blocks == network.target.load().total_blocks
    return reasons


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("noise", [0.0, 0.4, 1.0], ids=["perfect", "noised", "unrelated"])
def test_ids_are_those_of_the_definition(noise: float, num_tokens: int) -> None:
    network = ConstrainedNetwork(TargetEngineConfig(num_speculative_tokens=num_tokens, ngram=NO_NGRAM))
    network.join(HashLaw(noise=noise))
    given = [event for seed in range(4) for event in events(seed)]
    given = [replace(event, sequence_id=f"s{index}") for index, event in enumerate(given)]
    for event in given:
        network.submit(event)
    network.run()
    reasons = check(network, given)
    assert {FinishReason.STOP, FinishReason.LENGTH} == set(reasons)
    constrained = [
        network.gateway.finished[event.sequence_id, 1].speculation
        for event in given
        if event.sampling.constraint
    ]
    drafted, accepted = (
        sum(getattr(stats, name) for stats in constrained) for name in ("draft_tokens", "accepted_tokens")
    )
    assert (drafted > 40) == (num_tokens > 0)
    if num_tokens:
        # A draft without the mask would hardly ever hit one of these texts.
        assert accepted > 0.3 * drafted


@pytest.mark.parametrize("seed", range(3))
def test_ids_survive_preemption_and_any_interleaving(seed: int) -> None:
    network = ConstrainedNetwork(TargetEngineConfig(max_num_seqs=8), num_blocks=14, block_size=4)
    network.rng.seed(seed)
    network.join(HashLaw(noise=0.3))
    network.join(TARGET)
    given = events(50 + seed, 16)
    for event in given:
        network.submit(event)
    for _ in range(400):
        network.random_action()
        network.check()
    network.run()
    check(network, given)
    assert network.target.snapshot().num_preemptions_total > 0


@pytest.mark.parametrize("seed", range(8))
def test_ids_survive_a_failover_at_any_token(seed: int) -> None:
    """The other target hears of the tokens alone. One that is told of a text that is complete says so."""
    event = submit("s", seed, texts(seed), stop_token_ids=[EOS] if seed % 2 else [])
    expected, reason = definition(event)
    for kept in range(1, len(expected) + 1):
        network = ConstrainedNetwork(TargetEngineConfig(ngram=NO_NGRAM))
        network.join(HashLaw(noise=0.3))
        resumed = replace(event, token_ids=(*event.token_ids, *expected[:kept]), epoch=2)
        network.submit(resumed)
        network.run()
        assert network.gateway.completions["s", 2] == expected
        assert network.gateway.finished["s", 2].reason is reason


@pytest.mark.parametrize("rule", [VerificationRule.STANDARD, VerificationRule.BLOCK])
@pytest.mark.parametrize("noise", [0.0, 0.4, 1.0])
def test_every_rule_stays_inside_the_constraint(rule: VerificationRule, noise: float) -> None:
    network = ConstrainedNetwork(TargetEngineConfig(num_speculative_tokens=4, ngram=NO_NGRAM))
    network.join(HashLaw(noise=noise))
    given = [
        submit(f"s{seed}", seed, texts(seed), rule=rule, stop_token_ids=[EOS] if seed % 2 else [])
        for seed in range(40)
    ]
    for event in given:
        network.submit(event)
    network.run()
    for event in given:
        finished = network.gateway.finished[event.sequence_id, 1]
        assert finished.reason is FinishReason.STOP, finished
        said = [token_id for token_id in network.gateway.completions[event.sequence_id, 1] if token_id != EOS]
        assert event.sampling.constraint is not None
        assert " ".join(map(str, said)) in event.sampling.constraint.choices


def test_a_complete_text_ends_the_sequence_before_min_tokens_and_without_an_end_token() -> None:
    network = ConstrainedNetwork(TargetEngineConfig(ngram=NO_NGRAM))
    given = [
        submit("ignoring", 1, ["3 4 5"]),
        submit("early", 2, ["3 4 5"], min_tokens=10, stop_token_ids=[EOS]),
        submit("extensible", 3, ["3", "3 4 5"], min_tokens=3, stop_token_ids=[EOS]),
    ]
    for event in given:
        network.submit(event)
    network.run()
    assert check(network, given) == [FinishReason.STOP] * 3
    assert all(said == [3, 4, 5] for said in network.gateway.completions.values())


def test_what_leaves_no_token_ends_that_sequence_alone() -> None:
    network = ConstrainedNetwork(TargetEngineConfig(num_speculative_tokens=4, ngram=NO_NGRAM))
    network.join(TARGET)
    event = submit("bad", 1, ["3 4 5", "3 4 6"])
    event = replace(event, sampling=replace(event.sampling, bad_token_ids=(5, 6)))
    good = submit("good", 2, texts(2))
    network.submit(event)
    network.submit(good)
    network.run()
    finished = network.gateway.finished["bad", 1]
    assert network.gateway.completions["bad", 1] == [3, 4]
    assert finished.reason is FinishReason.ERROR
    assert finished.invalid_argument
    assert "constraint" in finished.error
    check(network, [good])


def test_a_completion_that_does_not_satisfy_the_constraint_is_refused() -> None:
    network = ConstrainedNetwork(TargetEngineConfig(ngram=NO_NGRAM))
    event = submit("s", 1, ["3 4 5"])
    network.submit(replace(event, token_ids=(*event.token_ids, 3, 9)))
    network.run()
    finished = network.gateway.finished["s", 1]
    assert (finished.reason, finished.invalid_argument) == (FinishReason.ERROR, True)
    assert finished.error == "constraint: token 1 does not satisfy it"


def test_an_engine_without_a_compiler_refuses_a_constraint() -> None:
    network = Network(TargetEngine(HashRunner(TARGET), TargetEngineConfig(ngram=NO_NGRAM)))
    network.submit(submit("s", 1, ["3 4 5"]))
    finished = network.gateway.finished["s", 1]
    assert finished.invalid_argument
    assert finished.error == "constraint: structured output is not available for this model"


def test_a_constraint_that_cannot_be_compiled_is_refused() -> None:
    network = ConstrainedNetwork(TargetEngineConfig(ngram=NO_NGRAM))
    network.submit(submit("s", 1, []))
    finished = network.gateway.finished["s", 1]
    assert finished.invalid_argument
    assert finished.error == "constraint.choice: must have a string"


def test_a_draft_without_a_compiler_declines_and_the_target_goes_on() -> None:
    network = ConstrainedNetwork(TargetEngineConfig(num_speculative_tokens=4, ngram=NO_NGRAM))
    network.constraints = None
    peer = network.join(TARGET)
    given = [submit("s", 1, texts(1)), submit("free", 2)]
    for event in given:
        network.submit(event)
    network.run()
    check(network, given)
    assert network.drafts[peer].snapshot().num_declines_total == 1
    assert network.gateway.finished["s", 1].speculation.draft_tokens == 0
    assert network.gateway.finished["free", 1].speculation.draft_tokens > 0


def test_stop_at_end() -> None:
    matcher = make_matcher(SetCompiler(), Constraint(ConstraintKind.CHOICE, choices=("3 4",)), ())
    going = Stop(4, None)
    assert stop_at_end(going, [3, 4, 7, 8], matcher) == Stop(2, FinishReason.STOP)
    assert stop_at_end(going, [3, 4, 7, 8], None) == going
    assert stop_at_end(Stop(1, FinishReason.LENGTH), [3, 4, 7, 8], matcher) == Stop(1, FinishReason.LENGTH)
    assert stop_at_end(Stop(2, FinishReason.LENGTH), [3, 4, 7, 8], matcher) == Stop(2, FinishReason.STOP)
    assert make_matcher(None, None, ()) is None


def test_stopping_params_are_as_given() -> None:
    """The constraint adds no stop token."""
    assert submit("s", 1, ["3"]).stopping == StoppingParams(24)
