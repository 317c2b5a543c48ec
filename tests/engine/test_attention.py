from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.actors.engine.attention import AttentionCall, PagedBatch, ShapeProbe, paged_attention
from paceline.actors.engine.attention_plan import MAX_GROUP_QUERIES, PaddedGroup, StepLayout, group_sequences
from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.errors import ModelError
from paceline.actors.engine.kv_cache import LayerShape, PagedKVCache

CPU = torch.device("cpu")
HEAD_DIM = 8


def _slices(
    lengths: list[tuple[int, int]], block_size: int, *, seed: int, consecutive: bool = False
) -> tuple[list[SequenceSlice], int]:
    """(start, count) pairs laid in blocks that are scattered at random; returns the slices and num_blocks."""
    needed = [-(-(start + count) // block_size) for start, count in lengths]
    num_blocks = sum(needed) + 3
    ids = np.arange(num_blocks)
    if not consecutive:
        ids = np.random.default_rng(seed).permutation(ids)
    batch, used = [], 0
    for (start, count), blocks in zip(lengths, needed, strict=True):
        batch.append(SequenceSlice([0] * count, start, ids[used : used + blocks].tolist(), 0))
        used += blocks
    return batch, num_blocks


def _compare(
    lengths: list[tuple[int, int]],
    *,
    window: int | None = None,
    heads: tuple[int, int] = (4, 2),
    block_size: int = 4,
    seed: int = 0,
    consecutive: bool = False,
    poison: bool = True,
) -> None:
    """The fast backend equals the reference on the same cache and tokens; rows of others are never read."""
    num_heads, num_kv_heads = heads
    batch, num_blocks = _slices(lengths, block_size, seed=seed, consecutive=consecutive)
    layout = StepLayout(batch, block_size, CPU)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    caches = [
        PagedKVCache(
            {0: LayerShape(num_kv_heads, HEAD_DIM, HEAD_DIM)},
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=torch.float32,
            device=CPU,
        )
        for _ in range(2)
    ]
    keys, values = random(*caches[0].keys[0].shape), random(*caches[0].values[0].shape)
    if poison:
        own = np.zeros(len(keys), bool)
        for index, piece in enumerate(batch):
            positions = np.arange(piece.start + len(piece.token_ids))
            own[layout.slots_of(np.array(index), positions)] = True
        keys[torch.from_numpy(~own)] = float("nan")
        values[torch.from_numpy(~own)] = float("nan")
    for cache in caches:
        cache.keys[0].copy_(keys)
        cache.values[0].copy_(values)
    call = AttentionCall(
        layer=0,
        query=random(1, layout.num_tokens, num_heads, HEAD_DIM).transpose(1, 2),
        key=random(1, layout.num_tokens, num_kv_heads, HEAD_DIM).transpose(1, 2),
        value=random(1, layout.num_tokens, num_kv_heads, HEAD_DIM).transpose(1, 2),
        scaling=0.4,
        sliding_window=window,
        softcap=None,
    )
    fast = PagedBatch(caches[0], layout).attend(call)
    slow = PagedBatch(caches[1], layout, reference=True).attend(call)
    assert fast.shape == (1, layout.num_tokens, num_heads, HEAD_DIM)
    assert torch.isfinite(slow).all()
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(caches[0].keys[0], caches[1].keys[0], equal_nan=True)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 3, 16])
@pytest.mark.parametrize(
    "lengths",
    [
        [(0, 1)],
        [(37, 1)],
        [(37, 5)],
        [(0, 33)],
        [(20, 33)],
        [(9, 1), (9, 1), (9, 1)],
        [(9, 1), (30, 1), (0, 1)],
        [(9, 3), (30, 3), (2, 3)],
        [(9, 1), (30, 5), (2, 16), (0, 2)],
        [(9, 1), (0, 40), (30, 5), (17, 18), (3, 2)],
    ],
)
def test_fast_equals_reference(
    lengths: list[tuple[int, int]], window: int | None, heads: tuple[int, int]
) -> None:
    _compare(lengths, window=window, heads=heads)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 24)), min_size=1, max_size=9),
    window=st.sampled_from([None, 1, 5, 16, 64]),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    block_size=st.sampled_from([1, 3, 16]),
    consecutive=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_fast_equals_reference_for_any_batch(
    lengths: list[tuple[int, int]],
    window: int | None,
    heads: tuple[int, int],
    block_size: int,
    consecutive: bool,
    seed: int,
) -> None:
    _compare(lengths, window=window, heads=heads, block_size=block_size, seed=seed, consecutive=consecutive)


