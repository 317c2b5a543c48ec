"""Which tests have which fault that others met: in where text ends, in sampling, in what is reported, and in
the service around them.

Those of the tokens are tried with tails of at most 1, 2, 4 and 8 tokens (``exercise.BOUNDS``) of a draft that
is always right, one that is right at times and one that hardly ever is (``conftest.DRAFTS``), and each test
says so where that did not happen. Where a row has no use for one of these, it says why.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    fault: str
    """What must not happen."""
    files: tuple[str, ...]
    """Where its tests are."""
    note: str = ""
    every_bound: bool = True
    """Its tests show that tails of every bound were verified."""


ROWS = {
    "B18": Row("generation goes on past an end inside a tail", ("test_stopping.py",)),
    "B20": Row(
        "a stop string near the start of a long tail is missed",
        ("test_stopping.py",),
        "Tails of 16 tokens too, all of them accepted.",
    ),
    "B21": Row(
        "text is cut at a stop string, ids and logprobs are not", ("test_stopping.py", "test_logprobs.py")
    ),
    "B22": Row(
        "usage counts tokens that were not given",
        ("test_length.py", "test_logprobs.py", "test_stopping.py"),
        "Every length up to 40 with the draft that is right, and some of them with the others.",
    ),
    "B23": Row("more than max_tokens", ("test_length.py",)),
    "B25": Row("text held back for a stop string is lost, or leaks", ("test_stopping.py",)),
    "B27": Row("a request outgrows the draft's context", ("test_length.py",)),
    "B29": Row("a tail reaches past the model's last position", ("test_length.py",)),
    "B31": Row("one seed, several outputs", ("test_sampling.py",)),
    "B34": Row("penalties are ignored", ("test_sampling.py",)),
    "B36": Row("bias and min-p reach the bonus token only", ("test_sampling.py",)),
    "B37": Row("filters are applied to one model only", ("test_sampling.py",)),
    "B38": Row("tails are verified at another temperature", ("test_laws.py",)),
    "B39": Row(
        "the draft reports another law than it drew from",
        ("test_laws.py",),
        "A draft that is always right has the target's two tokens, so that nothing could be seen.",
    ),
    "B41": Row("several ideas of when a temperature is 0", ("test_validation.py",)),
    "B42": Row("bias of what is no token takes the engine down", ("test_validation.py",)),
    "B43": Row("choices are copies", ("test_choices.py",)),
    "B45": Row("accepted tokens have a probability of 1", ("test_logprobs.py",)),
    "B47": Row("rows of padding are taken for tokens", ("test_vocabulary.py",)),
    "B49": Row(
        "a draft of another vocabulary is let in",
        ("test_vocabulary.py",),
        "It is refused: no draft is left that could propose anything.",
        every_bound=False,
    ),
    "B50": Row("a second BOS", ("test_text.py",)),
    "B51": Row("characters are lost between chunks", ("test_text.py",)),
    "B52": Row("a grammar is not enforced inside a tail", ("test_structured_output.py",)),
    "B54": Row("a figure is 0/0", ("test_statistics.py",)),
}

SERVICE_ROWS = {
    "B56": Row("two groups of ranks wait for each other", ("integration/test_shards_load.py",)),
    "B58": Row("a cancellation is lost while the call is being set up", ("integration/test_cases.py",)),
    "B59": Row("a pool stays large after the load", ("integration/test_scaling_cases.py",)),
    "B60": Row(
        "what is queued does not count as load",
        ("integration/test_scaling_cases.py", "cluster/test_autoscaling.py"),
    ),
    "B62": Row(
        "what is dead or stuck goes unnoticed",
        (
            "integration/test_shards.py",
            "integration/test_shards_alone.py",
            "integration/test_draft_loss.py",
            "cases/test_failures.py",
        ),
    ),
    "B64": Row(
        "a status becomes INTERNAL with a traceback",
        ("integration/test_contract.py", "integration/test_grpc_cases.py"),
    ),
    "B66": Row(
        "a failure midway looks like a normal end", ("cases/test_failures.py", "integration/test_cases.py")
    ),
    "B67": Row("a cluster file with impossible bounds passes", ("cluster/test_deploy_files.py",)),
    "B69": Row(
        "a caller without a deadline waits for ever", ("cases/test_failures.py", "integration/test_cases.py")
    ),
    "B70": Row(
        "too many pings",
        ("cases/test_pings.py", "integration/test_cases.py", "integration/test_grpc_cases.py"),
    ),
    "B72": Row("what is forked beside open channels hangs", ("cases/test_start.py",)),
}
"""Of Ray, Serve, ranks and gRPC. Files are those of ``tests``; drafts and bounds have no part in these."""

NOT_OFFERED = {"B53": "a parser loses the second of two tool calls: there are no tools."}


def docstrings_of_tests(path: Path) -> list[str]:
    """What a module says of all its tests counts for each."""
    module = ast.parse(path.read_text())
    return [
        f"{ast.get_docstring(module)}\n{ast.get_docstring(item)}"
        for item in module.body
        if isinstance(item, ast.AsyncFunctionDef | ast.FunctionDef) and item.name.startswith("test_")
    ]


def functions_of(file: str) -> list[ast.AsyncFunctionDef | ast.FunctionDef]:
    return [
        node
        for node in ast.parse((FOLDER / file).read_text()).body
        if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef)
    ]


def names_in(nodes: list[ast.AsyncFunctionDef | ast.FunctionDef]) -> set[str]:
    return {node.id for function in nodes for node in ast.walk(function) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("row_id", ROWS)
def test_every_row_has_its_tests(row_id: str) -> None:
    """In each of its files a test names it; one of them at least tries every bound, itself or by a function
    of its file."""
    row = ROWS[row_id]
    tries_every_bound = False
    for file in row.files:
        functions = functions_of(file)
        tests = [item for item in functions if row_id in (ast.get_docstring(item) or "")]
        assert tests, f"no test in {file} names {row_id}"
        helpers = [item for item in functions if item.name in names_in(tests)]
        tries_every_bound |= bool({"check_every_bound", "EVERY_BOUND"} & names_in([*tests, *helpers]))
    assert tries_every_bound == row.every_bound


@pytest.mark.parametrize("row_id", SERVICE_ROWS)
def test_every_row_of_the_service_has_its_tests(row_id: str) -> None:
    for file in SERVICE_ROWS[row_id].files:
        told = docstrings_of_tests(FOLDER.parent / file)
        assert any(row_id in docstring for docstring in told), f"no test in {file} names {row_id}"
