from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from paceline.actors.engine.errors import InvalidArgumentError, ModelError
from paceline.cluster.detokenization import IncrementalDetokenizer
from paceline.cluster.tokenization import ChatMessage, EmulatedCodec, TransformersCodec, load_codec

REAL_TOKENIZERS = ["smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"]
SCRIPTS = "añé🎉👩‍👧‍👦日本語한국어العربية𝔘 \n\t.,<|im_end|>İß"
CUT = "\ufffd"


def chunked(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    chunks, start = [], 0
    for size in sizes:
        chunks.append(token_ids[start : start + size])
        start += size
    return [*chunks, token_ids[start:]]


def stream(detokenizer: IncrementalDetokenizer, chunks: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()]


@pytest.fixture(scope="module", params=REAL_TOKENIZERS)
def real_folder(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> str:
    return str(model_folder(request.param))


@pytest.fixture(scope="module")
def codec(real_folder: str) -> TransformersCodec:
    return TransformersCodec.load(real_folder)


def tiny_tokenizer(folder: Path, *, chat_template: str | None = None, **config: Any) -> str:
    """Word-level tokenizer with BOS, saved as a model folder."""
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, "hello": 3, "world": 4, "user": 5, "<end>": 6}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<end>"],
        chat_template=chat_template,
    )
    tokenizer.save_pretrained(folder)
    if config:
        GenerationConfig(**config).save_pretrained(folder)
    return str(folder)


