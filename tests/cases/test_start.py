"""B72: processes that begin while channels are open. Nothing hangs, however often a service is started."""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from paceline.actors.threads import thread_environment
from paceline.cluster.tokenization import TextCodec
from paceline.protos import generation_pb2 as proto
from tests.cases.conftest import TinyModels
from tests.cases.service import Service

START_SECONDS = 90.0
"""For one start, all that it is asked and its end, on busy processors too."""
WORKER_SECONDS = 20.0
NUM_WORKERS = 6
NUM_TOKENS = 100
TEXT = "Wörter, 言葉, 🚲\n" * 50


def tokenize(codec: TextCodec, connection: Connection) -> None:
    """A tokenizer worker."""
    connection.send(codec.decode(codec.encode(TEXT)))


async def run_worker(target: Callable[..., None], *arguments: Any) -> Any:
    """What a worker sends that is forked here and now, from a process with open channels. None: nothing."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    worker = context.Process(target=target, args=(*arguments, there), daemon=True)
    worker.start()
    there.close()
    try:
        if not await asyncio.to_thread(here.poll, WORKER_SECONDS):
            return None
        try:
            return here.recv()
        except EOFError:
            return None
    finally:
        worker.kill()
        await asyncio.to_thread(worker.join)


async def start_once(target: str, draft: str) -> dict[str, Any]:
    """Start target, draft and gateway; fork workers while they talk; ask for what makes them start processes
    of their own; stop."""
    async with Service(target, draft) as service:
        running = asyncio.create_task(
            service.stream(token_ids=[7, 3, 9], max_tokens=NUM_TOKENS, temperature=0.0)
        )
        texts = [await run_worker(tokenize, service.codec) for _ in range(NUM_WORKERS)]
        # A constraint is tried out in a process that the gateway starts.
        chosen = await service.generate(
            "which?", constraint=proto.Constraint(choice=proto.Constraint.Choices(values=["yes", "no"]))
        )
        found = await running
        again = await service.stream(token_ids=[7, 3, 9], max_tokens=NUM_TOKENS, temperature=0.0)
    return {
        "texts": texts,
        "chosen": chosen.choices[0].text,
        "token_ids": found.token_ids,
        "token_ids_again": again.token_ids,
        "num_accepted": again.speculation.accepted_tokens,
    }


def report(connection: Connection, target: str, draft: str) -> None:
    """The process of one start."""
    faulthandler.dump_traceback_later(START_SECONDS, exit=True)
    connection.send(asyncio.run(start_once(target, draft)))


def started(target: str, draft: str) -> tuple[Any, int | None]:
    """What a start in a process of its own reports, and the process's exit status. None: it hangs. gRPC reads
    its environment when it is imported, so that the process must be given what replicas have."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=report, args=(there, target, draft))
    process.start()
    there.close()
    try:
        found = here.recv() if here.poll(START_SECONDS) else None
        process.join(START_SECONDS)
        return found, process.exitcode
    except EOFError:
        process.join()
        return None, process.exitcode
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    "num_starts", [1, pytest.param(20, marks=[pytest.mark.heavy, pytest.mark.timeout(1800)])]
)
def test_workers_that_are_forked_beside_open_channels(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, num_starts: int
) -> None:
    for name, value in thread_environment(1).items():
        monkeypatch.setenv(name, value)
    expected = tiny.reference.greedy([7, 3, 9], NUM_TOKENS)
    for _ in range(num_starts):
        found, status = started(tiny.target, tiny.drafts["equal"])
        assert status == 0
        assert found["texts"] == [TEXT] * NUM_WORKERS
        assert found["chosen"] in ("yes", "no")
        assert found["token_ids"] == found["token_ids_again"] == expected
        assert found["num_accepted"] > 0
