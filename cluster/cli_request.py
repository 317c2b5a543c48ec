"""A request of the public contract from what was typed, and its answer in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.actors.engine.parameters import VerificationRule
from paceline.actors.wire import rule_to_proto
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
    n: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    num_speculative_tokens: int | None = None
    verification: VerificationRule | None = None
    priority: int | None = None
    timeout_s: float | None = None


_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "n"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def build_request(prompt: str, options: RequestOptions) -> proto.GenerateRequest:
    """The message; whether its values are allowed is for the service to say.

    Raises:
        ValueError: a number that the message cannot carry at all, or two constraints.
    """
    request = proto.GenerateRequest(model=options.model)
    if options.chat:
        if options.system:
            request.conversation.messages.add(role="system", content=options.system)
        request.conversation.messages.add(role="user", content=prompt)
    else:
        request.prompt = prompt
    for name in _SAMPLING:
        value = getattr(options, name)
        if value is not None:
            setattr(request.sampling, name, value)
    for token_id, bias in options.logit_bias:
        request.sampling.logit_bias[token_id] = bias
    for name in ("max_tokens", "min_tokens"):
        value = getattr(options, name)
        if value is not None:
            setattr(request.stopping, name, value)
    request.stopping.stop.extend(options.stop)
    request.stopping.ignore_eos = options.ignore_eos
    if options.num_speculative_tokens is not None:
        request.speculation.num_speculative_tokens = options.num_speculative_tokens
    if options.verification is not None:
        request.speculation.verification = rule_to_proto(options.verification)
    for name in ("logprobs", "priority", "timeout_s"):
        value = getattr(options, name)
        if value is not None:
            setattr(request, name, value)
    _constrain(request, options)
    return request


def _constrain(request: proto.GenerateRequest, options: RequestOptions) -> None:
    texts = [name for name in ("json_schema", "regex", "grammar") if getattr(options, name) is not None]
    if len(texts) + bool(options.choice) > 1:
        raise ValueError("a request has one constraint: a JSON schema, an expression, choices or a grammar")
    for name in texts:
        setattr(request.constraint, name, getattr(options, name))
    if options.choice:
        request.constraint.choice.values.extend(options.choice)


def parse_bias(entries: Iterable[str]) -> tuple[tuple[int, float], ...]:
    """Token ids and values of ``ID=VALUE`` entries.

    Raises:
        ValueError: an entry that is not of this form.
    """
    found: list[tuple[int, float]] = []
    for entry in entries:
        token_id, separator, value = entry.partition("=")
        try:
            if not separator:
                raise ValueError
            found.append((int(token_id), float(value)))
        except ValueError:
            raise ValueError(f"a bias reads ID=VALUE, such as 198=-100; got {entry!r}") from None
    return tuple(found)


def text_or_file(value: str) -> str:
    """The text of the file that ``value`` names, else ``value`` itself where it is JSON.

    Raises:
        ValueError: it is neither, or the file cannot be read.
    """
    if value.lstrip()[:1] in ("{", "[") or value.strip() in ("true", "false"):
        return value
    return text_of_file(value)


def text_of_file(path: str) -> str:
    """Raises: ValueError where the file cannot be read as text."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise ValueError(f"cannot read {path!r}: {reason}") from None


def reason_name(finish_reason: int) -> str:
    return proto.FinishReason.Name(finish_reason).removeprefix("FINISH_REASON_").lower()


def statistics_line(timing: Timing, finals: Sequence[proto.GenerateChunk]) -> str:
    """What an answer cost, on one line.

    Args:
        finals: the last chunk of each choice, by index.
    """
    num_tokens = sum(final.usage.completion_tokens for final in finals)
    draft_tokens = sum(final.speculation.draft_tokens for final in finals)
    accepted_tokens = sum(final.speculation.accepted_tokens for final in finals)
    reasons = ", ".join(dict.fromkeys(reason_name(final.finish_reason) for final in finals))
    parts = [
        f"{num_tokens} tokens in {timing.last_token:.2f} s ({reasons})",
        f"TTFT {timing.first_token * 1000:.0f} ms",
        f"{timing.decode_tokens_per_second or timing.tokens_per_second:.1f} tokens/s",
    ]
    if draft_tokens:
        rounds = sum(final.speculation.rounds for final in finals)
        share = accepted_tokens / draft_tokens
        parts.append(f"{accepted_tokens} of {draft_tokens} draft tokens accepted ({share:.0%})")
        parts.append(f"mean acceptance length {1 + accepted_tokens / rounds:.2f}")
    else:
        parts.append("no draft tokens")
    parts.append(f"seed {finals[0].seed}")
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
