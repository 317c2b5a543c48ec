"""Where model weights come from: the cache of converted models, and what a model's name stands for.

A cached model is a folder with a seal: ``paceline.json``, written last, names every other file with its size
and SHA-256. A folder without a seal does not count, and one that differs from its seal is found and
made anew. Folders appear by one rename, under a lock per model, so two processes may pull at once and a
process may die at any point.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from filelock import FileLock, Timeout

from paceline.actors.engine.errors import ModelError
from paceline.actors.weight_catalog import CATALOG, CatalogModel
from paceline.actors.weight_conversion import convert_gguf
from paceline.actors.weight_download import assemble_gguf
from paceline.actors.weight_progress import ProgressCallback, PullProgress, PullStage, silent

SEAL_NAME = "paceline.json"
EMULATED_SCHEME = "emulated://"

_CHUNK_BYTES = 1 << 22
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class CacheState(Enum):
    CACHED = "cached"
    MISSING = "missing"
    DAMAGED = "damaged"
    """Files are missing or have another size than when they were sealed."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A catalogue model and what the cache holds of it."""

    model: CatalogModel
    state: CacheState
    folder: Path
    size_bytes: int
    """Bytes on disk where cached, else bytes of the GGUF file to fetch."""


def default_cache_folder() -> Path:
    """``$PACELINE_CACHE``, else ``$XDG_CACHE_HOME/paceline``, else ``~/.cache/paceline``."""
    if explicit := os.environ.get("PACELINE_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


class WeightCache:
    """Converted models on this machine's disk.

    Args:
        folder: the cache's root; None = ``default_cache_folder()``.
        catalog: what can be pulled by name.
        convert: turns a GGUF file into the files of an empty folder, reporting (done, total).
    """

    def __init__(
        self,
        folder: Path | None = None,
        catalog: Mapping[str, CatalogModel] = CATALOG,
        convert: Callable[[Path, Path, Callable[[int, int], None]], None] = convert_gguf,
    ) -> None:
        self._folder = folder if folder is not None else default_cache_folder()
        self._catalog = catalog
        self._convert = convert

    def list_models(self) -> list[ModelEntry]:
        """Every catalogue model with its state, by a quick look (sizes, not checksums)."""
        return [self._entry(model) for model in self._catalog.values()]

    def pull(
        self,
        name: str,
        progress: ProgressCallback = silent,
        *,
        keep_download: bool = False,
        thorough: bool = True,
    ) -> Path:
        """Make sure that catalogue model ``name`` is cached and whole; fetch and convert it if not.

        Args:
            keep_download: keep the fetched parts and the GGUF file.
            thorough: compute the checksums of a model that is cached already, else look at sizes only.

        Returns:
            The model's folder.

        Raises:
            ModelError: no such model, or it cannot be fetched, verified or converted.
        """
        model = self._known(name)
        folder = self._model_folder(name)
        download = self._folder / "downloads" / name
        with self._locked(name, progress):
            if not self._problems(name, folder, progress, thorough=thorough):
                return folder

            def downloaded(done: int, total: int) -> None:
                progress(PullProgress(name, PullStage.DOWNLOAD, done, total))

            gguf = assemble_gguf(model, download, downloaded)
            self._build(name, folder, gguf, model.gguf_sha256, progress)
            if not keep_download:
                shutil.rmtree(download)
        return folder

    def verify(self, name: str, progress: ProgressCallback = silent) -> list[str]:
        """Compare catalogue model ``name`` with its checksums.

        Returns:
            What is wrong, one sentence each; empty when the cached model is whole.

        Raises:
            ModelError: no such model in the catalogue.
        """
        self._known(name)
        return self._problems(name, self._model_folder(name), progress, thorough=True)

    def resolve(self, source: str, progress: ProgressCallback = silent) -> str:
        """What ``transformers`` (or the emulated runner) loads for ``source``.

        Args:
            source: a catalogue name, a local folder, a GGUF file (converted on first use), an
                ``emulated://`` address or a hub id.

        Returns:
            The path of a local folder; an ``emulated://`` address and a hub id unchanged.

        Raises:
            ModelError: the model is not there or not usable; the text names the remedy.
        """
        if source.startswith(EMULATED_SCHEME):
            return source
        if source in self._catalog:
            entry = self._entry(self._catalog[source])
            if entry.state is CacheState.CACHED:
                return str(entry.folder)
            raise ModelError(f"model {source} is {entry.state.value}: run `paceline models pull {source}`")
        path = Path(source).expanduser()
        if source and path.is_dir():
            return str(_checked_model_folder(path))
        if path.suffix == ".gguf":
            return str(self._converted(path, progress))
        if path.is_file():
            raise ModelError(f"{source}: neither a folder nor a .gguf file")
        return self._checked_hub_id(source)

    def _converted(self, gguf: Path, progress: ProgressCallback) -> Path:
        """The cached conversion of a user's GGUF file, keyed by its content."""
        if not gguf.is_file():
            raise ModelError(f"{gguf}: no such file")
        label = gguf.stem
        sha256 = _sha256(gguf, _bytes_read(label, PullStage.VERIFY, gguf.stat().st_size, progress))
        key = f"gguf-{sha256[:16]}"
        folder = self._model_folder(key)
        with self._locked(key, progress):
            if self._problems(label, folder, progress, thorough=False):
                self._build(label, folder, gguf, sha256, progress)
        return folder

    def _build(
        self, label: str, folder: Path, gguf: Path, gguf_sha256: str, progress: ProgressCallback
    ) -> None:
        """Convert ``gguf`` into ``folder``, which afterwards is whole and sealed or not there at all."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = folder.with_name(f".unfinished-{folder.name}")
        # The lock is held: an unfinished folder is a dead process's.
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            progress(PullProgress(label, PullStage.CONVERT))
            self._convert(
                gguf,
                unfinished,
                lambda done, total: progress(PullProgress(label, PullStage.CONVERT, done, total)),
            )
            _write_seal(label, unfinished, gguf_sha256, progress)
            if folder.exists():
                shutil.rmtree(folder)
            unfinished.rename(folder)
            _sync(folder.parent)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _problems(self, label: str, folder: Path, progress: ProgressCallback, *, thorough: bool) -> list[str]:
        if not folder.is_dir():
            return [f"{folder} is missing"]
        try:
            sealed = json.loads((folder / SEAL_NAME).read_text())["files"]
            sizes = {name: int(file["size"]) for name, file in sealed.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return [f"{folder} has no readable {SEAL_NAME}"]
        problems = []
        for name, size in sizes.items():
            file = folder / name
            if not file.is_file():
                problems.append(f"{file} is missing")
            elif file.stat().st_size != size:
                problems.append(f"{file} has {file.stat().st_size} bytes instead of {size}")
        if thorough and not problems:
            advance = _bytes_read(label, PullStage.VERIFY, sum(sizes.values()), progress)
            problems = [
                f"{folder / name} is altered"
                for name in sizes
                if _sha256(folder / name, advance) != sealed[name].get("sha256")
            ]
        return problems

    def _entry(self, model: CatalogModel) -> ModelEntry:
        folder = self._model_folder(model.name)
        if not folder.is_dir():
            return ModelEntry(model, CacheState.MISSING, folder, model.gguf_bytes)
        if self._problems(model.name, folder, silent, thorough=False):
            return ModelEntry(model, CacheState.DAMAGED, folder, model.gguf_bytes)
        size = sum(file.stat().st_size for file in folder.iterdir())
        return ModelEntry(model, CacheState.CACHED, folder, size)

    def _known(self, name: str) -> CatalogModel:
        if model := self._catalog.get(name):
            return model
        close = difflib.get_close_matches(name, self._catalog, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(self._catalog)}"
        raise ModelError(f"no model {name!r} in the catalogue: {hint}")

    def _checked_hub_id(self, source: str) -> str:
        if not _HUB_ID.fullmatch(source):
            raise ModelError(
                f"model {source!r}: no such file or folder, and not a hub id (owner/name); "
                "`paceline models list` shows the models that can be pulled by name"
            )
        close = difflib.get_close_matches(source, self._catalog, n=1, cutoff=0.7)
        if "/" not in source:
            hint = f"did you mean {close[0]}?" if close else "`paceline models list` shows its names"
            raise ModelError(
                f"no model {source!r} in the catalogue, and no such file or folder: {hint} "
                "(a hub id is owner/name)"
            )
        return source

    def _model_folder(self, key: str) -> Path:
        return self._folder / "models" / key

    @contextlib.contextmanager
    def _locked(self, key: str, progress: ProgressCallback) -> Iterator[None]:
        locks = self._folder / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(locks / f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress(PullProgress(key, PullStage.WAIT))
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


def list_models() -> list[ModelEntry]:
    """Every catalogue model with its state in the default cache."""
    return WeightCache().list_models()


def pull(
    name: str, progress: ProgressCallback = silent, *, keep_download: bool = False, thorough: bool = True
) -> Path:
    """``WeightCache.pull`` in the default cache."""
    return WeightCache().pull(name, progress, keep_download=keep_download, thorough=thorough)


def resolve(source: str, progress: ProgressCallback = silent) -> str:
    """``WeightCache.resolve`` in the default cache."""
    return WeightCache().resolve(source, progress)


def _checked_model_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        remedy = f"give the file itself: {ggufs[0]}" if ggufs else "give a folder that save_pretrained wrote"
        raise ModelError(f"{folder}: not a model folder (no config.json); {remedy}")
    if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin")):
        raise ModelError(f"{folder}: has no weights (no .safetensors file); give a complete model folder")
    return folder


def _write_seal(label: str, folder: Path, gguf_sha256: str, progress: ProgressCallback) -> None:
    names = sorted(file.name for file in folder.iterdir())
    sizes = {name: (folder / name).stat().st_size for name in names}
    advance = _bytes_read(label, PullStage.SEAL, sum(sizes.values()), progress)
    files = {}
    for name in names:
        files[name] = {"size": sizes[name], "sha256": _sha256(folder / name, advance)}
        _sync(folder / name)
    seal = folder / SEAL_NAME
    seal.write_text(json.dumps({"model": label, "gguf_sha256": gguf_sha256, "files": files}, indent=1) + "\n")
    _sync(seal)


def _bytes_read(
    label: str, stage: PullStage, total: int, progress: ProgressCallback
) -> Callable[[int], None]:
    """A function that counts bytes up to ``total`` over several files and reports each step."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(PullProgress(label, stage, done, total))

    return advance


def _sha256(path: Path, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Wait until ``path`` (a file, or a folder's entries) is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
