"""A model's step of few tokens, compiled by ``torch.compile``.

Between two matrix products an eager model runs dozens of small operations, each of which is dispatched on its
own and reads and writes its rows anew. A compiler makes one loop of them. Attention stays what it is, the
same code over the same paged cache: to the compiler it is one operator of which it knows the shapes alone, so
that the whole model is one graph, whatever lies in the cache.

Rounding differs from the eager step's, since what is computed in one loop is not rounded to bfloat16 in
between. So this is for drafts: what a draft proposes changes when a token comes, never which.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor import utils as inductor_utils
from transformers import PreTrainedModel

from paceline.actors.engine.attention import AttentionCall, AttentionTarget
from paceline.actors.engine.errors import ModelError

MAX_COMPILED_TOKENS = 64
"""Steps of more tokens are eager: they have enough to compute beside what compiling saves."""

_LATER = "eager_on_recompile"
"""While requests run, a step that no compiled one fits is run eagerly: compiling would hold all up for a
minute."""


class _Step(threading.local):
    """The attention of the step that runs on this thread. A compiled graph takes tensors and numbers only."""

    attention: AttentionTarget | None = None


_step = _Step()


@torch.library.custom_op("paceline::paged_attention", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    assert _step.attention is not None
    call = AttentionCall(layer, query, key, value, scaling, sliding_window, softcap)
    return _step.attention.attend(call).contiguous()


@_attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


class _OpaqueAttention:
    """Stands for the step's attention while the model is traced."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        output: torch.Tensor = _attend(
            call.query, call.key, call.value, call.layer, call.scaling, call.sliding_window, call.softcap
        )
        return output


class CompiledStep:
    """Runs ``model`` on up to ``MAX_COMPILED_TOKENS`` tokens: eagerly, but for what was compiled."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._model = torch.compile(model, dynamic=True)
        self._attention = _OpaqueAttention()
        # Frozen weights are constants: only then does the compiler know the packed ones of the CPU's kernels.
        # The option of torch.compile of this name reaches but half of what reads it.
        self._freezing = device.type == "cpu"
        self._may_compile = False

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """In here the first call with one token compiles, and so does the first with more, a minute each.

        Raises:
            ModelError: the model cannot be compiled here.
        """
        self._may_compile = True
        try:
            with (
                tempfile.TemporaryDirectory(prefix="paceline-compile-") as folder,
                inductor_utils.fresh_cache(dir=folder),
                inductor_config.patch(freezing=self._freezing),
            ):
                yield
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelError(
                f"enforce_eager: the model cannot be compiled here ({reason}): set enforce_eager to true, or "
                "install a C++ compiler if there is none"
            ) from error
        finally:
            self._may_compile = False

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionTarget
    ) -> torch.Tensor:
        """Logits ``[T, V]`` of all tokens; ``token_ids`` and ``positions`` are int64 ``[T]``."""
        _step.attention = attention
        try:
            stance = "default" if self._may_compile else _LATER
            with torch.compiler.set_stance(stance):
                output = self._model(  # type: ignore[no-untyped-call]
                    input_ids=token_ids[None],
                    position_ids=positions[None],
                    use_cache=False,
                    paged_batch=self._attention,
                )
        finally:
            _step.attention = None
        logits: torch.Tensor = output.logits[0]
        return logits
