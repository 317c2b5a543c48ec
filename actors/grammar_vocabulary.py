"""A model's tokens as bytes, in the form that grammars are compiled for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from paceline.actors.engine.errors import InvalidArgumentError


@dataclass(frozen=True)
class GrammarVocabulary:
    """Token id -> bytes, and which tokens are no text."""

    tokenizer: LLTokenizer
    end_token_ids: frozenset[int]
    """The model's end-of-text tokens."""

    def is_special(self, token_id: int) -> bool:
        """Whether the token is no text; ids that are no token are not."""
        return token_id < self.tokenizer.vocab_size and self.tokenizer.is_special_token(token_id)


VocabularyLoader = Callable[[], GrammarVocabulary]
"""Takes 0.2 to 2 s of processor time, by the number of tokens. Raises InvalidArgumentError: see
``from_transformers``."""


def from_transformers(tokenizer: Any, end_token_ids: Collection[int]) -> GrammarVocabulary:
    """The vocabulary of a ``transformers`` tokenizer.

    Raises:
        InvalidArgumentError: it does not say which bytes its tokens stand for.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InvalidArgumentError("constraint", "is not available for a model with this kind of tokenizer")
    ends = sorted(end_token_ids)
    try:
        found = LLTokenizer(backend.to_str(), eos_token=ends or None)
    except ValueError as error:
        raise InvalidArgumentError(
            "constraint", f"is not available for a model with this kind of tokenizer ({str(error)[:200]})"
        ) from error
    if ends:
        return GrammarVocabulary(found, frozenset(ends))
    # Without an end-of-text token the library takes some token of the text for it.
    num_tokens = found.vocab_size
    return from_table(
        [found.decode_bytes([token_id]) for token_id in range(num_tokens)],
        [
            token_id
            for token_id in range(num_tokens)
            if token_id != found.eos_token and found.is_special_token(token_id)
        ],
    )


def from_table(
    tokens: Sequence[bytes], special_token_ids: Collection[int] = (), end_token_id: int | None = None
) -> GrammarVocabulary:
    """A vocabulary from the bytes of each token."""
    tokenizer = LLTokenizer(TokenizerWrapper(_Table(tokens, special_token_ids, end_token_id)))
    return GrammarVocabulary(tokenizer, frozenset() if end_token_id is None else frozenset({end_token_id}))


def emulated(vocab_size: int) -> GrammarVocabulary:
    """The vocabulary of an emulated model: ids 0 … 255 are bytes, id n above reads ``<n>``."""
    return from_table(
        [bytes((token_id,)) if token_id < 256 else f"<{token_id}>".encode() for token_id in range(vocab_size)]
    )


class _Table:
    """What the library asks of a tokenizer that is not its own."""

    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special_token_ids: Collection[int], end_token_id: int | None
    ) -> None:
        self.tokens = list(tokens)
        self.special_token_ids = sorted(special_token_ids)
        self.eos_token_id = end_token_id
        """None: the library adds an id past the last one, which no mask that leaves a matcher has."""

    def __call__(self, text: bytes) -> list[int]:
        """Masks do not depend on how a text is split (see ``grammar_text``)."""
        return []
