"""What a constraint may cost: refused where it is too much, before anybody compiles it in earnest."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.parameters import Constraint, ConstraintKind
from paceline.actors.grammar import check_grammar


def constraint(kind: str, text: str) -> Constraint:
    return Constraint(ConstraintKind(kind), text)


DOUBLED = "start: <|any|> A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(14)) + r"A14: /\p{L}?/"
"""A few lines for 16,384 optional letters."""


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("grammar", DOUBLED),
        ("grammar", 'start: %json {"type": "integer", "multipleOf": 100000007}'),
        ("json_schema", '{"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}'),
        ("json_schema", '{"x-guidance": {"whitespace_pattern": "%s"}}' % (r"\\p{L}?" * 9000)),
    ],
    ids=["doubled terminals", "multiples in a grammar", "multiples of two numbers", "white space"],
)
def test_what_costs_too_much_is_refused_where_it_can_be_ended(kind: str, given: str) -> None:
    """Compiled in earnest each of them takes gigabytes, and minutes that nobody could cut short."""
    with pytest.raises(InvalidArgumentError, match=r"cannot be compiled: it takes more than 1 s or 512 MiB"):
        check_grammar(constraint(kind, given))


@pytest.mark.parametrize(
    "given",
    [
        constraint("json_schema", '{"type": "number", "multipleOf": 0.01}'),
        constraint("json_schema", '{"type": "integer", "multipleOf": 9973}'),
        constraint("regex", "([a-z]+ ){3}" * 100),
        constraint("json_schema", json.dumps({"enum": [f"value {number}" for number in range(2000)]})),
    ],
    ids=["cents", "a large number", "a long expression", "many values"],
)
def test_what_is_large_but_not_dear_passes(given: Constraint) -> None:
    check_grammar(given)


def test_a_trial_that_fails_is_not_taken_for_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="could not be tried out"):
        check_grammar(constraint("grammar", 'start: "a trial that fails"'))


DEEP = """
import sys, json, threading
from paceline.actors.engine.parameters import Constraint, ConstraintKind
from paceline.actors.grammar import GrammarCompiler, check_grammar
from paceline.actors.grammar_vocabulary import emulated
names = [f"{i:x}" for i in range(6000)]
chains = [
    ("grammar", "start: r0\\n" + "".join(f"r{a}:r{b}\\n" for a, b in zip(names, names[1:]))
        + f'r{names[-1]}: "a"'),
    ("grammar", "start: R0\\n" + "".join(f'R{i}: "a"(R{i+1}|"b")\\n' for i in range(2500)) + 'R2500: "a"'),
    ("json_schema", json.dumps({"$ref": "#/$defs/0", "$defs": {
        **{f"{i}": {"items": {"$ref": f"#/$defs/{i+1}"}} for i in range(1400)}, "1400": {"type": "null"}}})),
]
compiler = GrammarCompiler(lambda: emulated(256), 256)
def use():
    for kind, text in chains:
        assert len(text) <= 65536, len(text)
        constraint = Constraint(ConstraintKind(kind), text)
        check_grammar(constraint)
        matcher = compiler.matcher(constraint, ())
        matcher.masks([97] * 8)
        matcher.advance([])
threading.stack_size(1 << 20)
thread = threading.Thread(target=use)
thread.start()
thread.join()
print("alive")
"""


def test_rules_that_refer_to_rules_do_not_exhaust_the_stack() -> None:
    """Within the length that a request may have. In a process of its own: this is how it would end."""
    done = subprocess.run(
        [sys.executable, "-c", DEEP], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")
