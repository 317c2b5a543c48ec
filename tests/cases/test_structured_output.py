"""Structured output with drafts: always what was asked for, and the same as without drafts (B52)."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.actors import weights
from paceline.actors.engine.errors import InvalidArgumentError
from paceline.protos import generation_pb2 as proto
from tests.cases.conftest import DRAFTS, Reciter, TinyModels
from tests.cases.exercise import BOUNDS, check_every_bound, counts, exercised, until_exercised
from tests.cases.recitation import CHARACTERS
from tests.cases.service import Answer, Service, until
from tests.cases.test_output_equality import greedy
from tests.cases.test_vocabulary import padded
from tests.engine.models import noised
from tests.integration.tiny_models import save

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.usefixtures("patient")]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    },
    "required": ["name", "size", "tags", "inner"],
    "additionalProperties": False,
}
SCHEMA["properties"]["inner"]["additionalProperties"] = False

CHOICES = ["yes", "yesterday", "no", "nothing at all", "日本"]
GRAMMAR = """
start: sum
sum: product (("+" | "-") product)~0..3
product: NUMBER | "(" NUMBER "*" NUMBER ")"
NUMBER: /[1-9][0-9]{0,2}/
"""


COMPACT = SCHEMA | {"x-guidance": {"whitespace_flexible": False}}
"""Without the whitespace between its tokens that random models like best."""


def json_schema(schema: object = SCHEMA) -> proto.Constraint:
    return proto.Constraint(json_schema=json.dumps(schema))


def choice(values: Sequence[str] = CHOICES) -> proto.Constraint:
    return proto.Constraint(choice=proto.Constraint.Choices(values=values))


def check_json(answer: Answer) -> None:
    assert answer.last.finish_reason == proto.FINISH_REASON_STOP, answer.text
    value = json.loads(answer.text)
    assert list(value) == ["name", "size", "tags", "inner"]
    assert len(value["name"]) <= 8
    assert isinstance(value["size"], int)
    assert 0 <= value["size"] <= 999
    assert len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"red", "green", "blue"}
    assert isinstance(value["inner"].pop("ok"), bool)
    assert value["inner"] == {}


def structured(seed: int, temperature: float, bound: int, **options: Any) -> dict[str, Any]:
    return {
        "token_ids": [seed + 1, 7],
        "temperature": temperature,
        "seed": seed,
        "max_tokens": 500,
        "num_speculative_tokens": bound,
        "constraint": json_schema(SCHEMA if seed % 4 == 0 else COMPACT),
    } | options


# ---------------------------------------------------------------- every draft, every length


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", DRAFTS)
@until_exercised
async def test_json_is_always_valid(services: dict[str, Service], draft: str, temperature: float) -> None:
    """B52: 8 at a time, each with drafts of up to 8 tokens; ids are those without drafts."""
    service = services[draft]
    plain = await service.stream_all(*(structured(seed, temperature, 0) for seed in range(8)))
    for answer in plain:
        check_json(answer)
    for bound in BOUNDS:
        requests = [structured(seed, temperature, bound) for seed in range(8 if bound == 8 else 4)]
        answers = await service.stream_all(*requests)
        for answer, expected in zip(answers, plain, strict=False):
            assert answer.token_ids == expected.token_ids
            check_json(answer)
        check_every_bound(draft, requests, answers, [bound], cut=True)
        # The draft has the mask too, at each of its positions.
        drafted, accepted = counts(answers)
        exercised(accepted >= 20, "draft tokens are accepted")
        assert draft != "equal" or accepted >= 0.9 * drafted


@pytest.mark.parametrize("rule", [proto.VERIFICATION_RULE_STANDARD, proto.VERIFICATION_RULE_BLOCK])
@until_exercised
async def test_json_is_valid_under_every_rule(services: dict[str, Service], rule: int) -> None:
    service = services["noised"]
    answers = await service.stream_all(*(structured(seed, 1.0, 8, verification=rule) for seed in range(8)))
    for answer in answers:
        check_json(answer)
    exercised(counts(answers)[1] > 0, "draft tokens are accepted")


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@until_exercised
async def test_different_constraints_beside_each_other_and_beside_none(
    services: dict[str, Service], tiny: TinyModels, temperature: float
) -> None:
    service = services["noised"]
    constraints = [
        json_schema(),
        proto.Constraint(regex=r"[A-Z]{3}-[0-9]{4}(-[a-z]+)?!"),
        choice(),
        proto.Constraint(grammar=GRAMMAR),
        proto.Constraint(json_schema='{"enum": ["a", 1, null]}'),
        None,
        None,
    ]
    requests = [structured(seed, temperature, 4, constraint=item) for seed, item in enumerate(constraints)]
    for request in requests[5:]:
        request["max_tokens"] = 60
    answers = await service.stream_all(*requests)
    alone = [await service.stream(**request | {"num_speculative_tokens": 0}) for request in requests]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]
    assert [answer.last.finish_reason for answer in answers[:5]] == [proto.FINISH_REASON_STOP] * 5
    check_json(answers[0])
    assert re.fullmatch(r"[A-Z]{3}-[0-9]{4}(-[a-z]+)?!", answers[1].text)
    assert answers[2].text in CHOICES
    number = r"[1-9][0-9]{0,2}"
    product = rf"({number}|\({number}\*{number}\))"
    assert re.fullmatch(rf"{product}([+-]{product}){{0,3}}", answers[3].text)
    assert json.loads(answers[4].text) in ["a", 1, None]
    if temperature == 0.0:
        for request, answer in zip(requests[5:], answers[5:], strict=True):
            assert answer.token_ids == tiny.reference.greedy(request["token_ids"], 60)
    exercised(sum(answer.num_rejected for answer in answers[:5]) > 0, "tails are rejected")


# ---------------------------------------------------------------- the end


@until_exercised
async def test_max_tokens_cuts_the_text(services: dict[str, Service]) -> None:
    service = services["equal"]
    whole = await service.stream(**structured(1, 1.0, 8))
    lengths = range(1, len(whole.token_ids) + 1)
    answers = await service.stream_all(*(structured(1, 1.0, 8, max_tokens=length) for length in lengths))
    for length, answer in zip(lengths, answers, strict=True):
        assert answer.token_ids == whole.token_ids[:length]
        is_whole = length == len(whole.token_ids)
        expected = proto.FINISH_REASON_STOP if is_whole else proto.FINISH_REASON_LENGTH
        assert answer.last.finish_reason == expected
    exercised(any(answer.speculation.accepted_tokens for answer in answers), "tails are cut")


async def test_a_stop_token_and_a_stop_string_inside_the_text(services: dict[str, Service]) -> None:
    service = services["equal"]
    whole = await service.stream(**structured(2, 1.0, 8))
    (colon,) = service.codec.encode(":")
    first = whole.token_ids.index(colon)
    stopped = await service.stream(**structured(2, 1.0, 8, stop_token_ids=[colon]))
    assert stopped.token_ids == whole.token_ids[: first + 1]
    assert stopped.last.finish_reason == proto.FINISH_REASON_STOP
    cut = await service.stream(**structured(2, 1.0, 8, stop=['"size"']))
    assert cut.text == whole.text[: whole.text.index('"size"')]
    assert cut.last.finish_reason == proto.FINISH_REASON_STOP


async def test_the_end_token_is_said_only_where_the_text_may_end(reciting: Service, reciter: Reciter) -> None:
    """The model recites 94 characters, then its end token."""
    expected = [reciter.recitation.follow(reciter.recitation.characters[0], 93), reciter.recitation.eos]
    options = greedy([reciter.recitation.characters[0]], 200, 8) | {"ignore_eos": False}
    free = await reciting.stream(**options, constraint=proto.Constraint(regex="[!-~]*"))
    assert free.token_ids == [*expected[0], expected[1]]
    assert free.text == CHARACTERS[1:]
    assert free.last.finish_reason == proto.FINISH_REASON_STOP
    # Longer than what it recites: it has to say something else.
    longer = await reciting.stream(**options, constraint=proto.Constraint(regex="[!-~]{100,120}"))
    assert longer.token_ids[:93] == expected[0]
    assert reciter.recitation.eos not in longer.token_ids[:100]
    assert 100 <= len(longer.text) <= 120
    assert longer.last.finish_reason == proto.FINISH_REASON_STOP
    # Shorter: it ends where nothing more is allowed, without an end token.
    shorter = await reciting.stream(**options, constraint=proto.Constraint(regex="[!-~]{5,10}"))
    assert shorter.token_ids == expected[0][:10]
    assert shorter.last.finish_reason == proto.FINISH_REASON_STOP


async def test_ignoring_the_end_token(reciting: Service, reciter: Reciter) -> None:
    """The text goes on as long as it can, and then ends without an error."""
    options = greedy([reciter.recitation.characters[0]], 150, 8) | {"ignore_eos": True}
    endless = await reciting.stream(**options, constraint=proto.Constraint(regex="[!-~]*"))
    assert endless.last.finish_reason == proto.FINISH_REASON_LENGTH
    assert len(endless.text) == 150
    assert reciter.recitation.eos not in endless.token_ids
    finished = await reciting.stream(**options, constraint=choice(["#$%", "xyz"]))
    assert finished.last.finish_reason == proto.FINISH_REASON_STOP
    assert finished.text == "#$%" or finished.text == "xyz"
    early = await reciting.stream(**options | {"min_tokens": 100}, constraint=choice(["#$%"]))
    assert (early.text, early.last.finish_reason) == ("#$%", proto.FINISH_REASON_STOP)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (
            proto.Constraint(json_schema='{"type": "objec"}'),
            r"^constraint\.json_schema: cannot be compiled: .*objec",
        ),
        (proto.Constraint(json_schema="{"), r"^constraint\.json_schema: is not JSON"),
        (proto.Constraint(regex="("), r"^constraint\.regex: cannot be compiled: unclosed group"),
        (proto.Constraint(grammar="start: foo"), r"^constraint\.grammar: cannot be compiled: .*foo"),
        (
            proto.Constraint(grammar="start: <|x|>"),
            r"^constraint\.grammar: cannot be compiled: ",
        ),
        (choice([]), r"^constraint\.choice"),
        (choice(["a", ""]), r"^constraint\.choice"),
        (choice(["a"] * 1025), r"^constraint\.choice"),
        (proto.Constraint(regex="a" * 70_000), r"^constraint\.regex"),
        (proto.Constraint(), r"^constraint: one of json_schema, regex, choice and grammar must be set"),
    ],
)
async def test_a_constraint_that_cannot_be_compiled(
    services: dict[str, Service], constraint: proto.Constraint, pattern: str
) -> None:
    service = services["equal"]
    neighbour = asyncio.create_task(service.stream(**structured(3, 1.0, 4)))
    with pytest.raises(InvalidArgumentError, match=pattern) as caught:
        await service.generate(**structured(3, 1.0, 4, constraint=constraint))
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
    check_json(await neighbour)


async def test_a_constraint_that_other_parameters_contradict(services: dict[str, Service]) -> None:
    service = services["equal"]
    forbidden = service.codec.encode("yn")
    neighbour = asyncio.create_task(service.stream(**structured(4, 1.0, 4)))
    with pytest.raises(InvalidArgumentError, match="leave no token"):
        await service.generate(
            **structured(4, 1.0, 4, constraint=choice(["yes", "no"]), bad_token_ids=sorted(forbidden))
        )
    check_json(await neighbour)


# ---------------------------------------------------------------- models


@until_exercised
async def test_a_target_that_is_lost_midway(tiny: TinyModels) -> None:
    """The other one resumes the matcher from the tokens."""
    async with Service(tiny.target, tiny.drafts["noised"], num_targets=2) as service:
        requests = [structured(seed, 1.0, 4) for seed in range(8)]
        plain = await service.stream_all(*(request | {"num_speculative_tokens": 0} for request in requests))
        before = service.gateway.snapshot()
        running = asyncio.create_task(service.stream_all(*requests))
        await until(
            lambda: service.gateway.snapshot().num_placements == before.num_placements + 8,
            what="all are placed",
        )
        await asyncio.sleep(0.1)
        await service.stop_target(next(iter(service.targets)))
        answers = await running
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
        for answer in answers:
            check_json(answer)
        exercised(service.gateway.snapshot().num_failovers > 0, "requests are moved")


@pytest.mark.parametrize("wide", ["target", "draft"])
@until_exercised
async def test_heads_of_unequal_width(tiny: TinyModels, tmp_path: Path, wide: str) -> None:
    """Padding rows that shout are outside of every mask."""
    target = padded(tiny.model) if wide == "target" else tiny.model
    draft = padded(tiny.model) if wide == "draft" else tiny.model
    async with Service(
        save(target, tmp_path / "target"), save(noised(draft, 0.02), tmp_path / "draft")
    ) as service:
        requests = [structured(seed, 1.0, 8) for seed in range(4)]
        answers = await service.stream_all(*requests)
        plain = await service.stream_all(*(request | {"num_speculative_tokens": 0} for request in requests))
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
        for answer in answers:
            check_json(answer)
        exercised(counts(answers)[1] > 0, "draft tokens are accepted")


async def test_an_emulated_model() -> None:
    source = "emulated://toy?vocab_size=300&base_ms=1"
    async with Service(source, source) as service:
        requests = [structured(seed, 1.0, 4, constraint=choice()) for seed in range(4)]
        for answer in await service.stream_all(*requests):
            assert answer.text in CHOICES
            assert answer.last.finish_reason == proto.FINISH_REASON_STOP


@pytest.mark.weights
async def test_a_real_model() -> None:
    """SmolLM2 for itself, with a real vocabulary: valid JSON, and the ids of plain decoding."""
    source = weights.resolve("smollm2-135m-instruct")
    schema = {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "green"]},
            "owner": {"type": "string", "maxLength": 12},
            "rooms": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["colour", "owner", "rooms"],
        "additionalProperties": False,
    }
    async with Service(source, source, num_blocks=64, draft_blocks=64) as service:
        prompt = service.codec.encode("Describe a small red house as JSON:\n")
        for temperature in (0.0, 1.0):
            request = structured(5, temperature, 8, token_ids=prompt, ignore_eos=False, max_tokens=60)
            request["constraint"] = json_schema(schema)
            answer = await service.stream(**request)
            assert answer.last.finish_reason == proto.FINISH_REASON_STOP
            value = json.loads(answer.text)
            assert list(value) == ["colour", "owner", "rooms"]
            assert value["colour"] in ("red", "green")
            assert 1 <= value["rooms"] <= 9
            plain = await service.stream(**request | {"num_speculative_tokens": 0})
            assert plain.token_ids == answer.token_ids
