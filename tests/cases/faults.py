"""The usual ways to bend the output, each put into the code of a running service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch

from paceline.actors import grammar
from paceline.actors.engine import (
    draft_engine,
    draft_sampling,
    draft_sequence,
    drafts,
    ratio_verifier,
    verifier,
)
from paceline.actors.engine.constraint import Masks
from paceline.actors.engine.draft_law import SparseLaw, quantize_law
from paceline.actors.engine.draft_sampling import Draws
from paceline.actors.engine.draft_sequence import DraftSequence
from paceline.actors.engine.errors import ConstraintError
from paceline.actors.engine.messages import DraftLaw
from paceline.actors.engine.noise import FloatArray, Purpose
from paceline.actors.engine.parameters import SamplingParams, VerificationRule
from paceline.actors.engine.processors import LogitProcessors
from paceline.actors.engine.sampling import LogitEdit, process_logits
from paceline.actors.engine.speculation import Proposal, Speculator
from paceline.actors.engine.verification import Verification, pick, residual
from paceline.actors.grammar_matcher import GrammarMatcher
from paceline.protos import generation_pb2 as proto

COUPLED: Final = proto.VERIFICATION_RULE_COUPLED
STANDARD: Final = proto.VERIFICATION_RULE_STANDARD
BLOCK: Final = proto.VERIFICATION_RULE_BLOCK
RULES: Final = {"coupled": COUPLED, "standard": STANDARD, "block": BLOCK}

SURE = 0.35
"""Of a token that a draft is said to be sure of."""

Inject = Callable[[pytest.MonkeyPatch], None]


def confidence(token_id: int, law: DraftLaw | None) -> float:
    """q(x) of a drafted token."""
    return SparseLaw.of(token_id, law).probability(token_id)


# ---------------------------------------------------------------- 1, 2: what is verified


def drop_unlikely_tokens(patch: pytest.MonkeyPatch) -> None:
    """1: the draft ends its chain before a token that it finds unlikely, having drawn it."""
    _drop(patch, lambda token_id, law: confidence(token_id, law) < SURE)


def drop_by_token(patch: pytest.MonkeyPatch) -> None:
    """1 for drafts without laws: the draft keeps some tokens to itself."""
    _drop(patch, lambda token_id, _: token_id % 3 == 0)


def _drop(patch: pytest.MonkeyPatch, unwanted: Callable[[int, DraftLaw | None], bool]) -> None:
    right = draft_engine.draw_candidates

    def draw(logits: torch.Tensor, sequences: Sequence[DraftSequence]) -> Draws:
        draws = right(logits, sequences)
        dropped = [item for item in draws.chosen if unwanted(item.token_id, item.law)]
        kept = [item for item in draws.chosen if item not in dropped]
        return replace(draws, chosen=kept, stuck=[*draws.stuck, *(item.sequence for item in dropped)])

    patch.setattr(draft_engine, "draw_candidates", draw)


def verify_what_is_sure(patch: pytest.MonkeyPatch) -> None:
    """2: as many tokens as the draft believes to be right, by what it drew just now."""

    def count(proposal: Proposal) -> int:
        pairs = zip(proposal.token_ids, proposal.laws, strict=True)
        return sum(confidence(token_id, law) > SURE for token_id, law in pairs)

    _cut(patch, count)


def verify_by_tokens(patch: pytest.MonkeyPatch) -> None:
    """2 for drafts without laws: how many depends on the tokens, the last ones too."""
    _cut(patch, lambda proposal: sum(proposal.token_ids) % (len(proposal.token_ids) + 1))


def _cut(patch: pytest.MonkeyPatch, count: Callable[[Proposal], int]) -> None:
    right = Speculator.propose

    def propose(self: Speculator, *args: Any) -> Any:
        found = {}
        for sequence, proposal in right(self, *args).items():
            kept = count(proposal)
            if kept:
                found[sequence] = replace(
                    proposal, token_ids=proposal.token_ids[:kept], laws=proposal.laws[:kept]
                )
        return found

    patch.setattr(Speculator, "propose", propose)


# ---------------------------------------------------------------- 3: whose numbers


def accept_by_draft_noise(patch: pytest.MonkeyPatch) -> None:
    """3: u is the number that drew the token."""
    _reuse_draft_noise(patch, Purpose.ACCEPTANCE)


def replace_by_draft_noise(patch: pytest.MonkeyPatch) -> None:
    """3: the corrected token is picked by the number that drew the tail's first token."""
    _reuse_draft_noise(patch, Purpose.RESIDUAL)


def _reuse_draft_noise(patch: pytest.MonkeyPatch, reusing: Purpose) -> None:
    seeds: dict[int, int] = {}
    round_seed, uniform = ratio_verifier.round_seed, ratio_verifier.uniform

    def remember(seed: int, epoch: int, base_position: int) -> int:
        key = round_seed(seed, epoch, base_position)
        seeds[key] = seed
        return key

    def draw(key: int, position: int, purpose: Purpose) -> float:
        if purpose is reusing:
            return uniform(seeds[key], position, Purpose.DRAFT)
        return uniform(key, position, purpose)

    patch.setattr(drafts, "stay_seed", lambda seed, epoch, stay: seed)
    patch.setattr(draft_sequence, "revision_seed", lambda draft_seed, revision: draft_seed)
    patch.setattr(ratio_verifier, "round_seed", remember)
    patch.setattr(ratio_verifier, "uniform", draw)


