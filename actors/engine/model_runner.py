"""Runs a ``transformers`` causal language model on ragged batches over the paged KV cache."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from paceline.actors.engine.attention import ATTENTION_NAME, BACKENDS, PagedBatch, ShapeProbe
from paceline.actors.engine.attention_plan import StepLayout
from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.compiled_step import MAX_COMPILED_TOKENS, CompiledStep
from paceline.actors.engine.errors import ModelError, ShardGroupError
from paceline.actors.engine.kv_cache import PagedKVCache, kv_block_bytes
from paceline.actors.engine.memory import is_out_of_memory

__all__ = ["TransformersRunner", "kv_block_bytes"]

# With these, the rotation of a token depends on the longest sequence of its batch once that exceeds the
# length the model was trained on. One sequence's neighbours would change its output.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


_CHECKED_TOKENS = 24

_WARMED_LOGITS = 1024
"""Rows of logits of the largest step: prompts need one each, but tails one for every token. In float32 a row
of a large vocabulary takes more than half a MiB."""


class TransformersRunner:
    """A ``ModelRunner`` for any ``transformers`` causal LM that takes its attention function by name.

    Not thread-safe. Prompt chunks, pending tokens and tails may be mixed in one batch at will: all are
    "tokens to compute". The logits of a sequence do not depend on its neighbours beyond rounding, and with
    ``deterministic`` not at all: the row of a position is the same to the bit whether it was
    computed alone, in a tail, in a prompt chunk or among other sequences. For that the model must come from
    ``load_model(…, deterministic=True)``; ``is_batch_invariant`` finds out whether it holds.

    Args:
        model: from ``load_model``; its attention function is set if it is not yet.
        num_blocks, block_size: the size of the KV cache, which is allocated here.
        max_model_len: longest sequence; None = what the model was made for.
        device: where the model is.
        attention_backend: "paged", or "reference" (slow, one sequence after the other, in float32).
        deterministic: see above.
        vocab_size: number of token ids, if the tokenizer says that the output layer is padded; None = all.
        enforce_eager: run every step eagerly. False: steps of few tokens are compiled by ``compile``.
        announce: called with each batch once it has been checked, right before it is computed: so the leader
            of a shard group tells the other ranks.

    Raises:
        ModelError: the model cannot be served in this way, or the cache does not fit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int | None = None,
        device: torch.device,
        attention_backend: str = "paged",
        deterministic: bool = True,
        vocab_size: int | None = None,
        enforce_eager: bool = True,
        announce: Callable[[Sequence[SequenceSlice]], None] | None = None,
    ) -> None:
        if attention_backend not in BACKENDS:
            raise ValueError(
                f"attention_backend must be one of {', '.join(BACKENDS)}, got {attention_backend!r}"
            )
        for name, number in (("num_blocks", num_blocks), ("block_size", block_size)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        config: Any = model.config.get_text_config()
        self._max_model_len = _checked_max_model_len(config, max_model_len)
        self._vocab_size = _checked_vocab_size(config, vocab_size)
        self._reference = attention_backend == "reference"
        self._deterministic = deterministic
        self._device = device
        self._model = model
        self._announce = announce
        if not enforce_eager and (deterministic or announce is not None):
            raise ModelError(
                "enforce_eager: a compiled step is neither deterministic nor divided among ranks: set it to "
                "true"
            )
        self._compiled: CompiledStep | None = None if enforce_eager else CompiledStep(model, device)
        if config._attn_implementation != ATTENTION_NAME:
            model.set_attn_implementation(ATTENTION_NAME)
        model.eval()
        probe = self._probe(config)
        self._cache = PagedKVCache(
            probe.shapes,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=probe.dtype or model.dtype,
            device=device,
        )

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def block_size(self) -> int:
        return self._cache.block_size

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def deterministic(self) -> bool:
        """Whether it was asked for batch-invariant numerics."""
        return self._deterministic

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes that the KV cache takes."""
        return self._cache.num_bytes

    @torch.inference_mode()
    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        """Compute the slices, write their KV, return logits (see ``ModelRunner.forward``).

        Raises:
            ValueError: a slice breaks an invariant; nothing was computed or written.
            ShardGroupError: with ``announce``, whatever else goes wrong: the ranks are out of step.
        """
        if not batch:
            return torch.empty(0, self._vocab_size, device=self._device)
        self._check(batch)
        layout = StepLayout(batch, self._cache.block_size, self._device, deterministic=self._deterministic)
        self._check_blocks(layout)
        token_ids = self._token_ids(batch, layout.num_tokens)
        wanted = _logit_rows(batch, layout)
        if self._announce is None:
            return self._compute(layout, token_ids, wanted)
        self._announce(batch)
        try:
            return self._compute(layout, token_ids, wanted)
        except ShardGroupError:
            raise
        except Exception as error:
            # The other ranks are in the middle of the step, and nothing brings them out of it.
            raise ShardGroupError(f"the leader's step broke off: {type(error).__name__}: {error}") from error

    def _compute(
        self,
        layout: StepLayout,
        token_ids: torch.Tensor,
        wanted: np.typing.NDArray[np.int64] | None,
    ) -> torch.Tensor:
        attention = PagedBatch(self._cache, layout, reference=self._reference)
        if self._compiled is not None and layout.num_tokens <= MAX_COMPILED_TOKENS:
            logits = self._compiled(token_ids, layout.positions, attention)
        else:
            with self._attention_kernels():
                output = self._model(
                    input_ids=token_ids[None],
                    position_ids=layout.positions[None],
                    use_cache=False,
                    logits_to_keep=0 if wanted is None else torch.from_numpy(wanted).to(self._device),
                    paged_batch=attention,
                )
            logits = output.logits[0]
        if wanted is not None and logits.shape[0] != len(wanted):
            # A compiled step returns all rows, and so does a model that does not know logits_to_keep.
            logits = logits[torch.from_numpy(wanted).to(self._device)]
        return _as_float32(logits[:, : self._vocab_size])

    def is_batch_invariant(self) -> bool:
        """Whether logits come out the same to the bit alone, in a tail and among others, as they should with
        ``deterministic``.

        They may not on a processor whose kernels behave otherwise, or in a model that multiplies by weights
        outside of linear layers. Uses any blocks of the cache: call it before the first sequence.

        Raises:
            ValueError: the cache is too small to compare.
        """
        length = min(_CHECKED_TOKENS, self._max_model_len, self.num_blocks // 2 * self.block_size)
        if length == 0:
            raise ValueError("num_blocks must be at least 2 to compare a sequence alone and with another")
        blocks = -(-length // self.block_size)
        tokens = [index % self._vocab_size for index in range(7, 7 + length)]
        table, neighbour = range(blocks), range(blocks, 2 * blocks)
        together = self.forward(
            [SequenceSlice(tokens, 0, table, length), SequenceSlice(tokens[::-1], 0, neighbour, length)]
        )[:length]
        rows, computed = [], 0
        for size in (length // 2, 1, 1, 3, length):
            chunk = tokens[computed : computed + size]
            if chunk:
                rows.append(self.forward([SequenceSlice(chunk, computed, table, len(chunk))]))
                computed += len(chunk)
        return torch.equal(torch.cat(rows), together)

    def warm_up(self, max_tokens: int) -> float:
        """Run the largest step once, so that a lack of memory shows at start-up and not under load.

        Uses any blocks of the cache: call it before the first sequence. At most as many tokens as the cache
        holds are run, and logits are computed for all of them up to a thousand, as when tails are verified.

        Args:
            max_tokens: the most tokens of one step, ``max_num_batched_tokens``.

        Returns:
            Seconds that the step took.

        Raises:
            ModelError: the memory does not suffice; the text names the settings.
        """
        batch: list[SequenceSlice] = []
        blocks_per_sequence = -(-min(self._max_model_len, max_tokens) // self.block_size)
        first_block, left, logits_left = 0, max_tokens, _WARMED_LOGITS
        while left > 0 and first_block < self.num_blocks:
            table = range(first_block, min(first_block + blocks_per_sequence, self.num_blocks))
            length = min(left, self._max_model_len, len(table) * self.block_size)
            num_logits = max(1, min(length, logits_left))
            batch.append(SequenceSlice([0] * length, 0, table, num_logits))
            first_block, left, logits_left = table.stop, left - length, logits_left - num_logits
        began = time.monotonic()
        try:
            self.forward(batch).sum().item()
        except (RuntimeError, MemoryError, ShardGroupError) as error:
            if not is_out_of_memory(error.__cause__ or error):
                raise
            raise ModelError(
                f"a step of max_num_batched_tokens = {max_tokens} tokens does not fit into the memory of "
                f"{self._device}: lower max_num_batched_tokens, or kv_cache (now {self.num_blocks} blocks)"
            ) from error
        return time.monotonic() - began

    def compile(self) -> None:
        """Compile the steps of few tokens, unless all are to be eager. Takes up to two minutes.

        Uses any blocks of the cache: call it before the first sequence.

        Raises:
            ModelError: the model cannot be compiled here.
        """
        if self._compiled is None:
            return
        with self._compiled.compiling():
            # The compiler makes one step for one token, and one for any other number of them.
            for num_tokens in range(1, 1 + min(2, self._max_model_len, self.num_blocks * self.block_size)):
                table = range(-(-num_tokens // self.block_size))
                self.forward([SequenceSlice([0] * num_tokens, 0, table, num_tokens)])

    def _attention_kernels(self) -> contextlib.AbstractContextManager[None]:
        """On a GPU, for ``deterministic``: only kernels that never divide a row's keys among blocks by how
        much else there is to do."""
        if self._deterministic and self._device.type == "cuda":
            return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
        return contextlib.nullcontext()

    @torch.inference_mode()
    def _probe(self, config: Any) -> ShapeProbe:
        probe = ShapeProbe()
        zero = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        self._model(input_ids=zero, position_ids=zero, use_cache=False, logits_to_keep=1, paged_batch=probe)
        name = type(self._model).__name__
        missing = sorted(set(range(config.num_hidden_layers)) - probe.shapes.keys())
        if missing:
            raise ModelError(
                f"{name}: layers {missing} do not use the attention function that was set, so that their "
                "state cannot be paged and cut back; serve a model whose every layer is plain attention"
            )
        layer_types: Sequence[str] = getattr(config, "layer_types", None) or ()
        for layer, kind in enumerate(layer_types):
            if kind not in ("full_attention", "sliding_attention"):
                raise ModelError(
                    f"{name}: layer {layer} has attention of type {kind}, which is not supported"
                )
            if kind == "sliding_attention" and probe.windows[layer] is None and config.sliding_window:
                raise ModelError(
                    f"{name}: layer {layer} does not pass its sliding window to its attention function"
                )
        if (
            getattr(config, "use_bidirectional_attention", False)
            or getattr(config, "is_causal", True) is False
        ):
            raise ModelError(f"{name} attends to later tokens: it is no causal language model")
        return probe

    def _check(self, batch: Sequence[SequenceSlice]) -> None:
        block_size, limit = self._cache.block_size, self._max_model_len
        for index, piece in enumerate(batch):
            count = len(piece.token_ids)
            end = piece.start + count
            if count == 0:
                raise ValueError(f"batch[{index}]: token_ids must not be empty")
            if piece.start < 0 or end > limit:
                raise ValueError(
                    f"batch[{index}]: positions {piece.start} … {end - 1} exceed max_model_len = {limit}"
                )
            if not 0 <= piece.num_logits <= count:
                raise ValueError(f"batch[{index}]: num_logits = {piece.num_logits} is not in 0 … {count}")
            if len(piece.block_table) * block_size < end:
                raise ValueError(
                    f"batch[{index}]: {len(piece.block_table)} blocks of {block_size} hold no {end} tokens"
                )

    def _check_blocks(self, layout: StepLayout) -> None:
        tables = layout.block_tables
        if tables.min() < 0 or tables.max() >= self._cache.num_blocks:
            raise ValueError(f"a block table names a block outside of 0 … {self._cache.num_blocks - 1}")

    def _token_ids(self, batch: Sequence[SequenceSlice], num_tokens: int) -> torch.Tensor:
        ids = np.fromiter(chain.from_iterable(s.token_ids for s in batch), np.int64, num_tokens)
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise ValueError(f"a token id is outside of the vocabulary 0 … {self._vocab_size - 1}")
        return torch.from_numpy(ids).to(self._device)


def _logit_rows(batch: Sequence[SequenceSlice], layout: StepLayout) -> np.typing.NDArray[np.int64] | None:
    """Rows of the batch whose logits are wanted; None = all."""
    counts = np.fromiter((s.num_logits for s in batch), np.int64, len(batch))
    total = int(counts.sum())
    if total == layout.num_tokens:
        return None
    ends = layout.first_rows + layout.num_queries
    first_of = np.cumsum(counts) - counts
    rows: np.typing.NDArray[np.int64] = np.arange(total) + np.repeat(ends - counts - first_of, counts)
    return rows


def _as_float32(logits: torch.Tensor) -> torch.Tensor:
    """The same numbers in float32: ``logits`` itself if it has that type already.

    On a CPU the copy goes to memory of numpy's, which asks for huge pages. Torch's own comes in small ones,
    and past 32 MB, where the C library hands memory back each time, to touch them anew takes ten times as
    long as to convert (80 rows of 151,936: 20 ms where huge pages leave 3.5).
    """
    if logits.dtype is torch.float32 or logits.device.type != "cpu":
        return logits.float()
    return torch.from_numpy(np.empty(tuple(logits.shape), np.float32)).copy_(logits)


def _checked_max_model_len(config: Any, wanted: int | None) -> int:
    """The longest sequence the model serves well.

    Raises:
        ModelError: more than that is wanted.
    """
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    for kind in kinds:
        if kind.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            trained = kind.get("original_max_position_embeddings") or limit
            limit = min(limit, trained) if limit else trained
    if wanted is None:
        if limit is None:
            raise ModelError(
                "the model's configuration does not say how long a sequence may be: set max_model_len"
            )
        return int(limit)
    if wanted < 1:
        raise ModelError(f"max_model_len must be at least 1, got {wanted}")
    if limit is not None and wanted > limit:
        raise ModelError(f"max_model_len = {wanted} is more than the model's {limit}: set at most {limit}")
    return wanted


def _checked_vocab_size(config: Any, wanted: int | None) -> int:
    size = int(config.vocab_size)
    if wanted is None:
        return size
    if not 1 <= wanted <= size:
        raise ModelError(
            f"the tokenizer has {wanted} tokens but the output layer only {size}: they do not belong together"
        )
    return wanted
