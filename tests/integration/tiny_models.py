"""Folders with tiny random models, float32, and a tokenizer of 256 bytes."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

BYTE_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_tokenizer(*, reverse: bool = False) -> PreTrainedTokenizerFast:
    """One token for each byte, without special tokens. ``reverse`` gives the same tokens other ids."""
    order = BYTE_ALPHABET[::-1] if reverse else BYTE_ALPHABET
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(order)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def deepened(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """The same function at the price of ``num_layers`` more layers, which add nothing to what passes: a
    target that is slower than its draft, as targets are."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers += num_layers
    deep = type(model)(config).to(torch.float32).eval()
    deep.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for layer in deep.model.layers[model.config.num_hidden_layers :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return deep


def save(model: PreTrainedModel, folder: Path, *, reverse_vocabulary: bool = False) -> str:
    """Write a complete model folder; returns its path."""
    model.save_pretrained(folder)
    byte_tokenizer(reverse=reverse_vocabulary).save_pretrained(folder)
    return str(folder)


def padded(model: PreTrainedModel, num_rows: int) -> PreTrainedModel:
    """The same function with an output layer of ``num_rows`` rows, at most twice as many. The added ones have
    no token, but logits ten times those of others: whoever takes padding for tokens samples little else."""
    config = copy.deepcopy(model.config)
    old_rows, config.vocab_size = config.vocab_size, num_rows
    wide = type(model)(config).to(torch.float32).eval()
    state = dict(model.state_dict())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.cat([state[name], 10.0 * state[name][: num_rows - old_rows]])
    wide.load_state_dict(state)
    return wide
