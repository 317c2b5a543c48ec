"""Text of tokens that are cut without regard for characters, and prompts with special tokens."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.protos import generation_pb2 as proto
from tests.cases.conftest import Reciter
from tests.cases.exercise import exercised, until_exercised
from tests.cases.recitation import CHARACTERS, SCRIPTS
from tests.cases.reference import Reference
from tests.cases.service import Service
from tests.cases.test_output_equality import greedy

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.mark.parametrize("bound", [0, 1, 8])
@until_exercised
async def test_many_scripts_lose_nothing_at_chunk_borders(
    reciting: Service, reciter: Reciter, bound: int
) -> None:
    """B51: Hangul, Han, Hebrew, Devanagari, joined emoji: the stream is the text itself."""
    recitation = reciter.recitation
    answer = await reciting.stream(**greedy([recitation.eos], len(recitation.scripts), bound))
    assert answer.token_ids == recitation.scripts
    assert answer.text == SCRIPTS
    assert bound > 0 or answer.speculation.draft_tokens == 0
    exercised(bound == 0 or answer.speculation.accepted_tokens > 10, "draft tokens are accepted")
    response = await reciting.generate(**greedy([recitation.eos], len(recitation.scripts), bound))
    assert response.choices[0].text == SCRIPTS
    assert all("\ufffd" not in text for text in answer.texts)


async def test_max_tokens_that_cuts_a_character(reciting: Service, reciter: Reciter) -> None:
    """B51: at every length the stream is what the tokenizer says of these ids, and only its very end may
    be a replacement character."""
    recitation = reciter.recitation
    lengths = range(1, 61)
    answers = await reciting.stream_all(*(greedy([recitation.eos], length, 8) for length in lengths))
    tokenizer = AutoTokenizer.from_pretrained(reciter.model)
    num_cut = 0
    for length, answer in zip(lengths, answers, strict=True):
        assert answer.text == tokenizer.decode(recitation.scripts[:length])
        assert "\ufffd" not in answer.text[:-1]
        num_cut += answer.text.endswith("\ufffd")
    assert num_cut > 5


async def test_prompt_gets_one_bos_and_a_conversation_none_besides_its_templates(
    reciting: Service, reciter: Reciter
) -> None:
    """B50: ids, usage and the answer itself."""
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
    message.stopping.max_tokens = 20
    message.stopping.ignore_eos = True
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert expected[0] == tokenizer.bos_token_id != expected[1]
    response = await reciting.logic.generate(message)
    assert response.usage.prompt_tokens == len(expected)
    assert list(response.choices[0].token_ids) == reference.greedy(expected, 20)
    tokenized = await reciting.logic.tokenize(proto.TokenizeRequest(conversation=message.conversation))
    assert list(tokenized.token_ids) == expected

    plain = tokenizer("qed").input_ids
    assert plain.count(tokenizer.bos_token_id) == 1
    answer = await reciting.stream("qed", temperature=0.0, max_tokens=5)
    assert answer.last.usage.prompt_tokens == len(plain) == 4
    assert answer.text == CHARACTERS[CHARACTERS.index("d") + 1 :][:5]
