"""The configuration: strict, all problems at once, each with its path and remedy."""

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from paceline.actors.engine.config import DraftEngineConfig, LogprobsMode, TargetEngineConfig
from paceline.actors.engine.config import NgramConfig as EngineNgramConfig
from paceline.actors.engine.parameters import VerificationRule
from paceline.cluster.actor_specs import draft_spec, target_spec
from paceline.cluster.config import (
    DraftConfig,
    NgramConfig,
    PacelineConfig,
    SpeculationConfig,
    TargetConfig,
    load_config,
)
from paceline.cluster.config_errors import ConfigError
from paceline.cluster.config_reference import reference


def _problems(content: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config({"model": "m", **content})
    return caught.value.problems


def _draft_of(config: PacelineConfig) -> DraftConfig:
    assert config.draft is not None
    return config.draft


# ---------------------------------------------------------------- what suffices


def test_two_names_suffice(tmp_path: Path) -> None:
    file = tmp_path / "paceline.yaml"
    file.write_text("model: big\ndraft: small\n")
    config = load_config(file)
    assert config.model == "big"
    assert _draft_of(config).model == "small"
    assert (config.target.num_replicas, _draft_of(config).num_replicas) == (1, 1)
    assert config.speculation.num_speculative_tokens is None
    assert config.gateway.grpc_port == 9000


def test_no_draft_is_fine() -> None:
    assert load_config({"model": "m"}).draft is None
    assert load_config({"model": "m", "draft": None}).draft is None


def test_the_sample_file_is_valid(repository: Path) -> None:
    config = load_config(repository / "deploy" / "paceline.yaml")
    assert _draft_of(config).model == "qwen2.5-coder-0.5b-instruct"


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ({"model": "owner/Model-1B"}, "Model-1B"),
        ({"model": "/data/models/mine/"}, "mine"),
        ({"model": "mine.gguf"}, "mine"),
        ({"model": "emulated://fast?base_ms=2"}, "fast"),
        ({"model": "qwen2.5-coder-1.5b-instruct"}, "qwen2.5-coder-1.5b-instruct"),
        ({"model": "owner/x", "served_model_name": "y"}, "y"),
    ],
)
def test_what_requests_call_the_model(content: dict[str, Any], name: str) -> None:
    assert load_config(content).model_name == name


def test_a_draft_has_the_served_models_number_format_unless_it_says_otherwise() -> None:
    content = {"model": "m", "dtype": "float32"}
    assert load_config({**content, "draft": "d"}).draft_dtype == "float32"
    assert load_config({**content, "draft": {"model": "d", "dtype": "bfloat16"}}).draft_dtype == "bfloat16"


@pytest.mark.parametrize("deterministic", [True, False, None])
def test_deterministic_reaches_both_pools(deterministic: bool | None) -> None:
    assert load_config({"model": "m"}).deterministic is None
    config = load_config({"model": "m", "draft": "d", "deterministic": deterministic})
    assert target_spec(config, "t").model.deterministic is deterministic
    assert draft_spec(config, "d").model.deterministic is deterministic


def test_drafts_are_quantised_where_they_can_and_targets_only_when_asked() -> None:
    config = load_config({"model": "m", "draft": "d"})
    assert (target_spec(config, "t").model.quantization, draft_spec(config, "d").model.quantization) == (
        "none",
        "auto",
    )
    config = load_config(
        {"model": "m", "target": {"quantization": "int8"}, "draft": {"model": "d", "quantization": "none"}}
    )
    assert (target_spec(config, "t").model.quantization, draft_spec(config, "d").model.quantization) == (
        "int8",
        "none",
    )


@pytest.mark.parametrize("deterministic", [None, True, False])
def test_a_draft_may_be_compiled_whatever_the_targets_are(deterministic: bool | None) -> None:
    config = load_config(
        {"model": "m", "deterministic": deterministic, "draft": {"model": "d", "enforce_eager": False}}
    )
    assert target_spec(config, "t").model.deterministic is deterministic
    assert target_spec(config, "t").model.enforce_eager
    assert not draft_spec(config, "d").model.enforce_eager
    assert draft_spec(load_config({"model": "m", "draft": "d"}), "d").model.enforce_eager


@pytest.mark.parametrize("mode", LogprobsMode)
def test_the_law_of_log_probabilities_reaches_the_target(mode: LogprobsMode) -> None:
    assert target_spec(load_config({"model": "m"}), "t").engine.logprobs_mode is LogprobsMode.RAW
    config = load_config({"model": "m", "target": {"logprobs_mode": mode.value}})
    assert target_spec(config, "t").engine.logprobs_mode is mode


def test_prefix_caching_is_an_option_of_each_pool() -> None:
    config = load_config({"model": "m", "draft": {"model": "d", "enable_prefix_caching": False}})
    assert target_spec(config, "t").engine.enable_prefix_caching
    assert not draft_spec(config, "d").engine.enable_prefix_caching


