"""The same weights in ``transformers``: generate, assisted generation, prompt lookup, continuous batching."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.loads import Reply
from benchmarks.prompts import BenchPrompt
from benchmarks.token_clock import TokenClock

BLOCK_SIZE = 256
"""Tokens of a page of its cache, its own default."""
MAX_BATCH_TOKENS = 512
"""As Paceline's ``max_num_batched_tokens``."""


class TransformersModels:
    """One copy of the weights for all of them, in this process.

    Args:
        draft: for assisted generation; None = none.
        token_ids: question id -> prompt.
    """

    def __init__(
        self, model: str, draft: str | None, dtype: str, max_tokens: int, token_ids: Mapping[int, list[int]]
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils import logging

        from paceline.actors import weights

        # Its bars and notes would break up the benchmark's own.
        logging.set_verbosity_error()
        logging.disable_progress_bar()

        def load(source: str) -> Any:
            kind = getattr(torch, dtype)
            return AutoModelForCausalLM.from_pretrained(str(weights.resolve(source)), dtype=kind).eval()

        self.model = load(model)
        self.assistant = load(draft) if draft else None
        self.token_ids = token_ids
        self.max_tokens = max_tokens
        own = self.model.generation_config
        self.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=own.eos_token_id,
            pad_token_id=own.pad_token_id,
        )


class TransformersGenerate:
    """``model.generate`` on one prompt at a time.

    Args:
        options: further arguments of generate, such as ``assistant_model``.
        speculative: they make it speculate: each call of the streamer is then one verified round.
    """

    most_at_a_time: int | None = 1

    def __init__(self, models: TransformersModels, *, speculative: bool = False, **options: Any) -> None:
        self._models = models
        self._speculative = speculative
        self._options = options

    async def ask(self, prompt: BenchPrompt) -> Reply:
        return await asyncio.to_thread(self._generate, self._models.token_ids[prompt.question_id])

    def _generate(self, token_ids: Sequence[int]) -> Reply:
        import torch

        clock = TokenClock()
        ids = torch.tensor([list(token_ids)])
        began = time.perf_counter()
        with torch.inference_mode():
            self._models.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self._models.generation_config,
                streamer=clock,
                **self._options,
            )
        moments = clock.moments
        # The first one is the prompt's.
        (first, num_first), (last, _) = moments[1], moments[-1]
        num_tokens = sum(count for _, count in moments[1:])
        rounds = len(moments) - 1 if self._speculative else 0
        accepted = num_tokens - rounds if rounds else 0
        return Reply(num_tokens, first - began, last - began, num_first, rounds, 0, accepted)


class ContinuousBatching:
    """``transformers``' continuous batching: its manager on a thread of its own, requests as they come.

    Args:
        most_at_a_time: requests in a batch; its cache is made for so many.
    """

    def __init__(self, models: TransformersModels, most_at_a_time: int) -> None:
        self.most_at_a_time: int | None = None
        self._models = models
        self._batch_size = most_at_a_time
        self._manager: Any = None
        self._count = 0

    def start(self) -> None:
        import torch
        from transformers import ContinuousBatchingConfig

        longest = max(map(len, self._models.token_ids.values())) + self._models.max_tokens
        blocks = self._batch_size * (-(-longest // BLOCK_SIZE) + 1)
        config = ContinuousBatchingConfig(
            page_size=BLOCK_SIZE,
            num_blocks=blocks,
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_requests_per_batch=self._batch_size,
            # Nobody shares prompts here: all contenders are sent the same ones.
            allow_block_sharing=False,
        )
        manager = self._models.model.init_continuous_batching(
            generation_config=self._models.generation_config, continuous_batching_config=config
        )
        with torch.inference_mode():  # its thread inherits the mode
            manager.start()
        self._manager = manager

    def stop(self) -> None:
        if self._manager is not None:
            self._manager.stop(block=True)
            self._manager = None

    async def ask(self, prompt: BenchPrompt) -> Reply:
        """Raises: RuntimeError where the request fails."""
        self._count += 1
        name = f"request-{self._count}"
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._manager.register_result_handler(name, result.set_result)
        began = time.perf_counter()
        self._manager.add_request(
            list(self._models.token_ids[prompt.question_id]),
            request_id=name,
            max_new_tokens=self._models.max_tokens,
            record_timestamps=True,
        )
        output = await result
        if output.error is not None:
            raise RuntimeError(f"continuous batching: {output.error}")
        moments = output.timestamps
        return Reply(len(output.generated_tokens), moments[0] - began, moments[-1] - began)
