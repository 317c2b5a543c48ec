"""Writes docs/configuration.md from the configuration's own types, defaults and descriptions.

python -m paceline.cluster.config_reference > docs/configuration.md
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from paceline.cluster.config import PacelineConfig

_INTRODUCTION = """\
# Configuration

<!-- Written by `make docs` from cluster/config.py. -->

One YAML file. This is a whole one:

```yaml
model: qwen2.5-coder-1.5b-instruct
draft: qwen2.5-coder-0.5b-instruct
```

Everything else has a default, and [deploy/paceline.yaml](../deploy/paceline.yaml) shows more of it. The
file is checked before anything starts: an unknown or repeated key, a value of another type or a
contradiction is refused with the path of the key and the remedy, all problems at once.

A model is named by its name in `paceline models list`, by a local folder (as `save_pretrained` writes
it), by a GGUF file or by a hub id.
"""

_TYPE_NAMES = {int: "integer", float: "number", str: "text", bool: "true/false", dict: "mapping"}


def reference() -> str:
    """The page, in Markdown. A section that several others contain is described once."""
    places: dict[type[BaseModel], list[str]] = {}
    _collect(PacelineConfig, "", places)
    lines = [_INTRODUCTION]
    for section, paths in places.items():
        lines.extend(_table(section, paths))
    return "\n".join(lines)


def _collect(section: type[BaseModel], path: str, places: dict[type[BaseModel], list[str]]) -> None:
    """Note that ``section`` stands at ``path``, and the same of what it contains."""
    places.setdefault(section, []).append(path)
    for name, field in section.model_fields.items():
        if (inner := _section_of(field)) is not None:
            _collect(inner, f"{path}.{name}" if path else name, places)


def _table(section: type[BaseModel], paths: list[str]) -> Iterator[str]:
    yield f"## {', '.join(f'`{path}`' if path else 'Top level' for path in paths)}\n"
    yield f"{_sentence(section.__doc__)}\n"
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    fields = sorted(section.model_fields.items(), key=lambda item: not item[1].is_required())
    for name, field in fields:
        yield f"| `{name}` | {_values(field)} | {_default(field)} | {_sentence(field.description)} |"
    yield ""


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    for alternative in _alternatives(field.annotation):
        if get_origin(alternative) is list:
            alternative = get_args(alternative)[0]
        if isinstance(alternative, type) and issubclass(alternative, BaseModel):
            return alternative
    return None


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _values(field: FieldInfo) -> str:
    names = []
    for alternative in _alternatives(field.annotation):
        if alternative is type(None):
            names.append("null")
        elif get_origin(alternative) is Literal:
            names.extend(f"`{value}`" for value in get_args(alternative))
        elif isinstance(alternative, type) and issubclass(alternative, BaseModel):
            names.append("section")
        elif get_origin(alternative) is list and _section_of(field) is not None:
            names.append("list of sections")
        else:
            kind = get_origin(alternative) or alternative
            names.append(_TYPE_NAMES[kind] + _bounds(field))
    return ", ".join(names)


def _bounds(field: FieldInfo) -> str:
    """The range of a number: `` 1 … 64``, `` ≥ 0``, `` > 0`` or nothing."""
    ends = {type(mark): mark for mark in field.metadata}
    low, high = ends.get(annotated_types.Ge), ends.get(annotated_types.Le)
    if low is not None:
        return f" {low.ge} … {high.le}" if high is not None else f" ≥ {low.ge}"
    above, below = ends.get(annotated_types.Gt), ends.get(annotated_types.Lt)
    if above is not None and below is not None:
        return f" between {above.gt} and {below.lt}"
    return f" > {above.gt}" if above is not None else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value}`" if isinstance(value, str) else f"{value}"


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    sys.stdout.write(reference())
