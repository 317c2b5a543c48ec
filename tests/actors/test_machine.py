"""Processes of one machine with more threads than it has cores are in each other's way; no others are."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.actors import model_spec, verification_server
from paceline.actors.engine.config import Hardware
from paceline.actors.machine import NO_CORES, Cores, cores_of_this_process, num_usable_cores, share_cores
from tests.actors.conftest import TARGET_ENGINE, TARGET_MODEL
from tests.actors.test_model_spec import save_model, spec_of
from tests.actors.test_streams import hello, raw_draft


@pytest.mark.parametrize(
    ("other", "num_cores", "share"),
    [
        (Cores("here", 2), 2, True),
        (Cores("here", 1), 2, True),
        (Cores("here", 1), 3, False),
        (Cores("there", 2), 2, False),
        (Cores("here", 0), 2, False),
        (NO_CORES, 2, False),
    ],
)
def test_threads_of_one_machine_that_are_more_than_its_cores(
    other: Cores, num_cores: int, share: bool
) -> None:
    assert share_cores(Cores("here", 2), other, num_cores) is share
    assert share_cores(other, Cores("here", 2), num_cores) is share


def test_a_host_that_nobody_knows_is_nobodys() -> None:
    assert not share_cores(Cores("", 8), Cores("", 8), 2)


def test_processes_of_this_machine_share_it() -> None:
    mine = cores_of_this_process(num_usable_cores())
    assert mine.host
    assert share_cores(mine, cores_of_this_process(1), num_usable_cores())


def test_a_model_computes_with_its_threads_and_an_emulated_one_with_none(tmp_path: Path) -> None:
    spec = spec_of(save_model(tmp_path, num_rows=64, seed=1), num_threads=3)
    loaded = model_spec.load(spec, max_num_batched_tokens=16)
    assert model_spec.cores_of(spec, loaded.allotment).num_threads == 3
    emulated = replace(spec, source=TARGET_MODEL)
    loaded = model_spec.load(emulated, max_num_batched_tokens=16)
    assert model_spec.cores_of(emulated, loaded.allotment).num_threads == 0


def test_processes_that_are_pinned_to_other_cores_are_not_in_each_others_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    mine = cores_of_this_process(2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3})
    assert not share_cores(mine, cores_of_this_process(2), 2)


@pytest.mark.parametrize(
    ("host", "configured", "takes_turns"),
    [
        ("here", Hardware.AUTO, True),
        ("there", Hardware.AUTO, False),
        ("here", Hardware.SEPARATE, False),
    ],
)
async def test_a_draft_that_computes_with_its_targets_cores_takes_turns_from_the_first_step(
    pool: Any, monkeypatch: pytest.MonkeyPatch, host: str, configured: Hardware, takes_turns: bool
) -> None:
    monkeypatch.setattr(verification_server, "num_usable_cores", lambda: 2)
    monkeypatch.setattr(model_spec, "cores_of", lambda spec, allotment: Cores("here", 2))
    target = await pool.target(engine=replace(TARGET_ENGINE, hardware=configured))
    assert (await target.status())["engine"]["hardware"] == configured.value
    async with raw_draft(target, hello(host=host, num_threads=2)) as call:
        await call.read()
        assert [draft.shares_cores for draft in target.drafts] == [host == "here"]
        client = await pool.client(target)
        client.submit(pool.make_submit("a", [1, 2, 3], 1500))
        await pool.until(lambda: "a" in pool.gateway.tokens)
        found = (await target.status())["engine"]["hardware"]
        assert (found == Hardware.SHARED.value) is takes_turns
