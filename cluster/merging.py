"""Several asynchronous iterators read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


async def merged(sources: Sequence[AsyncIterator[Item]]) -> AsyncGenerator[tuple[int, Item], None]:
    """The sources' items as they come, each with its source's index; over when all of them are.

    Every source has at most one item that was not taken yet, so that a slow reader makes nothing grow. Of
    items that are there at the same time, that of the lowest index comes first. When one source fails, or
    the reader leaves, no source is being read any more; closing them is their owner's business.
    """
    reading = {asyncio.create_task(_next(source)): index for index, source in enumerate(sources)}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=reading.__getitem__):
                index = reading.pop(task)
                for item in task.result():
                    yield index, item
                    reading[asyncio.create_task(_next(sources[index]))] = index
    finally:
        for task in reading:
            task.cancel()
        # Also so that nobody is told of exceptions that were never looked at.
        await asyncio.gather(*reading, return_exceptions=True)


async def _next(source: AsyncIterator[Item]) -> tuple[Item, ...]:
    """The next item, or nothing at the end."""
    try:
        return (await anext(source),)
    except StopAsyncIteration:
        return ()
