"""From the pools' bounds and a fleet of machines to where each pool runs: pure decisions, and every mistake
found before anything is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.cluster.config import ModelPool, PacelineConfig, ReplicaPool, load_config
from paceline.cluster.config_errors import ConfigError
from paceline.cluster.deploy_config import DeployConfig, Machine, OnpremConfig, ScaledMachine
from paceline.cluster.deploy_fit import POOL_LABEL, Demand, MachineGroup, demand_of, misfits
from paceline.cluster.deployment_names import DRAFT, GATEWAY, TARGET

Provider = Literal["aws", "gcp", "onprem", "kuberay"]


@dataclass(frozen=True)
class PlannedPool:
    """Where one model pool runs, once all of it fits."""

    name: str
    groups: tuple[MachineGroup, ...]
    min_workers: int
    max_workers: int


@dataclass(frozen=True)
class Plan:
    """What is started: the machines, and the configuration with each pool told where to run."""

    deploy: DeployConfig
    service: PacelineConfig
    pools: tuple[PlannedPool, ...]
    max_workers: int

    def pool(self, name: str) -> PlannedPool:
        return next(pool for pool in self.pools if pool.name == name)


def make_plan(config: PacelineConfig, provider: Provider, origin: str = "configuration") -> Plan:
    """Where everything runs.

    Args:
        origin: what error texts call the configuration.

    Raises:
        ConfigError: with every reason why the pools cannot run on these machines within their bounds, each as
            `path.to.key: what is wrong — remedy`.
    """
    section = None if config.deploy is None else getattr(config.deploy, provider)
    if config.deploy is None or section is None:
        raise ConfigError(
            origin,
            [f"deploy.{provider}: is missing — add it: which machines there are (docs/configuration.md)"],
        )
    groups, problems = machine_groups(config, provider)
    if problems:
        raise ConfigError(origin, problems)
    service = place(config, groups)
    pools: list[PlannedPool] = []
    for name, pool in model_pools(service).items():
        planned = _plan_pool(name, pool, [group for group in groups if group.pool == name], problems)
        if planned is not None:
            pools.append(planned)
    problems.extend(_gateway_problems(service, provider, section))
    limit = getattr(section, "max_workers", None)
    if not problems:
        problems.extend(_total_problems(pools, limit, f"deploy.{provider}.max_workers"))
    if problems:
        raise ConfigError(origin, problems)
    total = sum(pool.max_workers for pool in pools)
    return Plan(config.deploy, service, tuple(pools), total if limit is None else min(limit, total))


def model_pools(config: PacelineConfig) -> dict[str, ModelPool]:
    """The pools that run a model, by name."""
    pools: dict[str, ModelPool] = {TARGET: config.target}
    if config.draft is not None:
        pools[DRAFT] = config.draft
    return pools


def replica_bounds(pool: ReplicaPool) -> tuple[int, int]:
    """Fewest and most replicas."""
    scaling = pool.autoscaling_config
    if scaling is None:
        return pool.num_replicas, pool.num_replicas
    return scaling.min_replicas, scaling.max_replicas


def pool_resource(pool: str, machine: Machine) -> tuple[str, int]:
    """The custom resource by which a machine says what it is for, and how much of it there is. It is an
    integer: Ray's cluster files know no other."""
    if machine.num_gpus:
        return f"{pool}_gpu", machine.num_gpus
    return f"{pool}_slot", machine.num_slots or 1


def machine_resources(pool: str, machine: Machine) -> dict[str, int]:
    """What Ray is told of one machine."""
    resources = {"CPU": machine.num_cpus}
    if machine.num_gpus:
        resources["GPU"] = machine.num_gpus
    name, amount = pool_resource(pool, machine)
    return {**resources, name: amount}


def machine_groups(config: PacelineConfig, provider: Provider) -> tuple[list[MachineGroup], list[str]]:
    """(the machines of all model pools, what is missing or too much)."""
    section = getattr(config.deploy, provider)
    names = list(model_pools(config))
    if isinstance(section, OnpremConfig):
        return _host_groups(section, names)
    groups, problems = [], []
    for name in (TARGET, DRAFT):
        path = f"deploy.{provider}.{name}"
        machine: ScaledMachine | None = getattr(section, name)
        if machine is None:
            if name in names:
                problems.append(f"{path}: is missing, yet there is a {name} pool — add it")
            continue
        if name not in names:
            problems.append(f"{path}: is there, yet there is no {name} pool — add one, or remove it")
            continue
        resources = machine_resources(name, machine)
        bounds = (machine.min_workers, machine.max_workers)
        groups.append(MachineGroup(name, path, resources, machine.accelerator_type, bounds))
    return groups, problems


def _host_groups(section: OnpremConfig, names: Sequence[str]) -> tuple[list[MachineGroup], list[str]]:
    groups, problems = [], []
    for index, host in enumerate(section.hosts):
        path = f"deploy.onprem.hosts.{index}"
        if host.pool not in names:
            problems.append(f"{path}.pool: is {host.pool}, yet there is no such pool — add it, or remove it")
        resources = machine_resources(host.pool, host)
        groups.append(MachineGroup(host.pool, path, resources, host.accelerator_type, (1, 1), True))
    missing = [name for name in names if all(host.pool != name for host in section.hosts)]
    problems += [f"deploy.onprem.hosts: none is for the {name} pool — add one" for name in missing]
    return groups, problems


