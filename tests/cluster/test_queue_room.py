from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.queue_room import QueueRoom


def refused(*reports: int) -> QueueRoom:
    room = QueueRoom()
    room.refuse()
    for num_waiting in reports:
        room.report(num_waiting)
    return room


def test_what_has_refused_nobody_is_not_full() -> None:
    room = QueueRoom()
    room.report(1000)
    assert not room.is_full(1000)


def test_a_refusal_holds_until_fewer_wait_than_did_then() -> None:
    assert refused().is_full(0), "not before the first report"
    room = refused(40)
    assert room.is_full(40)
    assert not room.is_full(39)
    assert room.is_full(39 + 1), "with those on their way there"


def test_a_report_of_more_raises_the_estimate_and_a_refusal_takes_it_back() -> None:
    room = refused(30, 40, 35)
    assert room.is_full(40)
    assert not room.is_full(39)
    room.refuse()
    room.report(35)
    assert room.is_full(35)
    assert not room.is_full(34)


def test_an_empty_queue_has_room_for_any_number() -> None:
    assert not refused(40, 0).is_full(1000)


def test_room_is_tried_for_twice_as_much_each_time_until_a_refusal() -> None:
    room = refused(40)
    num_queued = 40
    for step in (1, 2, 4, 8):
        assert room.is_full(num_queued)
        room.widen(num_queued)
        num_queued += step
        assert not room.is_full(num_queued - 1)
    room.refuse()
    room.widen(num_queued)
    assert not room.is_full(num_queued)
    assert room.is_full(num_queued + 1)


@given(st.integers(1, 300), st.lists(st.integers(0, 300), max_size=30), st.integers(0, 300))
def test_whatever_was_reported_it_is_asked_again_in_time(
    size: int, reports: list[int], num_waiting: int
) -> None:
    """No history leaves it closed for ever: each try makes room, whatever waits there."""
    room = refused(size, *reports, num_waiting)
    if room.is_full(num_waiting):
        room.widen(num_waiting)
    assert not room.is_full(num_waiting)
