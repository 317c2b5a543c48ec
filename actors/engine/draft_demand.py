"""Whether a sequence would gain from a draft at the present load: what a draft pool is sized by."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.actors.engine.pacing import StepCost, best_num_speculative_tokens

PRIOR_ACCEPTANCE = 0.7
HALF_LIFE_SECONDS = 300.0
"""After this time half of what former drafts were like is forgotten: other requests may suit them better."""


@dataclass(frozen=True, slots=True)
class DraftPace:
    """What drafts are like, on average."""

    acceptance: float = PRIOR_ACCEPTANCE
    seconds_per_token: float = 0.0
    rtt_seconds: float = 0.0


UNKNOWN_PACE = DraftPace()
"""Before there was a draft: one that costs no time. Where not even that pays, the step itself is too dear."""


def faded(pace: DraftPace, age_seconds: float) -> DraftPace:
    """What to expect of drafts that were like ``pace`` so long ago."""
    kept = 0.5 ** (age_seconds / HALF_LIFE_SECONDS)
    return DraftPace(
        acceptance=kept * pace.acceptance + (1.0 - kept) * UNKNOWN_PACE.acceptance,
        seconds_per_token=kept * pace.seconds_per_token + (1.0 - kept) * UNKNOWN_PACE.seconds_per_token,
        rtt_seconds=kept * pace.rtt_seconds + (1.0 - kept) * UNKNOWN_PACE.rtt_seconds,
    )


def draft_pays(
    pace: DraftPace, step_cost: StepCost, num_sequences: int, max_tokens: int, *, lock_step: bool
) -> bool:
    """Whether tails of any length up to ``max_tokens`` give more tokens per second than none.

    Args:
        step_cost: T of a step of so many tokens.
        num_sequences: sequences in the step, all with tails of the same length.
        lock_step: the draft rests while the target verifies.
    """
    return (
        best_num_speculative_tokens(
            pace.acceptance,
            pace.seconds_per_token,
            pace.rtt_seconds,
            lambda num_tokens: step_cost(num_tokens * num_sequences),
            max_tokens,
            lock_step,
        )
        > 0
    )
