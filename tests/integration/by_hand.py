"""Pools whose sizes a test sets while they run: an autoscaling policy that reads them from a file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from paceline.cluster.runtime import application_progress
from paceline.cluster.service_start import APPLICATION_NAME
from tests.integration.conftest import wait_until

RESIZE_SECONDS = 120.0


class SizeFromFile:
    """Serve's controller unpickles this one by value and calls it ten times a second."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        with open(self._path) as file:
            # Empty while it is being written.
            return int(file.read() or context.target_num_replicas), {}


@dataclass(frozen=True)
class PoolByHand:
    """One pool of the application that runs."""

    name: str
    file: Path

    def autoscaling(self, start: int, most: int) -> AutoscalingConfig:
        """To be given to Serve in place of the pool's own."""
        self.file.write_text(str(start))
        policy = AutoscalingPolicy(policy_function=SizeFromFile, policy_kwargs={"path": str(self.file)})
        return AutoscalingConfig(
            min_replicas=0,
            initial_replicas=start,
            max_replicas=most,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=policy,
        )

    def resize(self, size: int) -> float:
        """Ask for so many replicas; returns the seconds until so many take traffic and none is on its way."""
        began = time.monotonic()
        self.file.write_text(str(size))
        wait_until(
            lambda: self.settled(size), timeout_seconds=RESIZE_SECONDS, what=f"{size} replicas of {self.name}"
        )
        return time.monotonic() - began

    def settled(self, size: int) -> bool:
        pools = {pool.name: pool for pool in application_progress(APPLICATION_NAME)[2]}
        return pools[self.name].running == size and not sum(pools[self.name].other.values())
