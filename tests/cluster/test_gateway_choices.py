"""What a request of several choices, and one with log probabilities, asks of the gateway."""

from __future__ import annotations

from paceline.actors.engine.messages import Committed, Load
from paceline.actors.engine.noise import derive_seed
from tests.cluster.scripted import ScriptedTargets, checked, collect, completion, logprobs_at, placed

# ---------------------------------------------------------------- several choices


async def test_choices_begin_together_each_with_its_own_seed(targets: ScriptedTargets) -> None:
    await targets.attach("a", "b")
    request = checked(n=4, max_tokens=2)
    streams = targets.gateway.open_choices(request)
    (link,) = (link for link in targets.links.values() if link.submits)
    assert [s.sampling.seed for s in link.submits] == [derive_seed(5, index) for index in range(4)]
    assert len({s.sequence_id for s in link.submits}) == 4
    for submit in reversed(link.submits):
        link.commit(submit, 2)
        link.finish(submit)
    for index, stream in enumerate(streams):
        assert await collect(stream) == completion(request.choice(index), 2)


async def test_choices_go_elsewhere_where_sequences_queue(targets: ScriptedTargets) -> None:
    """A target that is the best one may still be full."""
    await targets.attach("a", "b")
    a, b = targets.links["a"], targets.links["b"]
    b.report(30)
    a.events.on_load("a", Load(4, 2, 0, 10, 10, False))
    streams = targets.gateway.open_choices(checked(n=40))
    assert len(a.submits) + len(b.submits) == 40
    assert len(b.submits) > 5
    for stream in streams:
        stream.close()
    assert len(a.cancels) + len(b.cancels) == 40


async def test_each_choice_survives_on_its_own(targets: ScriptedTargets) -> None:
    await targets.attach("a", "b")
    request = checked(n=3, max_tokens=4)
    streams = targets.gateway.open_choices(request)
    (first,) = (link for link in targets.links.values() if link.submits)
    for count, submit in enumerate(first.submits):
        first.commit(submit, count)
    first.die()
    second = targets.links["b" if first.target_id == "a" else "a"]
    assert [len(s.token_ids) for s in second.submits] == [3, 4, 5]
    for count, submit in enumerate(second.submits):
        second.commit(submit, 4 - count)
        second.finish(submit)
    for index, stream in enumerate(streams):
        assert await collect(stream) == completion(request.choice(index), 4)
    assert targets.gateway.snapshot().num_failovers == 3


# ---------------------------------------------------------------- log probabilities


async def test_logprobs_stay_with_their_tokens_through_a_failover(targets: ScriptedTargets) -> None:
    await targets.attach("a", "b")
    request = checked(max_tokens=6, logprobs=2)
    with targets.gateway.open(request) as stream:
        first, submit = placed(targets)
        assert submit.logprobs == 2
        first.commit(submit, 2)
        first.commit(submit, 2, base=4)  # one known token, one new one
        first.die()
        second, resumed = placed(targets)
        assert resumed.logprobs == 2
        second.commit(resumed, 3)
        second.finish(resumed)
        items = [item async for item in stream]
    token_ids = [token_id for item in items for token_id in item.token_ids]
    assert token_ids == completion(request, 6)
    assert [entry for item in items for entry in item.logprobs] == [
        logprobs_at(3 + index, token_id, 2) for index, token_id in enumerate(token_ids)
    ]
    assert all(len(item.logprobs) == len(item.token_ids) for item in items)


async def test_tokens_without_their_logprobs_move_the_sequence(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    with targets.gateway.open(checked(logprobs=0)) as stream:
        link, submit = placed(targets)
        link.events.on_committed("a", Committed(submit.sequence_id, 0, 3, (1, 2), (True, False)))
        assert link.submits[-1].epoch == 1
        assert not stream.ended


async def test_nobody_hears_of_logprobs_that_were_not_asked_for(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    with targets.gateway.open(checked(max_tokens=1)) as stream:
        link, submit = placed(targets)
        assert submit.logprobs is None
        entry = logprobs_at(3, 1, 0)
        link.events.on_committed("a", Committed(submit.sequence_id, 0, 3, (1,), (False,), (entry,)))
        assert (await anext(stream)).logprobs == ()
