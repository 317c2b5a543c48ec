"""Bearer tokens: who gets in, and that a changed file counts at once."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

import pytest

from paceline.cluster import auth
from paceline.cluster.auth import (
    AuthenticationError,
    Authenticator,
    Caller,
    TokenFile,
    TokenFileError,
    first_token,
    parse_tokens,
)

ALICE, BOB, CAROL = "alice-0123456789abcdef", "bob-0123456789abcdef", "carol-0123456789abcdef"


class Clock:
    """Seconds that only a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _replace(path: Path, text: str) -> None:
    """In one step, as it should be done."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def test_lines_of_tokens() -> None:
    entries = parse_tokens(f"# callers\n\nalice {ALICE}  # since May\nalice {BOB}\n  {CAROL}\n")
    callers = [caller for _, caller in entries]
    assert callers[:2] == [Caller("alice"), Caller("alice")]
    assert callers[2].name not in CAROL
    assert CAROL not in repr(entries)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("short", "line 1: a token must have at least 16 ASCII characters"),
        (f"x {ALICE}\na b {BOB}", "line 2 has 3 words"),
        (f"{ALICE}\nx {ALICE}", "line 2 repeats a token"),
        ("é" * 20, "line 1: a token must have at least 16 ASCII characters"),
    ],
)
def test_a_line_that_is_wrong_is_named_without_the_token(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match=problem) as caught:
        parse_tokens(text)
    assert ALICE not in str(caught.value)
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(TokenFileError, match=f"{path}: {problem}"):
        TokenFile(path)


def test_a_changed_file_counts_within_a_second(tmp_path: Path) -> None:
    path, clock = tmp_path / "tokens", Clock()
    path.write_text(f"alice {ALICE}\n")
    tokens = TokenFile(path, clock)
    assert tokens.find(ALICE) == Caller("alice")
    assert tokens.find(BOB) is None
    _replace(path, f"alice {BOB}\n")
    clock.now += auth.LOOK_SECONDS
    assert tokens.find(ALICE) is None
    assert tokens.find(BOB) == Caller("alice")
    # A link that is turned to another file, as mounted secrets are; its times may be older.
    (tmp_path / "other").write_text(f"carol {CAROL}\n")
    os.utime(tmp_path / "other", (1, 1))
    path.unlink()
    path.symlink_to(tmp_path / "other")
    clock.now += auth.LOOK_SECONDS
    assert tokens.find(CAROL) == Caller("carol")


def test_a_file_that_is_gone_or_damaged_leaves_the_tokens_as_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "tokens", Clock()
    path.write_text(f"{ALICE}\n")
    tokens = TokenFile(path, clock)
    for damage in (
        lambda: path.unlink(),
        lambda: path.write_text("short\n"),
        lambda: path.write_bytes(b"\xff"),
    ):
        damage()
        clock.now += auth.LOOK_SECONDS
        caplog.clear()
        assert tokens.find(ALICE) is not None
        assert "the tokens stay as they were" in caplog.text
    # Nobody is on the list any more: nobody gets in.
    path.write_text("# none\n")
    clock.now += auth.LOOK_SECONDS
    assert tokens.find(ALICE) is None


def test_every_known_token_is_compared_whatever_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time tells nothing: neither which token it is nor how much of it is right."""
    path = tmp_path / "tokens"
    path.write_text(f"{ALICE}\n{BOB}\n{CAROL}\n")
    tokens = TokenFile(path)
    compared: list[int] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(len(given))
        return hmac.compare_digest(known, given)

    monkeypatch.setattr(auth, "hmac", type("Spy", (), {"compare_digest": staticmethod(compare)}))
    for token in (ALICE, CAROL, "a", ALICE[:-1], "x" * 10_000):
        compared.clear()
        tokens.find(token)
        assert compared == [32, 32, 32]


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ([], "carries no token; send the metadata 'authorization: Bearer TOKEN'"),
        ([("authorization", f"Basic {ALICE}")], "must have the form 'Bearer TOKEN'"),
        ([("authorization", ALICE)], "must have the form 'Bearer TOKEN'"),
        ([("authorization", "Bearer ")], "must have the form 'Bearer TOKEN'"),
        ([("authorization", f"Bearer {BOB}")], "the token is not valid here"),
        ([("authorization", f"Bearer {ALICE}")] * 2, "send one 'authorization'"),
        ([("authorization", b"Bearer " + ALICE.encode())], "send one 'authorization'"),
    ],
)
def test_a_call_without_a_valid_token(
    metadata: list[tuple[str, str | bytes]], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"{ALICE}\n")
    with pytest.raises(AuthenticationError, match=problem) as caught:
        Authenticator(TokenFile(path)).caller(metadata)
    assert caught.value.code.name == "UNAUTHENTICATED"
    assert BOB not in str(caught.value)


def test_a_call_with_a_valid_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"alice {ALICE}\n")
    authenticator = Authenticator(TokenFile(path))
    for value in (f"Bearer {ALICE}", f"bearer  {ALICE} "):
        assert authenticator.caller([("x", "y"), ("authorization", value)]) == Caller("alice")


def test_without_tokens_everybody_gets_in() -> None:
    assert Authenticator(None).caller([]) is None
    assert first_token(None) is None


def test_the_services_own_calls_use_a_token_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# first\nalice {ALICE}\n{BOB}\n")
    assert first_token(str(path)) == ALICE
    path.write_text("# nobody\n")
    with pytest.raises(TokenFileError, match="holds no token, so nobody would be let in"):
        first_token(str(path))
    with pytest.raises(TokenFileError, match=r"gone: cannot be read .* check security.tokens_file"):
        first_token(str(tmp_path / "gone"))
