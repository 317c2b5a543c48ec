"""Admission with prefix caching: what is found, who waits for whom, and whose place is kept."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.actors.engine.blocks import BlockManager
from paceline.actors.engine.config import NgramConfig
from paceline.actors.engine.prefix_cache import PrefixCache
from paceline.actors.engine.proposer import NgramProposer
from paceline.actors.engine.scheduler import Scheduler
from paceline.actors.engine.sequence import SequenceStatus, TargetSequence
from tests.engine.fakes import make_submit

PROMPT = [index * 5 % 32 for index in range(42)]


def scheduler_of(num_blocks: int, **limits: int) -> tuple[Scheduler, BlockManager]:
    blocks = BlockManager(num_blocks, 4)
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **limits}
    return Scheduler(blocks, cache=PrefixCache(blocks), **values), blocks


def sequence_of(name: str, prompt: Sequence[int]) -> TargetSequence:
    event = make_submit(name, prompt, max_tokens=50)
    return TargetSequence.from_submit("gateway", event, 8, NgramProposer(NgramConfig()))


def submit(scheduler: Scheduler, **prompts: Sequence[int]) -> list[TargetSequence]:
    sequences = [sequence_of(name, prompt) for name, prompt in prompts.items()]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.admit()
    return sequences


def step(scheduler: Scheduler) -> None:
    for item in scheduler.schedule({}).scheduled:
        item.sequence.num_computed_tokens += item.num_tokens
        if item.num_logits:
            item.sequence.token_ids.append(1)
        scheduler.settle(item.sequence)


def test_who_overtakes_leaves_the_deferred_their_place() -> None:
    scheduler, _ = scheduler_of(100, max_num_seqs=4)
    a, b, c, d, e = submit(scheduler, a=PROMPT, b=PROMPT, c=PROMPT, d=[1] * 9, e=[2] * 9)
    assert scheduler.running == [a, d]
    assert list(scheduler.waiting) == [b, c, e]
    assert scheduler.num_queued == 1, "for the deferred there is a place"
    step(scheduler)
    scheduler.admit()
    assert scheduler.running == [a, b, c, d], "in the order of arrival again"
    assert b.num_computed_tokens == 40
    assert b.block_table[:10] == a.block_table[:10]


def test_who_overtakes_leaves_the_deferred_their_blocks() -> None:
    scheduler, blocks = scheduler_of(26)
    a, b, c = submit(scheduler, a=PROMPT, b=PROMPT, c=[1] * 15)
    assert scheduler.running == [a]
    step(scheduler)
    scheduler.admit()
    assert scheduler.running == [a, b, c]
    assert blocks.num_free_blocks == 26 - 11 - 1 - 4


def test_preempted_goes_back_behind_the_deferred_that_it_overtook() -> None:
    scheduler, _ = scheduler_of(24)
    a, b, c = submit(scheduler, a=PROMPT[:20], b=PROMPT[:20], c=[1, 1])
    assert scheduler.running == [a, c]
    a.token_ids.extend([2] * 75)
    plan = scheduler.schedule({})
    assert plan.preempted == [c]
    assert list(scheduler.waiting) == [b, c]
    assert c.status is SequenceStatus.WAITING


def test_preempted_finds_its_own_blocks_which_were_not_cached_for_it() -> None:
    scheduler, _ = scheduler_of(16)
    a, b = submit(scheduler, a=[1] * 3, b=PROMPT[:17])
    step(scheduler)
    a.token_ids.extend([2] * 45)
    plan = scheduler.schedule({})
    assert plan.preempted == [b]
    scheduler.remove(a)
    scheduler.admit()
    assert scheduler.running == [b]
    # It had four full blocks; the other one grew to 13 of 16 and took the last of them.
    assert b.num_computed_tokens == len(b.prefix) * 4 == 12
    assert b.cached_prompt_tokens == 0
    assert (scheduler.num_prefix_queries, scheduler.num_prefix_hits) == (20, 0)


def test_what_is_found_counts_as_taken_only_where_nobody_holds_it() -> None:
    scheduler, blocks = scheduler_of(14)
    (first,) = submit(scheduler, a=PROMPT[:41])
    step(scheduler)
    # 11 blocks are held, 3 are free; the second needs one of its own, and one is left for the first.
    (second,) = submit(scheduler, b=PROMPT[:41])
    assert scheduler.running == [first, second]
    scheduler.remove(first)
    scheduler.remove(second)
    assert blocks.num_free_blocks == 14
    submit(scheduler, c=[3] * 17)
    # 5 of 14 are held; 10 idle ones are more than there are.
    (late,) = submit(scheduler, d=PROMPT[:41])
    assert late in scheduler.waiting
