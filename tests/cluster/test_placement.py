from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.engine.messages import Load
from paceline.cluster.placement import TOKENS_PER_SEQUENCE, TargetLoad, choose_target


def load(running: int = 0, waiting: int = 0, pending: int = 0, draining: bool = False) -> Load:
    return Load(running, waiting, pending, free_blocks=10, total_blocks=10, draining=draining)


def target(
    name: str,
    *,
    own: int = 0,
    unreported: int = 0,
    tokens: int = 0,
    reported: Load | None = None,
    leaving: bool = False,
) -> TargetLoad:
    return TargetLoad(name, own, unreported, tokens, reported, leaving)


def test_least_sequences_wins() -> None:
    assert choose_target([target("a", reported=load(3)), target("b", reported=load(1, 1))]) == "b"


def test_other_gateways_sequences_count() -> None:
    assert choose_target([target("a", own=2, reported=load(2)), target("b", own=0, reported=load(5))]) == "a"


def test_own_submits_count_before_the_target_has_reported_them() -> None:
    busy = target("a", own=3, unreported=3, reported=load(0))
    assert choose_target([busy, target("b", own=2, unreported=0, reported=load(2))]) == "b"
    assert choose_target([target("a", own=3), target("b", own=2)]) == "b"


def test_pending_prompt_tokens_count() -> None:
    long_prompts = target("a", reported=load(1, pending=4 * TOKENS_PER_SEQUENCE))
    assert choose_target([long_prompts, target("b", reported=load(3))]) == "b"
    unreported = target("a", own=1, unreported=1, tokens=4 * TOKENS_PER_SEQUENCE, reported=load())
    assert choose_target([unreported, target("b", reported=load(3))]) == "b"


def test_draining_leaving_and_excluded_targets_get_nothing() -> None:
    targets = [
        target("a", reported=load(draining=True)),
        target("b", leaving=True),
        target("c"),
        target("d", reported=load(50)),
    ]
    assert choose_target(targets, excluded={"c"}) == "d"
    assert choose_target(targets, excluded={"c", "d"}) is None
    assert choose_target([]) is None


def test_equals_take_turns() -> None:
    targets = [target("b"), target("a"), target("c", reported=load(1))]
    assert [choose_target(targets, turn=turn) for turn in range(4)] == ["a", "b", "a", "b"]


def test_the_preferred_target_is_taken_while_it_has_room() -> None:
    idle = target("b", reported=load())
    assert choose_target([target("a", own=9, reported=load(9)), idle], preferred="a") == "a"
    assert choose_target([target("a", own=9), idle], preferred="a") == "a"
    assert choose_target([target("a", reported=load(9, waiting=1)), idle], preferred="a") == "b"
    assert choose_target([target("a", reported=load(draining=True)), idle], preferred="a") == "b"
    assert choose_target([target("a", reported=load()), idle], preferred="a", excluded={"a"}) == "b"
    assert choose_target([idle], preferred="a") == "b"


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(1, 5))
def test_a_burst_is_spread_evenly(prompts: list[int], num_targets: int) -> None:
    """No report comes during the burst: the gateway's own count alone must spread it."""
    own = {f"t{i}": 0 for i in range(num_targets)}
    for turn, _ in enumerate(prompts):
        chosen = choose_target(
            [target(name, own=n, unreported=n, reported=load()) for name, n in own.items()], turn=turn
        )
        assert chosen is not None
        own[chosen] += 1
    assert max(own.values()) - min(own.values()) <= 1
