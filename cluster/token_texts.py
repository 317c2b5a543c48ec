"""Log probabilities as the caller reads them, with the text of each token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from paceline.actors.engine.messages import TokenLogprobs
from paceline.cluster.tokenization import TextCodec
from paceline.protos import generation_pb2 as proto


class TokenTexts:
    """Texts of single tokens, each made once: at most as many as the vocabulary has."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """Of one token alone, special or not."""
        known = self._texts.get(token_id)
        if known is None:
            known = self._texts[token_id] = self._codec.token_text(token_id)
        return known

    def logprobs(
        self, token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs]
    ) -> Iterator[proto.PositionLogprobs]:
        """One for each of ``logprobs``: there are as many as tokens, or none."""
        for token_id, item in zip(token_ids, logprobs, strict=False):
            yield proto.PositionLogprobs(
                chosen=self._entry(token_id, item.logprob),
                top=[self._entry(other, value) for other, value in item.top],
            )

    def _entry(self, token_id: int, logprob: float) -> proto.TokenLogprob:
        return proto.TokenLogprob(token_id=token_id, logprob=logprob, text=self.text(token_id))
