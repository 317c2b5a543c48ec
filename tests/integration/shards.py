"""Services whose target replicas are groups of two ranks, and what is left of such a group."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tests.engine.models import tiny_llama
from tests.integration.conftest import Service, wait_until
from tests.integration.tiny_models import save

SIZE = 2
REPLACED_SECONDS = 120
FAULTS = [signal.SIGKILL, signal.SIGSTOP]


def configuration(folder: Path, num_replicas: int) -> dict[str, Any]:
    """Each replica is two processes."""
    return {
        "model": save(tiny_llama(), folder),
        "served_model_name": "tiny",
        "dtype": "float32",
        "target": {
            "num_replicas": num_replicas,
            "tensor_parallel_size": SIZE,
            "shard_timeout_s": 8.0,
            "num_threads": 1,
            "kv_cache": {"num_blocks": 1024},
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
        },
        "speculation": {"num_speculative_tokens": 0},
        # One that has no other target to go to hears so in time.
        "gateway": {"resume_timeout_s": 5.0},
    }


def ranks(replica: dict[str, Any]) -> list[int]:
    """Process ids of the leader and of the other ranks."""
    return [replica["pid"], *(shard["pid"] for shard in replica["shards"])]


def all_ranks(service: Service) -> set[int]:
    return {pid for replica in service.replicas("target") for pid in ranks(replica)}


def num_placement_groups() -> int:
    from ray.util import placement_group_table

    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())


def running(pid: int) -> bool:
    """Whether there is such a process, be it frozen. One that has ended and is not collected is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def wait_for_replacement(service: Service, old: list[int], num_groups: int) -> None:
    """The broken group is gone with all its ranks, and a whole new one is there in its place."""

    def replaced() -> bool:
        replicas = service.replicas("target")
        (gateway,) = service.replicas("gateway")
        return (
            len(replicas) == service.config.target.num_replicas
            and all(
                not replica["error"] and [shard["stage"] for shard in replica["shards"]] == ["following"]
                for replica in replicas
            )
            and all_ranks(service).isdisjoint(old)
            and not any(running(pid) for pid in old)
            and num_placement_groups() == num_groups
            and {target["target_id"] for target in gateway["targets"]} == {item["id"] for item in replicas}
        )

    wait_until(replaced, timeout_seconds=REPLACED_SECONDS, what="the group is back, and as large as before")
