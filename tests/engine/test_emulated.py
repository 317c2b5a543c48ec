from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.emulated import FLOOR, EmulatedLaw, EmulatedModel, EmulatedRunner
from paceline.actors.engine.errors import ModelError


def _pairs(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 4000, count), generator.integers(0, 1024, count)


def _runner(query: str = "") -> EmulatedRunner:
    return EmulatedRunner.from_source(f"emulated://tiny?{query}", num_blocks=64, block_size=16)


def test_source_is_read_and_written_alike() -> None:
    text = "emulated://big?vocab_size=2048&base_ms=20&free_tokens=32&per_token_ms=0.05&acceptance=0.8&seed=3"
    model = EmulatedModel.from_source(text + "&support=4&max_model_len=512")
    assert model == EmulatedModel("big", 2048, 20.0, 32, 0.05, 0.8, 3, 0, 4, 512, 0.8)
    assert EmulatedModel.from_source(model.source) == model
    assert EmulatedModel.from_source("emulated://small") == EmulatedModel("small")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("emulated://m?speed=3", "unknown key 'speed'"),
        ("emulated://m?seed=1&seed=2", "'seed' is given twice"),
        ("emulated://m?vocab_size=1.5", "vocab_size must be a whole number"),
        ("emulated://m?vocab_size=", "vocab_size must be a whole number"),
        ("emulated://m?base_ms=fast", "base_ms must be a number"),
        ("emulated://m?base_ms=nan", "base_ms must be a number"),
        ("emulated://m?base_ms=-1", "base_ms must be a number in 0"),
        ("emulated://m?acceptance=1.2", "acceptance must be a number in 0 … 1"),
        ("emulated://m?near=-1", "near must be a number in 0 … 1"),
        ("emulated://m?vocab_size=10&support=6", "support must be in 1 … 5"),
        ("emulated://m?seed=-1", "seed must be an unsigned"),
        ("emulated://m?max_model_len=0", "max_model_len must be 1 or more"),
        ("emulated://m?seed", "key=value"),
        ("emulated://m/path?seed=1", "is written emulated://"),
        ("http://m?seed=1", "is written emulated://"),
    ],
)
def test_wrong_sources_are_refused_by_name(source: str, message: str) -> None:
    with pytest.raises(ModelError, match=message.replace("?", r"\?")):
        EmulatedModel.from_source(source)


def test_rows_have_distinct_support_and_a_floor() -> None:
    logits = EmulatedLaw(EmulatedModel(vocab_size=1000, support=8)).logits(*_pairs(500))
    above = logits > FLOOR
    assert (above.sum(-1) == 8).all()
    for row, mask in zip(logits, above, strict=True):
        assert len(set(row[mask].tolist())) == 8
    assert torch.isfinite(logits).all()
    assert logits.softmax(-1)[~above].max() < 1e-12


def test_law_depends_on_seed_position_and_token() -> None:
    law = EmulatedLaw(EmulatedModel())
    base = law.logits(np.array([7]), np.array([5]))
    assert torch.equal(base, law.logits(np.array([7]), np.array([5])))
    assert not torch.equal(base, law.logits(np.array([8]), np.array([5])))
    assert not torch.equal(base, law.logits(np.array([7]), np.array([6])))
    assert not torch.equal(base, EmulatedLaw(EmulatedModel(seed=1)).logits(np.array([7]), np.array([5])))


