"""The service's configuration: one YAML file, checked whole before anything starts.

Option names follow vLLM and Ray Serve where they mean the same thing. Everything is refused that would
otherwise be ignored: unknown and repeated keys, values of another type, combinations that contradict each
other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from paceline.actors.engine.config import MAX_BRANCHES, MAX_SPECULATIVE_TOKENS
from paceline.cluster.config_autoscaling import (
    AutoscalingConfig,
    DraftAutoscalingConfig,
    GatewayAutoscalingConfig,
    TargetAutoscalingConfig,
)
from paceline.cluster.config_errors import ConfigError, ConflictError, describe_errors
from paceline.cluster.config_section import (
    Amount,
    Count,
    Name,
    OptionalCount,
    Port,
    Seconds,
    Section,
)
from paceline.cluster.deploy_config import DeployConfig
from paceline.cluster.security_config import SecurityConfig

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]


class RayActorOptions(Section):
    """What one replica asks of its node (Ray's options of the same names); with `tensor_parallel_size`, what
    each of its ranks asks."""

    num_cpus: Amount = 0.0
    """Logical CPUs reserved. 0 reserves none, so that any number of replicas fits on a laptop."""
    num_gpus: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    """GPUs reserved; null = 1 where `device` is cuda, else 0."""
    memory: OptionalCount = None
    """Bytes of memory reserved."""
    resources: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    """Custom resources, such as `{draft_gpu: 1}`."""
    accelerator_type: str | None = None
    """Kind of accelerator, such as `L4`."""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that the node must have."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray runtime environment: `env_vars`, `working_dir`, …"""


class KvCacheConfig(Section):
    """Size of the paged KV cache of one replica."""

    memory_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Memory for KV blocks in GB (10⁹ bytes), next to the model's weights; with `tensor_parallel_size`, that
    of each rank, which stores its own heads only."""
    memory_fraction: Annotated[float | None, Field(gt=0, lt=1)] = None
    """Share of the memory that is free once the weights are loaded (of the GPU, or of the node) instead;
    leave room for the largest step, and for what else shares the device."""
    num_blocks: OptionalCount = None
    """Number of blocks instead; null = as many as fit into that memory."""

    @model_validator(mode="after")
    def _one_size(self) -> KvCacheConfig:
        given = [
            name
            for name, there in (
                ("memory_gb", "memory_gb" in self.model_fields_set),
                ("memory_fraction", self.memory_fraction is not None),
                ("num_blocks", self.num_blocks is not None),
            )
            if there
        ]
        if len(given) > 1:
            raise ConflictError(given[-1], f"contradicts {given[0]} — give one of the two")
        return self


class ReplicaPool(Section):
    """What every pool of replicas has."""

    num_replicas: Count = 1
    """A fixed number of replicas."""
    autoscaling_config: AutoscalingConfig | None = None
    """A number of replicas that follows the load, instead of `num_replicas`."""
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] = 0
    """How many more replicas a redeploy may start before it stops old ones, in percent of their number,
    rounded up; 0 = it stops first, one after the other, and needs no room for more."""
    ray_actor_options: RayActorOptions = Field(default_factory=RayActorOptions)
    """Where replicas may run."""

    @model_validator(mode="after")
    def _one_count(self) -> ReplicaPool:
        if self.autoscaling_config is not None and "num_replicas" in self.model_fields_set:
            raise ConflictError("num_replicas", "contradicts autoscaling_config — give one of the two")
        return self


class ModelPool(ReplicaPool):
    """What the pools have that run a model."""

    device: Device = "auto"
    """Where the model computes; auto = cuda where there is one, else cpu."""
    num_threads: OptionalCount = None
    """CPU threads of one replica, with `tensor_parallel_size` of each rank; null = all cores of its node,
    divided among the ranks."""
    max_num_seqs: Count = 64
    """Most sequences in one step."""
    max_num_batched_tokens: Count = 512
    """Most tokens in one step, prompt chunks included."""
    max_model_len: Annotated[int | None, Field(ge=2)] = None
    """Longest prompt + completion in tokens; null = the model's own limit."""
    block_size: Count = 16
    """Tokens per KV block."""
    kv_cache: KvCacheConfig = Field(default_factory=KvCacheConfig)
    """Size of the KV cache."""
    enable_prefix_caching: bool = True
    """Whether sequences share the KV of the blocks with which they begin alike, such as a system prompt or
    the earlier turns of a chat, also after the first one has ended, until the blocks are needed."""
    tensor_parallel_size: Count = 1
    """Ranks (processes, each with a device or some cores of its own) that share one replica's model, by the
    tensor-parallel plan that `transformers` has for it. It must divide the model's attention heads and KV
    heads."""
    placement_group_strategy: Literal["PACK", "STRICT_PACK"] = "PACK"
    """Where the ranks of a replica may be: PACK = on as few nodes as possible, STRICT_PACK = on one node."""
    shard_timeout_s: Seconds = 12.0
    """A rank that keeps the others waiting for so long, or does not answer for so long, is lost, and the
    whole replica is replaced."""
    graceful_shutdown_timeout_s: Seconds = 30.0
    """How long a replica that is stopped may take to finish what it has."""

    @model_validator(mode="after")
    def _ranks_are_placed(self) -> ModelPool:
        for name in ("placement_group_strategy", "shard_timeout_s"):
            if self.tensor_parallel_size == 1 and name in self.model_fields_set:
                raise ConflictError(
                    name,
                    "is for replicas of several ranks, yet tensor_parallel_size is 1 — remove one of the two",
                )
        return self

    @model_validator(mode="after")
    def _step_fits(self) -> ModelPool:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConflictError(
                "max_num_batched_tokens",
                f"is {self.max_num_batched_tokens}, below max_num_seqs = {self.max_num_seqs}, yet every "
                "sequence needs one token a step — raise it, or lower max_num_seqs",
            )
        return self

    @model_validator(mode="after")
    def _device_is_reserved(self) -> ModelPool:
        num_gpus = self.ray_actor_options.num_gpus
        if self.device == "cpu" and num_gpus:
            raise ConflictError(
                "ray_actor_options.num_gpus", f"is {num_gpus:g}, yet device is cpu — remove one of the two"
            )
        if self.device == "cuda" and num_gpus == 0:
            raise ConflictError(
                "ray_actor_options.num_gpus",
                "is 0, yet device is cuda, and Ray hides GPUs that are not reserved — remove it, or set a "
                "number",
            )
        return self


def _check_quantization(quantization: str, device: Device) -> None:
    if quantization == "int8" and device == "cuda":
        raise ConflictError(
            "quantization", "int8 is not available on cuda — set it to none, or device to cpu"
        )


class TargetConfig(ModelPool):
    """The pool that serves the model."""

    autoscaling_config: TargetAutoscalingConfig | None = None
    """A number of replicas that follows the load, instead of `num_replicas`."""
    max_num_waiting: Count = 256
    """Most sequences that may queue at one replica; one more is refused as RESOURCE_EXHAUSTED."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Of which law log probabilities are reported: raw = the model's own, processed = the one that tokens are
    drawn from, after penalties, bias, masks, temperature and truncation."""
    quantization: Literal["none", "int8"] = "none"
    """none, or int8: the large linear layers compute in 8-bit integers, on CPU only. What is served is then
    the quantised model, whose outputs differ from the model's own."""

    @model_validator(mode="after")
    def _device_quantizes(self) -> TargetConfig:
        _check_quantization(self.quantization, self.device)
        return self

    @property
    def may_sleep(self) -> bool:
        """All targets may be gone, so that a request has to wake one."""
        return self.autoscaling_config is not None and self.autoscaling_config.min_replicas == 0


class DraftConfig(ModelPool):
    """The pool that proposes tokens. A string in its place is its `model`."""

    model: Name
    """The draft model, named like the served one. Its token map must be the served model's."""
    autoscaling_config: DraftAutoscalingConfig | None = None
    """A number of replicas that follows the load, instead of `num_replicas`."""
    dtype: Dtype | None = None
    """Number format of weights and KV; null = the served model's."""
    quantization: Literal["auto", "none", "int8"] = "auto"
    """int8: the large linear layers compute in 8-bit integers, on CPU only; auto = int8 where the device is a
    CPU that has instructions for it (AVX-512 VNNI), else none. Never changes what is served."""
    enforce_eager: bool = True
    """false: steps of few tokens are compiled by torch. This takes the draft a minute or two at its start,
    needs a C++ compiler on CPUs, and makes its steps some 10 to 20 % faster. Never changes what is served."""
    max_branches: Annotated[int, Field(ge=0, le=MAX_BRANCHES)] = 32
    """Most likely corrections of a sequence for which a draft prepares a tail while the target verifies; 0 =
    none. Done with hardware of its own and verification: coupled, as far as its steps hardly get longer."""

    @model_validator(mode="after")
    def _device_quantizes(self) -> DraftConfig:
        _check_quantization(self.quantization, self.device)
        return self

    @model_validator(mode="after")
    def _compiled_alone(self) -> DraftConfig:
        if not self.enforce_eager and self.tensor_parallel_size > 1:
            raise ConflictError(
                "enforce_eager",
                f"is false, yet tensor_parallel_size is {self.tensor_parallel_size}: compiled steps are not "
                "divided among ranks — set it to true",
            )
        return self


class NgramConfig(Section):
    """Prompt lookup on the target, for sequences without a draft: what followed the last occurrence of the
    sequence's last tokens is proposed again."""

    enabled: bool = True
    """Whether the target looks."""
    min_n: Count = 2
    """Shortest match in tokens."""
    max_n: Count = 4
    """Longest match tried; longer ones are tried first."""
    num_tokens: Annotated[int, Field(ge=1, le=MAX_SPECULATIVE_TOKENS)] = 8
    """Most tokens proposed by one lookup."""

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> NgramConfig:
        if self.min_n > self.max_n:
            raise ConflictError(
                "min_n", f"is {self.min_n}, above max_n = {self.max_n} — lower it, or raise max_n"
            )
        return self


class SpeculationConfig(Section):
    """How far drafts go ahead and how their tokens are accepted."""

    verification: Literal["coupled", "standard", "block"] = "coupled"
    """The acceptance rule of requests that name none; all three keep the served model's law. coupled = shared
    noise: a seeded request gives the same tokens whatever the drafts do, and only token ids are sent;
    standard = token by token, by the ratio of the two models' probabilities; block = the same for all draft
    tokens of a step together, which accepts at least as many. Under the last two, drafts send what they drew
    from (up to 400 bytes a token), and the same seed may give other tokens."""
    num_speculative_tokens: Annotated[int | None, Field(ge=0, le=MAX_SPECULATIVE_TOKENS)] = None
    """Draft tokens verified per sequence and step, which waits for all of them as long as the draft is in
    time; 0 = none; null = chosen from measured acceptance and step cost."""
    max_num_speculative_tokens: Annotated[int, Field(ge=1, le=MAX_SPECULATIVE_TOKENS)] = 8
    """Most draft tokens per sequence and step where `num_speculative_tokens` is null."""
    hardware: Literal["auto", "shared", "separate"] = "auto"
    """Whether target and drafts contend for the same processors (then they take turns) or not (then drafts
    run ahead during the verification); auto = they do where a machine has too few cores for the threads of
    both, else found out from the target's step times."""
    wait_for_drafts: bool = True
    """Whether a step may wait a moment for candidates, where that pays or their number is fixed; false = it
    never does."""
    ngram: NgramConfig = Field(default_factory=NgramConfig)
    """Prompt lookup."""

    @model_validator(mode="after")
    def _one_length(self) -> SpeculationConfig:
        if self.num_speculative_tokens is not None and "max_num_speculative_tokens" in self.model_fields_set:
            raise ConflictError(
                "max_num_speculative_tokens",
                "is not used where num_speculative_tokens is fixed — give one of the two",
            )
        return self


class GatewayConfig(ReplicaPool):
    """The pool that takes requests and streams answers."""

    autoscaling_config: GatewayAutoscalingConfig | None = None
    """A number of replicas that follows the load, instead of `num_replicas`."""
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] = 100
    """How many more replicas a redeploy may start before it stops old ones, in percent of their number.
    Gateways are light; with 0 a service with a single one is away while that is replaced."""
    grpc_port: Port = 9000
    """Port of the gRPC endpoint, on every node."""
    http_host: str = "127.0.0.1"
    """Address that the endpoints listen on: Ray Serve's HTTP endpoint, which only answers health checks, and
    in HAProxy mode the gRPC endpoint too (Serve's default proxy listens on all addresses)."""
    http_port: Port = 8000
    """Port of that endpoint."""
    max_ongoing_requests: Count = 512
    """Requests that one gateway works on at a time; one of several choices counts as that many."""
    max_queued_requests: Annotated[int, Field(ge=-1)] = 512
    """Requests that may queue for a gateway, counted in the same way; one more is refused as
    RESOURCE_EXHAUSTED; -1 = no limit."""
    request_timeout_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = 3600.0
    """Longest life of a request, queues and stream included, unless it brings a shorter one; it ends with
    DEADLINE_EXCEEDED. This is also when a request is ended whose cancellation was lost; null = no limit."""
    resume_timeout_s: Seconds = 9.0
    """How long a request whose target was lost, or gave it back, may be without one in all until it makes
    progress, before it ends with UNAVAILABLE. A single target that is to be waited for needs as long as its
    weights take to load."""
    cold_start_timeout_s: Seconds = 300.0
    """How long a request that has not begun may wait for a target, where the target pool can go to sleep."""
    graceful_shutdown_timeout_s: Seconds = 30.0
    """How long a gateway that is stopped may take to finish its requests."""

    @model_validator(mode="after")
    def _ports_differ(self) -> GatewayConfig:
        if self.grpc_port == self.http_port:
            raise ConflictError("http_port", f"is {self.http_port}, as grpc_port is — choose another one")
        return self


