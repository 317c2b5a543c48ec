"""Text of tokens that are cut without regard for characters, and prompts with special tokens."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.protos import generation_pb2 as proto
from tests.cases.conftest import DRAFTS, Reciter
from tests.cases.exercise import BOUNDS, check_every_bound, until_exercised
from tests.cases.recitation import CHARACTERS, SCRIPTS
from tests.cases.reference import Reference
from tests.cases.service import Answer, Service
from tests.cases.test_output_equality import greedy

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.usefixtures("patient")]


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_many_scripts_lose_nothing_at_chunk_borders(
    recitals: dict[str, Service], reciter: Reciter, draft: str
) -> None:
    """B51: Hangul, Han, Hebrew, Devanagari, joined emoji: the stream is the text itself."""
    recitation = reciter.recitation
    requests = [greedy([recitation.eos], len(recitation.scripts), bound) for bound in (0, *BOUNDS)]
    answers = await recitals[draft].stream_all(*requests)
    for answer in answers:
        assert answer.token_ids == recitation.scripts
        assert answer.text == SCRIPTS
        assert all("\ufffd" not in text for text in answer.texts)
    assert answers[0].speculation.draft_tokens == 0
    check_every_bound(draft, requests, answers)
    response = await recitals[draft].generate(**requests[-1])
    assert response.choices[0].text == SCRIPTS


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_max_tokens_that_cuts_a_character(
    recitals: dict[str, Service], reciter: Reciter, draft: str
) -> None:
    """B51: at every length the stream is what the tokenizer says of these ids, and only its very end may
    be a replacement character."""
    recitation = reciter.recitation
    lengths = range(1, 61)
    requests = [greedy([recitation.eos], length, BOUNDS[length // 2 % len(BOUNDS)]) for length in lengths]
    answers = await recitals[draft].stream_all(*requests)
    tokenizer = AutoTokenizer.from_pretrained(reciter.model)
    num_cut = 0
    for length, answer in zip(lengths, answers, strict=True):
        assert answer.text == tokenizer.decode(recitation.scripts[:length])
        assert "\ufffd" not in answer.text[:-1]
        num_cut += answer.text.endswith("\ufffd")
    assert num_cut > 5
    check_every_bound(draft, requests, answers)


@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_prompt_gets_one_bos_and_a_conversation_none_besides_its_templates(
    recitals: dict[str, Service], reciter: Reciter, draft: str
) -> None:
    """B50: ids, usage and the answer itself."""
    reciting = recitals[draft]
    tokenizer = AutoTokenizer.from_pretrained(reciter.model)
    reference = Reference(AutoModelForCausalLM.from_pretrained(reciter.model))
    messages = [
        {"role": "system", "content": "Tiết kiệm"},
        {"role": "user", "content": f"누구 {tokenizer.bos_token}?"},
    ]
    message = proto.GenerateRequest()
    for turn in messages:
        message.conversation.messages.add(**turn)
    message.sampling.temperature = 0.0
    message.stopping.max_tokens = 30
    message.stopping.ignore_eos = True
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert expected[0] == tokenizer.bos_token_id != expected[1]
    requests = [{"num_speculative_tokens": bound} for bound in BOUNDS]
    answers = []
    for options in requests:
        message.speculation.MergeFrom(proto.SpeculationParams(**options))
        answer = Answer()
        async for chunk in reciting.logic.generate_stream(message):
            answer.add(chunk)
        assert answer.last.usage.prompt_tokens == len(expected)
        assert answer.token_ids == reference.greedy(expected, 30)
        answers.append(answer)
    check_every_bound(draft, requests, answers)
    tokenized = await reciting.logic.tokenize(proto.TokenizeRequest(conversation=message.conversation))
    assert list(tokenized.token_ids) == expected

    plain = tokenizer("qed").input_ids
    assert plain.count(tokenizer.bos_token_id) == 1
    answer = await reciting.stream("qed", temperature=0.0, max_tokens=5)
    assert answer.last.usage.prompt_tokens == len(plain) == 4
    assert answer.text == CHARACTERS[CHARACTERS.index("d") + 1 :][:5]
