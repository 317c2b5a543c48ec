"""Pools that follow the load: asleep while nothing is asked, awake with a request, and asleep again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from paceline.cluster.autoscaling_policies import application_autoscaling
from paceline.cluster.client import connect
from paceline.cluster.config import load_config
from paceline.cluster.deploy_serve import serve_config
from paceline.cluster.runtime import Runtime
from paceline.cluster.service_start import APPLICATION_NAME
from tests.integration import streams
from tests.integration.conftest import START_TIMEOUT_SECONDS, Service, sizes, wait_until
from tests.requests import request

MODEL, DRAFT_MODEL = (
    model.replace("max_model_len=1024", "max_model_len=4096")
    for model in (streams.MODEL, streams.DRAFT_MODEL)
)
QUICK = {
    "min_replicas": 0,
    "max_replicas": 1,
    "metrics_interval_s": 0.2,
    "look_back_period_s": 1.0,
    "upscale_delay_s": 0.0,
    "downscale_delay_s": 1.0,
}


@pytest.mark.timeout(240)
def test_a_request_wakes_both_pools_and_they_go_back_to_sleep(
    deploy: Callable[..., AbstractContextManager[Service]],
) -> None:
    configuration = {
        "model": MODEL,
        "draft": {"model": DRAFT_MODEL, "autoscaling_config": QUICK, "num_threads": 1},
        "target": {"autoscaling_config": QUICK, "kv_cache": {"num_blocks": 512}, "num_threads": 1},
        # Fixed, lest on busy processors drafts be found not worth it.
        "speculation": {"num_speculative_tokens": 4, "ngram": {"enabled": False}},
    }
    with deploy(configuration) as service:
        assert sizes() == {"gateway": 1, "target": 0, "draft": 0}
        token_ids: list[int] = []
        call = service.stub.GenerateStream(request(prompt="wake up", max_tokens=3500, seed=1), timeout=120)
        for chunk in call:
            token_ids.extend(chunk.token_ids)
            if any(chunk.accepted):
                # A draft has come, and is of use: some 50 ms before Serve counts it as running.
                break
        wait_until(
            lambda: sizes() == {"gateway": 1, "target": 1, "draft": 1},
            timeout_seconds=10,
            what="the draft counts as running",
        )
        call.cancel()
        wait_until(
            lambda: sizes() == {"gateway": 1, "target": 0, "draft": 0},
            timeout_seconds=60,
            what="targets and drafts went to sleep",
        )
        again = service.generate(prompt="wake up", max_tokens=20, seed=1)
        assert list(again.choices[0].token_ids) == token_ids[:20]


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_the_policy_of_the_application_sizes_the_drafts_by_what_targets_report(
    runtime: Runtime, grpc_port: int
) -> None:
    """From a Serve configuration file. The pools' own policies would want one draft; this one wants three."""
    config = load_config(
        {
            "model": MODEL,
            "draft": {
                "model": DRAFT_MODEL,
                "num_threads": 1,
                "autoscaling_config": {**QUICK, "max_replicas": 3, "target_ongoing_requests": 3},
            },
            "target": {"kv_cache": {"num_blocks": 512}, "num_threads": 1},
            "speculation": {"num_speculative_tokens": 4, "ngram": {"enabled": False}},
        }
    )
    policy = application_autoscaling(config)
    assert policy is not None
    policy["policy_kwargs"]["draft"]["sequences_per_replica"] = 1.0
    content = serve_config(config)
    content["applications"][0]["autoscaling_policy"] = policy
    client = _get_global_client()
    assert client is not None
    client.deploy_apps(ServeDeploySchema.model_validate(content))
    try:
        runtime.wait_until_ready(
            APPLICATION_NAME, on_progress=lambda pools: None, timeout_seconds=START_TIMEOUT_SECONDS
        )
        assert sizes() == {"gateway": 1, "target": 1, "draft": 0}
        with connect(f"127.0.0.1:{grpc_port}") as stub:
            messages = [request(prompt="escape", max_tokens=3500, seed=seed) for seed in range(3)]
            calls = [stub.GenerateStream(message, timeout=120) for message in messages]
            wait_until(lambda: sizes()["draft"] == 3, timeout_seconds=60, what="a draft for each sequence")
            for call in calls:
                call.cancel()
            wait_until(lambda: sizes()["draft"] == 0, timeout_seconds=60, what="no draft")
    finally:
        client.delete_apps([APPLICATION_NAME])
