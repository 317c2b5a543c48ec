"""Folders with tiny random models, float32, and a tokenizer of 256 bytes."""

from __future__ import annotations

from pathlib import Path

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


def save(model: PreTrainedModel, folder: Path, *, reverse_vocabulary: bool = False) -> str:
    """Write a complete model folder; returns its path."""
    model.save_pretrained(folder)
    byte_tokenizer(reverse=reverse_vocabulary).save_pretrained(folder)
    return str(folder)
