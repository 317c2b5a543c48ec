from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest

from paceline.cluster.merging import merged
from tests.cluster.scripted import settle


class Source:
    """Gives what the test puts in; None ends it, an exception is raised."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[int]:
        return self

    async def __anext__(self) -> int:
        try:
            item = await self.items.get()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if isinstance(item, Exception):
            raise item
        if item is None:
            raise StopAsyncIteration
        return item


async def test_items_come_as_they_are_made() -> None:
    sources = [Source() for _ in range(3)]
    async with aclosing(merged(sources)) as items:
        sources[2].items.put_nowait(20)
        assert await anext(items) == (2, 20)
        sources[0].items.put_nowait(1)
        assert await anext(items) == (0, 1)
        for source in sources:
            source.items.put_nowait(7)
            source.items.put_nowait(None)
        assert [item async for item in items] == [(0, 7), (1, 7), (2, 7)]


async def test_a_slow_reader_makes_nothing_grow() -> None:
    sources = [Source() for _ in range(2)]
    for source in sources:
        for item in range(50):
            source.items.put_nowait(item)
    async with aclosing(merged(sources)) as items:
        await anext(items)
        await settle()
        assert all(source.items.qsize() >= 49 for source in sources)


@pytest.mark.parametrize("how", ["fails", "is left", "is cancelled"])
async def test_no_source_is_read_any_more_when_one_fails_or_the_reader_leaves(how: str) -> None:
    sources = [Source() for _ in range(3)]
    sources[1].items.put_nowait(5)
    items: AsyncGenerator[tuple[int, int], None] = merged(sources)

    async def read() -> None:
        async with aclosing(items):
            assert await anext(items) == (1, 5)
            if how == "fails":
                sources[1].items.put_nowait(ValueError("gone"))
            if how != "is left":
                await anext(items)

    task = asyncio.create_task(read())
    await settle()
    if how == "is cancelled":
        task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    expected = {"fails": ValueError, "is left": type(None), "is cancelled": asyncio.CancelledError}[how]
    assert isinstance(outcome, expected)
    assert (sources[0].cancelled, sources[2].cancelled) == (True, True)
    assert len(asyncio.all_tasks()) == 1


async def test_of_no_sources_there_is_nothing() -> None:
    assert [item async for item in merged([])] == []