@pytest.mark.parametrize("rule", VerificationRule)
def test_every_rule_can_be_chosen(rule: VerificationRule) -> None:
    config = load_config({"model": "m", "speculation": {"verification": rule.value}})
    assert VerificationRule(config.speculation.verification) is rule
    assert load_config({"model": "m"}).speculation.verification == VerificationRule.COUPLED.value


def test_a_configuration_is_immutable_and_travels() -> None:
    config = load_config({"model": "m", "draft": "d", "target": {"max_num_seqs": 3}})
    with pytest.raises(ValidationError):
        config.model = "other"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


def test_whole_numbers_do_for_numbers() -> None:
    config = load_config({"model": "m", "target": {"kv_cache": {"memory_gb": 2}}})
    assert config.target.kv_cache.memory_gb == 2.0


# ---------------------------------------------------------------- one wrong thing


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"modell": "x"}, "modell: unknown key — did you mean model?"),
        ({"target": {"max_num_seq": 1}}, "target.max_num_seq: unknown key — did you mean max_num_seqs?"),
        (
            {"draft": {"model": "d", "kv_cache": {"blocks": 4}}},
            "draft.kv_cache.blocks: unknown key — did you mean num_blocks?",
        ),
        (
            {"ray": {"xyzzy": 1}},
            "ray.xyzzy: unknown key — remove it; known here are "
            "address, include_dashboard, namespace, num_cpus",
        ),
        ({"model": 3}, "model: is 3 — give a text (quote it: '...')"),
        ({"model": ""}, "model: is empty — give a name, or remove the key"),
        (
            {"draft": {"model": "d", "quantization": "int4"}},
            "draft.quantization: is 'int4' — give auto, none or int8",
        ),
        # What is served must not hang on which processor a replica finds.
        ({"target": {"quantization": "auto"}}, "target.quantization: is 'auto' — give none or int8"),
        ({"dtype": "fp8"}, "dtype: is 'fp8' — give auto, float32, bfloat16 or float16"),
        ({"trust_remote_code": "yes"}, "trust_remote_code: is 'yes' — give true or false"),
        ({"draft": {"num_replicas": 1}}, "draft.model: is missing — add it"),
        ({"draft": ["d"]}, "draft: is a list — give a mapping, or remove the key"),
        ({"target": None}, "target: is empty (null) — give a mapping, or remove the key"),
        ({"target": {"max_num_seqs": "4"}}, "target.max_num_seqs: is '4' — give a whole number"),
        ({"target": {"max_num_seqs": 4.5}}, "target.max_num_seqs: is 4.5 — give a whole number"),
        ({"target": {"max_num_seqs": True}}, "target.max_num_seqs: is true — give a whole number"),
        ({"target": {"num_replicas": 0}}, "target.num_replicas: is 0 — give a number at least 1"),
        (
            {"target": {"kv_cache": {"memory_gb": float("nan")}}},
            "target.kv_cache.memory_gb: is nan — give a finite number",
        ),
        ({"gateway": {"grpc_port": 70000}}, "gateway.grpc_port: is 70000 — give a number at most 65535"),
        (
            {"speculation": {"num_speculative_tokens": -1}},
            "speculation.num_speculative_tokens: is -1 — give a number at least 0",
        ),
        (
            {"speculation": {"verification": "typical"}},
            "speculation.verification: is 'typical' — give coupled, standard or block",
        ),
        (
            {"target": {"tensor_parallel_size": 0}},
            "target.tensor_parallel_size: is 0 — give a number at least 1",
        ),
        (
            {"target": {"placement_group_strategy": "STRICT_PACK"}},
            "target.placement_group_strategy: is for replicas of several ranks, yet tensor_parallel_size is "
            "1 — remove one of the two",
        ),
        (
            {"target": {"kv_cache": {"memory_fraction": 1.0}}},
            "target.kv_cache.memory_fraction: is 1.0 — give a number below 1",
        ),
        (
            {"target": {"kv_cache": {"memory_fraction": 0.5, "num_blocks": 9}}},
            "target.kv_cache.num_blocks: contradicts memory_fraction — give one of the two",
        ),
        (
            {"target": {"ray_actor_options": {"resources": {"gpu": "one"}}}},
            "target.ray_actor_options.resources.gpu: is 'one' — give a number",
        ),
    ],
)
def test_a_wrong_value_is_refused(content: dict[str, Any], problem: str) -> None:
    assert _problems(content) == (problem,)


