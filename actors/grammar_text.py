"""A request's constraint, written as one grammar in Lark syntax, the only form that is compiled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from llguidance import LLMatcher

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.parameters import Constraint, ConstraintKind

MAX_REGEX_LENGTH: Final = 8192
"""In characters. The automaton of a longer expression can take gigabytes."""
MAX_MULTIPLE_OF: Final = 10_000
"""Largest ``multipleOf`` of a schema: the automaton has as many states."""
MAX_WHITESPACE: Final = 32
"""Most whitespace between two tokens of JSON. Without a bound a model can go on with it for ever."""

SMALL: Final = 1024
"""Characters. Expressions, and schemas with expressions, that are no longer take some 0.1 s at the most."""
MEDIUM: Final = 16_384
"""The same, of schemas without expressions."""

_EXPRESSIONS: Final = {"pattern", "patternProperties", "x-guidance"}

_OPTIONS: Final = '%llguidance {"no_forcing": true}'
"""By default the mask of text that has only one continuation allows only the tokenizer's own split of it. A
mask that allows all splits is what the constraint says, and does not depend on how the tokens before were
split."""

_NOT_LITERAL: Final = re.compile(r"[^\w ]", re.ASCII)


def field_of(constraint: Constraint) -> str:
    """Path of the constraint in the public contract."""
    return f"constraint.{constraint.kind.value}"


def grammar_of(constraint: Constraint) -> str:
    """The grammar of a constraint.

    Raises:
        InvalidArgumentError: it has none; ``field`` is the constraint's.
    """
    field = field_of(constraint)
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            # Written again from the parsed value: nothing but the schema can follow it in the grammar.
            rule = f"start: %json {json.dumps(_schema(field, constraint.text))}"
        case ConstraintKind.REGEX:
            rule = _regex_rule(field, constraint.text)
        case ConstraintKind.CHOICE:
            rule = _choice_rule(field, constraint.choices)
        case ConstraintKind.GRAMMAR:
            rule = constraint.text
    # At the end, so that line numbers of errors stay those of the request.
    return f"{rule}\n{_OPTIONS}\n"


def is_plain(constraint: Constraint) -> bool:
    """Whether its length bounds what it costs to compile.

    Raises:
        InvalidArgumentError: as ``grammar_of``.
    """
    match constraint.kind:
        case ConstraintKind.GRAMMAR:
            return False
        case ConstraintKind.REGEX:
            return len(constraint.text) <= SMALL
        case ConstraintKind.CHOICE:
            return True
    schema = _parsed(field_of(constraint), constraint.text)
    keywords = {keyword for node in _nodes(schema) if isinstance(node, dict) for keyword in node}
    if "multipleOf" in keywords:
        return False
    return len(constraint.text) <= (SMALL if keywords & _EXPRESSIONS else MEDIUM)


def _parsed(field: str, text: str) -> object:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidArgumentError(field, "is nested too deeply") from None
    except ValueError as error:
        raise InvalidArgumentError(field, f"is not JSON: {error}") from None


def _nodes(schema: object) -> Iterator[object]:
    """The value and all values in it."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, dict):
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def _schema(field: str, text: str) -> dict[str, Any]:
    schema = _parsed(field, text)
    _check_schema(field, schema)
    if schema is True:
        schema = {}
    if schema is False:
        raise InvalidArgumentError(field, "no value satisfies the schema false")
    if not isinstance(schema, dict):
        raise InvalidArgumentError(field, "must be a JSON object or true")
    # The library's own options, which a schema may carry.
    options = schema.get("x-guidance", {})
    if isinstance(options, dict) and not options.keys() & {"whitespace_pattern", "whitespace_flexible"}:
        whitespace = rf"[ \t\r\n]{{1,{MAX_WHITESPACE}}}"
        schema["x-guidance"] = options | {"whitespace_pattern": whitespace}
    return schema


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _check_schema(field: str, schema: object) -> None:
    """Bounds of what a few characters can ask for. Raises: InvalidArgumentError."""
    for node in _nodes(schema):
        if isinstance(node, dict):
            divisor = node.get("multipleOf")
            if isinstance(divisor, int | float) and divisor > MAX_MULTIPLE_OF:
                raise InvalidArgumentError(
                    field, f"multipleOf may be at most {MAX_MULTIPLE_OF}, got {str(divisor)[:20]}"
                )
            patterns = [node.get("pattern"), *_keys(node.get("patternProperties"))]
            if any(isinstance(item, str) and len(item) > MAX_REGEX_LENGTH for item in patterns):
                raise InvalidArgumentError(field, f"a pattern may have at most {MAX_REGEX_LENGTH} characters")
            options = node.get("x-guidance")
            if isinstance(options, dict) and options.get("lenient"):
                raise InvalidArgumentError(
                    field, "x-guidance.lenient would have keywords ignored: leave it out"
                )


def _keys(value: object) -> list[object]:
    return list(value) if isinstance(value, dict) else []


def _regex_rule(field: str, regex: str) -> str:
    if len(regex) > MAX_REGEX_LENGTH:
        raise InvalidArgumentError(field, f"may have at most {MAX_REGEX_LENGTH} characters, got {len(regex)}")
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise InvalidArgumentError(field, "ends with a backslash that escapes nothing")
    # The library's own quoting of an expression between slashes.
    [grammar] = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"]
    return str(grammar["lark_grammar"])


def _choice_rule(field: str, choices: Sequence[str]) -> str:
    if not choices or not all(choices):
        raise InvalidArgumentError(field, "must have at least one string, and none that is empty")
    # One expression, not alternatives of a rule: a choice may begin with another one.
    expression = "|".join(_literal(choice) for choice in choices)
    [grammar] = json.loads(LLMatcher.grammar_from_regex(expression))["grammars"]
    return str(grammar["lark_grammar"])


def _literal(text: str) -> str:
    """An expression that matches ``text`` alone."""
    return _NOT_LITERAL.sub(lambda found: f"\\x{{{ord(found[0]):X}}}", text)
