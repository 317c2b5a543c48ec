"""What replicas and ranks ask of Ray."""

from __future__ import annotations

import os
from typing import Any

import pytest

from paceline.cluster.actor_specs import target_spec
from paceline.cluster.config import PacelineConfig, TargetConfig, load_config
from paceline.cluster.replica_options import (
    actor_options,
    bundle_cpus,
    missing_resource,
    placement_options,
)


def _config(**target: Any) -> PacelineConfig:
    return load_config({"model": "m", "target": target})


def _target(**target: Any) -> TargetConfig:
    return _config(**target).target


def test_a_replica_of_one_rank_needs_no_placement_group() -> None:
    assert placement_options(_target()) == {}
    assert "CUDA_VISIBLE_DEVICES" not in actor_options(_target())["runtime_env"]["env_vars"]


def test_each_rank_asks_for_what_a_replica_asks() -> None:
    pool = _target(
        device="cuda",
        tensor_parallel_size=2,
        placement_group_strategy="STRICT_PACK",
        ray_actor_options={
            "num_cpus": 4,
            "memory": 1000,
            "accelerator_type": "L4",
            "resources": {"target_gpu": 1},
            "label_selector": {"pool": "target"},
        },
    )
    bundle = {
        "CPU": 4,
        "GPU": 1.0,
        "memory": 1000,
        "accelerator_type:L4": 0.001,
        "target_gpu": 1,
    }
    assert placement_options(pool) == {
        "placement_group_bundles": [bundle, bundle],
        "placement_group_strategy": "STRICT_PACK",
        "placement_group_bundle_label_selector": [{"pool": "target"}] * 2,
    }
    options = actor_options(pool)
    assert {name: options[name] for name in ("num_cpus", "num_gpus", "memory", "resources")} == {
        "num_cpus": 4,
        "num_gpus": 1.0,
        "memory": 1000,
        "resources": {"target_gpu": 1},
    }
    assert "label_selector" not in options, "the bundle has it"
    assert "CUDA_VISIBLE_DEVICES" not in options["runtime_env"]["env_vars"]
    assert bundle_cpus(pool) == 8


def test_ray_takes_the_bundles_of_a_laptop() -> None:
    from ray.util.placement_group import validate_placement_group

    options = placement_options(_target(tensor_parallel_size=3))
    bundles = options["placement_group_bundles"]
    assert len(bundles) == 3
    # Raises for what Ray refuses, such as an empty bundle.
    validate_placement_group(bundles=bundles, strategy=options["placement_group_strategy"])
    assert bundle_cpus(_target(tensor_parallel_size=3)) < 0.01


def test_ranks_divide_the_cores_and_hide_gpus_that_are_not_theirs() -> None:
    spec = target_spec(_config(tensor_parallel_size=2), "t").model
    assert spec.device == "cpu"
    assert spec.num_threads == max(1, (os.cpu_count() or 1) // 2)
    environment = actor_options(_target(tensor_parallel_size=2))["runtime_env"]["env_vars"]
    assert environment["OMP_NUM_THREADS"] == str(spec.num_threads)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(("num_gpus", "device"), [(1, "cuda"), (0.5, "cuda"), (0, "cpu")])
def test_reserved_gpus_decide_where_ranks_compute(num_gpus: float, device: str) -> None:
    options = {"num_gpus": num_gpus}
    config = _config(tensor_parallel_size=2, num_threads=3, ray_actor_options=options)
    assert target_spec(config, "t").model.device == device
    assert target_spec(config, "t").model.num_threads == 3


def test_what_a_cluster_cannot_hold_is_named() -> None:
    pool = _target(tensor_parallel_size=2, ray_actor_options={"num_gpus": 1, "resources": {"fast": 2}})
    assert missing_resource(pool, {"CPU": 2, "GPU": 2, "fast": 4}) is None
    assert missing_resource(pool, {"CPU": 2, "GPU": 1, "fast": 4}) == "a replica takes 2 GPU, and there is 1"
    assert missing_resource(pool, {"CPU": 2, "GPU": 2}) == "a replica takes 4 fast, and there is 0"
    assert missing_resource(_target(), {"CPU": 1}) is None
