"""Tiny random models that every engine test shares: seeded, float32, 256 tokens, four families."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB_SIZE = 256
MAX_MODEL_LEN = 512
SLIDING_WINDOW = 16
SEED = 20240607

# Weights wide enough that the law of the next token depends on the context and has a clear winner.
_SPREAD = 0.25

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": _SPREAD,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attention_dropout": 0.0,
    # Tied embeddings would make such a model repeat the token it was given.
    "tie_word_embeddings": False,
}


def tiny_llama(*, num_hidden_layers: int = 2, seed: int = SEED) -> PreTrainedModel:
    """Llama with grouped queries: 4 heads, 2 KV heads."""
    config = LlamaConfig(**_COMMON, num_hidden_layers=num_hidden_layers, num_key_value_heads=2)
    return _build(LlamaForCausalLM, config, seed)


def tiny_qwen2(*, num_hidden_layers: int = 2, seed: int = SEED) -> PreTrainedModel:
    """Qwen2 (biased projections) with one KV head for 4 query heads."""
    config = Qwen2Config(**_COMMON, num_hidden_layers=num_hidden_layers, num_key_value_heads=1)
    return _build(Qwen2ForCausalLM, config, seed)


def tiny_gemma3(*, num_hidden_layers: int = 4, seed: int = SEED) -> PreTrainedModel:
    """Gemma 3 text: three layers with a window of 16 tokens to one with full attention, capped logits."""
    config = Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=num_hidden_layers,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=SLIDING_WINDOW,
        sliding_window_pattern=4,
        final_logit_softcapping=30.0,
    )
    return _build(Gemma3ForCausalLM, config, seed)


def tiny_mistral(*, num_hidden_layers: int = 2, seed: int = SEED) -> PreTrainedModel:
    """Mistral: every layer sees a window of 16 tokens; as many KV heads as query heads."""
    config = MistralConfig(
        **_COMMON,
        num_hidden_layers=num_hidden_layers,
        num_key_value_heads=4,
        sliding_window=SLIDING_WINDOW,
    )
    return _build(MistralForCausalLM, config, seed)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "gemma3": tiny_gemma3,
    "mistral": tiny_mistral,
}


def noised(model: PreTrainedModel, scale: float, *, seed: int = SEED) -> PreTrainedModel:
    """A draft that agrees in part: a copy with normal noise of ``scale`` times each weight's own spread.

    At ``scale`` 0 it is an exact copy; at 0.05 it agrees in about half of the positions (Gemma 3: at 0.15).
    """
    generator = torch.Generator().manual_seed(seed)
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * (scale * parameter.std()))
    return draft


def unrelated(model: PreTrainedModel) -> PreTrainedModel:
    """A draft that nearly never agrees: the same shape, other weights."""
    config = copy.deepcopy(model.config)
    return _build(type(model), config, SEED + 1)


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Plain ``transformers`` logits of every position, float32 ``[len(token_ids), vocab]``, no cache.

    Uses a copy with the eager attention, so that ``model`` may have any attention function set.
    """
    output = eager_copy(model)(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
    logits: torch.Tensor = output.logits[0].float()
    return logits


@torch.inference_mode()
def reference_greedy(model: PreTrainedModel, token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The next ``num_tokens`` token ids by plain ``transformers`` greedy generation."""
    prompt = torch.tensor([list(token_ids)])
    output = eager_copy(model).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    generated: list[int] = output[0, len(token_ids) :].tolist()
    return generated


def eager_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of ``model`` that runs the ``transformers`` eager attention."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    return plain


def _build(kind: type[PreTrainedModel], config: object, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    return model.to(torch.float32).eval()
