"""What the target's engine thread does between two forward passes, from stacks that py-spy collected."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import ProcessorTime

PY_SPY = str(Path(sys.executable).with_name("py-spy"))
"""Of the extra ``bench``."""
PROFILED = ("target", "draft", "gateway")

ENGINE_THREAD = "target engine"
MODEL = "model"

PARTS = (
    # The first entry that occurs in a stack names its part.
    ("EmulatedRunner.forward", MODEL),
    ("sample (", "sampling"),
    ("TargetEngine._verify", "verification"),
    ("TargetEngine._update", "commit"),
    ("Speculator.update_windows", "windows and verdicts"),
    ("Speculator.propose", "proposals"),
    ("TargetEngine.step", "scheduling and the rest of the step"),
    ("EngineLoop._run_events", "events"),
    ("EngineLoop._hand_over_output", "hand-over of the output"),
    ("TargetEngine.wait_seconds", "go or wait"),
)
OTHER = "engine loop"


@dataclass(frozen=True)
class Profiler:
    """py-spy on one process: collapsed stacks of its threads."""

    role: str
    process: subprocess.Popen[bytes]
    output: Path


def start_profilers(
    folder: Path, name: str, processes: ProcessorTime, duration_seconds: float
) -> list[Profiler]:
    """One on each Python process of the service, writing ``<name>-<role>.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    profilers = []
    for role in PROFILED:
        for pid in processes.pids(role):
            output = folder / f"{name}-{role}.txt"
            command = [PY_SPY, "record", "--pid", str(pid), "--duration", str(round(duration_seconds))]
            command += ["--rate", "250", "--threads", "--format", "raw", "--output", str(output)]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            profilers.append(Profiler(role, process, output))
    return profilers


def finish_profilers(profilers: Sequence[Profiler]) -> dict[str, float]:
    """Wait for them; ``engine_parts`` of the target.

    Raises: RuntimeError if py-spy could not look at a process.
    """
    for profiler in profilers:
        if profiler.process.wait() != 0:
            raise RuntimeError(f"py-spy failed on the {profiler.role}; it needs the right to trace processes")
    return next((engine_parts(item.output) for item in profilers if item.role == "target"), {})


def engine_parts(path: Path) -> dict[str, float]:
    """Part -> its share of the samples of the engine's thread outside of the model's forward pass.

    Args:
        path: collapsed stacks (``py-spy record --threads --format raw``): frames from the outermost to the
            innermost, separated by semicolons, and the number of samples.
    """
    samples: Counter[str] = Counter()
    for line in path.read_text(encoding="utf-8").splitlines():
        stack, _, count = line.rpartition(" ")
        if ENGINE_THREAD in stack.partition(";")[0]:
            samples[_part(stack)] += int(count)
    del samples[MODEL]
    total = samples.total()
    return {part: count / total for part, count in samples.most_common()}


def _part(stack: str) -> str:
    return next((part for frame, part in PARTS if f";{frame}" in stack), OTHER)