def place(config: PacelineConfig, groups: Sequence[MachineGroup]) -> PacelineConfig:
    """The configuration for the machines: each pool asks for its label, and a model pool for its devices.
    What the user asked for wins. Sections that only start things are left out.

    Raises:
        ConfigError: a pool's options contradict the machines' GPUs.
    """
    content = config.given()
    for name in ("deploy", "ray"):
        content.pop(name, None)
    for name in model_pools(config):
        first = next(group for group in groups if group.pool == name)
        content[name] = _placed_pool(name, dict(content.get(name) or {}), first)
    gateway = dict(content.get(GATEWAY) or {})
    gateway["ray_actor_options"] = _with_label(gateway.get("ray_actor_options"), GATEWAY)
    # Its callers are on other machines.
    gateway.setdefault("http_host", "0.0.0.0")
    content[GATEWAY] = gateway
    return load_config(content)


def _placed_pool(name: str, section: Mapping[str, Any], group: MachineGroup) -> dict[str, Any]:
    options = _with_label(section.get("ray_actor_options"), name)
    has_gpus = bool(group.resources.get("GPU"))
    device = section.get("device", "auto")
    if device == "auto":
        device = "cuda" if has_gpus else "cpu"
    amount = 1.0
    if device == "cuda":
        amount = float(options.setdefault("num_gpus", 1.0))
    own = next(key for key in group.resources if key.startswith(f"{name}_"))
    options["resources"] = {own: amount, **options.get("resources", {})}
    # Else it would be the cores of the machine that builds the application.
    num_threads = max(1, group.resources["CPU"] // group.resources[own])
    return {"num_threads": num_threads, **section, "device": device, "ray_actor_options": options}


def _with_label(options: Mapping[str, Any] | None, pool: str) -> dict[str, Any]:
    placed = dict(options or {})
    placed["label_selector"] = {POOL_LABEL: pool, **placed.get("label_selector", {})}
    return placed


def _plan_pool(
    name: str, pool: ModelPool, groups: Sequence[MachineGroup], problems: list[str]
) -> PlannedPool | None:
    """The pool's machines; None and an entry in ``problems`` where they do not do."""
    demand = demand_of(pool)
    found = [problem for group in groups for problem in misfits(name, demand, group)]
    if not found and groups[0].fixed:
        return _plan_hosts(name, pool, demand, groups, problems)
    problems.extend(found)
    if found:
        return None
    group = groups[0]
    fewest, most = replica_bounds(pool)
    needed = demand.machines_for(group, most)
    low, high = group.count
    if high is not None and high < needed:
        held = demand.replicas_on(group, high)
        lower = f", or lower {_most_key(name, pool)} to {held}" if held else ""
        problems.append(
            f"{group.path}.max_workers: is {high}, which holds {held} {name} replicas, yet there may be "
            f"{most} — raise it to {needed}{lower}"
        )
        return None
    if low is not None and high is None and low > needed:
        problems.append(
            f"{group.path}.min_workers: is {low}, yet even {most} {name} replicas need only {needed} "
            f"machines — lower it, or raise {_most_key(name, pool)}"
        )
        return None
    low = demand.machines_for(group, fewest) if low is None else low
    return PlannedPool(name, (group,), low, needed if high is None else high)


def _plan_hosts(
    name: str, pool: ModelPool, demand: Demand, groups: Sequence[MachineGroup], problems: list[str]
) -> PlannedPool | None:
    if demand.on_one_machine or demand.num_ranks == 1:
        room = sum(demand.replicas_on(group, 1) for group in groups)
    else:
        room = sum(demand.ranks_on(group) for group in groups) // demand.num_ranks
    most = replica_bounds(pool)[1]
    if room < most:
        problems.append(
            f"deploy.onprem.hosts: those of the {name} pool hold {room} replicas, yet there may be {most} — "
            f"add hosts, or lower {_most_key(name, pool)} to {room}"
        )
        return None
    return PlannedPool(name, tuple(groups), len(groups), len(groups))


def _most_key(name: str, pool: ReplicaPool) -> str:
    return (
        f"{name}.num_replicas"
        if pool.autoscaling_config is None
        else f"{name}.autoscaling_config.max_replicas"
    )


def _gateway_problems(config: PacelineConfig, provider: Provider, section: Any) -> Iterator[str]:
    """Gateways run on the head."""
    cores = section.head.num_cpus if provider in ("aws", "gcp") else section.head_num_cpus
    options = config.gateway.ray_actor_options
    if options.num_gpus:
        yield "gateway.ray_actor_options.num_gpus: gateways run on the head, which has no GPU — remove it"
    for resource in options.resources:
        yield f"gateway.ray_actor_options.resources.{resource}: the head has none — remove it"
    needed = options.num_cpus * replica_bounds(config.gateway)[1]
    if needed > cores:
        yield (
            f"gateway.ray_actor_options.num_cpus: {replica_bounds(config.gateway)[1]} gateways take "
            f"{needed:g} CPUs of the head, which has {cores} — lower it, or take a larger head"
        )


def _total_problems(pools: Sequence[PlannedPool], limit: int | None, path: str) -> Iterator[str]:
    if limit is None:
        return
    fewest = sum(pool.min_workers for pool in pools)
    if fewest > limit:
        named = " + ".join(f"{pool.min_workers} ({pool.name})" for pool in pools)
        yield f"{path}: is {limit}, below the pools' fewest machines, {named} — raise it to {fewest} or more"
    for pool in pools:
        if fewest <= limit < pool.max_workers:
            yield (
                f"{path}: is {limit}, yet the {pool.name} pool alone may need {pool.max_workers} — raise it, "
                "or lower the pool's most replicas"
            )
