from __future__ import annotations

import contextlib
import time

from paceline.actors.engine.parameters import FinishReason
from tests.cluster.scripted import ScriptedTargets, checked


async def test_tokens_count_until_a_report_or_the_end_of_their_sequence(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    link = targets.links["a"]

    def unreported() -> tuple[int, int]:
        (load,) = targets.gateway.snapshot().targets
        return load.own_unreported, load.own_unreported_tokens

    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(targets.gateway.open(checked(range(length)))) for length in (5, 7)
        )
        assert unreported() == (2, 12)
        first.close()
        assert unreported() == (1, 7)
        link.report(1)
        assert unreported() == (0, 0)
        second.close()
        assert unreported() == (0, 0)
        stack.enter_context(targets.gateway.open(checked(range(3))))
        assert unreported() == (1, 3)
        link.finish(link.submits[-1], FinishReason.LENGTH)
        assert unreported() == (0, 0)


async def test_a_targets_load_costs_the_same_however_many_are_unreported(targets: ScriptedTargets) -> None:
    await targets.attach("a")

    def seconds() -> float:
        """The best of some tries: what the machine does otherwise is in none of them all."""
        best = float("inf")
        for _ in range(20):
            started = time.perf_counter()
            for _ in range(10):
                targets.gateway.snapshot()
            best = min(best, time.perf_counter() - started)
        return best

    with contextlib.ExitStack() as stack:
        stack.enter_context(targets.gateway.open(checked()))
        one = seconds()
        for _ in range(5000):
            stack.enter_context(targets.gateway.open(checked()))
        many = seconds()
    assert many < 4 * one