@pytest.mark.parametrize(
    ("content", "start"),
    [
        (
            {"target": {"num_replicas": 2, "autoscaling_config": {}}},
            "target.num_replicas: contradicts autoscaling_config",
        ),
        (
            {"draft": {"model": "d", "kv_cache": {"num_blocks": 4, "memory_gb": 1}}},
            "draft.kv_cache.num_blocks: contradicts memory_gb",
        ),
        (
            {"target": {"max_num_seqs": 600}},
            "target.max_num_batched_tokens: is 512, below max_num_seqs = 600",
        ),
        (
            {"gateway": {"autoscaling_config": {"min_replicas": 3}}},
            "gateway.autoscaling_config.min_replicas: is 3, above max_replicas = 1",
        ),
        (
            {"target": {"autoscaling_config": {"initial_replicas": 2}}},
            "target.autoscaling_config.initial_replicas: is 2",
        ),
        (
            {"target": {"device": "cpu", "ray_actor_options": {"num_gpus": 1}}},
            "target.ray_actor_options.num_gpus: is 1, yet device is cpu",
        ),
        (
            {"target": {"device": "cuda", "ray_actor_options": {"num_gpus": 0}}},
            "target.ray_actor_options.num_gpus: is 0, yet device is cuda",
        ),
        (
            {"target": {"device": "cuda", "quantization": "int8"}},
            "target.quantization: int8 is not available on cuda",
        ),
        (
            {"draft": {"model": "d", "device": "cuda", "quantization": "int8"}},
            "draft.quantization: int8 is not available on cuda",
        ),
        (
            {"draft": {"model": "d", "tensor_parallel_size": 2, "enforce_eager": False}},
            "draft.enforce_eager: is false, yet tensor_parallel_size is 2",
        ),
        ({"speculation": {"ngram": {"min_n": 5}}}, "speculation.ngram.min_n: is 5, above max_n = 4"),
        (
            {"speculation": {"num_speculative_tokens": 4, "max_num_speculative_tokens": 4}},
            "speculation.max_num_speculative_tokens: is not used",
        ),
        ({"gateway": {"http_port": 9000}}, "gateway.http_port: is 9000, as grpc_port is"),
        (
            {"ray": {"address": "head:6379", "num_cpus": 2}},
            "ray.num_cpus: describes a cluster that is started here",
        ),
    ],
)
def test_an_impossible_combination_is_refused(content: dict[str, Any], start: str) -> None:
    (problem,) = _problems(content)
    assert problem.startswith(start)
    assert " — " in problem  # the remedy


# ---------------------------------------------------------------- many wrong things


def test_all_problems_are_told_at_once() -> None:
    problems = _problems(
        {
            "dtype": "half",
            "target": {"block_size": 0},
            "draft": {"modle": "d"},
            "gateway": {"max_queued_requests": -2},
        }
    )
    assert [problem.split(":")[0] for problem in problems] == [
        "dtype",
        "draft.model",
        "draft.modle",
        "target.block_size",
        "gateway.max_queued_requests",
    ]


def test_the_error_names_the_file_and_travels(tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text("draft: d\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value) == f"{file}:\n  model: is missing — add it"
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.problems) == (str(caught.value), caught.value.problems)


# ---------------------------------------------------------------- files that are no configuration


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: a\nmodel: b\n", "line 2, column 1: key 'model' is given twice"),
        (
            "model: a\ntarget:\n  block_size: 1\n  block_size: 2\n",
            "line 4, column 3: key 'block_size' is given",
        ),
        ("model: [a\n", "line 2, column 1: "),
        ("", "start with `model: NAME`"),
        ("- model\n", "start with `model: NAME`"),
        ("model: m\n3: x\n", "3: is not a text — quote the key"),
        ("model: m\n? [a, b]\n: x\n", "found unhashable key"),
        ("model: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    ],
)
def test_a_broken_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert message in str(caught.value)


def _binary(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00model")


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda file: None, "No such file"), (Path.mkdir, "directory"), (_binary, "UTF-8")],
)
def test_an_unreadable_file_is_refused(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    make(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "x.yaml")


# ---------------------------------------------------------------- agreement with the rest


@pytest.mark.parametrize(
    ("engine", "sections"),
    [
        (TargetEngineConfig, (TargetConfig, SpeculationConfig)),
        (DraftEngineConfig, (DraftConfig,)),
        (EngineNgramConfig, (NgramConfig,)),
    ],
)
def test_every_engine_option_can_be_configured(engine: Any, sections: tuple[Any, ...]) -> None:
    offered = {name for section in sections for name in section.model_fields}
    assert {field.name for field in dataclasses.fields(engine)} <= offered


def test_the_reference_is_not_stale(repository: Path) -> None:
    assert (repository / "docs" / "configuration.md").read_text() == reference(), "run `make docs`"


def test_every_option_is_described() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 60
    assert all(row.split("|")[-2].strip() for row in rows)


def test_the_sample_file_uses_known_yaml_only(repository: Path) -> None:
    text = (repository / "deploy" / "paceline.yaml").read_text()
    assert set(yaml.safe_load(text)) <= set(PacelineConfig.model_fields)
