"""What a replica asks of Ray: its process, and where several ranks share a model, their placement. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from paceline.actors.threads import thread_environment
from paceline.cluster.config import ModelPool, ReplicaPool

MIN_CPUS = 0.001
"""Ray takes no empty bundle: a rank that reserves nothing reserves this."""


def actor_options(pool: ReplicaPool) -> dict[str, Any]:
    """Ray's options for one replica or rank, its threads' environment included: it must be there before torch
    is imported. The user's own ``env_vars`` win."""
    given = pool.ray_actor_options
    options: dict[str, Any] = given.model_dump(exclude_none=True, exclude={"runtime_env"})
    options = {name: value for name, value in options.items() if value not in ({}, None)}
    # A gateway computes nothing; its tokeniser runs on one thread at a time.
    environment = thread_environment(1)
    if isinstance(pool, ModelPool):
        environment = thread_environment(num_threads(pool) or os.cpu_count() or 1)
        if num_gpus(pool):
            options["num_gpus"] = num_gpus(pool)
        if is_sharded(pool):
            # The bundles have them.
            options.pop("label_selector", None)
            if not num_gpus(pool):
                # torch divides a model on GPUs wherever it sees any.
                environment["CUDA_VISIBLE_DEVICES"] = ""
    runtime_env = dict(given.runtime_env)
    runtime_env["env_vars"] = environment | dict(runtime_env.get("env_vars", {}))
    options["runtime_env"] = runtime_env
    return options


def placement_options(pool: ModelPool) -> dict[str, Any]:
    """Serve's options for the placement group of one replica: a bundle per rank, all alike. Empty for a
    replica of one rank."""
    if not is_sharded(pool):
        return {}
    given = pool.ray_actor_options
    options: dict[str, Any] = {
        "placement_group_bundles": [rank_resources(pool)] * pool.tensor_parallel_size,
        "placement_group_strategy": pool.placement_group_strategy,
    }
    if given.label_selector:
        options["placement_group_bundle_label_selector"] = [given.label_selector] * pool.tensor_parallel_size
    return options


def rank_resources(pool: ModelPool) -> dict[str, float]:
    """What each rank takes of its node: Ray's name of a resource -> amount."""
    given = pool.ray_actor_options
    resources: dict[str, float] = {"CPU": max(given.num_cpus, MIN_CPUS), **given.resources}
    if num_gpus(pool):
        resources["GPU"] = num_gpus(pool)
    if given.memory is not None:
        resources["memory"] = given.memory
    if given.accelerator_type is not None:
        resources[f"accelerator_type:{given.accelerator_type}"] = 0.001
    return resources


def missing_resource(pool: ModelPool, available: Mapping[str, float]) -> str | None:
    """What one replica needs of a resource of which there is less in all, in words; None = nothing.

    Args:
        available: of a cluster that does not grow.
    """
    for name, amount in rank_resources(pool).items():
        needed, there = amount * pool.tensor_parallel_size, available.get(name, 0.0)
        if needed > there:
            return f"a replica takes {needed:g} {name}, and there is {there:g}"
    return None


def bundle_cpus(pool: ReplicaPool) -> float:
    """Logical CPUs that one replica reserves, with all its ranks."""
    num_cpus = pool.ray_actor_options.num_cpus
    if isinstance(pool, ModelPool) and is_sharded(pool):
        return pool.tensor_parallel_size * max(num_cpus, MIN_CPUS)
    return num_cpus


def is_sharded(pool: ModelPool) -> bool:
    """Whether several ranks share a replica's model."""
    return pool.tensor_parallel_size > 1


def num_gpus(pool: ModelPool) -> float:
    """GPUs that each rank reserves."""
    given = pool.ray_actor_options.num_gpus
    return given if given is not None else float(pool.device == "cuda")


def num_threads(pool: ModelPool) -> int | None:
    """Compute threads of each rank; None = all cores of its node, which ranks divide among themselves."""
    if pool.num_threads is not None or not is_sharded(pool):
        return pool.num_threads
    return max(1, (os.cpu_count() or 1) // pool.tensor_parallel_size)


def rank_device(pool: ModelPool) -> str:
    """``auto`` for a replica of several ranks: cuda where GPUs are reserved, else cpu."""
    if pool.device != "auto" or not is_sharded(pool):
        return pool.device
    return "cuda" if num_gpus(pool) else "cpu"
