"""Where the time between two steps goes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.config import TargetEngineConfig
from paceline.actors.engine.messages import Submit
from paceline.actors.engine.parameters import SamplingParams, SpeculationParams, StoppingParams
from paceline.actors.engine.step_times import WINDOW, Percentiles, StepTimes, StepTimesSnapshot
from paceline.actors.engine.target_engine import TargetEngine
from tests.engine.fakes import Clock, HashRunner


@pytest.mark.parametrize(
    ("values", "p50", "p90"),
    [
        ([], 0.0, 0.0),
        ([3.0], 3.0, 3.0),
        ([2.0, 1.0], 1.0, 2.0),
        ([float(value) for value in range(10, 0, -1)], 5.0, 9.0),
        ([float(value) for value in range(1, 102)], 51.0, 91.0),
    ],
)
def test_percentiles_are_values_that_occurred(values: list[float], p50: float, p90: float) -> None:
    assert Percentiles.of(values) == Percentiles(p50, p90)


def test_nothing_is_known_before_the_first_step() -> None:
    assert StepTimes().snapshot() == StepTimesSnapshot()


def test_the_overhead_is_subtracted_step_by_step() -> None:
    times = StepTimes()
    # A slow model in one step, a long wait in another: the medians of the parts are of different steps.
    times.record(interval=9.0, model=8.0, waiting=0.25)
    times.record(interval=6.0, model=1.0, waiting=4.0)
    times.record(interval=4.0, model=1.0, waiting=0.5)
    snapshot = times.snapshot()
    assert snapshot.num_steps == 3
    assert snapshot.interval == Percentiles(6.0, 9.0)
    assert snapshot.overhead == Percentiles(3.0, 5.0)
    assert snapshot.waiting == Percentiles(0.5, 4.0)


def test_only_the_last_steps_count() -> None:
    times = StepTimes()
    for _ in range(WINDOW):
        times.record(5.0, 1.0, 0.0)
    for _ in range(WINDOW):
        times.record(2.0, 1.0, 0.0)
    assert times.snapshot() == StepTimesSnapshot(WINDOW, Percentiles(2.0, 2.0), Percentiles(1.0, 1.0))


class TimedRunner(HashRunner):
    """A step of the model takes 16 ms of a clock that only the test moves."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        self.clock.advance(0.016)
        return super().forward(batch)


def test_the_engine_counts_from_step_to_step_and_not_its_idleness() -> None:
    clock = Clock()
    engine = TargetEngine(TimedRunner(clock), TargetEngineConfig(), clock)
    clock.advance(100.0)  # idle

    def submit(sequence_id: str) -> None:
        stopping = StoppingParams(max_tokens=3)
        engine.submit(
            "gateway",
            Submit(
                sequence_id=sequence_id,
                epoch=0,
                token_ids=(1, 2, 3),
                prompt_length=3,
                sampling=SamplingParams(temperature=0.0),
                stopping=stopping,
                speculation=SpeculationParams(num_speculative_tokens=0),
            ),
        )

    submit("first")
    for pause in (0.004, 0.004, 0.001):
        clock.advance(pause)
        engine.step()
    times = engine.snapshot().step_times
    assert times.num_steps == engine.snapshot().num_steps_total == 3
    for percentiles, p50, p90 in (
        (times.interval, 0.020, 0.020),
        (times.overhead, 0.004, 0.004),
        (times.waiting, 0.004, 0.004),
    ):
        assert (percentiles.p50, percentiles.p90) == pytest.approx((p50, p90))

    assert engine.wait_seconds() is None
    clock.advance(100.0)  # idle again
    submit("second")
    engine.step()
    assert engine.snapshot().step_times.interval.p90 == pytest.approx(0.020)
    engine.check_invariants()
