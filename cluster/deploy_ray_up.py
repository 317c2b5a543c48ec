"""Cluster files for ``ray up``: Amazon EC2, Google Compute Engine, and machines of your own."""

from __future__ import annotations

from typing import Any

from paceline.cluster.config import PacelineConfig
from paceline.cluster.deploy_config import AwsConfig, Cloud, GcpConfig, HeadNode, OnpremConfig, PoolNode
from paceline.cluster.deploy_environment import (
    CONFIG_NAME,
    HOME,
    exports,
    file_mounts,
    ray_environment,
    ray_start_arguments,
    setup_commands,
)
from paceline.cluster.deploy_fit import POOL_LABEL, MachineGroup
from paceline.cluster.deploy_plan import Plan, PlannedPool, Provider
from paceline.cluster.deployment_names import DRAFT, GATEWAY, TARGET

HEAD_TYPE = "head"

AWS_CLIENT = "boto3>=1.34"
GCP_CLIENT = "google-api-python-client>=2.100"
"""What the head needs to start machines."""


def ray_up_config(plan: Plan, provider: Provider, config_path: str) -> dict[str, Any]:
    """What ``ray up`` takes.

    Args:
        config_path: the configuration, from where ``ray up`` is started; the head reads it again to start the
            service.
    """
    section = getattr(plan.deploy, provider)
    if isinstance(section, OnpremConfig):
        return _onprem(plan, section, config_path)
    assert isinstance(section, AwsConfig | GcpConfig)
    return _cloud(plan, provider, section, config_path)


def _cloud(
    plan: Plan, provider: Provider, section: AwsConfig | GcpConfig, config_path: str
) -> dict[str, Any]:
    client = AWS_CLIENT if isinstance(section, AwsConfig) else GCP_CLIENT
    return {
        "cluster_name": plan.deploy.cluster_name,
        "max_workers": plan.max_workers,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": section.idle_timeout_minutes,
        "provider": _aws_provider(section) if isinstance(section, AwsConfig) else _gcp_provider(section),
        "auth": {"ssh_user": section.ssh_user},
        "head_node_type": HEAD_TYPE,
        "available_node_types": {
            HEAD_TYPE: _head_type(section),
            **{pool.name: _node_type(plan, section, pool) for pool in plan.pools},
        },
        "file_mounts": file_mounts(plan.deploy, config_path),
        "setup_commands": [],
        "head_setup_commands": setup_commands(plan.deploy, [plan.service.model], [client]),
        # Each type has its own.
        "worker_setup_commands": [],
        "head_start_ray_commands": _head_start(plan, provider),
        "worker_start_ray_commands": _worker_start(plan),
    }


def _aws_provider(section: AwsConfig) -> dict[str, Any]:
    provider: dict[str, Any] = {"type": "aws", "region": section.region}
    if section.availability_zone is not None:
        provider["availability_zone"] = section.availability_zone
    return {**provider, "cache_stopped_nodes": False}


def _gcp_provider(section: GcpConfig) -> dict[str, Any]:
    return {
        "type": "gcp",
        "region": section.region,
        "availability_zone": section.availability_zone,
        "project_id": section.project_id,
    }


def _head_type(section: Cloud) -> dict[str, Any]:
    return {
        "resources": {"CPU": section.head.num_cpus},
        "labels": {POOL_LABEL: GATEWAY},
        "min_workers": 0,
        "max_workers": 0,
        "node_config": _node_config(section, section.head),
    }


def _node_type(plan: Plan, section: Cloud, pool: PlannedPool) -> dict[str, Any]:
    group = pool.groups[0]
    machine: PoolNode = getattr(section, pool.name)
    return {
        "resources": dict(group.resources),
        "labels": group.labels,
        "min_workers": pool.min_workers,
        "max_workers": pool.max_workers,
        "node_config": _node_config(section, machine),
        "worker_setup_commands": setup_commands(plan.deploy, _models(plan.service, pool.name)),
    }


def _models(service: PacelineConfig, pool: str) -> list[str]:
    if pool == DRAFT and service.draft is not None:
        return [service.draft.model]
    return [service.model]


def _node_config(section: Cloud, machine: HeadNode | PoolNode) -> dict[str, Any]:
    """The provider's settings of a machine; the user's own win."""
    base = _aws_node(section, machine) if isinstance(section, AwsConfig) else _gcp_node(section, machine)
    return {**base, **machine.node_config}


