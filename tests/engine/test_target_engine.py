"""The target engine: whatever drafts do, and whenever, what is committed is the target's own sampling."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from paceline.actors.engine.config import NgramConfig, TargetEngineConfig
from paceline.actors.engine.messages import Cancel, Candidates, Decline, Submit
from paceline.actors.engine.parameters import (
    FinishReason,
    SamplingParams,
    SpeculationParams,
    StoppingParams,
)
from paceline.actors.engine.target_engine import TargetEngine
from tests.engine.fakes import HashLaw, HashRunner, Network, hello, make_submit, reference

TARGET = HashLaw()
PERFECT = TARGET
NOISED = HashLaw(noise=0.4)
UNRELATED = HashLaw(noise=1.0)
NO_NGRAM = NgramConfig(enabled=False)


def make_network(
    config: TargetEngineConfig | None = None,
    *,
    law: HashLaw = TARGET,
    num_blocks: int = 256,
    max_model_len: int = 256,
    seed: int = 0,
) -> Network:
    runner = HashRunner(law, num_blocks=num_blocks, max_model_len=max_model_len)
    engine = TargetEngine(runner, config or TargetEngineConfig(ngram=NO_NGRAM))
    return Network(engine, random.Random(seed))


def check_end(network: Network, law: HashLaw, events: Sequence[Submit]) -> None:
    """All ended as the reference says, and nothing is left behind."""
    for event in events:
        key = (event.sequence_id, event.epoch)
        expected, reason = reference(law, event)
        assert network.gateway.completions[key] == expected, key
        finished = network.gateway.finished[key]
        assert finished.reason is reason
        assert finished.speculation.accepted_tokens == sum(network.gateway.accepted[key])
        assert finished.speculation.accepted_tokens <= finished.speculation.draft_tokens
    network.check()
    load = network.target.load()
    assert load.free_blocks == load.total_blocks
    assert (load.num_running, load.num_waiting, load.num_pending_tokens) == (0, 0, 0)
    assert network.target.wait_seconds() is None
    network.settle_drafts()
    for draft in network.drafts.values():
        snapshot = draft.snapshot()
        assert snapshot.num_sequences == 0, "a draft was not told of the end"
        assert snapshot.num_free_blocks == snapshot.num_blocks


def mixed_events(count: int, *, max_tokens: int = 20, seed: int = 0, stops: bool = True) -> list[Submit]:
    rng = random.Random(seed)
    return [
        make_submit(
            f"s{index}",
            [rng.randrange(32) for _ in range(rng.randint(1, 17))],
            max_tokens=rng.randint(1, max_tokens),
            temperature=rng.choice([0.0, 1.0, 0.6]),
            seed=rng.getrandbits(64),
            stop_token_ids=(rng.randrange(32),) if stops else (),
            min_tokens=0,
        )
        for index in range(count)
    ]


# ---------------------------------------------------------------- output equality


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 4, 8, None])
@pytest.mark.parametrize(
    "law", [None, PERFECT, NOISED, UNRELATED], ids=["none", "perfect", "noised", "unrelated"]
)
def test_output_does_not_depend_on_the_draft(law: HashLaw | None, num_tokens: int | None) -> None:
    network = make_network(TargetEngineConfig(num_speculative_tokens=num_tokens, ngram=NO_NGRAM))
    if law is not None:
        network.join(law)
    # A stop token inside a tail leaves verified tokens unaccepted, however good the draft is.
    events = mixed_events(8, stops=law is not PERFECT)
    for event in events:
        network.submit(event)
    network.run()
    check_end(network, TARGET, events)
    snapshot = network.target.snapshot()
    if law is None or num_tokens == 0:
        assert snapshot.num_draft_tokens_total == 0
    elif law is PERFECT:
        assert snapshot.num_accepted_tokens_total == snapshot.num_draft_tokens_total > 0
    elif num_tokens is not None:
        assert snapshot.num_draft_tokens_total - snapshot.num_accepted_tokens_total > 0


@pytest.mark.parametrize("seed", range(40))
def test_random_lateness_departures_and_hostile_messages(seed: int) -> None:
    rng = random.Random(seed)
    config = TargetEngineConfig(
        num_speculative_tokens=rng.choice([1, 2, 4, 8, None]),
        max_num_seqs=rng.choice([2, 4, 16]),
        max_num_batched_tokens=rng.choice([16, 64]),
        ngram=rng.choice([NO_NGRAM, NgramConfig(min_n=1, max_n=2)]),
    )
    network = make_network(config, num_blocks=rng.choice([14, 20, 64]), seed=seed)
    events = mixed_events(6, seed=seed)
    waiting = list(events)
    for _ in range(3000):
        chance = rng.random()
        if waiting and chance < 0.1:
            network.submit(waiting.pop())
        elif chance < 0.12 and len(network.drafts) < 3:
            network.join(
                rng.choice([PERFECT, NOISED, UNRELATED]),
                capacity=rng.choice([1, 3, 8]),
                max_model_len=rng.choice([12, 256]),
            )
        elif chance < 0.13 and network.drafts:
            network.leave(rng.choice(list(network.drafts)))
        elif chance < 0.16 and network.seen_candidates:
            # A message of the past, as it was or twisted, from whatever draft is there.
            _, old = rng.choice(network.seen_candidates)
            twisted = Candidates(
                old.sequence_id,
                old.epoch + rng.choice([0, 0, -1, 1]),
                max(0, old.base_position + rng.choice([0, 0, -2, 1, 50])),
                old.token_ids * rng.choice([1, 1, 20]) + rng.choice([(), (), (-1,), (32,)]),
                max(0, old.revision + rng.choice([0, 0, -1, 1])),
            )
            if network.drafts:
                network.target.candidates(rng.choice(list(network.drafts)), [twisted], 0.01)
                network.pump_target()
        else:
            network.random_action()
        network.check()
        if not waiting and network.target.wait_seconds() is None:
            break
    network.run()
    check_end(network, TARGET, events)


def test_perfect_draft_accepts_everything_and_flags_it() -> None:
    network = make_network(TargetEngineConfig(num_speculative_tokens=4, ngram=NO_NGRAM))
    network.join(PERFECT)
    event = make_submit(max_tokens=64, temperature=1.0, seed=7)
    network.submit(event)
    network.run()
    check_end(network, TARGET, [event])
    stats = network.gateway.finished[("s", 1)].speculation
    assert stats.accepted_tokens == stats.draft_tokens
    assert stats.accepted_per_position[0] == stats.rounds
    # 64 tokens: one of the prefill, then rounds of at most 5; the last ones are cut short by the border.
    assert stats.rounds <= 14
    assert network.gateway.accepted[("s", 1)].count(True) == stats.accepted_tokens


def test_window_zero_requests_are_never_opened() -> None:
    network = make_network(TargetEngineConfig(num_speculative_tokens=4, ngram=NO_NGRAM))
    peer = network.join(PERFECT)
    event = make_submit(num_speculative_tokens=0)
    network.submit(event)
    network.run()
    check_end(network, TARGET, [event])
    assert network.drafts[peer].snapshot().num_drafted_tokens_total == 0
    assert network.gateway.finished[("s", 1)].speculation.draft_tokens == 0


def test_requests_own_bound_holds() -> None:
    runner_batches: list[int] = []
    runner = HashRunner(
        on_forward=lambda batch: runner_batches.extend(len(i.token_ids) for i in batch if i.start)
    )
    network = Network(TargetEngine(runner, TargetEngineConfig(num_speculative_tokens=8, ngram=NO_NGRAM)))
    network.join(PERFECT)
    event = make_submit(max_tokens=40, num_speculative_tokens=2)
    network.submit(event)
    network.run()
    check_end(network, TARGET, [event])
    assert max(runner_batches) == 3


def test_sequence_outgrows_its_draft() -> None:
    network = make_network(TargetEngineConfig(num_speculative_tokens=4, ngram=NO_NGRAM))
    peer = network.join(PERFECT, max_model_len=20)
    events = [make_submit("short", max_tokens=60), make_submit("long", range(21), max_tokens=10)]
    for event in events:
        network.submit(event)
    network.run()
    check_end(network, TARGET, events)
    assert network.gateway.finished[("short", 1)].speculation.accepted_tokens > 0
    assert network.gateway.finished[("long", 1)].speculation.draft_tokens == 0
    assert network.drafts[peer].snapshot().num_declines_total == 0


# ---------------------------------------------------------------- stopping and borders


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_max_tokens_smaller_than_the_tail(max_tokens: int) -> None:
    network = make_network(TargetEngineConfig(num_speculative_tokens=8, ngram=NO_NGRAM))
    network.join(PERFECT)
    event = make_submit(max_tokens=max_tokens)
    network.submit(event)
    network.run()
    check_end(network, TARGET, [event])
    assert len(network.gateway.completions[("s", 1)]) == max_tokens


@pytest.mark.parametrize("offset", range(12))
def test_stop_token_inside_a_round(offset: int) -> None:
    tokens, _ = reference(TARGET, make_submit(max_tokens=30))
    event = make_submit(max_tokens=30, stop_token_ids=[tokens[offset]])
    network = make_network(TargetEngineConfig(num_speculative_tokens=8, ngram=NO_NGRAM))
    network.join(PERFECT)
    network.submit(event)
    network.run()
    check_end(network, TARGET, [event])
    assert network.gateway.finished[("s", 1)].reason is FinishReason.STOP
    assert network.gateway.completions[("s", 1)][-1] == tokens[offset]
    assert tokens[offset] not in network.gateway.completions[("s", 1)][:-1]


def test_no_stop_token_is_drawn_before_min_tokens() -> None:
    tokens, _ = reference(TARGET, make_submit(max_tokens=30))
    event = make_submit(max_tokens=30, stop_token_ids=tokens[:9], min_tokens=7)
    network = make_network(TargetEngineConfig(num_speculative_tokens=4, ngram=NO_NGRAM))
    network.join(PERFECT)
    network.submit(event)
    network.run()
    check_end(network, TARGET, [event])
    completion = network.gateway.completions[("s", 1)]
    assert len(completion) > 7
    assert set(tokens[:9]).isdisjoint(completion[:7])


@pytest.mark.parametrize("num_tokens", [1, 4, 8])
def test_exactly_to_the_models_length(num_tokens: int) -> None:
    network = make_network(
        TargetEngineConfig(num_speculative_tokens=num_tokens, ngram=NO_NGRAM), max_model_len=32, num_blocks=8
    )
    network.join(PERFECT)
    event = make_submit(prompt=range(8), max_tokens=24)
    network.submit(event)
    network.run()
    check_end(network, TARGET, [event])


# ---------------------------------------------------------------- blocks


@pytest.mark.parametrize("law", [PERFECT, UNRELATED], ids=["perfect", "unrelated"])
def test_tiny_pool_preempts_and_everything_finishes(law: HashLaw) -> None:
    network = make_network(TargetEngineConfig(num_speculative_tokens=4, ngram=NO_NGRAM), num_blocks=10)
    network.join(law)
    events = [
        make_submit(f"s{i}", range(i, i + 4), max_tokens=36 - i, temperature=1.0, seed=i) for i in range(4)
    ]
    for event in events:
        network.submit(event)
    network.run()
    check_end(network, TARGET, events)
    assert network.target.snapshot().num_preemptions_total > 0


def test_long_prompt_does_not_stall_decoding() -> None:
    runner = HashRunner()
    network = Network(TargetEngine(runner, TargetEngineConfig(max_num_seqs=4, max_num_batched_tokens=16)))
    first = make_submit("first", max_tokens=30)
    second = make_submit("second", [i % 32 for i in range(100)], max_tokens=3)
    network.submit(first)
    network.step_target()
    network.submit(second)
    for _ in range(5):
        before = len(network.gateway.completions[("first", 1)])
        network.step_target()
        assert len(network.gateway.completions[("first", 1)]) > before
        assert sum(count for _, count in runner.batches[-1]) <= 16
    assert network.gateway.completions[("second", 1)] == []
    network.run()
    check_end(network, TARGET, [first, second])


# ---------------------------------------------------------------- refusals, cancellation, faults


def finished_of(network: Network, sequence_id: str = "s", epoch: int = 1):  # type: ignore[no-untyped-def]
    return network.gateway.finished[(sequence_id, epoch)]


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (make_submit(prompt=[]), "token_ids"),
        (make_submit(prompt=[1, 32]), "token_ids"),
        (make_submit(prompt=[1, -1]), "token_ids"),
        (make_submit(prompt=range(10), max_tokens=247), "max_tokens"),
        (Submit("s", 1, (1,), 2, SamplingParams(), StoppingParams(4), SpeculationParams()), "prompt_length"),
    ],
)
def test_wrong_requests_are_refused_by_field(event: Submit, field: str) -> None:
    network = make_network()
    network.submit(event)
    assert finished_of(network).reason is FinishReason.ERROR
    assert finished_of(network).invalid_argument
    assert field in finished_of(network).error
    assert network.target.wait_seconds() is None


def test_request_larger_than_the_pool_is_refused_naming_the_limit() -> None:
    network = make_network(num_blocks=5)
    network.submit(make_submit(prompt=[1], max_tokens=20))
    assert finished_of(network).invalid_argument
    assert "20 tokens" in finished_of(network).error
    fits = make_submit("fits", prompt=[1], max_tokens=19)
    network.submit(fits)
    network.run()
    check_end(network, TARGET, [fits])


def test_full_queue_and_draining() -> None:
    network = make_network(TargetEngineConfig(max_num_seqs=1, max_num_waiting=1))
    kept = [make_submit("a"), make_submit("b")]
    for event in kept:
        network.submit(event)
    network.submit(make_submit("c"))
    assert finished_of(network, "c").resource_exhausted
    network.target.start_draining()
    assert network.target.load().draining
    network.run()
    network.submit(make_submit("d"))
    assert finished_of(network, "d").reason is FinishReason.CANCELLED, "given back, not refused"
    check_end(network, TARGET, kept)


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("how", ["cancel", "gateway_left"])
def test_cancel_at_every_stage(steps: int, how: str) -> None:
    network = make_network(
        TargetEngineConfig(num_speculative_tokens=4, max_num_batched_tokens=64, ngram=NO_NGRAM)
    )
    network.join(NOISED)
    other = make_submit("other", max_tokens=40)
    network.gateway.submitted(other)
    network.target.submit("gateway", other)
    victim = make_submit("victim", [i % 32 for i in range(150)], max_tokens=60)
    network.gateway.submitted(victim)
    network.target.submit("second", victim)
    for _ in range(steps):
        network.settle_drafts()
        network.step_target()
    if how == "cancel":
        network.target.cancel("stranger", Cancel("victim", 1))
        network.target.cancel("second", Cancel("victim", 0))
        assert network.target.load().num_running == 2
        network.target.cancel("second", Cancel("victim", 1))
        network.target.cancel("second", Cancel("victim", 1))
    else:
        network.target.gateway_left("second")
    network.pump_target()
    network.run()
    assert (("victim", 1) in network.gateway.finished) == (how == "cancel")
    check_end(network, TARGET, [other])


def test_cancel_while_waiting_and_preempted() -> None:
    network = make_network(TargetEngineConfig(max_num_seqs=1, ngram=NO_NGRAM))
    first = make_submit("a")
    network.submit(first)
    network.submit(make_submit("b"))
    network.target.cancel("gateway", Cancel("b", 1))
    network.pump_target()
    assert finished_of(network, "b").reason is FinishReason.CANCELLED
    network.run()
    check_end(network, TARGET, [first])


def test_newer_epoch_replaces_and_older_is_dropped() -> None:
    network = make_network(TargetEngineConfig(num_speculative_tokens=4, ngram=NO_NGRAM))
    network.join(PERFECT)
    network.submit(make_submit(epoch=1))
    network.step_target()
    again = make_submit(epoch=3)
    network.submit(again)
    network.submit(make_submit(epoch=2))
    network.run()
    check_end(network, TARGET, [again])
    assert ("s", 1) not in network.gateway.finished
    assert ("s", 2) not in network.gateway.finished


@pytest.mark.parametrize("held", [0, 1, 5, 15, 16])
def test_resumed_sequence_goes_on_to_the_same_end(held: int) -> None:
    whole, _ = reference(TARGET, make_submit(temperature=1.0, seed=5))
    network = make_network()
    event = make_submit(temperature=1.0, seed=5, completion=whole[:held], epoch=2)
    network.submit(event)
    network.run()
    assert network.gateway.completions[("s", 2)] == whole
    assert finished_of(network, epoch=2).reason is FinishReason.LENGTH


def test_resumed_at_its_stop_token_ends_at_once() -> None:
    network = make_network()
    network.submit(make_submit(completion=[9, 4], stop_token_ids=[4], max_tokens=8))
    assert finished_of(network).reason is FinishReason.STOP


def test_runner_exception_ends_its_batch_and_is_reported() -> None:
    runner = HashRunner()
    network = Network(TargetEngine(runner, TargetEngineConfig(num_speculative_tokens=2, ngram=NO_NGRAM)))
    network.join(PERFECT)
    network.submit(make_submit("a"))
    network.step_target()

    def broken(_: object) -> None:
        raise RuntimeError("device lost")

    runner.on_forward = broken
    network.step_target()
    end = finished_of(network, "a")
    assert end.reason is FinishReason.ERROR
    assert "device lost" not in end.error
    assert not end.invalid_argument
    assert "device lost" in network.target.fault
    assert network.target.snapshot().fault
    network.check()
    assert network.target.load().free_blocks == network.target.load().total_blocks
    assert network.target.wait_seconds() is None


@pytest.mark.parametrize(
    ("columns", "value"),
    [
        (slice(None), math.nan),
        (slice(5, 6), math.nan),
        (slice(5, 6), math.inf),
        (slice(None), -math.inf),
    ],
)
def test_a_row_without_a_law_ends_only_its_sequence(columns: slice, value: float) -> None:
    class Poisoned(HashRunner):
        def forward(self, batch):  # type: ignore[no-untyped-def, override]
            logits = super().forward(batch)
            row = 0
            for item in batch:
                if 31 in item.token_ids[:1] and item.num_logits:
                    logits[row, columns] = value
                row += item.num_logits
            return logits

    network = Network(TargetEngine(Poisoned(), TargetEngineConfig(ngram=NO_NGRAM)))
    good = make_submit("good", max_tokens=1)
    network.submit(good)
    network.submit(make_submit("bad", prompt=[31, 1]))
    network.run()
    assert finished_of(network, "bad").reason is FinishReason.ERROR
    assert network.target.fault == ""
    check_end(network, TARGET, [good])


# ---------------------------------------------------------------- drafts come, go and misbehave


def held_counts(network: Network) -> list[int]:
    return [status.num_sequences for status in network.target.snapshot().drafts]


def test_sequences_spread_move_and_come_back() -> None:
    network = make_network(TargetEngineConfig(num_speculative_tokens=2, ngram=NO_NGRAM))
    events = [make_submit(f"s{i:02}", [i, i + 1], max_tokens=60) for i in range(16)]
    for event in events:
        network.submit(event)
    network.step_target()
    first = network.join(PERFECT)
    assert held_counts(network) == [16]
    network.join(PERFECT)
    assert held_counts(network) == [8, 8]
    network.join(NOISED)
    assert sorted(held_counts(network)) == [5, 5, 6]
    for _ in range(3):
        network.settle_drafts()
        network.step_target()
    network.leave(first)
    assert held_counts(network) == [8, 8]
    network.run()
    check_end(network, TARGET, events)
    for event in events:
        assert finished_of(network, event.sequence_id).speculation.accepted_tokens > 0


def test_waiting_sequences_take_the_room_that_others_leave() -> None:
    network = make_network(TargetEngineConfig(num_speculative_tokens=2, ngram=NO_NGRAM))
    network.join(PERFECT, capacity=1)
    events = [make_submit("a", max_tokens=8), make_submit("b", [4, 5], max_tokens=60)]
    for event in events:
        network.submit(event)
    network.run()
    check_end(network, TARGET, events)
    assert finished_of(network, "b").speculation.accepted_tokens > 0


def test_decline_is_not_asked_again() -> None:
    network = make_network(TargetEngineConfig(num_speculative_tokens=2, ngram=NO_NGRAM))
    network.target.draft_joined("one", hello("one"))
    network.gateway.submitted(make_submit(max_tokens=20))
    network.target.submit("gateway", make_submit(max_tokens=20))
    assert len(network.target.take_outbox().drafts["one"].opens) == 1
    network.target.decline("one", Decline("s", 1, "full"))
    for _ in range(4):
        network.target.step()
        assert not network.target.take_outbox().drafts
    network.target.draft_joined("two", hello("two"))
    assert len(network.target.take_outbox().drafts["two"].opens) == 1
    network.target.check_invariants()


def test_impossible_token_quarantines_the_sequence_not_the_draft() -> None:
    target = TargetEngine(HashRunner(), TargetEngineConfig(num_speculative_tokens=2, ngram=NO_NGRAM))
    target.draft_joined("d", hello())
    for name in ("a", "b"):
        target.submit("gateway", make_submit(name, max_tokens=20))
    assert len(target.take_outbox().drafts["d"].opens) == 2
    target.step()
    target.take_outbox()
    target.candidates("d", [Candidates("a", 1, 4, (1, 32), 0), Candidates("b", 1, 4, (1, 2), 0)], 0.01)
    outbox = target.take_outbox()
    assert [close.sequence_id for close in outbox.drafts["d"].closes] == ["a"]
    target.step()
    outbox = target.take_outbox()
    assert [verdict.sequence_id for verdict in outbox.drafts["d"].verdicts] == ["b"]
    assert not outbox.drafts["d"].opens
    assert target.snapshot().num_quarantined_total == 1


def test_verdicts_continue_exactly_and_tell_what_was_accepted() -> None:
    target = TargetEngine(HashRunner(), TargetEngineConfig(num_speculative_tokens=4, ngram=NO_NGRAM))
    target.draft_joined("d", hello())
    event = make_submit(max_tokens=30)
    whole, _ = reference(TARGET, event)
    target.submit("gateway", event)
    opened = target.take_outbox().drafts["d"].opens[0]
    assert opened.token_ids == event.token_ids
    assert opened.window >= 4
    target.step()
    verdict = target.take_outbox().drafts["d"].verdicts[0]
    assert (verdict.base_position, verdict.committed_token_ids) == (3, (whole[0],))
    # Two right, then a wrong one; late by one position.
    wrong = (whole[3] + 1) % 32
    target.candidates("d", [Candidates("s", 1, 3, (*whole[:3], wrong, 0), 0)], 0.01)
    target.step()
    verdict = target.take_outbox().drafts["d"].verdicts[0]
    assert verdict.base_position == 4
    assert verdict.num_accepted == 2
    assert verdict.committed_token_ids == tuple(whole[1:4])
    # The dead revision is not heard any more, the next one is.
    target.candidates("d", [Candidates("s", 1, 7, (whole[4],), 0)], 0.01)
    target.candidates("d", [Candidates("s", 1, 7, (whole[4], whole[5]), 1)], 0.01)
    target.step()
    verdict = target.take_outbox().drafts["d"].verdicts[0]
    assert verdict.num_accepted == 2
    assert verdict.committed_token_ids == tuple(whole[4:7])
    assert target.snapshot().num_stale_messages_total == 1


# ---------------------------------------------------------------- prompt lookup


def test_lookup_helps_where_text_repeats_and_never_changes_it() -> None:
    law = HashLaw(order=1)
    network = make_network(TargetEngineConfig(num_speculative_tokens=4), law=law)
    event = make_submit(max_tokens=120)
    network.submit(event)
    network.run()
    check_end(network, law, [event])
    snapshot = network.target.snapshot()
    assert snapshot.num_accepted_lookup_tokens_total > 40
    assert snapshot.num_steps_total < 80
