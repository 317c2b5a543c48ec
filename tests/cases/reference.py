"""What a model says by plain ``transformers`` generation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from tests.engine.models import eager_copy

NEAR_TIE = 1e-4
"""A difference of float32 logits that the order of summation may turn round."""


class NearTieError(AssertionError):
    """A prompt that is unfit for a comparison."""


class Reference:
    """Greedy continuations, each computed once."""

    def __init__(self, model: PreTrainedModel, *, never: Sequence[int] = ()) -> None:
        """``never``: token ids that must not be said (rows of the head without a token)."""
        self._model = eager_copy(model)
        self._never = list(never)
        self._known: dict[tuple[int, ...], list[int]] = {}
        self._logits: dict[tuple[int, ...], npt.NDArray[np.float64]] = {}

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The next ``num_tokens`` token ids.

        Raises:
            NearTieError: the two best tokens of a position are closer than ``NEAR_TIE``. Such a prompt
                tells nothing about whoever goes the other way.
        """
        known = self._known.get(tuple(prompt), [])
        if len(known) < num_tokens:
            ids = torch.tensor([list(prompt)])
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
                suppress_tokens=self._never or None,
                return_dict_in_generate=True,
                output_logits=True,
            )
            logits = torch.cat(output.logits).float()
            logits[:, self._never] = -torch.inf
            best = logits.topk(2, dim=1).values
            if float((best[:, 0] - best[:, 1]).min()) <= NEAR_TIE:
                raise NearTieError(f"{prompt} has a near tie within {num_tokens} tokens: take another prompt")
            known = self._known[tuple(prompt)] = output.sequences[0, len(prompt) :].tolist()
        return known[:num_tokens]

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float64]:
        """Logits ``[V]`` of the token after these, from scratch."""
        known = self._logits.get(tuple(token_ids))
        if known is None:
            output = self._model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
            known = self._logits[tuple(token_ids)] = output.logits[0, -1].double().numpy()
        return known.copy()

    def clear(self, prompts: Iterable[Sequence[int]], num_tokens: int) -> list[Sequence[int]]:
        """Those of ``prompts`` that are fit for a comparison of so many tokens."""
        found = []
        for prompt in prompts:
            try:
                self.greedy(prompt, num_tokens)
            except NearTieError:
                continue
            found.append(prompt)
        return found
