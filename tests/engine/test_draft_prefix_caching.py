"""The draft with prefix caching: prompts are computed once, chains are never cached."""

from __future__ import annotations

import random

import pytest

from paceline.actors.engine.config import DraftEngineConfig
from paceline.actors.engine.draft_engine import DraftEngine
from paceline.actors.engine.messages import Close
from tests.engine.paged_fake import GREEDY, PagedFake, chain_after, opened, verdict

PROMPT = [index * 5 % 32 for index in range(42)]


def draft_of(runner: PagedFake | None = None, **config: int | bool) -> tuple[DraftEngine, PagedFake]:
    runner = runner or PagedFake()
    engine = DraftEngine(runner, DraftEngineConfig(max_num_batched_tokens=512, **config))  # type: ignore[arg-type]
    engine.target_joined("t", 32)
    engine.target_joined("u", 32)
    return engine, runner


def rest(engine: DraftEngine) -> dict[str, list[int]]:
    """Step until it rests; what it drafted, by sequence."""
    said: dict[str, list[int]] = {}
    for _ in range(200):
        if not engine.has_work():
            return said
        engine.step()
        engine.check_invariants()
        for output in engine.take_outbox().values():
            for message in output.candidates:
                said.setdefault(message.sequence_id, []).extend(message.token_ids)
    raise AssertionError("the draft never rests")


def computed_first(runner: PagedFake, since: int) -> list[tuple[int, int]]:
    return [(part.start, len(part.token_ids)) for part in runner.batches[since]]


def test_draft_computes_a_prompt_once_for_all_targets() -> None:
    engine, runner = draft_of()
    engine.open("t", opened("a", PROMPT))
    assert rest(engine)["a"] == chain_after(PROMPT, GREEDY, 4)
    before = len(runner.batches)
    engine.open("u", opened("b", PROMPT))
    assert rest(engine)["b"] == chain_after(PROMPT, GREEDY, 4)
    assert computed_first(runner, before) == [(40, 2)]
    snapshot = engine.snapshot()
    assert (snapshot.num_prefix_cache_queries_total, snapshot.num_prefix_cache_hits_total) == (84, 40)
    assert snapshot.num_cached_blocks == 10
    for peer, name in (("t", "a"), ("u", "b")):
        engine.close(peer, Close(name, 1))
    assert engine.snapshot().num_free_blocks == engine.snapshot().num_blocks


def test_draft_never_caches_its_own_chain() -> None:
    engine, runner = draft_of()
    engine.open("t", opened("a", PROMPT[:4], window=12))
    chain = rest(engine)["a"]
    assert engine.snapshot().num_cached_blocks == 1
    engine.verdict("t", verdict("a", 4, [*chain[:5], 31], window=0, accepted=5))
    engine.check_invariants()
    # 9 accepted tokens are computed, the corrected one is not.
    assert engine.snapshot().num_cached_blocks == 2
    engine.close("t", Close("a", 1))
    before = len(runner.batches)
    engine.open("t", opened("b", [*PROMPT[:4], *chain, 1]))
    rest(engine)
    assert computed_first(runner, before)[0][0] == 8


def test_draft_lets_equal_prompts_wait_for_the_first() -> None:
    engine, runner = draft_of()
    for name in "abcd":
        engine.open("t", opened(name, [*PROMPT[:40], ord(name) % 32]))
    said = rest(engine)
    assert said == {name: chain_after([*PROMPT[:40], ord(name) % 32], GREEDY, 4) for name in "abcd"}
    assert computed_first(runner, 0) == [(0, 41)]
    assert sum(len(part.token_ids) for batch in runner.batches for part in batch) == 41 + 3 + 3 * 4
    assert engine.snapshot().num_prefill_tokens_total < 2 * 41


def test_draft_waits_for_nobody_who_rests() -> None:
    engine, _ = draft_of()
    engine.open("t", opened("a", PROMPT, window=0))
    engine.open("t", opened("b", PROMPT))
    assert list(rest(engine)) == ["b"]


def test_draft_switched_off() -> None:
    engine, runner = draft_of(enable_prefix_caching=False)
    for name in "ab":
        engine.open("t", opened(name, PROMPT))
    rest(engine)
    assert computed_first(runner, 0) == [(0, 42), (0, 42)]
    assert engine.snapshot().num_cached_blocks == engine.snapshot().num_prefix_cache_queries_total == 0


@pytest.mark.parametrize("num_blocks", [24, 200])
@pytest.mark.parametrize("seed", range(8))
def test_draft_in_any_order_with_shared_prefixes(seed: int, num_blocks: int) -> None:
    rng = random.Random(seed)
    engine, _ = draft_of(PagedFake(num_blocks=num_blocks), max_num_seqs=6)
    committed: dict[str, list[int]] = {}
    said: dict[str, list[int]] = {}
    roots = [[rng.randrange(32) for _ in range(14)] for _ in range(2)]
    for turn in range(500):
        action = rng.random()
        if action < 0.1:
            name = f"s{turn}"
            committed[name] = [*rng.choice(roots), *[rng.randrange(2) for _ in range(rng.randint(0, 9))]]
            said[name] = []
            engine.open("t", opened(name, committed[name], window=rng.choice([0, 3, 6])))
        elif action < 0.6:
            engine.step()
        elif action < 0.9 and committed:
            name = rng.choice(list(committed))
            kept = said[name][: rng.randint(0, len(said[name]))]
            fresh = [*kept, rng.choice([*said[name][len(kept) : len(kept) + 1], rng.randrange(32)])]
            engine.verdict("t", verdict(name, len(committed[name]), fresh, window=rng.choice([0, 3, 6])))
            committed[name].extend(fresh)
            rest_of = said[name][len(kept) :]
            said[name] = rest_of[1:] if rest_of[:1] == fresh[-1:] else []
        elif committed:
            name = rng.choice(list(committed))
            del committed[name], said[name]
            engine.close("t", Close(name, 1))
        for output in engine.take_outbox().values():
            for decline in output.declines:
                committed.pop(decline.sequence_id, None)
                said.pop(decline.sequence_id, None)
            for message in output.candidates:
                known = committed[message.sequence_id]
                chain = said[message.sequence_id]
                assert message.base_position == len(known) + len(chain)
                assert list(message.token_ids) == chain_after(
                    [*known, *chain], GREEDY, len(message.token_ids)
                )
                chain.extend(message.token_ids)
        engine.check_invariants()
    assert engine.snapshot().num_prefix_cache_hits_total > 0
    for name in list(committed):
        engine.close("t", Close(name, 1))
    assert engine.snapshot().num_free_blocks == num_blocks
