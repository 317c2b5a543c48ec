from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from paceline.actors.engine.blocks import BlockManager


def test_blocks_needed_rounds_up() -> None:
    manager = BlockManager(8, 4)
    assert [manager.blocks_needed(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    with pytest.raises(ValueError, match="negative"):
        manager.blocks_needed(-1)


def test_a_sequence_alone_gets_consecutive_blocks() -> None:
    manager = BlockManager(8, 4)
    table: list[int] = []
    assert manager.grow(table, 5)
    assert manager.grow(table, 16)
    assert table == [0, 1, 2, 3]


def test_grow_takes_all_or_nothing() -> None:
    manager = BlockManager(3, 4)
    first: list[int] = []
    second: list[int] = []
    assert manager.grow(first, 8)
    assert not manager.grow(second, 5)
    assert second == []
    assert manager.num_free_blocks == 1
    assert manager.grow(second, 4)
    assert not manager.grow(second, 5)
    assert manager.num_free_blocks == 0


def test_grow_never_shortens() -> None:
    manager = BlockManager(3, 4)
    table: list[int] = []
    manager.grow(table, 9)
    kept = list(table)
    assert manager.grow(table, 1)
    assert table == kept


def test_truncate_keeps_the_block_that_is_partly_used() -> None:
    manager = BlockManager(8, 4)
    table: list[int] = []
    manager.grow(table, 16)
    manager.truncate(table, 5)
    assert table == [0, 1]
    manager.truncate(table, 12)
    assert table == [0, 1]
    manager.truncate(table, 4)
    assert table == [0]
    assert manager.num_free_blocks == 7


@pytest.mark.parametrize("table", [[5], [-1], [8], [0, 0]])
def test_freeing_what_is_not_owned_is_a_bug(table: list[int]) -> None:
    manager = BlockManager(8, 4)
    manager.grow([], 4)
    before = manager.num_free_blocks
    with pytest.raises(AssertionError, match="block"):
        manager.free(table)
    assert manager.num_free_blocks == before


def test_double_free_is_a_bug() -> None:
    manager = BlockManager(8, 4)
    table: list[int] = []
    manager.grow(table, 4)
    stale = list(table)
    manager.free(table)
    assert table == []
    with pytest.raises(AssertionError, match="twice"):
        manager.free(stale)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_sizes_are_checked(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockManager(num_blocks, block_size)


class BlockManagerMachine(RuleBasedStateMachine):
    """Any interleaving of grow, truncate and free over several tables."""

    @initialize(num_blocks=st.integers(1, 24), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.manager = BlockManager(num_blocks, block_size)
        self.tables: list[list[int]] = [[] for _ in range(4)]

    @rule(which=st.integers(0, 3), num_tokens=st.integers(0, 60))
    def grow(self, which: int, num_tokens: int) -> None:
        table, before = self.tables[which], list(self.tables[which])
        missing = max(0, self.manager.blocks_needed(num_tokens) - len(before))
        enough = missing <= self.manager.num_free_blocks
        assert self.manager.grow(table, num_tokens) is enough
        assert table[: len(before)] == before
        assert len(table) == len(before) + (missing if enough else 0)

    @rule(which=st.integers(0, 3), num_tokens=st.integers(0, 60))
    def truncate(self, which: int, num_tokens: int) -> None:
        table, before = self.tables[which], list(self.tables[which])
        self.manager.truncate(table, num_tokens)
        assert table == before[: self.manager.blocks_needed(num_tokens)]

    @rule(which=st.integers(0, 3))
    def free(self, which: int) -> None:
        self.manager.free(self.tables[which])
        assert self.tables[which] == []

    @invariant()
    def every_block_is_free_or_in_one_table(self) -> None:
        if not hasattr(self, "manager"):
            return
        used = [block for table in self.tables for block in table]
        assert len(used) == len(set(used))
        assert all(0 <= block < self.manager.num_blocks for block in used)
        assert self.manager.num_free_blocks + len(used) == self.manager.num_blocks


BlockManagerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_block_manager_keeps_its_invariants = BlockManagerMachine.TestCase
