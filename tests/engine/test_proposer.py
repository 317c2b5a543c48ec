"""Prompt lookup: what is proposed, and when it stops looking."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.config import NgramConfig, TargetEngineConfig
from paceline.actors.engine.proposer import MAX_PAUSE_ROUNDS, NgramIndex, NgramProposer
from paceline.actors.engine.target_engine import TargetEngine
from tests.engine.fakes import Clock, HashLaw, HashRunner, make_submit


def scan(token_ids: list[int], min_n: int, max_n: int, num_tokens: int) -> list[int]:
    """The definition: longest n first, the last earlier occurrence that has a continuation."""
    for n in range(min(max_n, len(token_ids)), min_n - 1, -1):
        suffix = token_ids[-n:]
        for start in range(len(token_ids) - n - 1, -1, -1):
            if token_ids[start : start + n] == suffix:
                copied = list(token_ids)
                for offset in range(num_tokens):
                    copied.append(copied[start + n + offset])
                return copied[len(token_ids) :]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_index_equals_a_scan_however_it_grew(seed: int) -> None:
    rng = random.Random(seed)
    min_n = rng.randint(1, 3)
    max_n = min_n + rng.randint(0, 3)
    index = NgramIndex(min_n, max_n)
    token_ids: list[int] = []
    found = 0
    for _ in range(60):
        token_ids.extend(rng.randrange(4) for _ in range(rng.randint(1, 5)))
        index.update(token_ids)
        num_tokens = rng.randint(1, 9)
        expected = scan(token_ids, min_n, max_n, num_tokens)
        assert index.propose(token_ids, num_tokens) == expected
        found += bool(expected)
    assert found > 10


def test_nothing_without_a_match() -> None:
    index = NgramIndex(2, 4)
    index.update([1, 2, 3, 4])
    assert index.propose([1, 2, 3, 4], 8) == []
    index.update([])
    assert NgramIndex(1, 2).propose([], 4) == []


def test_longest_match_wins_and_the_last_occurrence() -> None:
    token_ids = [5, 1, 2, 3, 7, 2, 3, 8, 1, 2, 3]
    index = NgramIndex(1, 3)
    index.update(token_ids)
    assert index.propose(token_ids, 1) == [7]
    short = NgramIndex(1, 2)
    short.update(token_ids)
    assert short.propose(token_ids, 1) == [8]


def test_a_loop_continues_past_the_end() -> None:
    token_ids = [9, 1, 2, 3, 1, 2, 3]
    index = NgramIndex(2, 3)
    index.update(token_ids)
    assert index.propose(token_ids, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_useless_lookups_become_rare_and_a_hit_ends_the_pause() -> None:
    proposer = NgramProposer(NgramConfig(min_n=1, max_n=1))
    token_ids = [1, 1]
    lookups = 0
    for _ in range(1000):
        token_ids.append(1)
        if proposer.propose(token_ids, 4):
            lookups += 1
            proposer.record(4, 0)
    assert 5 < lookups < 1000 // MAX_PAUSE_ROUNDS + 10
    assert proposer.acceptance.rate < 0.05
    while not proposer.propose(token_ids, 4):
        token_ids.append(1)
    proposer.record(4, 2)
    token_ids.append(1)
    assert proposer.propose(token_ids, 4) == [1, 1, 1, 1]


def test_asking_twice_gives_the_same_answer_and_costs_no_pause() -> None:
    proposer = NgramProposer(NgramConfig(min_n=1, max_n=1))
    token_ids = [1, 1, 1]
    first = proposer.propose(token_ids, 4)
    assert proposer.propose(token_ids, 2) == first[:2]
    proposer.record(4, 0)
    token_ids.append(1)
    for _ in range(5):
        assert proposer.propose(token_ids, 4) == []


def test_off_means_off() -> None:
    assert NgramProposer(NgramConfig(enabled=False)).propose([1, 1, 1], 4) == []
    assert NgramProposer(NgramConfig()).propose([1, 1, 1], 0) == []


def test_a_newcomer_begins_with_what_lookups_of_others_were_worth() -> None:
    """The model does not say again what followed a token before: after some sequences nobody believes it."""
    clock = Clock()

    def pass_time(batch: Sequence[SequenceSlice]) -> None:
        clock.advance(0.02 + 0.006 * sum(len(item.token_ids) for item in batch))

    config = TargetEngineConfig(ngram=NgramConfig(min_n=1, max_n=2))
    target = TargetEngine(HashRunner(on_forward=pass_time), config, clock)
    target.measure_step_costs()
    lookups: list[int] = []
    for index in range(24):
        before = target.snapshot().num_lookup_tokens_total
        event = make_submit(str(index), range(32), max_tokens=6, temperature=1.0, seed=index)
        target.submit("gateway", event)
        while target.snapshot().num_running + target.snapshot().num_waiting:
            target.step()
        lookups.append(target.snapshot().num_lookup_tokens_total - before)
    assert sum(lookups[:4]) > 0
    assert sum(lookups[-12:]) < sum(lookups[:12]) / 3


class LoopLaw(HashLaw):
    """Counts to seven again and again, once told to."""

    looping = False

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        logits = super().logits(token_ids)
        if self.looping:
            logits[(token_ids[-1] + 1) % 7] = logits.max() + 50.0
        return logits


def test_lookups_that_seem_worthless_are_tried_now_and_then() -> None:
    """Tokens cost so much that after text without repetitions a lookup is not worth one."""
    clock = Clock()

    def pass_time(batch: Sequence[SequenceSlice]) -> None:
        clock.advance(0.02 + 0.004 * sum(len(item.token_ids) for item in batch))

    law = LoopLaw()
    config = TargetEngineConfig(ngram=NgramConfig(min_n=1, max_n=2))
    target = TargetEngine(HashRunner(law, max_model_len=512, on_forward=pass_time), config, clock)
    target.measure_step_costs()
    for name in ("random", "looping"):
        law.looping = name == "looping"
        event = make_submit(name, range(32), max_tokens=400, temperature=1.0, seed=1)
        target.submit("gateway", event)
        before = target.snapshot()
        while target.snapshot().num_running + target.snapshot().num_waiting:
            target.step()
    assert before.num_lookup_tokens_total > 0
    found = target.snapshot()
    assert found.num_accepted_lookup_tokens_total - before.num_accepted_lookup_tokens_total > 200
