"""What the services make of peers that are strange, slow, silent or hostile."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from paceline.actors import execution_server, wire
from paceline.actors.channels import PROTOCOL_VERSION, ChannelSettings
from paceline.actors.client_stream import PeerLostError
from paceline.actors.engine.errors import InvalidArgumentError
from paceline.actors.engine.messages import Committed, Load
from paceline.actors.engine.parameters import Constraint, ConstraintKind, FinishReason
from paceline.actors.engine.target_engine import GatewayOutput
from paceline.actors.vocabulary import emulated_vocabulary_hash
from paceline.protos import execution_pb2, execution_pb2_grpc, verification_pb2, verification_pb2_grpc
from tests.actors.link import Link

VOCABULARY = emulated_vocabulary_hash(256)


def hello(**changes: Any) -> verification_pb2.DraftMessage:
    fields: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "draft_id": "raw",
        "model": "raw",
        "vocabulary_hash": VOCABULARY,
        "vocab_size": 256,
        "capacity": 8,
        "max_model_len": 4096,
        "method": "model",
    }
    return verification_pb2.DraftMessage(hello=verification_pb2.Hello(**(fields | changes)))


def gateway_hello(**changes: Any) -> execution_pb2.ExecutionRequest:
    fields: dict[str, Any] = {"protocol_version": PROTOCOL_VERSION, "gateway_id": "raw"}
    return execution_pb2.ExecutionRequest(hello=execution_pb2.GatewayHello(**(fields | changes)))


@asynccontextmanager
async def raw_draft(target: Any, first: Any = None) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(target.address) as channel:
        call = verification_pb2_grpc.VerificationServiceStub(channel).Attach()
        if first is not None:
            await call.write(first)
        yield call


@asynccontextmanager
async def raw_gateway(target: Any, first: Any = None) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(target.address) as channel:
        call = execution_pb2_grpc.ExecutionServiceStub(channel).Attach()
        if first is not None:
            await call.write(first)
        yield call


async def how_it_ends(call: Any) -> tuple[grpc.StatusCode, str]:
    """Read the stream to its end; its status."""
    async with asyncio.timeout(5.0):
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:
            pass
        return await call.code(), await call.details()


@pytest.mark.parametrize(
    ("first", "code", "text"),
    [
        (hello(protocol_version=99), grpc.StatusCode.FAILED_PRECONDITION, "protocol version 99"),
        (hello(vocabulary_hash=b"x" * 32), grpc.StatusCode.FAILED_PRECONDITION, "'raw'"),
        (hello(vocabulary_hash=b""), grpc.StatusCode.FAILED_PRECONDITION, "missing"),
        (hello(draft_id=""), grpc.StatusCode.INVALID_ARGUMENT, "draft_id"),
        (hello(draft_id="x" * 1000), grpc.StatusCode.INVALID_ARGUMENT, "draft_id"),
        (hello(capacity=0), grpc.StatusCode.INVALID_ARGUMENT, "capacity"),
        (hello(vocab_size=0), grpc.StatusCode.INVALID_ARGUMENT, "vocab_size"),
        (verification_pb2.DraftMessage(), grpc.StatusCode.INVALID_ARGUMENT, "hello"),
    ],
)
async def test_a_draft_is_refused_with_a_reason(pool: Any, first: Any, code: Any, text: str) -> None:
    target = await pool.target()
    async with raw_draft(target, first) as call:
        found, details = await how_it_ends(call)
        assert found is code
        assert text in details
    assert not target.drafts


async def test_unequal_padding_of_one_vocabulary_is_welcome(pool: Any) -> None:
    target = await pool.target()
    for vocab_size in (200, 320):
        async with raw_draft(target, hello(vocab_size=vocab_size)) as call:
            welcome = (await call.read()).welcome
            assert (welcome.target_id, welcome.vocab_size) == (target.spec.target_id, 256)


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (gateway_hello(protocol_version=0), grpc.StatusCode.FAILED_PRECONDITION),
        (gateway_hello(gateway_id=""), grpc.StatusCode.INVALID_ARGUMENT),
        (execution_pb2.ExecutionRequest(), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_gateway_is_refused_with_a_reason(pool: Any, first: Any, code: Any) -> None:
    target = await pool.target()
    async with raw_gateway(target, first) as call:
        found, _ = await how_it_ends(call)
        assert found is code


async def test_a_silent_peer_is_not_waited_for(pool: Any) -> None:
    target = await pool.target(channels=ChannelSettings(hello_timeout_seconds=0.1))
    async with raw_gateway(target) as call, asyncio.timeout(5.0):
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_garbage_costs_its_sender_the_stream_and_nobody_else(pool: Any) -> None:
    target = await pool.target()
    draft = await pool.draft()
    client = await pool.client(target)
    running = asyncio.create_task(pool.generate_all([client], [[1, 2, 3], [4, 5, 6]], 200))
    await pool.until(lambda: pool.gateway.tokens)
    live = next(iter(pool.gateway.tokens))
    async with raw_draft(target, hello()) as call:
        await call.read()
        for position in (0, 3, 40, 2**32 - 1):
            for token_ids in ([], [0], [-1, -(2**31)], [2**31 - 1] * 300):
                for sequence_id in ("", "unknown", live):
                    candidates = verification_pb2.Candidates(
                        sequence_id=sequence_id,
                        epoch=position % 2,
                        base_position=position,
                        token_ids=token_ids,
                        revision=position,
                    )
                    decline = verification_pb2.Decline(sequence_id=sequence_id, epoch=9, reason="no")
                    await call.write(
                        verification_pb2.DraftMessage(
                            candidates=[candidates, candidates],
                            declines=[decline],
                            step_microseconds=2**64 - 1,
                        )
                    )
        await call.write(hello())
    generator = random.Random(1)
    async with grpc.aio.insecure_channel(target.address) as channel:
        for method in ("VerificationService", "ExecutionService"):
            for prefix in (b"", hello().SerializeToString(), gateway_hello().SerializeToString()):
                raw = channel.stream_stream(f"/paceline.internal.v1.{method}/Attach")()
                if prefix:
                    await raw.write(prefix)
                try:
                    await raw.write(generator.randbytes(200))
                    await raw.done_writing()
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    pass  # The stream was refused before it was written out.
                found, _ = await how_it_ends(raw)
                assert found is not grpc.StatusCode.OK
    assert await running == [pool.greedy_reference(prompt, 200) for prompt in ([1, 2, 3], [4, 5, 6])]
    target.health()
    draft.health()
    assert not pool.gateway.lost


async def test_impossible_tokens_quarantine_one_sequence(pool: Any) -> None:
    target = await pool.target()
    client = await pool.client(target)
    async with raw_draft(target, hello()) as call:
        await call.read()
        running = asyncio.create_task(pool.generate_all([client], [[1, 2, 3], [4, 5, 6]], 200))
        opens: list[Any] = []
        while len(opens) < 2:
            opens.extend((await call.read()).opens)
        bad = verification_pb2.Candidates(
            sequence_id=opens[0].sequence_id,
            epoch=opens[0].epoch,
            base_position=len(opens[0].token_ids),
            token_ids=[-1] * 3,
        )
        await call.write(verification_pb2.DraftMessage(candidates=[bad]))
        closed: list[str] = []
        async with asyncio.timeout(5.0):
            while opens[0].sequence_id not in closed:
                closed.extend(item.sequence_id for item in (await call.read()).closes)
        assert opens[1].sequence_id not in closed
        assert await running == [pool.greedy_reference(prompt, 200) for prompt in ([1, 2, 3], [4, 5, 6])]
    assert (await target.status())["engine"]["num_quarantined_total"] == 1


async def test_candidates_of_an_old_epoch_are_dropped(pool: Any) -> None:
    target = await pool.target()
    client = await pool.client(target)
    async with raw_draft(target, hello()) as call:
        await call.read()
        client.submit(replace(pool.make_submit("s", [1, 2, 3], 200), epoch=3))
        opened = (await call.read()).opens[0]
        assert opened.epoch == 3
        stale = verification_pb2.Candidates(
            sequence_id="s", epoch=2, base_position=3, token_ids=pool.greedy_reference([1, 2, 3], 4)
        )
        before = (await target.status())["engine"]["num_stale_messages_total"]
        await call.write(verification_pb2.DraftMessage(candidates=[stale]))
        async with asyncio.timeout(5.0):
            while (await target.status())["engine"]["num_stale_messages_total"] == before:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert await pool.gateway.finish("s") == pool.greedy_reference([1, 2, 3], 200)
    assert pool.gateway.finished["s"].speculation.draft_tokens == 0


async def test_a_draft_that_dials_again_takes_over(pool: Any) -> None:
    target = await pool.target()
    async with raw_draft(target, hello()) as old, raw_draft(target, hello()) as new:
        assert (await old.read()).HasField("welcome")
        assert (await new.read()).HasField("welcome")
        found, _ = await how_it_ends(old)
        assert found is grpc.StatusCode.ABORTED
        assert len(target.drafts) == 1


async def test_a_bad_submit_fails_alone(pool: Any) -> None:
    target = await pool.target()
    good = wire.submit_to_proto(pool.make_submit("good", [1, 2, 3], 5))
    bad = wire.submit_to_proto(pool.make_submit("bad", [1, 2, 3], 5))
    bad.sampling.top_p = -1.0
    outside = wire.submit_to_proto(pool.make_submit("outside", [1, 99_999], 5))
    async with raw_gateway(target, gateway_hello()) as call:
        await call.read()
        await call.write(execution_pb2.ExecutionRequest(submits=[bad, good, outside]))
        finished: dict[str, Any] = {}
        async with asyncio.timeout(10.0):
            while len(finished) < 3:
                finished |= {item.sequence_id: item for item in (await call.read()).finished}
    assert wire.finish_reason_from_proto(finished["good"].reason) is FinishReason.LENGTH
    assert finished["bad"].invalid_argument
    assert "sampling.top_p" in finished["bad"].error
    assert finished["outside"].invalid_argument


async def test_a_constraint_that_is_being_compiled_holds_up_nobody_else(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a cancel of its own; and where it cannot be compiled, or not well, only its sequence fails."""
    asked: list[str] = []
    may_go_on = asyncio.Event()

    async def compile_slowly(compiler: Any, constraint: Any) -> None:
        asked.append(constraint.text)
        await may_go_on.wait()
        if constraint.text == "bad":
            raise InvalidArgumentError("constraint.regex", "is bad")
        if constraint.text == "fault":
            raise OSError("no more threads")

    monkeypatch.setattr(execution_server, "is_prepared", lambda compiler, constraint: constraint is None)
    monkeypatch.setattr(execution_server, "prepare_constraint", compile_slowly)
    target = await pool.target()

    def constrained(name: str) -> Any:
        constraint = Constraint(ConstraintKind.REGEX, name)
        return wire.submit_to_proto(pool.make_submit(name, [1, 2, 3], 5, constraint=constraint))

    plain = wire.submit_to_proto(pool.make_submit("plain", [1, 2, 3], 5))
    finished: dict[str, Any] = {}

    async def until_finished(call: Any, *names: str) -> None:
        async with asyncio.timeout(10.0):
            while not finished.keys() >= set(names):
                finished.update((item.sequence_id, item) for item in (await call.read()).finished)

    async with raw_gateway(target, gateway_hello()) as call:
        await call.read()
        submits = [constrained(name) for name in ("aaa", "unwanted", "bad", "fault")]
        await call.write(execution_pb2.ExecutionRequest(submits=[*submits, plain]))
        await until_finished(call, "plain")
        unwanted = execution_pb2.Cancel(sequence_id="unwanted", epoch=0)
        await call.write(execution_pb2.ExecutionRequest(cancels=[unwanted]))
        await until_finished(call, "unwanted")
        assert sorted(asked) == ["aaa", "bad", "fault", "unwanted"]
        assert finished.keys() == {"plain", "unwanted"}
        may_go_on.set()
        await until_finished(call, "aaa", "bad", "fault")
    reasons = {name: wire.finish_reason_from_proto(item.reason) for name, item in finished.items()}
    assert reasons == {
        "plain": FinishReason.LENGTH,
        "unwanted": FinishReason.CANCELLED,
        "aaa": FinishReason.STOP,
        "bad": FinishReason.ERROR,
        "fault": FinishReason.ERROR,
    }
    assert (finished["bad"].invalid_argument, finished["bad"].error) == (True, "constraint.regex: is bad")
    assert (finished["fault"].invalid_argument, finished["fault"].error) == (False, "no more threads")
    status = await target.status()
    assert status["engine"]["num_running"] == status["engine"]["num_waiting"] == 0


