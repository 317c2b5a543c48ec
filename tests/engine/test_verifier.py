"""One step's verification: rows, positions and laws of every sequence, and what cannot be verified."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from paceline.actors.engine import sampling, verifier
from paceline.actors.engine.config import NgramConfig
from paceline.actors.engine.errors import ConstraintError
from paceline.actors.engine.parameters import (
    Constraint,
    ConstraintKind,
    SamplingParams,
    StoppingParams,
)
from paceline.actors.engine.processors import LogitProcessors
from paceline.actors.engine.proposer import NgramProposer
from paceline.actors.engine.scheduler import ScheduledSequence
from paceline.actors.engine.sequence import TargetSequence
from paceline.actors.engine.verification import Verification
from paceline.actors.engine.verifier import BAD_LOGITS, NO_TOKEN, Unverified, verify_step
from tests.engine.fakes import make_submit


class CountingMatcher:
    """Allows any token at the first ``length`` places of the completion and none after them. (A grammar would
    say that the text has ended; this one is at odds with itself.)"""

    def __init__(self, length: int) -> None:
        self.length = length
        self.used = 0

    def advance(self, token_ids: Sequence[int]) -> None:
        self.used += len(token_ids)
        if self.used > self.length:
            raise ConstraintError(f"the completion may have {self.length} tokens")

    def find_end(self, token_ids: Sequence[int]) -> int | None:
        return None

    def masks(self, tail: Sequence[int]) -> npt.NDArray[np.uint32]:
        rows = [0xFFFFFFFF if self.used + depth < self.length else 0 for depth in range(len(tail) + 1)]
        return np.array(rows, dtype=np.uint32)[:, None]


def scheduled(
    processors: LogitProcessors | None, tail: Sequence[int], completion: int = 0
) -> ScheduledSequence:
    event = make_submit(prompt=[5], completion=[8] * completion)
    sequence = TargetSequence.from_submit(
        "g", event, 8, NgramProposer(NgramConfig(enabled=False)), processors
    )
    return ScheduledSequence(sequence, len(event.token_ids) - 1, 1, tail)


def counting(length: int) -> LogitProcessors:
    params = SamplingParams(constraint=Constraint(ConstraintKind.REGEX, "."))
    found = LogitProcessors.create(params, StoppingParams(16), 1, 32, CountingMatcher(length))
    assert found is not None
    return found


def favouring(*token_ids: int) -> torch.Tensor:
    logits = torch.zeros(len(token_ids), 32)
    logits[torch.arange(len(token_ids)), torch.tensor(token_ids)] = 9.0
    return logits


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_an_end_inside_a_tail_counts_when_it_is_reached(length: int, num_right: int) -> None:
    """As without a tail: all tokens before the position where nothing is allowed, and then the error."""
    own = [11, 12, 13, 14]
    tail = [*own[:num_right], *[1] * (3 - num_right)]
    found = verify_step([scheduled(counting(length), tail)], favouring(*own))[0]
    num_tokens = min(length, num_right + 1)
    assert found == Verification(min(num_right, num_tokens - 1), tuple(own[:num_tokens]))
    at_end = verify_step([scheduled(counting(length), (), completion=length)], favouring(own[0]))[0]
    assert at_end == Unverified(NO_TOKEN, invalid_argument=True)


@pytest.mark.parametrize("vocab_size", [32, 9_000])
def test_no_dear_row_behind_a_rejected_token_is_drawn_from(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int
) -> None:
    """Depth by depth where rows are long or there is one sequence; all at once where they are short."""
    looked_at: list[list[int]] = []

    def sample(law: torch.Tensor, *wanted: Any) -> list[int]:
        looked_at.append(list(wanted[2]))
        return sampling.sample(law, *wanted)

    monkeypatch.setattr(verifier, "sample", sample)
    right = [5, 6, 7]
    logits = torch.zeros(12, vocab_size)
    logits[torch.arange(12), torch.tensor([5, 6, 7, 8] * 3)] = 9.0
    items = [scheduled(None, right), scheduled(None, [5, 1, 7]), scheduled(None, [1, 6, 7])]
    assert verify_step(items, logits) == [
        Verification(3, (5, 6, 7, 8)),
        Verification(1, (5, 6)),
        Verification(0, (5,)),
    ]
    depth_by_depth = [[0, 4, 8], [1, 5], [2], [3]]
    assert looked_at == (depth_by_depth if vocab_size > 8192 else [list(range(12))])
    looked_at.clear()
    assert verify_step(items[2:], logits[8:]) == [Verification(0, (5,))]
    assert looked_at == [[0]]


def test_a_completion_that_breaks_its_constraint() -> None:
    items = [scheduled(None, [1]), scheduled(counting(1), [2, 3], completion=2), scheduled(None, [])]
    found = verify_step(items, favouring(1, 2, 9, 9, 9, 4))
    assert found[0] == Verification(1, (1, 2))
    assert found[1] == Unverified("the completion may have 1 tokens", invalid_argument=True)
    assert found[2] == Verification(0, (4,))


@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_a_model_at_fault_is_not_taken_for_a_request_at_fault(fault: float) -> None:
    """Even where the bad logit belongs to a token that the request forbids."""
    params = SamplingParams(bad_token_ids=(3,))
    processors = LogitProcessors.create(params, StoppingParams(16), 1, 32)
    logits = favouring(1, 2)
    logits[1, 3] = fault
    item = scheduled(processors, [])
    assert verify_step([item], logits[1:]) == [Unverified(BAD_LOGITS)]
    # Not reached by this tail; reached by the next step.
    assert verify_step([scheduled(processors, [1])], logits) == [Verification(0, (1,))]


def test_an_edit_leaves_the_models_logits_alone() -> None:
    processors = LogitProcessors.create(SamplingParams(bad_token_ids=(1, 2)), StoppingParams(16), 1, 32)
    logits = favouring(1, 2)
    before = logits.clone()
    verify_step([scheduled(processors, [0])], logits)
    assert torch.equal(logits, before)


class OnDevice(torch.Tensor):
    """Logits that say to be on a GPU, so that the path of those is taken here."""

    class Device(str):
        type = "cuda"
        index = None

    @property
    def device(self) -> Any:  # type: ignore[override]
        return OnDevice.Device("cpu")


def test_logits_of_a_device_are_verified_like_those_of_the_host() -> None:
    generator = torch.Generator().manual_seed(1)
    lawless = 0
    for _ in range(60):
        logits = torch.randn(11, 24, generator=generator) * 3.0
        bad = torch.rand(11, generator=generator) < 0.2
        logits[bad] = math.nan
        tails = torch.randint(0, 24, (4, 3), generator=generator).tolist()
        best = logits.argmax(dim=1).tolist()
        tails[0] = best[:3]
        items = [scheduled(None, tail[: len(tail) - index]) for index, tail in enumerate(tails)]
        rows = logits[: sum(item.num_logits for item in items)]
        for index, item in enumerate(items):
            item.sequence.sampling = SamplingParams(temperature=float(index % 2), seed=index)
        found = verify_step(items, rows)
        assert verify_step(items, rows.as_subclass(OnDevice)) == found
        lawless += sum(isinstance(item, Unverified) for item in found)
    assert lawless > 20


def test_no_row_of_a_device_has_a_law() -> None:
    logits = torch.full((3, 32), math.nan).as_subclass(OnDevice)
    assert verify_step([scheduled(None, [4]), scheduled(None, [])], logits) == [Unverified(BAD_LOGITS)] * 2
