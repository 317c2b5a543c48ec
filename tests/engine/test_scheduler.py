"""The scheduler and the pure decisions around it: budgets, blocks, stopping, chains, assignment."""

from __future__ import annotations

import random

import pytest

from paceline.actors.engine.balance import Occupancy, even_out
from paceline.actors.engine.blocks import BlockManager
from paceline.actors.engine.chain import DraftChain, Received
from paceline.actors.engine.config import NgramConfig, TargetEngineConfig
from paceline.actors.engine.drafts import assign
from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.parameters import FinishReason, StoppingParams
from paceline.actors.engine.proposer import NgramProposer
from paceline.actors.engine.scheduler import Plan, Scheduler
from paceline.actors.engine.sequence import SequenceStatus, TargetSequence
from paceline.actors.engine.stopping import find_stop
from tests.engine.fakes import make_submit


def make(name: str, length: int, max_tokens: int = 100) -> TargetSequence:
    event = make_submit(name, [1] * length, max_tokens=max_tokens)
    return TargetSequence.from_submit("gateway", event, 8, NgramProposer(NgramConfig()))


def scheduler_of(
    num_blocks: int, lengths: list[int], *, max_num_seqs: int = 8, budget: int = 32, block_size: int = 4
) -> tuple[Scheduler, list[TargetSequence], BlockManager]:
    blocks = BlockManager(num_blocks, block_size)
    scheduler = Scheduler(blocks, max_num_seqs, budget)
    sequences = [make(f"s{i}", length) for i, length in enumerate(lengths)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.admit()
    return scheduler, sequences, blocks


def computed(plan: Plan) -> dict[str, tuple[int, int, int]]:
    """(start, known tokens, tail tokens) per sequence."""
    return {
        item.sequence.sequence_id: (item.start, item.num_tokens, len(item.tail)) for item in plan.scheduled
    }


def decoding(sequence: TargetSequence) -> None:
    sequence.num_computed_tokens = len(sequence.token_ids) - 1


# ---------------------------------------------------------------- the gap


def test_decode_first_then_prompts_in_chunks() -> None:
    scheduler, (first, _, _), _ = scheduler_of(100, [5, 50, 9], budget=16)
    decoding(first)
    plan = scheduler.schedule({first: [7, 7, 7]})
    assert computed(plan) == {"s0": (4, 1, 3), "s1": (0, 12, 0)}
    assert plan.num_tokens == 16
    rows = {item.sequence.sequence_id: item.num_logits for item in plan.scheduled}
    assert rows == {"s0": 4, "s1": 0}
    assert list(plan.scheduled[0].to_slice().token_ids) == [1, 7, 7, 7]


def test_last_chunk_wants_one_row() -> None:
    scheduler, (only,), _ = scheduler_of(100, [20], budget=16)
    assert computed(scheduler.schedule({})) == {"s0": (0, 16, 0)}
    only.num_computed_tokens = 16
    plan = scheduler.schedule({})
    assert computed(plan) == {"s0": (16, 4, 0)}
    assert plan.scheduled[0].num_logits == 1


def test_tails_do_not_starve_prompts_nor_the_reverse() -> None:
    scheduler, sequences, _ = scheduler_of(100, [5, 5, 5, 40], budget=16)
    for sequence in sequences[:3]:
        decoding(sequence)
    plan = scheduler.schedule({sequence: [7] * 8 for sequence in sequences[:3]})
    assert computed(plan) == {"s0": (4, 1, 2), "s1": (4, 1, 2), "s2": (4, 1, 2), "s3": (0, 7, 0)}


def test_budget_of_one_token_each() -> None:
    scheduler, sequences, _ = scheduler_of(100, [5, 5, 5, 5], budget=4, max_num_seqs=4)
    for sequence in sequences[:3]:
        decoding(sequence)
    plan = scheduler.schedule({sequence: [7] * 8 for sequence in sequences[:3]})
    assert computed(plan) == {"s0": (4, 1, 0), "s1": (4, 1, 0), "s2": (4, 1, 0), "s3": (0, 1, 0)}


# ---------------------------------------------------------------- admission and blocks


def test_admission_is_first_come_first_served() -> None:
    scheduler, sequences, _ = scheduler_of(10, [8, 40, 4])
    assert scheduler.running == [sequences[0]]
    assert list(scheduler.waiting) == sequences[1:], "a small one does not overtake"
    scheduler.remove(sequences[0])
    assert scheduler.admit() == [sequences[1]], "alone it fits to the last block"
    scheduler.remove(sequences[1])
    assert scheduler.admit() == [sequences[2]]


def test_max_num_seqs() -> None:
    scheduler, sequences, _ = scheduler_of(100, [4] * 5, max_num_seqs=3)
    assert scheduler.running == sequences[:3]


def test_tails_are_shortened_before_anything_is_preempted() -> None:
    scheduler, (first, second), blocks = scheduler_of(5, [7, 7])
    decoding(first)
    decoding(second)
    plan = scheduler.schedule({first: [7] * 6, second: [7] * 6})
    assert plan.preempted == []
    # 7 tokens fill 2 blocks but for a slot; the one free block goes to the elder.
    assert computed(plan) == {"s0": (6, 1, 5), "s1": (6, 1, 1)}
    assert blocks.num_free_blocks == 0


def test_latest_admitted_is_preempted_never_the_oldest() -> None:
    scheduler, sequences, blocks = scheduler_of(7, [8, 4, 4])
    for sequence in sequences:
        decoding(sequence)
    assert scheduler.running == sequences
    sequences[0].token_ids.extend([1] * 12)
    decoding(sequences[0])
    sequences[1].token_ids.append(1)
    decoding(sequences[1])
    plan = scheduler.schedule({})
    assert plan.preempted == [sequences[2]]
    assert scheduler.running == sequences[:2]
    assert sequences[2].status is SequenceStatus.WAITING
    assert sequences[2].num_computed_tokens == 0
    assert sequences[2].block_table == []
    late = make("late", 4)
    scheduler.add(late)
    assert list(scheduler.waiting) == [sequences[2], late], "it keeps its place"
    assert blocks.num_free_blocks == 0


def test_several_preempted_keep_their_order() -> None:
    scheduler, sequences, _ = scheduler_of(8, [4, 4, 4])
    sequences[0].token_ids.extend([1] * 27)
    decoding(sequences[0])
    plan = scheduler.schedule({})
    assert plan.preempted == [sequences[2], sequences[1]]
    assert list(scheduler.waiting) == [sequences[1], sequences[2]]
    assert computed(plan) == {"s0": (30, 1, 0)}


def test_remove_frees_wherever_it_is() -> None:
    scheduler, sequences, blocks = scheduler_of(100, [4, 4, 4], max_num_seqs=2)
    for sequence in sequences:
        scheduler.remove(sequence)
        assert sequence.status is SequenceStatus.FINISHED
    assert blocks.num_free_blocks == 100


# ---------------------------------------------------------------- stopping


@pytest.mark.parametrize("seed", range(30))
def test_find_stop_equals_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    max_tokens = rng.randint(1, 12)
    stopping = StoppingParams(max_tokens, rng.randint(0, max_tokens), frozenset(rng.sample(range(6), 2)))
    token_ids = [rng.randrange(6) for _ in range(rng.randint(1, 9))]
    before = rng.randrange(max_tokens)
    kept, reason = 0, None
    for token_id in token_ids:
        kept += 1
        if token_id in stopping.stop_token_ids and before + kept > stopping.min_tokens:
            reason = FinishReason.STOP
        elif before + kept == max_tokens:
            reason = FinishReason.LENGTH
        if reason:
            break
    assert find_stop(token_ids, before, stopping) == (kept, reason)


def test_stop_token_in_the_last_place_is_a_stop() -> None:
    assert find_stop([4], 0, StoppingParams(1, 0, frozenset([4]))) == (1, FinishReason.STOP)


# ---------------------------------------------------------------- chains


COMMITTED = [1, 2, 3]


def test_chain_grows_and_advances() -> None:
    chain = DraftChain()
    assert chain.receive(0, 3, [4, 5], COMMITTED, 8) is Received.KEPT
    assert chain.receive(0, 5, [6], COMMITTED, 8) is Received.KEPT
    assert chain.advance([4, 5]) == 2
    assert chain.token_ids == [6]
    assert chain.receive(0, 4, [5, 6, 7], [*COMMITTED, 4, 5], 8) is Received.KEPT
    assert chain.token_ids == [6, 7]


def test_late_chain_is_trimmed_against_what_was_committed() -> None:
    chain = DraftChain()
    assert chain.receive(0, 1, [2, 3, 4], COMMITTED, 8) is Received.KEPT
    assert chain.token_ids == [4]
    assert chain.receive(0, 1, [2, 3], COMMITTED, 8) is Received.KNOWN


def test_once_it_differs_the_revision_is_dead() -> None:
    chain = DraftChain()
    assert chain.receive(0, 2, [9, 4], COMMITTED, 8) is Received.DIFFERS
    assert chain.receive(0, 3, [4], COMMITTED, 8) is Received.STALE
    assert chain.receive(1, 3, [4], COMMITTED, 8) is Received.KEPT
    assert chain.advance([5]) == 0
    assert chain.token_ids == []
    assert chain.receive(1, 4, [6], [*COMMITTED, 5], 8) is Received.STALE
    assert chain.receive(0, 4, [6], [*COMMITTED, 5], 8) is Received.STALE
    assert chain.receive(2, 4, [6], [*COMMITTED, 5], 8) is Received.KEPT


def test_gaps_contradictions_and_excess() -> None:
    chain = DraftChain()
    assert chain.receive(0, 4, [6], COMMITTED, 8) is Received.GAP
    chain = DraftChain()
    chain.receive(0, 3, [4, 5], COMMITTED, 8)
    assert chain.receive(0, 4, [6], COMMITTED, 8) is Received.DIFFERS
    chain = DraftChain()
    assert chain.receive(0, 3, list(range(20)), COMMITTED, 8) is Received.KEPT
    assert chain.token_ids == list(range(8))
    assert DraftChain().receive(0, -1, [1], COMMITTED, 8) is Received.GAP


def test_reopened_chain_gets_over_messages_of_the_former_stay() -> None:
    chain = DraftChain(reopened=True)
    assert chain.receive(3, 3, [9], COMMITTED, 8) is Received.KEPT
    assert chain.advance([4]) == 0
    assert chain.receive(0, 4, [5], [*COMMITTED, 4], 8) is Received.KEPT
    assert chain.receive(1, 4, [6], [*COMMITTED, 4], 8) is Received.KEPT
    assert chain.receive(0, 4, [5], [*COMMITTED, 4], 8) is Received.STALE
    assert chain.token_ids == [6]


# ---------------------------------------------------------------- assignment


def test_assign_spreads_by_free_capacity() -> None:
    loads = {"a": Occupancy(0, 4), "b": Occupancy(0, 8), "c": Occupancy(1, 1)}
    given = assign([["a", "b", "c"]] * 13, loads)
    assert given.count("a") == 4
    assert given.count("b") == 8
    assert given.count("c") == 0
    assert given.count(None) == 1
    assert loads["a"].num_sequences == 0, "its input is not changed"


def test_assign_respects_who_may() -> None:
    loads = {"a": Occupancy(0, 4), "b": Occupancy(3, 4)}
    assert assign([["b"], [], ["b"], ["a", "b"]], loads) == ["b", None, None, "a"]


def test_even_out_moves_no_more_than_needed() -> None:
    assert even_out("c", {"a": Occupancy(8, 16), "b": Occupancy(8, 16), "c": Occupancy(0, 16)}) == {
        "a": 3,
        "b": 2,
    }
    assert even_out("b", {"a": Occupancy(1, 16), "b": Occupancy(0, 16)}) == {}
    assert even_out("b", {"a": Occupancy(2, 16), "b": Occupancy(0, 16)}) == {"a": 1}
    assert even_out("b", {"a": Occupancy(12, 16), "b": Occupancy(0, 2)}) == {"a": 1}
    assert even_out("a", {"a": Occupancy(0, 4)}) == {}


@pytest.mark.parametrize(
    ("in_flight", "queued", "moves"),
    [
        ({"a": 20, "new": 0}, {"a": 19}, {"a": 10}),
        ({"a": 20, "new": 0}, {"a": 3}, {"a": 3}),
        ({"a": 20, "b": 4, "new": 0}, {"a": 19, "b": 3}, {"a": 10}),
        ({"a": 9, "b": 9, "new": 0}, {"a": 8, "b": 8}, {"a": 3, "b": 3}),
        ({"a": 20, "b": 20, "new": 0}, {"a": 0, "b": 2}, {"b": 2}),
        ({"a": 1, "new": 0}, {"a": 1}, {}),
        ({"new": 0}, {}, {}),
    ],
)
def test_queues_are_shared_with_a_newcomer(
    in_flight: dict[str, int], queued: dict[str, int], moves: dict[str, int]
) -> None:
    loads = {name: Occupancy(count, 100) for name, count in in_flight.items()}
    assert even_out("new", loads, queued) == moves


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "max_num_batched_tokens"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"max_num_speculative_tokens": 0}, "max_num_speculative_tokens"),
        ({"max_num_waiting": 0}, "max_num_waiting"),
        ({"max_model_len": 1}, "max_model_len"),
    ],
)
def test_target_config_names_the_field(values: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        TargetEngineConfig(**values)  # type: ignore[arg-type]


def test_ngram_config_names_the_field() -> None:
    with pytest.raises(InvalidArgumentError, match="max_n"):
        NgramConfig(min_n=3, max_n=2)
    with pytest.raises(InvalidArgumentError, match="num_tokens"):
        NgramConfig(num_tokens=0)
