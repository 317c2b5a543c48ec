"""A model that recites known text: every token is followed by one fixed other token.

Its vocabulary has the 256 bytes, pieces of a text in many scripts cut without regard for characters, and
two special tokens. What it says from any token on is therefore known without asking any implementation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS = "<s>"
EOS = "</s>"

SCRIPTS = (
    "한국어는 음절마다 세 바이트다. 日本語も漢字も同じこと。Ελληνικά, кириллица, עברית, العربية, हिन्दी। "
    "🚴🚴‍♀️ 👩‍👩‍👧‍👦 é — “quotes” … ½ × 𝛼𝛽𝛾 ไทย ñandú ẞ 끝까지 달려라 🏁"
)
"""One to four bytes a character, joined emoji and a combining accent among them."""

CHARACTERS = "".join(chr(code) for code in range(0x21, 0x7F))
"""One token each, all different: a stop string of one character marks one place."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

_TO_TEXT = {byte: chr(byte) for byte in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}
_TO_TEXT |= {
    byte: chr(0x100 + index) for index, byte in enumerate(b for b in range(256) if b not in dict(_TO_TEXT))
}
"""The alphabet in which byte-level vocabularies write bytes."""


class Recitation:
    """The vocabulary and what follows what."""

    def __init__(self) -> None:
        pieces = _cut(SCRIPTS.encode(), random.Random(11))
        tokens = [*_TO_TEXT.values(), *(piece for piece in pieces if len(piece) > 1), BOS, EOS]
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.eos = self.ids[EOS]
        self.scripts = [self.ids[piece] for piece in pieces]
        """Token ids of SCRIPTS."""
        self.characters = [self.ids[_TO_TEXT[ord(character)]] for character in CHARACTERS]
        """Token ids of CHARACTERS."""
        self.next = [0] * len(tokens)
        others = [i for i in range(len(tokens)) if i not in {*self.scripts, *self.characters, self.eos}]
        for path, end in (
            (self.scripts, self.eos),
            (self.characters, self.eos),
            ([*others, self.eos], self.scripts[0]),
        ):
            for token_id, following in zip(path, [*path[1:], end], strict=True):
                self.next[token_id] = following

    @property
    def vocab_size(self) -> int:
        return len(self.ids)

    def follow(self, token_id: int, num_tokens: int) -> list[int]:
        """What is said after ``token_id``."""
        said: list[int] = []
        for _ in range(num_tokens):
            token_id = self.next[token_id]
            said.append(token_id)
        return said

    def slips(self, every: int) -> list[int]:
        """What follows each token for one who is wrong after ``every``-th of them (1: after all)."""
        return [
            (following + 1) % self.vocab_size if token_id % every == 0 else following
            for token_id, following in enumerate(self.next)
        ]

    def tokenizer(self) -> PreTrainedTokenizerFast:
        backend = Tokenizer(models.BPE(vocab=self.ids, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, self.ids[BOS])]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token=BOS, eos_token=EOS, chat_template=CHAT_TEMPLATE
        )

    def save(self, folder: Path, successors: Sequence[int] | None = None) -> str:
        """Write a model folder; returns its path. ``successors``: what follows each token; None: ``next``."""
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.vocab_size,
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=1024,
                bos_token_id=self.ids[BOS],
                eos_token_id=self.eos,
                tie_word_embeddings=False,
            )
        )
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            embeddings = torch.randn(self.vocab_size, 64, generator=generator)
            # Nearly orthogonal: a row of the head that is a token's embedding answers to that token alone.
            embeddings = torch.nn.functional.normalize(embeddings, dim=1)
            head = torch.zeros(self.vocab_size, 64)
            for token_id, following in enumerate(self.next if successors is None else successors):
                head[following] += 5.0 * embeddings[token_id]
            model.model.embed_tokens.weight.copy_(embeddings)
            model.lm_head.weight.copy_(head)
            # The layer adds nothing.
            model.model.layers[0].self_attn.o_proj.weight.zero_()
            model.model.layers[0].mlp.down_proj.weight.zero_()
        model.save_pretrained(folder)
        self.tokenizer().save_pretrained(folder)
        return str(folder)


def _cut(data: bytes, rng: random.Random) -> list[str]:
    """Cut into pieces of 1 to 4 bytes, no piece twice and none of them plain ASCII alone."""
    pieces: list[str] = []
    start = 0
    while start < len(data):
        end = start + rng.randint(1, 4)
        while end < len(data) and (
            (piece := _text(data[start:end])) in pieces or (len(piece) == 1 and data[start] < 0x80)
        ):
            end += 1
        pieces.append(_text(data[start:end]))
        start = end
    assert len(set(pieces)) == len(pieces)
    return pieces


def _text(data: bytes) -> str:
    return "".join(_TO_TEXT[byte] for byte in data)
