"""The draft actor: a draft engine that dials every target. No Ray in here."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.actors import model_spec
from paceline.actors.channels import ChannelSettings
from paceline.actors.client_stream import PeerLostError, PeerRefusedError
from paceline.actors.engine.config import DraftEngineConfig
from paceline.actors.engine.draft_engine import CandidateOutput, DraftEngine, DraftSnapshot
from paceline.actors.engine.errors import IncompatibleDraftError
from paceline.actors.engine.messages import DraftHello
from paceline.actors.engine_loop import EngineFailedError, EngineLoop
from paceline.actors.grammar import GrammarCompiler
from paceline.actors.model_spec import Allotment, LoadedModel, Loader, ModelSpec
from paceline.actors.verification_client import VerificationClient

logger = logging.getLogger(__name__)

Discover = Callable[[], Awaitable[Mapping[str, str]]]
"""Target id -> address of every target that there is now."""

GOODBYE_SECONDS = 2.0
"""How long a target may take to answer a goodbye."""


@dataclass(frozen=True)
class DraftSpec:
    """What proposes, and for how many."""

    draft_id: str
    """Unique among the replicas of the service, also over restarts."""
    model: ModelSpec
    served_model_name: str = ""
    """Empty: the model's source."""
    engine: DraftEngineConfig = field(default_factory=DraftEngineConfig)
    channels: ChannelSettings = field(default_factory=ChannelSettings)
    discovery_seconds: float = 1.0
    """How often to look which targets there are; sooner when a stream breaks."""
    stuck_after_seconds: float = 120.0
    """A single step of this length makes the draft unhealthy."""

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.source


@dataclass
class _Connection:
    """One target that this draft dials, for as long as it is there."""

    address: str
    client: VerificationClient
    task: asyncio.Task[None]


