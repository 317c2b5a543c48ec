"""Services that the cases share, and what must hold after each case."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
import pytest_asyncio
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from tests.cases.recitation import Recitation
from tests.cases.reference import Reference
from tests.cases.service import Service
from tests.engine.models import noised, tiny_llama, unrelated
from tests.integration.tiny_models import save

transformers_logging.disable_progress_bar()

NOISE = 0.05
"""Spread of the noise of a draft that agrees in part."""

DRAFTS = ("equal", "noised", "unrelated")


@dataclass(frozen=True)
class TinyModels:
    """A random Llama of 256 tokens (one for each byte) and its drafts, on disk."""

    model: PreTrainedModel
    reference: Reference
    target: str
    drafts: dict[str, str]
    """``equal``: the target's own function. ``noised``: agrees in part. ``unrelated``: hardly ever."""


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_llama()
    drafts = {"equal": model, "noised": noised(model, NOISE), "unrelated": unrelated(model)}
    assert set(drafts) == set(DRAFTS)
    return TinyModels(
        model,
        Reference(model),
        save(model, folder / "target"),
        {name: save(draft, folder / name) for name, draft in drafts.items()},
    )


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def services(tiny: TinyModels) -> AsyncIterator[dict[str, Service]]:
    """The same target with each kind of draft."""
    async with AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(Service(tiny.target, tiny.drafts[name])) for name in DRAFTS
        }


@dataclass(frozen=True)
class Reciter:
    """A model that says known text."""

    recitation: Recitation
    model: str


@pytest.fixture(scope="package")
def reciter(tmp_path_factory: pytest.TempPathFactory) -> Reciter:
    recitation = Recitation()
    return Reciter(recitation, recitation.save(tmp_path_factory.mktemp("reciter")))


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def reciting(reciter: Reciter) -> AsyncIterator[Service]:
    """The draft knows the text too: every draft token is right."""
    async with Service(reciter.model, reciter.model) as service:
        yield service


@pytest_asyncio.fixture(autouse=True, loop_scope="package")
async def nothing_is_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """After each case no sequence and no KV block of any service that it used is in use."""
    yield
    for value in list(request.node.funcargs.values()):
        services = value.values() if isinstance(value, dict) else [value]
        for service in services:
            if isinstance(service, Service) and service.running:
                await service.wait_until_idle()
