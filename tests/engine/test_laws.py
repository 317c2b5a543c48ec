"""Both engines together, statistically: under every rule and every filter the first tokens have exactly the
target's law, and the same test notices each of the usual ways to get it wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from paceline.actors.engine import draft_sampling, draft_sequence, ratio_verifier, verification
from paceline.actors.engine.config import NgramConfig, TargetEngineConfig
from paceline.actors.engine.draft_law import SparseLaw
from paceline.actors.engine.messages import Submit
from paceline.actors.engine.noise import FloatArray, Purpose
from paceline.actors.engine.parameters import (
    SamplingParams,
    SpeculationParams,
    StoppingParams,
    VerificationRule,
)
from paceline.actors.engine.sampling import process_logits
from paceline.actors.engine.target_engine import TargetEngine
from tests.engine.fakes import HashRunner, Network

VOCAB_SIZE = 8
LENGTH = 3
"""Tokens whose joint law is tested; sequences go on after them, so that tails reach past."""
PROMPT = (1, 2)
COUPLED, STANDARD, BLOCK = VerificationRule
BATCH = 250


@lru_cache(maxsize=100_000)
def _logits(context: tuple[int, ...], draft: bool) -> np.ndarray:
    """Four likely tokens, and a history that matters. The draft's are off by about one nat."""
    rng = np.random.default_rng([*context, 77])
    logits = np.full(VOCAB_SIZE, -7.0)
    logits[rng.permutation(VOCAB_SIZE)[:4]] = np.array([1.6, 1.1, 0.6, 0.0]) + rng.normal(0.0, 0.3, 4)
    if draft:
        logits = logits + rng.normal(0.0, 1.0, VOCAB_SIZE)
    return logits.astype(np.float32)


