"""Runs the steps of a Dockerfile as a script, each stage in a folder and a virtual environment of its own.

Knows what deploy/Dockerfile uses; anything else is an error, not skipped.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Step = tuple[str, str]
"""(instruction, its arguments)."""


def parse(text: str) -> list[Step]:
    """The steps, comments left out and continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def base_images(steps: Sequence[Step]) -> list[str]:
    """What each stage is built on, arguments filled in."""
    defaults = dict(rest.split("=", 1) for word, rest in steps if word == "ARG")
    images = [rest.split()[0] for word, rest in steps if word == "FROM"]
    return [re.sub(r"\$\{(\w+)\}", lambda found: defaults[found[1]], image) for image in images]


@dataclass
class Stage:
    """A root folder, and the environment whose Python is first on the path."""

    root: Path
    environment: Path
    folder: str = "/"
    outputs: list[str] = field(default_factory=list)

    def path(self, path: str) -> Path:
        """Where an absolute path of the image, or one relative to its working folder, lies here."""
        joined = path if path.startswith("/") else f"{self.folder.rstrip('/')}/{path}"
        return self.root / joined.lstrip("/")


def run(
    steps: Sequence[Step], context: Path, work: Path, make_environment: Callable[[int, Path], None]
) -> list[Stage]:
    """Run all stages.

    Args:
        context: the build's context.
        make_environment: makes the virtual environment of stage i at a path.
    """
    stages: list[Stage] = []
    names: dict[str, Stage] = {}
    for word, rest in steps:
        if word == "FROM":
            stage = Stage(work / f"stage{len(stages)}", work / f"environment{len(stages)}")
            stage.root.mkdir(parents=True)
            make_environment(len(stages), stage.environment)
            stages.append(stage)
            names[rest.split()[-1]] = stage
        elif word == "WORKDIR":
            stages[-1].folder = rest
            stages[-1].path(rest).mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            _copy(stages[-1], rest, context, names)
        elif word == "RUN":
            _run(stages[-1], rest)
        elif word != "ARG":
            raise ValueError(f"unknown instruction {word}")
    return stages


def _copy(stage: Stage, rest: str, context: Path, names: dict[str, Stage]) -> None:
    *sources, target = shlex.split(rest)
    source_stage = None
    if sources[0].startswith("--from="):
        source_stage = names[sources.pop(0).removeprefix("--from=")]
    into = stage.path(target)
    for name in sources:
        source = context / name if source_stage is None else source_stage.path(name)
        if source.is_dir():
            shutil.copytree(source, into, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            into.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, into)


def _run(stage: Stage, command: str) -> None:
    here = re.sub(r"(?<![\w./])/(?=(?:src|dist|opt)\b)", f"{stage.root}/", command)
    done = subprocess.run(
        ["bash", "-ec", here],
        cwd=stage.path("."),
        env={"PATH": f"{stage.environment}/bin:/usr/bin:/bin", "HOME": str(stage.root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    stage.outputs.append(done.stdout)