def _aws_node(section: AwsConfig, machine: HeadNode | PoolNode) -> dict[str, Any]:
    node: dict[str, Any] = {"InstanceType": machine.instance_type}
    if section.image_id is not None:
        node["ImageId"] = section.image_id
    node["BlockDeviceMappings"] = [
        {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": section.disk_gb, "VolumeType": "gp3"}}
    ]
    if isinstance(machine, PoolNode) and machine.spot:
        node["InstanceMarketOptions"] = {"MarketType": "spot"}
    return node


def _gcp_node(section: Cloud, machine: HeadNode | PoolNode) -> dict[str, Any]:
    assert isinstance(section, GcpConfig)
    node: dict[str, Any] = {
        "machineType": machine.instance_type,
        "disks": [
            {
                "boot": True,
                "autoDelete": True,
                "type": "PERSISTENT",
                "initializeParams": {"diskSizeGb": section.disk_gb, "sourceImage": section.source_image},
            }
        ],
    }
    if isinstance(machine, PoolNode) and machine.num_gpus:
        # Machines with GPUs cannot move to another host.
        node["scheduling"] = [{"onHostMaintenance": "TERMINATE"}]
        node["metadata"] = {"items": [{"key": "install-nvidia-driver", "value": "True"}]}
    if isinstance(machine, PoolNode) and machine.spot:
        node.setdefault("scheduling", []).append({"provisioningModel": "SPOT"})
    return node


def _onprem(plan: Plan, section: OnpremConfig, config_path: str) -> dict[str, Any]:
    auth = {"ssh_user": section.ssh_user}
    if section.ssh_private_key is not None:
        auth["ssh_private_key"] = section.ssh_private_key
    models = [model for pool in (TARGET, DRAFT) for model in _models(plan.service, pool)]
    head = ray_start_arguments({"CPU": section.head_num_cpus}, {POOL_LABEL: GATEWAY})
    return {
        "cluster_name": plan.deploy.cluster_name,
        "min_workers": len(section.hosts),
        "max_workers": len(section.hosts),
        "upscaling_speed": 1.0,
        "provider": {
            "type": "local",
            "head_ip": section.head_address,
            "worker_ips": [host.address for host in section.hosts],
        },
        "auth": auth,
        "file_mounts": file_mounts(plan.deploy, config_path),
        "setup_commands": setup_commands(plan.deploy, models),
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": _head_start(plan, "onprem", f" {head}"),
        "worker_start_ray_commands": _worker_start(plan, _host_cases(plan, section)),
    }


def _host_cases(plan: Plan, section: OnpremConfig) -> str:
    """The options of ``ray start`` for the host that the command runs on: all get the same command."""
    groups = {group.path: group for pool in plan.pools for group in pool.groups}
    cases = "".join(
        f'*" {host.address} "*) set -- {_start_of(groups[f"deploy.onprem.hosts.{index}"])};; '
        for index, host in enumerate(section.hosts)
    )
    otherwise = '*) echo "this host is not in deploy.onprem.hosts"; exit 1;;'
    return f'case " $(hostname -I) " in {cases}{otherwise} esac'


def _start_of(group: MachineGroup) -> str:
    return ray_start_arguments(group.resources, group.labels)


def _head_start(plan: Plan, provider: Provider, arguments: str = "") -> list[str]:
    """The head also starts the service."""
    start = "ray start --head --port=6379 --dashboard-host=127.0.0.1"
    start = f"{start} --autoscaling-config=~/ray_bootstrap_config.yaml{arguments}"
    service = f"paceline deploy {HOME}/{CONFIG_NAME} --target serve --machines {provider} --apply"
    return ["ray stop", f"{_exports(plan)}; ulimit -n 65536; {start}", f"{_exports(plan)}; {service}"]


def _worker_start(plan: Plan, cases: str | None = None) -> list[str]:
    start = "ulimit -n 65536; ray start --address=$RAY_HEAD_IP:6379"
    if cases is not None:
        start = f'{cases}; {start} "$@"'
    return ["ray stop", f"{_exports(plan)}; {start}"]


def _exports(plan: Plan) -> str:
    with_token = plan.deploy.ray_token_file is not None
    return exports(ray_environment(plan.service, plan.deploy, with_token=with_token))
