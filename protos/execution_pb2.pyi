from paceline.protos import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExecutionRequest(_message.Message):
    __slots__ = ("hello", "submits", "cancels")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    hello: GatewayHello
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    cancels: _containers.RepeatedCompositeFieldContainer[Cancel]
    def __init__(self, hello: _Optional[_Union[GatewayHello, _Mapping]] = ..., submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., cancels: _Optional[_Iterable[_Union[Cancel, _Mapping]]] = ...) -> None: ...

class GatewayHello(_message.Message):
    __slots__ = ("protocol_version", "gateway_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    gateway_id: str
    def __init__(self, protocol_version: _Optional[int] = ..., gateway_id: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("sequence_id", "epoch", "token_ids", "prompt_length", "sampling", "stopping", "eos_token_ids", "speculation", "logprobs", "constraint", "priority", "ttl_milliseconds")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTL_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    epoch: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    sampling: _generation_pb2.SamplingParams
    stopping: _generation_pb2.StoppingParams
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    speculation: _generation_pb2.SpeculationParams
    logprobs: int
    constraint: _generation_pb2.Constraint
    priority: int
    ttl_milliseconds: int
    def __init__(self, sequence_id: _Optional[str] = ..., epoch: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_generation_pb2.StoppingParams, _Mapping]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., speculation: _Optional[_Union[_generation_pb2.SpeculationParams, _Mapping]] = ..., logprobs: _Optional[int] = ..., constraint: _Optional[_Union[_generation_pb2.Constraint, _Mapping]] = ..., priority: _Optional[int] = ..., ttl_milliseconds: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("sequence_id", "epoch")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    epoch: int
    def __init__(self, sequence_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ExecutionResponse(_message.Message):
    __slots__ = ("welcome", "committed", "finished", "load")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    welcome: TargetWelcome
    committed: _containers.RepeatedCompositeFieldContainer[Committed]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    load: Load
    def __init__(self, welcome: _Optional[_Union[TargetWelcome, _Mapping]] = ..., committed: _Optional[_Iterable[_Union[Committed, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class TargetWelcome(_message.Message):
    __slots__ = ("protocol_version", "target_id", "model", "vocab_size", "max_model_len", "kv_capacity_tokens")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    target_id: str
    model: str
    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int
    def __init__(self, protocol_version: _Optional[int] = ..., target_id: _Optional[str] = ..., model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., kv_capacity_tokens: _Optional[int] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("sequence_id", "epoch", "base_position", "token_ids", "accepted", "logprobs")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    epoch: int
    base_position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[bool]
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.PositionLogprobs]
    def __init__(self, sequence_id: _Optional[str] = ..., epoch: _Optional[int] = ..., base_position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[bool]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.PositionLogprobs, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("sequence_id", "epoch", "reason", "error", "speculation", "cached_prompt_tokens", "invalid_argument", "resource_exhausted", "deadline_exceeded")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INVALID_ARGUMENT_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_EXCEEDED_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    epoch: int
    reason: _generation_pb2.FinishReason
    error: str
    speculation: _generation_pb2.SpeculationStats
    cached_prompt_tokens: int
    invalid_argument: bool
    resource_exhausted: bool
    deadline_exceeded: bool
    def __init__(self, sequence_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., error: _Optional[str] = ..., speculation: _Optional[_Union[_generation_pb2.SpeculationStats, _Mapping]] = ..., cached_prompt_tokens: _Optional[int] = ..., invalid_argument: _Optional[bool] = ..., resource_exhausted: _Optional[bool] = ..., deadline_exceeded: _Optional[bool] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_pending_tokens", "free_blocks", "total_blocks", "draining")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_pending_tokens: int
    free_blocks: int
    total_blocks: int
    draining: bool
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_pending_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...
