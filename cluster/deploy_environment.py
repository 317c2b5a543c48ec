"""What every machine of a cluster sets before Ray starts on it, and what it installs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from paceline.actors import weights
from paceline.cluster.config import PacelineConfig
from paceline.cluster.deploy_config import DeployConfig
from paceline.cluster.request_limits import message_environment, stream_environment

HOME = "~/paceline"
"""Folder on each machine of `ray up`: the package, its environment, the configuration."""

VENV = f"{HOME}/venv"
CONFIG_NAME = "cluster.yaml"

RAY_TOKEN_PATH = "~/.ray/auth_token"


def ray_environment(service: PacelineConfig, deploy: DeployConfig, *, with_token: bool) -> dict[str, str]:
    """Environment of Ray on every machine. The user's own variables win."""
    return {
        # A third of the default proxy's latency per message.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # Ray runs replicas at nice 15 unless told otherwise.
        "RAY_worker_niceness": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token" if with_token else "disabled",
        **message_environment(service.security),
        **stream_environment(),
        **deploy.environment,
    }


def exports(environment: Mapping[str, str]) -> str:
    """As a shell command."""
    return "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())


def is_wheel(package: str) -> bool:
    return package.endswith(".whl")


def file_mounts(deploy: DeployConfig, config_path: str) -> dict[str, str]:
    """Path there → path here, for `ray up`."""
    mounts = {f"{HOME}/{CONFIG_NAME}": config_path}
    if is_wheel(deploy.package):
        mounts[f"{HOME}/{PurePosixPath(deploy.package).name}"] = deploy.package
    if deploy.constraints is not None:
        mounts[f"{HOME}/constraints.txt"] = deploy.constraints
    if deploy.ray_token_file is not None:
        mounts[RAY_TOKEN_PATH] = deploy.ray_token_file
    return {**mounts, **deploy.files}


def setup_commands(deploy: DeployConfig, models: Iterable[str], extra: Iterable[str] = ()) -> list[str]:
    """Commands that make a machine ready for Ray to be started. May be run again.

    Args:
        models: what the machine serves; of the catalogue's models the weights are fetched here, not by the
            first replica.
        extra: more requirements.
    """
    package = deploy.package
    if is_wheel(package):
        package = f"{HOME}/{PurePosixPath(package).name}"
    pinned = "" if deploy.constraints is None else f" -c {HOME}/constraints.txt"
    wanted = " ".join([package if is_wheel(package) else shlex.quote(package), *map(shlex.quote, extra)])
    check = "import sys; sys.exit(sys.version_info < (3, 11) and 'Paceline needs Python 3.11 or newer')"
    path_line = 'export PATH="$HOME/paceline/venv/bin:$PATH"'
    return [
        f"{deploy.python} -c {shlex.quote(check)}",
        f"test -x {VENV}/bin/python || {deploy.python} -m venv {VENV}",
        f"{VENV}/bin/pip install --quiet{pinned} {wanted}",
        f"grep -qsF paceline/venv/bin ~/.bashrc || echo {shlex.quote(path_line)} >> ~/.bashrc",
        *(f"{VENV}/bin/paceline models pull {name}" for name in sorted(set(models)) if _is_catalogued(name)),
    ]


def _is_catalogued(name: str) -> bool:
    return any(entry.model.name == name for entry in weights.list_models())


def ray_start_arguments(resources: Mapping[str, int], labels: Mapping[str, str]) -> str:
    """Options of `ray start` for a machine that no autoscaler describes."""
    custom = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    parts = [f"--num-cpus={resources['CPU']}"]
    if "GPU" in resources:
        parts.append(f"--num-gpus={resources['GPU']}")
    if custom:
        parts.append(f"--resources={shlex.quote(json.dumps(custom))}")
    parts.append("--labels=" + shlex.quote(",".join(f"{name}={value}" for name, value in labels.items())))
    return " ".join(parts)
