"""Where the pools run: what fits, how many machines it takes, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.cluster.config import PacelineConfig, load_config
from paceline.cluster.config_errors import ConfigError
from paceline.cluster.deploy_fit import POOL_LABEL, demand_of
from paceline.cluster.deploy_plan import make_plan, model_pools

HEAD = {"instance_type": "h", "num_cpus": 8}
BIG = {"instance_type": "big", "num_cpus": 32, "num_gpus": 4, "accelerator_type": "H100"}
CHEAP = {"instance_type": "cheap", "num_cpus": 4}


def _content(**changes: Any) -> dict[str, Any]:
    """A service on AWS: targets of two ranks, drafts of one; dotted changes."""
    content: dict[str, Any] = {
        "model": "owner/big",
        "draft": {"model": "owner/small", "autoscaling_config": {"min_replicas": 0, "max_replicas": 6}},
        "target": {
            "autoscaling_config": {"min_replicas": 1, "max_replicas": 5},
            "tensor_parallel_size": 2,
            "placement_group_strategy": "STRICT_PACK",
        },
        "deploy": {"aws": {"region": "r", "head": HEAD, "target": BIG, "draft": CHEAP}},
    }
    for path, value in changes.items():
        section = content
        *parents, key = path.split("__")
        for parent in parents:
            section[parent] = dict(section.get(parent) or {})
            section = section[parent]
        section[key] = value
        if value is None:
            del section[key]
    return content


def _config(**changes: Any) -> PacelineConfig:
    return load_config(_content(**changes))


def _problems(provider: Any = "aws", **changes: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        make_plan(_config(**changes), provider, "cluster.yaml")
    return caught.value.problems


# ---------------------------------------------------------------- what fits


def test_machines_follow_the_replicas() -> None:
    plan = make_plan(_config(), "aws")
    # Two ranks a replica, four GPUs a machine: two replicas. Five replicas: three machines.
    assert [(pool.name, pool.min_workers, pool.max_workers) for pool in plan.pools] == [
        ("target", 1, 3),
        ("draft", 0, 6),
    ]
    assert plan.max_workers == 9


@pytest.mark.parametrize(
    ("tensor_parallel_size", "strategy", "num_replicas", "machines"),
    [
        (3, "STRICT_PACK", 4, 4),  # one rank's GPU is left over on each
        (3, "PACK", 4, 3),  # twelve ranks, four a machine
        (8, "PACK", 1, 2),  # spread over two
        (4, "STRICT_PACK", 2, 2),
    ],
)
def test_ranks_that_must_be_together_take_more_machines(
    tensor_parallel_size: int, strategy: str, num_replicas: int, machines: int
) -> None:
    target = {
        "num_replicas": num_replicas,
        "tensor_parallel_size": tensor_parallel_size,
        "placement_group_strategy": strategy,
    }
    plan = make_plan(_config(target=target), "aws")
    assert (plan.pool("target").min_workers, plan.pool("target").max_workers) == (machines, machines)


def test_each_pool_asks_for_its_own_machines() -> None:
    service = make_plan(_config(), "aws").service
    assert service.deploy is None
    for name, pool in model_pools(service).items():
        options = pool.ray_actor_options
        assert (pool.device, options.num_gpus) == ("cuda", 1)
        assert options.resources == {f"{name}_gpu": 1}
        assert options.label_selector == {POOL_LABEL: name}
    assert service.gateway.ray_actor_options.label_selector == {POOL_LABEL: "gateway"}
    assert service.target.num_threads == 8


def test_several_drafts_share_a_gpu() -> None:
    plan = make_plan(_config(draft__ray_actor_options={"num_gpus": 0.25}), "aws")
    assert plan.pool("draft").max_workers == 2
    assert demand_of(model_pools(plan.service)["draft"]).bundle == {"GPU": 0.25, "draft_gpu": 0.25}


def test_machines_without_gpus_have_slots() -> None:
    cheap = {"instance_type": "c", "num_cpus": 8, "num_gpus": 0, "num_slots": 4}
    plan = make_plan(_config(deploy__aws__draft=cheap), "aws")
    draft = model_pools(plan.service)["draft"]
    assert (draft.device, draft.num_threads) == ("cpu", 2)
    assert draft.ray_actor_options.resources == {"draft_slot": 1}
    assert plan.pool("draft").max_workers == 2


def test_what_the_user_asks_for_wins() -> None:
    options = {
        "label_selector": {"ray.io/market-type": "spot"},
        "resources": {"target_gpu": 2.0},
        "num_gpus": 2,
    }
    plan = make_plan(_config(target__ray_actor_options=options, target__num_threads=3), "aws")
    target = plan.service.target
    assert target.num_threads == 3
    assert target.ray_actor_options.resources == {"target_gpu": 2}
    assert target.ray_actor_options.label_selector == {"ray.io/market-type": "spot", POOL_LABEL: "target"}
    assert plan.pool("target").max_workers == 5


def test_hosts_of_ones_own_hold_what_they_have() -> None:
    hosts = [
        {"address": "192.0.2.1", "pool": "target", "num_cpus": 8, "num_gpus": 4},
        {"address": "192.0.2.2", "pool": "target", "num_cpus": 8, "num_gpus": 6},
        {"address": "192.0.2.3", "pool": "draft", "num_cpus": 8, "num_gpus": 6},
    ]
    onprem = {"head_address": "192.0.2.9", "head_num_cpus": 4, "hosts": hosts}
    plan = make_plan(_config(deploy={"onprem": onprem}), "onprem")
    assert (plan.pool("target").max_workers, plan.pool("draft").max_workers) == (2, 1)
    problems = _problems("onprem", deploy={"onprem": {**onprem, "hosts": hosts[1:]}})
    assert problems == (
        "deploy.onprem.hosts: those of the target pool hold 3 replicas, yet there may be 5 — add hosts, or "
        "lower target.autoscaling_config.max_replicas to 3",
    )


# ---------------------------------------------------------------- what is refused, and in which words


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"deploy__aws__target": {**BIG, "max_workers": 2}},
            "deploy.aws.target.max_workers: is 2, which holds 4 target replicas, yet there may be 5 — raise "
            "it to 3, or lower target.autoscaling_config.max_replicas to 4",
        ),
        (
            {"deploy__aws__target": {**BIG, "min_workers": 4}},
            "deploy.aws.target.min_workers: is 4, yet even 5 target replicas need only 3 machines — lower "
            "it, or raise target.autoscaling_config.max_replicas",
        ),
        (
            {"deploy__aws__max_workers": 0},
            "deploy.aws.max_workers: is 0, below the pools' fewest machines, 1 (target) + 0 (draft) — raise "
            "it to 1 or more",
        ),
        (
            {"deploy__aws__max_workers": 4},
            "deploy.aws.max_workers: is 4, yet the draft pool alone may need 6 — raise it, or lower the "
            "pool's most replicas",
        ),
        (
            {"target__tensor_parallel_size": 8},
            "target.tensor_parallel_size: is 8, which takes 8 GPU on one machine (STRICT_PACK), yet a "
            "machine of deploy.aws.target has 4 — lower it, take a larger machine, or set "
            "placement_group_strategy to PACK",
        ),
        (
            {"draft__ray_actor_options": {"resources": {"fpga": 1}}},
            "draft.ray_actor_options.resources.fpga: a machine of deploy.aws.draft has none, only CPU, GPU, "
            "draft_gpu — remove it, or take another machine",
        ),
        (
            {"draft__ray_actor_options": {"num_gpus": 2}},
            "draft.ray_actor_options: a replica takes 2 GPU, yet a machine of deploy.aws.draft has 1 — ask "
            "for less, or take a larger machine",
        ),
        (
            {"draft__ray_actor_options": {"num_cpus": 16}},
            "draft.ray_actor_options: a replica takes 16 CPU, yet a machine of deploy.aws.draft has 4 — ask "
            "for less, or take a larger machine",
        ),
        (
            {"draft__device": "cuda", "deploy__aws__draft": {**CHEAP, "num_gpus": 0}},
            "draft.ray_actor_options.num_gpus: a machine of deploy.aws.draft has none, only CPU, draft_slot "
            "— remove it, or take another machine",
        ),
        (
            {"target__ray_actor_options": {"accelerator_type": "A100"}},
            "target.ray_actor_options.accelerator_type: is A100, yet deploy.aws.target.accelerator_type is "
            "H100 — make them equal",
        ),
        (
            {"target__ray_actor_options": {"label_selector": {"rack": "7"}}},
            "target.ray_actor_options.label_selector.rack: is '7', yet a machine of deploy.aws.target has no "
            "such label — remove it",
        ),
        (
            {"gateway": {"num_replicas": 3, "ray_actor_options": {"num_cpus": 4}}},
            "gateway.ray_actor_options.num_cpus: 3 gateways take 12 CPUs of the head, which has 8 — lower "
            "it, or take a larger head",
        ),
        (
            {"deploy__aws__draft": None},
            "deploy.aws.draft: is missing, yet there is a draft pool — add it",
        ),
        (
            {"draft": None},
            "deploy.aws.draft: is there, yet there is no draft pool — add one, or remove it",
        ),
    ],
)
def test_a_mistake_is_named_with_its_remedy(changes: dict[str, Any], problem: str) -> None:
    assert problem in _problems(**changes)


def test_all_problems_at_once() -> None:
    problems = _problems(target__tensor_parallel_size=8, draft__ray_actor_options={"num_gpus": 2})
    assert {problem.split(".", 1)[0] for problem in problems} == {"target", "draft"}


def test_a_provider_without_a_section() -> None:
    assert _problems("gcp") == (
        "deploy.gcp: is missing — add it: which machines there are (docs/configuration.md)",
    )


@pytest.mark.parametrize(
    ("deploy", "problem"),
    [
        (
            {"aws": {"region": "r", "head": HEAD, "target": {**BIG, "min_workers": 3, "max_workers": 2}}},
            "deploy.aws.target.min_workers: is 3, above max_workers = 2 — lower it, or raise max_workers",
        ),
        (
            {"aws": {"region": "r", "head": HEAD, "target": {**BIG, "num_slots": 3}}},
            "deploy.aws.target.num_slots: is for machines without GPUs, yet num_gpus is 4 — remove one",
        ),
        (
            {"aws": {"region": "r", "head": HEAD, "target": {**BIG, "gpus": 1}}},
            "deploy.aws.target.gpus: unknown key — did you mean num_gpus?",
        ),
        (
            {"cluster_name": "My Cluster"},
            "deploy.cluster_name: is 'My Cluster' — give a text of the form "
            "^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$",
        ),
        (
            {"onprem": {"head_address": "head", "head_num_cpus": 1, "hosts": []}},
            "deploy.onprem.head_address: is 'head' — give an IP address",
        ),
        (
            {"onprem": {"head_address": "192.0.2.1", "head_num_cpus": 1, "hosts": []}},
            "deploy.onprem.hosts: is empty — give at least one, or remove the key",
        ),
        (
            {
                "onprem": {
                    "head_address": "192.0.2.1",
                    "head_num_cpus": 1,
                    "hosts": [{"address": "192.0.2.1", "pool": "draft", "num_cpus": 1}],
                }
            },
            "deploy.onprem.hosts: 192.0.2.1 is given twice — remove one of the two",
        ),
    ],
)
def test_a_section_that_contradicts_itself(deploy: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"model": "m", "deploy": deploy})
    assert problem in caught.value.problems
