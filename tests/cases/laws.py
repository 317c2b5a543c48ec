"""Exact laws of the first tokens, by enumeration, and how far what a service says is from them.

The law is made of plain ``transformers`` logits and the plain processors of ``naive``: nothing of what is
tested takes part in it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from scipy import stats
from transformers import PreTrainedModel

from paceline.protos import generation_pb2 as proto
from tests.cases.naive import NaiveLaw
from tests.cases.reference import Reference
from tests.cases.service import Answer, Service
from tests.cases.test_choices import stream_choices
from tests.engine.models import noised, tiny_llama
from tests.integration.tiny_models import BYTE_ALPHABET

PROMPT = (7, 3, 9)
LENGTH = 3
"""Tokens whose joint law is tested. The first comes of the prompt, before any draft could be; the others are
accepted, corrected and bonus tokens."""
BOUNDS = (1, 2, 4, 4)
"""Longest tails, by seed: with 1 the third token often is a bonus token."""
NUM_CHOICES = 50
"""Of a request. They come at the same time, so that most have a draft from their second token on."""
NUM_REQUESTS = 2
"""At a time."""
MIN_EXPECTED = 5.0
"""Cells that expect fewer are counted together."""
LOUDNESS, ECHO = 4.0, 0.6
"""How much of a token passes through the model, and how much of that is for saying it again."""
NOISE = 0.1
"""Of the draft."""

Path = tuple[int, ...]
JointLaw = Mapping[Path, float]


def echoing_llama() -> PreTrainedModel:
    """A tiny Llama that is inclined to say a token twice, so that penalties have something to do."""
    model = tiny_llama(num_hidden_layers=1)
    embeddings = model.model.embed_tokens.weight
    with torch.no_grad():
        model.lm_head.weight.add_(ECHO * embeddings)
        embeddings.mul_(LOUDNESS)
    return model


def draft_of(model: PreTrainedModel) -> PreTrainedModel:
    """Agrees with it in two tokens of three: the overlap of their laws is near 0.65."""
    return noised(model, NOISE)


# ---------------------------------------------------------------- the law

FILTERS = (
    "top_k",
    "top_2",
    "top_p",
    "min_p",
    "repetition",
    "presence",
    "frequency",
    "bias",
    "bad",
    "constraint",
    "all",
)
TEMPERATURES = (0.5, 1.0, 2.0)

PLACES = "[!-~][0-9a-z][!-~][0-9a-z]*"
"""A constraint whose mask is another one at each of the first places, and any later one at the third would be
the wrong one. What is allowed at the second place is allowed at all others: whoever takes its mask for
another's says nothing that is forbidden."""


def allowed_at(completion: Sequence[int]) -> list[int]:
    """Token ids that may come next under ``PLACES``."""
    anywhere = {letter: index for index, letter in enumerate(BYTE_ALPHABET) if "!" <= letter <= "~"}
    if len(completion) in (0, 2):
        return list(anywhere.values())
    return [token_id for letter, token_id in anywhere.items() if letter.isdigit() or letter.islower()]


def setting(name: str, temperature: float, reference: Reference) -> NaiveLaw:
    """Parameters by name, each with top-k 4 if not of its own. What is biased or banned is what is said most
    often without."""
    plain = joint_law(reference, NaiveLaw(temperature=1.0, top_k=4))
    often = [token_id for token_id, _ in expected_counts(plain).most_common(4)]
    # The same distance of two logits at any temperature.
    min_p = round(math.exp(-0.9 / temperature), 3)
    options: dict[str, dict[str, Any]] = {
        "top_k": {},
        "top_2": {"top_k": 2},
        "top_p": {"top_p": 0.8},
        "min_p": {"min_p": min_p},
        "repetition": {"repetition_penalty": 1.5},
        "presence": {"presence_penalty": 1.5},
        "frequency": {"frequency_penalty": -1.5},
        "bias": {"logit_bias": {often[0]: -1.5, often[1]: 1.0, often[2]: -100.0}},
        "bad": {"bad_token_ids": often[:2]},
        "constraint": {"constraint": proto.Constraint(regex=PLACES), "allowed": allowed_at},
    }
    everything: dict[str, Any] = {
        "top_p": 0.95,
        "min_p": round(math.exp(-1.8 / temperature), 3),
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 1.0,
        "logit_bias": {often[1]: -0.5},
        "bad_token_ids": often[:1],
    }
    chosen = everything if name == "all" else options[name]
    return NaiveLaw(**{"temperature": temperature, "top_k": 4} | chosen)


