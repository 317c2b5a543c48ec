"""What all tests share: a quiet, offline environment, and the models that real-weight tests need."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Before anything imports ray or transformers: both read these once, and child processes inherit them.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Busy-waiting OpenMP threads starve every other process of a small machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("KMP_BLOCKTIME", "0")
# Starting Ray forks this process; gRPC's handlers of forks may crash the child before it is Ray.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Kernels compiled for tiny models of every shape are not worth hundreds of MiB.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU; torch is asked only if there are any."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return Path(__file__).parent.parent


@pytest.fixture(scope="session")
def model_folder() -> Callable[[str], Path]:
    """A function from a catalogue name to the folder of its weights, pulled on first use and kept in the
    user's cache between runs. For tests marked ``weights``."""
    from paceline.actors.weights import pull

    return lambda name: pull(name, thorough=False)
