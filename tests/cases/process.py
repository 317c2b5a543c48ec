"""Targets and drafts in processes of their own, which can be stopped and killed by a signal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping

from paceline.actors.channels import ChannelSettings

_TARGET = """
import asyncio, sys
from paceline.actors.channels import ChannelSettings
from paceline.actors.engine.config import NgramConfig, TargetEngineConfig
from paceline.actors.model_spec import ModelSpec
from paceline.actors.target import TargetActor, TargetSpec

async def main(name, source, keepalive):
    model = ModelSpec(source, num_threads=1, num_blocks=1024)
    engine = TargetEngineConfig(num_speculative_tokens=4, ngram=NgramConfig(enabled=False))
    channels = ChannelSettings(keepalive_seconds=float(keepalive), keepalive_timeout_seconds=float(keepalive))
    print(await TargetActor(TargetSpec(name, model, "tiny", engine, channels)).start(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""

_DRAFT = """
import asyncio, json, sys
from paceline.actors.channels import ChannelSettings
from paceline.actors.draft import DraftActor, DraftSpec
from paceline.actors.model_spec import ModelSpec

async def main(name, source, keepalive, targets):
    async def discover():
        return json.loads(targets)
    model = ModelSpec(source, num_threads=1, num_blocks=1024)
    channels = ChannelSettings(keepalive_seconds=float(keepalive), keepalive_timeout_seconds=float(keepalive))
    await DraftActor(DraftSpec(name, model, channels=channels, discovery_seconds=0.1), discover).start()
    print("started", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


class Process:
    """One actor's process. ``line``: what it printed once it was ready (a target: its address)."""

    def __init__(self, process: asyncio.subprocess.Process, line: str) -> None:
        self._process = process
        self.line = line

    @classmethod
    async def target(cls, name: str, source: str, channels: ChannelSettings) -> Process:
        return await cls._start(_TARGET, name, source, str(channels.keepalive_seconds))

    @classmethod
    async def draft(
        cls, name: str, source: str, channels: ChannelSettings, targets: Mapping[str, str]
    ) -> Process:
        return await cls._start(
            _DRAFT, name, source, str(channels.keepalive_seconds), json.dumps(dict(targets))
        )

    @classmethod
    async def _start(cls, script: str, *arguments: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, *arguments, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode().strip()
        assert line, f"{arguments[0]} did not start"
        return cls(process, line)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        """Alive, but it does nothing and answers nothing, pings neither."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    async def end(self) -> None:
        """Kill it if it is still there. Idempotent."""
        if self._process.returncode is None:
            self.kill()
        await self._process.wait()

    def _signal(self, number: int) -> None:
        os.kill(self._process.pid, number)
