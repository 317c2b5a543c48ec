"""What waits for a blocked stream is merged, stays bounded and loses nothing."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from paceline.actors import wire
from paceline.actors.engine.messages import (
    Cancel,
    Candidates,
    Close,
    Committed,
    Decline,
    DraftLaw,
    Finished,
    Load,
    Open,
    Submit,
    TokenLogprobs,
    Verdict,
)
from paceline.actors.engine.parameters import (
    FinishReason,
    SamplingParams,
    SpeculationParams,
    SpeculationStats,
    StoppingParams,
)
from paceline.actors.outgoing import (
    MAX_MESSAGE_TOKENS,
    Mailbox,
    PendingCandidates,
    PendingCommits,
    PendingSubmits,
    PendingVerdicts,
    how_many_fit,
)


def _committed(base: int, *token_ids: int) -> Committed:
    return Committed("s", 0, base, token_ids, tuple(token_id % 2 == 0 for token_id in token_ids))


def _open(*token_ids: int, window: int = 4) -> Open:
    return Open("s", 0, token_ids, SamplingParams(), window)


def test_commits_are_joined_and_the_latest_load_wins() -> None:
    pending = PendingCommits()
    assert pending.take() is None
    loads = [Load(n, 0, 0, 0, 0, False) for n in range(3)]
    for step in range(3):
        pending.add([_committed(10 + 2 * step, step, step)], [], loads[step])
    finished = Finished("s", 0, FinishReason.STOP, SpeculationStats())
    pending.add([], [finished])
    message = pending.take()
    assert message is not None
    assert [wire.committed_from_proto(item) for item in message.committed] == [
        _committed(10, 0, 0, 1, 1, 2, 2)
    ]
    assert [wire.finished_from_proto(item) for item in message.finished] == [finished]
    assert wire.load_from_proto(message.load) == loads[2]
    assert pending.take() is None


def test_sequences_and_epochs_are_kept_apart() -> None:
    pending = PendingCommits()
    pending.add([Committed("a", 0, 5, (1,), (True,)), Committed("b", 0, 6, (2,), (True,))], [])
    pending.add([Committed("a", 1, 6, (3,), (True,)), Committed("a", 0, 9, (4,), (False,))], [])
    message = pending.take()
    assert message is not None
    found = [(item.sequence_id, item.epoch, item.base_position) for item in message.committed]
    assert sorted(found) == [("a", 0, 5), ("a", 0, 9), ("a", 1, 6), ("b", 0, 6)]


def test_verdicts_are_joined_with_the_latest_window() -> None:
    pending = PendingVerdicts()
    pending.add([], [Verdict("s", 0, 10, 2, (1, 2, 3), 4)], [])
    pending.add([], [Verdict("s", 0, 13, 0, (9,), 7), Verdict("s", 0, 14, 0, (), 0)], [])
    message = pending.take()
    assert message is not None
    assert [wire.verdict_from_proto(item) for item in message.verdicts] == [
        Verdict("s", 0, 10, 2, (1, 2, 3, 9), 0)
    ]


def test_an_open_absorbs_its_verdicts() -> None:
    pending = PendingVerdicts()
    pending.add([_open(1, 2)], [Verdict("s", 0, 2, 0, (3,), 8)], [])
    pending.add([], [Verdict("s", 0, 3, 1, (4, 5), 6)], [])
    message = pending.take()
    assert message is not None
    assert [wire.open_from_proto(item) for item in message.opens] == [_open(1, 2, 3, 4, 5, window=6)]
    assert not message.verdicts


def test_a_close_cancels_what_waits() -> None:
    pending = PendingVerdicts()
    pending.add([_open(1)], [Verdict("s", 0, 1, 0, (2,), 3)], [Close("s", 0)])
    assert pending.take() is None
    pending.add([_open(1)], [], [])
    pending.take()
    pending.add([], [Verdict("s", 0, 1, 0, (2,), 3)], [])
    pending.add([], [], [Close("s", 0)])
    message = pending.take()
    assert message is not None
    assert (len(message.opens), len(message.verdicts), len(message.closes)) == (0, 0, 1)


def test_a_reopened_sequence_is_closed_first() -> None:
    pending = PendingVerdicts()
    pending.add([], [], [Close("s", 0)])
    pending.add([_open(1, 2)], [], [])
    message = pending.take()
    assert message is not None
    assert (len(message.opens), len(message.closes)) == (1, 1)
    pending.add([], [], [Close("s", 0)])
    pending.add([_open(1, 2)], [], [])
    pending.add([], [], [Close("s", 0)])
    message = pending.take()
    assert message is not None
    assert (len(message.opens), len(message.closes)) == (0, 1)


def test_candidates_of_a_newer_revision_replace_older_ones() -> None:
    pending = PendingCandidates()
    pending.add([Candidates("s", 0, 10, (1, 2), 0)], [], 0.001)
    pending.add([Candidates("s", 0, 12, (3,), 0)], [], 0.002)
    message = pending.take()
    assert message is not None
    assert [wire.candidates_from_proto(item) for item in message.candidates] == [
        Candidates("s", 0, 10, (1, 2, 3), 0)
    ]
    assert message.step_microseconds == 2000
    pending.add([Candidates("s", 0, 13, (4,), 0)], [])
    pending.add([Candidates("s", 0, 14, (5,), 1)], [])
    message = pending.take()
    assert message is not None
    assert [item.revision for item in message.candidates] == [1]


def test_laws_are_joined_with_their_tokens() -> None:
    first, second = DraftLaw((1, 2), (3, 1)), DraftLaw((2,), (1,))
    pending = PendingCandidates()
    pending.add([Candidates("s", 0, 10, (1, 2), 0, (first, first))], [])
    pending.add([Candidates("s", 0, 12, (2,), 0, (second,))], [])
    pending.add([Candidates("s", 0, 13, (7,), 0)], [])
    message = pending.take()
    assert message is not None
    assert [wire.candidates_from_proto(item) for item in message.candidates] == [
        Candidates("s", 0, 10, (1, 2, 2), 0, (first, first, second)),
        # Without laws: all of its tokens, or none of them.
        Candidates("s", 0, 13, (7,), 0),
    ]


def test_a_decline_or_a_close_drops_the_chain() -> None:
    pending = PendingCandidates()
    pending.add([Candidates("s", 0, 10, (1,), 0)], [])
    pending.add([], [Decline("s", 0, "full")])
    message = pending.take()
    assert message is not None
    assert not message.candidates
    assert [item.reason for item in message.declines] == ["full"]
    pending.add([Candidates("s", 0, 10, (1,), 0)], [])
    pending.forget("s", 0)
    assert pending.take() is None


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_what_a_slow_reader_hears_adds_up(steps: list[tuple[int, bool]]) -> None:
    """However output is cut into messages, the peer ends with the same tokens and the last window."""
    pending = PendingVerdicts()
    heard: list[int] = [0]
    window = 0
    pending.add([_open(0)], [], [])
    opened = False
    said = [0]
    for step, (length, read) in enumerate(steps):
        token_ids = tuple(range(len(said), len(said) + length))
        pending.add([], [Verdict("s", 0, len(said), 0, token_ids, step)], [])
        said.extend(token_ids)
        window = step
        message = pending.take() if read or step == len(steps) - 1 else None
        if message is None:
            continue
        assert len(message.opens) + len(message.verdicts) == 1
        for proto in message.opens:
            assert not opened
            opened, heard = True, list(proto.token_ids)
            assert proto.window == window
        for proto_verdict in message.verdicts:
            assert proto_verdict.base_position == len(heard)
            heard.extend(proto_verdict.committed_token_ids)
            assert proto_verdict.window == window
    if steps:
        assert heard == said


async def test_a_blocked_writer_finds_one_message_per_sequence() -> None:
    pending, mailbox = PendingCommits(), Mailbox()
    written = []
    gate = asyncio.Event()

    async def write() -> None:
        async for message in mailbox.messages(pending):
            written.append(message)
            await gate.wait()

    writer = asyncio.create_task(write())
    for position in range(10_000):
        pending.add([_committed(position, position)], [])
        mailbox.notify()
        if position == 0:
            await asyncio.sleep(0)
            assert len(written) == 1
    mailbox.close()
    gate.set()
    await writer
    assert [len(message.committed) for message in written] == [1, 1]
    assert sum(len(item.token_ids) for message in written for item in message.committed) == 10_000


def test_joined_commits_keep_their_logprobs() -> None:
    pending = PendingCommits()
    for base, value in ((5, -0.5), (6, -1.5)):
        logprobs = (TokenLogprobs(value, ((7, value),)),)
        pending.add([Committed("s", 0, base, (7,), (False,), logprobs)], [])
    message = pending.take()
    assert message is not None
    (joined,) = [wire.committed_from_proto(item) for item in message.committed]
    assert joined.token_ids == (7, 7)
    assert [item.logprob for item in joined.logprobs] == [-0.5, -1.5]


def test_as_many_as_fit() -> None:
    most = MAX_MESSAGE_TOKENS
    assert how_many_fit([]) == 0
    assert how_many_fit([1, 2, 3]) == 3
    assert how_many_fit([2 * most, 1]) == 1
    assert how_many_fit([most // 2, most // 2, 1]) == 2


LARGE = (1,) * (MAX_MESSAGE_TOKENS // 2 + 1)


def test_large_submits_go_one_by_one_and_a_cancel_never_overtakes_its_own() -> None:
    pending = PendingSubmits()
    for name in "abc":
        pending.submit(
            Submit(name, 0, LARGE, 1, SamplingParams(), StoppingParams(max_tokens=1), SpeculationParams())
        )
    pending.cancel(Cancel("c", 0))
    pending.cancel(Cancel("x", 0))
    seen = []
    while (message := pending.take()) is not None:
        assert message.ByteSize() < 16 * MAX_MESSAGE_TOKENS
        seen.append(
            ([item.sequence_id for item in message.submits], [item.sequence_id for item in message.cancels])
        )
    assert seen == [(["a"], ["x"]), (["b"], []), (["c"], ["c"])]


def test_large_opens_go_one_by_one_and_a_verdict_never_overtakes_its_own() -> None:
    pending = PendingVerdicts()
    opens = [Open(name, 0, LARGE, SamplingParams(), 4) for name in "ab"]
    verdicts = [Verdict(name, 0, len(LARGE) + 1, 1, (9,), 4) for name in "abx"]
    pending.add(opens, verdicts, [])
    pending.add([], [], [Close("y", 0)])
    seen = []
    while (message := pending.take()) is not None:
        seen.append(
            [
                [item.sequence_id for item in part]
                for part in (message.opens, message.verdicts, message.closes)
            ]
        )
    assert seen == [[["a"], ["a", "x"], ["y"]], [["b"], ["b"], []]]