class RayConfig(Section):
    """The Ray cluster to run on."""

    address: str | None = None
    """Address of a running cluster to join; auto = the one on this machine; local = start one, and stop it in
    the end; null = `RAY_ADDRESS` where it is set, else one that `ray start` started on this machine, else
    local."""
    namespace: Annotated[str, Field(min_length=1)] = "paceline"
    """Ray namespace of what is started."""
    num_cpus: OptionalCount = None
    """Logical CPUs of a cluster that is started here; null = all cores."""
    include_dashboard: bool = False
    """Whether a cluster that is started here has a dashboard."""

    @model_validator(mode="after")
    def _started_here(self) -> RayConfig:
        if self.address not in (None, "local"):
            for name in ("num_cpus", "include_dashboard"):
                if name in self.model_fields_set:
                    raise ConflictError(
                        name,
                        "describes a cluster that is started here, yet address names a running one — "
                        "remove one of the two",
                    )
        return self


class PacelineConfig(Section):
    """The whole file. `model` alone is enough."""

    model: Name
    """The served model: a name of `paceline models list`, a local folder, a GGUF file, a hub id or an
    `emulated://` address."""
    served_model_name: Annotated[str | None, Field(min_length=1)] = None
    """What requests call it; null = the last part of `model`."""
    dtype: Dtype = "auto"
    """Number format of the served model's weights and KV; auto = bfloat16."""
    trust_remote_code: bool = False
    """Whether code that comes with a model may run."""
    deterministic: bool | None = None
    """Whether logits are computed the same to the bit whatever else is in the step (batch-invariant
    numerics): a seeded request then gives the same tokens alone, among others, drafted, resumed and in
    bfloat16. false = the last bits may differ, and with them a token where two are nearly as likely. null =
    true on CPUs, where it costs a few percent of a step, and false on GPUs, where long prompts take longer
    with it."""
    draft: DraftConfig | None = None
    """The draft pool; null = none."""
    target: TargetConfig = Field(default_factory=TargetConfig)
    """The target pool."""
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    """Speculation."""
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    """The gateways."""
    security: SecurityConfig = Field(default_factory=SecurityConfig)
    """Who may call, how much, and what is encrypted."""
    ray: RayConfig = Field(default_factory=RayConfig)
    """The cluster."""
    deploy: DeployConfig | None = None
    """The machines, for `paceline deploy`."""

    @field_validator("draft", mode="before")
    @classmethod
    def _expand_draft(cls, value: object) -> object:
        return {"model": value} if isinstance(value, str) else value

    @property
    def model_name(self) -> str:
        """The name that requests use."""
        if self.served_model_name is not None:
            return self.served_model_name
        address = self.model.split("?", 1)[0].rstrip("/")
        return address.rsplit("/", 1)[-1].removesuffix(".gguf")

    @property
    def draft_dtype(self) -> Dtype:
        """The draft's number format where there is a draft pool: its own, else the served model's."""
        if self.draft is not None and self.draft.dtype is not None:
            return self.draft.dtype
        return self.dtype


def load_config(source: Path | str | Mapping[str, Any]) -> PacelineConfig:
    """Read and check a configuration.

    Args:
        source: path of a YAML file, or what such a file contains.

    Raises:
        ConfigError: with every problem found, each as `path.to.key: what is wrong — remedy`.
    """
    if isinstance(source, Mapping):
        content: object = dict(source)
        origin = "configuration"
    else:
        content = _read_yaml(Path(source))
        origin = str(source)
    if not isinstance(content, dict):
        raise ConfigError(origin, ["the file is not a mapping — start with `model: NAME`"])
    try:
        return PacelineConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(origin, describe_errors(error, PacelineConfig)) from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader that refuses a key given twice, of which YAML itself would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = (key_node.tag, str(key_node.value))
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> object:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(str(path), [f"cannot be read: {reason} — check the path"]) from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), ["is not a text file in UTF-8 — save it as one"]) from None
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise ConfigError(str(path), [f"{where}{error.problem} — mend the YAML there"]) from None
    except yaml.YAMLError as error:
        raise ConfigError(str(path), [f"is not YAML: {error} — mend it"]) from None
