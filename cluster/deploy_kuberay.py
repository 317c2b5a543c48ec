"""The ``RayService`` manifest for the KubeRay operator."""

from __future__ import annotations

import importlib.metadata
from pathlib import PurePosixPath
from typing import Any

import yaml

from paceline.cluster.deploy_config import KubeRayConfig, PoolPod
from paceline.cluster.deploy_environment import ray_environment
from paceline.cluster.deploy_fit import POOL_LABEL
from paceline.cluster.deploy_plan import Plan, PlannedPool
from paceline.cluster.deploy_serve import serve_config
from paceline.cluster.deployment_names import GATEWAY

GPU_RESOURCE = "nvidia.com/gpu"
IMAGE_USER = 1000
"""User of Ray's images."""

TOKENS_KEY = "tokens"
TLS_KEYS = ("tls.crt", "tls.key", "ca.crt")


def ray_service(plan: Plan) -> dict[str, Any]:
    """What ``kubectl apply`` takes."""
    section = plan.deploy.kuberay
    assert section is not None
    metadata: dict[str, Any] = {"name": plan.deploy.cluster_name}
    if section.namespace is not None:
        metadata["namespace"] = section.namespace
    service = serve_config(plan.service, plan.deploy.proxy_location)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": metadata,
        "spec": {
            "serveConfigV2": yaml.safe_dump(service, sort_keys=False, allow_unicode=True),
            # A new cluster takes over once it is ready; the old one finishes what it has.
            "upgradeStrategy": {"type": "NewCluster"},
            "rayClusterDeletionDelaySeconds": _deletion_delay(plan),
            "serveService": {"spec": {"type": "ClusterIP", "ports": _service_ports(plan)}},
            "rayClusterConfig": {
                "rayVersion": importlib.metadata.version("ray"),
                "enableInTreeAutoscaling": True,
                "autoscalerOptions": {
                    "version": "v2",
                    "upscalingMode": "Default",
                    "idleTimeoutSeconds": section.idle_timeout_seconds,
                },
                "authOptions": {"mode": "token"},
                "headGroupSpec": _head_group(plan, section),
                "workerGroupSpecs": [_worker_group(plan, section, pool) for pool in plan.pools],
            },
        },
    }


def _deletion_delay(plan: Plan) -> int:
    """The old cluster's pods must live for as long as its requests may take to end."""
    return max(60, round(plan.service.gateway.graceful_shutdown_timeout_s) + 30)


def _service_ports(plan: Plan) -> list[dict[str, Any]]:
    gateway = plan.service.gateway
    return [
        {"name": "serve", "port": gateway.http_port, "targetPort": gateway.http_port},
        {"name": "grpc", "port": gateway.grpc_port, "targetPort": gateway.grpc_port, "appProtocol": "grpc"},
    ]


def _head_group(plan: Plan, section: KubeRayConfig) -> dict[str, Any]:
    ports = [
        {"name": "gcs-server", "containerPort": 6379},
        {"name": "dashboard", "containerPort": 8265},
        *_container_ports(plan),
    ]
    limits = {"cpu": str(section.head_num_cpus), "memory": f"{section.head_memory_gb}Gi"}
    return {
        "labels": {POOL_LABEL: GATEWAY},
        "resources": {"CPU": str(section.head_num_cpus)},
        # Inside of the cluster's own network, for the operator.
        "rayStartParams": {"dashboard-host": "0.0.0.0"},
        "template": _template(plan, section, "ray-head", limits, ports),
    }


def _worker_group(plan: Plan, section: KubeRayConfig, pool: PlannedPool) -> dict[str, Any]:
    group = pool.groups[0]
    pod: PoolPod = getattr(section, pool.name)
    limits = {"cpu": str(pod.num_cpus), "memory": f"{pod.memory_gb}Gi"}
    if pod.num_gpus:
        limits[GPU_RESOURCE] = str(pod.num_gpus)
    template = _template(plan, section, "ray-worker", limits, _container_ports(plan))
    if pod.node_selector:
        template["spec"]["nodeSelector"] = dict(pod.node_selector)
    if pod.num_gpus:
        template["spec"]["tolerations"] = [
            {"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"},
        ]
    return {
        "groupName": pool.name,
        "replicas": pool.min_workers,
        "minReplicas": pool.min_workers,
        "maxReplicas": pool.max_workers,
        "labels": group.labels,
        "resources": {name: str(amount) for name, amount in group.resources.items()},
        "rayStartParams": {},
        "template": template,
    }


def _container_ports(plan: Plan) -> list[dict[str, Any]]:
    gateway = plan.service.gateway
    return [
        {"name": "serve", "containerPort": gateway.http_port},
        {"name": "grpc", "containerPort": gateway.grpc_port},
    ]


def _template(
    plan: Plan,
    section: KubeRayConfig,
    container: str,
    limits: dict[str, str],
    ports: list[dict[str, Any]],
) -> dict[str, Any]:
    environment = ray_environment(plan.service, plan.deploy, with_token=True)
    # The operator sets it, with the token.
    environment.pop("RAY_AUTH_MODE")
    mounts, volumes = _secrets(plan, section)
    spec: dict[str, Any] = {
        "name": container,
        "image": section.image,
        "resources": {"limits": limits, "requests": limits},
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "ports": ports,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "runAsNonRoot": True,
            "runAsUser": IMAGE_USER,
        },
    }
    if mounts:
        spec["volumeMounts"] = mounts
    pod: dict[str, Any] = {
        "terminationGracePeriodSeconds": _deletion_delay(plan),
        "automountServiceAccountToken": container == "ray-head",
        "containers": [spec],
    }
    if volumes:
        pod["volumes"] = volumes
    return {"spec": pod}


def _secrets(plan: Plan, section: KubeRayConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(mounts, volumes) of the secrets. Whole folders: a single file that is mounted is never renewed."""
    security, mounts, volumes = plan.service.security, [], []
    if section.tokens_secret is not None and security.tokens_file is not None:
        path = PurePosixPath(security.tokens_file)
        mounts.append({"name": "tokens", "mountPath": str(path.parent), "readOnly": True})
        items = [{"key": TOKENS_KEY, "path": path.name}]
        volumes.append({"name": "tokens", "secret": {"secretName": section.tokens_secret, "items": items}})
    if section.tls_secret is not None and security.internal_tls is not None:
        tls = security.internal_tls
        paths = [PurePosixPath(path) for path in (tls.certificate, tls.private_key, tls.ca)]
        mounts.append({"name": "tls", "mountPath": str(paths[0].parent), "readOnly": True})
        items = [{"key": key, "path": path.name} for key, path in zip(TLS_KEYS, paths, strict=True)]
        volumes.append({"name": "tls", "secret": {"secretName": section.tls_secret, "items": items}})
    return mounts, volumes