class DraftActor:
    """One engine for all targets. Start it once, stop it once."""

    def __init__(self, spec: DraftSpec, discover: Discover, load: Loader = model_spec.load) -> None:
        self.spec = spec
        self._discover = discover
        self._load_model = load
        self._allotment: Allotment | None = None
        self._engine_loop: EngineLoop[DraftEngine, dict[str, CandidateOutput]] | None = None
        self._hello: DraftHello | None = None
        self._vocabulary_hash = b""
        self._constraints: GrammarCompiler | None = None
        self._connections: dict[str, _Connection] = {}
        self._peers: dict[str, VerificationClient] = {}
        self._refused: dict[str, tuple[str, str]] = {}
        """Target id -> (address, reason). Not dialled again at that address."""
        self._changed = asyncio.Event()
        self._answered = asyncio.Event()
        """Set with each answer of a target to a hello."""
        self._discovery: asyncio.Task[None] | None = None
        self._discovery_error = ""
        self._stopped = False

    @property
    def refused(self) -> dict[str, str]:
        """Target id -> why that target refuses this draft."""
        return {target_id: reason for target_id, (_, reason) in self._refused.items()}

    async def start(self) -> None:
        """Load the model and start dialling. Raises: ModelError: the model cannot be served."""
        model = await asyncio.to_thread(
            self._load_model, self.spec.model, max_num_batched_tokens=self.spec.engine.max_num_batched_tokens
        )
        self._allotment = model.allotment
        self._vocabulary_hash = model.vocabulary_hash
        self._hello = self._make_hello(model)
        engine = DraftEngine(model.runner, self.spec.engine, constraints=model.constraints)
        self._constraints = model.constraints
        self._engine_loop = EngineLoop(
            engine,
            wait_seconds=engine.wait_seconds,
            step=engine.step,
            take_output=lambda: engine.take_outbox() or None,
            publish=self._publish,
            on_failed=self._on_failed,
            prepare=lambda: model_spec.prepare_thread(self.spec.model),
            name=f"draft engine {self.spec.draft_id}",
        )
        self._engine_loop.start()
        self._discovery = asyncio.create_task(self._run_discovery(), name="target discovery")

    async def wait_for_target(self, timeout_seconds: float) -> None:
        """Return once a target has taken this draft in, or when none has answered within the time.

        A draft that no target takes thus says so before it counts as ready.

        Raises: what ``health`` raises, IncompatibleDraftError above all.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                while not any(connection.client.attached for connection in self._connections.values()):
                    self.health()
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            logger.warning("no target yet after %g s; still looking", timeout_seconds)

    def health(self) -> None:
        """Raises:
        EngineFailedError: the draft must be replaced.
        IncompatibleDraftError: every target refuses it; the text says why.
        """
        if self._engine_loop is None or self._discovery is None:
            raise EngineFailedError("the draft has not been started")
        self._engine_loop.check(self.spec.stuck_after_seconds)
        if self._discovery.done() and not self._stopped:
            raise EngineFailedError("the draft no longer looks for targets")
        if self._refused and not self._connections:
            reasons = sorted(set(self.refused.values()))
            raise IncompatibleDraftError("every target refuses this draft: " + "; ".join(reasons))

    def fail(self, reason: str) -> None:
        """Count the draft as failed, and leave every target, although its engine may hang in a step."""
        if self._engine_loop is not None:
            self._engine_loop.fail(reason)

    async def status(self) -> dict[str, Any]:
        """Plain values. Answers after the step in progress; without counters where the engine has failed."""
        status: dict[str, Any] = {
            "id": self.spec.draft_id,
            "pid": os.getpid(),
            "model": self.spec.model_name,
            "targets": {
                target_id: {"address": connection.address, "attached": connection.client.attached}
                for target_id, connection in self._connections.items()
            },
            "refused": self.refused,
            "kv_cache": asdict(self._allotment) if self._allotment else None,
            "discovery_error": self._discovery_error,
            "error": "",
        }
        try:
            self.health()
        except (EngineFailedError, IncompatibleDraftError) as error:
            status["error"] = str(error)
        if self._engine_loop is not None and self._engine_loop.failure is None and not self._stopped:
            status["engine"] = asdict(await self.snapshot())
        return status

    async def snapshot(self) -> DraftSnapshot:
        """The engine's gauges and counters, after the step in progress.

        Raises: EngineFailedError if there is no engine that could tell.
        """
        if self._engine_loop is None:
            raise EngineFailedError("the draft has not been started")
        return await self._engine_loop.call(lambda engine: engine.snapshot())

    async def stop(self, grace: float = GOODBYE_SECONDS) -> None:
        """Say goodbye to every target, wait up to ``grace`` seconds for the answers, and stop. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if self._discovery is not None:
            self._discovery.cancel()
            await asyncio.wait({self._discovery})
        tasks = {connection.task for connection in self._connections.values()}
        for connection in self._connections.values():
            if connection.client.attached:
                connection.client.leave("the draft is stopping")
            else:
                connection.task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._engine_loop is not None:
            await self._engine_loop.stop()

    def _make_hello(self, model: LoadedModel) -> DraftHello:
        limit = self.spec.engine.max_model_len or model.runner.max_model_len
        cores = model_spec.cores_of(self.spec.model, model.allotment)
        return DraftHello(
            draft_id=self.spec.draft_id,
            model=self.spec.model_name,
            vocab_size=model.runner.vocab_size,
            capacity=self.spec.engine.max_num_seqs,
            max_model_len=min(limit, model.runner.max_model_len),
            method="model",
            host=cores.host,
            num_threads=cores.num_threads,
        )

    async def _run_discovery(self) -> None:
        while True:
            try:
                self._reconcile(await self._discover())
                self._discovery_error = ""
            except Exception as error:
                # The source of targets may be away for a moment; the streams that are open stay open.
                logger.exception("looking for targets failed")
                self._discovery_error = f"{type(error).__name__}: {error}"
            await self._pause()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self.spec.discovery_seconds):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    def _reconcile(self, targets: Mapping[str, str]) -> None:
        """Dial who is new, drop who is gone. A target that is listed no more but still attached is finishing
        what it has: it is drafted for until it ends the stream, or is found dead by its silence."""
        for target_id, connection in list(self._connections.items()):
            address = targets.get(target_id)
            leaving = address is None and connection.client.attached
            if address != connection.address and not leaving:
                connection.task.cancel()
                del self._connections[target_id]
        self._refused = {
            target_id: (address, reason)
            for target_id, (address, reason) in self._refused.items()
            if targets.get(target_id) == address
        }
        for target_id, address in targets.items():
            if target_id not in self._connections and target_id not in self._refused:
                self._dial(target_id, address)

    def _dial(self, target_id: str, address: str) -> None:
        assert self._hello is not None
        assert self._engine_loop is not None
        client = VerificationClient(
            target_id=target_id,
            address=address,
            hello=self._hello,
            vocabulary_hash=self._vocabulary_hash,
            engine_loop=self._engine_loop,
            settings=self.spec.channels,
            constraints=self._constraints,
            on_attached=self._answered.set,
        )
        self._peers[client.peer] = client
        task = asyncio.create_task(self._serve(client), name=f"draft {self.spec.draft_id} at {target_id}")
        self._connections[target_id] = _Connection(address, client, task)

    async def _serve(self, client: VerificationClient) -> None:
        try:
            await client.run()
        except PeerRefusedError as error:
            logger.error("target %s refuses this draft: %s", client.target_id, error)
            self._refused[client.target_id] = (client.address, str(error))
        except PeerLostError as error:
            logger.warning("target %s is lost: %s", client.target_id, error)
            if client.was_attached:
                # A target that broke may be replaced by now. One that was never there is dialled again at
                # the next look.
                self._changed.set()
        finally:
            self._peers.pop(client.peer, None)
            connection = self._connections.get(client.target_id)
            if connection is not None and connection.client is client:
                del self._connections[client.target_id]
            self._answered.set()

    def _publish(self, outputs: dict[str, CandidateOutput]) -> None:
        for peer, output in outputs.items():
            client = self._peers.get(peer)
            if client is not None:
                client.publish(output)

    def _on_failed(self, error: EngineFailedError) -> None:
        """Leave every target: they go on with other drafts, or without."""
        for connection in self._connections.values():
            connection.client.leave(str(error))
        if self._discovery is not None:
            self._discovery.cancel()
        self._answered.set()
