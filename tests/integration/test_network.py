"""Between draft and target: a network that is far, and one that loses packets. Neither changes a token, and
neither makes drafts a burden."""

from __future__ import annotations

import json
import math
import statistics
import subprocess

import pytest

from benchmarks.emulated import Models
from tests.integration.narrow_network import Experiment, Network, Run, command, why_not

NETWORKS = {
    "plain": Network(seconds=0.0, loss=0.0),
    "20 ms": Network(seconds=0.02, loss=0.0),
    "1 % loss": Network(seconds=0.0, loss=0.01),
    "20 ms, 1 % loss": Network(seconds=0.02, loss=0.01),
}
SERVICES = {"separate": "prepared", "shared": "lock-step"}
LOADS = ((1, 160), (8, 120))
REPEATS = 5
LEAST_OF_PLAIN = 0.95
STEP_SECONDS = Models().target_ms / 1e3
LEAST_UNDISTURBED = 0.8
"""Of the tokens that plain decoding makes where it waits for nothing but the emulated steps. With fewer the
processors are busy with something else, and the figures are that something's."""
TIMEOUT_SECONDS = 400


@pytest.mark.heavy
@pytest.mark.timeout(TIMEOUT_SECONDS + 20)
@pytest.mark.parametrize("hardware", SERVICES)
@pytest.mark.parametrize("network", NETWORKS)
def test_drafts_far_away_are_no_burden(network: str, hardware: str) -> None:
    reason = why_not()
    if reason:
        pytest.skip(f"no network namespaces with TUN devices: {reason}")
    experiment = Experiment(NETWORKS[network], SERVICES[hardware], LOADS, REPEATS)
    answer = subprocess.run(
        command(experiment), stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_SECONDS
    )
    runs = [Run(**item) for item in json.loads(answer.stdout)]
    assert len(runs) == 2 * REPEATS * len(LOADS)
    of_plain: dict[int, float] = {}
    slowest_plain = math.inf
    for num_sequences, num_tokens in LOADS:
        plain, drafted = (
            sorted((r for r in runs if (r.drafted, r.num_sequences) == way), key=lambda run: run.seed)
            for way in ((False, num_sequences), (True, num_sequences))
        )
        speeds = [statistics.median(run.tokens_per_second for run in way) for way in (plain, drafted)]
        of_plain[num_sequences] = speeds[1] / speeds[0]
        slowest_plain = min(slowest_plain, speeds[0])
        print(
            f"{network}, {hardware}, {num_sequences} × {num_tokens}: plain {speeds[0]:.1f} tokens/s each, "
            f"drafted {speeds[1]:.1f} ({of_plain[num_sequences]:.2f} of it; "
            f"{', '.join(f'{run.tokens_per_second:.1f}' for run in drafted)}); tokens a round "
            f"{1.0 + sum(r.num_accepted for r in drafted) / sum(r.num_rounds for r in drafted):.2f}; "
            f"begun without the draft {sum(run.num_late for run in drafted)}"
        )
        assert all(len(ids) == num_tokens for run in plain for ids in run.token_ids)
        assert [run.token_ids for run in drafted] == [run.token_ids for run in plain]
        assert any(run.num_accepted for run in drafted), "no draft's token was ever accepted"
    if slowest_plain < LEAST_UNDISTURBED / STEP_SECONDS:
        pytest.skip(
            f"the ids are the same; too busy to time it: plain decoding has {slowest_plain:.1f} tokens/s"
        )
    assert min(of_plain.values()) >= LEAST_OF_PLAIN
