"""The house stands as docs/architecture.md draws it: imports point one way, rooms stay small."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINES = 600
PACKAGES = {"paceline.actors": ROOT / "actors", "paceline.cluster": ROOT / "cluster"}
ENGINE = "paceline.actors.engine"
ENGINE_MAY_IMPORT = {"torch", "transformers", "numpy"}


def _modules() -> dict[str, Path]:
    """Dotted name -> file, for all of ours but generated code."""
    found = {}
    for package, folder in PACKAGES.items():
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = file
    return found


def _imports(
    nodes: ast.AST, modules: dict[str, Path], *, at_import_time: bool = False
) -> Iterator[tuple[str, int]]:
    """(module, line) of each import below ``nodes``; ``at_import_time`` leaves out function bodies and what
    only type checkers run."""
    for node in ast.iter_child_nodes(nodes):
        if at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if at_import_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield (name if name in modules else str(node.module)), node.lineno
        else:
            yield from _imports(node, modules, at_import_time=at_import_time)


def _inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _violation(importer: str, imported: str) -> str | None:
    """Why ``importer`` may not import ``imported``; None = it may."""
    top = imported.split(".", 1)[0]
    if _inside(importer, ENGINE):
        allowed = _inside(imported, ENGINE) or top in ENGINE_MAY_IMPORT or top in sys.stdlib_module_names
        return None if allowed else "the engine imports torch, transformers, numpy and itself only"
    if _inside(importer, "paceline.actors"):
        if top == "ray":
            return "Ray lives in cluster/"
        if _inside(imported, "paceline.cluster"):
            return "actors do not know the cluster"
    if top in {"actors", "cluster", "protos"}:
        return "import it as paceline.…"
    return "tests are not for the service" if top == "tests" else None


def test_imports_point_one_way() -> None:
    modules = _modules()
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: imports {imported}: {reason}"
        for module, file in modules.items()
        for imported, line in _imports(ast.parse(file.read_text()), modules)
        if (reason := _violation(module, imported))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("importer", "imported", "wrong"),
    [
        ("paceline.actors.engine.blocks", "grpc", True),
        ("paceline.actors.engine.blocks", "paceline.actors.wire", True),
        ("paceline.actors.engine.blocks", "paceline.actors.engine.errors", False),
        ("paceline.actors.engine.blocks", "dataclasses", False),
        ("paceline.actors.wire", "grpc.aio", False),
        ("paceline.actors.wire", "ray.serve", True),
        ("paceline.actors.wire", "paceline.cluster.config", True),
        ("paceline.cluster.cli", "ray", False),
        ("paceline.cluster.cli", "cluster.config", True),
    ],
)
def test_the_rule_knows_right_from_wrong(importer: str, imported: str, wrong: bool) -> None:
    assert (_violation(importer, imported) is not None) == wrong


def test_no_circular_imports() -> None:
    modules = _modules()
    graph = {
        module: {
            imported
            for imported, _ in _imports(ast.parse(file.read_text()), modules, at_import_time=True)
            if imported in modules
        }
        for module, file in modules.items()
    }
    circle = _circle(graph)
    assert circle is None, " -> ".join(circle or [])


def test_a_circle_is_found() -> None:
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert _circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def _circle(graph: dict[str, set[str]]) -> list[str] | None:
    finished: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return None
        for imported in sorted(graph[module]):
            if found := walk(imported, [*path, module]):
                return found
        finished.add(module)
        return None

    return next((found for module in sorted(graph) if (found := walk(module, []))), None)


def test_no_private_name_is_imported() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {alias.name} from {node.module}"
        for file in _modules().values()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline")
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert not wrong, "\n".join(wrong)


def test_files_stay_small() -> None:
    folders = [ROOT / name for name in ("actors", "cluster", "benchmarks", "tests")]
    lengths = {
        file.relative_to(ROOT): len(file.read_text().splitlines())
        for folder in folders
        for file in folder.rglob("*.py")
    }
    long = [f"{file}: {lines} lines" for file, lines in lengths.items() if lines > MAX_LINES]
    assert not long, "\n".join(long)


@pytest.mark.parametrize(("package", "absent"), [(ENGINE, ("ray", "grpc")), ("paceline.actors", ("ray",))])
def test_a_layer_does_not_bring_the_next_one_along(package: str, absent: tuple[str, ...]) -> None:
    names = [name for name in _modules() if _inside(name, package)]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(*(name for name in {absent!r} if name in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT.parent)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []
