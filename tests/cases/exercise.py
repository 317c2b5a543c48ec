"""A case that did not happen shows nothing. On a busy machine drafts may come too late to be of use: then the
case is run again, and fails if it cannot be brought about at all. What it asserts holds every time."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec

ATTEMPTS = 3

P = ParamSpec("P")


class NotExercisedError(AssertionError):
    """What a case is about did not happen."""


def exercised(condition: object, what: str) -> None:
    """Raises: NotExercisedError unless the condition holds."""
    if not condition:
        raise NotExercisedError(f"did not happen: {what}")


def until_exercised(case: Callable[P, Awaitable[None]]) -> Callable[P, Awaitable[None]]:
    """Run a case until it was met. Its assertions fail at once."""

    @functools.wraps(case)
    async def run(*args: P.args, **kwargs: P.kwargs) -> None:
        for _ in range(ATTEMPTS - 1):
            try:
                return await case(*args, **kwargs)
            except NotExercisedError:
                continue
        return await case(*args, **kwargs)

    return run