def test_first_tokens_are_spread_over_the_vocabulary() -> None:
    winners = EmulatedLaw(EmulatedModel(vocab_size=64)).logits(*_pairs(6400)).argmax(-1)
    counts = torch.bincount(winners, minlength=64).double()
    chi_square = ((counts - 100) ** 2 / 100).sum().item()
    # 63 degrees of freedom: mean 63, standard deviation 11.2.
    assert chi_square < 63 + 5 * 11.2


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
def test_a_draft_equals_the_target_where_it_accepts_and_is_disjoint_elsewhere(acceptance: float) -> None:
    positions, tokens = _pairs(4000)
    target = EmulatedLaw(EmulatedModel(vocab_size=999)).logits(positions, tokens)
    draft = EmulatedLaw(EmulatedModel(vocab_size=999, acceptance=acceptance, near=0.0)).logits(
        positions, tokens
    )
    same = (target == draft).all(-1)
    disjoint = ~((target > FLOOR) & (draft > FLOOR)).any(-1)
    assert (same ^ disjoint).all()
    spread = (acceptance * (1 - acceptance) / 4000) ** 0.5
    assert abs(same.double().mean().item() - acceptance) <= 4 * spread


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_a_draft_is_wrong_the_target_s_choice_is_mostly_among_its_next_three(
    temperature: float,
) -> None:
    positions, tokens = _pairs(4000)
    target = EmulatedLaw(EmulatedModel()).logits(positions, tokens)
    law = EmulatedLaw(EmulatedModel(acceptance=0.0))
    assert law.differs(positions, tokens).all()
    noise = temperature * -torch.log(-torch.log(torch.rand(target.shape, generator=torch.manual_seed(1))))
    choices = (target + noise).argmax(-1)
    ranks = (law.logits(positions, tokens) + noise).topk(4).indices
    shares = (ranks == choices[:, None]).double().mean(0)
    assert shares[0] < 0.001
    for share, expected in zip(shares[1:].tolist(), (0.5, 0.2, 0.1), strict=True):
        assert abs(share - expected) < 4 * (expected * (1 - expected) / 4000) ** 0.5


def test_two_drafts_differ_from_the_target_at_their_own_places() -> None:
    positions, tokens = _pairs(4000)
    one = EmulatedLaw(EmulatedModel(acceptance=0.5)).differs(positions, tokens)
    other = EmulatedLaw(EmulatedModel(acceptance=0.5, draft_seed=1)).differs(positions, tokens)
    assert 0.45 < (one != other).mean() < 0.55


def test_forward_returns_the_wanted_rows_in_order() -> None:
    runner = _runner()
    batch = [
        SequenceSlice([3, 4, 5], 10, [0], 2),
        SequenceSlice([6, 7], 0, [1], 0),
        SequenceSlice([8], 20, [2, 3], 1),
    ]
    logits = runner.forward(batch)
    expected = EmulatedLaw(runner.model).logits(np.array([11, 12, 20]), np.array([4, 5, 8]))
    assert torch.equal(logits, expected)
    assert runner.forward([SequenceSlice([1], 0, [0], 0)]).shape == (0, 1024)
    assert runner.forward([]).shape == (0, 1024)


@pytest.mark.parametrize(
    "piece",
    [
        SequenceSlice([], 0, [0], 0),
        SequenceSlice([1], -1, [0], 0),
        SequenceSlice([1], 4096, [0] * 400, 0),
        SequenceSlice([1], 0, [0], 2),
        SequenceSlice([1] * 17, 0, [0], 1),
        SequenceSlice([1024], 0, [0], 1),
    ],
)
def test_forward_refuses_broken_slices(piece: SequenceSlice) -> None:
    with pytest.raises(ValueError, match=r"batch\[0\]|token id"):
        _runner().forward([piece])


def test_step_time_is_slept_less_what_was_spent() -> None:
    slept: list[float] = []
    model = EmulatedModel.from_source("emulated://m?base_ms=1000&free_tokens=4&per_token_ms=100")
    runner = EmulatedRunner(model, num_blocks=4, block_size=16, sleep=slept.append)
    began = time.monotonic()
    runner.forward([SequenceSlice([1] * 4, 0, [0], 1)])
    spent = time.monotonic() - began
    runner.forward([SequenceSlice([1] * 4, 0, [0], 1), SequenceSlice([1] * 3, 0, [1], 1)])
    assert 1.0 - spent <= slept[0] < 1.0
    assert 1.2 < slept[1] < 1.3
    assert runner.step_seconds(7) == pytest.approx(1.3)


def test_no_time_means_no_sleep() -> None:
    slept: list[float] = []
    runner = EmulatedRunner(EmulatedModel(), num_blocks=4, block_size=16, sleep=slept.append)
    runner.forward([SequenceSlice([1], 0, [0], 1)])
    assert slept == []


def test_another_process_computes_the_same_law() -> None:
    program = (
        "import numpy as np, hashlib\n"
        "from paceline.actors.engine.emulated import EmulatedLaw, EmulatedModel\n"
        "law = EmulatedLaw(EmulatedModel(acceptance=0.5, seed=2**64 - 1))\n"
        "logits = law.logits(np.arange(64), np.arange(64))\n"
        "print(hashlib.sha256(logits.numpy().tobytes()).hexdigest())\n"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0]) == 65
