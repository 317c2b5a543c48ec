"""The Gumbel-max race: which token of each row has the highest log weight + noise.

Almost no token needs its noise. What a token needs to win is compared with its random bits before any
logarithm is taken; noise is bounded; and the most likely tokens race first, so that the others have much to
reach. All three shortcuts only ever drop losers: the winner is the one of the whole race, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

import numpy as np

from paceline.actors.engine.noise import (
    IDS_PER_CALL,
    MAX_GUMBEL,
    FloatArray,
    IntArray,
    bits_of_tokens,
    gumbel_of_bits,
    gumbel_of_number,
    random_bits,
    words_of_blocks,
)
from paceline.actors.engine.truncation import Cut, Logits, highest_bound

Numbers = TypeVar("Numbers", float, FloatArray)

_BLOCKS_PER_CHUNK: Final = 12_800
"""Calls of the generator at once. Its arrays of 100 KiB stay in the cache, call overhead is small, and the
allocator hands the same memory out again (glibc maps and unmaps arrays above 128 KiB: 1.5 times slower)."""
_BITS_MARGIN: Final = math.log(1.01 * 2.0**32)
"""Turns a bound on 1 − u into one on random bits, one percent wider. As 1 − u is half a bit less than what
the bits lack to 2**32, one is added besides: at the very top that is more than a percent."""
_NO_BOUND: Final = 23.0
"""exp of this is more than 2**32, and exp of minus this is next to 0: all bits will do, and the highest."""
_FIRST: Final = 128
"""Tokens of a row that race before all others."""
_LARGE: Final = 64 * _FIRST
"""Rows of fewer tokens are not worth a first heat."""
_MOST_HELD: Final = 8192
_DENSE: Final = 0.7
"""Share of the blocks in reach from which on all of them are hashed, without a list."""
_FEW_RACES: Final = 6
_FEW_TOKENS: Final = 32
"""Up to so many rows, and tokens in reach of each, numbers are faster than arrays."""


class Racer(NamedTuple):
    """What draws one token: a row of logits, by the noise of one seed and position."""

    best_id: int
    """The row's token with the highest logit."""
    best: float
    """That logit, which has log weight 0."""
    cut: Cut
    """What the filters leave of the row."""
    temperature: float
    seed: int
    """Bits of the unsigned 64-bit seed."""
    position: int


def winners(logits: Logits, racers: Sequence[Racer]) -> list[int]:
    """The token of each row with the highest log weight + noise, the lowest id among equals, of those that
    the row's cut leaves.

    Args:
        logits: ``[R, V]``.
        racers: R, one per row.
    """
    found: list[int | None] = [None] * len(racers)
    if len(racers) <= _FEW_RACES:
        found = [_winner_of_few(values, racer) for values, racer in zip(logits, racers, strict=True)]
    rows = [row for row, token in enumerate(found) if token is None]
    if rows:
        racing = logits if len(rows) == len(logits) else logits[rows]
        race = Race.start([racers[row] for row in rows])
        for row, token in zip(rows, race.run(racing), strict=True):
            found[row] = token
    drawn = [token for token in found if token is not None]
    assert len(drawn) == len(racers)
    return drawn


def _winner_of_few(values: Logits, racer: Racer) -> int | None:
    """The winner of one row ``values`` [V], number by number; None: too many tokens may win."""
    best_id, best, cut, temperature, seed, position = racer
    ids = cut.ids
    if ids is None and len(values) >= _LARGE:
        return None
    leader, score = best_id, gumbel_of_number(bits_of_tokens(seed, position, [best_id])[0])
    if ids is None:
        ids = np.flatnonzero(values >= np.float32(max(cut.logit, _reachable(best, temperature, score))))
    if len(ids) > _FEW_TOKENS:
        return None
    token_ids = ids.tolist()
    all_bits = bits_of_tokens(seed, position, token_ids)
    for token_id, value, bits in zip(token_ids, values[ids].tolist(), all_bits, strict=True):
        if token_id == best_id or (value == cut.logit and token_id > cut.last_id):
            continue
        log_weight = (value - best) / temperature
        lead = log_weight - score + _BITS_MARGIN
        if 2**32 - bits > 1.0 + math.exp(min(max(lead, -_NO_BOUND), _NO_BOUND)):
            continue
        reached = log_weight + gumbel_of_number(bits)
        if reached > score or (reached == score and token_id < leader):
            leader, score = token_id, reached
    return leader


