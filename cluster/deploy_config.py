"""The ``deploy`` section: on which machines the pools run. Read by ``paceline deploy`` only."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from paceline.cluster.config_errors import ConflictError
from paceline.cluster.config_section import Count, Name, OptionalAmount, OptionalCount, OptionalName, Section


def _checked_address(value: str) -> str:
    """A machine tells which one it is by its addresses, so names do not do."""
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise ValueError(f"is {value!r} — give an IP address") from None


class HeadNode(Section):
    """The head: Ray's control store, Serve's controller, and the gateways. It needs no GPU."""

    instance_type: Name
    """The provider's name of the machine type."""
    num_cpus: Count
    """Its cores."""
    node_config: dict[str, Any] = Field(default_factory=dict)
    """More of the provider's own settings of a machine (Ray's `node_config`)."""


class Machine(Section):
    """One machine, or pod, of a model pool."""

    num_cpus: Count
    """Its cores."""
    num_gpus: Annotated[int, Field(ge=0)] = 1
    """Its GPUs."""
    accelerator_type: OptionalName = None
    """Kind of its GPUs in Ray's words, such as `L4`; only compared with what the pool asks for."""
    num_slots: OptionalCount = None
    """Replicas that it takes where it has no GPUs; null = 1."""

    @model_validator(mode="after")
    def _one_measure(self) -> Machine:
        if self.num_slots is not None and self.num_gpus:
            raise ConflictError(
                "num_slots", f"is for machines without GPUs, yet num_gpus is {self.num_gpus} — remove one"
            )
        if self.accelerator_type is not None and not self.num_gpus:
            raise ConflictError("accelerator_type", "is given, yet num_gpus is 0 — remove one of the two")
        return self


class ScaledMachine(Machine):
    """A kind of machine that is started and stopped as its pool needs it."""

    min_workers: OptionalAmount = None
    """Fewest of them; null = as many as the pool's fewest replicas need."""
    max_workers: OptionalAmount = None
    """Most of them; null = as many as the pool's most replicas need."""

    @model_validator(mode="after")
    def _bounds_agree(self) -> ScaledMachine:
        low, high = self.min_workers, self.max_workers
        if low is not None and high is not None and low > high:
            raise ConflictError(
                "min_workers", f"is {low}, above max_workers = {high} — lower it, or raise max_workers"
            )
        return self


class PoolNode(ScaledMachine):
    """The machines of one model pool."""

    instance_type: Name
    """The provider's name of the machine type."""
    spot: bool = False
    """Whether to take machines that the provider may take back. Drafts can: losing one loses no request."""
    node_config: dict[str, Any] = Field(default_factory=dict)
    """More of the provider's own settings of a machine (Ray's `node_config`)."""


class Cloud(Section):
    """Machines that a provider rents out."""

    head: HeadNode
    """The head node."""
    target: PoolNode
    """Machines of targets."""
    draft: PoolNode | None = None
    """Machines of drafts; needed where there is a draft pool."""
    max_workers: OptionalAmount = None
    """Most machines beside the head; null = the pools' together."""
    disk_gb: Count = 256
    """Disk of a machine, in GB: the package, its dependencies and the weights."""
    ssh_user: Name = "ubuntu"
    """User to log in as."""
    idle_timeout_minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0
    """A machine on which nothing has run for so long is given back."""


class AwsConfig(Cloud):
    """Machines of Amazon EC2."""

    region: Name
    """Region, such as `us-west-2`."""
    availability_zone: OptionalName = None
    """Zones to take machines from, comma-separated, the first ones first; null = the region's."""
    image_id: OptionalName = None
    """Machine image with NVIDIA's driver; null = Ray's default for the region."""


class GcpConfig(Cloud):
    """Machines of Google Compute Engine."""

    project_id: Name
    """Project."""
    region: Name
    """Region, such as `us-central1`."""
    availability_zone: Name
    """Zone, such as `us-central1-a`."""
    source_image: Name
    """Boot image, with NVIDIA's driver and Python."""


