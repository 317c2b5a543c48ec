"""The image: built on the Ray that is pinned, and its steps work when they are run here as a script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.cluster import dockerfile


def test_the_images_ray_and_python_are_the_pinned_ones(repository: Path) -> None:
    steps = dockerfile.parse((repository / "deploy" / "Dockerfile").read_text())
    pinned = re.search(r"^ray==(.+)$", (repository / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    builder, image = dockerfile.base_images(steps)
    assert re.fullmatch(rf"rayproject/ray:{re.escape(pinned[1])}-py311-cu\d+", image)
    assert builder == "python:3.11-slim"


def test_everything_that_is_copied_is_there_and_in_the_context(repository: Path) -> None:
    steps = dockerfile.parse((repository / "deploy" / "Dockerfile").read_text())
    copied = [
        name for word, rest in steps if word == "COPY" and "--from" not in rest for name in rest.split()[:-1]
    ]
    allowed = (repository / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    assert {"pyproject.toml", "actors", "cluster", "protos", "constraints.txt"} <= set(copied)
    for name in copied:
        assert (repository / name).exists()
        assert f"!{name}" in allowed


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_the_steps_run_as_a_script(repository: Path, tmp_path: Path) -> None:
    """Each stage in an environment of its own. The second one finds the dependencies that are installed here,
    as the image would after a download of some gigabytes, but nothing of this repository."""

    def make_environment(index: int, path: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(path)], check=True)
        if index == 1:
            _lend_dependencies(path)

    steps = dockerfile.parse((repository / "deploy" / "Dockerfile").read_text())
    wheel, image = dockerfile.run(steps, repository, tmp_path, make_environment)
    assert [file.name for file in wheel.path("/dist").iterdir()] == ["paceline-0.1.0-py3-none-any.whl"]
    assert image.outputs[-1] == "paceline 0.1.0\n"
    # What the image's command line does, it does from the image.
    sample = repository / "deploy" / "cluster.yaml"
    paceline = image.environment / "bin" / "paceline"
    checked = subprocess.run(
        [str(paceline), "deploy", str(sample), "--check"],
        capture_output=True,
        text=True,
        cwd=image.root,
        env={"PATH": f"{paceline.parent}:/usr/bin:/bin", "HOME": str(image.root)},
    )
    assert checked.stdout == f"{sample}: ready for aws, gcp, onprem, kuberay\n", checked.stderr
    located = subprocess.run(
        [str(image.environment / "bin" / "python"), "-c", "import paceline.cluster as c; print(c.__file__)"],
        capture_output=True,
        text=True,
        cwd=image.root,
    )
    assert Path(located.stdout.strip()).is_relative_to(image.environment)


def _lend_dependencies(environment: Path) -> None:
    """Links to the packages that are installed here, except this one."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = environment / "lib" / version / "site-packages"
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        ours = "paceline" in package.name.lower()
        if not ours and not (site / package.name).exists():
            os.symlink(package, site / package.name)