@dataclass(frozen=True)
class TinyLaw:
    draft: bool = False
    vocab_size: int = VOCAB_SIZE

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        return _logits(tuple(token_ids[len(PROMPT) :]), self.draft)


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The definition of the filters, one after the other, each on what the one before left."""
    law = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    order = sorted(range(len(law)), key=lambda token: (-logits[token], token))
    law[law < params.min_p] = 0.0
    for token in order[params.top_k or len(order) :]:
        law[token] = 0.0
    law /= law.sum()
    before = 0.0
    for token in order:
        if before >= params.top_p:
            law[token] = 0.0
        before += law[token]
    return law / law.sum()


def joint_law(params: SamplingParams) -> dict[tuple[int, ...], float]:
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        law = {
            (*path, token): chance * float(next_chance)
            for path, chance in law.items()
            for token, next_chance in enumerate(probabilities(_logits(path, draft=False), params))
            if next_chance > 0.0
        }
    return law


@dataclass
class Drawn:
    tokens: list[tuple[int, ...]]
    num_accepted: int
    num_drafted: int

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_drafted

    def z_score(self, params: SamplingParams) -> float:
        """Chi-square against the enumerated law, rare outcomes together (Wilson–Hilferty)."""
        counts, total = Counter(self.tokens), len(self.tokens)
        law = joint_law(params)
        if set(counts) - set(law):
            return math.inf
        cells, rare = [], [0.0, 0]
        for path, chance in law.items():
            if chance * total < 5.0:
                rare[0] += chance * total
                rare[1] += counts[path]
            else:
                cells.append((chance * total, counts[path]))
        if rare[0] > 0.0:
            cells.append((rare[0], int(rare[1])))
        chi_square = sum((count - expected) ** 2 / expected for expected, count in cells)
        degrees = len(cells) - 1
        spread = 2 / (9 * degrees)
        return (math.cbrt(chi_square / degrees) - (1 - spread)) / math.sqrt(spread)


def draw(
    rule: VerificationRule,
    params: SamplingParams,
    num_sequences: int,
    *,
    gamma: int = 3,
    num_drafts: int = 1,
    run_ahead: bool = False,
    ngram: bool = False,
) -> Drawn:
    """``num_sequences`` seeds through a target and its drafts, in batches."""
    tokens: list[tuple[int, ...]] = []
    num_accepted = num_drafted = 0
    for start in range(0, num_sequences, BATCH):
        count = min(BATCH, num_sequences - start)
        config = TargetEngineConfig(
            num_speculative_tokens=gamma,
            max_num_seqs=BATCH,
            ngram=NgramConfig(enabled=ngram, min_n=1, max_n=1),
        )
        network = Network(TargetEngine(HashRunner(TinyLaw(), num_blocks=4 * BATCH), config))  # type: ignore[arg-type]
        network.target_vocab_size = VOCAB_SIZE
        for _ in range(num_drafts):
            network.join(TinyLaw(draft=True), capacity=BATCH, num_blocks=8 * BATCH)  # type: ignore[arg-type]
        for seed in range(start, start + count):
            network.submit(
                Submit(
                    sequence_id=str(seed),
                    epoch=1,
                    token_ids=PROMPT,
                    prompt_length=len(PROMPT),
                    sampling=replace(params, seed=seed),
                    stopping=StoppingParams(LENGTH + gamma),
                    speculation=SpeculationParams(rule=rule),
                )
            )
        _run(network, run_ahead=run_ahead, until=LENGTH)
        tokens.extend(tuple(completion[:LENGTH]) for completion in network.gateway.completions.values())
        snapshot = network.target.snapshot()
        num_accepted += snapshot.num_accepted_tokens_total
        num_drafted += snapshot.num_draft_tokens_total
    return Drawn(tokens, num_accepted, num_drafted)


def _run(network: Network, *, run_ahead: bool, until: int) -> None:
    """Lock-step; or with drafts a step or two behind, so that late chains are met."""
    for turn in range(200):
        if all(len(completion) >= until for completion in network.gateway.completions.values()):
            return
        if not run_ahead:
            network.settle_drafts()
        else:
            for peer in list(network.drafts):
                if (turn + len(peer)) % 3 == 0:
                    continue
                while network.to_draft[peer]:
                    network.deliver_to_draft(peer)
                for _ in range(2):
                    network.step_draft(peer)
                while network.to_target[peer]:
                    network.deliver_to_target(peer)
        network.step_target()
    raise AssertionError("it does not come to an end")


FILTERS = {
    "plain": SamplingParams(),
    "top-k": SamplingParams(top_k=2),
    "top-p": SamplingParams(top_p=0.7),
    "min-p": SamplingParams(min_p=0.25),
    "all": SamplingParams(top_k=4, top_p=0.9, min_p=0.1),
}
TEMPERATURES = (0.5, 1.0, 2.0)


class TestExact:
    @pytest.mark.parametrize("rule", VerificationRule)
    @pytest.mark.parametrize(("name", "temperature"), [("plain", 1.0), ("all", 2.0), ("top-k", 0.5)])
    def test_first_tokens(self, rule: VerificationRule, name: str, temperature: float) -> None:
        params = replace(FILTERS[name], temperature=temperature)
        drawn = draw(rule, params, 1000)
        assert 0.2 < drawn.acceptance < 0.95, "nothing would be tested"
        assert abs(drawn.z_score(params)) < 4

    @pytest.mark.parametrize("rule", [STANDARD, BLOCK])
    def test_late_drafts_and_lookups(self, rule: VerificationRule) -> None:
        params = SamplingParams()
        drawn = draw(rule, params, 1000, num_drafts=2, run_ahead=True, ngram=True)
        assert drawn.num_accepted > 0
        assert abs(drawn.z_score(params)) < 4

    @pytest.mark.heavy
    @pytest.mark.parametrize("rule", VerificationRule)
    @pytest.mark.parametrize("name", FILTERS)
    @pytest.mark.parametrize("temperature", TEMPERATURES)
    @pytest.mark.parametrize("run_ahead", [False, True])
    def test_every_filter_and_temperature(
        self, rule: VerificationRule, name: str, temperature: float, run_ahead: bool
    ) -> None:
        params = replace(FILTERS[name], temperature=temperature)
        drawn = draw(rule, params, 4000, gamma=4, run_ahead=run_ahead, num_drafts=1 + run_ahead)
        assert drawn.num_accepted > 0
        assert abs(drawn.z_score(params)) < 4

    @pytest.mark.heavy
    def test_block_accepts_more_than_standard(self) -> None:
        params = SamplingParams()
        standard, block = (draw(rule, params, 4000, gamma=4) for rule in (STANDARD, BLOCK))
        assert block.acceptance > standard.acceptance


# ---------------------------------------------------------------- known ways to get it wrong


def _reuse_draft_noise(patch: pytest.MonkeyPatch) -> None:
    """The draft's draw, u and the residual's draw are one number per position."""
    patch.setattr(ratio_verifier, "round_seed", lambda seed, epoch, base: seed)
    patch.setattr(draft_sequence, "revision_seed", lambda draft_seed, revision: _SEEDS[draft_seed])
    patch.setattr("paceline.actors.engine.drafts.stay_seed", _remember_seed)
    same = Purpose.TOKEN
    uniform, integer = ratio_verifier.uniform, draft_sampling.random_integer
    patch.setattr(ratio_verifier, "uniform", lambda seed, position, _: uniform(seed, position, same))
    patch.setattr(draft_sampling, "random_integer", lambda seed, position, _: integer(seed, position, same))


_SEEDS: dict[int, int] = {}


def _remember_seed(seed: int, epoch: int, stay: int) -> int:
    _SEEDS[seed + 1] = seed
    return seed + 1


def _replace_from_target(patch: pytest.MonkeyPatch) -> None:
    right = verification.residual

    def residual(law: FloatArray, scale: float, q: SparseLaw) -> FloatArray:
        # Judging never asks with scale 1, so it stays right.
        return law if scale == 1.0 else right(law, scale, q)

    patch.setattr(verification, "residual", residual)


def _replace_from_next_row(patch: pytest.MonkeyPatch) -> None:
    right = verification.verify_ratio

    def verify(rule, tail, target, draft, uniforms, *last):  # type: ignore[no-untyped-def]
        found = right(rule, tail, target, draft, uniforms, *last)
        kept = found.num_accepted
        if kept == len(tail):
            return found
        weights = verification.residual(target[kept + 1], 1.0, draft[kept])
        token = verification.pick(weights if weights.any() else target[kept + 1], last[0])
        return replace(found, token_ids=(*found.token_ids[:-1], token))

    patch.setattr(ratio_verifier, "verify_ratio", verify)


def _law_before_filters(patch: pytest.MonkeyPatch) -> None:
    """What is sent is the draft's law without the filters that it drew with."""
    right = draft_sampling.quantize_law
    unfiltered: list[FloatArray] = []

    def process(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        bare = [SamplingParams(temperature=wanted.temperature) for wanted in params]
        unfiltered.extend(process_logits(logits, bare).numpy())
        return process_logits(logits, params)

    draw_right = draft_sampling.draw_token

    def quantize(log_weights: FloatArray):  # type: ignore[no-untyped-def]
        filtered, sent = right(log_weights), right(unfiltered.pop(0))
        drawn_from[id(sent)] = (sent, filtered)
        return sent

    drawn_from: dict[int, tuple[object, object]] = {}
    patch.setattr(draft_sampling, "process_logits", process)
    patch.setattr(draft_sampling, "quantize_law", quantize)
    patch.setattr(
        draft_sampling, "draw_token", lambda law, number: draw_right(drawn_from.pop(id(law))[1], number)
    )


def _filters_on_the_last_row_only(patch: pytest.MonkeyPatch) -> None:
    def process(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        bare = [SamplingParams(temperature=wanted.temperature) for wanted in params[:-1]]
        return process_logits(logits, [*bare, params[-1]])

    patch.setattr(ratio_verifier, "process_logits", process)


def _another_temperature(patch: pytest.MonkeyPatch) -> None:
    def process(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        return process_logits(logits, [replace(item, temperature=1.0) for item in params])

    patch.setattr(ratio_verifier, "process_logits", process)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], SamplingParams, int]] = {
    "3: draft's noise reused": (_reuse_draft_noise, SamplingParams(), 1000),
    "4: replaced from the target": (_replace_from_target, SamplingParams(), 2000),
    "4: replaced from the next row": (_replace_from_next_row, SamplingParams(), 500),
    "5: law before the filters": (_law_before_filters, SamplingParams(top_k=2), 2000),
    "7: filters on the bonus row only": (_filters_on_the_last_row_only, SamplingParams(top_k=3), 500),
    "8: another temperature": (_another_temperature, SamplingParams(temperature=0.5), 500),
}
"""With the parameters and the number of sequences that show it."""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rule", [STANDARD, BLOCK])
def test_faults_are_noticed(rule: VerificationRule, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inject, params, num_sequences = FAULTS[fault]
    inject(monkeypatch)
    assert draw(rule, params, num_sequences).z_score(params) > 5
