"""The block manager: which fixed-size blocks of the KV cache are held, and by how many sequences."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockManager:
    """Hands out the blocks of a paged KV cache. Pure bookkeeping: it never touches a tensor.

    A sequence's *block table* is a plain list of block ids, owned by the caller and changed only through
    this class. Slot ``s`` of the sequence lies in block ``table[s // block_size]``.

    A block may be *kept*: its content is of use to others (``prefix_cache`` says which). Kept blocks may be
    in several tables, and whoever holds one only reads it. One that nobody holds any more is *idle*: it is
    as free as any other, but is the last to be handed out, the least recently held first.

    Invariants: a block gets into a second table only while it is kept; a block in no table is free or idle.
    A violation is a bug of the caller and raises ``AssertionError``; nothing is changed then.

    Args:
        num_blocks: blocks in the cache, at least 1.
        block_size: tokens per block, at least 1.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_evict: Callable[[int], None] | None = None
        """Called with each idle block whose content is given up, before it is handed out."""
        # A stack whose top is the lowest id at first: a sequence that grows alone gets consecutive blocks,
        # which attention reads without a gather, and blocks just freed are reused while still warm.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_holders = [0] * num_blocks
        self._kept = bytearray(num_blocks)
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, idle ones included."""
        return len(self._free) + len(self._idle)

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` (≥ 0) tokens."""
        if num_tokens < 0:
            raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
        return -(-num_tokens // self.block_size)

    def num_holders(self, block: int) -> int:
        """Tables that ``block`` is in."""
        return self._num_holders[block]

    # ------------------------------------------------------------------ tables

    def grow(self, table: list[int], num_tokens: int) -> bool:
        """Extend ``table`` in place, by blocks that are in no other one, until it holds ``num_tokens``.

        Returns:
            False, and ``table`` unchanged, if there are too few free blocks. A table that is already long
            enough is left as it is and True returned.
        """
        missing = self.blocks_needed(num_tokens) - len(table)
        if missing <= 0:
            return True
        if missing > self.num_free_blocks:
            return False
        from_free = min(missing, len(self._free))
        taken = self._free[: -from_free - 1 : -1]
        del self._free[len(self._free) - from_free :]
        if missing > from_free:
            # Ascending: what was idle together, deepest block first, is consecutive again.
            taken.extend(sorted(self._evict() for _ in range(missing - from_free)))
        for block in taken:
            self._num_holders[block] = 1
        table.extend(taken)
        return True

    def truncate(self, table: list[int], num_tokens: int) -> None:
        """Free the whole blocks of ``table`` past its first ``num_tokens`` tokens.

        A table that is already shorter is left as it is. Only the sequence's own blocks can be cut off: a
        kept one holds committed tokens, and those never become fewer.
        """
        length = self.blocks_needed(num_tokens)
        if length >= len(table):
            return
        released = table[length:]
        self._check_held(released)
        for block in released:
            if self._kept[block] or self._num_holders[block] > 1:
                raise AssertionError(f"block {block} is shared: it cannot be cut off")
        del table[length:]
        self._release(released)

    def free(self, table: list[int]) -> None:
        """Give up all blocks of ``table`` and empty it."""
        self._check_held(table)
        released = table[:]
        table.clear()
        self._release(released)

    # ------------------------------------------------------------------ shared blocks

    def share(self, table: list[int], blocks: Sequence[int]) -> None:
        """Append kept ``blocks`` to ``table``, which then holds them too."""
        for block in blocks:
            self._hold_kept(block)
        table.extend(blocks)

    def exchange(self, table: list[int], index: int, block: int) -> None:
        """Hold the kept ``block`` in place of ``table[index]``, which is freed. Both hold the same tokens."""
        own = table[index]
        self._check_held([own])
        if self._kept[own]:
            raise AssertionError(f"block {own} is kept itself")
        self._hold_kept(block)
        table[index] = block
        self._release([own])

    def keep(self, block: int) -> None:
        """From now on the content of ``block``, which is held, is of use to others."""
        self._check_held([block])
        self._kept[block] = 1

    def forget(self, block: int) -> None:
        """The content of a kept block is of no use any more. Who holds it goes on."""
        if not self._kept[block]:
            raise AssertionError(f"block {block} is not kept")
        self._kept[block] = 0
        if not self._num_holders[block]:
            del self._idle[block]
            self._free.append(block)

    # ------------------------------------------------------------------ checks

    def idle_blocks(self) -> list[int]:
        """In the order in which they will be handed out."""
        return list(self._idle)

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that ``tables`` are all there are (for tests)."""
        holders = Counter(block for table in tables for block in table)
        assert {block: count for block, count in enumerate(self._num_holders) if count} == holders
        unheld = [*self._free, *self._idle]
        assert len(unheld) == len(set(unheld))
        assert not holders.keys() & set(unheld)
        assert len(unheld) + len(holders) == self.num_blocks
        assert all(self._kept[block] for block in self._idle)
        assert not any(self._kept[block] for block in self._free)

    # ------------------------------------------------------------------ parts

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._kept[block] = 0
        if self.on_evict is not None:
            self.on_evict(block)
        return block

    def _hold_kept(self, block: int) -> None:
        if not self._kept[block]:
            raise AssertionError(f"block {block} is not kept: it cannot be shared")
        if not self._num_holders[block]:
            del self._idle[block]
        self._num_holders[block] += 1

    def _release(self, blocks: Sequence[int]) -> None:
        # The last block first: it goes idle before those that its content builds on.
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if self._kept[block]:
                self._idle[block] = None
            else:
                self._free.append(block)

    def _check_held(self, blocks: Sequence[int]) -> None:
        seen: set[int] = set()
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise AssertionError(f"block {block} is not of this cache (0 … {self.num_blocks - 1})")
            if not self._num_holders[block] or block in seen:
                raise AssertionError(f"block {block} is freed twice")
            seen.add(block)
