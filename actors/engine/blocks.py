"""The block manager: which fixed-size blocks of the KV cache belong to which sequence."""

from __future__ import annotations


class BlockManager:
    """Hands out the blocks of a paged KV cache. Pure bookkeeping: it never touches a tensor.

    A sequence's *block table* is a plain list of block ids, owned by the caller and changed only through
    this class. Slot ``s`` of the sequence lies in block ``table[s // block_size]``.

    Invariant: every block is either free or in exactly one table. A violation is a bug of the caller and
    raises ``AssertionError``; nothing is changed then.

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
        # A stack whose top is the lowest id at first: a sequence that grows alone gets consecutive blocks,
        # which attention reads without a gather, and blocks just freed are reused while still warm.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._in_use = bytearray(num_blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` (≥ 0) tokens."""
        if num_tokens < 0:
            raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
        return -(-num_tokens // self.block_size)

    def grow(self, table: list[int], num_tokens: int) -> bool:
        """Extend ``table`` in place until it holds ``num_tokens`` tokens.

        Returns:
            False, and ``table`` unchanged, if there are too few free blocks. A table that is already long
            enough is left as it is and True returned.
        """
        missing = self.blocks_needed(num_tokens) - len(table)
        if missing <= 0:
            return True
        if missing > len(self._free):
            return False
        taken = self._free[: -missing - 1 : -1]
        del self._free[-missing:]
        for block in taken:
            self._in_use[block] = 1
        table.extend(taken)
        return True

    def truncate(self, table: list[int], num_tokens: int) -> None:
        """Free the whole blocks of ``table`` past its first ``num_tokens`` tokens.

        A table that is already shorter is left as it is.
        """
        kept = self.blocks_needed(num_tokens)
        if kept >= len(table):
            return
        released = table[kept:]
        self._check_owned(released)
        del table[kept:]
        released.reverse()
        for block in released:
            self._in_use[block] = 0
        self._free.extend(released)

    def free(self, table: list[int]) -> None:
        """Free all blocks of ``table`` and empty it."""
        self.truncate(table, 0)

    def _check_owned(self, blocks: list[int]) -> None:
        seen: set[int] = set()
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise AssertionError(f"block {block} is not of this cache (0 … {self.num_blocks - 1})")
            if not self._in_use[block] or block in seen:
                raise AssertionError(f"block {block} is freed twice")
            seen.add(block)
