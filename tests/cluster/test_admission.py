from __future__ import annotations

import asyncio

import pytest

from paceline.actors.engine.priority import AGING_SECONDS
from paceline.cluster.admission import Admission
from paceline.cluster.errors import OverloadedError, TimeExceededError
from paceline.cluster.time_limit import TimeLimit


async def hold(admission: Admission, leave: asyncio.Event, size: int = 1) -> None:
    async with admission.admitted(size):
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
    with pytest.raises(OverloadedError, match="2 sequences run and 1 wait"):
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


async def test_a_request_of_several_choices_takes_as_many_places_in_its_turn() -> None:
    admission = Admission(4, -1)
    leaves = [asyncio.Event() for _ in range(4)]
    sizes = (3, 2, 1, 9)  # the last one takes all there are
    tasks = [
        asyncio.create_task(hold(admission, leave, size)) for leave, size in zip(leaves, sizes, strict=True)
    ]
    await settle()
    # One place is free, and the third would fit; but the second came before it.
    assert (admission.num_ongoing, admission.num_queued) == (3, 2 + 1 + 4)
    leaves[0].set()
    await settle()
    assert (admission.num_ongoing, admission.num_queued) == (3, 4)
    for leave in leaves:
        leave.set()
    await asyncio.gather(*tasks)
    assert (admission.num_ongoing, admission.num_queued) == (0, 0)


async def test_the_queue_is_bounded_in_choices_but_an_empty_one_takes_any_request() -> None:
    admission = Admission(4, 5)
    leave = asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, leave, 4)) for _ in range(2)]
    await settle()
    assert admission.num_queued == 4
    with pytest.raises(OverloadedError, match="4 sequences run and 4 wait"):
        await hold(admission, leave, 2)
    tasks.append(asyncio.create_task(hold(admission, leave, 1)))
    await settle()
    assert admission.num_queued == 5
    tasks[1].cancel()
    await settle()
    # The one that waited behind it has its turn as soon as there is room.
    assert (admission.num_ongoing, admission.num_queued) == (4, 1)
    leave.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (admission.num_ongoing, admission.num_queued) == (0, 0)
    small = Admission(4, 1)
    leave.clear()
    tasks = [asyncio.create_task(hold(small, leave, 4)) for _ in range(2)]
    await settle()
    assert small.num_queued == 4
    leave.set()
    await asyncio.gather(*tasks)


async def test_one_cancelled_in_the_moment_of_its_turn_gives_its_places_back() -> None:
    admission = Admission(2, -1)
    leave = asyncio.Event()
    running, queued = (asyncio.create_task(hold(admission, leave, 2)) for _ in range(2))
    await settle()
    leave.set()
    while admission.num_queued:  # noqa: ASYNC110
        await asyncio.sleep(0)
    queued.cancel()
    await asyncio.gather(running, queued, return_exceptions=True)
    assert (admission.num_ongoing, admission.num_queued) == (0, 0)


async def test_a_queue_moves_on_when_its_head_leaves_in_the_moment_that_a_place_gets_free() -> None:
    admission = Admission(1, 4)
    leave = asyncio.Event()
    running, head, behind = (asyncio.create_task(hold(admission, leave)) for _ in range(3))
    await settle()
    running.cancel()
    head.cancel()
    ends = await asyncio.gather(running, head, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError] * 2
    await settle()
    assert (admission.num_ongoing, admission.num_queued) == (1, 0)
    leave.set()
    await asyncio.wait_for(behind, 1.0)
    await asyncio.wait_for(admission.close(), 1.0)


async def test_lower_priorities_first_and_equals_as_they_came() -> None:
    admission = Admission(1, -1)
    order: list[str] = []

    async def visit(name: str, priority: int) -> None:
        async with admission.admitted(priority=priority):
            order.append(name)

    async with admission.admitted():
        visits = [("a", 0), ("b", 1), ("c", 0), ("d", -1), ("e", -1), ("f", 1)]
        tasks = [asyncio.create_task(visit(*who)) for who in visits]
        await settle()
        assert admission.num_queued == len(visits)
    await asyncio.gather(*tasks)
    assert order == ["d", "e", "a", "c", "b", "f"]


async def test_who_has_waited_long_enough_is_let_in_before_the_more_important(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admission = Admission(1, -1)
    loop = asyncio.get_running_loop()
    began = loop.time()
    order: list[str] = []

    async def visit(name: str, priority: int) -> None:
        async with admission.admitted(priority=priority):
            order.append(name)

    async with admission.admitted():
        for name, priority, seconds in [
            ("patient", 2, 0.0),
            ("within", 0, 2 * AGING_SECONDS - 1),
            ("after", 0, 2 * AGING_SECONDS + 1),
        ]:
            with monkeypatch.context() as patch:
                patch.setattr(loop, "time", lambda seconds=seconds: began + seconds)
                waiting = asyncio.create_task(visit(name, priority))
                await settle()
            assert not waiting.done()
    async with admission.admitted(priority=100):
        pass
    assert order == ["within", "patient", "after"]


async def test_a_limit_bounds_the_waiting_and_gives_the_place_back() -> None:
    admission = Admission(1, 1)
    loop = asyncio.get_running_loop()
    async with admission.admitted():
        with pytest.raises(TimeExceededError, match=r"timeout_s = 0\.05"):
            async with admission.admitted(limit=TimeLimit(0.05, loop.time(), own=True)):
                pass
        assert (admission.num_ongoing, admission.num_queued) == (1, 0)
        with pytest.raises(TimeExceededError, match=r"service's limit of 3 s"):
            async with admission.admitted(limit=TimeLimit(3.0, loop.time() - 4.0)):
                pass
        assert (admission.num_ongoing, admission.num_queued) == (1, 0)
    assert admission.num_ongoing == 0
