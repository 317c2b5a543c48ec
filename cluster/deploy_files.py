"""What ``paceline deploy`` writes: one file for each kind of cluster, all from one configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from paceline.cluster.config import PacelineConfig
from paceline.cluster.config_errors import ConfigError
from paceline.cluster.deploy_kuberay import ray_service
from paceline.cluster.deploy_plan import Plan, Provider, make_plan
from paceline.cluster.deploy_ray_up import ray_up_config
from paceline.cluster.deploy_serve import serve_config

Target = Literal["aws", "gcp", "onprem", "kuberay", "serve"]

PROVIDERS: tuple[Provider, ...] = get_args(Provider)

HEADERS: dict[Target, str] = {
    "aws": "Machines of Amazon EC2:  ray up FILE",
    "gcp": "Machines of Google Compute Engine:  ray up FILE",
    "onprem": "Machines of your own:  ray up FILE",
    "kuberay": "For the KubeRay operator:  kubectl apply -f FILE",
    "serve": "The service on a Ray cluster that runs:  serve deploy FILE",
}


def render(config: PacelineConfig, config_path: str, target: Target, machines: Provider | None = None) -> str:
    """The file for ``target``, as text.

    Args:
        config_path: the configuration's path, as the file names it.
        machines: for ``serve``: whose labels and resources the pools ask for; None = the only provider of the
            ``deploy`` section, or where there is no such section, none.

    Raises:
        ConfigError: the pools cannot run there; nothing has been written or started.
    """
    content = _content(config, config_path, target, machines)
    command = f"paceline deploy {config_path} --target {target}"
    if target == "serve" and machines is not None:
        command += f" --machines {machines}"
    header = f"# {HEADERS[target]}\n#\n# Written by `{command}`; change the configuration, not this file.\n\n"
    return header + yaml.dump(
        content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=False
    )


def _content(
    config: PacelineConfig, config_path: str, target: Target, machines: Provider | None
) -> dict[str, Any]:
    if target == "serve":
        plan = _serve_plan(config, config_path, machines)
        if plan is None:
            return serve_config(without_start(config))
        return serve_config(plan.service, plan.deploy.proxy_location)
    plan = make_plan(config, target, config_path)
    return ray_service(plan) if target == "kuberay" else ray_up_config(plan, target, config_path)


def _serve_plan(config: PacelineConfig, config_path: str, machines: Provider | None) -> Plan | None:
    if machines is not None:
        return make_plan(config, machines, config_path)
    given = [
        name for name in PROVIDERS if config.deploy is not None and getattr(config.deploy, name) is not None
    ]
    if len(given) > 1:
        raise ConfigError(
            config_path,
            [f"deploy: has {', '.join(given)}, whose machines differ — choose with --machines NAME"],
        )
    return make_plan(config, given[0], config_path) if given else None


def without_start(config: PacelineConfig) -> PacelineConfig:
    """The configuration without the sections that only start things."""
    content = config.given()
    for name in ("deploy", "ray"):
        content.pop(name, None)
    return PacelineConfig.model_validate(content)


def check_all(config: PacelineConfig, config_path: str) -> list[Target]:
    """The targets that the configuration describes, each checked.

    Raises:
        ConfigError: with the problems of all of them.
    """
    described: list[Target] = [
        name for name in PROVIDERS if config.deploy is not None and getattr(config.deploy, name) is not None
    ]
    problems: list[str] = []
    for target in described:
        try:
            render(config, config_path, target)
        except ConfigError as error:
            problems.extend(problem for problem in error.problems if problem not in problems)
    if problems:
        raise ConfigError(config_path, problems)
    return described


def write(path: Path, text: str) -> None:
    """All of the file or nothing of it."""
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


class _Dumper(yaml.SafeDumper):
    """Lists indented below their key, and texts of several lines as blocks."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
