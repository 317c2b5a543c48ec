"""The whole service in one process: targets, drafts and a gateway over real gRPC, real models, no Ray."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from paceline.actors import model_spec
from paceline.actors.channels import ChannelSettings
from paceline.actors.draft import DraftActor, DraftSpec
from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.config import DraftEngineConfig, NgramConfig, TargetEngineConfig
from paceline.actors.execution_client import ExecutionClient
from paceline.actors.model_spec import LoadedModel, Loader, ModelSpec, WarmableRunner
from paceline.actors.target import TargetActor, TargetSpec
from paceline.cluster.gateway import Gateway, GatewaySettings
from paceline.cluster.service import GenerationLogic, ServiceInfo
from paceline.cluster.tokenization import TextCodec, load_codec
from paceline.protos import generation_pb2 as proto
from tests.requests import request

NO_LOOKUP = NgramConfig(enabled=False)
MAX_SPECULATIVE_TOKENS = 16

TARGET_ENGINE = TargetEngineConfig(
    max_num_batched_tokens=512, num_speculative_tokens=MAX_SPECULATIVE_TOKENS, ngram=NO_LOOKUP
)
"""Tails as long as the request allows, of drafts alone."""

DRAFT_ENGINE = DraftEngineConfig(max_num_batched_tokens=512)


PACE = 3.0
MAX_PAUSE_SECONDS = 0.03


class PacedRunner:
    """A real model whose steps take several times as long as they compute.

    A target must be dearer than its draft, or there is nothing to gain from drafts. The pause leaves the
    processor to the draft, as an accelerator does, and grows with what a busy machine makes of its steps.
    """

    def __init__(self, runner: WarmableRunner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        started = time.monotonic()
        logits = self._runner.forward(batch)
        time.sleep(min(PACE * (time.monotonic() - started), MAX_PAUSE_SECONDS))
        return logits


def load_paced(spec: ModelSpec, *, max_num_batched_tokens: int) -> LoadedModel:
    loaded = model_spec.load(spec, max_num_batched_tokens=max_num_batched_tokens)
    return replace(loaded, runner=cast(WarmableRunner, PacedRunner(loaded.runner)))


async def until(condition: Callable[[], object], *, what: str, seconds: float = 10.0) -> None:
    """Returns once the condition holds."""
    try:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {seconds:g} s: {what}") from None


@dataclass
class Answer:
    """A streamed answer, put together."""

    token_ids: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[proto.PositionLogprobs] = field(default_factory=list)
    last: proto.GenerateChunk = field(default_factory=proto.GenerateChunk)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def speculation(self) -> proto.SpeculationStats:
        return self.last.speculation

    @property
    def num_rejected(self) -> int:
        return int(self.speculation.draft_tokens - self.speculation.accepted_tokens)

    def add(self, chunk: proto.GenerateChunk) -> None:
        assert not self.last.finish_reason, "a chunk came after the last one"
        assert len(chunk.accepted) == len(chunk.token_ids)
        self.token_ids.extend(chunk.token_ids)
        self.accepted.extend(chunk.accepted)
        self.texts.append(chunk.text)
        self.logprobs.extend(chunk.logprobs)
        self.last = chunk


class Service:
    """Start it, ask it, hurt its parts, stop it (or ``async with``).

    Args:
        model: source of the targets' model.
        draft: source of the drafts' model; None = no drafts.
        num_blocks: KV blocks of each target.
        draft_blocks: KV blocks of each draft.
        load_target: brings the targets' model up.
    """

    def __init__(
        self,
        model: str,
        draft: str | None = None,
        *,
        num_targets: int = 1,
        num_drafts: int = 1,
        num_blocks: int = 1024,
        draft_blocks: int = 1024,
        target_engine: TargetEngineConfig = TARGET_ENGINE,
        draft_engine: DraftEngineConfig = DRAFT_ENGINE,
        settings: GatewaySettings | None = None,
        channels: ChannelSettings | None = None,
        load_target: Loader = load_paced,
    ) -> None:
        self.model = ModelSpec(model, dtype="float32", device="cpu", num_threads=1, num_blocks=num_blocks)
        self.draft_model = (
            ModelSpec(draft, dtype="float32", device="cpu", num_threads=1, num_blocks=draft_blocks)
            if draft
            else None
        )
        self.targets: dict[str, TargetActor] = {}
        self.drafts: list[DraftActor] = []
        self.addresses: dict[str, str] = {}
        """What the gateway and the drafts find: target id -> address."""
        self.codec: TextCodec = load_codec(model)
        self._num_targets = num_targets
        self._num_drafts = num_drafts if draft else 0
        self._target_engine = target_engine
        self._draft_engine = draft_engine
        self._channels = channels or ChannelSettings()
        self._load_target = load_target
        self.gateway = Gateway(
            "gateway",
            settings,
            lambda address, events: ExecutionClient(
                address=address, gateway_id="gateway", events=events, settings=self._channels
            ),
        )
        self.logic = GenerationLogic(self.gateway, self.codec, ServiceInfo("tiny", draft or ""))
        self._ids = itertools.count()
        self._discovery: asyncio.Task[None] | None = None
        self.running = False

    async def __aenter__(self) -> Service:
        return await self.start()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stops it. Nothing may be left of any request by then."""
        try:
            if kind is None:
                await self.wait_until_idle()
        finally:
            await self.stop()

    # ------------------------------------------------------------ parts

    async def start(self) -> Service:
        self._discovery = asyncio.create_task(self._discover_for_gateway())
        for _ in range(self._num_targets):
            await self.add_target()
        for _ in range(self._num_drafts):
            await self.add_draft()
        await self.wait_until_complete(60)
        self.running = True
        return self

    async def add_target(self) -> TargetActor:
        name = f"target-{next(self._ids)}"
        spec = TargetSpec(name, self.model, "tiny", self._target_engine, self._channels)
        target = TargetActor(spec, self._load_target)
        self.addresses[name] = await target.start()
        self.targets[name] = target
        return target

    async def add_draft(self) -> DraftActor:
        assert self.draft_model is not None
        spec = DraftSpec(
            f"draft-{next(self._ids)}",
            self.draft_model,
            engine=self._draft_engine,
            channels=self._channels,
            discovery_seconds=0.1,
        )
        draft = DraftActor(spec, self._discover)
        await draft.start()
        self.drafts.append(draft)
        return draft

    @property
    def complete(self) -> bool:
        """The gateway has every target, and every target every draft."""
        known = {load.target_id for load in self.gateway.snapshot().targets if load.accepting}
        return known == set(self.addresses) and all(
            len(target.drafts) == len(self.drafts) for target in self.targets.values()
        )

    async def wait_until_complete(self, seconds: float = 20.0) -> None:
        await until(lambda: self.complete, what="everything is attached", seconds=seconds)

    async def stop_target(self, target_id: str, grace: float = 0.0) -> None:
        del self.addresses[target_id]
        await self.targets.pop(target_id).stop(grace)

    async def stop_draft(self, draft: DraftActor) -> None:
        self.drafts.remove(draft)
        await draft.stop()

    async def stop(self) -> None:
        self.running = False
        if self._discovery is not None:
            self._discovery.cancel()
            await asyncio.wait({self._discovery})
        await self.gateway.close()
        self.logic.close()
        for draft in self.drafts:
            await draft.stop()
        for target in self.targets.values():
            await target.stop(0.0)

    async def _discover(self) -> dict[str, str]:
        return dict(self.addresses)

    async def _discover_for_gateway(self) -> None:
        while True:
            self.gateway.update_targets(self.addresses)
            await asyncio.sleep(0.05)

    # ------------------------------------------------------------ requests

    async def generate(self, prompt: str = "", **options: Any) -> proto.GenerateResponse:
        """One request whole; see ``tests.requests.request``."""
        return await self.logic.generate(request(prompt, **options))

    def chunks(self, prompt: str = "", **options: Any) -> AsyncGenerator[proto.GenerateChunk, None]:
        """One request as a stream. To be closed by whoever leaves early."""
        return self.logic.generate_stream(request(prompt, **options))

    async def stream(self, prompt: str = "", **options: Any) -> Answer:
        """One request as a stream, read to its end."""
        answer = Answer()
        async for chunk in self.chunks(prompt, **options):
            answer.add(chunk)
        assert answer.last.finish_reason, "the stream ended without a last chunk"
        return answer

    async def stream_all(self, *requests: dict[str, Any]) -> list[Answer]:
        """All at the same time."""
        return list(await asyncio.gather(*(self.stream(**options) for options in requests)))

    # ------------------------------------------------------------ state

    async def target_state(self) -> list[dict[str, Any]]:
        return [(await target.status())["engine"] for target in self.targets.values()]

    async def draft_state(self) -> list[dict[str, Any]]:
        return [(await draft.status())["engine"] for draft in self.drafts]

    async def is_idle(self) -> bool:
        """Nothing of any request is left anywhere, and every KV block is free."""
        return (
            self.gateway.snapshot().num_live == 0
            and all(
                state["num_running"] == state["num_waiting"] == 0
                and state["free_blocks"] == state["total_blocks"]
                for state in await self.target_state()
            )
            and all(
                state["num_sequences"] == 0 and state["num_free_blocks"] == state["num_blocks"]
                for state in await self.draft_state()
            )
        )

    async def wait_until_idle(self, seconds: float = 5.0) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not await self.is_idle():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError:
            states = [self.gateway.snapshot(), await self.target_state(), await self.draft_state()]
            raise AssertionError(f"not idle within {seconds:g} s: {states}") from None