def byte_fallback_codec() -> TransformersCodec:
    """A SentencePiece-like vocabulary: a leading space is stripped, unknown characters fall back to bytes."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    for piece in ["▁", "▁the", "▁cat", "the", "cat", "a", "é"]:
        vocabulary[piece] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    return TransformersCodec(tokenizer, [2])


# ---------------------------------------------------------------- incremental detokenisation


@given(st.lists(st.integers(0, 400), max_size=80), st.lists(st.integers(0, 9), max_size=20))
def test_emulated_stream_equals_decode_for_any_ids(token_ids: list[int], sizes: list[int]) -> None:
    codec = EmulatedCodec(350)
    assert "".join(stream(codec.detokenizer(), chunked(token_ids, sizes))) == codec.decode(token_ids)


@given(st.text(alphabet=st.characters() | st.sampled_from(SCRIPTS), max_size=40))
def test_emulated_stream_never_splits_a_character(text: str) -> None:
    codec = EmulatedCodec(256)
    token_ids = list(text.encode("utf-8", "replace"))
    pieces = stream(codec.detokenizer(), [[i] for i in token_ids])
    assert "".join(pieces) == codec.decode(token_ids)
    if CUT not in text:
        assert all(CUT not in piece for piece in pieces)


def test_holds_back_at_most_one_character() -> None:
    detokenizer = EmulatedCodec(256).detokenizer()
    assert detokenizer.push(b"ab\xe3") == "ab"
    assert detokenizer.push(b"\x81") == ""
    assert detokenizer.push(b"\x82c") == "あc"
    assert detokenizer.push(b"\xf0\x9f\xf0") == CUT
    assert detokenizer.flush() == CUT


def test_an_endless_run_of_bad_bytes_keeps_the_window_short() -> None:
    longest = 0

    def decode(token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return bytes(token_ids).decode("utf-8", "replace")

    detokenizer = IncrementalDetokenizer(decode)
    token_ids = [0x80] * 1000 + list("日本".encode())
    assert "".join(stream(detokenizer, [[i] for i in token_ids])) == CUT * 1000 + "日本"
    assert longest < 100


byte_fallback_ids = st.integers(0, 265) | st.sampled_from([*(3 + b for b in "日é🎉".encode()), 259, 260, 261])


@given(st.lists(byte_fallback_ids, max_size=40), st.lists(st.integers(0, 7), max_size=20))
def test_byte_fallback_stream_equals_decode(token_ids: list[int], sizes: list[int]) -> None:
    codec = byte_fallback_codec()
    pieces = stream(codec.detokenizer(), chunked(token_ids, sizes))
    assert "".join(pieces) == codec.decode(token_ids)


def test_prefix_space_is_kept_between_words_and_stripped_once() -> None:
    codec = byte_fallback_codec()
    the, cat = (codec.vocabulary()[piece] for piece in ("▁the", "▁cat"))
    assert stream(codec.detokenizer(), [[1], [the], [cat], [2], [cat], []]) == [
        "",
        "the",
        " cat",
        "",
        " cat",
        "",
        "",
    ]


@pytest.mark.weights
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60) | st.text(alphabet=SCRIPTS, max_size=60), sizes=st.lists(st.integers(0, 5)))
def test_real_stream_of_any_text_equals_decode(codec: TransformersCodec, text: str, sizes: list[int]) -> None:
    token_ids = codec.encode(text)
    pieces = stream(codec.detokenizer(), chunked(token_ids, sizes))
    whole = codec.decode(token_ids)
    assert "".join(pieces) == whole
    if CUT not in whole:  # SmolLM2's vocabulary lacks some bytes
        assert all(CUT not in piece for piece in pieces)


@pytest.mark.weights
@settings(max_examples=60, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(0, 5)))
def test_real_stream_of_any_ids_equals_decode(
    codec: TransformersCodec, data: st.DataObject, sizes: list[int]
) -> None:
    token_ids = data.draw(st.lists(st.integers(0, codec.vocab_size + 9), max_size=60))
    pieces = stream(codec.detokenizer(), chunked(token_ids, sizes))
    assert "".join(pieces) == codec.decode(token_ids)


@pytest.mark.weights
def test_decode_equals_the_tokenizers_own(codec: TransformersCodec, real_folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real_folder)
    token_ids = tokenizer("héllo 🎉 日本語 한국어 <|im_end|> x ,.")["input_ids"]
    for end in range(len(token_ids) + 1):
        assert codec.decode(token_ids[:end]) == tokenizer.decode(token_ids[:end], skip_special_tokens=True)


# ---------------------------------------------------------------- encoding and chat


@pytest.mark.weights
def test_real_chat_equals_the_templates_own_ids(codec: TransformersCodec) -> None:
    token_ids = codec.encode_conversation([ChatMessage("user", "hi")])
    text = "".join(codec.token_text(i) for i in token_ids)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system")
    assert codec.encode("hello") == codec.encode("hello")[:1]  # neither tokenizer adds a BOS


def test_prompt_gets_bos_once_and_chat_none_besides_the_templates(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %} {{ m.role }} {{ m.content }}{% endfor %}"
    codec = TransformersCodec.load(tiny_tokenizer(tmp_path, chat_template=template))
    assert codec.encode("hello world") == [0, 3, 4]
    assert codec.encode_conversation([ChatMessage("user", "hello")]) == [0, 5, 3]


def test_conversation_without_template_is_refused(tmp_path: Path) -> None:
    codec = TransformersCodec.load(tiny_tokenizer(tmp_path))
    assert not codec.has_chat_template
    with pytest.raises(InvalidArgumentError, match="no chat template") as caught:
        codec.encode_conversation([ChatMessage("user", "hello")])
    assert caught.value.field == "conversation"


def test_what_the_template_raises_is_told(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    codec = TransformersCodec.load(tiny_tokenizer(tmp_path, chat_template=template))
    with pytest.raises(InvalidArgumentError, match="refuses it: roles must alternate"):
        codec.encode_conversation([ChatMessage("user", "hello")])


def test_unknown_role_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="'robot'") as caught:
        ChatMessage("robot", "hello", index=2)
    assert caught.value.field == "conversation.messages[2].role"


def test_all_eos_ids_are_found(tmp_path: Path) -> None:
    codec = TransformersCodec.load(tiny_tokenizer(tmp_path, eos_token_id=[6, 4]))
    assert codec.eos_token_ids == (1, 4, 6)


def test_eos_of_the_model_config_where_there_is_no_generation_config(tmp_path: Path) -> None:
    source = tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": [6]}))
    assert TransformersCodec.load(source).eos_token_ids == (1, 6)


def test_special_tokens_have_no_text_but_can_be_shown(tmp_path: Path) -> None:
    codec = TransformersCodec.load(tiny_tokenizer(tmp_path))
    assert codec.decode([0, 3, 6, 4, 1]) == "hello world"
    assert codec.token_text(6) == "<end>"
    assert codec.token_text(99) == ""
    assert codec.vocab_size == 7


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read a tokenizer from"):
        TransformersCodec.load(str(tmp_path / "nothing"))


def test_emulated_codec() -> None:
    codec = load_codec("emulated://toy?vocab_size=300&base_ms=1")
    assert codec.vocab_size == 300
    assert codec.encode("né") == [110, 195, 169]
    assert codec.decode([110, 195, 169, 299]) == "né<299>"
    assert codec.eos_token_ids == ()
    assert len(codec.vocabulary()) == 300
    with pytest.raises(InvalidArgumentError, match="no chat template"):
        codec.encode_conversation([ChatMessage("user", "x")])
    with pytest.raises(ModelError, match="vocab_size"):
        load_codec("emulated://toy?vocab_size=many")
    with pytest.raises(InvalidArgumentError, match="prompt"):
        EmulatedCodec(100).encode("né")