async def test_a_gateway_that_goes_takes_its_sequences_along(pool: Any) -> None:
    target = await pool.target()
    watching = await pool.client(target)
    leaving = await pool.client(target, events=pool.Gateway())
    leaving.submit(pool.make_submit("long", [1, 2, 3], 4000))
    load: Callable[[], Any] = lambda: pool.gateway.loads.get(target.spec.target_id)  # noqa: E731
    await pool.until(lambda: load() and load().num_running == 1)
    await leaving.close()
    await pool.until(lambda: load().num_running == 0 and load().free_blocks == load().total_blocks)
    assert watching.attached


async def test_a_slow_reader_does_not_grow_a_queue(pool: Any) -> None:
    target = await pool.target()
    async with raw_gateway(target, gateway_hello()) as call:
        await call.read()
        # Nothing is read from here on, while the engine commits 20,000 times for this gateway.
        load = Load(1, 0, 0, 1, 1, False)
        total, unread = 20_000, 0
        for position in range(total):
            output = GatewayOutput([Committed("s", 0, position, (position,) * 1, (False,))], [])
            target._execution.publish({"raw#0": output}, load)
            if position % 10 == 0:
                await asyncio.sleep(0)
        heard: list[int] = []
        async with asyncio.timeout(20.0):
            while len(heard) < total:
                message = await call.read()
                unread += 1
                for item in message.committed:
                    assert item.base_position == len(heard)
                    heard.extend(item.token_ids)
        assert heard == list(range(total))
    # What was written before HTTP/2 held the stream back, and one message with all the rest.
    assert unread < total / 4, unread


