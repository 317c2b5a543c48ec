"""A case that did not happen shows nothing. On a busy machine drafts may come too late to be of use: then the
case is run again, and fails if it cannot be brought about at all. What it asserts holds every time."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ParamSpec

from tests.cases.service import Answer

ATTEMPTS = 3
BOUNDS = (1, 2, 4, 8)
"""Longest tails with which each case is tried, unless it is about another one."""

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


def counts(answers: Sequence[Answer]) -> tuple[int, int]:
    """Draft tokens and accepted ones of all answers."""
    return (
        sum(answer.speculation.draft_tokens for answer in answers),
        sum(answer.speculation.accepted_tokens for answer in answers),
    )


def check_every_bound(
    draft: str,
    requests: Sequence[Mapping[str, Any]],
    answers: Sequence[Answer],
    bounds: Sequence[int] = BOUNDS,
    *,
    cut: bool = False,
) -> None:
    """With each bound tails were verified, none longer, and they fared as those of such a draft must.

    Args:
        draft: kind of draft that served all answers.
        cut: answers end inside tails, so that what comes after is drafted but not accepted.
    """
    for bound in bounds:
        group = [
            answer
            for options, answer in zip(requests, answers, strict=True)
            if options["num_speculative_tokens"] == bound
        ]
        assert group, f"no request has a bound of {bound}"
        assert all(len(answer.speculation.accepted_per_position) <= bound for answer in group)
        drafted, accepted = counts(group)
        case = f"with {bound} tokens of the {draft} draft"
        if draft == "equal":
            exercised(accepted > 0, f"draft tokens are accepted {case}")
            assert cut or accepted >= 0.97 * drafted, case
        elif draft == "noised":
            exercised(0 < accepted < drafted, f"draft tokens are accepted, and rejected, {case}")
        else:
            exercised(accepted < drafted, f"draft tokens are rejected {case}")
