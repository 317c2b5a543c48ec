from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.cluster.scripted import ScriptedTargets, assert_clean


@pytest.fixture
async def targets() -> AsyncIterator[ScriptedTargets]:
    """The gateway must be left without a trace of any sequence."""
    scripted = ScriptedTargets(resume_timeout_seconds=0.2, attach_grace_seconds=0.1)
    yield scripted
    assert_clean(scripted)
    await scripted.gateway.close()
