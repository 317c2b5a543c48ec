from __future__ import annotations

from paceline.cluster.directory import merge_endpoints


def test_everyone_answered_so_the_answer_is_the_directory() -> None:
    known = {"a": "h:1", "b": "h:2"}
    assert merge_endpoints(known, {}, {"b": "h:2", "c": "h:3"}, num_silent=0, num_misses_allowed=5) == (
        {"b": "h:2", "c": "h:3"},
        {},
    )


def test_a_silent_replica_may_be_a_known_target_for_a_while() -> None:
    addresses, misses = {"a": "h:1", "b": "h:2"}, {}
    for look in range(1, 3):
        addresses, misses = merge_endpoints(
            addresses, misses, {"b": "h:2"}, num_silent=1, num_misses_allowed=2
        )
        assert addresses == {"a": "h:1", "b": "h:2"}
        assert misses == {"a": look}
    addresses, misses = merge_endpoints(addresses, misses, {"b": "h:2"}, num_silent=1, num_misses_allowed=2)
    assert (addresses, misses) == ({"b": "h:2"}, {})


def test_an_answer_forgives_former_misses_and_brings_the_new_address() -> None:
    addresses, misses = merge_endpoints(
        {"a": "h:1"}, {"a": 2}, {"a": "h:9"}, num_silent=1, num_misses_allowed=2
    )
    assert (addresses, misses) == ({"a": "h:9"}, {})
