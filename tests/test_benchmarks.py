"""What the benchmarks rest on: how loads are sent, how a server is read, what a table says."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from benchmarks.contenders import OpenAIServer
from benchmarks.loads import Answered, FixedConcurrency, Outcome, PoissonArrivals, Reply, turns
from benchmarks.prompts import BenchPrompt
from benchmarks.throughput_report import Cell, acceptance, percentiles, throughput_ratios

PROMPTS = [BenchPrompt(number, "maths", f"prompt {number}") for number in range(12)]
TEXTS = {prompt.question_id: f"<user>{prompt.text}" for prompt in PROMPTS}
URL = "http://server/v1"


class Room:
    """Answers when it is told to, and knows how many wait."""

    def __init__(self) -> None:
        self.open: list[asyncio.Future[None]] = []
        self.most = 0
        self.asked: list[int] = []
        self.all_came = asyncio.Event()

    async def ask(self, prompt: BenchPrompt) -> Reply:
        self.asked.append(prompt.question_id)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.open.append(answer)
        self.most = max(self.most, len(self.open))
        if len(self.asked) == len(PROMPTS):
            self.all_came.set()
        await answer
        return Reply(10, 0.5, 1.5)

    async def answer_all(self, until: int) -> None:
        while len(self.asked) < until or self.open:
            await asyncio.sleep(0)
            if self.open:
                self.open.pop(0).set_result(None)


async def test_a_fixed_concurrency_is_kept_and_never_exceeded() -> None:
    room = Room()
    answered: list[None] = []
    load = FixedConcurrency(5)
    outcome, _ = await asyncio.gather(
        load.run(room.ask, PROMPTS, lambda: answered.append(None)), room.answer_all(len(PROMPTS))
    )
    assert room.most == 5
    assert sorted(item.question_id for item in outcome.answered) == list(range(12))
    assert len(answered) == 12
    assert outcome.tokens_per_second == pytest.approx(120 / outcome.seconds)


async def test_open_loop_requests_do_not_wait_for_answers() -> None:
    room = Room()
    load = PoissonArrivals(rate=1000.0, seed=3)
    running = asyncio.create_task(load.run(room.ask, PROMPTS, lambda: None))
    await room.all_came.wait()
    assert len(room.open) == len(PROMPTS)
    await room.answer_all(len(PROMPTS))
    outcome = await running
    times = load.times(len(PROMPTS))
    sent = sorted(outcome.answered, key=lambda item: item.question_id)
    assert all(item.sent >= at for item, at in zip(sent, times, strict=True))


def test_arrivals_are_random_seeded_and_of_the_rate() -> None:
    times = PoissonArrivals(4.0, seed=1).times(8000)
    intervals = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert times == PoissonArrivals(4.0, seed=1).times(8000)
    assert times[:9] != PoissonArrivals(4.0, seed=2).times(9)
    assert sum(intervals) / len(intervals) == pytest.approx(0.25, rel=0.05)
    # Exponential: the share above the mean is 1/e.
    assert sum(item > 0.25 for item in intervals) / len(intervals) == pytest.approx(0.368, abs=0.02)


async def test_a_failing_request_ends_the_load() -> None:
    async def fail(prompt: BenchPrompt) -> Reply:
        raise RuntimeError("no answer")

    with pytest.raises(ExceptionGroup) as raised:
        await FixedConcurrency(2).run(fail, PROMPTS, lambda: None)
    assert raised.group_contains(RuntimeError, match="no answer")


class Events(httpx.AsyncByteStream):
    """Server-sent events, cut where no event ends."""

    def __init__(self, events: list[object]) -> None:
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._body = (": a comment\n\n" + "".join(lines) + "data: [DONE]\n\n").encode()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._body), 7):
            yield self._body[at : at + 7]


async def ask_server(response: httpx.Response, sent: list[httpx.Request] | None = None) -> Reply:
    def handle(request: httpx.Request) -> httpx.Response:
        if sent is not None:
            sent.append(request)
        return response

    async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as client:
        return await OpenAIServer(client, URL, "qwen", 16, TEXTS).ask(PROMPTS[3])


async def test_an_openai_server_is_sent_the_templated_prompt_and_counts_the_tokens() -> None:
    events: list[object] = [
        {"choices": [{"text": ""}]},
        {"choices": [{"text": "Hel"}]},
        {"choices": [{"text": "lo"}], "usage": None},
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}},
    ]
    sent: list[httpx.Request] = []
    reply = await ask_server(httpx.Response(200, stream=Events(events)), sent)
    body = json.loads(sent[0].content)
    assert str(sent[0].url) == "http://server/v1/completions"
    assert body["prompt"] == "<user>prompt 3"
    assert (body["temperature"], body["max_tokens"], body["stream"]) == (0.0, 16, True)
    assert reply.num_tokens == 7
    assert 0.0 < reply.first_token <= reply.last_token


@pytest.mark.parametrize(
    ("response", "told"),
    [
        (httpx.Response(404, text="no such model"), "404: no such model"),
        (httpx.Response(200, stream=Events([{"error": {"message": "too long"}}])), "too long"),
        (httpx.Response(200, stream=Events([{"choices": [{"text": "a"}]}])), "no usage"),
    ],
    ids=["refused", "broken off", "not counted"],
)
async def test_an_openai_server_that_fails_is_no_result(response: httpx.Response, told: str) -> None:
    with pytest.raises(RuntimeError, match=told):
        await ask_server(response)


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles([]) is None
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0}
    assert percentiles([float(number) for number in range(10, 0, -1)]) == {"p50": 5.0, "p90": 9.0}


def test_everybody_is_first_in_turn_and_follows_each_other_one() -> None:
    names = ["adaptive", "off", "fixed"]
    orders = [turns(names, number) for number in range(6)]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert {order[0] for order in orders} == set(names)
    followed = {(before, after) for order in orders for before, after in itertools.pairwise(order)}
    assert followed == {(before, after) for before in names for after in names if before != after}
    assert turns(["off"], 3) == ["off"]


def test_acceptance_is_over_all_replies_and_unknown_without_rounds() -> None:
    replies = [Reply(10, 0.1, 1.0, 1, 4, 16, 6), Reply(10, 0.1, 1.0, 1, 1, 4, 4)]
    assert acceptance(replies) == {
        "mean_acceptance_length": 3.0,
        "acceptance": 0.5,
        "drafted_share": 0.5,
    }
    assert set(acceptance([Reply(10, 0.1, 1.0)]).values()) == {None}


def test_ratios_pair_what_ran_in_the_same_round() -> None:
    def cell(contender: str, round_number: int, seconds: float) -> Cell:
        answered = [Answered(1, "maths", 0.0, Reply(120, 0.1, 1.0))]
        return Cell(contender, FixedConcurrency(4), round_number, 0.0, Outcome(answered, seconds))

    cells = [cell("adaptive", 0, 1.0), cell("off", 0, 2.0), cell("fixed", 0, 1.5)]
    cells += [cell("adaptive", 1, 4.0), cell("off", 1, 4.0), cell("fixed", 1, 8.0)]
    ratios = throughput_ratios(cells)
    assert ratios["adaptive / off"] == {"4 at a time": [2.0, 1.0]}
    assert ratios["adaptive / fixed"] == {"4 at a time": [1.5, 2.0]}
    assert ratios["adaptive / better of off and fixed"] == {"4 at a time": [1.5, 1.0]}
    assert "adaptive / continuous" not in ratios
