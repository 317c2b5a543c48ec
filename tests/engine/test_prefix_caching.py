"""The target with prefix caching: prompts are computed once, and no output ever changes by it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from paceline.actors.engine.config import NgramConfig, TargetEngineConfig
from paceline.actors.engine.emulated import EmulatedRunner
from paceline.actors.engine.loading import load_model
from paceline.actors.engine.messages import Cancel, Submit
from paceline.actors.engine.model_runner import TransformersRunner
from paceline.actors.engine.packed_linear import can_pack_linears
from paceline.actors.engine.parameters import FinishReason
from paceline.actors.engine.target_engine import TargetEngine
from tests.engine.fakes import HashLaw, HashRunner, Network, make_submit, reference
from tests.engine.models import noised, tiny_llama

CPU = torch.device("cpu")
LAW = HashLaw()
NOISED = HashLaw(noise=0.4)
NO_NGRAM = NgramConfig(enabled=False)


def engine_of(runner: HashRunner | None = None, **config: object) -> tuple[Network, HashRunner]:
    runner = runner or HashRunner()
    values = {"num_speculative_tokens": 4, "ngram": NO_NGRAM, **config}
    return Network(TargetEngine(runner, TargetEngineConfig(**values))), runner  # type: ignore[arg-type]


def run(network: Network, *events: Submit) -> None:
    for event in events:
        network.submit(event)
    network.run()


def check_end(network: Network, events: Sequence[Submit]) -> None:
    for event in events:
        key = (event.sequence_id, event.epoch)
        expected, reason = reference(LAW, event)
        assert network.gateway.completions[key] == expected, key
        assert network.gateway.finished[key].reason is reason
    network.settle_drafts()
    network.check()
    load = network.target.load()
    assert load.free_blocks == load.total_blocks
    for draft in network.drafts.values():
        snapshot = draft.snapshot()
        assert snapshot.num_free_blocks == snapshot.num_blocks


def cached(network: Network, sequence_id: str, epoch: int = 1) -> int:
    return network.gateway.finished[sequence_id, epoch].cached_prompt_tokens


def tokens_of(runner: HashRunner, since: int = 0) -> int:
    """Tokens computed."""
    return sum(count for batch in runner.batches[since:] for _, count in batch)


PROMPT = [index * 5 % 32 for index in range(42)]

# ---------------------------------------------------------------- hits


def test_second_request_computes_what_is_new() -> None:
    network, runner = engine_of()
    first, second = make_submit("a", PROMPT, max_tokens=5), make_submit("b", [*PROMPT[:30], 1, 2, 3])
    run(network, first)
    before = len(runner.batches)
    run(network, second)
    check_end(network, [first, second])
    # 30 common tokens are 7 full blocks of 4.
    assert runner.batches[before] == [(28, 5)]
    assert (cached(network, "a"), cached(network, "b")) == (0, 28)
    snapshot = network.target.snapshot()
    assert (snapshot.num_prefix_cache_queries_total, snapshot.num_prefix_cache_hits_total) == (42 + 33, 28)
    assert snapshot.num_cached_blocks > 0
    assert snapshot.free_blocks == snapshot.total_blocks


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 12])
def test_last_token_is_always_computed(length: int) -> None:
    network, runner = engine_of()
    events = [make_submit(name, PROMPT[:length], max_tokens=3) for name in "abc"]
    for event in events:
        before = len(runner.batches)
        run(network, event)
        start, count = runner.batches[before][0]
        assert start + count == length
        assert start == cached(network, event.sequence_id)
    check_end(network, events)
    assert cached(network, "c") == (length - 1) // 4 * 4


def test_chat_of_several_turns_finds_its_answers() -> None:
    network, runner = engine_of()
    network.join(NOISED)
    history = PROMPT[:10]
    for turn in range(4):
        event = make_submit(f"turn {turn}", history, max_tokens=21, temperature=1.0, seed=turn)
        before = tokens_of(runner)
        run(network, event)
        check_end(network, [event])
        if turn:
            # All of the turn before but its last tokens, which fill no block.
            assert cached(network, f"turn {turn}") >= len(history) - 3 - 4
            assert tokens_of(runner) - before < 21 * 5 + 9
        history = [*history, *network.gateway.completions[f"turn {turn}", 1], turn, turn, turn]


def test_resumed_sequence_finds_prompt_and_completion_but_counts_the_prompt() -> None:
    network, _ = engine_of()
    first = make_submit("a", PROMPT[:10], max_tokens=30, temperature=1.0, seed=3)
    run(network, first)
    whole = network.gateway.completions["a", 1]
    resumed = make_submit(
        "a", PROMPT[:10], completion=whole[:17], max_tokens=30, temperature=1.0, seed=3, epoch=2
    )
    run(network, resumed)
    check_end(network, [first, resumed])
    assert cached(network, "a", 2) == 10
    assert network.target.snapshot().num_prefix_cache_hits_total == 24


def test_switched_off_nothing_is_cached() -> None:
    network, runner = engine_of(enable_prefix_caching=False)
    events = [make_submit(name, PROMPT, max_tokens=5) for name in "ab"]
    run(network, *events)
    check_end(network, events)
    assert runner.batches[0] == [(0, 42), (0, 42)]
    snapshot = network.target.snapshot()
    assert snapshot.num_cached_blocks == snapshot.num_prefix_cache_queries_total == 0


def test_logits_that_are_no_law_are_not_found_again() -> None:
    poison = False

    class Poisoned(HashRunner):
        def forward(self, batch):  # type: ignore[no-untyped-def, override]
            logits = super().forward(batch)
            return logits * torch.nan if poison else logits

    network, _ = engine_of(Poisoned())
    other = make_submit("other", [7, *PROMPT], max_tokens=3)
    run(network, other)
    network.submit(make_submit("bad", PROMPT, max_tokens=30))
    network.step_target()
    assert network.target.snapshot().num_cached_blocks == 10 + 11
    poison = True
    network.step_target()
    assert network.gateway.finished["bad", 1].reason is FinishReason.ERROR
    poison = False
    assert network.target.snapshot().num_cached_blocks == 11
    again = [make_submit("again", PROMPT), make_submit("other again", [7, *PROMPT])]
    run(network, *again)
    check_end(network, [other, *again])
    assert (cached(network, "again"), cached(network, "other again")) == (0, 40)


# ---------------------------------------------------------------- together


def test_choices_of_one_prompt_compute_it_once() -> None:
    runner = EmulatedRunner.from_source(
        "emulated://m?vocab_size=512&base_ms=0&max_model_len=4096", num_blocks=700, block_size=16
    )
    counts: dict[bool, int] = {}
    outputs: dict[bool, object] = {}
    for enabled in (True, False):
        config = TargetEngineConfig(max_num_batched_tokens=512, ngram=NO_NGRAM, enable_prefix_caching=enabled)
        network = Network(TargetEngine(runner, config))
        prompt = [index * 7 % 512 for index in range(1000)]
        for index in range(8):
            network.submit(make_submit(f"c{index}", prompt, max_tokens=4, temperature=1.0, seed=index))
        network.run()
        counts[enabled] = network.target.snapshot().num_computed_tokens_total
        outputs[enabled] = network.gateway.completions
    # 62 full blocks once, the 8 tokens after them by each, and 3 tokens of each completion.
    assert counts == {True: 992 + 8 * (8 + 3), False: 8 * 1003}
    assert outputs[True] == outputs[False]


def test_burst_waits_for_the_part_that_is_being_computed() -> None:
    network, runner = engine_of(max_num_batched_tokens=64)
    events = [make_submit(f"s{index}", [*PROMPT[:41], index], max_tokens=6) for index in range(6)]
    for event in events:
        network.submit(event)
    assert (network.target.load().num_running, network.target.load().num_waiting) == (1, 5)
    stranger = make_submit("stranger", [9, 8, 7, 6, 5], max_tokens=6)
    network.submit(stranger)
    assert network.target.load().num_running == 2, "who shares nothing is not held up"
    network.step_target()
    assert network.target.load().num_running == 7
    network.run()
    check_end(network, [*events, stranger])
    assert [cached(network, f"s{index}") for index in range(6)] == [0, 40, 40, 40, 40, 40]
    assert tokens_of(runner) < 42 + 5 * 2 + 5 + 7 * 6


def test_long_shared_prompt_in_chunks_is_waited_for_to_its_end() -> None:
    network, _ = engine_of(max_num_batched_tokens=8, max_num_seqs=4)
    events = [make_submit(name, PROMPT, max_tokens=2) for name in "abc"]
    for event in events:
        network.submit(event)
    for _ in range(5):
        network.step_target()
        network.check()
    assert network.target.load().num_running == 3
    network.run()
    check_end(network, events)
    assert [cached(network, name) for name in "abc"] == [0, 40, 40]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_who_is_waited_for_goes(steps: int) -> None:
    network, runner = engine_of(max_num_batched_tokens=8, max_num_seqs=4)
    events = [make_submit(name, PROMPT, max_tokens=2) for name in "abc"]
    for event in events:
        network.submit(event)
    for _ in range(steps):
        network.step_target()
    network.target.cancel("gateway", Cancel("a", 1))
    network.pump_target()
    network.run()
    check_end(network, events[1:])
    assert cached(network, "b") == steps * 8, "what it has computed is found"
    assert cached(network, "c") == 40
    assert tokens_of(runner) == 42 + 2 + 2


# ---------------------------------------------------------------- everything at once


@pytest.mark.parametrize("seed", range(24))
def test_shared_prefixes_under_pressure(seed: int) -> None:
    rng = random.Random(seed)
    config = TargetEngineConfig(
        num_speculative_tokens=rng.choice([1, 4, None]),
        max_num_seqs=rng.choice([2, 4, 8]),
        max_num_batched_tokens=rng.choice([16, 64]),
        ngram=rng.choice([NO_NGRAM, NgramConfig(min_n=1, max_n=2)]),
    )
    network = Network(TargetEngine(HashRunner(num_blocks=rng.choice([16, 24, 40])), config), rng)
    roots = [[rng.randrange(32) for _ in range(rng.randint(5, 24))] for _ in range(2)]
    events: list[Submit] = []
    for index in range(14):
        prompt = [*rng.choice(roots), *[rng.randrange(2) for _ in range(rng.randint(0, 5))]]
        if events and rng.random() < 0.3:
            # A further turn of an earlier one.
            earlier = rng.choice(events)
            turn = [*earlier.token_ids, *reference(LAW, earlier)[0]]
            prompt = turn if len(turn) < 40 else prompt
        events.append(
            make_submit(
                f"s{index}",
                prompt,
                max_tokens=rng.randint(1, 18),
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.choice([1, 2]),
                stop_token_ids=(rng.randrange(32),),
            )
        )
    waiting, cancelled = events[::-1], set()
    for _ in range(4000):
        chance = rng.random()
        if waiting and chance < 0.08:
            network.submit(waiting.pop())
        elif chance < 0.1:
            event = rng.choice(events)
            key = (event.sequence_id, event.epoch)
            if event not in waiting and key not in network.gateway.finished and len(cancelled) < 4:
                cancelled.add(event.sequence_id)
                network.target.cancel("gateway", Cancel(event.sequence_id, event.epoch))
                network.pump_target()
        elif chance < 0.12 and len(network.drafts) < 2:
            network.join(rng.choice([LAW, NOISED]), num_blocks=rng.choice([20, 60]))
        elif chance < 0.125 and network.drafts:
            network.leave(rng.choice(list(network.drafts)))
        else:
            network.random_action()
        network.check()
        if not waiting and network.target.wait_seconds() is None:
            break
    network.run()
    check_end(network, [event for event in events if event.sequence_id not in cancelled])
    assert network.target.snapshot().num_prefix_cache_hits_total > 0


def test_a_small_pool_preempts_evicts_and_still_shares() -> None:
    network, _ = engine_of(HashRunner(num_blocks=14))
    network.join(NOISED, num_blocks=14)
    events = [
        make_submit(f"s{index}", [*PROMPT[:9], index], max_tokens=30 - index, temperature=1.0, seed=index)
        for index in range(8)
    ]
    run(network, *events)
    check_end(network, events)
    snapshot = network.target.snapshot()
    assert snapshot.num_preemptions_total > 0
    assert snapshot.num_prefix_cache_hits_total >= 7 * 8
    assert snapshot.num_cached_blocks <= 14


# ---------------------------------------------------------------- real models


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(
                not can_pack_linears(torch.bfloat16, CPU), reason="this processor has no bfloat16 kernels"
            ),
        ),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_of_a_model_are_the_same_cold_warm_and_without(
    tmp_path: Path, dtype: torch.dtype, temperature: float
) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path / "target")
    noised(model, 0.03).save_pretrained(tmp_path / "draft")

    def runner_of(name: str, num_blocks: int = 24) -> TransformersRunner:
        loaded = load_model(str(tmp_path / name), dtype, CPU, deterministic=True)
        return TransformersRunner(loaded, num_blocks=num_blocks, block_size=8, device=CPU)

    def requests(name: str) -> list[Submit]:
        rng = random.Random(5)
        root = [rng.randrange(256) for _ in range(67)]
        return [
            make_submit(
                f"{name} {index}",
                [*root, *[rng.randrange(256) for _ in range(index * 3)]],
                max_tokens=24,
                temperature=temperature,
                seed=index,
            )
            for index in range(4)
        ]

    def network_of(runner: TransformersRunner, *, enabled: bool) -> Network:
        config = TargetEngineConfig(
            max_num_batched_tokens=48,
            max_num_seqs=8,
            num_speculative_tokens=4,
            ngram=NO_NGRAM,
            enable_prefix_caching=enabled,
        )
        network = Network(TargetEngine(runner, config))
        network.target_vocab_size = 256
        return network

    def outputs(network: Network, name: str) -> list[list[int]]:
        return [network.gateway.completions[f"{name} {index}", 1] for index in range(4)]

    alone = network_of(runner_of("target"), enabled=False)
    for event in requests("solo"):
        run(alone, event)
    expected = outputs(alone, "solo")

    network = network_of(runner_of("target"), enabled=True)
    run(network, *requests("cold"))
    assert outputs(network, "cold") == expected
    # Rejected tails, a cancelled request and, with few blocks, preemptions touch the prefix.
    network.join_runner(runner_of("draft"), max_model_len=512)
    leaving = make_submit("leaving", requests("x")[3].token_ids, max_tokens=90, temperature=1.0, seed=99)
    network.submit(leaving)
    for _ in range(6):
        network.settle_drafts()
        network.step_target()
    network.target.cancel("gateway", Cancel("leaving", 1))
    network.pump_target()
    for name in ("warm", "drafted"):
        run(network, *requests(name))
        assert outputs(network, name) == expected, name
    assert sum(cached(network, f"drafted {index}") >= 64 for index in range(4)) >= 3
    snapshot = network.target.snapshot()
    assert snapshot.num_preemptions_total > 0
    assert 0 < snapshot.num_accepted_tokens_total < snapshot.num_draft_tokens_total
    assert snapshot.free_blocks == snapshot.total_blocks
