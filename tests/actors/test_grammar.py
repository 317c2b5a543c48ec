"""Masks of structured output against what the constraint says of the text, token by token."""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paceline.actors import grammar, grammar_vocabulary, weights
from paceline.actors.end_tokens import end_token_ids
from paceline.actors.engine.errors import ConstraintError, InvalidArgumentError
from paceline.actors.engine.parameters import Constraint, ConstraintKind
from paceline.actors.grammar import GrammarCompiler, check_grammar
from paceline.actors.grammar_matcher import GrammarMatcher
from paceline.actors.grammar_vocabulary import GrammarVocabulary
from tests.cases.recitation import SCRIPTS, Recitation
from tests.integration.tiny_models import byte_tokenizer

EOS = 300
SPECIAL = 301
PIECES = (
    "ab",
    "abc",
    "bc",
    "yes",
    "ye",
    "no",
    " no",
    '{"',
    '":',
    "12",
    "3.",
    "tru",
    "true",
    "\n  ",
    "é",
    "日",
)
"""Tokens of more than one byte; id 256 on."""
TOKENS = [*(bytes((byte,)) for byte in range(256)), *(piece.encode() for piece in PIECES)]
TOKENS += [b""] * (EOS - len(TOKENS)) + [b"</s>", b"<|tool|>"]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ab"]}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}


def constraint(kind: str, text: str = "", choices: Sequence[str] = ()) -> Constraint:
    return Constraint(ConstraintKind(kind), text, tuple(choices))


JSON = constraint("json_schema", json.dumps(SCHEMA))
CONSTRAINTS = (
    JSON,
    constraint("json_schema", "{}"),
    constraint("regex", r"(ab|abc)+[0-9]{2}"),
    constraint("choice", choices=["yes", "yesterday", "no", " no", "é日", "(a|b)*", "\n"]),
    constraint(
        "grammar", 'start: sum\nsum: term ("+" term)*\nterm: NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,3}/'
    ),
)


def with_end() -> GrammarVocabulary:
    """The 256 bytes, some longer pieces, an end-of-text token and another special one."""
    return grammar_vocabulary.from_table(TOKENS, [EOS, SPECIAL], EOS)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(with_end, len(TOKENS))


