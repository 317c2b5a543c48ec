"""The service says what the model's law is, under every rule, filter and penalty; and this test would notice
if it did not.

4,000 seeds × 3 tokens, top-k 4, against the exact joint law (``laws``); heavy but for a selection. The seeds
are those of 80 requests of 50 choices each, with bounds of 1, 2 and 4 draft tokens by turns: what is counted
are accepted, corrected and bonus tokens, of first and of later rounds.

Which faults show where (``faults``): 1 to 5 are faults of the ratio rules, and show wherever p and q differ;
1 and 2 the more q(x) varies, 5 the more the filters remove, so all are tried at T = 1 with top-k 4. The
coupled rule commits the target's own samples whatever is drafted, so the first five cannot bias it, which is
shown too. 6 to 8 spoil the target's law itself, hence every rule: 6 and 7 need something that depends on the
history or removes likely tokens, 8 a temperature other than 1.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from paceline.actors.engine.config import DraftEngineConfig, TargetEngineConfig
from tests.cases import service as services
from tests.cases.exercise import exercised, until_exercised
from tests.cases.faults import COUPLED, FAULTS, HARMLESS, RULES
from tests.cases.laws import (
    BOUNDS,
    FILTERS,
    LENGTH,
    NUM_CHOICES,
    NUM_REQUESTS,
    TEMPERATURES,
    Drawn,
    be_patient,
    draft_of,
    draw,
    echoing_llama,
    joint_law,
    setting,
    total_variation,
    z_score,
)
from tests.cases.reference import Reference
from tests.cases.service import NO_LOOKUP, Service
from tests.integration.tiny_models import save

pytestmark = pytest.mark.asyncio(loop_scope="package")

NUM_SEEDS = 4000
NUM_AT_A_TIME = NUM_CHOICES * NUM_REQUESTS
TARGET_ENGINE = TargetEngineConfig(
    max_num_seqs=NUM_AT_A_TIME,
    max_num_batched_tokens=NUM_AT_A_TIME * (max(BOUNDS) + 1),
    num_speculative_tokens=max(BOUNDS),
    ngram=NO_LOOKUP,
)
DRAFT_ENGINE = DraftEngineConfig(max_num_seqs=NUM_AT_A_TIME, max_num_batched_tokens=512)


@dataclass(frozen=True)
class Speaker:
    """A model, the exact laws of what it says, and a draft that agrees in part, on disk."""

    reference: Reference
    target: str
    draft: str


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    folder = tmp_path_factory.mktemp("laws")
    model = echoing_llama()
    return Speaker(
        Reference(model),
        save(model, folder / "target"),
        save(draft_of(model), folder / "draft"),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def service(speaker: Speaker) -> AsyncIterator[Service]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "PACE", 0.0)
        be_patient(patch)
        async with Service(
            speaker.target, speaker.draft, target_engine=TARGET_ENGINE, draft_engine=DRAFT_ENGINE
        ) as started:
            yield started


def check_exercised(drawn: Drawn) -> None:
    """Drafts had a say in the tokens that are counted."""
    num_seeds = len(drawn.paths)
    exercised(drawn.num_early > 0.1 * num_seeds, "draft tokens are accepted")
    exercised(drawn.num_rejected > 0.1 * num_seeds, "draft tokens are rejected")


async def distance(
    service: Service, speaker: Speaker, rule: str, filters: str, temperature: float, num_seeds: int
) -> float:
    """z of the service's first tokens against their exact law."""
    law = setting(filters, temperature, speaker.reference)
    drawn = await draw(service, RULES[rule], law, num_seeds)
    found = z_score(drawn.paths, joint_law(speaker.reference, law))
    print(
        f"z = {found:.2f}: {rule}, {filters}, T = {temperature}, {num_seeds} seeds; "
        f"{drawn.num_drafted} drafted, {drawn.num_accepted} accepted, {drawn.num_early} of the first"
    )
    check_exercised(drawn)
    return found


# ---------------------------------------------------------------- it is exact


@pytest.mark.parametrize("temperature", TEMPERATURES)
async def test_every_setting_has_a_law_of_its_own(speaker: Speaker, temperature: float) -> None:
    """Or a service that ignores it would pass."""
    laws = {
        name: joint_law(speaker.reference, setting(name, temperature, speaker.reference)) for name in FILTERS
    }
    for name, law in laws.items():
        assert sum(law.values()) == pytest.approx(1.0)
        assert all(len(path) == LENGTH for path in law)
        if name != "top_k":
            assert total_variation(law, laws["top_k"]) > 0.05, name


@pytest.mark.parametrize(
    ("rule", "filters", "temperature"),
    [
        ("coupled", "all", 1.0),
        ("coupled", "repetition", 2.0),
        ("standard", "top_k", 1.0),
        ("standard", "all", 0.5),
        ("standard", "frequency", 2.0),
        ("block", "top_k", 2.0),
        ("block", "all", 1.0),
        ("block", "presence", 0.5),
    ],
)
@until_exercised
async def test_first_tokens_have_their_law(
    service: Service, speaker: Speaker, rule: str, filters: str, temperature: float
) -> None:
    assert abs(await distance(service, speaker, rule, filters, temperature, 500)) < 4


@pytest.mark.heavy
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("rule", RULES)
@until_exercised
async def test_every_rule_and_setting(
    service: Service, speaker: Speaker, rule: str, filters: str, temperature: float
) -> None:
    assert abs(await distance(service, speaker, rule, filters, temperature, NUM_SEEDS)) < 4


# ---------------------------------------------------------------- it would be noticed


async def distance_with(
    service: Service,
    speaker: Speaker,
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    fault: str,
    num_seeds: int,
) -> float:
    """z of the first tokens of a service that has the fault."""
    injected = FAULTS[fault]
    with monkeypatch.context() as patch:
        injected.inject(patch)
        z = await distance(service, speaker, rule, injected.filters, injected.temperature, num_seeds)
        await service.wait_until_idle()
    return z


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        ("coupled", "6: once per step"),
        ("standard", "4: replaced from the next row"),
        ("block", "8: another temperature"),
    ],
)
@until_exercised
async def test_faults_are_noticed(
    service: Service, speaker: Speaker, monkeypatch: pytest.MonkeyPatch, rule: str, fault: str
) -> None:
    assert await distance_with(service, speaker, monkeypatch, rule, fault, 300) > 5


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("rule", "fault"), [(rule, name) for name, fault in FAULTS.items() for rule in fault.rules]
)
@until_exercised
async def test_every_fault_is_noticed(
    service: Service, speaker: Speaker, monkeypatch: pytest.MonkeyPatch, rule: str, fault: str
) -> None:
    assert await distance_with(service, speaker, monkeypatch, rule, fault, NUM_SEEDS) > 5


@until_exercised
async def test_nothing_that_drafts_do_biases_the_coupled_rule(
    service: Service, speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a single token changes, whatever is drafted and verified."""
    law = setting("all", 2.0, speaker.reference)
    right = await draw(service, COUPLED, law, 100)
    check_exercised(right)
    await service.wait_until_idle()
    for fault, inject in HARMLESS.items():
        with monkeypatch.context() as patch:
            inject(patch)
            drawn = await draw(service, COUPLED, law, 100)
            await service.wait_until_idle()
        assert drawn.paths == right.paths, fault
        if fault in ("1", "2", "5"):
            exercised(drawn.num_accepted != right.num_accepted, f"{fault}: other tokens are drafted")
