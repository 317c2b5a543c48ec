"""Targets that wait for their drafts, so that these have a say on a busy machine too."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.actors.engine import speculation
from paceline.actors.engine.sequence import TargetSequence
from paceline.actors.engine.speculation import Speculator
from tests.cases import service

PATIENCE_SECONDS = 0.5


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """Have targets wait for drafts to begin, and longer for late ones; then they need not be slow themselves.
    When a step begins depends on no token."""
    patch.setattr(service, "PACE", 0.0)
    right = Speculator.seconds_to_wait

    def wait(self: Speculator, running: Sequence[TargetSequence], elapsed: float, now: float) -> float:
        hoping = any(
            sequence.is_decoding
            and sequence.tail_limit > 0
            and sequence.drafting is not None
            and not sequence.drafting.chain.started
            for sequence in running
        )
        if hoping and elapsed < PATIENCE_SECONDS:
            return 0.001
        # One that may have no tail makes a step begin at once, and the drafts of all others late.
        others = [item for item in running if not item.is_decoding or item.tail_limit > 0]
        return right(self, others, elapsed, now)

    patch.setattr(Speculator, "seconds_to_wait", wait)
    patch.setattr(speculation, "LATENESS", 10.0)
    patch.setattr(speculation, "MIN_DEADLINE_SECONDS", 0.1)
