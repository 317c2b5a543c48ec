"""What a target says of itself to those who dial it."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.actors.machine import NO_CORES, Cores


@dataclass(frozen=True)
class TargetIdentity:
    """Fixed for the life of a target."""

    target_id: str
    model: str
    vocabulary_hash: bytes
    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int
    """Longest prompt + completion that the KV pool can hold for one sequence alone, in tokens."""
    cores: Cores = NO_CORES
