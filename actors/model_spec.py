"""Which model an actor runs, and how it is brought up."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.actors import grammar_vocabulary, threads, weights
from paceline.actors.end_tokens import end_token_ids
from paceline.actors.engine.batch import ModelRunner
from paceline.actors.engine.errors import ModelError
from paceline.actors.grammar import GrammarCompiler
from paceline.actors.vocabulary import emulated_vocabulary_hash, vocabulary_hash

logger = logging.getLogger(__name__)

EMULATED_SCHEME = "emulated://"
EMULATED_NUM_BLOCKS = 8192


@dataclass(frozen=True)
class ModelSpec:
    """One model with its KV cache on one device.

    Raises:
        ModelError: on construction, naming the option.
    """

    source: str
    """A catalogue name, hub id, local folder, GGUF file or ``emulated://`` address."""
    tokenizer: str | None = None
    """Where the tokenizer is, if not with the model. It says what the token ids mean."""
    dtype: str = "auto"
    quantization: str = "none"
    """none, int8 (linear layers, on CPU only) or auto (int8 where the device can, else none)."""
    device: str = "auto"
    """auto (CUDA if there is any, else CPU), cpu, cuda or cuda:N."""
    num_threads: int | None = None
    """Compute threads; None = all cores."""
    block_size: int = 16
    """Tokens of one KV block."""
    num_blocks: int | None = None
    """Blocks of the KV cache; None = what fits into ``kv_cache_bytes``."""
    kv_cache_bytes: int = 1 << 30
    max_model_len: int | None = None
    """Longest sequence in tokens; None = the model's own."""
    trust_remote_code: bool = False
    deterministic: bool = True
    """Batch-invariant numerics, on a CPU: logits do not depend on what else is in the step, to the bit."""

    def __post_init__(self) -> None:
        if not self.source:
            raise ModelError("model: must not be empty")
        for name in ("num_threads", "block_size", "num_blocks", "kv_cache_bytes", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ModelError(f"{name}: must be at least 1, got {value}")


class WarmableRunner(ModelRunner, Protocol):
    """What both kinds of runner offer."""

    def warm_up(self, max_tokens: int) -> float:
        """Run the largest step once; returns its seconds."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to step."""

    runner: WarmableRunner
    vocabulary_hash: bytes
    constraints: GrammarCompiler
    """Reads the vocabulary when the first constraint comes."""


def prepare_thread(spec: ModelSpec) -> None:
    """Set the calling thread up for this model's compute. For the engine's own thread."""
    threads.apply(spec.num_threads or os.cpu_count() or 1)


def load(spec: ModelSpec, *, max_num_batched_tokens: int) -> LoadedModel:
    """Bring the model up: weights, tokenizer, KV cache and a warm-up step. Blocking, up to minutes.

    Raises:
        ModelError: the model cannot be found, read or served; the text names the remedy.
    """
    prepare_thread(spec)
    source = weights.resolve(spec.source)
    if source.startswith(EMULATED_SCHEME):
        loaded = _load_emulated(spec, source)
    else:
        loaded = _load_transformers(spec, source)
    seconds = loaded.runner.warm_up(max_num_batched_tokens)
    logger.info("model %s is ready; its largest step takes %.0f ms", spec.source, 1e3 * seconds)
    return loaded


def _load_emulated(spec: ModelSpec, source: str) -> LoadedModel:
    from paceline.actors.engine.emulated import EmulatedRunner

    runner = EmulatedRunner.from_source(
        source, num_blocks=spec.num_blocks or EMULATED_NUM_BLOCKS, block_size=spec.block_size
    )
    size = runner.vocab_size
    compiler = GrammarCompiler(lambda: grammar_vocabulary.emulated(size), size)
    return LoadedModel(runner, emulated_vocabulary_hash(size), compiler)


def _load_transformers(spec: ModelSpec, source: str) -> LoadedModel:
    import torch

    from paceline.actors.engine.loading import load_model, load_model_config, resolve_dtype
    from paceline.actors.engine.model_runner import TransformersRunner, kv_block_bytes
    from paceline.actors.engine.quantized_linear import resolve_quantization

    device = _device(spec.device)
    quantization = resolve_quantization(spec.quantization, torch.device(device))
    dtype = resolve_dtype(spec.dtype, source, trust_remote_code=spec.trust_remote_code)
    tokenizer, vocabulary = _vocabulary(spec, source)
    config: Any = load_model_config(source, trust_remote_code=spec.trust_remote_code)
    num_blocks = spec.num_blocks
    if num_blocks is None:
        block_bytes = kv_block_bytes(config, dtype, spec.block_size)
        num_blocks = spec.kv_cache_bytes // block_bytes
        if num_blocks < 1:
            raise ModelError(
                f"kv_cache: {spec.kv_cache_bytes} bytes do not hold one block of {spec.block_size} tokens "
                f"({block_bytes} bytes); raise the memory or lower block_size"
            )
    if quantization != "none":
        logger.info("model %s: its large linear layers compute in %s", spec.source, quantization)
    num_ids = max(vocabulary.values()) + 1
    num_rows = int(config.get_text_config().vocab_size)
    runner = TransformersRunner(
        load_model(
            source,
            dtype,
            torch.device(device),
            trust_remote_code=spec.trust_remote_code,
            quantization=quantization,
            deterministic=spec.deterministic,
        ),
        num_blocks=num_blocks,
        block_size=spec.block_size,
        max_model_len=spec.max_model_len,
        device=torch.device(device),
        vocab_size=min(num_ids, num_rows),
        deterministic=spec.deterministic,
    )
    if spec.deterministic and device == "cpu" and num_blocks > 1 and not runner.is_batch_invariant():
        logger.warning(
            "model %s: its logits depend on what else is in a step, although deterministic is set: this "
            "processor's kernels, or weights outside of linear layers, do not allow for it. In %s the tokens "
            "of a request may differ from run to run where two are nearly as likely",
            spec.source,
            str(dtype).removeprefix("torch."),
        )
    compiler = GrammarCompiler(_grammar_vocabulary(spec, source, tokenizer), runner.vocab_size)
    return LoadedModel(runner, vocabulary_hash(vocabulary), compiler)


def _device(name: str) -> str:
    import torch

    available = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if available else "cpu"
    if name.startswith("cuda") and not available:
        raise ModelError(f"device: {name} was asked for but no CUDA device is visible; use cpu or auto")
    return name


def _vocabulary(spec: ModelSpec, source: str) -> tuple[Any, dict[str, int]]:
    """The tokenizer, and token -> id."""
    from transformers import AutoTokenizer

    folder = spec.tokenizer or source
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=spec.trust_remote_code)
        vocabulary = tokenizer.get_vocab()
    except Exception as error:
        raise ModelError(
            f"{folder}: its tokenizer cannot be read ({type(error).__name__}: {error}); "
            "give a model with its tokenizer files"
        ) from error
    if not vocabulary:
        raise ModelError(f"{folder}: its tokenizer has no tokens")
    return tokenizer, dict(vocabulary)


def _grammar_vocabulary(
    spec: ModelSpec, source: str, tokenizer: Any
) -> Callable[[], grammar_vocabulary.GrammarVocabulary]:
    def load() -> grammar_vocabulary.GrammarVocabulary:
        ends = end_token_ids(spec.tokenizer or source, tokenizer, trust_remote_code=spec.trust_remote_code)
        return grammar_vocabulary.from_transformers(tokenizer, ends)

    return load
