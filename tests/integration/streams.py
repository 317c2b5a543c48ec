"""Streams on emulated models in which something is killed or frozen midway."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.integration.conftest import Service, wait_until
from tests.integration.heartbeat import Heartbeat

STEP_SECONDS = 0.02
MODEL = "emulated://breakaway?vocab_size=512&base_ms=20&support=6&max_model_len=1024"
DRAFT_MODEL = MODEL.replace("base_ms=20", "base_ms=4") + "&acceptance=0.6"
MAX_TOKENS = 400
MIDDLE = 100
"""Tokens of a stream after which the first thing happens."""
LONGEST_PAUSE_SECONDS = 1.0 + STEP_SECONDS
REPLACED_SECONDS = 90


def configuration(num_targets: int, num_drafts: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "draft": {"model": DRAFT_MODEL, "num_replicas": num_drafts, "num_threads": 1},
        "target": {"num_replicas": num_targets, "kv_cache": {"num_blocks": 2048}, "num_threads": 1},
        # Fixed, lest on busy processors drafts be found not worth it; what is accepted came from a draft.
        "speculation": {"num_speculative_tokens": 4, "ngram": {"enabled": False}},
    }


@dataclass
class Stream:
    """What came, and when."""

    token_ids: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    """Per token: whether a draft had proposed it."""
    pauses: list[float] = field(default_factory=list)
    """Seconds between two chunks, less what the machine lost meanwhile."""

    @property
    def longest_pause(self) -> float:
        return max(self.pauses)


@contextmanager
def asking(count: int, ask: Callable[[int, threading.Event], None]) -> Iterator[None]:
    """``ask(number, ended)`` on so many threads at once. ``ended`` is set when the block is left, which then
    waits until all have returned. Raises what any of them raised."""
    ended = threading.Event()
    with ThreadPoolExecutor(count) as threads:
        submitted = [threads.submit(ask, number, ended) for number in range(count)]
        try:
            yield
        finally:
            ended.set()
        for caller in submitted:
            caller.result()


def collect(service: Service, seed: int, events: Mapping[int, Callable[[], None]] | None = None) -> Stream:
    """Run one stream to its end.

    Args:
        events: number of tokens → what happens once so many have come.
    """
    stream = Stream()
    pending = dict(events or {})
    times: list[float] = []
    with Heartbeat() as heartbeat:
        for chunk in service.stream(prompt="attack", max_tokens=MAX_TOKENS, seed=seed):
            stream.token_ids.extend(chunk.token_ids)
            stream.accepted.extend(chunk.accepted)
            times.append(time.monotonic())
            for due in sorted(count for count in pending if count <= len(stream.token_ids)):
                pending.pop(due)()
        stream.pauses = [
            later - earlier - heartbeat.lost_seconds(earlier, later)
            for earlier, later in itertools.pairwise(times)
        ]
    return stream


def collect_all(
    service: Service, seeds: Sequence[int], events: Mapping[int, Callable[[], None]] | None = None
) -> list[Stream]:
    """All at a time; ``events`` are those of the first."""
    with ThreadPoolExecutor(len(seeds)) as pool:
        return list(
            pool.map(lambda seed: collect(service, seed, events if seed == seeds[0] else None), seeds)
        )


def token_ids(streams: Sequence[Stream]) -> list[list[int]]:
    return [stream.token_ids for stream in streams]


def wait_for_full_strength(service: Service) -> None:
    """Every target has every draft, and Serve counts all as running."""
    draft = service.config.draft
    assert draft is not None
    num_targets, num_drafts = service.config.target.num_replicas, draft.num_replicas

    def complete() -> bool:
        attached = [len(target["drafts"]) for target in service.replicas("target")]
        return attached == [num_drafts] * num_targets and len(service.replicas("draft")) == num_drafts

    wait_until(complete, timeout_seconds=REPLACED_SECONDS, what="every target has every draft")
