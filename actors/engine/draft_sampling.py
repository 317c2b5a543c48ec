"""The next token of every chain and branch that a draft step served, and the next-best ones in its place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import torch

from paceline.actors.engine.draft_law import draw_token, quantize_law
from paceline.actors.engine.errors import ConstraintError, NonFiniteLogitsError
from paceline.actors.engine.messages import DraftLaw
from paceline.actors.engine.noise import Purpose, random_integer
from paceline.actors.engine.parameters import SamplingParams
from paceline.actors.engine.processors import LogitProcessors
from paceline.actors.engine.runners_up import runners_up
from paceline.actors.engine.sampling import LogitEdit, edited, has_law, process_logits, sample

BAD_LOGITS: Final = "the draft model's logits are not finite"


class Drafted(Protocol):
    """A chain or a branch, as far as drawing its next token goes."""

    @property
    def vocab_size(self) -> int:
        """Ids below this one exist in both models."""

    @property
    def params(self) -> SamplingParams: ...

    @property
    def processors(self) -> LogitProcessors | None: ...

    @property
    def sends_laws(self) -> bool:
        """Whether it is drawn from a quantised law, with numbers of the draft's own (``law_seed``)."""

    @property
    def law_seed(self) -> int: ...

    @property
    def next_position(self) -> int: ...

    @property
    def num_alternatives(self) -> int:
        """Next-best tokens that are wanted."""

    def split(self) -> tuple[list[int], list[int]]:
        """Committed tokens, and those past them."""


DraftedT = TypeVar("DraftedT", bound=Drafted)


class Draw(NamedTuple, Generic[DraftedT]):
    sequence: DraftedT
    token_id: int
    law: DraftLaw | None
    """What it was drawn from; None: it was certain, or the rule does not ask."""
    alternatives: tuple[int, ...] = ()
    """Next-best tokens, the best first; none where none were wanted."""


@dataclass(frozen=True, slots=True)
class Draws(Generic[DraftedT]):
    """What became of the sequences of one step. Each is in one of the three."""

    chosen: list[Draw[DraftedT]]
    """With its next token."""
    stuck: list[DraftedT]
    """No token that both models have may follow it."""
    broken: list[tuple[DraftedT, str]]
    """With the reason why it cannot be followed any further."""


def draw_candidates(logits: torch.Tensor, sequences: Sequence[DraftedT]) -> Draws[DraftedT]:
    """Draw the next token of each sequence from its row, by the law that its target has for it: the same
    processors, on the draft's own logits."""
    if not sequences:
        return Draws([], [], [])
    restricted = _restrict(logits, [sequence.vocab_size for sequence in sequences])
    stuck: list[DraftedT] = []
    broken: list[tuple[DraftedT, str]] = []
    rows: list[int] = []
    edits: list[LogitEdit | None] = []
    for row, sequence in enumerate(sequences):
        try:
            edits.append(_edit_of(sequence))
            rows.append(row)
        except ConstraintError as error:
            broken.append((sequence, str(error)))
    law = edited(restricted if len(rows) == len(sequences) else restricted[rows], edits)
    while rows:
        try:
            chosen = _draw(law, [sequences[row] for row in rows])
        except NonFiniteLogitsError as error:
            bad = set(error.rows)
        else:
            return Draws(chosen, stuck, broken)
        for index in sorted(bad):
            if has_law(restricted[rows[index]]):
                stuck.append(sequences[rows[index]])
            else:
                broken.append((sequences[rows[index]], BAD_LOGITS))
        good = [index for index in range(len(rows)) if index not in bad]
        law, rows = law[good], [rows[index] for index in good]
    return Draws([], stuck, broken)


def _draw(logits: torch.Tensor, sequences: Sequence[DraftedT]) -> list[Draw[DraftedT]]:
    """One token per sequence from its row of ``logits`` [R, V], edits applied: with the noise that the target
    has too, or from a quantised law with numbers of the draft's own.

    Raises:
        NonFiniteLogitsError: naming the rows without a law; no row is drawn then.
    """
    with_law = [row for row, sequence in enumerate(sequences) if sequence.sends_laws]
    with_noise = [row for row, sequence in enumerate(sequences) if not sequence.sends_laws]
    drawn: dict[int, tuple[int, DraftLaw | None]] = {}
    alternatives: dict[int, tuple[int, ...]] = {}
    for rows in (with_noise, with_law):
        if not rows:
            continue
        values = logits[rows] if len(rows) < len(sequences) else logits
        params = [sequences[row].params for row in rows]
        positions = [sequences[row].next_position for row in rows]
        try:
            if rows is with_noise:
                tokens = sample(values, params, positions)
                drawn.update((row, (token, None)) for row, token in zip(rows, tokens, strict=True))
                wanted = [sequences[row].num_alternatives for row in rows]
                found = runners_up(values, params, positions, tokens, wanted)
                alternatives.update((rows[index], ids) for index, ids in found.items())
                continue
            log_weights = process_logits(values, params).cpu().numpy()
        except NonFiniteLogitsError as error:
            raise NonFiniteLogitsError(tuple(rows[index] for index in error.rows)) from None
        for row, position, values_of_row in zip(rows, positions, log_weights, strict=True):
            law = quantize_law(values_of_row)
            drawn[row] = (
                draw_token(law, random_integer(sequences[row].law_seed, position, Purpose.DRAFT)),
                law,
            )
    return [Draw(sequence, *drawn[row], alternatives.get(row, ())) for row, sequence in enumerate(sequences)]


def _edit_of(sequence: Drafted) -> LogitEdit | None:
    """The edit of the position after a chain or branch."""
    if sequence.processors is None:
        return None
    committed, chain = sequence.split()
    sequence.processors.advance(committed)
    return sequence.processors.edits(chain, first=len(chain))[0]


def _restrict(logits: torch.Tensor, vocab_sizes: Sequence[int]) -> torch.Tensor:
    """Logits ``[R, V]`` with the ids that a row's target does not have removed (cut off, or −inf)."""
    widest = max(vocab_sizes)
    if widest < logits.shape[1]:
        logits = logits[:, :widest]
    if min(vocab_sizes) == widest:
        return logits
    sizes = torch.tensor(vocab_sizes, device=logits.device)
    outside = torch.arange(widest, device=logits.device) >= sizes[:, None]
    return logits.masked_fill(outside, -math.inf)