async def test_pings_on_an_idle_stream_are_allowed(pool: Any) -> None:
    """B70."""
    settings = ChannelSettings(keepalive_seconds=0.05, keepalive_timeout_seconds=2.0)
    target = await pool.target(channels=settings)
    draft = await pool.draft(channels=settings)
    client = await pool.client(target, settings)
    # Core sends at most a ping a second. A server that does not allow them hangs up at the third.
    await asyncio.sleep(5.0)
    assert not pool.gateway.lost
    assert client.attached
    assert [item["attached"] for item in (await draft.status())["targets"].values()] == [True]
    assert await pool.generate_all([client], [[1, 2, 3]]) == [pool.greedy_reference([1, 2, 3])]


async def test_a_silently_lost_peer_is_noticed_on_both_sides(pool: Any) -> None:
    settings = ChannelSettings(keepalive_seconds=0.2, keepalive_timeout_seconds=0.3)
    target = await pool.target(channels=settings)
    async with Link(target.address) as link:
        client = await pool.client(target, settings, address=link.address)
        assert (await target.status())["num_gateways"] == 1
        link.cut()
        await pool.until(lambda: pool.gateway.lost, 5.0)
        assert not client.attached
        async with asyncio.timeout(5.0):
            while (await target.status())["num_gateways"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(PeerLostError):
            client.submit(pool.make_submit("late", [1]))


async def test_nobody_there(pool: Any) -> None:
    target = await pool.target()
    await target.stop(0.0)
    with pytest.raises(PeerLostError):
        await pool.client(target)
