"""Models from a folder: what their ids mean, how much cache they get, and pairs of unequal padding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.actors import model_spec
from paceline.actors.engine.errors import ModelError
from paceline.actors.model_spec import ModelSpec

NUM_TOKENS = 60


def save_model(folder: Path, *, num_rows: int, seed: int, tokens: str = "t") -> str:
    """A tiny Llama with a tokenizer of 60 tokens and an output layer of ``num_rows``."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=num_rows,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {f"{tokens}{token_id}": token_id for token_id in range(NUM_TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=f"{tokens}0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return str(folder)


def spec_of(folder: str, **changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "num_blocks": 32}
    return ModelSpec(folder, **(fields | changes))


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(64, 128), (128, 60)])
async def test_unequal_padding_of_one_map(
    pool: Any, tmp_path: Path, target_rows: int, draft_rows: int
) -> None:
    target_folder = save_model(tmp_path / "target", num_rows=target_rows, seed=1)
    draft_folder = save_model(tmp_path / "draft", num_rows=draft_rows, seed=2)
    target = await pool.target(model=spec_of(target_folder))
    client = await pool.client(target)
    prompts = [[1, 2, 3], [5, 4]]
    plain = await pool.generate_all([client], prompts, 100)
    await pool.draft(model=spec_of(draft_folder))
    assert await pool.generate_all([client], prompts, 100) == plain
    assert sum(item.speculation.draft_tokens for item in pool.gateway.finished.values()) > 0
    assert max(max(token_ids) for token_ids in plain) < NUM_TOKENS


async def test_another_map_of_the_same_size_is_refused(pool: Any, tmp_path: Path) -> None:
    await pool.target(model=spec_of(save_model(tmp_path / "target", num_rows=64, seed=1)))
    other = save_model(tmp_path / "other", num_rows=64, seed=1, tokens="u")
    draft = await pool.draft(attach=False, model=spec_of(other))
    await pool.until(lambda: draft.refused)


def test_the_cache_is_sized_by_memory(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", num_rows=64, seed=1)
    # 2 layers x (K and V) x 2 heads x 8 floats x 4 bytes = 256 bytes a token.
    spec = spec_of(folder, num_blocks=None, kv_cache_bytes=100 * 16 * 256)
    assert model_spec.load(spec, max_num_batched_tokens=64).runner.num_blocks == 100
    with pytest.raises(ModelError, match="kv_cache"):
        model_spec.load(spec_of(folder, num_blocks=None, kv_cache_bytes=1000), max_num_batched_tokens=64)


def test_a_model_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", num_rows=64, seed=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        model_spec.load(spec_of(folder), max_num_batched_tokens=64)
