"""What plain ``transformers`` generates, and where another answer first differs from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NEAR_TIE = 1e-4
"""Where the two best logits are closer than this, float32 sums in another order may swap them."""


@dataclass(frozen=True)
class Reference:
    """A greedy completion of one user turn."""

    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]
    """Per token: its logit less the second best."""

    def first_difference(self, found: Sequence[int]) -> int | None:
        """Index of the first token that differs; a missing or surplus one differs too."""
        for index, pair in enumerate(zip(self.token_ids, found, strict=False)):
            if pair[0] != pair[1]:
                return index
        return None if len(found) == len(self.token_ids) else min(len(found), len(self.token_ids))

    def is_near_tie(self, index: int) -> bool:
        return index < len(self.gaps) and self.gaps[index] < NEAR_TIE


class Oracle:
    """Float32, one thread, one prompt at a time, the library's own cache and attention. Remembers answers."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._known: dict[tuple[str, int], Reference] = {}

    def greedy(self, text: str, max_tokens: int) -> Reference:
        """Up to ``max_tokens`` tokens in answer to ``text`` as the first turn of a conversation; the end of
        sequence ends it, and is its last token."""
        key = (text, max_tokens)
        if key not in self._known:
            self._known[key] = self._generate(text, max_tokens)
        return self._known[key]

    def _generate(self, text: str, max_tokens: int) -> Reference:
        prompt = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            output = self.model.generate(
                **prompt,
                max_new_tokens=max_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        finally:
            torch.set_num_threads(num_threads)
        best = torch.cat(output.logits).topk(2).values
        num_prompt_tokens = prompt["input_ids"].shape[1]
        return Reference(
            num_prompt_tokens=num_prompt_tokens,
            token_ids=tuple(output.sequences[0, num_prompt_tokens:].tolist()),
            gaps=tuple((best[:, 0] - best[:, 1]).tolist()),
        )
