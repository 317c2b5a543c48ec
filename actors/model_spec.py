"""Which model an actor runs, and how it is brought up."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from paceline.actors import grammar_vocabulary, threads, weights
from paceline.actors.end_tokens import end_token_ids
from paceline.actors.engine.batch import ModelRunner
from paceline.actors.engine.errors import ModelError
from paceline.actors.grammar import GrammarCompiler
from paceline.actors.machine import Cores, cores_of_this_process
from paceline.actors.vocabulary import emulated_vocabulary_hash, vocabulary_hash

if TYPE_CHECKING:
    import torch

    from paceline.actors.engine.model_runner import TransformersRunner
    from paceline.actors.engine.shard_group import ShardGroup, ShardMember, Store

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
    """Of each rank, where the model is divided among several."""
    kv_memory_fraction: float | None = None
    """Share of the memory that is free once the weights are loaded, instead of ``kv_cache_bytes``."""
    max_model_len: int | None = None
    """Longest sequence in tokens; None = the model's own."""
    trust_remote_code: bool = False
    allow_pickled_weights: bool = False
    """Whether weights may come from pickle files where there are no safetensors."""
    deterministic: bool | None = None
    """Batch-invariant numerics: logits do not depend on what else is in the step, to the bit. None = on a CPU
    only, where it costs little, and not where steps are compiled."""
    enforce_eager: bool = True
    """False: steps of few tokens are compiled. They round otherwise, so that this is for drafts."""

    def __post_init__(self) -> None:
        if not self.source:
            raise ModelError("model: must not be empty")
        for name in ("num_threads", "block_size", "num_blocks", "kv_cache_bytes", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ModelError(f"{name}: must be at least 1, got {value}")
        fraction = self.kv_memory_fraction
        if fraction is not None and not 0.0 < fraction < 1.0:
            raise ModelError(f"kv_memory_fraction: must be between 0 and 1, got {fraction}")
        if self.deterministic and not self.enforce_eager:
            raise ModelError("enforce_eager: compiled steps are not deterministic: set it to true")


class WarmableRunner(ModelRunner, Protocol):
    """What both kinds of runner offer."""

    def warm_up(self, max_tokens: int) -> float:
        """Run the largest step once; returns its seconds."""


@dataclass(frozen=True)
class Allotment:
    """What a model's KV cache was given."""

    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    """Of each rank."""
    num_ranks: int = 1
    device: str = ""


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to step."""

    runner: WarmableRunner
    vocabulary_hash: bytes
    constraints: GrammarCompiler
    """Reads the vocabulary when the first constraint comes."""
    allotment: Allotment | None = None
    """None: an emulated model, which stores nothing."""
    group: ShardGroup | None = None
    """The ranks among which the model is divided, of which this one is the leader; None: it is not."""


class Loader(Protocol):
    """How a model is brought up: ``load``, or something around it."""

    def __call__(self, spec: ModelSpec, *, max_num_batched_tokens: int) -> LoadedModel: ...


def prepare_thread(spec: ModelSpec) -> None:
    """Set the calling thread up for this model's compute. For the engine's own thread."""
    threads.apply(_num_threads(spec))


def cores_of(spec: ModelSpec, allotment: Allotment | None) -> Cores:
    """What a model that was loaded in this process computes with."""
    on_cores = allotment is not None and allotment.device.startswith("cpu")
    return cores_of_this_process(_num_threads(spec) if on_cores else 0)


def _num_threads(spec: ModelSpec) -> int:
    return spec.num_threads or os.cpu_count() or 1


def load(
    spec: ModelSpec,
    *,
    max_num_batched_tokens: int,
    member: ShardMember | None = None,
    store: Store | None = None,
) -> LoadedModel:
    """Bring the model up: weights, tokenizer, KV cache and a warm-up step. Blocking, up to minutes.

    Args:
        member: the leader's place in the group among which the model is divided; the other ranks call
            ``load_shard``. None: this process has it all.
        store: the leader's, see ``shard_group.open_store``.

    Raises:
        ModelError: the model cannot be found, read or served; the text names the remedy.
        ShardGroupError: another rank is lost.
    """
    prepare_thread(spec)
    source = weights.resolve(spec.source)
    if source.startswith(EMULATED_SCHEME):
        if member is not None:
            raise ModelError(
                f"{spec.source}: an emulated model is not divided: set tensor_parallel_size to 1"
            )
        loaded = _load_emulated(spec, source)
    else:
        loaded = _load_transformers(spec, source, member, store)
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


def load_shard(spec: ModelSpec, member: ShardMember) -> tuple[TransformersRunner, ShardGroup]:
    """The same for a rank that is not the leader: its share of the weights and of the KV cache. Blocking.

    Raises:
        ModelError: the model cannot be found, read or served; the text names the remedy.
        ShardGroupError: another rank is lost.
    """
    prepare_thread(spec)
    runner, group, _ = _load_runner(spec, weights.resolve(spec.source), None, member, None)
    assert group is not None
    return runner, group


def _load_transformers(
    spec: ModelSpec, source: str, member: ShardMember | None, store: Store | None
) -> LoadedModel:
    tokenizer, vocabulary = _vocabulary(spec, source)
    runner, group, allotment = _load_runner(spec, source, max(vocabulary.values()) + 1, member, store)
    logger.info(
        "model %s: KV cache of %d tokens (%d blocks of %d) in %.2f GB on %s%s",
        spec.source,
        allotment.num_blocks * allotment.block_size,
        allotment.num_blocks,
        allotment.block_size,
        allotment.kv_cache_bytes / 1e9,
        allotment.device,
        f" of each of {allotment.num_ranks} ranks" if group is not None else "",
    )
    if runner.deterministic and runner.num_blocks > 1 and not runner.is_batch_invariant():
        logger.warning(
            "model %s: its logits depend on what else is in a step, although deterministic is set: this "
            "device's kernels, or weights outside of linear layers, do not allow for it. In %s the tokens "
            "of a request may differ from run to run where two are nearly as likely",
            spec.source,
            spec.dtype,
        )
    if not spec.enforce_eager:
        logger.info("model %s: compiling its steps of few tokens; this takes a minute or two", spec.source)
        runner.compile()
    compiler = GrammarCompiler(_grammar_vocabulary(spec, source, tokenizer), runner.vocab_size)
    return LoadedModel(runner, vocabulary_hash(vocabulary), compiler, allotment, group)


def _load_runner(
    spec: ModelSpec,
    source: str,
    num_ids: int | None,
    member: ShardMember | None,
    store: Store | None,
) -> tuple[TransformersRunner, ShardGroup | None, Allotment]:
    """Join the group, load this rank's weights, allot its KV cache. ``num_ids``: of the tokenizer."""
    import torch

    from paceline.actors.engine.loading import load_model, load_model_config, resolve_dtype
    from paceline.actors.engine.model_runner import TransformersRunner
    from paceline.actors.engine.quantized_linear import resolve_quantization
    from paceline.actors.engine.shard_group import ShardGroup
    from paceline.actors.engine.tensor_parallel import check_tensor_parallel

    device = torch.device(_device(spec.device))
    quantization = resolve_quantization(spec.quantization, device)
    dtype = resolve_dtype(spec.dtype, source, trust_remote_code=spec.trust_remote_code)
    config: Any = load_model_config(source, trust_remote_code=spec.trust_remote_code)
    deterministic = spec.deterministic
    if deterministic is None:
        deterministic = device.type == "cpu" and spec.enforce_eager
    if quantization != "none":
        logger.info("model %s: its large linear layers compute in %s", spec.source, quantization)
    group = None
    if member is not None:
        check_tensor_parallel(config, member.size, spec.source)
        group = ShardGroup.join(member, device, store, ordered=deterministic)
    model = load_model(
        source,
        dtype,
        device,
        trust_remote_code=spec.trust_remote_code,
        allow_pickled_weights=spec.allow_pickled_weights,
        quantization=quantization,
        deterministic=deterministic,
        group=group,
    )
    num_blocks = _num_blocks(spec, config, dtype, device, group)
    num_rows = int(config.get_text_config().vocab_size)
    if group is not None:
        # Ranks may differ by minutes in loading, but not within the first pass, which comes next.
        group.meet("loaded")
    runner = TransformersRunner(
        model,
        num_blocks=num_blocks,
        block_size=spec.block_size,
        max_model_len=spec.max_model_len,
        device=device,
        vocab_size=num_rows if num_ids is None else min(num_ids, num_rows),
        deterministic=deterministic,
        enforce_eager=spec.enforce_eager,
        announce=group.announcer(spec.block_size) if group is not None and group.is_leader else None,
    )
    allotment = Allotment(
        num_blocks,
        spec.block_size,
        runner.kv_cache_bytes,
        num_ranks=1 if group is None else group.size,
        device=str(device),
    )
    return runner, group, allotment


def _num_blocks(
    spec: ModelSpec, config: Any, dtype: torch.dtype, device: torch.device, group: ShardGroup | None
) -> int:
    """Blocks of the KV cache: the same number on all ranks, each of which stores its heads of every block.

    Raises: ModelError: the memory does not hold one.
    """
    from paceline.actors.engine.kv_cache import kv_block_bytes
    from paceline.actors.engine.memory import free_bytes
    from paceline.actors.engine.tensor_parallel import kv_ranks

    if spec.num_blocks is not None:
        return spec.num_blocks
    num_ranks = 1 if group is None else group.size
    available = spec.kv_cache_bytes
    if spec.kv_memory_fraction is not None:
        free = free_bytes(device)
        if free is None:
            raise ModelError(
                "kv_cache.memory_fraction: this system does not tell its free memory: set memory_gb"
            )
        # Ranks on CPUs share their node's memory.
        available = int(free * spec.kv_memory_fraction) // (num_ranks if device.type == "cpu" else 1)
    if group is not None:
        available = group.smallest("kv_cache_bytes", available)
    block_bytes = kv_block_bytes(config, dtype, spec.block_size) // kv_ranks(config, num_ranks)
    num_blocks = available // block_bytes
    if num_blocks < 1:
        raise ModelError(
            f"kv_cache: {available} bytes do not hold one block of {spec.block_size} tokens "
            f"({block_bytes} bytes); raise the memory or lower block_size"
        )
    return num_blocks


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
