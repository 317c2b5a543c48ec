import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.stop_strings import StopStringMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool, list[str]]:
    matcher = StopStringMatcher(stops)
    emitted = []
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        emitted.append(text)
        if stopped:
            return "".join(emitted), True, emitted
    emitted.append(matcher.flush())
    return "".join(emitted), False, emitted


def expected(stops: list[str], text: str) -> tuple[str, bool]:
    """By definition: the match that is completed first, the longest of those completed together."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


texts = st.text(alphabet="abc", max_size=24)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=5)


@given(stop_lists, st.lists(texts, max_size=6))
def test_equals_the_definition_for_every_cut_of_the_text(stops: list[str], pieces: list[str]) -> None:
    text, stopped, _ = run(stops, pieces)
    assert (text, stopped) == expected(stops, "".join(pieces))


@given(stop_lists, texts)
def test_does_not_depend_on_the_cut(stops: list[str], text: str) -> None:
    assert run(stops, [text])[:2] == run(stops, list(text))[:2]


@given(stop_lists, st.lists(texts, max_size=6))
def test_holds_back_no_more_than_a_possible_beginning(stops: list[str], pieces: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    fed = emitted = ""
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        fed, emitted = fed + piece, emitted + text
        if stopped:
            return
        held = fed[len(emitted) :]
        assert any(stop.startswith(held) for stop in stops)


def test_no_part_of_a_straddling_stop_string_is_emitted() -> None:
    text, stopped, pieces = run(["END"], ["some E", "N", "D tail"])
    assert (text, stopped) == ("some ", True)
    assert pieces == ["some ", "", ""]


def test_text_held_as_a_possible_beginning_is_flushed() -> None:
    assert run(["endZZZ"], ["the ", "end"])[:2] == ("the end", False)


def test_false_start_is_released_as_soon_as_it_is_one() -> None:
    matcher = StopStringMatcher(["aab"])
    assert matcher.feed("aa") == ("", False)
    assert matcher.feed("a") == ("a", False)
    assert matcher.feed("b") == ("", True)


def test_without_stop_strings_text_passes() -> None:
    matcher = StopStringMatcher([])
    assert matcher.feed("anything") == ("anything", False)
    assert matcher.flush() == ""


def test_unarmed_matches_pass_and_a_later_one_stops() -> None:
    matcher = StopStringMatcher(["x"])
    assert "".join(matcher.feed(piece, armed=False)[0] for piece in ["ax", "b"]) == "axb"
    assert matcher.feed("cx") == ("c", True)
    assert matcher.stopped
    assert matcher.feed("more") == ("", True)


def test_unarmed_beginning_completed_when_armed_stops() -> None:
    matcher = StopStringMatcher(["xyz"])
    assert matcher.feed("ax", armed=False) == ("a", False)
    assert matcher.feed("yz") == ("", True)


def test_refuses_an_empty_stop_string() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStringMatcher(["a", ""])