# ---------------------------------------------------------------- 4, 5: which laws


def replace_from_target(patch: pytest.MonkeyPatch) -> None:
    """4: the corrected token is drawn from p."""
    _replace(patch, lambda target, draft, kept: target[kept])


def replace_from_next_row(patch: pytest.MonkeyPatch) -> None:
    """4: the corrected token is drawn from the residual at the row after the rejected one."""
    _replace(patch, lambda target, draft, kept: residual(target[kept + 1], 1.0, draft[kept]))


def _replace(
    patch: pytest.MonkeyPatch,
    weights_of: Callable[[Sequence[FloatArray], Sequence[SparseLaw], int], FloatArray],
) -> None:
    right = ratio_verifier.verify_ratio

    def verify(
        rule: VerificationRule,
        tail: Sequence[int],
        target: Sequence[FloatArray],
        draft: Sequence[SparseLaw],
        uniforms: Sequence[float],
        residual_uniform: float,
        bonus_uniform: float,
    ) -> Verification:
        found = right(rule, tail, target, draft, uniforms, residual_uniform, bonus_uniform)
        if found.num_accepted == len(tail):
            return found
        weights = weights_of(target, draft, found.num_accepted)
        token_id = pick(weights if weights.any() else target[found.num_accepted], residual_uniform)
        return replace(found, token_ids=(*found.token_ids[:-1], token_id))

    patch.setattr(ratio_verifier, "verify_ratio", verify)


def send_law_before_filters(patch: pytest.MonkeyPatch) -> None:
    """5: a draft draws with the filters, and sends what its law was without."""
    right = draft_engine.draw_candidates

    def draw(logits: torch.Tensor, sequences: Sequence[DraftSequence]) -> Draws:
        draws = right(logits, sequences)
        rows = {id(sequence): row for row, sequence in enumerate(sequences)}
        chosen = []
        for item in draws.chosen:
            row = rows[id(item.sequence)]
            bare = SamplingParams(temperature=item.sequence.params.temperature)
            log_weights = process_logits(logits[row : row + 1], [bare])[0].numpy()
            chosen.append(item._replace(law=quantize_law(log_weights) if item.law else None))
        return replace(draws, chosen=chosen)

    patch.setattr(draft_engine, "draw_candidates", draw)


