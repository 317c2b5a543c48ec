"""How many replicas fit on how many machines, and why one does not fit: pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.cluster.config import ModelPool
from paceline.cluster.replica_options import num_gpus, placement_options

POOL_LABEL = "paceline.io/pool"
"""Label of every machine; its value is the pool that runs there."""


@dataclass(frozen=True)
class MachineGroup:
    """Equal machines for one pool."""

    pool: str
    path: str
    """Where the configuration describes them."""
    resources: Mapping[str, int]
    """What Ray knows of one machine: CPU, GPU, and a custom resource of the pool's own."""
    accelerator_type: str | None
    count: tuple[int | None, int | None]
    """Fewest and most; None = as many as the pool needs."""
    fixed: bool = False
    """The machine is there anyway."""

    @property
    def labels(self) -> dict[str, str]:
        return {POOL_LABEL: self.pool}


@dataclass(frozen=True)
class Demand:
    """What one replica asks for: as many equal bundles as it has ranks."""

    bundle: Mapping[str, float]
    """Of one rank; amounts above 0."""
    num_ranks: int
    on_one_machine: bool
    """All ranks must be on one machine."""
    label_selector: Mapping[str, str]
    accelerator_type: str | None

    def ranks_on(self, group: MachineGroup) -> int:
        """Ranks that one machine of the group takes at a time."""
        return min(
            math.floor(group.resources.get(name, 0) / amount + 1e-9) for name, amount in self.bundle.items()
        )

    def replicas_on(self, group: MachineGroup, num_machines: int) -> int:
        """Replicas that so many machines take at a time."""
        ranks = self.ranks_on(group)
        if self.on_one_machine:
            return num_machines * (ranks // self.num_ranks)
        return num_machines * ranks // self.num_ranks

    def machines_for(self, group: MachineGroup, num_replicas: int) -> int:
        """Machines that so many replicas need. At least one replica must fit."""
        ranks = self.ranks_on(group)
        if self.on_one_machine:
            return math.ceil(num_replicas / (ranks // self.num_ranks))
        return math.ceil(num_replicas * self.num_ranks / ranks)


def demand_of(pool: ModelPool) -> Demand:
    """What one replica of a placed pool asks for."""
    options = pool.ray_actor_options
    placed = placement_options(pool)
    if placed:
        bundle = {**placed["placement_group_bundles"][0]}
    else:
        bundle = {"CPU": options.num_cpus, "GPU": num_gpus(pool), **options.resources}
    # Machines say nothing of their memory to Ray, and the kind of accelerator is compared by its name.
    return Demand(
        {
            name: amount
            for name, amount in bundle.items()
            if amount > 0 and name != "memory" and not name.startswith("accelerator_type:")
        },
        pool.tensor_parallel_size,
        pool.placement_group_strategy == "STRICT_PACK",
        options.label_selector,
        options.accelerator_type,
    )


def misfits(name: str, demand: Demand, group: MachineGroup) -> Iterator[str]:
    """Why no replica of pool ``name`` can run on machines of the group, each as `path: what — remedy`."""
    options = f"{name}.ray_actor_options"
    machine = f"a machine of {group.path}"
    for resource, amount in demand.bundle.items():
        there = group.resources.get(resource, 0)
        if not there:
            where = f"{options}.num_gpus" if resource == "GPU" else f"{options}.resources.{resource}"
            known = ", ".join(group.resources)
            yield f"{where}: {machine} has none, only {known} — remove it, or take another machine"
        elif amount > there:
            yield (
                f"{options}: a {'rank' if demand.num_ranks > 1 else 'replica'} takes {amount:g} {resource}, "
                f"yet {machine} has {there} — ask for less, or take a larger machine"
            )
        elif demand.on_one_machine and amount * demand.num_ranks > there:
            yield (
                f"{name}.tensor_parallel_size: is {demand.num_ranks}, which takes "
                f"{amount * demand.num_ranks:g} {resource} on one machine (STRICT_PACK), yet {machine} has "
                f"{there} — lower it, take a larger machine, or set placement_group_strategy to PACK"
            )
    for label, value in demand.label_selector.items():
        found = group.labels.get(label)
        # Ray gives every node labels of its own.
        if not label.startswith("ray.io/") and found != value:
            has = "has no such label" if found is None else f"has {found!r}"
            yield f"{options}.label_selector.{label}: is {value!r}, yet {machine} {has} — remove it"
    wanted, there_is = demand.accelerator_type, group.accelerator_type
    if wanted is not None and there_is is not None and wanted != there_is:
        yield (
            f"{options}.accelerator_type: is {wanted}, yet {group.path}.accelerator_type is {there_is} — "
            "make them equal"
        )
