"""The cluster files: written from one configuration, valid by Ray's own checks, and in agreement with it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from paceline.cluster.config import load_config
from paceline.cluster.config_errors import ConfigError
from paceline.cluster.deploy_files import HEADERS, check_all, render
from paceline.cluster.deploy_fit import POOL_LABEL
from tests.cluster.ray_service_schema import RAY_SERVICE

SAMPLE = "deploy/cluster.yaml"
FILES = {
    "aws": "ray-up-aws.yaml",
    "gcp": "ray-up-gcp.yaml",
    "onprem": "ray-up-onprem.yaml",
    "kuberay": "rayservice.yaml",
    "serve": "serve.yaml",
}
CLOUDS = ["aws", "gcp"]
RAY_UP = [*CLOUDS, "onprem"]


def _file(repository: Path, target: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((repository / "deploy" / FILES[target]).read_text())
    return content


def _commands(content: dict[str, Any]) -> list[str]:
    """All shell commands of a cluster file."""
    found = [command for key, value in content.items() if key.endswith("_commands") for command in value]
    for kind in content.get("available_node_types", {}).values():
        found += kind.get("worker_setup_commands", [])
    return found


@pytest.mark.parametrize("target", FILES)
def test_shipped_files_are_what_the_configuration_says(
    target: Any, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    text = render(load_config(SAMPLE), SAMPLE, target, "aws" if target == "serve" else None)
    assert (repository / "deploy" / FILES[target]).read_text() == text, "run 'make deploy-files'"


def test_every_kind_of_file_is_shipped() -> None:
    assert FILES.keys() == HEADERS.keys()


# ---------------------------------------------------------------- ray up


@pytest.mark.parametrize("target", RAY_UP)
def test_ray_accepts_the_cluster_file(target: str, repository: Path) -> None:
    """B67."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    given = _file(repository, target)
    prepared = prepare_config(given)
    validate_config(prepared)
    types = prepared["available_node_types"]
    assert prepared["head_node_type"] in types
    assert sum(kind["min_workers"] for kind in types.values()) <= prepared["max_workers"]
    assert all(kind["min_workers"] <= kind["max_workers"] for kind in types.values())
    if target == "onprem":
        provider = prepared["provider"]
        assert provider["head_ip"] not in provider["worker_ips"]
        assert prepared["max_workers"] == len(provider["worker_ips"]) == 5
    # No default of Ray's own set-up got in: it would install another Ray.
    assert not [command for command in _commands(prepared) if "pip install -U" in command]