def joint_law(reference: Reference, law: NaiveLaw) -> JointLaw:
    """Of the first ``LENGTH`` tokens after ``PROMPT``; without those that never come."""
    found: dict[Path, float] = {(): 1.0}
    for _ in range(LENGTH):
        found = {
            (*path, token_id): chance * float(next_chance)
            for path, chance in found.items()
            for token_id, next_chance in enumerate(
                law.probabilities(reference.logits([*PROMPT, *path]), PROMPT, path)
            )
            if next_chance > 0.0
        }
    return found


def expected_counts(law: JointLaw) -> Counter[int]:
    """How often each token is among the first, on average."""
    counts: Counter[int] = Counter()
    for path, chance in law.items():
        for token_id in path:
            counts[token_id] += chance  # type: ignore[assignment]
    return counts


def total_variation(one: JointLaw, other: JointLaw) -> float:
    return 0.5 * sum(abs(one.get(path, 0.0) - other.get(path, 0.0)) for path in {*one, *other})


def z_score(paths: Sequence[Path], law: JointLaw) -> float:
    """Chi-square of the counts as a standard normal number (Wilson and Hilferty, "The distribution of
    chi-square", 1931). Infinite where something was said that cannot be."""
    counts = Counter(paths)
    if set(counts) - set(law):
        return math.inf
    cells: list[tuple[float, float]] = []
    rare = (0.0, 0.0)
    for path, chance in law.items():
        cell = (chance * len(paths), float(counts[path]))
        if cell[0] < MIN_EXPECTED:
            rare = (rare[0] + cell[0], rare[1] + cell[1])
        else:
            cells.append(cell)
    cells.sort()
    if 0.0 < rare[0] < MIN_EXPECTED:
        cells[0] = (cells[0][0] + rare[0], cells[0][1] + rare[1])
    elif rare[0] > 0.0:
        cells.append(rare)
    degrees = len(cells) - 1
    assert degrees > 0, "one outcome alone shows nothing"
    chi_square = stats.chisquare([count for _, count in cells], [expected for expected, _ in cells]).statistic
    spread = 2.0 / (9.0 * degrees)
    return float((math.cbrt(chi_square / degrees) - (1.0 - spread)) / math.sqrt(spread))


# ---------------------------------------------------------------- what the service says


@dataclass
class Drawn:
    """The first tokens of many seeds, and what drafts had to do with them."""

    paths: list[Path] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    num_early: int = 0
    """Accepted tokens among the first ``LENGTH``."""

    @property
    def num_rejected(self) -> int:
        return self.num_drafted - self.num_accepted

    def add(self, answer: Answer) -> None:
        self.paths.append(tuple(answer.token_ids[:LENGTH]))
        self.num_drafted += answer.speculation.draft_tokens
        self.num_accepted += answer.speculation.accepted_tokens
        self.num_early += sum(answer.accepted[:LENGTH])


def sampled(seed: int, bounds: Sequence[int] = BOUNDS) -> dict[str, Any]:
    """Long enough for tails in the second round too: a step does not wait for drafts where a sequence has no
    room left for any."""
    bound = bounds[seed % len(bounds)]
    return {
        "token_ids": PROMPT,
        "seed": seed,
        "n": NUM_CHOICES,
        "max_tokens": LENGTH + bound + 1,
        "num_speculative_tokens": bound,
    }


async def draw(
    service: Service,
    rule: proto.VerificationRule,
    law: NaiveLaw,
    num_seeds: int,
    bounds: Sequence[int] = BOUNDS,
) -> Drawn:
    """Choices of requests with seeds 1, 2, …: each has a seed of its own (``noise.derive_seed``)."""
    drawn = Drawn()
    seeds = range(1, num_seeds // NUM_CHOICES + 1)
    for start in range(0, len(seeds), NUM_REQUESTS):
        requests = [
            law.options | sampled(seed, bounds) | {"verification": rule}
            for seed in seeds[start : start + NUM_REQUESTS]
        ]
        for answers in await asyncio.gather(*(stream_choices(service, **options) for options in requests)):
            for answer in answers:
                drawn.add(answer)
    return drawn
