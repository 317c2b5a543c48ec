"""Heads with padding rows, and drafts that mean other tokens by the same ids."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from paceline.actors.engine.errors import IncompatibleDraftError
from tests.cases.conftest import DRAFTS, TinyModels
from tests.cases.exercise import BOUNDS, check_every_bound, until_exercised
from tests.cases.reference import Reference
from tests.cases.service import Service, until
from tests.cases.test_output_equality import greedy
from tests.engine.models import VOCAB_SIZE, noised, unrelated
from tests.integration.tiny_models import byte_tokenizer, save

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.usefixtures("patient")]

PADDED_SIZE = VOCAB_SIZE + 64


def padded(model: PreTrainedModel) -> PreTrainedModel:
    """64 more rows without a token, larger than all others: unmasked, they would be said all the time."""
    wide = copy.deepcopy(model)
    wide.resize_token_embeddings(PADDED_SIZE)
    with torch.no_grad():
        rows = wide.lm_head.weight[VOCAB_SIZE:]
        rows.copy_(3.0 * model.lm_head.weight[: len(rows)])
    return wide


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("wide", ["target", "draft", "both"])
@until_exercised
async def test_padding_rows_are_never_said(tiny: TinyModels, tmp_path: Path, wide: str, draft: str) -> None:
    """B47: one vocabulary, heads of 256 and 320 rows."""
    target = padded(tiny.model) if wide != "draft" else tiny.model
    small = {"equal": tiny.model, "noised": noised(tiny.model, 0.02), "unrelated": unrelated(tiny.model)}
    proposer = padded(small[draft]) if wide != "target" else small[draft]
    reference = Reference(target, never=range(VOCAB_SIZE, PADDED_SIZE) if wide != "draft" else [])
    async with Service(
        save(target, tmp_path / "target"),
        save(proposer, tmp_path / "draft"),
    ) as service:
        requests = [greedy([n, 3, 9], 60, bound) for n in (7, 8) for bound in BOUNDS]
        answers = await service.stream_all(*requests)
        sampled = await service.stream(token_ids=[7], seed=3, temperature=2.0, max_tokens=60)
        assert [answer.token_ids for answer in answers] == [
            reference.greedy([n, 3, 9], 60) for n in (7, 8) for _ in BOUNDS
        ]
        assert max(sampled.token_ids) < VOCAB_SIZE
        check_every_bound(draft, requests, answers)
        if wide != "draft":
            unmasked = Reference(target).greedy([7, 3, 9], 60)
            assert max(unmasked) >= VOCAB_SIZE, "the padding rows are harmless: this shows nothing"


def other_bytes() -> PreTrainedTokenizerFast:
    return byte_tokenizer(reverse=True)


def one_token_more() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<more>"])
    return tokenizer


def two_swapped() -> PreTrainedTokenizerFast:
    """Same size, same tokens; two of them have changed places."""
    from tokenizers import Tokenizer

    tokenizer = byte_tokenizer()
    text = tokenizer.backend_tokenizer.to_str()
    text = text.replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":')
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text))


@pytest.mark.parametrize("tokenizer", [other_bytes, two_swapped, one_token_more])
async def test_a_draft_of_another_vocabulary_is_refused_and_not_missed(
    tiny: TinyModels, tmp_path: Path, tokenizer: Callable[[], PreTrainedTokenizerFast]
) -> None:
    """B49: it says so itself, the target never hears its tokens, and output is as ever. So there is nothing
    that could be drafted, with whatever bound."""
    tiny.model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    async with Service(tiny.target, str(tmp_path), num_drafts=0) as service:
        draft = await service.add_draft()

        def refused() -> bool:
            try:
                draft.health()
            except IncompatibleDraftError:
                return True
            return False

        await until(refused, what="the draft is refused")
        with pytest.raises(IncompatibleDraftError, match="tokenizer"):
            draft.health()
        (target,) = service.targets.values()
        target.health()
        assert not target.drafts
        for answer in await service.stream_all(*(greedy([7, 3, 9], 40, bound) for bound in BOUNDS)):
            assert answer.token_ids == tiny.reference.greedy([7, 3, 9], 40)
            assert answer.speculation.draft_tokens == 0
