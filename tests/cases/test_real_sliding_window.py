"""A real model with a window: greedy output is plain generation's while tails cross the window's edge.

The engines are in this process and take turns, so that what is drafted and rejected is the same in every
run. What the service adds to them (tokenizers, streams) has nothing to do with windows, and takes a minute to
start with a vocabulary of this size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.config import NgramConfig, TargetEngineConfig
from paceline.actors.engine.loading import load_model
from paceline.actors.engine.model_runner import TransformersRunner
from paceline.actors.engine.target_engine import TargetEngine
from tests.cases.reference import Reference
from tests.cases.service import NO_LOOKUP
from tests.engine.fakes import Network, make_submit
from tests.engine.models import noised

pytestmark = [pytest.mark.weights, pytest.mark.heavy, pytest.mark.timeout(900)]

MODEL = "gemma-3-270m"
CPU = torch.device("cpu")
BLOCKS = {"num_blocks": 160, "block_size": 16}
NOISE = 0.05
BOUNDS = (2, 12)
NUM_TOKENS = 24
PLACES = (-12, 40)
"""Where prompts end: so many tokens before the first one that forgets one, or after it."""
TEXT = " ".join(
    f"At kilometre {number} rider {7 * number % 23} led the row for {number * number % 11 + 2} minutes."
    for number in range(1, 60)
)


@dataclass
class Tail:
    """Draft tokens that were verified."""

    start: int
    """Position of the first of them."""
    length: int
    num_accepted: int | None = None
    """None: its sequence ended with it."""


class WatchedRunner(TransformersRunner):
    """Remembers the tails of its steps."""

    def watch(self) -> list[Tail]:
        """The tails of the steps from now on."""
        self._tails: list[Tail] = []
        self._last: dict[int, Tail] = {}
        """By a sequence's first block."""
        return self._tails

    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        for piece in batch:
            sequence = piece.block_table[0]
            before = self._last.pop(sequence, None)
            if before is not None and before.start <= piece.start <= before.start + before.length:
                # It begins with the token that was committed last: the one after those that were accepted.
                before.num_accepted = piece.start - before.start
            if 1 < piece.num_logits == len(piece.token_ids):
                self._last[sequence] = Tail(piece.start + 1, len(piece.token_ids) - 1)
                self._tails.append(self._last[sequence])
        return super().forward(batch)


@dataclass(frozen=True)
class Gemma:
    """The real model: as plain ``transformers`` has it, and as a target."""

    plain: PreTrainedModel
    runner: WatchedRunner
    window: int
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def gemma(model_folder: Callable[[str], Path]) -> Gemma:
    folder = model_folder(MODEL)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    window = plain.config.sliding_window
    token_ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    assert len(token_ids) >= window + max(PLACES)
    prompts = [token_ids[: window + place] for place in PLACES]
    reference = Reference(plain)
    expected = [reference.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    target = load_model(str(folder), torch.float32, CPU)
    return Gemma(plain, WatchedRunner(target, device=CPU, **BLOCKS), window, prompts, expected)


def test_the_window_is_of_consequence(gemma: Gemma) -> None:
    """Or a target without one would pass."""
    blind = copy.deepcopy(gemma.plain)
    blind.config.sliding_window = blind.config.max_position_embeddings
    for layer in blind.model.layers:
        if layer.self_attn.sliding_window is not None:
            layer.self_attn.sliding_window = blind.config.sliding_window
    without = Reference(blind)
    assert without.greedy(gemma.prompts[0][:40], 1) == Reference(gemma.plain).greedy(gemma.prompts[0][:40], 1)
    assert without.greedy(gemma.prompts[1], NUM_TOKENS) != gemma.expected[1]


@pytest.mark.parametrize("draft", ["equal", "noised", "lookup"])
def test_greedy_is_plain_generation(gemma: Gemma, draft: str) -> None:
    """B06 on real weights, in float32: the draft has the same weights, or noised ones, or looks for what
    followed before. Tails reach across the window's edge and past it, and are cut back there."""
    lookup = NgramConfig(min_n=1, num_tokens=max(BOUNDS)) if draft == "lookup" else NO_LOOKUP
    config = TargetEngineConfig(num_speculative_tokens=max(BOUNDS), ngram=lookup, enable_prefix_caching=False)
    tails = gemma.runner.watch()
    network = Network(TargetEngine(gemma.runner, config))
    network.target_vocab_size = gemma.runner.vocab_size
    if draft != "lookup":
        model = noised(gemma.plain, NOISE) if draft == "noised" else gemma.plain
        proposer = TransformersRunner(model, device=CPU, deterministic=False, **BLOCKS)
        network.join_runner(proposer, max_model_len=proposer.max_model_len)
    for index, prompt in enumerate(gemma.prompts):
        for bound in BOUNDS:
            network.submit(
                make_submit(f"{index} {bound}", prompt, max_tokens=NUM_TOKENS, num_speculative_tokens=bound)
            )
    network.run()
    for index, expected in enumerate(gemma.expected):
        for bound in BOUNDS:
            assert network.gateway.completions[f"{index} {bound}", 1] == expected
    across = [tail for tail in tails if tail.start < gemma.window < tail.start + tail.length]
    rejected = [tail for tail in tails if tail.num_accepted not in (None, tail.length)]
    print(f"{draft}: {len(tails)} tails, {len(across)} across, {len(rejected)} cut back: {tails}")
    assert across
    if draft == "equal":
        assert not rejected
        assert sum(tail.length for tail in tails) > NUM_TOKENS
    else:
        assert any(tail.num_accepted for tail in tails)
        assert any(tail.start > gemma.window for tail in rejected)
        assert any(tail in across for tail in rejected)
