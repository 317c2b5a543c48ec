"""Structured output: constraints compiled for a model's vocabulary, by llguidance.

A constraint says which texts are allowed. Its matcher allows a token exactly where the text with the token's
bytes is the beginning of an allowed text; how the text is split into tokens is left to the model.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Final, TypeVar

from llguidance import LLMatcher, LLTokenizer

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.parameters import Constraint
from paceline.actors.grammar_matcher import GrammarMatcher
from paceline.actors.grammar_text import field_of, grammar_of, is_plain
from paceline.actors.grammar_trial import PANIC, build, on_large_stack, try_out, what_is_wrong
from paceline.actors.grammar_vocabulary import GrammarVocabulary, VocabularyLoader

MAX_CACHED_GRAMMARS: Final = 64
MAX_REASON_LENGTH: Final = 300

ResultT = TypeVar("ResultT")


def is_prepared(compiler: GrammarCompiler | None, constraint: Constraint | None) -> bool:
    """Whether there is nothing to compile (any more)."""
    return compiler is None or constraint is None or compiler.is_ready(constraint)


async def prepare_constraint(compiler: GrammarCompiler | None, constraint: Constraint | None) -> None:
    """Compile a constraint on another thread, where it is not compiled yet.

    Raises:
        InvalidArgumentError: it cannot be compiled.
    """
    if compiler is not None and constraint is not None and not compiler.is_ready(constraint):
        await asyncio.to_thread(compiler.prepare, constraint)


class GrammarCompiler:
    """A ``ConstraintCompiler`` for one model. Safe for use by several threads; a matcher is not.

    Args:
        load_vocabulary: called once, when the first constraint comes.
        vocab_size: width of the masks in bits: rows of the model's output layer that are tokens.
    """

    def __init__(self, load_vocabulary: VocabularyLoader, vocab_size: int) -> None:
        self._load_vocabulary: VocabularyLoader | None = load_vocabulary
        self._vocab_size = vocab_size
        self._vocabulary: GrammarVocabulary | None = None
        self._refusal = ""
        """Why there is no vocabulary; empty until that is known."""
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._compiling = threading.Lock()
        self._reading = threading.Lock()

    def is_ready(self, constraint: Constraint) -> bool:
        """Whether ``matcher`` will answer at once."""
        with self._reading:
            return constraint in self._compiled

    def prepare(self, constraint: Constraint) -> None:
        """Compile it, so that ``matcher`` answers at once. Takes milliseconds, up to about a second for the
        worst constraint, and seconds for the first one of all.

        Raises:
            InvalidArgumentError: it cannot be compiled.
        """
        self._find(constraint)

    def matcher(self, constraint: Constraint, stop_token_ids: Collection[int]) -> GrammarMatcher:
        """See ``ConstraintCompiler``. Takes microseconds for a constraint that was compiled before."""
        compiled, vocabulary = self._find(constraint)
        stops = frozenset(stop_token_ids)
        return GrammarMatcher(
            compiled,
            vocab_size=self._vocab_size,
            end_token_ids={
                token_id
                for token_id in stops
                if token_id in vocabulary.end_token_ids or vocabulary.is_special(token_id)
            },
            ignored_token_ids=vocabulary.end_token_ids - stops,
        )

    def _find(self, constraint: Constraint) -> tuple[LLMatcher, GrammarVocabulary]:
        with self._reading:
            compiled = self._compiled.get(constraint)
            if compiled is not None and self._vocabulary is not None:
                self._compiled.move_to_end(constraint)
                return compiled, self._vocabulary
        with self._compiling:
            with self._reading:
                compiled = self._compiled.get(constraint)
            vocabulary = self._load()
            if compiled is None:
                compiled = compile_grammar(constraint, vocabulary.tokenizer)
        with self._reading:
            self._compiled[constraint] = compiled
            self._compiled.move_to_end(constraint)
            while len(self._compiled) > MAX_CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return compiled, vocabulary

    def _load(self) -> GrammarVocabulary:
        if self._refusal:
            raise InvalidArgumentError("constraint", self._refusal)
        if self._vocabulary is None:
            assert self._load_vocabulary is not None
            try:
                self._vocabulary = _run("constraint", self._load_vocabulary)
            except InvalidArgumentError as error:
                self._refusal = error.reason
                raise
            self._load_vocabulary = None  # and the tokenizer that it holds
        return self._vocabulary


def compile_grammar(constraint: Constraint, tokenizer: LLTokenizer) -> LLMatcher:
    """The automaton of a constraint, at its start.

    Raises:
        InvalidArgumentError: it has none, or is too complex, or no text satisfies it.
    """
    grammar = grammar_of(constraint)
    compiled = _run(field_of(constraint), lambda: build(grammar, tokenizer))
    if error := what_is_wrong(compiled):
        raise InvalidArgumentError(field_of(constraint), f"cannot be compiled: {_reason(error)}")
    return compiled


@lru_cache(maxsize=MAX_CACHED_GRAMMARS)
def check_grammar(constraint: Constraint) -> None:
    """Whether a constraint can be compiled at a bounded cost, as far as that can be told without a model.

    Names of special tokens in a grammar are not looked up; the target that compiles it does. What has passed
    lately passes at once. What may be dear is tried out in a process of its own: takes some 0.1 s, up to a
    second of processor time or two for what is refused.

    Raises:
        InvalidArgumentError: it cannot.
    """
    if is_plain(constraint):
        compile_grammar(constraint, _BYTES)
    elif error := try_out(grammar_of(constraint)):
        raise InvalidArgumentError(field_of(constraint), f"cannot be compiled: {_reason(error)}")


_BYTES: Final = LLTokenizer("byte", slices=[])
"""One token for each byte."""


def _reason(error: str) -> str:
    """The library's reason in one line."""
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines() if line.strip()]
    first = lines[0] if lines else "unknown error"
    if first.startswith(PANIC):
        # For example a special token where the vocabulary has none at all.
        return "it refers to what this model does not have, or is too complex"
    detail = next((line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")), "")
    if detail:
        first = f"{detail}; {first}"
    return first if len(first) <= MAX_REASON_LENGTH else first[: MAX_REASON_LENGTH - 1] + "…"


def _run(field: str, function: Callable[[], ResultT]) -> ResultT:
    """Run code of the library where it has enough stack.

    Raises:
        InvalidArgumentError: it failed, of ``field``, besides what ``function`` raises itself.
    """
    results: list[ResultT] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    try:
        on_large_stack(run)
    except RuntimeError as error:
        raise InvalidArgumentError(field, f"cannot be compiled at present: {error}") from error
    if results:
        return results[0]
    [failure] = errors
    # A failed assertion of the library is no Exception.
    if type(failure).__name__ != "PanicException":
        raise failure
    raise InvalidArgumentError(field, f"cannot be compiled: {_reason(PANIC)}") from failure
