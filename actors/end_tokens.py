"""Which tokens end a text, as a model's files say."""

from __future__ import annotations

from typing import Any


def end_token_ids(source: str, tokenizer: Any, *, trust_remote_code: bool = False) -> tuple[int, ...]:
    """The tokenizer's end-of-sequence token, and those of the generation config, else of the model config.

    Args:
        source: a local folder or hub id.
        tokenizer: the ``transformers`` tokenizer read from it.

    Returns:
        Ascending; empty for a model that has none.
    """
    found = set(_of_configs(source, trust_remote_code))
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    return tuple(sorted(found))


def _of_configs(source: str, trust_remote_code: bool) -> list[int]:
    from transformers import AutoConfig, GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(source).eos_token_id
    except OSError:
        found = None
    if found is None:
        try:
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        except (OSError, ValueError):
            return []
        found = getattr(config, "eos_token_id", None)
    if found is None:
        return []
    return [int(found)] if isinstance(found, int) else [int(i) for i in found]
