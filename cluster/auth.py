"""Who may call: bearer tokens from a file that is read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc

from paceline.actors.engine.errors import PacelineError
from paceline.cluster.errors import RequestError

logger = logging.getLogger("ray.serve")

AUTHORIZATION = "authorization"
"""Key of the call's metadata."""

MIN_TOKEN_LENGTH = 16
LOOK_SECONDS = 1.0
"""A changed file counts at most this much later."""


class AuthenticationError(RequestError):
    """The call carries no valid token. The text never holds one."""

    code = grpc.StatusCode.UNAUTHENTICATED


class TokenFileError(PacelineError):
    """The file of tokens cannot be used; the text names the line and the remedy, never a token."""


@dataclass(frozen=True)
class Caller:
    """Somebody with a valid token."""

    name: str
    """As the file calls them; where it does not, a few digits of the token's hash."""


def parse_tokens(text: str) -> tuple[tuple[bytes, Caller], ...]:
    """(SHA-256 of the token, caller) for each line ``TOKEN`` or ``NAME TOKEN``; ``#`` begins a comment.

    Several tokens may have one name: the old and the new one while a caller changes over.

    Raises:
        TokenFileError: a line of another form, a token that is too short, or one given twice.
    """
    entries: dict[bytes, Caller] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        if len(words) > 2:
            raise TokenFileError(f"line {number} has {len(words)} words; write TOKEN, or NAME TOKEN")
        token = words[-1]
        if len(token) < MIN_TOKEN_LENGTH or not token.isascii():
            raise TokenFileError(
                f"line {number}: a token must have at least {MIN_TOKEN_LENGTH} ASCII characters; make one "
                "with 'openssl rand -hex 32'"
            )
        digest = hashlib.sha256(token.encode()).digest()
        if digest in entries:
            raise TokenFileError(f"line {number} repeats a token; remove it")
        entries[digest] = Caller(words[0] if len(words) == 2 else digest.hex()[:8])
    return tuple(entries.items())


class TokenFile:
    """The tokens of one file.

    A file that cannot be read or understood leaves the tokens as they were, and the log says so; one without
    any token lets nobody in.

    Args:
        clock: seconds that only grow.

    Raises:
        TokenFileError: the file cannot be read or understood at the start.
    """

    def __init__(self, path: Path | str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = Path(path)
        self._clock = clock
        self._mark = self._stamp()
        self._entries = self._read()
        self._next_look = clock() + LOOK_SECONDS

    def find(self, token: str) -> Caller | None:
        """Whose token it is. Takes the same time whichever it is, or whether it is any."""
        self._refresh()
        digest = hashlib.sha256(token.encode("utf-8", errors="replace")).digest()
        found: Caller | None = None
        for known, caller in self._entries:
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def _refresh(self) -> None:
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        try:
            mark = self._stamp()
            if mark == self._mark:
                return
            self._entries = self._read()
            self._mark = mark
            logger.info("%s: %d tokens are valid now", self._path, len(self._entries))
        except TokenFileError as error:
            logger.error("%s; the tokens stay as they were", error)

    def _stamp(self) -> tuple[int, int, int]:
        """Differs after every change, also where a link was turned to another file."""
        try:
            found = os.stat(self._path)
        except OSError as error:
            raise TokenFileError(
                f"{self._path}: cannot be read ({error.strerror}); check security.tokens_file"
            ) from None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _read(self) -> tuple[tuple[bytes, Caller], ...]:
        try:
            return parse_tokens(self._path.read_text(encoding="utf-8"))
        except TokenFileError as error:
            raise TokenFileError(f"{self._path}: {error}") from None
        except UnicodeDecodeError:
            raise TokenFileError(f"{self._path}: is not a text file in UTF-8; save it as one") from None
        except OSError as error:
            raise TokenFileError(
                f"{self._path}: cannot be read ({error.strerror}); check security.tokens_file"
            ) from None


def first_token(path: str | None) -> str | None:
    """A token of the file, for this machine's own calls; None without a file.

    Raises:
        TokenFileError: the file cannot be used, or holds no token.
    """
    if path is None:
        return None
    TokenFile(path)
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if words := line.split("#", 1)[0].split():
            return words[-1]
    raise TokenFileError(f"{path}: holds no token, so nobody would be let in; add one")


class Authenticator:
    """Checks each call's metadata against the tokens, where there are any to check."""

    def __init__(self, tokens: TokenFile | None) -> None:
        self._tokens = tokens

    def caller(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller | None:
        """Who calls; None where no token is asked for.

        Raises:
            AuthenticationError: a token is asked for, and the call carries none that is valid.
        """
        if self._tokens is None:
            return None
        given = [value for key, value in metadata if key.lower() == AUTHORIZATION]
        if not given:
            raise AuthenticationError(
                "the call carries no token; send the metadata 'authorization: Bearer TOKEN'"
            )
        if len(given) > 1 or not isinstance(given[0], str):
            raise AuthenticationError("send one 'authorization' of the form 'Bearer TOKEN'")
        scheme, _, token = given[0].partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise AuthenticationError("'authorization' must have the form 'Bearer TOKEN'")
        caller = self._tokens.find(token.strip())
        if caller is None:
            raise AuthenticationError("the token is not valid here")
        return caller
