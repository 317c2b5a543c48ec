"""Whether a request's constraint can be served, found out before the request takes a place on a target."""

from __future__ import annotations

from paceline.actors.engine.parameters import Constraint
from paceline.actors.grammar import check_grammar


def check_constraint(constraint: Constraint) -> None:
    """Compile a constraint to see that it can be. Takes milliseconds, about a second at the worst: not for
    the event loop.

    No vocabulary is needed, so that a gateway does not take the time and the memory to build one: what only
    the vocabulary can tell (the names of special tokens in a grammar) is said by the target.

    Raises:
        InvalidArgumentError: it cannot be compiled; ``field`` is ``constraint.…``, the reason one line.
    """
    check_grammar(constraint)
