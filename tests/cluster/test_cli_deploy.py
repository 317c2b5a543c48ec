"""``paceline deploy`` as a user types it; the programs that it hands files to only note what they got."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path

import pytest
import yaml

from paceline.cluster import cli_deploy
from paceline.cluster.cli import app
from paceline.cluster.cli_deploy import DeployError, wait_for_dashboard
from paceline.cluster.config_errors import ConfigError

CONFIG = """
model: owner/big
target: {num_replicas: 2}
deploy:
  aws:
    region: us-west-2
    head: {instance_type: h, num_cpus: 4}
    target: {instance_type: t, num_cpus: 8%s}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CONFIG % "")
    return path


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs; each writes its arguments, and the file that it was given, beside itself."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("ray", "serve", "kubectl"):
        program = folder / name
        program.write_text(
            f'#!/bin/bash\necho "$@" > {folder}/{name}.called\n'
            f'for word; do [ -f "$word" ] && cp "$word" {folder}/{name}.file; done\nexit ${{STATUS:-0}}\n'
        )
        program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder


def run(*arguments: object) -> None:
    app([*map(str, arguments)], standalone_mode=False)


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app(["deploy", "--help"])
    shown = capsys.readouterr().out
    assert "paceline deploy cluster.yaml --target aws --apply" in shown
    assert "--check" in shown


def test_check_writes_and_starts_nothing(
    config: Path, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(config.parent.iterdir())
    run("deploy", config, "--check")
    assert capsys.readouterr().out == f"{config}: ready for aws\n"
    run("deploy", config, "--target", "serve", "--check")
    assert capsys.readouterr().out == f"{config}: ready for serve\n"
    assert sorted(config.parent.iterdir()) == before
    assert not list(programs.glob("*.called"))


@pytest.mark.parametrize("option", [["--check"], ["--target", "aws"], ["--target", "aws", "--apply"]])
def test_a_mistake_is_found_before_anything_starts(option: list[str], config: Path, programs: Path) -> None:
    config.write_text(CONFIG % ", max_workers: 1")
    output = config.with_name("out.yaml")
    extra = [] if "--check" in option else ["--output", output]
    with pytest.raises(ConfigError) as caught:
        run("deploy", config, *option, *extra)
    assert str(caught.value) == (
        f"{config}:\n  deploy.aws.target.max_workers: is 1, which holds 1 target replicas, yet there may be "
        "2 — raise it to 2, or lower target.num_replicas to 1"
    )
    assert not output.exists()
    assert not list(programs.glob("*.called"))


def test_to_stdout_and_to_a_file(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("deploy", config, "--target", "aws")
    shown = capsys.readouterr().out
    assert yaml.safe_load(shown)["available_node_types"]["target"]["max_workers"] == 2
    output = config.with_name("ray-up.yaml")
    output.write_text("former")
    run("deploy", config, "--target", "aws", "--output", output)
    assert output.read_text() == shown
    assert sorted(path.name for path in config.parent.glob("*ray-up*")) == ["ray-up.yaml"]


def test_apply_hands_the_file_over(config: Path, programs: Path) -> None:
    run("deploy", config, "--target", "aws", "--apply")
    assert (programs / "ray.called").read_text().startswith("up ")
    assert yaml.safe_load((programs / "ray.file").read_text())["cluster_name"] == "paceline"
    output = config.with_name("ray-up.yaml")
    run("deploy", config, "--target", "aws", "--apply", "--output", output)
    assert (programs / "ray.called").read_text() == f"up {output} --yes\n"
    assert output.is_file()


def test_apply_waits_for_the_dashboard(config: Path, programs: Path) -> None:
    """Ray's dashboard listens some seconds after 'ray start' has returned."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        timer = threading.Timer(0.3, listener.listen)
        timer.start()
        run("deploy", config, "--target", "serve", "--apply", "--address", address)
        timer.join()
    assert (programs / "serve.called").read_text().endswith(f"--address {address}\n")
    written = yaml.safe_load((programs / "serve.file").read_text())
    assert written["applications"][0]["args"]["target"]["ray_actor_options"]["resources"] == {
        "target_gpu": 1.0
    }


def test_no_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(DeployError, match=r"no Ray dashboard at .* start Ray with 'ray start --head'"):
            wait_for_dashboard(f"http://127.0.0.1:{taken.getsockname()[1]}", timeout_seconds=0.0)
    with pytest.raises(DeployError, match=r"--address: is '127.0.0.1:8265'; give the dashboard's"):
        wait_for_dashboard("127.0.0.1:8265")


def test_a_program_that_fails_or_is_missing(
    config: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATUS", "3")
    with pytest.raises(DeployError, match="'ray up' failed with status 3"):
        run("deploy", config, "--target", "aws", "--apply")
    (programs / "ray").unlink()
    monkeypatch.setattr(cli_deploy.shutil, "which", lambda name: None)
    with pytest.raises(
        DeployError, match="'ray' is not installed; install it, or write the file with --output"
    ):
        run("deploy", config, "--target", "aws", "--apply")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "give --target, or --check"),
        (["--check", "--apply", "--target", "aws"], "--check writes and starts nothing"),
        (["--target", "aws", "--machines", "aws"], "--machines goes with --target serve"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], told: str, config: Path) -> None:
    with pytest.raises(Exception, match=told):
        run("deploy", config, *options)


def test_a_configuration_without_machines_has_nothing_to_check(tmp_path: Path) -> None:
    path = tmp_path / "paceline.yaml"
    path.write_text("model: m\n")
    with pytest.raises(DeployError, match="has no 'deploy' section to check"):
        run("deploy", path, "--check")
