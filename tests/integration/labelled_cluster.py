"""A cluster of several nodes with the labels and resources of a ``deploy`` section, as a process of its own.

    python -m tests.integration.labelled_cluster CONFIG

Starts Ray's nodes, hands the service over with ``paceline deploy --apply``, and prints one line of JSON once
it runs: which node each replica is on. After each line on its standard input it hands the file over again and
prints another; it ends with its standard input.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.cluster.config import load_config
from paceline.cluster.deploy_environment import ray_environment
from paceline.cluster.deploy_fit import POOL_LABEL
from paceline.cluster.deploy_plan import make_plan
from paceline.cluster.runtime import Runtime, free_port, haproxy_available, haproxy_environment
from paceline.cluster.service_start import APPLICATION_NAME


def main(config_path: Path) -> None:
    plan = make_plan(load_config(config_path), "onprem")
    folder = Path(tempfile.mkdtemp(prefix="pl-deploy-", dir="/tmp"))
    os.environ |= ray_environment(plan.service, plan.deploy, with_token=False)
    if haproxy_available(folder / "ha"):
        (folder / "ha").mkdir()
        os.environ |= haproxy_environment(folder / "ha")
    else:
        os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
    from ray.cluster_utils import Cluster

    dashboard = free_port()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 4,
            "labels": {POOL_LABEL: "gateway"},
            "include_dashboard": True,
            "dashboard_port": dashboard,
            "dashboard_agent_listen_port": free_port(),
            "temp_dir": str(folder / "ray"),
        },
    )
    try:
        for pool in plan.pools:
            for group in pool.groups:
                resources = dict(group.resources)
                cluster.add_node(
                    num_cpus=resources.pop("CPU"),
                    num_gpus=resources.pop("GPU", 0),
                    resources=resources,
                    labels=group.labels,
                    dashboard_agent_listen_port=free_port(),
                )
        with Runtime.open(address=cluster.address, num_cpus=0) as runtime:
            hand_over(config_path, dashboard)
            report(runtime, before=set())
            for _ in sys.stdin:
                before = set(replicas())
                hand_over(config_path, dashboard)
                report(runtime, before)
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def hand_over(config_path: Path, dashboard: int, machines: str = "onprem") -> None:
    command = [sys.executable, "-m", "paceline.cluster.cli", "deploy", str(config_path), "--target", "serve"]
    address = f"http://127.0.0.1:{dashboard}"
    subprocess.run(
        [*command, "--machines", machines, "--apply", "--address", address], check=True, stdout=sys.stderr
    )


def report(runtime: Runtime, before: set[str]) -> None:
    """Print where replicas are, once none of ``before`` is left and all others take traffic."""
    deadline = time.monotonic() + 180.0
    while True:
        runtime.wait_until_ready(APPLICATION_NAME, on_progress=lambda pools: None, timeout_seconds=120.0)
        found = replicas()
        if found and not before & found.keys():
            break
        if time.monotonic() > deadline:
            raise TimeoutError(f"replicas that should be gone: {sorted(before & found.keys())}")
        time.sleep(0.5)
    import ray

    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    told = [
        {
            "replica": name,
            "pool": pool,
            "labels": nodes[node_id]["Labels"],
            "resources": nodes[node_id]["Resources"],
        }
        for name, (pool, node_id) in found.items()
    ]
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def replicas() -> dict[str, tuple[str, str]]:
    """Replica → (deployment, node), of those that are alive and have a node."""
    from ray.serve.context import _get_global_client

    details: dict[str, Any] = _get_global_client().get_serve_details()["applications"]
    return {
        replica["replica_id"]: (pool, replica["node_id"])
        for pool, deployment in details[APPLICATION_NAME]["deployments"].items()
        for replica in deployment["replicas"]
        if replica["state"] in ("RUNNING", "STOPPING") and "node_id" in replica
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
