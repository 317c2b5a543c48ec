from __future__ import annotations

import asyncio

import pytest

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.parameters import FinishReason
from paceline.cluster.errors import (
    OverloadedError,
    TargetFailedError,
    TimeExceededError,
    UnavailableError,
)
from paceline.cluster.gateway import GatewaySettings
from tests.cluster.scripted import (
    ScriptedTargets,
    assert_clean,
    checked,
    collect,
    completion,
    placed,
    settle,
)


async def test_streams_what_is_committed(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    request = checked(max_tokens=5)
    with targets.gateway.open(request) as stream:
        link, submit = placed(targets)
        assert (submit.token_ids, submit.prompt_length, submit.epoch) == ((1, 2, 3), 3, 0)
        link.commit(submit, 2)
        first = await anext(stream)
        assert list(first.token_ids) == completion(request, 2)
        assert first.accepted == (True, False)
        link.commit(submit, 2, base=5)
        link.commit(submit, 1, base=7)
        link.finish(submit, rounds=3)
        rest = await anext(stream)
        assert list(first.token_ids + rest.token_ids) == completion(request, 5)
        assert stream.ended
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert stream.result.reason is FinishReason.LENGTH
        assert stream.result.speculation.rounds == 3
    assert link.cancels == []


async def test_a_lost_target_loses_no_token_and_repeats_none(targets: ScriptedTargets) -> None:
    await targets.attach("a", "b")
    request = checked(max_tokens=9)
    with targets.gateway.open(request) as stream:
        first, submit = placed(targets)
        first.commit(submit, 4)
        first.die()
        second, resumed = placed(targets)
        assert second is not first
        assert (resumed.epoch, resumed.sequence_id) == (1, submit.sequence_id)
        assert list(resumed.token_ids) == [1, 2, 3, *completion(request, 4)]
        assert (resumed.prompt_length, resumed.sampling, resumed.stopping) == (
            3,
            submit.sampling,
            submit.stopping,
        )
        first.commit(submit, 3, base=7)  # the dead target's last words come late
        second.commit(resumed, 5)
        second.finish(resumed)
        assert await collect(stream) == completion(request, 9)
    assert targets.gateway.snapshot().num_failovers == 1
    assert targets.gateway.snapshot().num_ignored_messages == 1


async def test_sixteen_requests_survive_one_of_two_targets(targets: ScriptedTargets) -> None:
    await targets.attach("a", "b")
    requests = [checked(seed=seed, max_tokens=6) for seed in range(16)]
    streams = [targets.gateway.open(request) for request in requests]
    a, b = targets.links["a"], targets.links["b"]
    assert len(a.submits) == len(b.submits) == 8
    for link in (a, b):
        for submit in link.submits:
            link.commit(submit, 1 + submit.sampling.seed % 4)
    a.die()
    assert len(b.submits) == 16
    for submit in b.submits:
        done = 1 + submit.sampling.seed % 4
        base = 3 + done
        b.commit(submit, 6 - done, base=base)
        b.finish(submit)
    for request, stream in zip(requests, streams, strict=True):
        assert await collect(stream) == completion(request, 6)


async def test_messages_of_an_older_epoch_of_the_same_target_are_dropped(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    request = checked(max_tokens=4)
    with targets.gateway.open(request) as stream:
        link, submit = placed(targets)
        link.commit(submit, 1)
        link.finish(submit, FinishReason.CANCELLED)  # not asked for: the target gives it back
        resumed = link.submits[-1]
        assert resumed.epoch == 1
        link.say(submit, 4, (99, 99, 99))
        link.finish(submit)
        assert not stream.ended
        link.commit(resumed, 3)
        link.finish(resumed)
        assert await collect(stream) == completion(request, 4)


async def test_a_gap_moves_the_sequence_and_an_overlap_is_trimmed(targets: ScriptedTargets) -> None:
    await targets.attach("a", "b")
    request = checked(max_tokens=6)
    with targets.gateway.open(request) as stream:
        first, submit = placed(targets)
        first.commit(submit, 2)
        first.commit(submit, 3, base=4)  # one known token, two new ones
        first.commit(submit, 2, base=3)  # all known
        first.commit(submit, 1, base=9)  # a gap
        assert [cancel.epoch for cancel in first.cancels] == [0]
        (resumed,) = (s for link in targets.links.values() for s in link.submits if s.epoch == 1)
        owner = next(link for link in targets.links.values() if resumed in link.submits)
        owner.commit(resumed, 2)
        owner.finish(resumed)
        assert await collect(stream) == completion(request, 6)


@pytest.mark.parametrize("token_ids", [(99,), (1,) * 20])
async def test_tokens_that_contradict_or_exceed_move_the_sequence(
    targets: ScriptedTargets, token_ids: tuple[int, ...]
) -> None:
    await targets.attach("a")
    with targets.gateway.open(checked(max_tokens=6)) as stream:
        link, submit = placed(targets)
        link.commit(submit, 2)
        link.say(submit, 4 if len(token_ids) == 1 else 5, token_ids)
        assert link.submits[-1].epoch == 1
        assert len((await anext(stream)).token_ids) == 2


async def test_a_target_that_dies_before_it_says_finished_has_finished(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    request = checked(max_tokens=3)
    with targets.gateway.open(request) as stream:
        link, submit = placed(targets)
        link.commit(submit, 3)
        link.die()
        assert await collect(stream) == completion(request, 3)
        assert stream.result.reason is FinishReason.LENGTH


async def test_resumes_when_a_target_comes_back_in_time(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    request = checked(max_tokens=3)
    with targets.gateway.open(request) as stream:
        link, submit = placed(targets)
        link.commit(submit, 1)
        link.die()
        assert targets.gateway.snapshot().num_waiting == 1
        await targets.attach("a")
        fresh, resumed = placed(targets)
        assert fresh is not link
        fresh.commit(resumed, 2)
        fresh.finish(resumed)
        assert await collect(stream) == completion(request, 3)


async def test_is_given_up_when_no_target_comes_in_time(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    with targets.gateway.open(checked()) as stream:
        link, submit = placed(targets)
        link.commit(submit, 2)
        link.die()
        assert len((await anext(stream)).token_ids) == 2  # what was committed is delivered first
        with pytest.raises(UnavailableError, match="lost"):
            await anext(stream)


async def test_no_target_is_unavailable_at_once(targets: ScriptedTargets) -> None:
    started = asyncio.get_running_loop().time()
    with (
        targets.gateway.open(checked()) as stream,
        pytest.raises(UnavailableError, match="no target is ready"),
    ):
        await anext(stream)
    assert asyncio.get_running_loop().time() - started < 0.05


async def test_a_new_request_waits_for_targets_that_are_being_dialled(targets: ScriptedTargets) -> None:
    targets.held.add("a")
    await targets.attach("a")
    with targets.gateway.open(checked(max_tokens=1)) as stream:
        assert targets.gateway.snapshot().num_waiting == 1
        targets.links["a"].open_gate.set()
        await settle()
        link, submit = placed(targets)
        assert submit.epoch == 0
        link.commit(submit, 1)
        link.finish(submit)
        assert len(await collect(stream)) == 1


async def test_a_new_request_does_not_wait_longer_than_the_dialling(targets: ScriptedTargets) -> None:
    targets.held.add("a")
    targets.refuses.add("a")
    await targets.attach("a")
    with targets.gateway.open(checked()) as stream:
        targets.links["a"].open_gate.set()
        with pytest.raises(UnavailableError, match="no target is ready"):
            await asyncio.wait_for(anext(stream), 0.05)


async def test_grace_is_bounded(targets: ScriptedTargets) -> None:
    targets.held.add("a")
    await targets.attach("a")
    with targets.gateway.open(checked()) as stream, pytest.raises(UnavailableError):
        await asyncio.wait_for(anext(stream), 1.0)


async def test_an_unreachable_target_is_dialled_again_with_the_next_update(targets: ScriptedTargets) -> None:
    targets.refuses.add("a")
    await targets.attach("a")
    assert targets.gateway.snapshot().targets == ()
    targets.refuses.clear()
    await targets.attach("a")
    assert [load.target_id for load in targets.gateway.snapshot().targets] == ["a"]


async def test_a_target_found_dead_on_submit_is_passed_over(targets: ScriptedTargets) -> None:
    await targets.attach("a", "b")
    targets.links["a"].dead = True
    with targets.gateway.open(checked(max_tokens=1)), targets.gateway.open(checked(max_tokens=1)):
        assert len(targets.links["b"].submits) == 2
        assert [load.target_id for load in targets.gateway.snapshot().targets] == ["b"]


@pytest.mark.parametrize("moment", ["at once", "while reading", "while waiting"])
async def test_a_cancelled_reader_frees_the_sequence(targets: ScriptedTargets, moment: str) -> None:
    await targets.attach("a")

    async def read() -> None:
        with targets.gateway.open(checked()) as stream:
            await collect(stream)

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    link = targets.links["a"]
    (submit,) = link.submits
    if moment == "while reading":
        link.commit(submit, 1)
        await settle()
    elif moment == "while waiting":
        link.die()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if moment != "while waiting":
        assert [(cancel.sequence_id, cancel.epoch) for cancel in link.cancels] == [(submit.sequence_id, 0)]
    link.commit(submit, 1, base=4)  # what is under way is ignored
    link.finish(submit, FinishReason.CANCELLED)


async def test_a_full_target_is_passed_over_and_all_full_is_an_error(targets: ScriptedTargets) -> None:
    await targets.attach("a", "b")
    with targets.gateway.open(checked()) as stream:
        first, submit = placed(targets)
        first.finish(submit, FinishReason.ERROR, error="queue full", full=True)
        second = targets.links["b" if first.target_id == "a" else "a"]
        assert second.submits[-1].epoch == 1
        second.finish(second.submits[-1], FinishReason.ERROR, error="queue full", full=True)
        with pytest.raises(OverloadedError, match="full"):
            await anext(stream)


async def test_a_running_request_that_finds_all_full_asks_again(targets: ScriptedTargets) -> None:
    await targets.attach("a", "b")
    request = checked(max_tokens=4)
    with targets.gateway.open(request) as stream:
        first, submit = placed(targets)
        first.commit(submit, 2)
        first.die()
        second, resumed = placed(targets)
        second.finish(resumed, FinishReason.ERROR, error="queue full", full=True)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(collect(stream), 0.05)
        assert not stream.ended
        assert len(second.submits) == 1


async def test_a_target_that_finds_a_request_wrong_ends_that_one_only(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    neighbour_request = checked(max_tokens=2, seed=8)
    with targets.gateway.open(checked()) as stream, targets.gateway.open(neighbour_request) as neighbour:
        link = targets.links["a"]
        link.finish(link.submits[0], FinishReason.ERROR, error="token_ids: too long", invalid=True)
        with pytest.raises(InvalidArgumentError, match="token_ids: too long") as error:
            await anext(stream)
        assert error.value.field == "token_ids"
        link.commit(link.submits[1], 2)
        link.finish(link.submits[1])
        assert await collect(neighbour) == completion(neighbour_request, 2)


async def test_a_failed_step_is_tried_once_more_elsewhere(targets: ScriptedTargets) -> None:
    await targets.attach("a", "b")
    request = checked(max_tokens=3)
    with targets.gateway.open(request) as stream:
        first, submit = placed(targets)
        first.commit(submit, 2)
        first.finish(submit, FinishReason.ERROR, error="the step failed: out of memory")
        second = targets.links["b" if first.target_id == "a" else "a"]
        (resumed,) = second.submits
        second.commit(resumed, 1)
        second.finish(resumed)
        assert await collect(stream) == completion(request, 3)


async def test_a_request_that_fails_twice_is_an_error(targets: ScriptedTargets) -> None:
    await targets.attach("a", "b", "c")
    with targets.gateway.open(checked()) as stream:
        for epoch in range(2):
            (link,) = (
                link for link in targets.links.values() if link.submits and link.submits[-1].epoch == epoch
            )
            link.finish(link.submits[-1], FinishReason.ERROR, error="the step failed: out of memory")
        with pytest.raises(TargetFailedError, match="out of memory"):
            await anext(stream)
    assert sum(len(link.submits) for link in targets.links.values()) == 2


async def test_a_draining_target_gets_nothing_new_and_hands_over(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    request = checked(max_tokens=4)
    with targets.gateway.open(request) as stream:
        old, submit = placed(targets)
        old.commit(submit, 1)
        old.report(1, draining=True)
        await targets.attach("a", "b")
        with targets.gateway.open(checked(max_tokens=1)):
            assert len(old.submits) == 1
            assert len(targets.links["b"].submits) == 1
        old.finish(submit, FinishReason.ERROR, error="the target is shutting down")
        new = targets.links["b"]
        resumed = new.submits[-1]
        new.commit(resumed, 3)
        new.finish(resumed)
        assert await collect(stream) == completion(request, 4)


async def test_draining_targets_may_hand_over_any_number_of_times(targets: ScriptedTargets) -> None:
    request = checked(max_tokens=4)
    await targets.attach("a", "b", "c")
    with targets.gateway.open(request) as stream:
        for epoch in range(3):
            (link,) = (
                link for link in targets.links.values() if link.submits and link.submits[-1].epoch == epoch
            )
            link.commit(link.submits[-1], 1)
            if epoch < 2:
                link.report(1, draining=True)
                link.finish(link.submits[-1], FinishReason.ERROR, error="the target is shutting down")
        link.commit(link.submits[-1], 1, base=6)
        link.finish(link.submits[-1])
        assert await collect(stream) == completion(request, 4)


async def test_a_report_takes_the_place_of_the_gateways_own_count(targets: ScriptedTargets) -> None:
    await targets.attach("a", "b")
    a, b = targets.links["a"], targets.links["b"]
    b.report(9)
    streams = [targets.gateway.open(checked()) for _ in range(3)]
    assert len(a.submits) == 3
    a.report(3)
    b.report(4)
    streams.append(targets.gateway.open(checked()))
    assert len(a.submits) == 4
    for stream in streams:
        stream.close()


async def test_an_address_that_changes_while_it_is_dialled(targets: ScriptedTargets) -> None:
    targets.held.add("a")
    await targets.attach("a")
    targets.gateway.update_targets({"a": "elsewhere:1"})
    targets.links["a"].open_gate.set()
    await settle()
    assert targets.links["a"].closed
    with targets.gateway.open(checked()):
        assert len(targets.links["elsewhere"].submits) == 1
        assert targets.links["a"].submits == []


async def test_an_unlisted_target_finishes_what_it_has_and_is_left(targets: ScriptedTargets) -> None:
    await targets.attach("a", "b")
    targets.links["b"].report(5)
    with targets.gateway.open(checked(max_tokens=2)) as stream:
        a = targets.links["a"]
        (submit,) = a.submits
        await targets.attach("b")
        assert not a.closed
        with targets.gateway.open(checked(max_tokens=1)):
            assert len(a.submits) == 1
        a.commit(submit, 2)
        a.finish(submit)
        assert len(await collect(stream)) == 2
    await settle()
    assert a.closed
    assert [load.target_id for load in targets.gateway.snapshot().targets] == ["b"]


async def test_a_target_that_is_listed_again_is_used_again(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    with targets.gateway.open(checked()):
        link = targets.links["a"]
        await targets.attach()
        await targets.attach("a")
        assert targets.links["a"] is link
        with targets.gateway.open(checked()):
            assert len(link.submits) == 2


async def test_a_new_address_is_a_new_target(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    targets.gateway.update_targets({"a": "elsewhere:1"})
    await settle()
    assert targets.links["a"].closed
    with targets.gateway.open(checked()):
        assert len(targets.links["elsewhere"].submits) == 1


async def test_stop_cancels_and_waits_for_the_statistics(targets: ScriptedTargets) -> None:
    await targets.attach("a")
    with targets.gateway.open(checked()) as stream:
        link, submit = placed(targets)
        link.commit(submit, 2)
        await anext(stream)
        stopping = asyncio.create_task(stream.stop())
        await settle()
        assert len(link.cancels) == 1
        link.commit(submit, 2, base=5)  # the step that was under way
        link.finish(submit, FinishReason.CANCELLED, rounds=4)
        result = await stopping
        assert (result.reason, result.speculation.rounds) == (FinishReason.STOP, 4)
    assert len(link.cancels) == 1


@pytest.mark.parametrize("how", ["lost", "silent"])
async def test_stop_ends_even_if_the_target_does_not_answer(how: str) -> None:
    scripted = ScriptedTargets(cancel_timeout_seconds=0.05)
    await scripted.attach("a", "b")
    with scripted.gateway.open(checked()) as stream:
        link, submit = placed(scripted)
        link.commit(submit, 1)
        await anext(stream)
        stopping = asyncio.create_task(stream.stop())
        await settle()
        if how == "lost":
            link.die()
        result = await asyncio.wait_for(stopping, 1.0)
        assert result.reason is FinishReason.STOP
    assert sum(len(link.submits) for link in scripted.links.values()) == 1
    assert_clean(scripted)
    await scripted.gateway.close()


async def test_a_request_that_takes_too_long_is_cancelled() -> None:
    scripted = ScriptedTargets(request_timeout_seconds=0.05)
    await scripted.attach("a")
    with scripted.gateway.open(checked()) as stream:
        link, submit = placed(scripted)
        link.commit(submit, 1)
        assert len((await anext(stream)).token_ids) == 1
        with pytest.raises(TimeExceededError, match=r"0\.05 s"):
            await anext(stream)
        assert len(link.cancels) == 1
    assert_clean(scripted)
    await scripted.gateway.close()


async def test_a_request_that_loses_every_target_is_given_up() -> None:
    scripted = ScriptedTargets(max_losses=2)
    await scripted.attach("a")
    with scripted.gateway.open(checked()) as stream:
        for _ in range(3):
            scripted.links["a"].die()
            await scripted.attach("a")
        with pytest.raises(UnavailableError, match="lost its target 3 times"):
            await anext(stream)
        assert len(scripted.links["a"].submits) == 0
    assert_clean(scripted)
    await scripted.gateway.close()


async def test_close_ends_everything() -> None:
    scripted = ScriptedTargets()
    scripted.held.add("b")
    await scripted.attach("a", "b")
    with scripted.gateway.open(checked()) as stream:
        await scripted.gateway.close()
        with pytest.raises(UnavailableError, match="shutting down"):
            await anext(stream)
    assert scripted.links["a"].closed
    assert scripted.links["b"].closed
    assert len(scripted.links["a"].cancels) == 1
    assert_clean(scripted)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="resume_timeout_seconds"):
        GatewaySettings(resume_timeout_seconds=-1)
    with pytest.raises(ValueError, match="request_timeout_seconds"):
        GatewaySettings(request_timeout_seconds=0)
    with pytest.raises(ValueError, match="max_losses"):
        GatewaySettings(max_losses=-1)
