"""The prefix cache and the shared blocks below it: only what holds exactly the asked tokens is ever found."""

from __future__ import annotations

import random

import pytest

from paceline.actors.engine.blocks import BlockManager
from paceline.actors.engine.prefix_cache import CachedPrefix, PrefixCache

SIZE = 4


class Holder:
    """A sequence reduced to its blocks. ``contents`` is the KV: what was written to each block."""

    def __init__(self, pool: Pool, tokens: list[int], salt: str = "") -> None:
        self.pool, self.tokens = pool, tokens
        self.prefix = CachedPrefix(salt)
        self.table: list[int] = []
        self.computed = 0
        self.pool.cache.find(self.prefix, tokens, len(tokens) - 1)

    @property
    def num_found(self) -> int:
        return len(self.prefix)

    def start(self) -> bool:
        blocks = self.pool.blocks
        needed = blocks.blocks_needed(len(self.tokens)) - len(self.prefix)
        if needed + self.pool.cache.num_idle(self.prefix) > blocks.num_free_blocks:
            return False
        self.computed = self.pool.cache.take(self.prefix, self.table)
        for index, block in enumerate(self.table):
            salt, held = self.pool.contents[block]
            assert (salt, held) == (self.prefix.salt, self.tokens[: (index + 1) * SIZE])
        assert blocks.grow(self.table, len(self.tokens))
        return True

    def compute(self, count: int) -> None:
        for _ in range(count):
            block = self.table[self.computed // SIZE]
            assert self.pool.blocks.num_holders(block) == 1
            self.computed += 1
            self.pool.contents[block] = (self.prefix.salt, self.tokens[: self.computed])
        self.pool.cache.add(self.prefix, self.table, self.tokens, self.computed)
        self.check()

    def run(self) -> Holder:
        assert self.start()
        self.compute(len(self.tokens) - self.computed)
        return self

    def end(self) -> None:
        self.pool.blocks.free(self.table)

    def check(self) -> None:
        self.pool.cache.check_holder(self.prefix, self.table, self.computed)


class Pool:
    def __init__(self, num_blocks: int) -> None:
        self.blocks = BlockManager(num_blocks, SIZE)
        self.cache = PrefixCache(self.blocks)
        self.contents: dict[int, tuple[str, list[int]]] = {}

    def check(self, holders: list[Holder]) -> None:
        self.blocks.check_invariants(holder.table for holder in holders)
        self.cache.check_invariants()
        for holder in holders:
            if holder.table:
                holder.check()


def ids(*values: int) -> list[int]:
    """Each value as a block of its own."""
    return [value for value in values for _ in range(SIZE)]


# ---------------------------------------------------------------- shared blocks


def test_kept_blocks_are_shared_and_idle_when_nobody_holds_them() -> None:
    blocks = BlockManager(6, SIZE)
    first: list[int] = []
    second: list[int] = []
    assert blocks.grow(first, 3 * SIZE)
    blocks.keep(first[0])
    blocks.keep(first[1])
    blocks.share(second, first[:2])
    assert second == first[:2]
    assert [blocks.num_holders(block) for block in first] == [2, 2, 1]
    shared = second[:]
    blocks.free(first)
    assert blocks.num_free_blocks == 4
    assert blocks.idle_blocks() == []
    blocks.free(second)
    assert blocks.num_free_blocks == 6
    assert blocks.idle_blocks() == shared[::-1], "what builds on a block goes before it"
    blocks.check_invariants([])


def test_idle_blocks_are_the_last_to_be_handed_out() -> None:
    blocks = BlockManager(4, SIZE)
    evicted: list[int] = []
    blocks.on_evict = evicted.append
    table: list[int] = []
    assert blocks.grow(table, 2 * SIZE)
    for block in table:
        blocks.keep(block)
    blocks.free(table)
    assert blocks.grow(table, 2 * SIZE)
    assert table == [2, 3]
    assert evicted == []
    assert blocks.grow(table, 3 * SIZE)
    assert evicted == [1]
    other: list[int] = []
    assert not blocks.grow(other, 2 * SIZE)
    assert evicted == [1], "nothing is given up for a request that fails"
    assert blocks.grow(other, SIZE)
    assert evicted == [1, 0]
    blocks.check_invariants([table, other])


def test_what_others_hold_cannot_be_cut_off() -> None:
    blocks = BlockManager(4, SIZE)
    table: list[int] = []
    other: list[int] = []
    assert blocks.grow(table, 2 * SIZE)
    with pytest.raises(AssertionError, match="not kept"):
        blocks.share(other, table[:1])
    blocks.keep(table[0])
    with pytest.raises(AssertionError, match="cut off"):
        blocks.truncate(table, 0)
    blocks.share(other, table[:1])
    blocks.forget(table[0])
    with pytest.raises(AssertionError, match="cut off"):
        blocks.truncate(other, 0)
    blocks.truncate(table, SIZE)
    assert (table, other) == ([0], [0])
    blocks.free(table)
    assert blocks.num_free_blocks == 3
    blocks.free(other)
    assert blocks.num_free_blocks == 4


# ---------------------------------------------------------------- what is found


def test_longest_prefix_in_full_blocks_but_for_the_last_token() -> None:
    pool = Pool(16)
    first = Holder(pool, ids(1, 2, 3)).run()
    assert Holder(pool, ids(1, 2, 3)).num_found == 2, "the last token has to be computed"
    assert Holder(pool, [*ids(1, 2, 3), 9]).num_found == 3
    assert Holder(pool, [*ids(1, 2), 3, 3, 3, 9, 9]).num_found == 2
    assert Holder(pool, [9, *ids(1, 2, 3)]).num_found == 0
    assert Holder(pool, ids(2, 3, 9)).num_found == 0, "the same block after another prefix is another block"
    assert Holder(pool, ids(1, 3, 9)).num_found == 1
    assert Holder(pool, [*ids(1, 2, 3), 9], salt="adapter").num_found == 0
    first.end()
    pool.check([first])
    assert Holder(pool, [*ids(1, 2, 3), 9]).num_found == 3, "also when nobody holds it"
    assert pool.blocks.num_free_blocks == 16
    assert pool.cache.num_blocks == 3


def test_salted_prefixes_stay_apart() -> None:
    pool = Pool(16)
    plain, salted = Holder(pool, ids(1, 2)).run(), Holder(pool, ids(1, 2), salt="x").run()
    assert pool.cache.num_blocks == 4
    assert not set(plain.table) & set(salted.table)
    assert Holder(pool, ids(1, 2, 3), salt="x").num_found == 2


def test_nothing_is_found_before_it_is_computed_or_where_the_cache_is_off() -> None:
    pool = Pool(16)
    first = Holder(pool, ids(1, 2, 3))
    first.start()
    first.compute(SIZE - 1)
    assert Holder(pool, ids(1, 2, 3)).num_found == 0
    first.compute(1)
    assert Holder(pool, ids(1, 2, 3)).num_found == 1
    pool = Pool(16)
    pool.cache.enabled = False
    first = Holder(pool, ids(1, 2, 3)).run()
    assert Holder(pool, ids(1, 2, 3)).num_found == 0
    first.end()
    assert pool.blocks.idle_blocks() == []


def test_equal_blocks_computed_side_by_side_become_one() -> None:
    pool = Pool(16)
    first, second = Holder(pool, ids(1, 2, 3)), Holder(pool, ids(1, 2, 4))
    assert first.start()
    assert second.start()
    first.compute(6)
    second.compute(6)
    assert second.table[0] == first.table[0]
    assert second.table[1] != first.table[1]
    assert pool.blocks.num_free_blocks == 16 - 5
    first.compute(6)
    first.end()
    second.compute(6)
    assert second.table[1] in [cached.block for cached in first.prefix.blocks]
    pool.check([first, second])
    second.end()
    assert pool.blocks.num_free_blocks == 16
    assert pool.cache.num_blocks == 4


def test_eviction_takes_the_least_recently_held_deepest_first() -> None:
    pool = Pool(6)
    for tokens in (ids(1, 2, 3), ids(4, 5, 6)):
        Holder(pool, tokens).run().end()
    again = Holder(pool, ids(1, 2, 3))
    assert again.num_found == 2
    again.run().end()
    # 3 of the first prefix was held most lately, together with 2 and 1; 6, 5 and 4 go before.
    big = Holder(pool, ids(7, 8)).run()
    assert Holder(pool, ids(4, 5, 6, 0)).num_found == 1
    assert Holder(pool, ids(1, 2, 3, 0)).num_found == 3
    big.end()
    pool.check([big])
    Holder(pool, ids(9, 9, 9, 9, 9, 9)).run().end()
    assert Holder(pool, ids(1, 0)).num_found == 0
    assert Holder(pool, ids(7, 0)).num_found == 0


def test_what_was_found_is_brought_up_to_date() -> None:
    pool = Pool(8)
    Holder(pool, ids(1, 2, 3)).run().end()
    waiting = Holder(pool, ids(1, 2, 3, 4, 5))
    assert waiting.num_found == 3
    Holder(pool, ids(*[6] * 6)).run().end()
    key = pool.cache.find(waiting.prefix, waiting.tokens, 17)
    assert waiting.num_found == 2
    assert key is not None
    assert key == pool.cache.next_key(waiting.prefix, waiting.tokens, 17)
    Holder(pool, ids(1, 2, 3, 4)).run().end()
    assert pool.cache.find(waiting.prefix, waiting.tokens, 17) is None
    assert waiting.num_found == 4
    waiting.run()
    pool.check([waiting])


def test_what_is_not_to_be_trusted_is_forgotten_with_all_that_builds_on_it() -> None:
    pool = Pool(16)
    bad = Holder(pool, ids(1, 2)).run()
    heir = Holder(pool, [*ids(1, 2, 3), 9])
    heir.start()
    heir.compute(SIZE)
    Holder(pool, ids(5, 6)).run().end()
    Holder(pool, ids(1, 2, 7)).run().end()
    pool.cache.forget(bad.prefix)
    bad.end()
    pool.check([bad, heir])
    assert Holder(pool, ids(1, 2, 3, 9)).num_found == 0
    assert Holder(pool, ids(5, 6, 9)).num_found == 2
    heir.compute(1)
    assert Holder(pool, ids(1, 2, 3, 9)).num_found == 0, "it does not bring back what was forgotten"
    heir.end()
    pool.check([heir])
    assert pool.blocks.num_free_blocks == 16
    assert Holder(pool, ids(1, 2, 3, 9)).run().num_found == 4, "computed anew"


# ---------------------------------------------------------------- any order, and its cost


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_events_against_the_contents(seed: int) -> None:
    rng = random.Random(seed)
    pool = Pool(rng.choice([12, 24]))
    live: list[Holder] = []
    hits = 0
    for _ in range(600):
        action = rng.random()
        if action < 0.35 and len(live) < 5:
            tokens = ids(*[rng.randrange(2) for _ in range(rng.randint(1, 5))])
            tokens = tokens[: len(tokens) - rng.randrange(SIZE)]
            holder = Holder(pool, tokens, rng.choice(["", "", "x"]))
            if holder.start():
                hits += holder.num_found
                live.append(holder)
        elif action < 0.8 and live:
            holder = rng.choice(live)
            if holder.computed < len(holder.tokens):
                holder.compute(rng.randint(1, min(6, len(holder.tokens) - holder.computed)))
            elif rng.random() < 0.5 and pool.blocks.grow(holder.table, len(holder.tokens) + 3):
                # A tail that is rejected but for its first token.
                holder.tokens.append(rng.randrange(2))
                holder.compute(1)
                pool.blocks.truncate(holder.table, len(holder.tokens))
        elif action < 0.97 and live:
            live.pop(rng.randrange(len(live))).end()
        elif live:
            pool.cache.forget(rng.choice(live).prefix)
        pool.check(live)
    assert hits > 20
    for holder in live:
        holder.end()
    pool.check([])
    assert pool.blocks.num_free_blocks == pool.blocks.num_blocks


def test_cost_is_that_of_the_new_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(600)
    tokens = [index % 7 for index in range(2000)]
    holder = Holder(pool, tokens)
    calls = 0
    next_key = PrefixCache.next_key

    def counted(self: PrefixCache, *args: object) -> object:
        nonlocal calls
        calls += 1
        return next_key(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefixCache, "next_key", counted)
    holder.start()
    for _ in range(2000):
        holder.compute(1)
    # One look per step, one more per block.
    assert calls == 2000 + 500
    calls = 0
    other = Holder(pool, tokens)
    assert calls == 500
    for _ in range(100):
        pool.cache.find(other.prefix, tokens, len(tokens) - 1)
    assert calls == 600
