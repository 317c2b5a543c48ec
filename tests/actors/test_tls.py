"""Mutual TLS between the pools: who is signed gets in, nobody else, and certificates can be renewed."""

import asyncio
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.actors.channels import ChannelSettings, open_channel
from paceline.actors.client_stream import PeerLostError
from paceline.actors.tls import TlsError, TlsFiles, check_files
from paceline.protos import execution_pb2 as pb
from paceline.protos import execution_pb2_grpc as rpc
from tests.actors.certificates import Authority

PROMPT = [1, 2, 3]


def _settings(files: TlsFiles | None) -> ChannelSettings:
    return ChannelSettings(tls=files, hello_timeout_seconds=3.0)


async def _greet(address: str, files: TlsFiles | None) -> str:
    """What a gateway's hello gets: the target's id, or the name of the status."""
    async with open_channel(address, _settings(files)) as channel:
        call = rpc.ExecutionServiceStub(channel).Attach()
        try:
            await call.write(pb.ExecutionRequest(hello=pb.GatewayHello(protocol_version=1, gateway_id="g")))
            answer = await call.read()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            return (await call.code()).name
        return answer.welcome.target_id if answer else (await call.code()).name


async def test_tokens_flow_between_pools_that_know_each_other(pool: Any, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    settings = {name: _settings(authority.sign(name)) for name in ("target", "draft", "gateway")}
    target = await pool.target(channels=settings["target"])
    draft = await pool.draft(channels=settings["draft"])
    client = await pool.client(target, settings=settings["gateway"])
    found = await pool.generate_all([client], [PROMPT], 100)
    assert found == [pool.greedy_reference(PROMPT, 100)]
    assert (await draft.status())["engine"]["num_drafted_tokens_total"] > 0


async def test_strangers_get_no_answer(pool: Any, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ours")
    stranger = Authority(tmp_path / "theirs").sign("stranger")
    ours = authority.sign("ours")
    target = await pool.target(channels=_settings(authority.sign("target")))
    assert await _greet(target.address, ours) == target.spec.target_id
    # Nothing encrypted; signed by somebody else, whoever it trusts; a name that the target does not have.
    assert await _greet(target.address, None) == "UNAVAILABLE"
    assert await _greet(target.address, stranger) == "UNAVAILABLE"
    assert await _greet(target.address, dataclasses.replace(stranger, ca=ours.ca)) == "UNAVAILABLE"
    assert await _greet(target.address, dataclasses.replace(ours, server_name="another")) == "UNAVAILABLE"
    assert await _greet(target.address, ours) == target.spec.target_id


async def test_a_draft_does_not_send_to_a_target_that_is_not_ours(
    pool: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    impostor = Authority(tmp_path / "theirs").sign("impostor")
    target = await pool.target(channels=_settings(impostor))
    ours = Authority(tmp_path / "ours").sign("draft")
    draft = await pool.draft(attach=False, channels=_settings(ours))
    with caplog.at_level("WARNING"):
        await pool.until(lambda: caplog.text.count("is lost") >= 3)
    assert not target.drafts
    assert not any(item["attached"] for item in (await draft.status())["targets"].values())


async def test_renewed_certificates_count_without_a_restart(pool: Any, tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    files = old.sign("target")
    target = await pool.target(channels=_settings(files))
    assert await _greet(target.address, old.sign("gateway")) == target.spec.target_id
    renewed = new.sign("target")
    for path in ("certificate", "private_key", "ca"):
        shutil.copy(getattr(renewed, path), getattr(files, path))
    assert await _greet(target.address, new.sign("gateway")) == target.spec.target_id
    # Half-written files leave what was there in force.
    shutil.copy("/dev/null", files.certificate)
    assert await _greet(target.address, new.sign("gateway")) == target.spec.target_id


async def test_files_that_cannot_be_used_are_named(pool: Any, tmp_path: Path) -> None:
    files = Authority(tmp_path).sign("target")
    gone = dataclasses.replace(files, private_key=str(tmp_path / "gone.key"))
    swapped = dataclasses.replace(files, private_key=files.certificate)
    with pytest.raises(TlsError, match=r"private_key: .*gone\.key cannot be read"):
        check_files(gone)
    with pytest.raises(TlsError, match=r"private_key: .*holds no PEM private key"):
        check_files(swapped)
    with pytest.raises(TlsError, match=r"gone\.key"):
        await pool.target(channels=_settings(gone))
    target = await pool.target(channels=_settings(files))
    # A client whose files vanish says so, and may dial again once they are back.
    with pytest.raises(PeerLostError, match="cannot be dialled: private_key"):
        await pool.client(target, settings=_settings(gone))