def draft_without_filters(patch: pytest.MonkeyPatch) -> None:
    """5 for drafts without laws: a draft draws without the filters."""
    right = draft_sampling.sample

    def sample(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
        return right(logits, [SamplingParams(temperature=1.5, seed=item.seed) for item in params], positions)

    patch.setattr(draft_sampling, "sample", sample)


# ---------------------------------------------------------------- 6, 7, 8: the target's own law

Edits = Callable[[LogitProcessors, Sequence[int], int], list[LogitEdit | None]]


def penalise_once_per_step(patch: pytest.MonkeyPatch) -> None:
    """6: all positions of a tail have the first one's history."""
    right = LogitProcessors.edits

    def edits(self: LogitProcessors, tail: Sequence[int], first: int = 0) -> list[LogitEdit | None]:
        return right(self, [], 0) * (len(tail) + 1 - first)

    patch.setattr(LogitProcessors, "edits", edits)


def remember_rejected_tokens(patch: pytest.MonkeyPatch) -> None:
    """6: what a tail held stays in the history when it was rejected."""
    right_edits, right_advance = LogitProcessors.edits, LogitProcessors.advance
    tails: WeakKeyDictionary[LogitProcessors, tuple[int, list[int]]] = WeakKeyDictionary()
    lengths: WeakKeyDictionary[LogitProcessors, int] = WeakKeyDictionary()
    ghosts: WeakKeyDictionary[LogitProcessors, list[int]] = WeakKeyDictionary()

    def advance(self: LogitProcessors, committed: Sequence[int]) -> None:
        right_advance(self, committed)
        base, tail = tails.get(self, (0, []))
        judged = zip(tail, committed[base:], strict=False)
        wrong = next((depth for depth, pair in enumerate(judged) if pair[0] != pair[1]), len(tail))
        ghosts.setdefault(self, []).extend(tail[wrong:])
        if len(committed) > base:
            tails.pop(self, None)
        lengths[self] = len(committed)

    def edits(self: LogitProcessors, tail: Sequence[int], first: int = 0) -> list[LogitEdit | None]:
        tails[self] = (lengths[self], list(tail))
        before = ghosts[self]
        return right_edits(self, [*before, *tail], len(before) + first)

    patch.setattr(LogitProcessors, "advance", advance)
    patch.setattr(LogitProcessors, "edits", edits)


class CarelessMatcher(GrammarMatcher):
    """Passes over what its constraint does not allow for, instead of ending the sequence with an error."""

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            with suppress(ConstraintError):
                super().advance([token_id])


class StepwiseMatcher(CarelessMatcher):
    def masks(self, tail: Sequence[int]) -> Masks:
        return np.repeat(super().masks([]), len(tail) + 1, axis=0)


class UnforgettingMatcher(CarelessMatcher):
    _tail: Sequence[int] = ()

    def masks(self, tail: Sequence[int]) -> Masks:
        self._tail = list(tail)
        return super().masks(tail)

    def advance(self, token_ids: Sequence[int]) -> None:
        judged = zip(self._tail, token_ids, strict=False)
        known = next((depth for depth, pair in enumerate(judged) if pair[0] != pair[1]), len(self._tail))
        super().advance([*self._tail, *token_ids[known:]])
        self._tail = ()


def mask_once_per_step(patch: pytest.MonkeyPatch) -> None:
    """6: all positions of a tail have the first one's mask."""
    patch.setattr(grammar, "GrammarMatcher", StepwiseMatcher)


def keep_masks_of_rejected_tokens(patch: pytest.MonkeyPatch) -> None:
    """6: a matcher stays where a tail took it when that was rejected."""
    patch.setattr(grammar, "GrammarMatcher", UnforgettingMatcher)


def process_last_row_only(patch: pytest.MonkeyPatch) -> None:
    """7: penalties, bias and bans reach only the row that a bonus token is drawn from."""
    right = LogitProcessors.edits

    def edits(self: LogitProcessors, tail: Sequence[int], first: int = 0) -> list[LogitEdit | None]:
        return [*[None] * (len(tail) - first), *right(self, tail, len(tail))]

    patch.setattr(LogitProcessors, "edits", edits)


def filter_last_row_only(patch: pytest.MonkeyPatch) -> None:
    """7: so do the filters."""
    right = ratio_verifier.process_logits

    def process(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        bare = [SamplingParams(temperature=item.temperature) for item in params[:-1]]
        return right(logits, [*bare, params[-1]])

    patch.setattr(ratio_verifier, "process_logits", process)


def verify_at_another_temperature(patch: pytest.MonkeyPatch) -> None:
    """8: a draft has the temperature that was asked for, and the target 1."""
    process, sample = ratio_verifier.process_logits, verifier.sample

    def at_one(params: Sequence[SamplingParams]) -> list[SamplingParams]:
        return [replace(item, temperature=1.0) for item in params]

    patch.setattr(ratio_verifier, "process_logits", lambda logits, params: process(logits, at_one(params)))
    patch.setattr(verifier, "sample", lambda law, params, *rest: sample(law, at_one(params), *rest))


# ---------------------------------------------------------------- where each is seen


@dataclass(frozen=True)
class Fault:
    inject: Inject
    filters: str
    """The setting that it biases (see ``laws.setting``), and its temperature."""
    temperature: float
    rules: tuple[str, ...] = ("standard", "block")
    """Those that it biases."""


EVERY_RULE = ("coupled", "standard", "block")

FAULTS: Final = {
    "1: unlikely tokens dropped": Fault(drop_unlikely_tokens, "top_k", 1.0),
    "2: current confidences": Fault(verify_what_is_sure, "top_k", 1.0),
    "3: draft's noise accepts": Fault(accept_by_draft_noise, "top_k", 1.0),
    "3: draft's noise replaces": Fault(replace_by_draft_noise, "top_k", 1.0),
    "4: replaced from the target": Fault(replace_from_target, "top_k", 1.0),
    "4: replaced from the next row": Fault(replace_from_next_row, "top_k", 1.0),
    "5: law before the filters": Fault(send_law_before_filters, "top_k", 1.0),
    "5: law before a narrow filter": Fault(send_law_before_filters, "top_2", 1.0),
    "6: once per step": Fault(penalise_once_per_step, "repetition", 1.0, EVERY_RULE),
    "6: rejected tokens count": Fault(remember_rejected_tokens, "frequency", 1.0, EVERY_RULE),
    "6: mask once per step": Fault(mask_once_per_step, "constraint", 1.0, EVERY_RULE),
    "6: mask of rejected tokens": Fault(keep_masks_of_rejected_tokens, "constraint", 1.0, EVERY_RULE),
    "7: edits of the last row only": Fault(process_last_row_only, "repetition", 1.0, EVERY_RULE),
    "7: filters of the last row only": Fault(filter_last_row_only, "top_p", 1.0),
    "8: another temperature": Fault(verify_at_another_temperature, "top_k", 0.5, EVERY_RULE),
}

HARMLESS: Final[dict[str, Inject]] = {
    "1": drop_by_token,
    "2": verify_by_tokens,
    "3: accepts": accept_by_draft_noise,
    "3: replaces": replace_by_draft_noise,
    "4": replace_from_target,
    "5": draft_without_filters,
}
"""The first five as they are under the coupled rule: no laws are sent, the draft's noise is the target's by
design, and no u or residual is drawn."""
