"""The engine's thread: quick to hear, quiet when idle, loud when it fails."""

import asyncio
import statistics
import threading
import time
from collections.abc import Callable

import pytest

from paceline.actors.engine_loop import MAX_BACKLOG, EngineFailedError, EngineLoop


async def until(condition: Callable[[], object]) -> None:
    """Returns once the condition holds; the test's own time limit bounds the wait."""
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Counter:
    """An engine that counts down what it is given and says so."""

    def __init__(self) -> None:
        self.left = 0
        self.due: float | None = None
        self.output: list[int] = []
        self.num_passes = 0
        self.threads: set[str] = set()

    def add(self, amount: int) -> None:
        self.left += amount

    def wait_seconds(self) -> float | None:
        self.num_passes += 1
        if self.left:
            return 0.0
        return None if self.due is None else max(0.0, self.due - time.monotonic())

    def step(self) -> None:
        self.threads.add(threading.current_thread().name)
        if self.due is not None:
            self.due = None
            self.output.append(-1)
            return
        self.left -= 1
        self.output.append(self.left)

    def take(self) -> list[int] | None:
        output, self.output = self.output, []
        return output or None


def _loop(
    engine: Counter,
    published: list[int],
    on_failed: Callable[[EngineFailedError], None] | None = None,
) -> EngineLoop[Counter, list[int]]:
    return EngineLoop(
        engine,
        wait_seconds=engine.wait_seconds,
        step=lambda: engine.step(),
        take_output=engine.take,
        publish=published.extend,
        on_failed=on_failed,
        name="counter",
    )


async def _call_for_ever(loop: EngineLoop[Counter, list[int]]) -> None:
    while True:
        await loop.call(lambda counter: None)


async def test_steps_until_done_and_publishes_in_order() -> None:
    engine, published = Counter(), []
    loop = _loop(engine, published)
    loop.start()
    loop.post(lambda counter: counter.add(100))
    await until(lambda: len(published) == 100)
    assert published == list(range(99, -1, -1))
    assert engine.threads == {"counter"}
    await loop.stop()
    assert not any(thread.name == "counter" for thread in threading.enumerate())


async def test_an_idle_engine_is_not_polled() -> None:
    engine = Counter()
    loop = _loop(engine, [])
    loop.start()
    await loop.call(lambda counter: None)
    before = engine.num_passes
    await asyncio.sleep(0.2)
    assert engine.num_passes - before <= 1
    await loop.stop()


async def test_a_timed_wait_ends_by_itself_or_by_an_event() -> None:
    engine, published = Counter(), []
    loop = _loop(engine, published)
    loop.start()
    started = time.monotonic()

    def set_due(counter: Counter) -> None:
        counter.due = started + 0.05

    loop.post(set_due)
    await until(lambda: published)
    assert time.monotonic() - started >= 0.05
    await loop.call(lambda counter: setattr(counter, "due", time.monotonic() + 3600.0))
    assert await loop.call(lambda counter: counter.left) == 0
    await loop.stop()


async def test_call_answers_and_passes_on_errors() -> None:
    loop = _loop(Counter(), [])
    loop.start()
    assert await loop.call(lambda counter: counter.left) == 0
    with pytest.raises(ZeroDivisionError):
        await loop.call(lambda counter: counter.left // 0)
    assert loop.failure is None
    await loop.stop()
    with pytest.raises(EngineFailedError, match="stopped"):
        await loop.call(lambda counter: counter.left)


@pytest.mark.parametrize("place", ["event", "step"])
async def test_a_failure_is_told_and_never_hangs_a_caller(place: str) -> None:
    engine, failures = Counter(), []
    loop = _loop(engine, [], on_failed=failures.append)
    loop.start()

    def fail() -> None:
        raise ValueError("broken weights")

    if place == "event":
        loop.post(lambda counter: fail())
    else:
        engine.step = fail  # type: ignore[method-assign]
        loop.post(lambda counter: counter.add(1))
    with pytest.raises(EngineFailedError, match="ValueError: broken weights"):
        await asyncio.wait_for(_call_for_ever(loop), 5.0)
    await until(lambda: failures)
    with pytest.raises(EngineFailedError, match="broken weights"):
        loop.check(60.0)
    loop.post(lambda counter: counter.add(1))
    await loop.stop()
    await loop.stop()


async def test_a_step_that_hangs_is_noticed() -> None:
    engine = Counter()
    loop = _loop(engine, [])
    release = threading.Event()
    engine.step = lambda: (release.wait(), engine.add(-1))  # type: ignore[method-assign,assign,return-value]
    loop.start()
    loop.check(0.05)
    loop.post(lambda counter: counter.add(1))
    await until(lambda: loop.step_seconds > 0.05)
    with pytest.raises(EngineFailedError, match="one step"):
        loop.check(0.05)
    release.set()
    await loop.call(lambda counter: None)
    await loop.stop()


async def test_a_step_that_hangs_can_be_given_up() -> None:
    engine, published, failures = Counter(), [], []
    hangs, free = threading.Event(), threading.Event()

    def step() -> None:
        hangs.set()
        free.wait(10.0)
        engine.left = 0
        engine.output.append(1)

    engine.step = step  # type: ignore[method-assign]
    loop = _loop(engine, published, failures.append)
    loop.start()
    loop.post(lambda counter: counter.add(1))
    await asyncio.to_thread(hangs.wait)
    waiting = asyncio.create_task(loop.call(lambda counter: None))
    await asyncio.sleep(0)
    loop.fail("a rank is lost")
    loop.fail("again")
    with pytest.raises(EngineFailedError, match="a rank is lost"):
        await waiting
    with pytest.raises(EngineFailedError, match="a rank is lost"):
        loop.check(60.0)
    async with asyncio.timeout(1.0):
        await loop.stop()
    assert [str(failure) for failure in failures] == ["the counter failed: a rank is lost"]
    free.set()
    await until(lambda: not any(thread.name == "counter" for thread in threading.enumerate()))
    await asyncio.sleep(0)
    assert published == [], "what comes after the end is not published"
    assert len(failures) == 1


async def test_a_flood_of_events_holds_its_reader() -> None:
    engine = Counter()
    loop = _loop(engine, [])
    release = threading.Event()
    loop.start()
    loop.post(lambda counter: release.wait() and None)
    for _ in range(MAX_BACKLOG + 10):
        loop.post(lambda counter: None)
    held = asyncio.create_task(loop.relieve())
    done, _ = await asyncio.wait({held}, timeout=0.05)
    assert not done
    release.set()
    await asyncio.wait_for(held, 5.0)
    assert loop.backlog == 0
    await loop.stop()


async def test_an_event_is_heard_at_once() -> None:
    loop = _loop(Counter(), [])
    loop.start()
    delays: list[float] = []
    for _ in range(200):
        posted = time.perf_counter()
        await loop.call(lambda counter, posted=posted: delays.append(time.perf_counter() - posted))
    await loop.stop()
    # The machine may be busy: the median says how long the path is, not how crowded the cores are.
    assert statistics.median(delays) < 0.001, statistics.quantiles(delays)
