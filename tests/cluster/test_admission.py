from __future__ import annotations

import asyncio

import pytest

from paceline.cluster.admission import Admission
from paceline.cluster.errors import OverloadedError


async def hold(admission: Admission, leave: asyncio.Event) -> None:
    async with admission.admitted():
        await leave.wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_more_than_fits_is_refused_and_a_place_is_free_again_afterwards() -> None:
    admission = Admission(2, 1)
    leave = asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, leave)) for _ in range(3)]
    await settle()
    assert (admission.num_ongoing, admission.num_queued) == (2, 1)
    with pytest.raises(OverloadedError, match="2 requests run and 1 wait"):
        async with admission.admitted():
            pass
    leave.set()
    await asyncio.gather(*tasks)
    async with admission.admitted():
        assert (admission.num_ongoing, admission.num_queued) == (1, 0)
    assert (admission.num_ongoing, admission.num_queued) == (0, 0)


async def test_without_a_queue_the_first_too_many_is_refused() -> None:
    admission = Admission(1, 0)
    async with admission.admitted():
        with pytest.raises(OverloadedError):
            async with admission.admitted():
                pass


async def test_one_that_leaves_the_queue_or_fails_gives_its_place_back() -> None:
    admission = Admission(1, 1)
    leave = asyncio.Event()
    running, queued = (asyncio.create_task(hold(admission, leave)) for _ in range(2))
    await settle()
    queued.cancel()
    await settle()
    assert (admission.num_ongoing, admission.num_queued) == (1, 0)
    running.cancel()
    await settle()
    assert (admission.num_ongoing, admission.num_queued) == (0, 0)
    with pytest.raises(ZeroDivisionError):
        async with admission.admitted():
            _ = 1 / 0
    assert admission.num_ongoing == 0


async def test_an_unlimited_queue_refuses_nobody() -> None:
    admission = Admission(1, -1)
    leave = asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, leave)) for _ in range(50)]
    await settle()
    assert admission.num_queued == 49
    leave.set()
    await asyncio.gather(*tasks)