def ids(row: npt.NDArray[np.uint32]) -> list[int]:
    """Token ids that a mask allows."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def after(matcher: GrammarMatcher, tail: Sequence[int] = ()) -> list[int]:
    return ids(matcher.masks(tail)[-1])


def walk(matcher: GrammarMatcher, rng: random.Random, max_tokens: int = 200) -> tuple[list[int], bool]:
    """Random allowed tokens up to the end of the text; whether it came to one."""
    said: list[int] = []
    while len(said) < max_tokens:
        allowed = after(matcher)
        assert allowed, said
        token_id = rng.choice(allowed)
        said.append(token_id)
        if token_id == EOS:
            return said, True
        ends = matcher.find_end([token_id]) == 1
        matcher.advance([token_id])
        if ends:
            return said, True
    return said, False


def text(token_ids: Sequence[int]) -> bytes:
    return b"".join(TOKENS[i] for i in token_ids if i < EOS)


# ---------------------------------------------------------------- what is allowed


def reference(prefix: bytes, language: Sequence[bytes]) -> set[int]:
    """Tokens that keep the text the beginning of one of ``language``; EOS where it is one."""
    allowed = {
        token_id
        for token_id, token in enumerate(TOKENS[:EOS])
        if token and any(member.startswith(prefix + token) for member in language)
    }
    return allowed | ({EOS} if prefix in language else set())


FINITE = (
    (constraint("choice", choices=["yes", "yesterday", "no", " no", "é日", "(a|b)*", 'q"\\/', "\n"]), None),
    (constraint("regex", r"(ab|abc){1,2}[a-c]?"), "abc"),
    (constraint("regex", r"a/b\\?|[0-9]"), "a/b\\0123456789"),
    (constraint("grammar", 'start: "ab" x? | "yes"\nx: "c" | "no" x2\nx2: "\\n"'), "abcyesno\n"),
)


@pytest.mark.parametrize(("given", "alphabet"), FINITE)
def test_a_token_is_allowed_where_the_text_goes_on_to_an_allowed_one(
    compiler: GrammarCompiler, given: Constraint, alphabet: str | None
) -> None:
    """Every text of the language, every split of it into tokens, every position, every token."""
    if given.kind is ConstraintKind.CHOICE:
        language = [choice.encode() for choice in given.choices]
    elif given.kind is ConstraintKind.REGEX:
        assert alphabet is not None
        language = [
            "".join(letters).encode()
            for length in range(1, 8 if len(alphabet) < 5 else 5)
            for letters in itertools.product(alphabet, repeat=length)
            if re.fullmatch(given.text, "".join(letters))
        ]
    else:
        language = [b"ab", b"abc", b"abno\n", b"yes"]
    positions = 0

    def check(said: list[int]) -> None:
        nonlocal positions
        positions += 1
        matcher = compiler.matcher(given, {EOS})
        ended = matcher.find_end(said)
        expected = reference(text(said), language)
        # Where nothing but the end may follow, the sequence has ended.
        assert (ended == len(said)) == (expected == {EOS} and bool(said)), said
        if ended is not None:
            return
        assert set(after(matcher, said)) == expected, said
        matcher.advance(said)
        assert set(after(matcher)) == expected, said
        for token_id in sorted(expected - {EOS}):
            check([*said, token_id])

    check([])
    assert positions > len(language)


def test_json_is_valid_and_fits_the_schema(compiler: GrammarCompiler) -> None:
    complete = 0
    for seed in range(60):
        said, ended = walk(compiler.matcher(JSON, {EOS}), random.Random(seed), 600)
        if not ended:
            continue
        complete += 1
        value = json.loads(text(said))
        assert set(value) == {"name", "size", "tags"}
        assert len(value["name"]) <= 6
        assert isinstance(value["size"], int)
        assert 0 <= value["size"] <= 99
        assert set(value["tags"]) <= {"a", "b", "ab"}
        assert len(value["tags"]) <= 2
    assert complete >= 50


def test_whitespace_between_the_tokens_of_json_has_a_bound(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(JSON, {EOS})
    matcher.advance([ord("{"), *[ord(" ")] * 31])
    assert ord(" ") in after(matcher)
    matcher.advance([ord(" ")])
    assert set(after(matcher)) == {ord('"')}


def test_a_schema_may_say_what_whitespace_is(compiler: GrammarCompiler) -> None:
    schema = SCHEMA | {"x-guidance": {"whitespace_flexible": False}}
    matcher = compiler.matcher(constraint("json_schema", json.dumps(schema)), {EOS})
    matcher.advance([ord("{")])
    assert set(after(matcher)) == {ord('"')}


# ---------------------------------------------------------------- the end


def test_end_tokens_are_allowed_where_the_text_may_end(compiler: GrammarCompiler) -> None:
    given = constraint("regex", "ab+")
    matcher = compiler.matcher(given, {EOS})
    assert set(after(matcher)) == {ord("a"), TOKENS.index(b"ab")}
    assert set(after(matcher, [ord("a")])) == {ord("b")}
    assert set(after(matcher, [ord("a"), ord("b")])) == {ord("b"), EOS}
    matcher.advance([ord("a"), ord("b"), EOS])
    with pytest.raises(ConstraintError, match="token 2"):
        matcher.advance([ord("b")])


def test_an_end_token_that_does_not_end_the_sequence_is_never_allowed(compiler: GrammarCompiler) -> None:
    """ignore_eos: the text goes on for as long as it can."""
    matcher = compiler.matcher(constraint("regex", "ab{1,2}"), {ord("x")})
    assert set(after(matcher, [ord("a"), ord("b")])) == {ord("b")}
    assert matcher.find_end([ord("a"), ord("b")]) is None
    assert matcher.find_end([ord("a"), ord("b"), ord("b")]) == 3


def test_special_stop_tokens_end_a_text_too_and_text_ones_do_not(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(constraint("regex", "ab+"), {EOS, SPECIAL, ord("x")})
    assert set(after(matcher, [ord("a"), ord("b")])) == {ord("b"), EOS, SPECIAL}


def test_find_end_is_where_nothing_can_follow(compiler: GrammarCompiler) -> None:
    yes, y, e, s = TOKENS.index(b"yes"), *b"yes"
    matcher = compiler.matcher(constraint("choice", choices=["yes", "yesyes", "no"]), {EOS})
    assert matcher.find_end([yes]) is None
    assert matcher.find_end([yes, yes]) == 2
    assert matcher.find_end([yes, y, e, s, y, y]) == 4
    assert matcher.find_end([y, y]) is None
    assert matcher.find_end([yes, EOS]) is None
    matcher.advance([yes, y, e])
    assert matcher.find_end([s]) == 1
    assert matcher.find_end([]) is None


def test_a_text_that_may_only_be_empty_ends_with_its_first_token(compiler: GrammarCompiler) -> None:
    assert after(compiler.matcher(constraint("regex", ""), {EOS})) == [EOS]
    assert after(compiler.matcher(constraint("regex", ""), ())) == []


def test_special_tokens_of_a_grammar(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(constraint("grammar", 'start: "yes" <|tool|> "no"'), {EOS})
    matcher.advance([TOKENS.index(b"yes")])
    assert after(matcher) == [SPECIAL]
    assert matcher.find_end([SPECIAL, TOKENS.index(b"no")]) == 2


# ---------------------------------------------------------------- tails and rollback


@pytest.mark.parametrize("given", CONSTRAINTS, ids=lambda given: given.kind.value)
def test_masks_are_a_function_of_the_tokens(compiler: GrammarCompiler, given: Constraint) -> None:
    """A matcher that was asked about many tails, right, wrong and in part, against new ones."""
    rng = random.Random(given.kind.value)
    for _ in range(6):
        matcher = compiler.matcher(given, {EOS})
        said: list[int] = []
        for _ in range(12):
            tail: list[int] = []
            for _ in range(rng.randrange(8)):
                allowed = after(matcher, tail)
                if EOS in tail or matcher.find_end(tail) is not None:
                    break
                tail.append(rng.choice(allowed) if rng.random() < 0.85 else rng.randrange(len(TOKENS)))
            masks = matcher.masks(tail)
            fresh = compiler.matcher(given, {EOS})
            fresh.advance(said)
            np.testing.assert_array_equal(masks, fresh.masks(tail))
            for depth in range(len(tail) + 1):
                one = compiler.matcher(given, {EOS})
                one.advance(said)
                np.testing.assert_array_equal(one.masks(tail[:depth])[-1], masks[depth])
            # Some of the tail is accepted, then comes another token.
            kept: list[int] = []
            for depth in range(rng.randrange(len(tail) + 1)):
                if tail[depth] not in ids(masks[depth]) or matcher.find_end(tail[:depth]) is not None:
                    break
                kept.append(tail[depth])
            if EOS in kept or matcher.find_end(kept) is not None:
                break
            kept.append(rng.choice(ids(masks[len(kept)])))
            end = matcher.find_end(kept)
            matcher.advance(kept)
            said += kept
            if EOS in kept or end is not None:
                break


def test_what_follows_a_wrong_token_is_not_looked_at(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(constraint("regex", "ab+"), {EOS})
    masks = matcher.masks([ord("a"), ord("x"), ord("b")])
    assert ids(masks[1]) == [ord("b")]
    assert ids(masks[2]) == ids(masks[3]) == list(range(len(TOKENS)))
    assert set(after(matcher)) == {ord("a"), TOKENS.index(b"ab")}


def test_ids_that_are_no_tokens_are_wrong(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(JSON, {EOS})
    for token_id in (-1, len(TOKENS), 10**9):
        assert len(ids(matcher.masks([token_id])[1])) == len(TOKENS)
    with pytest.raises(ConstraintError, match="token 0 of the completion"):
        matcher.advance([10**9])


def test_a_completion_that_does_not_satisfy_the_constraint_is_an_error(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(JSON, {EOS})
    with pytest.raises(ConstraintError, match="token 1 of the completion, 120, does not satisfy it"):
        matcher.advance([*b"{x"])


# ---------------------------------------------------------------- vocabularies


@pytest.mark.parametrize("vocab_size", [100, 256, 259, 320, 1000])
def test_masks_are_as_wide_as_the_model(vocab_size: int) -> None:
    """Rows without a token, and tokens without a row, are not allowed."""
    whole = GrammarCompiler(with_end, len(TOKENS)).matcher(JSON, {EOS})
    matcher = GrammarCompiler(with_end, vocab_size).matcher(JSON, {EOS})
    tail = [*b'{"name']
    masks = matcher.masks(tail)
    assert masks.shape == (len(tail) + 1, -(-vocab_size // 32))
    if vocab_size > ord("{"):
        for row, expected in zip(masks, whole.masks(tail), strict=True):
            assert ids(row) == [token_id for token_id in ids(expected) if token_id < vocab_size]
    else:
        assert ids(masks[0]) == [token_id for token_id in ids(whole.masks([])[0]) if token_id < vocab_size]
        assert ids(masks[1]) == list(range(vocab_size))


def test_a_tokenizer_without_an_end_token() -> None:
    """The text ends where nothing can follow; id 0 is no end."""
    tokenizer = byte_tokenizer()
    compiler = GrammarCompiler(lambda: grammar_vocabulary.from_transformers(tokenizer, ()), 256)
    said = tokenizer.encode("!yes")
    matcher = compiler.matcher(constraint("regex", "!*yes"), ())
    assert set(after(matcher)) == {said[0], said[1]}
    assert set(after(matcher, said[:1])) == {said[0], said[1]}
    assert matcher.find_end(said) == 4


def test_a_tokenizer_with_an_end_token() -> None:
    recitation = Recitation()
    compiler = GrammarCompiler(
        lambda: grammar_vocabulary.from_transformers(recitation.tokenizer(), [recitation.eos]),
        recitation.vocab_size,
    )
    pieces = recitation.scripts
    matcher = compiler.matcher(constraint("choice", choices=[SCRIPTS, SCRIPTS + "!"]), {recitation.eos})
    for depth, token_id in enumerate(pieces):
        assert token_id in after(matcher, pieces[:depth])
    assert after(matcher, pieces) == sorted([recitation.characters[0], recitation.eos])


def test_an_emulated_vocabulary() -> None:
    compiler = GrammarCompiler(lambda: grammar_vocabulary.emulated(300), 300)
    matcher = compiler.matcher(constraint("choice", choices=["ab", "<299>"]), ())
    assert after(matcher) == [ord("<"), ord("a"), 299]
    assert matcher.find_end([299]) == 1


@pytest.mark.parametrize(
    "tokenizer", [object(), PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0})))]
)
def test_a_tokenizer_that_does_not_say_what_its_tokens_are(tokenizer: object) -> None:
    """Found out once, since it takes a while."""
    loads: list[int] = []

    def load() -> GrammarVocabulary:
        loads.append(1)
        return grammar_vocabulary.from_transformers(tokenizer, ())

    compiler = GrammarCompiler(load, 256)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="constraint: is not available for a model with this"):
            compiler.matcher(JSON, ())
    assert loads == [1]


# ---------------------------------------------------------------- what cannot be compiled

BAD = (
    ("json_schema", "{", "is not JSON: "),
    ("json_schema", "NaN", "is not JSON: "),
    ("json_schema", "[1]", "must be a JSON object or true"),
    ("json_schema", "false", "no value satisfies"),
    ("json_schema", '{"type": "objec"}', "cannot be compiled: .*objec"),
    ("json_schema", '{"type": "string", "pattern": "("}', "cannot be compiled: .*"),
    ("json_schema", '{"not": {"type": "string"}}', "cannot be compiled: .*not"),
    ("json_schema", '{"$ref": "#/$defs/x"}', "cannot be compiled: .*x"),
    ("json_schema", '{"$ref": "http://example.com/x"}', "cannot be compiled: .*example"),
    ("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}', "cannot be compiled: .*Unsatisfiable"),
    ("json_schema", '{"type": "integer", "multipleOf": 1000003}', "multipleOf may be at most 10000"),
    ("json_schema", '{"x-guidance": {"lenient": true}, "not": {"type": "null"}}', "x-guidance.lenient would"),
    ("json_schema", '{"multipleOf": 1%s}' % ("0" * 400), "multipleOf may be at most 10000, got 1000"),
    ("json_schema", '{"type": "string", "pattern": "%s"}' % ("a" * 8193), "a pattern may have at most 8192"),
    ("json_schema", '{"items":' * 30000 + "{}" + "}" * 30000, "nested too deeply|is not JSON"),
    ("regex", "(", "cannot be compiled: unclosed group"),
    ("regex", r"(?=a)b", "cannot be compiled: look-around"),
    ("regex", r"(a)\1", "cannot be compiled: backreferences"),
    ("regex", "a\\", "ends with a backslash"),
    ("regex", "a" * 8193, "may have at most 8192 characters"),
    ("regex", "a?" * 4000 + "a" * 192, "cannot be compiled: "),
    ("choice", "", "must have at least one string"),
    ("grammar", "start: foo", "cannot be compiled: .*foo"),
    ("grammar", 'x: "a"', "cannot be compiled: no start rule"),
    ("grammar", "%%%", "cannot be compiled: "),
    ("grammar", "start: " + "(" * 30000, "cannot be compiled: .*nested"),
    ("grammar", "start: a\na: b\nb: a", "cannot be compiled: "),
    ("grammar", "start: <|nothing|>", "cannot be compiled: .*<|nothing|>"),
)


@pytest.mark.parametrize(
    ("kind", "given", "reason"), BAD, ids=[f"{kind}:{given[:30]}" for kind, given, _ in BAD]
)
def test_a_bad_constraint_is_refused_with_its_field_and_a_short_reason(
    compiler: GrammarCompiler, kind: str, given: str, reason: str
) -> None:
    bad = constraint(kind, given)
    with pytest.raises(InvalidArgumentError, match=reason) as caught:
        compiler.matcher(bad, {EOS})
    assert caught.value.field == f"constraint.{kind}"
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
    if "nothing" not in given:
        # Without a vocabulary as well.
        with pytest.raises(InvalidArgumentError, match=reason) as caught:
            check_grammar(bad)
        assert caught.value.field == f"constraint.{kind}"


@pytest.mark.parametrize("given", CONSTRAINTS, ids=lambda given: given.kind.value)
def test_good_constraints_pass_without_a_vocabulary(given: Constraint) -> None:
    check_grammar(given)


@pytest.mark.parametrize("given", ["<|any|>", "<[300]>", "<any> <[5-7,200000]>", '"<|any|>" <[^3]>'])
def test_special_tokens_are_not_looked_up_without_a_vocabulary(given: str) -> None:
    check_grammar(constraint("grammar", f"start: {given}"))


def test_a_constraint_that_becomes_too_complex_is_an_error_where_it_does() -> None:
    """And not before: a tail that goes there and is rejected leaves no trace."""
    compiler = GrammarCompiler(lambda: grammar_vocabulary.emulated(256), 256)
    many = {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(1500)}}
    schema = {"type": "object", "properties": {"a": many}, "required": ["a"]}
    matcher = compiler.matcher(constraint("json_schema", json.dumps(schema)), ())
    said = [*b'{"a":{"k0"']
    masks = matcher.masks(said)
    depth = next(depth for depth, row in enumerate(masks) if not row.any())
    assert said[:depth] == [*b'{"a":{']
    assert after(matcher, [ord("{")]) == after(
        compiler.matcher(constraint("json_schema", json.dumps(schema)), ()), [ord("{")]
    )
    np.testing.assert_array_equal(matcher.masks(said), masks)
    matcher.advance(said[: depth - 1])
    for _ in range(2):
        assert ids(matcher.masks([])[0]) == ids(masks[depth - 1])
        with pytest.raises(ConstraintError, match="constraint: it is too complex at this place"):
            matcher.advance([said[depth - 1]])


# ---------------------------------------------------------------- the compiler


def test_compiled_grammars_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_CACHED_GRAMMARS", 3)
    compiler = GrammarCompiler(lambda: grammar_vocabulary.emulated(256), 256)
    given = [constraint("regex", f"a{number}") for number in range(5)]
    for one in given[:3]:
        compiler.prepare(one)
    compiler.matcher(given[0], ())  # used last
    compiler.prepare(given[3])
    assert [compiler.is_ready(one) for one in given] == [True, False, True, True, False]
    assert after(compiler.matcher(given[1], ())) == [ord("a")]


def test_threads_may_share_a_compiler() -> None:
    loads: list[int] = []

    def load() -> GrammarVocabulary:
        loads.append(1)
        return grammar_vocabulary.emulated(256)

    compiler = GrammarCompiler(load, 256)
    errors: list[BaseException] = []

    def use(seed: int) -> None:
        try:
            rng = random.Random(seed)
            for _ in range(30):
                given = rng.choice(CONSTRAINTS)
                said, _ = walk(compiler.matcher(given, ()), rng, 20)
                assert said
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert loads == [1]


async def test_preparing_does_not_block_the_event_loop() -> None:
    compiler = GrammarCompiler(lambda: grammar_vocabulary.emulated(256), 256)
    await grammar.prepare_constraint(compiler, JSON)
    assert compiler.is_ready(JSON)
    await grammar.prepare_constraint(compiler, None)
    await grammar.prepare_constraint(None, JSON)
    with pytest.raises(InvalidArgumentError, match=r"constraint\.regex"):
        await grammar.prepare_constraint(compiler, constraint("regex", "("))


# ---------------------------------------------------------------- a real vocabulary


@pytest.mark.weights
def test_a_real_vocabulary() -> None:
    """Text that the tokenizer splits in its own way is allowed as it is split, and decodes to itself."""
    source = weights.resolve("smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(source)
    ends = end_token_ids(source, tokenizer)
    compiler = GrammarCompiler(lambda: grammar_vocabulary.from_transformers(tokenizer, ends), len(tokenizer))
    value = {"name": "Zoë 日本", "size": 42, "tags": ["ab", "a"]}
    said = tokenizer.encode(json.dumps(value, ensure_ascii=False, indent=1))
    schema = SCHEMA | {"properties": SCHEMA["properties"] | {"name": {"type": "string"}}}
    given = constraint("json_schema", json.dumps(schema))
    matcher = compiler.matcher(given, ends)
    masks = matcher.masks(said)
    for depth, token_id in enumerate(said):
        assert token_id in ids(masks[depth]), (depth, tokenizer.decode(said[:depth]))
    assert matcher.find_end(said) == len(said)
    rng = random.Random(3)
    for _ in range(10):
        said = []
        while (end := matcher.find_end(said)) is None and len(said) < 300:
            said.append(rng.choice(after(matcher, said)))
        if end is not None:
            assert set(json.loads(tokenizer.decode(said))) == {"name", "size", "tags"}
