"""What a step and a live token cost the engines themselves, model aside: counted in calls and bytes, not in
time. Work grows with the sequences of a step, and memory with the tokens that live; nothing grows faster."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType

import pytest

from paceline.actors.engine.config import Hardware, TargetEngineConfig
from paceline.actors.engine.emulated import EmulatedRunner
from paceline.actors.engine.parameters import SamplingParams
from paceline.actors.engine.target_engine import TargetEngine
from tests.engine.fakes import Network, make_submit

MODEL = "emulated://toy?vocab_size=256&base_ms=0&max_model_len=65536"
DRAFT = MODEL.replace("toy", "draft") + "&acceptance=0.7"
NUM_STEPS = 8
PLAIN = SamplingParams(temperature=1.0, seed=1)
PENALISED = SamplingParams(temperature=1.0, seed=1, repetition_penalty=1.2)


class Work:
    """So many sequences of so many tokens, all of them decoding, with lookup and with or without a draft."""

    def __init__(
        self, num_sequences: int, length: int, *, drafted: bool = False, sampling: SamplingParams = PLAIN
    ) -> None:
        num_blocks = num_sequences * (length // 16 + 10)
        config = TargetEngineConfig(
            max_num_seqs=num_sequences,
            max_num_waiting=num_sequences,
            max_num_batched_tokens=4096,
            num_speculative_tokens=4 if drafted else None,
            # How far drafts run ahead follows from times, and would be counted here.
            hardware=Hardware.SHARED,
            wait_for_drafts=False,
        )
        runner = EmulatedRunner.from_source(MODEL, num_blocks=num_blocks, block_size=16)
        self.network = Network(TargetEngine(runner, config))
        self.network.target_vocab_size = 256
        if drafted:
            runner = EmulatedRunner.from_source(DRAFT, num_blocks=num_blocks, block_size=16)
            self.network.join_runner(runner, capacity=num_sequences, max_model_len=65536)
        for index in range(num_sequences):
            prompt = [(7 * index + 31 * at * at + at * (at >> 3)) % 256 for at in range(length)]
            self.network.submit(make_submit(f"s{index}", prompt, max_tokens=140, sampling=sampling))
        while len(self.network.gateway.completions) > sum(
            map(bool, self.network.gateway.completions.values())
        ):
            self.step()
        for _ in range(4):
            self.step()

    def step(self) -> None:
        self.network.settle_drafts()
        self.network.step_target()
        self.network.target.load()

    def calls(self) -> float:
        """Function calls of a step, those into C included."""
        count = 0

        def note(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            self._steps()
        finally:
            sys.setprofile(None)
        return count / NUM_STEPS

    def peak_bytes(self) -> int:
        """What a step has allocated at the most: a copy of every sequence would show here."""
        most = 0

        def step() -> None:
            nonlocal most
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            self.step()
            most = max(most, tracemalloc.get_traced_memory()[1] - before)

        tracemalloc.start()
        try:
            for _ in range(NUM_STEPS):
                step()
        finally:
            tracemalloc.stop()
        return most

    def _steps(self) -> None:
        for _ in range(NUM_STEPS):
            self.step()


KINDS = pytest.mark.parametrize(
    "make",
    [
        lambda num_sequences, length: Work(num_sequences, length),
        lambda num_sequences, length: Work(num_sequences, length, sampling=PENALISED),
        lambda num_sequences, length: Work(num_sequences, length, drafted=True),
    ],
    ids=["plain", "penalised", "drafted"],
)
Make = Callable[[int, int], Work]


@KINDS
def test_a_step_costs_as_much_as_it_has_sequences(make: Make) -> None:
    few, many = make(8, 64).calls(), make(64, 64).calls()
    assert many <= 8 * 1.15 * few


@KINDS
def test_a_step_costs_no_more_where_sequences_are_long(make: Make) -> None:
    short, long = make(4, 128), make(4, 16384)
    assert long.calls() <= 1.15 * short.calls()
    # 128 times the tokens: a copy of one sequence alone would be as much as all the rest.
    assert long.peak_bytes() <= 1.5 * short.peak_bytes() + 64 * 1024


def held_bytes(make: Make, num_sequences: int, length: int) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        work = make(num_sequences, length)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert work.network.target.load().num_running == num_sequences
    return held


@KINDS
def test_memory_grows_with_the_live_tokens(make: Make) -> None:
    held_bytes(make, 2, 64)  # what is made once
    base = held_bytes(make, 4, 512)
    assert held_bytes(make, 8, 512) <= 2.2 * base
    assert held_bytes(make, 4, 1024) <= 2.2 * base
