"""The service says what the model's law is, under every rule, filter and penalty; and this test would notice
if it did not.

4,000 seeds × 3 tokens, top-k 4, against the exact joint law (``laws``); heavy but for a selection. The seeds
are those of 80 requests of 50 choices each, with bounds of 1, 2 and 4 draft tokens by turns: what is counted
are accepted, corrected and bonus tokens, of first and of later rounds.

Which faults show where (``faults``): 1 to 5 are faults of the ratio rules, and show wherever p and q differ;
1 and 2 the more q(x) varies, 5 the more the filters remove, so all are tried at T = 1 with top-k 4. The
coupled rule commits the target's own samples whatever is drafted, so the first five cannot bias it, which is
shown too. 6 to 8 spoil the target's law itself, hence every rule: 6 and 7 need something that depends on the
history (a penalty, a constraint) or removes likely tokens, 8 a temperature other than 1.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy as np
import pytest
import pytest_asyncio

from paceline.actors.engine.config import DraftEngineConfig, TargetEngineConfig
from tests.cases.conftest import DRAFTS
from tests.cases.exercise import BOUNDS as EVERY_BOUND
from tests.cases.exercise import exercised, until_exercised
from tests.cases.faults import COUPLED, FAULTS, HARMLESS, RULES
from tests.cases.laws import (
    BOUNDS,
    FILTERS,
    LENGTH,
    NUM_CHOICES,
    NUM_REQUESTS,
    PROMPT,
    TEMPERATURES,
    Drawn,
    draft_of,
    draw,
    echoing_llama,
    joint_law,
    setting,
    total_variation,
    z_score,
)
from tests.cases.patience import be_patient
from tests.cases.reference import Reference
from tests.cases.service import NO_LOOKUP, Service
from tests.engine.models import unrelated
from tests.integration.tiny_models import save

pytestmark = pytest.mark.asyncio(loop_scope="package")

NUM_SEEDS = 4000
NUM_AT_A_TIME = NUM_CHOICES * NUM_REQUESTS
TARGET_ENGINE = TargetEngineConfig(
    max_num_seqs=NUM_AT_A_TIME,
    max_num_batched_tokens=NUM_AT_A_TIME * (max(EVERY_BOUND) + 1),
    num_speculative_tokens=max(EVERY_BOUND),
    ngram=NO_LOOKUP,
)
DRAFT_ENGINE = DraftEngineConfig(max_num_seqs=NUM_AT_A_TIME, max_num_batched_tokens=512)


@dataclass(frozen=True)
class Speaker:
    """A model, the exact laws of what it says, and its drafts, on disk."""

    reference: Reference
    target: str
    proposers: dict[str, Reference]
    """Each kind of draft, and what it would say itself."""
    drafts: dict[str, str]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    folder = tmp_path_factory.mktemp("laws")
    model = echoing_llama()
    drafts = {"equal": model, "noised": draft_of(model), "unrelated": unrelated(model)}
    return Speaker(
        Reference(model),
        save(model, folder / "target"),
        {name: Reference(draft) for name, draft in drafts.items()},
        {name: save(draft, folder / name) for name, draft in drafts.items()},
    )


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def voices(speaker: Speaker) -> AsyncIterator[dict[str, Service]]:
    """The same target with each kind of draft."""
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        be_patient(patch)
        yield {
            name: await stack.enter_async_context(
                Service(speaker.target, draft, target_engine=TARGET_ENGINE, draft_engine=DRAFT_ENGINE)
            )
            for name, draft in speaker.drafts.items()
        }


@pytest.fixture
def service(voices: dict[str, Service]) -> Service:
    """With the draft that agrees in part."""
    return voices["noised"]


def check_exercised(drawn: Drawn, draft: str = "noised") -> None:
    """Drafts had a say in the tokens that are counted."""
    num_seeds = len(drawn.paths)
    exercised(draft == "unrelated" or drawn.num_early > 0.1 * num_seeds, "draft tokens are accepted")
    exercised(draft == "equal" or drawn.num_rejected > 0.1 * num_seeds, "draft tokens are rejected")


async def distance(
    service: Service,
    speaker: Speaker,
    rule: str,
    filters: str,
    temperature: float,
    num_seeds: int,
    *,
    draft: str = "noised",
    bounds: Sequence[int] = BOUNDS,
) -> float:
    """z of the service's first tokens against their exact law."""
    law = setting(filters, temperature, speaker.reference)
    drawn = await draw(service, RULES[rule], law, num_seeds, bounds)
    found = z_score(drawn.paths, joint_law(speaker.reference, law))
    print(
        f"z = {found:.2f}: {rule}, {filters}, T = {temperature}, {draft} draft, {num_seeds} seeds; "
        f"{drawn.num_drafted} drafted, {drawn.num_accepted} accepted, {drawn.num_early} of the first"
    )
    check_exercised(drawn, draft)
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
        ("coupled", "all", 0.5),
        ("coupled", "repetition", 2.0),
        ("coupled", "constraint", 1.0),
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
    """B38, among others: each rule at T = 0.5 and 2."""
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


