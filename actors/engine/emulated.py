"""An emulated model: hash-based logits, a chosen acceptance rate, and an accelerator's step time.

It makes scheduling, wire and scaling measurable without a model's own cost. The law of the next token
depends on (seed, position, token at that position) alone, so it is a Markov chain that any process computes
alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import numpy.typing as npt
import torch

from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.errors import ModelError

SCHEME = "emulated"
FLOOR = -30.0
"""Logit of every token outside of a row's support."""

NEAR_RANKS = (0.625, 0.25, 0.125)
"""Where a differing draft is near: how often the target's choice is its second, third and fourth."""

_POLLED_SECONDS = 0.00015
_LOGIT_STEP = 0.5
_NEAR_GAP = 10.0
"""How far a near draft's own favourites are ahead of the target's tokens: one of those wins, at temperature
1, in fewer than 1 of 5,000 cases."""
_MASK_64 = (1 << 64) - 1

UInt64Array = npt.NDArray[np.uint64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EmulatedModel:
    """What an ``emulated://`` source says.

    Raises:
        ModelError: on construction, naming the key and its range.
    """

    name: str = "emulated"
    vocab_size: int = 1024
    base_ms: float = 0.0
    """Time of a step, milliseconds."""
    free_tokens: int = 64
    """Tokens that a step computes within ``base_ms``."""
    per_token_ms: float = 0.0
    """Time of each further token, milliseconds."""
    acceptance: float = 1.0
    """As a draft: the share of (position, token) where its law is the target's; elsewhere it prefers tokens
    that the target never has. 1 for a target."""
    seed: int = 0
    """Chooses the law. Target and draft must have the same."""
    draft_seed: int = 0
    """Chooses where a draft differs."""
    support: int = 8
    """Tokens that each law is spread over."""
    max_model_len: int = 4096
    near: float = 0.8
    """As a draft, where it differs: the share of cases in which the target's choice is among its next three.
    Real pairs have 0.75 to 0.83 under shared noise. In the others its support is disjoint from the
    target's."""

    def __post_init__(self) -> None:
        self._require("vocab_size", 2 <= self.vocab_size <= 1 << 24, "in 2 … 16777216")
        for key in ("base_ms", "per_token_ms"):
            self._require(key, 0.0 <= getattr(self, key) <= 60_000.0, "a number in 0 … 60000")
        self._require("free_tokens", self.free_tokens >= 0, "0 or more")
        for key in ("acceptance", "near"):
            self._require(key, 0.0 <= getattr(self, key) <= 1.0, "a number in 0 … 1")
        for key in ("seed", "draft_seed"):
            self._require(key, 0 <= getattr(self, key) <= _MASK_64, "an unsigned 64-bit integer")
        most = min(self.vocab_size // 2, 4096)
        self._require("support", 1 <= self.support <= most, f"in 1 … {most} (at most half of vocab_size)")
        self._require("max_model_len", self.max_model_len >= 1, "1 or more")

    def _require(self, key: str, holds: bool, shown: str) -> None:
        if not holds:
            raise ModelError(f"{SCHEME}://{self.name}: {key} must be {shown}, got {getattr(self, key)}")

    @property
    def source(self) -> str:
        """The ``emulated://`` text that says this, every key spelt out."""
        keys = "&".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name != "name")
        return f"{SCHEME}://{self.name}?{keys}"

    @classmethod
    def from_source(cls, source: str) -> EmulatedModel:
        """Read ``emulated://name?key=value&…``.

        Raises:
            ModelError: another scheme, an unknown or repeated key, or a value of a wrong type or range.
        """
        parts = urlsplit(source)
        if parts.scheme != SCHEME or parts.path not in ("", "/") or parts.fragment:
            raise ModelError(f"{source}: an emulated model is written {SCHEME}://name?key=value&key=value")
        types = {f.name: f.type for f in fields(cls) if f.name != "name"}
        values: dict[str, int | float] = {}
        try:
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError as error:
            raise ModelError(f"{source}: the part after '?' must be key=value&key=value ({error})") from error
        for key, text in pairs:
            if key not in types:
                raise ModelError(f"{source}: unknown key {key!r}; known are {', '.join(sorted(types))}")
            if key in values:
                raise ModelError(f"{source}: key {key!r} is given twice")
            kind, shown = (int, "a whole number") if types[key] == "int" else (float, "a number")
            try:
                values[key] = kind(text)
            except ValueError:
                raise ModelError(f"{source}: {key} must be {shown}, got {text!r}") from None
            if not math.isfinite(values[key]):
                raise ModelError(f"{source}: {key} must be {shown}, got {text!r}")
        return cls(name=parts.netloc or "emulated", **values)  # type: ignore[arg-type]


def wait(seconds: float) -> None:
    """Sleep, but for the last moment: a sleep ends too late by about as much."""
    end = time.monotonic() + seconds
    time.sleep(max(seconds - _POLLED_SECONDS, 0.0))
    while time.monotonic() < end:
        time.sleep(0.0)


class EmulatedRunner:
    """A ``ModelRunner`` whose law is a hash and whose step takes the stated time.

    A step of n tokens takes ``base_ms + per_token_ms · max(0, n − free_tokens)``, what computing the logits
    took included. As the host of an accelerator, this one waits: it sleeps, and polls for the last moment.

    Args:
        sleep: how to wait, seconds (a test may count instead).
    """

    def __init__(
        self,
        model: EmulatedModel,
        *,
        num_blocks: int,
        block_size: int,
        sleep: Callable[[float], None] = wait,
    ) -> None:
        for name, number in (("num_blocks", num_blocks), ("block_size", block_size)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        self._model = model
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._sleep = sleep
        self._law = EmulatedLaw(model)

    @classmethod
    def from_source(cls, source: str, *, num_blocks: int, block_size: int) -> EmulatedRunner:
        """Raises ``ModelError`` as ``EmulatedModel.from_source`` does."""
        return cls(EmulatedModel.from_source(source), num_blocks=num_blocks, block_size=block_size)

    @property
    def model(self) -> EmulatedModel:
        return self._model

    @property
    def acceptance(self) -> float:
        return self._model.acceptance

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._model.max_model_len

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        """See ``ModelRunner.forward``. The block tables are checked for length only.

        Raises:
            ValueError: a slice breaks an invariant.
        """
        began = time.monotonic()
        num_tokens = 0
        for index, piece in enumerate(batch):
            count = len(piece.token_ids)
            end = piece.start + count
            if not count or piece.start < 0 or end > self.max_model_len:
                raise ValueError(f"batch[{index}]: positions {piece.start} … {end - 1} are empty or too long")
            if not 0 <= piece.num_logits <= count:
                raise ValueError(f"batch[{index}]: num_logits = {piece.num_logits} is not in 0 … {count}")
            if len(piece.block_table) * self._block_size < end:
                raise ValueError(f"batch[{index}]: the block table does not hold {end} tokens")
            num_tokens += count
        logits = self._logits(batch)
        wanted = self.step_seconds(num_tokens) if batch else 0.0
        left = wanted - (time.monotonic() - began)
        if left > 0:
            self._sleep(left)
        return logits

    def step_seconds(self, num_tokens: int) -> float:
        """How long a step of ``num_tokens`` takes, seconds."""
        extra = max(0, num_tokens - self._model.free_tokens)
        return (self._model.base_ms + self._model.per_token_ms * extra) / 1e3

    def warm_up(self, max_tokens: int) -> float:
        """Nothing to warm; returns the seconds that a step of ``max_tokens`` takes."""
        return self.step_seconds(max_tokens)

    def _logits(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        wanted = [piece for piece in batch if piece.num_logits]
        count = sum(piece.num_logits for piece in wanted)
        tokens = chain.from_iterable(piece.token_ids[-piece.num_logits :] for piece in wanted)
        ends = (piece.start + len(piece.token_ids) for piece in wanted)
        positions = (range(end - piece.num_logits, end) for piece, end in zip(wanted, ends, strict=True))
        token_ids = np.fromiter(tokens, np.int64, count)
        if count and (token_ids.min() < 0 or token_ids.max() >= self.vocab_size):
            raise ValueError(f"a token id is outside of the vocabulary 0 … {self.vocab_size - 1}")
        return self._law.logits(np.fromiter(chain.from_iterable(positions), np.int64, count), token_ids)


class EmulatedLaw:
    """The next-token law as a pure function of (position, token at that position)."""

    def __init__(self, model: EmulatedModel) -> None:
        self._model = model
        # Steps through the vocabulary that meet every id once before they come back.
        steps = np.arange(1, min(model.vocab_size, 1024))
        self._steps: UInt64Array = steps[np.gcd(steps, model.vocab_size) == 1].astype(np.uint64)
        self._draft_threshold = round(model.acceptance * 2.0**53)

    def logits(self, positions: IntArray, token_ids: IntArray) -> torch.Tensor:
        """float32 [R, vocab_size] for R (position, token) pairs."""
        model = self._model
        key = _pair_key(np.uint64(model.seed), positions, token_ids)
        first = _hash(key + np.uint64(1)) % np.uint64(model.vocab_size)
        step = self._steps[_hash(key + np.uint64(2)) % np.uint64(len(self._steps))]
        rank = np.arange(model.support, dtype=np.uint64)
        favourites = np.zeros(len(positions), dtype=np.int64)
        if model.acceptance < 1.0:
            # The ids after the target's support on the same walk: the two cannot meet.
            differs = self.differs(positions, token_ids)
            favourites = np.where(differs, self._num_favourites(key), 0)
            beyond = np.where(differs & (favourites == 0), np.uint64(model.support), np.uint64(0))
            rank = rank[None] + beyond[:, None]
        else:
            rank = np.broadcast_to(rank, (len(positions), model.support))
        ids = (first[:, None] + rank * step[:, None]) % np.uint64(model.vocab_size)
        salts: UInt64Array = np.arange(3, 3 + model.support, dtype=np.uint64)
        jitter = _unit(_hash(np.add(key[:, None], salts, dtype=np.uint64)))
        # Each rank has a band of its own, so that no two logits of a row are equal.
        levels = -_LOGIT_STEP * (np.arange(model.support) + 0.9 * jitter)
        levels -= np.where(favourites > 0, _NEAR_GAP, 0.0)[:, None]
        logits = torch.full((len(positions), model.vocab_size), FLOOR, dtype=torch.float32)
        # Ranks far down reach the floor's depth; they stay above it.
        levels = np.maximum(levels, FLOOR + 1.0 - np.arange(model.support) / model.support)
        logits.scatter_(
            1, torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(levels.astype(np.float32))
        )
        for place in range(int(favourites.max(initial=0))):
            rows = np.flatnonzero(favourites > place)
            foreign = first[rows] + np.uint64(model.support + place) * step[rows]
            foreign %= np.uint64(model.vocab_size)
            logits[torch.from_numpy(rows), torch.from_numpy(foreign.astype(np.int64))] = -_LOGIT_STEP * place
        return logits

    def differs(self, positions: IntArray, token_ids: IntArray) -> npt.NDArray[np.bool_]:
        """Per pair, whether this draft's law is another than the target's."""
        salt = np.uint64((self._model.draft_seed * 2 + 1) & _MASK_64)
        key = _pair_key(_hash(salt), positions, token_ids)
        differing: npt.NDArray[np.bool_] = (key >> np.uint64(11)) >= np.uint64(self._draft_threshold)
        return differing

    def _num_favourites(self, key: UInt64Array) -> IntArray:
        """Per pair where it differs, the draft's own tokens before the target's first; 0: the target's are
        not among its tokens at all."""
        place = _unit(_hash(key ^ np.uint64(self._model.draft_seed)))
        found = np.zeros(len(key), dtype=np.int64)
        for rank in range(len(NEAR_RANKS), 0, -1):
            found[place < self._model.near * sum(NEAR_RANKS[:rank])] = rank
        return np.minimum(found, self._model.support)


def _pair_key(salt: UInt64Array | np.uint64, positions: IntArray, token_ids: IntArray) -> UInt64Array:
    """64 bits for each (position, token)."""
    places: UInt64Array = positions.astype(np.uint64)
    tokens: UInt64Array = token_ids.astype(np.uint64)
    return _hash(_hash(places + salt) ^ tokens)


def _hash(values: UInt64Array | np.uint64) -> UInt64Array:
    """The 64-bit finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, 2014, figure 14), elementwise."""
    with np.errstate(over="ignore"):
        mixed = np.atleast_1d(np.asarray(values, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed


def _unit(values: UInt64Array) -> npt.NDArray[np.float64]:
    """Uniform in [0, 1) from the upper 53 bits."""
    return (values >> np.uint64(11)).astype(np.float64) * 2.0**-53
