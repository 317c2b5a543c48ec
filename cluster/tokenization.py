"""Text to token ids and back: one codec for each kind of model source."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from paceline.actors.end_tokens import end_token_ids
from paceline.actors.engine.errors import InvalidArgumentError, ModelError
from paceline.cluster.detokenization import IncrementalDetokenizer

EMULATED_SCHEME = "emulated"
ROLES = ("system", "user", "assistant", "tool")

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    Raises:
        InvalidArgumentError: the role is not one of ``ROLES``.
    """

    role: str
    content: str
    index: int = 0
    """Place in the conversation, for error texts."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidArgumentError(
                f"conversation.messages[{self.index}].role",
                f"must be one of {', '.join(ROLES)}, got {self.role[:64]!r}",
            )


class TextCodec(Protocol):
    """What the gateway needs to know of a model's vocabulary."""

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 … vocab_size − 1, padding of the model's output layer excluded."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a text: the model's and the tokenizer's, sorted."""

    @property
    def max_token_characters(self) -> int:
        """No token's text is longer."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds (BOS, at most once)."""

    def encode_conversation(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of the chat template's text, which ends where the assistant's turn begins.

        Raises:
            InvalidArgumentError: the model has no chat template, or the template refuses the messages.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of all the ids, special tokens left out, cut characters as U+FFFD."""

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, special or not."""

    def vocabulary(self) -> Mapping[str, int]:
        """Token → id."""

    def detokenizer(self) -> IncrementalDetokenizer: ...


class TransformersCodec:
    """A ``transformers`` tokenizer.

    ``clean_up_tokenization_spaces`` is off throughout: that cleaning changes text that is already out.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: dict[str, int] = dict(tokenizer.get_vocab())
        self._known_ids = frozenset(self._vocabulary.values())
        self._vocab_size = max(self._known_ids) + 1
        self._max_token_characters = max(map(len, self._vocabulary))
        self._eos_token_ids = tuple(sorted(set(eos_token_ids)))
        added = tokenizer.added_tokens_decoder
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._text_ids = self._known_ids - self._special_ids
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_token_ids = self._find_byte_tokens()

    @classmethod
    def load(cls, source: str, *, trust_remote_code: bool = False) -> TransformersCodec:
        """Read the tokenizer of a local folder or hub id.

        Raises:
            ModelError: there is none, or it cannot be read.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        except Exception as error:
            # transformers raises a different type for each way in which a tokenizer can be unusable.
            raise ModelError(f"cannot read a tokenizer from {source!r}: {_first_line(error)}") from error
        return cls(tokenizer, end_token_ids(source, tokenizer, trust_remote_code=trust_remote_code))

    def _find_byte_tokens(self) -> frozenset[int]:
        if self._backend is not None and "ByteFallback" not in repr(self._backend.decoder):
            return frozenset()
        return frozenset(i for token, i in self._vocabulary.items() if _BYTE_TOKEN.fullmatch(token))

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_token_ids

    @property
    def max_token_characters(self) -> int:
        # A token's name has a character for each byte of its text, or more.
        return self._max_token_characters

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer(text, verbose=False)["input_ids"]]

    def encode_conversation(self, messages: Sequence[ChatMessage]) -> list[int]:
        if not self.has_chat_template:
            raise InvalidArgumentError(
                "conversation", "this model has no chat template; send `prompt` or `token_ids` instead"
            )
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            rendered = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:
            # A template is a program that came with the model: whatever it raises is about these messages.
            raise InvalidArgumentError(
                "conversation", f"the model's chat template refuses it: {_first_line(error)}"
            ) from error
        # The template writes the special tokens itself; adding them again would double the BOS.
        encoded = self._tokenizer(rendered, add_special_tokens=False, verbose=False)
        return [int(i) for i in encoded["input_ids"]]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._decode_text([i for i in token_ids if i in self._text_ids])

    def token_text(self, token_id: int) -> str:
        if token_id not in self._known_ids:
            return ""
        text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return str(text)

    def vocabulary(self) -> Mapping[str, int]:
        return self._vocabulary

    def detokenizer(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(
            self._decode_text,
            skipped=lambda token_id: token_id not in self._text_ids,
            byte_token_ids=self._byte_token_ids,
        )

    def _decode_text(self, token_ids: list[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(token_ids, skip_special_tokens=True))
        return str(
            self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


class EmulatedCodec:
    """The vocabulary of an emulated model: ids 0 … 255 are bytes of UTF-8, id n above reads ``<n>``.

    It has no special tokens and no chat template.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ModelError(f"an emulated model needs a vocab_size of at least 1, got {vocab_size}")
        self._vocab_size = vocab_size

    @classmethod
    def from_source(cls, source: str) -> EmulatedCodec:
        """Raises: ModelError for a source that the emulated runner would refuse too."""
        # Imported late: it brings torch, which a gateway of a real model does without.
        from paceline.actors.engine.emulated import EmulatedModel

        return cls(EmulatedModel.from_source(source).vocab_size)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return ()

    @property
    def max_token_characters(self) -> int:
        return len(f"<{self._vocab_size}>")

    @property
    def has_chat_template(self) -> bool:
        return False

    def encode(self, text: str) -> list[int]:
        token_ids = list(text.encode("utf-8", errors="replace"))
        if any(token_id >= self._vocab_size for token_id in token_ids):
            raise InvalidArgumentError(
                "prompt", f"has a byte that this emulated vocabulary of {self._vocab_size} tokens lacks"
            )
        return token_ids

    def encode_conversation(self, messages: Sequence[ChatMessage]) -> list[int]:
        raise InvalidArgumentError(
            "conversation", "an emulated model has no chat template; send `prompt` or `token_ids` instead"
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        pieces = (
            bytes((i,)) if i < 256 else f"<{i}>".encode() for i in token_ids if 0 <= i < self.vocab_size
        )
        return b"".join(pieces).decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def vocabulary(self) -> Mapping[str, int]:
        return {(f"<0x{i:02X}>" if i < 256 else f"<{i}>"): i for i in range(self._vocab_size)}

    def detokenizer(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.decode)


def load_codec(source: str, *, trust_remote_code: bool = False) -> TextCodec:
    """The codec of a resolved model source: a local folder, a hub id or ``emulated://…``.

    Raises:
        ModelError: no tokenizer can be read from it.
    """
    if urlsplit(source).scheme == EMULATED_SCHEME:
        return EmulatedCodec.from_source(source)
    return TransformersCodec.load(source, trust_remote_code=trust_remote_code)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__)[:300]
