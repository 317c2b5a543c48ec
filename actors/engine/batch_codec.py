"""A ragged batch as one array of 32-bit integers: what the leader of a shard group sends to the other ranks.

Layout: ``[kind, length, B, 0]``, then per slice ``[num_tokens, start, num_blocks, num_logits]``, then the
token ids of all slices, then their blocks. Only the blocks that the step reads or writes are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import chain

import numpy as np
import numpy.typing as npt

from paceline.actors.engine.batch import SequenceSlice

Words = npt.NDArray[np.int32]

HEADER_WORDS = 4
SLICE_WORDS = 4


class MessageKind(IntEnum):
    """What a message asks of the ranks that receive it."""

    STEP = 1
    """Compute the batch."""
    STOP = 2
    """There will be no further step."""


def encode_stop() -> Words:
    """The message that ends a group."""
    return np.array([MessageKind.STOP, HEADER_WORDS, 0, 0], np.int32)


def encode_batch(batch: Sequence[SequenceSlice], block_size: int) -> Words:
    """The message of a step.

    Args:
        batch: checked; each slice has blocks for all its tokens.
    """
    num_blocks = [-(-(piece.start + len(piece.token_ids)) // block_size) for piece in batch]
    num_tokens = sum(len(piece.token_ids) for piece in batch)
    length = HEADER_WORDS + SLICE_WORDS * len(batch) + num_tokens + sum(num_blocks)
    numbers = chain(
        (MessageKind.STEP, length, len(batch), 0),
        chain.from_iterable(
            (len(piece.token_ids), piece.start, blocks, piece.num_logits)
            for piece, blocks in zip(batch, num_blocks, strict=True)
        ),
        chain.from_iterable(piece.token_ids for piece in batch),
        chain.from_iterable(
            piece.block_table[:blocks] for piece, blocks in zip(batch, num_blocks, strict=True)
        ),
    )
    return np.fromiter(numbers, np.int32, length)


def message_length(first_words: Words) -> int:
    """Words of the whole message whose beginning this is."""
    return int(first_words[1])


def decode_batch(words: Words) -> list[SequenceSlice] | None:
    """The batch of a message; None where there will be no further step.

    Raises:
        ValueError: the array is no message.
    """
    kind, length, count = (int(word) for word in words[:3])
    if kind == MessageKind.STOP:
        return None
    if kind != MessageKind.STEP or length != len(words):
        raise ValueError(f"message of kind {kind} and length {length}, in an array of {len(words)} words")
    first_token = HEADER_WORDS + SLICE_WORDS * count
    pieces = words[HEADER_WORDS:first_token].reshape(count, SLICE_WORDS).tolist()
    first_block = first_token + sum(piece[0] for piece in pieces)
    token_ids, blocks = words[first_token:first_block].tolist(), words[first_block:].tolist()
    batch = []
    token = block = 0
    for num_tokens, start, num_blocks, num_logits in pieces:
        batch.append(
            SequenceSlice(
                token_ids[token : token + num_tokens], start, blocks[block : block + num_blocks], num_logits
            )
        )
        token, block = token + num_tokens, block + num_blocks
    return batch
