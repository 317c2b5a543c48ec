"""From the logits of one step to what each of its sequences commits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
_LARGE_VOCABULARY: Final = 8192
"""From so many tokens on a row costs more than a call."""
NO_TOKEN: Final = "the request's bias, bad ids or constraint leave no token at this position"


@dataclass(frozen=True, slots=True)
class Unverified:
    """Why a sequence cannot go on."""

    error: str
    invalid_argument: bool = False
    """The request is to blame."""


@dataclass(slots=True)
class _Samples:
    """Of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    lawless: bool = False
    """The row behind them has no law."""


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
    samples = _draw_samples(scheduled, law, params, positions)

    found: list[Verification | Unverified] = []
    end = 0
    for item, reason, drawn in zip(scheduled, unfit, samples, strict=True):
        start, end = end, end + item.num_logits
        if reason is not None:
            found.append(Unverified(reason, invalid_argument=True))
        elif start == end:
            found.append(Verification(0, ()))
        elif drawn.lawless and not drawn.token_ids:
            found.append(_lawless(logits[start]))
        else:
            if item.sequence.shares_noise:
                tail = item.tail[: len(drawn.token_ids) - 1] if drawn.lawless else item.tail
                verification = verify_coupled(tail, drawn.token_ids)
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


def _draw_samples(
    scheduled: Sequence[ScheduledSequence],
    law: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
) -> list[_Samples]:
    """The samples of the sequences that share their noise, of each until one differs from the tail, there is
    one more than tail tokens, or a row has no law.

    Where rows are dear, none behind a rejected token is drawn from: depth by depth, those sequences go on
    whose tail was right so far. Else all rows are drawn from at once, as are those on a device, which would
    have to be waited for each time.
    """
    samples = [_Samples() for _ in scheduled]
    ends = list(itertools.accumulate(item.num_logits for item in scheduled))
    going = [index for index, item in enumerate(scheduled) if item.sequence.shares_noise and item.num_logits]
    dear = law.device.type == "cpu" and (law.shape[1] >= _LARGE_VOCABULARY or len(going) == 1)
    width = 1 if dear else law.shape[0]
    while going:
        spans: list[range] = []
        for index in going:
            start = ends[index] - scheduled[index].num_logits + len(samples[index].token_ids)
            spans.append(range(start, min(start + width, ends[index])))
        drawn = _sample_rows(law, params, positions, [row for span in spans for row in span])
        still_going: list[int] = []
        for index, span in zip(going, spans, strict=True):
            tail, found = scheduled[index].tail, samples[index]
            for row in span:
                token_id = drawn[row]
                if token_id is None:
                    found.lawless = True
                    break
                found.token_ids.append(token_id)
                depth = len(found.token_ids)
                if depth > len(tail) or token_id != tail[depth - 1]:
                    break
            else:
                if span.stop < ends[index]:
                    still_going.append(index)
        going = still_going
    return samples


def _sample_rows(
    law: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int], rows: Sequence[int]
) -> dict[int, int | None]:
    """The samples of ``rows`` (ascending) of ``law`` [R, V]; None where a row has no law."""
    wanted, places = params, positions
    if len(rows) < len(params):
        wanted, places = [params[row] for row in rows], [positions[row] for row in rows]
    found: dict[int, int | None] = {}
    try:
        drawn = sample(law, wanted, places, rows)
    except NonFiniteLogitsError as error:
        found = {rows[index]: None for index in error.rows}
        usable = [index for index, row in enumerate(rows) if row not in found]
        rows = [rows[index] for index in usable]
        drawn = sample(law, [wanted[i] for i in usable], [places[i] for i in usable], rows)
    found.update(zip(rows, drawn, strict=True))
    return found


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
