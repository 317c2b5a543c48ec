"""The tests of divided models, on GPUs: a GPU for each rank over NCCL, or ranks that share one over gloo."""

from __future__ import annotations

import pytest

from tests.engine.test_tensor_parallel import *  # noqa: F403

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda"
