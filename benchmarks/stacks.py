"""What the target's engine thread does between two forward passes, from stacks that py-spy collected."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

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