@pytest.mark.parametrize("target", CLOUDS)
def test_ray_refuses_what_we_refuse(target: str, repository: Path) -> None:
    """B67: the validators do look: the same file with one number wrong does not pass."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    content = _file(repository, target)
    content["available_node_types"]["target"]["min_workers"] = content["max_workers"] + 1
    with pytest.raises(ValueError, match="max_workers"):
        validate_config(prepare_config(content))
    content = _file(repository, target)
    content["available_node_types"]["draft"]["resources"]["draft_gpu"] = 0.5
    with pytest.raises(jsonschema.ValidationError, match=r"0\.5 is not of type 'integer'"):
        validate_config(prepare_config(content))


@pytest.mark.parametrize("target", [*CLOUDS, "kuberay"])
def test_replicas_fit_the_machines_within_the_bounds(target: str, repository: Path) -> None:
    """B67, from the files alone: what a replica reserves against what a machine has."""
    machines = _machines(_file(repository, target), target)
    service = yaml.safe_load(
        render(load_config(repository / SAMPLE), SAMPLE, "serve", target)  # type: ignore[arg-type]
    )
    arguments = service["applications"][0]["args"]
    for pool in ("target", "draft"):
        options = arguments[pool]["ray_actor_options"]
        ranks = arguments[pool].get("tensor_parallel_size", 1)
        kind = machines[pool]
        assert options["label_selector"].items() <= kind["labels"].items()
        asked = {"GPU": options["num_gpus"], **options["resources"]}
        assert all(kind["resources"][name] >= ranks * amount for name, amount in asked.items())
        assert all(isinstance(amount, int) for amount in kind["resources"].values())
        bounds = arguments[pool]["autoscaling_config"]
        held = kind["max_workers"] * kind["resources"]["GPU"] // ranks
        assert held >= bounds["max_replicas"]
        assert kind["min_workers"] * kind["resources"]["GPU"] // ranks >= bounds["min_replicas"]
    gateway = arguments["gateway"]["ray_actor_options"]["label_selector"]
    assert gateway.items() <= machines["head"]["labels"].items()
    assert "GPU" not in machines["head"]["resources"]


def _machines(content: dict[str, Any], target: str) -> dict[str, Any]:
    if target != "kuberay":
        types: dict[str, Any] = content["available_node_types"]
        return types
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    cluster = {
        "metadata": {"name": "paceline", "namespace": "default"},
        "spec": content["spec"]["rayClusterConfig"],
    }
    derived = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    return {("head" if name.startswith("head") else name): kind for name, kind in derived.items()}


@pytest.mark.parametrize("target", RAY_UP)
def test_commands_are_shell(target: str, repository: Path) -> None:
    commands = _commands(_file(repository, target))
    assert commands
    for command in commands:
        checked = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
        assert checked.returncode == 0, f"{command}\n{checked.stderr}"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (
            "192.0.2.22",
            [
                "--num-cpus=48",
                "--num-gpus=4",
                '--resources={"target_gpu": 4}',
                f"--labels={POOL_LABEL}=target",
            ],
        ),
        (
            "192.0.2.31",
            ["--num-cpus=16", "--num-gpus=4", '--resources={"draft_gpu": 4}', f"--labels={POOL_LABEL}=draft"],
        ),
        ("192.0.2.2", None),
    ],
)
def test_a_host_of_ones_own_starts_as_what_it_is(
    address: str, expected: list[str] | None, repository: Path, tmp_path: Path
) -> None:
    """The command that every host gets, run with programs that only say what they were called with."""
    _program(tmp_path / "hostname", f"echo '10.9.8.7 {address} fe80::1 '")
    _program(tmp_path / "ray", f'printf "%s\\n" "$@" > {tmp_path}/called; env > {tmp_path}/env')
    command = _file(repository, "onprem")["worker_start_ray_commands"][-1]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RAY_HEAD_IP": "192.0.2.10"}
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    if expected is None:
        assert run.returncode == 1
        assert "not in deploy.onprem.hosts" in run.stdout
        assert not (tmp_path / "called").exists()
        return
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "called").read_text().splitlines() == ["start", "--address=192.0.2.10:6379", *expected]
    set_there = dict(
        line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line
    )
    assert set_there["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert set_there["RAY_AUTH_MODE"] == "disabled"


def _program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def test_rays_token_and_more_files_travel_along(repository: Path) -> None:
    content = yaml.safe_load((repository / SAMPLE).read_text())
    content["deploy"] |= {"ray_token_file": "ray-token", "environment": {"HF_TOKEN": "a b"}}
    written = yaml.safe_load(render(load_config(content), SAMPLE, "aws"))
    assert written["file_mounts"]["~/.ray/auth_token"] == "ray-token"
    assert written["file_mounts"]["/home/ubuntu/paceline-secrets/tokens"] == "tokens"
    start = written["worker_start_ray_commands"][-1]
    assert "RAY_AUTH_MODE=token" in start
    assert "HF_TOKEN='a b'" in start


# ---------------------------------------------------------------- Serve and KubeRay


def _check_serve(content: dict[str, Any]) -> None:
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(content)
    application = schema.applications[0]
    module, _, function = application.import_path.partition(":")
    imported = __import__(module, fromlist=[function])
    assert callable(getattr(imported, function))
    for servicer in schema.grpc_options.grpc_servicer_functions:
        module, _, function = servicer.rpartition(".")
        assert callable(getattr(__import__(module, fromlist=[function]), function))
    # The arguments travel as JSON and make the same configuration at the other end.
    assert load_config(json.loads(json.dumps(application.args))).given() == application.args


def test_serve_accepts_its_file(repository: Path) -> None:
    _check_serve(_file(repository, "serve"))


def test_serve_builds_the_application(repository: Path) -> None:
    """As ``serve deploy`` does on the cluster: by the import path, from the arguments."""
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
    from ray.serve._private.build_app import build_app as collect

    from paceline.cluster.application import build_app

    arguments = _file(repository, "serve")["applications"][0]["args"]
    application = call_user_app_builder_with_args_if_necessary(build_app, arguments)
    built = collect(application, name="paceline", route_prefix="/paceline")
    options = {deployment.name: deployment for deployment in built.deployments}
    assert options.keys() == {"gateway", "target", "draft"}
    bundles = options["target"]._replica_config.placement_group_bundles
    assert [bundle["target_gpu"] for bundle in bundles] == [1.0] * 4
    with pytest.raises(ConfigError, match="modle: unknown key"):
        build_app({"modle": "x"})


def test_kuberay_would_accept_the_manifest(repository: Path) -> None:
    content = _file(repository, "kuberay")
    jsonschema.validate(content, RAY_SERVICE)
    spec = content["spec"]
    _check_serve(yaml.safe_load(spec["serveConfigV2"]))
    # KubeRay takes Ray to be of this version, and so does the image.
    pinned = re.search(r"^ray==(.+)$", (repository / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert spec["rayClusterConfig"]["rayVersion"] == pinned[1]
    for group in (spec["rayClusterConfig"]["headGroupSpec"], *spec["rayClusterConfig"]["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        limits = pod["containers"][0]["resources"]["limits"]
        assert group["resources"]["CPU"] == limits["cpu"]
        assert group["resources"].get("GPU") == limits.get("nvidia.com/gpu")
        mounted = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {"/home/ubuntu/paceline-secrets"}


def test_secrets_of_kuberay_are_where_the_configuration_says(repository: Path) -> None:
    content = yaml.safe_load((repository / SAMPLE).read_text())
    tls = {"certificate": "/tls/node.pem", "private_key": "/tls/node.key", "ca": "/tls/ca.pem"}
    content["security"]["internal_tls"] = tls
    content["deploy"]["kuberay"]["tls_secret"] = "paceline-tls"
    written = yaml.safe_load(render(load_config(content), SAMPLE, "kuberay"))
    jsonschema.validate(written, RAY_SERVICE)
    pod = written["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]["template"]["spec"]
    volume = next(volume for volume in pod["volumes"] if volume["name"] == "tls")
    assert [f"/tls/{item['path']}" for item in volume["secret"]["items"]] == list(tls.values())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "labels"), {"a b": "c"}),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "resources"), {"GPU": 1}),
        (("spec", "rayClusterConfig", "headGroupSpec", "rayStartParams"), {"num-cpus": 0}),
        (("spec", "serveService", "spec", "ports", 0, "port"), "grpc"),
        (("spec", "serveConfigV2"), {"applications": []}),
        (("spec", "replicas"), 1),
    ],
)
def test_the_schema_knows_right_from_wrong(path: tuple[Any, ...], value: Any, repository: Path) -> None:
    content = _file(repository, "kuberay")
    section: Any = content
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, RAY_SERVICE)


# ---------------------------------------------------------------- a cluster that runs already


def test_a_configuration_without_machines_is_served_as_it_is(repository: Path) -> None:
    written = yaml.safe_load(
        render(
            load_config({"model": "m", "ray": {"address": "auto"}, "target": {"num_replicas": 2}}),
            "x",
            "serve",
        )
    )
    _check_serve(written)
    assert written["applications"][0]["args"] == {"model": "m", "target": {"num_replicas": 2}}
    assert written["http_options"]["host"] == "127.0.0.1"


def test_the_samples_of_the_readme_are_valid(repository: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (repository / "README.md").read_text(), re.DOTALL)
    samples = [load_config(yaml.safe_load(block)) for block in blocks]
    assert [check_all(sample, "README.md") for sample in samples] == [[], ["aws"]]


def test_whose_machines_must_be_clear(repository: Path) -> None:
    with pytest.raises(ConfigError, match="choose with --machines"):
        render(load_config(repository / SAMPLE), SAMPLE, "serve")