@pytest.mark.parametrize(
    ("rule", "temperature", "draft"), [("standard", 2.0, "equal"), ("block", 0.5, "unrelated")]
)
@until_exercised
async def test_any_draft_leaves_the_law_as_it_is(
    voices: dict[str, Service], speaker: Speaker, rule: str, temperature: float, draft: str
) -> None:
    """B38."""
    z = await distance(
        voices[draft], speaker, rule, "top_k", temperature, 500, draft=draft, bounds=EVERY_BOUND
    )
    assert abs(z) < 4


@pytest.mark.heavy
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("rule", RULES)
@until_exercised
async def test_every_draft_leaves_the_law_as_it_is(
    voices: dict[str, Service], speaker: Speaker, rule: str, temperature: float, draft: str
) -> None:
    """B38."""
    z = await distance(
        voices[draft], speaker, rule, "top_k", temperature, NUM_SEEDS, draft=draft, bounds=EVERY_BOUND
    )
    assert abs(z) < 4


def share_of_other_pairs(speaker: Speaker, draft: str) -> float:
    """How often the two tokens that a draft has left are not the target's two."""
    found = 0.0
    for path, chance in joint_law(speaker.reference, setting("top_2", 1.0, speaker.reference)).items():
        for length in range(LENGTH):
            pairs = [
                set(np.argsort(model.logits([*PROMPT, *path[:length]]))[-2:].tolist())
                for model in (speaker.reference, speaker.proposers[draft])
            ]
            found += chance * (pairs[0] != pairs[1]) / LENGTH
    return found


@pytest.mark.parametrize("rule", RULES)
@until_exercised
async def test_other_tokens_left_to_the_draft(service: Service, speaker: Speaker, rule: str) -> None:
    """B39: of its two likeliest tokens at least one is not the target's, as often as not."""
    assert share_of_other_pairs(speaker, "noised") > 0.4
    z = await distance(service, speaker, rule, "top_2", 1.0, 500, bounds=EVERY_BOUND)
    assert abs(z) < 4


@pytest.mark.heavy
@pytest.mark.parametrize("draft", ["noised", "unrelated"])
@pytest.mark.parametrize("rule", RULES)
@until_exercised
async def test_other_tokens_left_to_every_draft(
    voices: dict[str, Service], speaker: Speaker, rule: str, draft: str
) -> None:
    """B39. A draft of the target's own weights has its two tokens always."""
    assert share_of_other_pairs(speaker, "equal") == 0.0
    assert share_of_other_pairs(speaker, draft) > 0.4
    z = await distance(voices[draft], speaker, rule, "top_2", 1.0, NUM_SEEDS, draft=draft, bounds=EVERY_BOUND)
    assert abs(z) < 4


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
        ("coupled", "6: mask once per step"),
        ("standard", "6: mask of rejected tokens"),
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
