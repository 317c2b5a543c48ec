"""The machines of a ``deploy`` section, started and stopped by Ray's autoscaler, as a process of its own.

    python -m tests.integration.autoscaled_cluster FOLDER

Starts a head with the cluster file that ``paceline deploy FOLDER/cluster.yaml --target aws`` writes; only
the provider is another one, whose machines are processes here (Ray's ``FakeMultiNodeProvider``). Hands the
service over with ``paceline deploy --apply``, and prints one line of JSON twice a second once it runs. Each
line on its standard input, JSON too, says how many clients ask from then on (``count``), and what; none until
then. It ends with its standard input.

For PID and network namespaces of its own: the ports are fixed, and what Ray leaves running ends with them.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import traceback
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from paceline.cluster.client import connect
from paceline.cluster.config import load_config
from paceline.cluster.deploy_environment import ray_environment, ray_start_arguments
from paceline.cluster.deploy_files import render
from paceline.cluster.deploy_fit import POOL_LABEL
from paceline.cluster.deploy_plan import make_plan
from paceline.cluster.runtime import Runtime, haproxy_available, haproxy_environment
from paceline.cluster.service_start import APPLICATION_NAME, probe
from tests.integration.conftest import Service
from tests.integration.labelled_cluster import hand_over, replicas
from tests.integration.network_namespaces import HERE_ADDRESS, ip
from tests.integration.test_pools import Record, clients

PROVIDER = {
    "type": "external",
    "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
    "launch_multiple": True,
    "disable_node_updaters": True,
    "disable_launch_config_check": True,
}
GCS_PORT, DASHBOARD_PORT = 6379, 8265
START_SECONDS = 180.0


def main(folder: Path) -> None:
    # By its default route a host finds out which address is its own.
    ip("link set dev lo up", f"address add {HERE_ADDRESS}/32 dev lo", "route add default dev lo")
    config_path = folder / "cluster.yaml"
    config = load_config(config_path)
    plan = make_plan(config, "aws")
    os.environ |= ray_environment(plan.service, plan.deploy, with_token=False)
    os.environ["RAY_TMPDIR"] = str(folder)
    if haproxy_available(folder / "ha"):
        (folder / "ha").mkdir()
        os.environ |= haproxy_environment(folder / "ha")
    else:
        os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
    start_head(yaml.safe_load(render(config, str(config_path), "aws")), folder)
    with Runtime.open(address=f"127.0.0.1:{GCS_PORT}", num_cpus=0) as runtime:
        hand_over(config_path, DASHBOARD_PORT, machines="aws")
        runtime.wait_until_ready(
            APPLICATION_NAME, on_progress=lambda pools: None, timeout_seconds=START_SECONDS
        )
        address = f"127.0.0.1:{config.gateway.grpc_port}"
        probe(address, runtime, None, may_sleep=False)
        with connect(address) as stub:
            follow(Service(stub, address, config))


def start_head(content: dict[str, Any], folder: Path) -> None:
    """As ``ray up`` does it on the head that it has set up."""
    from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE
    from ray.autoscaler._private.util import prepare_config

    content = prepare_config(content)
    types = content["available_node_types"]
    head = types[FAKE_HEAD_NODE_TYPE] = types.pop(content["head_node_type"])
    # Nothing has to be copied to machines that are processes here.
    content |= {"head_node_type": FAKE_HEAD_NODE_TYPE, "provider": PROVIDER, "file_mounts": {}}
    (folder / "ray-up.json").write_text(json.dumps(content))
    environment = {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        # The first autoscaler ignores label selectors.
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={GCS_PORT}"]
    command += [f"--dashboard-port={DASHBOARD_PORT}", f"--autoscaling-config={folder / 'ray-up.json'}"]
    command += shlex.split(ray_start_arguments(head["resources"], head["labels"]))
    subprocess.run(command, check=True, env=os.environ | environment, stdout=sys.stderr)


def follow(service: Service) -> None:
    """Tell what there is, and put on the load that is asked for."""
    record = Record(on_row=tell)
    threading.excepthook = end
    with record.running(), ExitStack() as load:
        for line in sys.stdin:
            load.close()
            options = json.loads(line)
            if options["count"]:
                load.enter_context(clients(service, record, **options))


def end(failure: threading.ExceptHookArgs) -> None:
    """Without more rows there is nothing to wait for."""
    traceback.print_exception(failure.exc_value)
    os._exit(1)


def tell(row: dict[str, Any]) -> None:
    """Print the row, with the nodes of each kind, and on which kind each pool's replicas are."""
    import ray

    kinds = {node["NodeID"]: node["Labels"].get(POOL_LABEL) for node in ray.nodes()}
    alive = Counter(kinds[node["NodeID"]] for node in ray.nodes() if node["Alive"])
    row["nodes"] = {kind: alive[kind] for kind in ("gateway", "target", "draft")}
    row["places"] = {pool: [] for pool in row["nodes"]}
    for pool, node_id in replicas().values():
        row["places"][pool].append(kinds.get(node_id))
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
