"""Whether a submitted sequence can be served, decided before it costs anything."""

from __future__ import annotations

from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.messages import Submit
from paceline.actors.engine.priority import check_priority


def check_submit(event: Submit, vocab_size: int, max_model_len: int, kv_capacity_tokens: int) -> None:
    """Check what only the target knows of a request.

    Raises:
        InvalidArgumentError: the field and the allowed range.
    """
    check_priority(event.priority)
    num_tokens = len(event.token_ids)
    if num_tokens == 0:
        raise InvalidArgumentError("token_ids", "must hold at least one token")
    if not 1 <= event.prompt_length <= num_tokens:
        raise InvalidArgumentError(
            "prompt_length", f"must be in [1, {num_tokens}] (the tokens given), got {event.prompt_length}"
        )
    if min(event.token_ids) < 0 or max(event.token_ids) >= vocab_size:
        wrong = next(token_id for token_id in event.token_ids if not 0 <= token_id < vocab_size)
        raise InvalidArgumentError("token_ids", f"must be in [0, {vocab_size - 1}], got {wrong}")
    total = event.prompt_length + event.stopping.max_tokens
    if total > max_model_len:
        raise InvalidArgumentError(
            "stopping.max_tokens",
            f"prompt ({event.prompt_length} tokens) + max_tokens ({event.stopping.max_tokens}) must be at "
            f"most the model's length of {max_model_len} tokens",
        )
    if total > kv_capacity_tokens:
        raise InvalidArgumentError(
            "stopping.max_tokens",
            f"prompt ({event.prompt_length} tokens) + max_tokens ({event.stopping.max_tokens}) must be at "
            f"most the {kv_capacity_tokens} tokens that the target's KV cache holds",
        )