@pytest.mark.parametrize("lengths", [[(0, 700)], [(300, 700)], [(0, 700), (3, 1), (800, 2)]])
@pytest.mark.parametrize("window", [None, 16])
def test_rows_whose_first_kernel_tiles_are_all_masked_are_finite(
    lengths: list[tuple[int, int]], window: int | None
) -> None:
    _compare(lengths, window=window, block_size=16)


def test_soft_cap_is_applied() -> None:
    batch, num_blocks = _slices([(0, 6)], 4, seed=0)
    layout = StepLayout(batch, 4, CPU)
    shape = {0: LayerShape(1, HEAD_DIM, HEAD_DIM)}
    cache = PagedKVCache(shape, num_blocks=num_blocks, block_size=4, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(1)
    query, key, value = (3 * torch.randn(1, 1, 6, HEAD_DIM, generator=generator) for _ in range(3))
    found = PagedBatch(cache, layout).attend(AttentionCall(0, query, key, value, 1.0, None, 2.0))
    scores = 2.0 * torch.tanh(query[0, 0] @ key[0, 0].T / 2.0)
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(found[0, :, 0], scores.softmax(-1) @ value[0, 0])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 80), st.integers(0, 3000)), min_size=1, max_size=40))
def test_every_sequence_is_in_one_group_and_padding_is_bounded(pairs: list[tuple[int, int]]) -> None:
    num_queries = np.array([n for n, _ in pairs])
    lengths = num_queries + np.array([start for _, start in pairs])
    groups = group_sequences(num_queries, lengths)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(pairs)))
    for members in groups:
        if len(members) > 1:
            assert num_queries[members].max() <= MAX_GROUP_QUERIES
            padded = len(members) * num_queries[members].max() * lengths[members].max()
            needed = (num_queries * lengths)[members].sum()
            assert padded <= max(2 * needed, needed + (1 << 14))


def test_equal_decode_rows_need_no_mask_and_no_row_index() -> None:
    batch, _ = _slices([(40, 1), (40, 1)], 4, seed=3)
    (group,) = StepLayout(batch, 4, CPU).plan(None)
    assert isinstance(group, PaddedGroup)
    assert group.mask(2, torch.float32) is None
    assert group.query_index is None
    assert group.row_index is None
    assert group.valid_rows is None


def test_plans_are_shared_by_layers_of_one_window() -> None:
    batch, _ = _slices([(40, 2), (10, 1)], 4, seed=3)
    layout = StepLayout(batch, 4, CPU)
    assert layout.plan(None) is layout.plan(None)
    assert layout.plan(1000) is layout.plan(None)
    assert layout.plan(8) is not layout.plan(None)


class _Layer(torch.nn.Module):
    layer_idx = 0


def _call(**arguments: object) -> None:
    rows = torch.zeros(1, 2, 1, 4)
    paged_attention(_Layer(), rows, rows, rows, arguments.pop("mask", None), **arguments)  # type: ignore[arg-type]


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ModelError, match="TransformersRunner"):
        _call()
    with pytest.raises(ModelError, match="own attention mask"):
        _call(paged_batch=ShapeProbe(), mask=torch.zeros(1))
    with pytest.raises(ModelError, match="s_aux"):
        _call(paged_batch=ShapeProbe(), s_aux=torch.zeros(1))
    probe = ShapeProbe()
    _call(paged_batch=probe, sliding_window=5)
    assert probe.shapes == {0: LayerShape(2, 4, 4)}
    assert probe.windows == {0: 5}
    with pytest.raises(ModelError, match="twice"):
        _call(paged_batch=probe)


def test_cache_that_does_not_fit_names_the_setting() -> None:
    with pytest.raises(ModelError, match="num_blocks"):
        PagedKVCache(
            {0: LayerShape(8, 128, 128)},
            num_blocks=1 << 40,
            block_size=16,
            dtype=torch.float32,
            device=CPU,
        )
