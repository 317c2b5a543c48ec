"""Building the automaton of a grammar, and trying that out first in a process that may be lost.

A few characters can ask for more memory than a machine has: terminals that double one another, numbers that
are multiples of two large ones, thousands of optional classes. The library's limits count what is built in
one place, not all of it; and neither a thread nor a call of the library can be ended from outside. A process
can: the trial has a bound on its processor time and on its memory.

Run as a module this is the trial's process: the grammar comes in, what is wrong with it goes out.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MAX_LEXER_STATES: Final = 20_000
"""About 2 kB each."""
MAX_LEXER_FUEL: Final = 100_000
"""Steps of building the lexer; about 2 ms."""
MAX_ROW_ITEMS: Final = 4_000
"""Ways in which a text can go on at one place; an object needs four for each optional property. With so many
a mask takes some 10 ms, which every sequence of the step waits for."""
STACK_BYTES: Final = 256 << 20
"""A grammar is compiled by functions that call themselves for every rule that refers to another one. 64 KiB
of rules need some tens of MiB, which is more than threads have. Only what is touched takes memory."""

TRIAL_SECONDS: Final = 1.0
"""Of processor time, for one grammar."""
TRIAL_BYTES: Final = 512 << 20
"""Of memory, for one grammar."""
TOO_COSTLY: Final = (
    f"it takes more than {TRIAL_SECONDS:g} s or {TRIAL_BYTES >> 20} MiB; make expressions shorter, and "
    "multipleOf smaller or rarer"
)
PANIC: Final = "panic"
"""Stands for a failed assertion of the library, which says nothing of use."""

_SPECIAL: Final = re.compile(r"<[^<>\s\[\]]+>")
_TOKEN_RANGE: Final = re.compile(r"<\[([^\[\]<>]*)\]>")
_MOST_TOKENS: Final = 1 << 19
"""More than any vocabulary has."""


def build(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """The automaton at its start, or in the state of an error (``LLMatcher.is_error``).

    To be called where there are ``STACK_BYTES`` of stack.
    """
    limits = LLParserLimits(
        max_items_in_row=MAX_ROW_ITEMS,
        initial_lexer_fuel=MAX_LEXER_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )
    built = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    # Some of what is too complex shows only with the first masks.
    mask = int.from_bytes(built.compute_bitmask(), "little")
    first = (mask & -mask).bit_length() - 1
    if first >= 0 and not built.is_error() and built.try_consume_tokens([first]):
        built.compute_bitmask()
        built.rollback(1)
    return built


def what_is_wrong(built: LLMatcher) -> str:
    """With an automaton at its start: the library's words, or empty."""
    if built.is_error():
        return str(built.get_error())
    if not built.is_accepting() and not built.compute_bitmask().strip(b"\0"):
        return "no text satisfies it"
    return ""


def try_out(grammar: str) -> str:
    """Why a grammar cannot be compiled; empty: it can, at a bounded cost. Takes some 0.1 s.

    What depends on the vocabulary is left open: special tokens of any name are taken to exist.

    Raises:
        RuntimeError: the trial itself failed.
    """
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=grammar.encode(),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    if done.returncode > 0:
        raise RuntimeError(f"a grammar could not be tried out: {done.stderr.decode(errors='replace')[-500:]}")
    # By a signal where it met a bound.
    return TOO_COSTLY if done.returncode else done.stdout.decode()


def on_large_stack(function: Callable[[], None]) -> None:
    """Run it on a thread of its own with ``STACK_BYTES`` of stack, up to its end.

    Raises:
        RuntimeError: no such thread can be had.
    """
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=function, name="grammar compiler")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()


_stack_size = threading.Lock()


class _AnyTokens:
    """The 256 bytes, and every special token that a grammar names."""

    bos_token_id = None
    eos_token_id = None

    def __init__(self, grammar: str) -> None:
        self.tokens = [bytes((byte,)) for byte in range(256)]
        named = sorted(set(_SPECIAL.findall(grammar)))
        self.special_token_ids = list(range(256, 256 + len(named)))
        self.tokens += [name.encode() for name in named]
        numbers = [int(n) for ids in _TOKEN_RANGE.findall(grammar) for n in re.findall(r"\d{1,7}", ids)]
        self.tokens += [b""] * (min(max(numbers, default=0), _MOST_TOKENS) + 1 - len(self.tokens))

    def __call__(self, text: bytes) -> list[int]:
        return []


def _reason(grammar: str) -> str:
    tokenizer: Any = LLTokenizer(TokenizerWrapper(_AnyTokens(grammar)))
    return what_is_wrong(build(grammar, tokenizer))


def _address_space() -> int:
    """Bytes that this process has reserved."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _main() -> None:
    grammar = sys.stdin.buffer.read().decode()
    reasons: list[str] = []

    def run() -> None:
        try:
            reasons.append(_reason(grammar))
        except BaseException:
            # A failed assertion of the library is no Exception.
            reasons.append(PANIC)

    most = _address_space() + STACK_BYTES + TRIAL_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)  # streams that are under way come first
    signal.setitimer(signal.ITIMER_PROF, TRIAL_SECONDS)
    on_large_stack(run)
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    sys.stdout.buffer.write(reasons[0].encode())


if __name__ == "__main__":
    _main()