class Host(Machine):
    """One machine of your own."""

    address: Name
    """Its IP address, reachable from the others."""
    pool: Literal["target", "draft"]
    """What it is for."""

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        return _checked_address(value)


class OnpremConfig(Section):
    """Machines of your own. Ray knows one type of them only, so each is labelled when Ray starts on it."""

    head_address: Name
    """IP address of the head."""
    head_num_cpus: Count
    """Cores of the head."""
    hosts: Annotated[list[Host], Field(min_length=1)]
    """The others."""
    ssh_user: Name = "ubuntu"
    """User to log in as."""
    ssh_private_key: OptionalName = None
    """Path of the key to log in with; null = ssh's own choice."""

    @field_validator("head_address")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        return _checked_address(value)

    @model_validator(mode="after")
    def _addresses_differ(self) -> OnpremConfig:
        addresses = [self.head_address, *(host.address for host in self.hosts)]
        if repeated := sorted({address for address in addresses if addresses.count(address) > 1}):
            raise ConflictError("hosts", f"{repeated[0]} is given twice — remove one of the two")
        return self


class PoolPod(ScaledMachine):
    """The pods of one model pool."""

    memory_gb: Count
    """Memory of one pod, in GiB."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the Kubernetes nodes to run on."""


class KubeRayConfig(Section):
    """Pods that the KubeRay operator (1.5.1 or newer) runs."""

    image: Name
    """Container image, as deploy/Dockerfile makes it."""
    namespace: OptionalName = None
    """Namespace; null = the one that is applied to."""
    head_num_cpus: Count = 4
    """Cores of the head's pod."""
    head_memory_gb: Count = 16
    """Memory of the head's pod, in GiB."""
    target: PoolPod
    """Pods of targets."""
    draft: PoolPod | None = None
    """Pods of drafts; needed where there is a draft pool."""
    tokens_secret: OptionalName = None
    """Secret with a key `tokens`, mounted where `security.tokens_file` says."""
    tls_secret: OptionalName = None
    """Secret with the keys `tls.crt`, `tls.key` and `ca.crt`, mounted in the folder of
    `security.internal_tls.certificate`."""
    idle_timeout_seconds: Count = 300
    """A pod on which nothing has run for so long is given back."""


class DeployConfig(Section):
    """On which machines the pools run: read by `paceline deploy` only, and checked with the pools' bounds and
    demands. Give the subsections that you deploy to."""

    cluster_name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$")] = "paceline"
    """Name of the cluster: lower-case letters, digits and hyphens."""
    package: Name = "dist/paceline-0.1.0-py3-none-any.whl"
    """What the machines install: the path of a wheel, from where `ray up` is started, or a requirement."""
    constraints: OptionalName = "constraints.txt"
    """Path of pinned versions to install with; null = none."""
    python: Name = "python3"
    """Interpreter (3.11 or newer) of the machines that `ray up` sets up; the same version on all."""
    files: dict[str, str] = Field(default_factory=dict)
    """More files and folders that `ray up` copies to all machines: path there → path here. Such as
    `security.tokens_file`, certificates, or a model's folder."""
    environment: dict[str, str] = Field(default_factory=dict)
    """More environment variables for Ray on all machines."""
    ray_token_file: OptionalName = None
    """Path here of a file with Ray's own token, for clusters of `ray up`; null = Ray's ports ask for none, so
    the machines' network must be closed. KubeRay makes a token of its own."""
    proxy_location: Literal["EveryNode", "HeadOnly"] = "EveryNode"
    """Where the public endpoint listens: on every machine that has a gateway, or on the head alone."""
    aws: AwsConfig | None = None
    """Amazon EC2, for `ray up`."""
    gcp: GcpConfig | None = None
    """Google Compute Engine, for `ray up`."""
    onprem: OnpremConfig | None = None
    """Machines of your own, for `ray up`."""
    kuberay: KubeRayConfig | None = None
    """Kubernetes, through KubeRay."""
