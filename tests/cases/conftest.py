"""Services that the cases share, and what must hold after each case."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
import pytest_asyncio
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from tests.cases.patience import be_patient
from tests.cases.recitation import Recitation
from tests.cases.reference import Reference
from tests.cases.service import Service
from tests.engine.models import noised, tiny_llama, unrelated
from tests.integration.tiny_models import save

transformers_logging.disable_progress_bar()

NOISE = 0.05
"""Spread of the noise of a draft that agrees in part."""

DRAFTS = ("equal", "noised", "unrelated")

SLIPPING = {"noised": 7, "unrelated": 1}
"""After every how many tokens a reciting draft is wrong. Rounds of 2, 3, 5 and 9 tokens do not keep step with
7, or its wrong tokens could all come where the bonus token does."""


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
    """A model that says known text, and its drafts, on disk."""

    recitation: Recitation
    model: str
    drafts: dict[str, str]
    """``equal``: knows the text too. ``noised``: slips after every 7th token. ``unrelated``: after each."""


@pytest.fixture(scope="package")
def reciter(tmp_path_factory: pytest.TempPathFactory) -> Reciter:
    folder = tmp_path_factory.mktemp("reciter")
    recitation = Recitation()
    model = recitation.save(folder / "equal")
    noised, unrelated = (
        recitation.save(folder / name, recitation.slips(every)) for name, every in SLIPPING.items()
    )
    return Reciter(recitation, model, {"equal": model, "noised": noised, "unrelated": unrelated})


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def recitals(reciter: Reciter) -> AsyncIterator[dict[str, Service]]:
    """The same reciting target with each kind of draft."""
    async with AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(Service(reciter.model, reciter.drafts[name]))
            for name in DRAFTS
        }


@pytest.fixture
def reciting(recitals: dict[str, Service]) -> Service:
    """The draft knows the text too: every draft token is right."""
    return recitals["equal"]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets wait for their drafts in this case, so that what it is about happens on a busy machine too."""
    be_patient(monkeypatch)


@pytest_asyncio.fixture(autouse=True, loop_scope="package")
async def nothing_is_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """After each case no sequence and no KV block of any service that it used is in use."""
    yield
    for value in list(request.node.funcargs.values()):
        services = value.values() if isinstance(value, dict) else [value]
        for service in services:
            if isinstance(service, Service) and service.running:
                await service.wait_until_idle()
