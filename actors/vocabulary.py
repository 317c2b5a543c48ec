"""Whether two models speak the same token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from paceline.actors.engine.errors import IncompatibleDraftError


def vocabulary_hash(token_ids: Mapping[str, int]) -> bytes:
    """SHA-256 over the token -> id map, in id order, without padding: 32 bytes.

    Each entry is written as (id, length of the token's UTF-8, the UTF-8), so no two maps share an
    encoding. Rows of the output layer that have no token (padding) do not take part.
    """
    digest = hashlib.sha256()
    for token, token_id in sorted(token_ids.items(), key=lambda entry: (entry[1], entry[0])):
        text = token.encode("utf-8", "surrogatepass")
        digest.update(b"%d:%d:" % (token_id, len(text)))
        digest.update(text)
    return digest.digest()


def emulated_vocabulary_hash(vocab_size: int) -> bytes:
    """The vocabulary of an emulated model: ``vocab_size`` nameless tokens. Equal sizes are one map."""
    return vocabulary_hash({f"<{token_id}>": token_id for token_id in range(vocab_size)})


def check_compatible(
    *, draft_model: str, draft_vocabulary: bytes, target_model: str, target_vocabulary: bytes
) -> None:
    """Let a draft propose for a target only if a token id means the same to both.

    Sizes are not compared: unequal padding of one map is fine, and ids past the common size are masked.

    Raises:
        IncompatibleDraftError: naming both models and the remedy.
    """
    if draft_vocabulary == target_vocabulary:
        return
    raise IncompatibleDraftError(
        f"draft model {draft_model!r} cannot propose for target model {target_model!r}: their tokenizers map "
        f"tokens to different ids (vocabulary {draft_vocabulary.hex()[:12] or 'missing'} against "
        f"{target_vocabulary.hex()[:12]}); use a draft of the target's own family, with the same tokenizer"
    )