@dataclass(slots=True)
class Race:
    """Rows of a race. All fields have one entry per row."""

    seeds: IntArray
    """Bits of the unsigned 64-bit seeds."""
    positions: IntArray
    temperatures: FloatArray
    best: FloatArray
    """Highest logit, which has log weight 0."""
    cuts: Sequence[Cut]
    leaders: IntArray
    """Token with the highest score seen so far, the lowest id among equals. At first the best token: no
    filter removes it, so its score is one that the others have to reach."""
    scores: FloatArray
    """Its score, log weight + noise."""
    cut_logits: Logits
    cut_ids: IntArray
    held: list[tuple[IntArray, IntArray, Logits, IntArray]] = field(default_factory=list)
    """Blocks that passed a first test: rows, token ids // 4, logits and random bits of four ids."""
    num_held: int = 0

    @classmethod
    def start(cls, racers: Sequence[Racer]) -> Race:
        best_ids = np.array([racer.best_id for racer in racers], dtype=np.int64)
        seeds = np.array([racer.seed for racer in racers], dtype=np.int64)
        positions = np.array([racer.position for racer in racers], dtype=np.int64)
        cuts = [racer.cut for racer in racers]
        return cls(
            seeds=seeds,
            positions=positions,
            temperatures=np.array([racer.temperature for racer in racers], dtype=np.float64),
            best=np.array([racer.best for racer in racers], dtype=np.float64),
            cuts=cuts,
            leaders=best_ids,
            scores=gumbel_of_bits(random_bits(seeds, positions, best_ids)),
            cut_logits=np.array([cut.logit for cut in cuts], dtype=np.float32),
            cut_ids=np.array([cut.last_id for cut in cuts], dtype=np.int64),
        )

    def run(self, logits: Logits) -> list[int]:
        """The winners. ``logits`` [R, V]."""
        vocab_size = logits.shape[1]
        listed: list[int] = []
        unlisted: list[int] = []
        for row, cut in enumerate(self.cuts):
            (unlisted if cut.ids is None else listed).append(row)
        if listed:
            self._run_listed(logits, listed)
        behind = np.zeros(len(logits))
        """No token that is still to race has a log weight above minus this."""
        if vocab_size >= _LARGE and unlisted:
            self._run_first(logits, unlisted, behind)
        # As many rows at once as fill a chunk.
        step = max(_BLOCKS_PER_CHUNK * IDS_PER_CALL // vocab_size, 1)
        for begin in range(0, len(unlisted), step):
            rows = np.array(unlisted[begin : begin + step], dtype=np.int64)
            first, last = int(rows[0]), int(rows[-1])
            adjoining = last - first + 1 == len(rows)
            self._run_whole(logits[first : last + 1] if adjoining else logits[rows], rows, behind[rows])
        self._enter_held()
        return [int(token) for token in self.leaders]

    def _run_listed(self, logits: Logits, rows: list[int]) -> None:
        """Rows of which few tokens are left."""
        ids = [self.cuts[row].ids for row in rows]
        owners = np.repeat(np.array(rows, dtype=np.int64), [len(kept) for kept in ids if kept is not None])
        self._enter(logits, owners, np.concatenate([kept for kept in ids if kept is not None]))

    def _run_first(self, logits: Logits, rows: list[int], behind: FloatArray) -> None:
        """The most likely tokens of ``rows``; ``behind`` [R] is set to how far the others are behind."""
        owners: list[int] = []
        found: list[IntArray] = []
        for row in rows:
            values = logits[row]
            bound = highest_bound(values, _FIRST)
            ids = np.flatnonzero(values >= np.float32(bound)) if bound > -math.inf else values[:0]
            if 0 < len(ids) <= 4 * _FIRST:
                owners.append(row)
                found.append(ids)
                behind[row] = (self.best[row] - bound) / self.temperatures[row]
        if found:
            self._enter(logits, np.repeat(owners, [len(ids) for ids in found]), np.concatenate(found))

    def _run_whole(self, logits: Logits, rows: IntArray, behind: FloatArray) -> None:
        """Rows of which any token may win. ``logits`` [n, V] and ``behind`` [n] are of ``rows``.

        A token of log weight w reaches score s only if its noise g >= s − w, where g <= MAX_GUMBEL and, with
        g = −log(−log u) < −log(1 − u), only if 1 − u <= exp(w − s). Both are tested for a block of four ids
        at once, by the highest logit and the highest bits in it, with a margin that outweighs float32
        rounding.
        """
        if missing := -logits.shape[1] % IDS_PER_CALL:
            logits = np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf)
        best, temperatures = self.best[rows], self.temperatures[rows]
        reachable = _reachable(best, temperatures, self.scores[rows])
        thresholds = np.maximum(self.cut_logits[rows], reachable.astype(np.float32))
        # Four booleans seen as one integer: nonzero if any id of the block is at or above the threshold.
        in_reach = (logits >= thresholds[:, None]).view(np.uint32) != 0
        blocks_per_row = in_reach.shape[1]
        lanes = logits.reshape(-1, IDS_PER_CALL)
        if np.count_nonzero(in_reach) >= _DENSE * in_reach.size:
            for begin in range(0, blocks_per_row, _BLOCKS_PER_CHUNK):
                blocks = np.arange(begin, min(begin + _BLOCKS_PER_CHUNK, blocks_per_row))
                words = words_of_blocks(self.seeds[rows, None], self.positions[rows, None], blocks[None])
                hits = np.flatnonzero(_highest(words) >= self._needed(rows, behind)[:, None])
                heat, places = np.divmod(hits, len(blocks))
                self._hold(
                    rows[heat], begin + places, lanes, heat * blocks_per_row + begin + places, words, hits
                )
            return
        chosen = np.flatnonzero(in_reach)
        for begin in range(0, len(chosen), _BLOCKS_PER_CHUNK):
            places = chosen[begin : begin + _BLOCKS_PER_CHUNK]
            heat, blocks = np.divmod(places, blocks_per_row)
            # One entry instead of one per block, where that is all there is (rows are ascending).
            owner = heat[:1] if heat[0] == heat[-1] else heat
            words = words_of_blocks(self.seeds[rows[owner]], self.positions[rows[owner]], blocks)
            hits = np.flatnonzero(_highest(words) >= self._needed(rows, behind)[owner])
            self._hold(rows[heat[hits]], blocks[hits], lanes, places[hits], words, hits)

    def _needed(self, rows: IntArray, behind: FloatArray) -> IntArray:
        """The random bits without which no token can win whose log weight is at most −``behind``."""
        return np.ceil(2.0**32 - _most_missing(-behind - self.scores[rows])).astype(np.int64)

    def _hold(
        self,
        owners: IntArray,
        blocks: IntArray,
        lanes: Logits,
        places: IntArray,
        words: Sequence[IntArray],
        hits: IntArray,
    ) -> None:
        """Keep some blocks until there are enough to be worth the calls.

        Args:
            owners, blocks: ``[m]``, row and token id // 4 of each block.
            lanes: ``[n, 4]``, logits; the blocks' are at ``places`` [m].
            words: random words of four lanes, of any shape; the blocks' are at the flat indices ``hits`` [m].
        """
        bits = np.stack([word.reshape(-1)[hits] for word in words], axis=1)
        self.held.append((owners, blocks, np.take(lanes, places, axis=0), bits))
        self.num_held += len(owners)
        if self.num_held >= _MOST_HELD:
            self._enter_held()

    def _enter_held(self) -> None:
        """Let the tokens of the blocks that are held compete, as far as they can win."""
        if not self.held:
            return
        owners, blocks, values, bits = (np.concatenate(part) for part in zip(*self.held, strict=True))
        self.held, self.num_held = [], 0
        log_weights = (values.max(axis=1) - self.best[owners]) / self.temperatures[owners]
        able = np.flatnonzero(2**32 - bits.max(axis=1) <= _most_missing(log_weights - self.scores[owners]))
        ids = blocks[able, None] * IDS_PER_CALL + np.arange(IDS_PER_CALL)
        # Ids of the padding come along; with a log weight of −inf they cannot win.
        self._compete(
            np.repeat(owners[able], IDS_PER_CALL),
            ids.reshape(-1),
            values[able].reshape(-1),
            bits[able].reshape(-1),
        )

    def _enter(self, logits: Logits, rows: IntArray, token_ids: IntArray) -> None:
        """Let tokens compete: row and token id of each."""
        bits = random_bits(self.seeds[rows], self.positions[rows], token_ids)
        self._compete(rows, token_ids, logits[rows, token_ids], bits)

    def _compete(self, rows: IntArray, token_ids: IntArray, values: Logits, bits: IntArray) -> None:
        """Row, token id, logit and random bits of each. Cut tokens are turned away. Whatever the order of
        calls, and however often a token comes, the result is the same."""
        cut_logits = self.cut_logits[rows]
        kept = (values > cut_logits) | ((values == cut_logits) & (token_ids <= self.cut_ids[rows]))
        log_weights = (values - self.best[rows]) / self.temperatures[rows]
        kept &= 2**32 - bits <= _most_missing(log_weights - self.scores[rows])
        able = np.flatnonzero(kept)
        rows, token_ids = rows[able], token_ids[able]
        scores = log_weights[able] + gumbel_of_bits(bits[able])
        previous = self.scores.copy()
        np.maximum.at(self.scores, rows, scores)
        self.leaders[self.scores > previous] = np.iinfo(np.int64).max
        winners = scores == self.scores[rows]
        np.minimum.at(self.leaders, rows[winners], token_ids[winners])


def _reachable(best: Numbers, temperature: Numbers, score: Numbers) -> Numbers:
    """The logit below which not even the highest noise makes up for ``score``, with a margin that outweighs
    float32 rounding."""
    return best - temperature * (MAX_GUMBEL - score) - (1e-3 * temperature + 1e-6 * abs(best))


def _most_missing(lead: FloatArray) -> FloatArray:
    """The most that random bits may lack to 2**32 where noise has to make up for −``lead`` (w − s)."""
    return 1.0 + np.exp(np.clip(lead + _BITS_MARGIN, -_NO_BOUND, _NO_BOUND))


def _highest(words: Sequence[IntArray]) -> IntArray:
    """Of the four words of each block."""
    found: IntArray = np.maximum(np.maximum(words[0], words[1]), np.maximum(words[2], words[3]))
    return found
