"""The prefix cache: which blocks hold the KV of which tokens, so that it is computed once.

The idea of hashing each full block together with what precedes it is vLLM's automatic prefix caching (Kwon et
al., Efficient memory management for large language model serving with PagedAttention, 2023). Here the block
before stands in the key as itself, not as its hash, and a dictionary compares keys as well as hashing them:
no collision can hand out another prefix's KV.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.actors.engine.blocks import BlockManager


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A full block of committed tokens that can be found. Its identity stands for the whole prefix that ends
    with it, since its key names the block before."""

    block: int | None
    """None: given up, and with it every block whose prefix goes through it."""
    key: BlockKey


BlockKey = tuple[CachedBlock | str, bytes]
"""(the cached block before, or the salt where there is none; the block's token ids)."""


@dataclass(slots=True)
class CachedPrefix:
    """What the cache knows of one sequence: the cached blocks of its first tokens, in order.

    While the sequence holds blocks, these are the first of its table.
    """

    salt: str = ""
    """What shapes the KV besides the tokens and the model that the cache belongs to, such as an adapter."""
    blocks: list[CachedBlock] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.blocks)


class PrefixCache:
    """Finds blocks by their tokens and all the tokens before them.

    Only full blocks of committed tokens whose KV has been computed are ever in it, so they are never written
    again: nobody needs a copy. What a rejected tail wrote lies behind them.

    Invariants: who holds a cached block holds all those before it in its prefix, the very same blocks (an
    equal block of its own is exchanged when it is full). So a block is idle only if all that build on it are,
    and as they went idle before it, the block that is evicted next has none: what is in the cache can
    be reached.

    Each operation costs as many steps as blocks are new to it, not as the sequence has.

    Args:
        blocks: the manager of the pool; this cache becomes its only user of ``on_evict``.
        enabled: False: nothing is ever found.
    """

    def __init__(self, blocks: BlockManager, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._blocks = blocks
        self._cached: dict[BlockKey, CachedBlock] = {}
        """Each one after the one before it in its prefix."""
        self._cached_of: dict[int, CachedBlock] = {}
        blocks.on_evict = self._give_up

    @property
    def num_blocks(self) -> int:
        """Blocks that can be found, held or idle."""
        return len(self._cached)

    def next_key(self, prefix: CachedPrefix, token_ids: Sequence[int], num_tokens: int) -> BlockKey | None:
        """Key of the block of ``token_ids[:num_tokens]`` after ``prefix``; None if it is not full, or the
        prefix was given up."""
        start = len(prefix.blocks) * self._blocks.block_size
        end = start + self._blocks.block_size
        if end > num_tokens:
            return None
        parent = prefix.blocks[-1] if prefix.blocks else prefix.salt
        if isinstance(parent, CachedBlock) and parent.block is None:
            return None
        return parent, array("i", token_ids[start:end]).tobytes()

    def find(self, prefix: CachedPrefix, token_ids: Sequence[int], num_tokens: int) -> BlockKey | None:
        """Make ``prefix`` the longest cached one of ``token_ids[:num_tokens]``, in full blocks.

        It may hold what was found before, and is only brought up to date. The sequence holds no block.

        Returns:
            Key of the first full block that is not cached; None if all are, or the cache is off.
        """
        if not self.enabled:
            return None
        while prefix.blocks and prefix.blocks[-1].block is None:
            prefix.blocks.pop()
        while (key := self.next_key(prefix, token_ids, num_tokens)) is not None:
            cached = self._cached.get(key)
            if cached is None:
                return key
            prefix.blocks.append(cached)
        return None

    def num_idle(self, prefix: CachedPrefix) -> int:
        """How many of the found blocks nobody holds: to take the prefix makes so many free blocks fewer."""
        # Each is held at least as often as the one after it.
        return len(prefix.blocks) - bisect_left(prefix.blocks, True, key=self._is_idle)

    def take(self, prefix: CachedPrefix, table: list[int]) -> int:
        """Hold the blocks that were just found, in an empty ``table``; returns the tokens they hold."""
        assert not table, "a sequence that holds blocks has its prefix already"
        blocks = [cached.block for cached in prefix.blocks if cached.block is not None]
        assert len(blocks) == len(prefix.blocks), "a block was given up since it was found"
        self._blocks.share(table, blocks)
        return len(blocks) * self._blocks.block_size

    def add(self, prefix: CachedPrefix, table: list[int], token_ids: Sequence[int], num_tokens: int) -> None:
        """Put the full blocks of ``token_ids[:num_tokens]`` into the cache.

        Where an equal block is there already, ``table`` gets that one and frees its own.

        Args:
            table: holds the tokens' KV.
            num_tokens: committed and computed; to be called after what was rejected has been cut off.
        """
        if not self.enabled:
            return
        while (key := self.next_key(prefix, token_ids, num_tokens)) is not None:
            index = len(prefix.blocks)
            cached = self._cached.get(key)
            if cached is None:
                cached = CachedBlock(table[index], key)
                self._blocks.keep(table[index])
                self._cached[key] = self._cached_of[table[index]] = cached
            else:
                assert cached.block is not None
                self._blocks.exchange(table, index, cached.block)
            prefix.blocks.append(cached)

    def forget(self, prefix: CachedPrefix) -> None:
        """Never hand out these blocks again, nor any whose prefix goes through one of them: their KV is not
        to be trusted. Sequences that hold them keep them, and add nothing to the cache any more."""
        doomed = {cached for cached in prefix.blocks if cached.block is not None}
        if not doomed:
            return
        for cached in self._cached.values():
            if cached.key[0] in doomed:
                doomed.add(cached)
        for cached in doomed:
            assert cached.block is not None
            self._blocks.forget(cached.block)
            self._give_up(cached.block)

    def check_holder(self, prefix: CachedPrefix, table: Sequence[int], num_computed_tokens: int) -> None:
        """Assert that a sequence agrees with its prefix, and writes to no block that others hold (for
        tests)."""
        size = self._blocks.block_size
        assert len(prefix) * size <= num_computed_tokens
        if num_computed_tokens // size > len(prefix):
            assert not self.enabled or (prefix.blocks and prefix.blocks[-1].block is None)
        for cached, block in zip(prefix.blocks, table, strict=False):
            assert cached.block in (block, None)
        for block in table[num_computed_tokens // size :]:
            assert self._blocks.num_holders(block) == 1, "a sequence may write to a block of another one"
            assert block not in self._cached_of

    def check_invariants(self) -> None:
        """Assert what the class says (for tests)."""
        assert self._cached_of == {cached.block: cached for cached in self._cached.values()}
        idle = {block: place for place, block in enumerate(self._blocks.idle_blocks())}
        assert idle.keys() <= self._cached_of.keys()
        for key, cached in self._cached.items():
            assert cached.key is key
            assert cached.block is not None
            parent = key[0]
            if isinstance(parent, str):
                continue
            assert parent.block is not None, "a block whose prefix was given up"
            assert self._cached[parent.key] is parent
            assert self._blocks.num_holders(parent.block) >= self._blocks.num_holders(cached.block)
            if parent.block in idle:
                assert idle[cached.block] < idle[parent.block], "a block is evicted before what builds on it"

    def _is_idle(self, cached: CachedBlock) -> bool:
        assert cached.block is not None
        return not self._blocks.num_holders(cached.block)

    def _give_up(self, block: int) -> None:
        cached = self._cached_of.pop(block)
        del self._cached[cached.key]
        cached.block = None
