"""What the engines ask of structured output: which tokens may come next, and whether the text is complete.

How a constraint becomes an automaton is not the engine's business; ``actors/grammar.py`` has the one that
serves. A matcher's answers depend on the constraint and the completion's tokens alone, so that a sequence
that is resumed, preempted or drafted for is constrained in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.parameters import Constraint, FinishReason
from paceline.actors.engine.stopping import Stop

Masks = npt.NDArray[np.uint32]


class ConstraintMatcher(Protocol):
    """One sequence's way through its constraint. Starts before the first token of the completion."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take in the completion tokens that were committed since the last call.

        Raises:
            ConstraintError: no text that satisfies the constraint has them there.
        """

    def masks(self, tail: Sequence[int]) -> Masks:
        """Which tokens may follow. The matcher stays where it is.

        Returns:
            uint32 ``[len(tail) + 1, ceil(vocab_size / 32)]``: row i is the mask after the advanced tokens and
            i tokens of ``tail``, bit ``t % 32`` of word ``t // 32`` says whether token t is allowed. After a
            tail token that is not allowed, or past the end of the text, all bits are set: those rows are
            never reached.

        Raises:
            ConstraintError: what follows the advanced tokens cannot be told.
        """

    def find_end(self, token_ids: Sequence[int]) -> int | None:
        """How many of ``token_ids``, put after the advanced ones, make a text that is complete and cannot go
        on; None: they do not. The matcher stays where it is."""


class ConstraintCompiler(Protocol):
    """Makes matchers for one model's vocabulary."""

    def matcher(self, constraint: Constraint, stop_token_ids: Collection[int]) -> ConstraintMatcher:
        """A new matcher.

        Args:
            stop_token_ids: what ends the sequence. Those of them that are no text are allowed exactly where
                the text may end; an end-of-text token of the model that is not among them never is.

        Raises:
            InvalidArgumentError: the constraint cannot be compiled; ``field`` is the constraint's.
        """


def make_matcher(
    compiler: ConstraintCompiler | None, constraint: Constraint | None, stop_token_ids: Collection[int]
) -> ConstraintMatcher | None:
    """The matcher of a sequence; None where nothing constrains it.

    Raises:
        InvalidArgumentError: the constraint cannot be compiled, or not for this model.
    """
    if constraint is None:
        return None
    if compiler is None:
        raise InvalidArgumentError("constraint", "structured output is not available for this model")
    return compiler.matcher(constraint, stop_token_ids)


def stop_at_end(stop: Stop, token_ids: Sequence[int], matcher: ConstraintMatcher | None) -> Stop:
    """Where new tokens end the sequence, given where they would without the constraint.

    A text that is complete and cannot go on ends its sequence at once, without a token that says so. This
    holds before ``min_tokens`` and with ``ignore_eos`` too, since there is nothing more to say.

    Args:
        stop: what ``find_stop`` says of ``token_ids``.
        matcher: at the tokens before them.
    """
    end = matcher.find_end(token_ids[: stop.num_kept]) if matcher is not None else None
    return stop if end is None else Stop(end, FinishReason.STOP)
