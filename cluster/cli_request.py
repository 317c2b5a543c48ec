"""A request of the public contract from what was typed, and its answer in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.client import Timing
from paceline.protos import generation_pb2 as proto


@dataclass(frozen=True)
class RequestOptions:
    """What the options of ``paceline generate`` stand for; None = the service's own default."""

    model: str = ""
    chat: bool = False
    system: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    num_speculative_tokens: int | None = None


def build_request(prompt: str, options: RequestOptions) -> proto.GenerateRequest:
    """The message; whether its values are allowed is for the service to say.

    Raises:
        ValueError: a number that the message cannot carry at all.
    """
    request = proto.GenerateRequest(model=options.model)
    if options.chat:
        if options.system:
            request.conversation.messages.add(role="system", content=options.system)
        request.conversation.messages.add(role="user", content=prompt)
    else:
        request.prompt = prompt
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        value = getattr(options, name)
        if value is not None:
            setattr(request.sampling, name, value)
    if options.max_tokens is not None:
        request.stopping.max_tokens = options.max_tokens
    request.stopping.stop.extend(options.stop)
    request.stopping.ignore_eos = options.ignore_eos
    if options.num_speculative_tokens is not None:
        request.speculation.num_speculative_tokens = options.num_speculative_tokens
    return request


def statistics_line(
    timing: Timing, usage: proto.Usage, speculation: proto.SpeculationStats, finish_reason: int, seed: int
) -> str:
    """What one answer cost, on one line."""
    reason = proto.FinishReason.Name(finish_reason).removeprefix("FINISH_REASON_").lower()
    parts = [
        f"{usage.completion_tokens} tokens in {timing.last_token:.2f} s ({reason})",
        f"TTFT {timing.first_token * 1000:.0f} ms",
        f"{timing.decode_tokens_per_second or timing.tokens_per_second:.1f} tokens/s",
    ]
    if speculation.draft_tokens:
        parts.append(
            f"{speculation.accepted_tokens} of {speculation.draft_tokens} draft tokens accepted "
            f"({speculation.accepted_tokens / speculation.draft_tokens:.0%})"
        )
        parts.append(f"mean acceptance length {speculation.mean_acceptance_length:.2f}")
    else:
        parts.append("no draft tokens")
    parts.append(f"seed {seed}")
    return " · ".join(parts)


def split_by_token(
    text: str, token_ids: Sequence[int], encoded_ids: Sequence[int], encoded_texts: Sequence[str]
) -> list[str] | None:
    """Cut a chunk's ``text`` into the texts of its ``token_ids``.

    ``encoded_*`` is what the service's tokeniser makes of ``text``. None where the cut is not certain:
    the ids differ (text was held back, or tokenises otherwise), or the texts do not join to ``text``.
    """
    tail = len(encoded_ids) - len(token_ids)
    if tail < 0 or list(encoded_ids[tail:]) != list(token_ids):
        return None
    pieces = list(encoded_texts[tail:])
    return pieces if "".join(pieces) == text else None
