"""``paceline deploy``: cluster files from the configuration, and handing them to who starts clusters."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from paceline.actors.engine.errors import PacelineError
from paceline.cluster.cli_output import stderr, stdout
from paceline.cluster.config import load_config
from paceline.cluster.deploy_files import Target, check_all, render, write
from paceline.cluster.deploy_plan import Provider

EPILOG = """\
Examples:

paceline deploy cluster.yaml --check

paceline deploy cluster.yaml --target aws --output ray-up.yaml

paceline deploy cluster.yaml --target aws --apply

paceline deploy cluster.yaml --target kuberay | kubectl apply -f -

paceline deploy cluster.yaml --target serve --machines aws --apply

The configuration's 'deploy' section says which machines there are; the pools' bounds and demands are checked
against it before anything is written or started. Samples: deploy/ in the repository.
"""

DASHBOARD = "http://127.0.0.1:8265"
DASHBOARD_SECONDS = 60.0
"""How long Ray's dashboard may take to listen after 'ray start'."""


class DeployError(PacelineError):
    """The file cannot be applied; the text says what to do."""


def apply_command(target: Target, path: Path, address: str) -> list[str]:
    """The program that starts or changes what the file describes."""
    if target == "serve":
        return ["serve", "deploy", str(path), "--address", address]
    if target == "kuberay":
        return ["kubectl", "apply", "-f", str(path)]
    return ["ray", "up", str(path), "--yes"]


def wait_for_dashboard(address: str, timeout_seconds: float = DASHBOARD_SECONDS) -> None:
    """Return once somebody listens there.

    Raises:
        DeployError: nobody does in time.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        raise DeployError(f"--address: is {address!r}; give the dashboard's, such as {DASHBOARD}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((parts.hostname, port), timeout=3.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise DeployError(
                    f"no Ray dashboard at {address} ({error}); start Ray with 'ray start --head', or name it "
                    "with --address"
                ) from None
        time.sleep(0.25)


def apply(target: Target, text: str, output: Path | None, address: str) -> None:
    """Hand the file over, and return once it is taken.

    Raises:
        DeployError: the program is not there, or does not take the file.
    """
    program = apply_command(target, Path(), address)[0]
    # The command line's own environment comes first: its Ray is the one that checked the file.
    beside = Path(sys.executable).with_name(program)
    found = str(beside) if beside.is_file() else shutil.which(program)
    if found is None:
        raise DeployError(f"{program!r} is not installed; install it, or write the file with --output")
    if target == "serve":
        wait_for_dashboard(address)
    with tempfile.TemporaryDirectory(prefix="paceline-deploy-") as folder:
        path = output or Path(folder) / f"paceline-{target}.yaml"
        if output is None:
            write(path, text)
        command = [found, *apply_command(target, path, address)[1:]]
        status = subprocess.run(command, env=os.environ, check=False).returncode
    if status:
        raise DeployError(f"'{program} {command[1]}' failed with status {status}; its output says why")


def deploy(
    config_path: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="YAML file with a 'deploy' section; see docs/operations.md."),
    ],
    target: Annotated[
        Target | None,
        typer.Option(help="What to write: a cluster file, a manifest or a Serve configuration."),
    ] = None,
    machines: Annotated[
        Provider | None, typer.Option(help="For --target serve: whose machines the cluster has.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File (default: stdout).")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only check; write and start nothing.")] = False,
    apply_it: Annotated[
        bool, typer.Option("--apply", help="Start or update it: ray up, kubectl apply or serve deploy.")
    ] = False,
    address: Annotated[str, typer.Option(help="For --target serve: Ray's dashboard.")] = DASHBOARD,
) -> None:
    """Write the files that start the pools on a cluster, or apply them."""
    if check and (apply_it or output is not None):
        raise typer.BadParameter("--check writes and starts nothing; leave out --apply and --output")
    if machines is not None and target != "serve":
        raise typer.BadParameter("--machines goes with --target serve")
    if target is None and not check:
        raise typer.BadParameter("give --target, or --check")
    config = load_config(config_path)
    if target is None:
        described = check_all(config, str(config_path))
        if not described:
            raise DeployError(f"{config_path}: has no 'deploy' section to check; see docs/operations.md")
        stdout().print(f"{config_path}: ready for {', '.join(described)}", markup=False, soft_wrap=True)
        return
    text = render(config, str(config_path), target, machines)
    if check:
        stdout().print(f"{config_path}: ready for {target}", markup=False, soft_wrap=True)
        return
    if output is not None:
        write(output, text)
        stderr().print(f"wrote {output}", markup=False, soft_wrap=True)
    elif not apply_it:
        sys.stdout.write(text)
    if apply_it:
        apply(target, text, output, address)
