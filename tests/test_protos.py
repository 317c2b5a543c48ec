"""The generated code in protos/ is what protos/*.proto says."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def regenerated(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("protos")
    names = [f"paceline/protos/{file.name}" for file in sorted((repository / "protos").glob("*.proto"))]
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-Ipaceline/protos=protos", *outputs, *names],
        cwd=repository,
        check=True,
    )
    return folder / "paceline" / "protos"


def test_generated_code_is_not_stale(repository: Path, regenerated: Path) -> None:
    fresh = {file.name: file.read_text() for file in regenerated.iterdir()}
    committed = {file.name: file.read_text() for file in (repository / "protos").glob("*_pb2*.py*")}
    assert len(fresh) == 3 * len(list((repository / "protos").glob("*.proto")))
    assert sorted(committed) == sorted(fresh)
    stale = [name for name, text in fresh.items() if committed[name] != text]
    assert not stale, f"run `make protos`; stale: {', '.join(stale)}"
