"""The standard and block rules over the wire: laws travel, drafts are of use, greedy output is the same."""

from __future__ import annotations

import pytest

from paceline.protos import generation_pb2 as proto
from tests.cases.conftest import DRAFTS
from tests.cases.exercise import until_exercised
from tests.cases.service import Service
from tests.cases.test_output_equality import check_exercised, greedy

pytestmark = pytest.mark.asyncio(loop_scope="package")

RULES = (proto.VERIFICATION_RULE_STANDARD, proto.VERIFICATION_RULE_BLOCK)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("rule", RULES)
@until_exercised
async def test_sampled_requests_use_their_draft(services: dict[str, Service], rule: int, draft: str) -> None:
    service = services[draft]
    (before,) = await service.target_state()
    answers = await service.stream_all(
        *(
            {
                "token_ids": [n, 3, 9],
                "temperature": 0.8,
                "top_k": 4,
                "seed": n,
                "max_tokens": 48,
                "num_speculative_tokens": 4,
                "verification": rule,
            }
            for n in range(6)
        )
    )
    (after,) = await service.target_state()
    assert all(len(answer.token_ids) == 48 for answer in answers)
    assert after["num_quarantined_total"] == before["num_quarantined_total"]
    if draft == "equal":
        check_exercised(draft, answers)
    assert sum(answer.speculation.accepted_tokens for answer in answers) > 0
    await service.wait_until_idle()


@pytest.mark.parametrize("rule", RULES)
@until_exercised
async def test_greedy_output_is_the_same_under_every_rule(services: dict[str, Service], rule: int) -> None:
    service = services["noised"]
    requests = [greedy([n, 5], 40, 4) for n in range(4)]
    coupled = await service.stream_all(*requests)
    answers = await service.stream_all(*(item | {"verification": rule} for item in requests))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in coupled]
    check_exercised("noised", answers)
