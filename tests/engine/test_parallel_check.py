"""Which models can be divided among how many ranks, from their configuration alone."""

from __future__ import annotations

import pytest
from transformers import GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen2MoeConfig

from paceline.actors.engine.errors import ModelError
from paceline.actors.engine.tensor_parallel import check_tensor_parallel, kv_ranks, possible_sizes


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sizes"),
    [
        (9, 3, [1, 3]),
        (14, 2, [1, 2]),
        (12, 2, [1, 2]),
        (32, 8, [1, 2, 4, 8]),
        (4, 1, [1]),
        (6, None, [1, 2, 3, 6]),
    ],
)
def test_sizes_divide_both_kinds_of_heads(heads: int, kv_heads: int | None, sizes: list[int]) -> None:
    config = LlamaConfig(hidden_size=64 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)
    assert possible_sizes(config) == sizes
    for size in range(1, 10):
        if size in sizes:
            check_tensor_parallel(config, size, "m")
            assert kv_ranks(config, size) == size
        else:
            with pytest.raises(ModelError, match=f"do not divide among {size} ranks"):
                check_tensor_parallel(config, size, "m")


def test_the_error_says_which_sizes_work() -> None:
    with pytest.raises(ModelError) as caught:
        check_tensor_parallel(Qwen2Config(num_attention_heads=28, num_key_value_heads=4), 3, "big")
    assert str(caught.value) == (
        "big: its 28 attention heads and 4 KV heads do not divide among 3 ranks: set tensor_parallel_size to "
        "one of 1, 2, 4"
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(), "models of type gpt2 have no tensor-parallel plan"),
        (Qwen2MoeConfig(), "sharded by .*, which is not supported"),
    ],
)
def test_what_cannot_be_divided_is_told(config: PretrainedConfig, reason: str) -> None:
    check_tensor_parallel(config, 1, "m")
    with pytest.raises(ModelError, match=f"{reason}.*: set tensor_parallel_size to 1"):
        check_tensor_parallel(config, 2, "m")
