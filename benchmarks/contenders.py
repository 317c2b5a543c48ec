"""Whom the prompts are sent to: a running Paceline, or any server with OpenAI's completions."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Protocol

import grpc.aio
import httpx

from benchmarks.loads import Reply
from benchmarks.prompts import BenchPrompt
from paceline.protos import generation_pb2 as proto
from paceline.protos import generation_pb2_grpc as rpc


class Contender(Protocol):
    """Answers prompts greedily, as many at a time as it is asked."""

    @property
    def most_at_a_time(self) -> int | None:
        """None = any number."""

    async def ask(self, prompt: BenchPrompt) -> Reply:
        """Raises: whatever keeps it from an answer."""


class PacelineService:
    """A running service.

    Args:
        num_speculative_tokens: upper bound that every request asks for; None = the service's own choice.
    """

    most_at_a_time: int | None = None

    def __init__(
        self, channel: grpc.aio.Channel, max_tokens: int, *, num_speculative_tokens: int | None = None
    ) -> None:
        self._stub = rpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        self._max_tokens = max_tokens
        self._num_speculative_tokens = num_speculative_tokens

    async def ask(self, prompt: BenchPrompt) -> Reply:
        request = proto.GenerateRequest()
        request.conversation.messages.add(role="user", content=prompt.text)
        request.sampling.temperature = 0.0
        request.stopping.max_tokens = self._max_tokens
        if self._num_speculative_tokens is not None:
            request.speculation.num_speculative_tokens = self._num_speculative_tokens
        began = time.perf_counter()
        first = last = 0.0
        num_tokens = num_first = 0
        final = proto.GenerateChunk()
        async for chunk in self._stub.GenerateStream(request):
            final = chunk
            if chunk.token_ids:
                last = time.perf_counter() - began
                if not num_tokens:
                    first, num_first = last, len(chunk.token_ids)
                num_tokens += len(chunk.token_ids)
        speculation = final.speculation
        return Reply(
            num_tokens,
            first,
            last,
            num_first,
            speculation.rounds,
            speculation.draft_tokens,
            speculation.accepted_tokens,
        )


class OpenAIServer:
    """``POST {url}/completions``, streamed, with usage in the last event (vLLM, llama.cpp, SGLang, …).

    The prompt is sent as text, in the template of ``model``'s tokenizer. Tokens are counted by the server;
    the first event with text is taken to be one token.

    Args:
        url: with the version: ``http://127.0.0.1:8000/v1``.
        model: what the server calls it.
        texts: question id -> prompt in the chat template.
    """

    most_at_a_time: int | None = None

    def __init__(
        self, client: httpx.AsyncClient, url: str, model: str, max_tokens: int, texts: Mapping[int, str]
    ) -> None:
        self._client = client
        self._url = f"{url.rstrip('/')}/completions"
        self._model = model
        self._max_tokens = max_tokens
        self._texts = texts

    async def ask(self, prompt: BenchPrompt) -> Reply:
        """Raises: RuntimeError where the server refuses, breaks off, or does not count."""
        body = {
            "model": self._model,
            "prompt": self._texts[prompt.question_id],
            "max_tokens": self._max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        first = last = 0.0
        num_tokens = 0
        async with self._client.stream("POST", self._url, json=body) as response:
            if response.is_error:
                told = (await response.aread()).decode(errors="replace")
                raise RuntimeError(f"{self._url}: {response.status_code}: {told[:300]}")
            async for line in response.aiter_lines():
                event = _event(line)
                if event is None:
                    continue
                if "error" in event:
                    raise RuntimeError(f"{self._url}: {event['error']}")
                if any(choice.get("text") for choice in event.get("choices") or ()):
                    last = time.perf_counter() - began
                    first = first or last
                usage = event.get("usage") or {}
                num_tokens = usage.get("completion_tokens", num_tokens)
        if not num_tokens:
            raise RuntimeError(f"{self._url}: no usage in the stream; it must know stream_options")
        return Reply(num_tokens, first, last)


def _event(line: str) -> dict[str, Any] | None:
    """The object of a line of server-sent events; None for other lines and the end mark."""
    if not line.startswith("data:"):
        return None
    data = line[5:].strip()
    if data == "[DONE]":
        return None
    event: dict[str, Any] = json.loads(data)
    return event
