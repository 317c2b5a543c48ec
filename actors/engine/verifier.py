"""From the logits of one step to what each of its sequences commits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import torch

from paceline.actors.engine.config import LogprobsMode
from paceline.actors.engine.errors import ConstraintError, NonFiniteLogitsError
from paceline.actors.engine.logprobs import token_logprobs
from paceline.actors.engine.messages import DraftLaw
from paceline.actors.engine.parameters import SamplingParams
from paceline.actors.engine.ratio_verifier import verify_by_ratio
from paceline.actors.engine.sampling import Edits, LogitEdit, edited, has_law, process_logits, sample
from paceline.actors.engine.scheduler import ScheduledSequence
from paceline.actors.engine.sequence import TargetSequence
from paceline.actors.engine.verification import Verification, verify_coupled

BAD_LOGITS: Final = "the model produced logits that are not numbers"
NO_TOKEN: Final = "the request's bias, bad ids or constraint leave no token at this position"


@dataclass(frozen=True, slots=True)
class Unverified:
    """Why a sequence cannot go on."""

    error: str
    invalid_argument: bool = False
    """The request is to blame."""


def verify_step(
    scheduled: Sequence[ScheduledSequence],
    logits: torch.Tensor,
    logprobs_mode: LogprobsMode = LogprobsMode.RAW,
    laws: Mapping[TargetSequence, Sequence[DraftLaw | None]] = MappingProxyType({}),
) -> list[Verification | Unverified]:
    """What each scheduled sequence commits.

    A position without a law, be it that the logits are not numbers or that the request leaves no token there,
    ends a sequence only when it is reached: a tail that goes past it is verified up to it.

    Args:
        logits: float32 ``[R, vocab_size]``, R = all ``num_logits`` of the step; a sequence's row i is the law
            of the token after its last committed token and i tokens of its tail. Not changed.
        logprobs_mode: of which law the sequences that ask for log probabilities hear.
        laws: what a sequence's tail was drawn from, for the standard and block rules: at least one per token,
            or nothing where all of them were certain.

    Returns:
        One entry per scheduled sequence; no tokens for a prompt chunk.
    """
    num_rows = sum(item.num_logits for item in scheduled)
    if logits.shape[0] != num_rows:
        raise ValueError(f"the model returned {logits.shape[0]} rows of logits, asked for {num_rows}")
    if num_rows == 0:
        return [Verification(0, ())] * len(scheduled)
    edits, unfit = _edits_of(scheduled)
    law = edited(logits, edits)
    params = [item.sequence.sampling for item in scheduled for _ in range(item.num_logits)]
    positions = [
        len(item.sequence.token_ids) + depth for item in scheduled for depth in range(item.num_logits)
    ]
    shared = [item.sequence.shares_noise for item in scheduled for _ in range(item.num_logits)]
    sampled_rows = [row for row, is_shared in enumerate(shared) if is_shared]
    samples, lawless = _sample_rows(law, params, positions, sampled_rows)

    found: list[Verification | Unverified] = []
    end = 0
    for item, reason in zip(scheduled, unfit, strict=True):
        start, end = end, end + item.num_logits
        # Rows past the first without a law are not reached either.
        usable_end = min((row for row in lawless if start <= row < end), default=end)
        if reason is not None:
            found.append(Unverified(reason, invalid_argument=True))
        elif start == end:
            found.append(Verification(0, ()))
        elif start == usable_end:
            found.append(_lawless(logits[start]))
        else:
            if item.sequence.shares_noise:
                tail = item.tail[: usable_end - start - 1]
                verification = verify_coupled(tail, samples[start:usable_end])
            else:
                try:
                    verification = verify_by_ratio(
                        item.sequence, item.tail, laws.get(item.sequence, ()), law[start:end]
                    )
                except NonFiniteLogitsError as error:
                    found.append(_lawless(logits[start + error.rows[0]]))
                    continue
            if item.sequence.logprobs is not None:
                reached = slice(start, start + len(verification.token_ids))
                weights = (law if logprobs_mode is LogprobsMode.PROCESSED else logits)[reached]
                if logprobs_mode is LogprobsMode.PROCESSED and not item.sequence.sampling.greedy:
                    weights = process_logits(weights, params[reached])
                logprobs = token_logprobs(
                    weights.cpu().numpy(), verification.token_ids, item.sequence.logprobs
                )
                verification = replace(verification, logprobs=logprobs)
            found.append(verification)
    return found


def _sample_rows(
    law: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int], rows: Sequence[int]
) -> tuple[list[int], tuple[int, ...]]:
    """The samples of ``rows`` of ``law`` [R, V] (0 in others), and which of ``rows`` have no law."""
    samples = [0] * law.shape[0]
    if not rows:
        return samples, ()
    if len(rows) < len(samples):
        law = law[torch.tensor(rows, device=law.device)]
        params, positions = [params[row] for row in rows], [positions[row] for row in rows]
    lawless: tuple[int, ...] = ()
    try:
        drawn = sample(law, params, positions)
    except NonFiniteLogitsError as error:
        lawless = error.rows
        usable = law.index_fill(0, torch.tensor(lawless, device=law.device), 0.0)
        drawn = sample(usable, params, positions)
    for row, token_id in zip(rows, drawn, strict=True):
        samples[row] = token_id
    return samples, tuple(rows[index] for index in lawless)


def _lawless(logits: torch.Tensor) -> Unverified:
    """Why no token can be drawn at a position, whose raw ``logits`` [V] are given."""
    is_request = has_law(logits)
    return Unverified(NO_TOKEN if is_request else BAD_LOGITS, invalid_argument=is_request)


def _edits_of(scheduled: Sequence[ScheduledSequence]) -> tuple[Edits, list[str | None]]:
    """Every row's edit, and per sequence why it cannot satisfy its constraint (None: it can)."""
    edits: list[LogitEdit | None] = []
    unfit: list[str | None] = []
    for item in scheduled:
        processors = item.sequence.processors
        reason: str | None = None
        rows: list[LogitEdit | None] = [None] * item.num_logits
        if processors is not None and item.num_logits:
            try:
                processors.advance(item.sequence.token_ids)
                rows = processors.edits(item.tail)
            except ConstraintError as error:
                reason = str(error)
        edits.extend(rows)
        unfit.append(reason)
    return edits, unfit
