"""What is wrong with a configuration, in words that name the key and the remedy."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from paceline.actors.engine.errors import PacelineError

_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text (quote it: '...')",
    "dict_type": "a mapping",
    "model_type": "a mapping, or remove the key",
    "list_type": "a list",
}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


class ConfigError(PacelineError):
    """A configuration is wrong. ``problems`` has one line for each thing to mend."""

    def __init__(self, origin: str, problems: Sequence[str]) -> None:
        super().__init__("\n".join([f"{origin}:", *(f"  {problem}" for problem in problems)]))
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (str(self), self.problems)


class ConflictError(ValueError):
    """Two keys of one section contradict each other; ``key`` is the one to point at (dotted, relative to
    the section)."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def describe_errors(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """One line `path.to.key: what is wrong — remedy` for each error, in the order of the sections."""
    return [_describe(details, root) for details in error.errors(include_url=False)]


def _describe(details: ErrorDetails, root: type[BaseModel]) -> str:
    path, kind, context = list(details["loc"]), details["type"], details.get("ctx", {})
    if kind == "value_error":
        cause = context["error"]
        if isinstance(cause, ConflictError):
            path.append(cause.key)
        return f"{_dotted(path)}: {cause}"
    return f"{_dotted(path)}: {_wording(details, root)}"


def _wording(details: ErrorDetails, root: type[BaseModel]) -> str:
    path, kind, context = list(details["loc"]), details["type"], details.get("ctx", {})
    given = details["input"]
    if kind == "missing":
        return "is missing — add it"
    if kind == "extra_forbidden":
        known = sorted(_keys_at(root, path[:-1]))
        close = difflib.get_close_matches(str(path[-1]), known, n=1)
        return (
            f"unknown key — did you mean {close[0]}?"
            if close
            else (f"unknown key — remove it; known here are {', '.join(known)}")
        )
    if kind in _KINDS:
        return f"is {_shown(given)} — give {_KINDS[kind]}"
    if kind == "literal_error":
        return f"is {_shown(given)} — give {context['expected'].replace(chr(39), '')}"
    if kind == "string_too_short":
        return "is empty — give a name, or remove the key"
    if kind == "too_short":
        return "is empty — give at least one, or remove the key"
    if kind == "string_pattern_mismatch":
        return f"is {_shown(given)} — give a text of the form {context['pattern']}"
    if kind == "finite_number":
        return f"is {_shown(given)} — give a finite number"
    for bound, words in _BOUNDS.items():
        if bound in context:
            return f"is {_shown(given)} — give a number {words} {context[bound]:g}"
    if kind == "invalid_key":
        return "is not a text — quote the key"
    return f"{details['msg'][:1].lower()}{details['msg'][1:]} — got {_shown(given)}"


def _keys_at(root: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    section = root
    for key in path:
        if isinstance(key, int):
            continue
        field = section.model_fields.get(str(key))
        inner = next(_sections(field.annotation), None) if field is not None else None
        if inner is None:
            return []
        section = inner
    return list(section.model_fields)


def _sections(annotation: object) -> Iterator[type[BaseModel]]:
    """The sections among the alternatives of a field's type."""
    alternatives = (
        get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    )
    for alternative in alternatives:
        if get_origin(alternative) is list:
            alternative = get_args(alternative)[0]
        if isinstance(alternative, type) and issubclass(alternative, BaseModel):
            yield alternative


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(str(key) for key in path) or "the file"


def _shown(value: object) -> str:
    if value is None:
        return "empty (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _restore(text: str, problems: tuple[str, ...]) -> ConfigError:
    """Unpickle a ConfigError (it crosses process borders)."""
    origin = text.split("\n", 1)[0].removesuffix(":")
    return ConfigError(origin, problems)
