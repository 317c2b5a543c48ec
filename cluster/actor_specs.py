"""What the configuration means for one actor: pure translation, no effects."""

from __future__ import annotations

from paceline.actors.draft import DraftSpec
from paceline.actors.engine.config import (
    DraftEngineConfig,
    Hardware,
    LogprobsMode,
    NgramConfig,
    TargetEngineConfig,
)
from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.model_spec import ModelSpec
from paceline.actors.target import TargetSpec
from paceline.cluster.channel_settings import channel_settings
from paceline.cluster.config import ModelPool, PacelineConfig
from paceline.cluster.replica_options import num_threads, rank_device

BYTES_PER_GB = 10**9


def target_spec(config: PacelineConfig, target_id: str) -> TargetSpec:
    """One target replica."""
    pool, speculation = config.target, config.speculation
    engine = TargetEngineConfig(
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        max_num_waiting=pool.max_num_waiting,
        max_model_len=pool.max_model_len,
        enable_prefix_caching=pool.enable_prefix_caching,
        num_speculative_tokens=speculation.num_speculative_tokens,
        max_num_speculative_tokens=speculation.max_num_speculative_tokens,
        ngram=NgramConfig(**speculation.ngram.model_dump()),
        hardware=Hardware(speculation.hardware),
        wait_for_drafts=speculation.wait_for_drafts,
        logprobs_mode=LogprobsMode(pool.logprobs_mode),
    )
    return TargetSpec(
        target_id=target_id,
        model=model_spec(
            pool,
            config.model,
            config.dtype,
            pool.quantization,
            trust_remote_code=config.trust_remote_code,
            allow_pickled_weights=config.security.allow_pickled_weights,
            deterministic=config.deterministic,
        ),
        served_model_name=config.model_name,
        engine=engine,
        channels=channel_settings(config),
    )


def draft_spec(config: PacelineConfig, draft_id: str) -> DraftSpec:
    """One draft replica.

    Raises:
        InvalidArgumentError: the configuration has no draft pool.
    """
    pool = config.draft
    if pool is None:
        raise InvalidArgumentError("draft", "the configuration has no draft pool")
    return DraftSpec(
        draft_id=draft_id,
        model=model_spec(
            pool,
            pool.model,
            config.draft_dtype,
            pool.quantization,
            trust_remote_code=config.trust_remote_code,
            allow_pickled_weights=config.security.allow_pickled_weights,
            # Drafts of compiled steps are right without it: it is the targets' answer that is to be the same.
            deterministic=config.deterministic if pool.enforce_eager else None,
            enforce_eager=pool.enforce_eager,
        ),
        engine=DraftEngineConfig(
            max_num_seqs=pool.max_num_seqs,
            max_num_batched_tokens=pool.max_num_batched_tokens,
            max_model_len=pool.max_model_len,
            enable_prefix_caching=pool.enable_prefix_caching,
            max_branches=pool.max_branches,
        ),
        channels=channel_settings(config),
    )


def model_spec(
    pool: ModelPool,
    source: str,
    dtype: str,
    quantization: str,
    *,
    trust_remote_code: bool,
    allow_pickled_weights: bool,
    deterministic: bool | None,
    enforce_eager: bool = True,
) -> ModelSpec:
    """A pool's model. ``auto`` stands for bfloat16, as the configuration promises."""
    return ModelSpec(
        source=source,
        dtype="bfloat16" if dtype == "auto" else dtype,
        quantization=quantization,
        device=rank_device(pool),
        num_threads=num_threads(pool),
        block_size=pool.block_size,
        num_blocks=pool.kv_cache.num_blocks,
        kv_cache_bytes=round(pool.kv_cache.memory_gb * BYTES_PER_GB),
        kv_memory_fraction=pool.kv_cache.memory_fraction,
        max_model_len=pool.max_model_len,
        trust_remote_code=trust_remote_code,
        allow_pickled_weights=allow_pickled_weights,
        deterministic=deterministic,
        enforce_eager=enforce_eager,
    )
