"""A batch comes out of its message as it went in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.batch_codec import decode_batch, encode_batch, encode_stop, message_length

BLOCK_SIZE = 4


@st.composite
def slices(draw: st.DrawFn) -> SequenceSlice:
    token_ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20))
    start = draw(st.integers(0, 30))
    blocks = -(-(start + len(token_ids)) // BLOCK_SIZE) + draw(st.integers(0, 3))
    table = draw(st.lists(st.integers(0, 2**31 - 1), min_size=blocks, max_size=blocks))
    return SequenceSlice(token_ids, start, table, draw(st.integers(0, len(token_ids))))


@given(st.lists(slices(), min_size=1, max_size=8))
def test_round_trip(batch: list[SequenceSlice]) -> None:
    words = encode_batch(batch, BLOCK_SIZE)
    assert words.dtype == np.int32
    assert message_length(words[:4]) == len(words)
    decoded = decode_batch(words)
    assert decoded is not None
    assert len(decoded) == len(batch)
    for got, sent in zip(decoded, batch, strict=True):
        assert (got.token_ids, got.start, got.num_logits) == (sent.token_ids, sent.start, sent.num_logits)
        used = -(-(sent.start + len(sent.token_ids)) // BLOCK_SIZE)
        assert got.block_table == list(sent.block_table)[:used], "just the blocks that the step touches"


def test_the_end() -> None:
    assert decode_batch(encode_stop()) is None


def test_ranges_and_numpy_arrays_are_batches_too() -> None:
    piece = SequenceSlice(np.arange(5), 3, range(7, 12), 1)
    assert decode_batch(encode_batch([piece], BLOCK_SIZE)) == [SequenceSlice([0, 1, 2, 3, 4], 3, [7, 8], 1)]


@pytest.mark.parametrize("damage", [lambda w: w[:-1], lambda w: np.concatenate(([9], w[1:]))])
def test_what_is_no_message_is_refused(damage) -> None:  # type: ignore[no-untyped-def]
    words = encode_batch([SequenceSlice([1, 2], 0, [0], 1)], BLOCK_SIZE)
    with pytest.raises(ValueError, match="message of kind"):
        decode_batch(damage(words).astype(np.int32))
