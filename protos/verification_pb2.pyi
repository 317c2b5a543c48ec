from paceline.protos import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftMessage(_message.Message):
    __slots__ = ("hello", "candidates", "declines", "goodbye", "step_microseconds", "step_tokens", "num_awake")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    DECLINES_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    STEP_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_AWAKE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    candidates: _containers.RepeatedCompositeFieldContainer[Candidates]
    declines: _containers.RepeatedCompositeFieldContainer[Decline]
    goodbye: Goodbye
    step_microseconds: int
    step_tokens: int
    num_awake: int
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., candidates: _Optional[_Iterable[_Union[Candidates, _Mapping]]] = ..., declines: _Optional[_Iterable[_Union[Decline, _Mapping]]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., step_microseconds: _Optional[int] = ..., step_tokens: _Optional[int] = ..., num_awake: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "draft_id", "model", "vocabulary_hash", "vocab_size", "capacity", "max_model_len", "method", "host", "num_threads")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    draft_id: str
    model: str
    vocabulary_hash: bytes
    vocab_size: int
    capacity: int
    max_model_len: int
    method: str
    host: str
    num_threads: int
    def __init__(self, protocol_version: _Optional[int] = ..., draft_id: _Optional[str] = ..., model: _Optional[str] = ..., vocabulary_hash: _Optional[bytes] = ..., vocab_size: _Optional[int] = ..., capacity: _Optional[int] = ..., max_model_len: _Optional[int] = ..., method: _Optional[str] = ..., host: _Optional[str] = ..., num_threads: _Optional[int] = ...) -> None: ...

class Candidates(_message.Message):
    __slots__ = ("sequence_id", "epoch", "base_position", "token_ids", "revision", "laws", "prepared")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    LAWS_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    epoch: int
    base_position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    revision: int
    laws: _containers.RepeatedCompositeFieldContainer[DraftLaw]
    prepared: bool
    def __init__(self, sequence_id: _Optional[str] = ..., epoch: _Optional[int] = ..., base_position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., revision: _Optional[int] = ..., laws: _Optional[_Iterable[_Union[DraftLaw, _Mapping]]] = ..., prepared: _Optional[bool] = ...) -> None: ...

class DraftLaw(_message.Message):
    __slots__ = ("token_ids", "weights")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[int]] = ...) -> None: ...

class Decline(_message.Message):
    __slots__ = ("sequence_id", "epoch", "reason")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    epoch: int
    reason: str
    def __init__(self, sequence_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class TargetMessage(_message.Message):
    __slots__ = ("welcome", "opens", "verdicts", "closes")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    opens: _containers.RepeatedCompositeFieldContainer[Open]
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    closes: _containers.RepeatedCompositeFieldContainer[Close]
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., opens: _Optional[_Iterable[_Union[Open, _Mapping]]] = ..., verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ..., closes: _Optional[_Iterable[_Union[Close, _Mapping]]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "target_id", "model", "vocab_size")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    target_id: str
    model: str
    vocab_size: int
    def __init__(self, protocol_version: _Optional[int] = ..., target_id: _Optional[str] = ..., model: _Optional[str] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("sequence_id", "epoch", "token_ids", "sampling", "window", "prompt_length", "stopping", "constraint", "rule", "draft_seed")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SEED_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    epoch: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _generation_pb2.SamplingParams
    window: int
    prompt_length: int
    stopping: _generation_pb2.StoppingParams
    constraint: _generation_pb2.Constraint
    rule: _generation_pb2.VerificationRule
    draft_seed: int
    def __init__(self, sequence_id: _Optional[str] = ..., epoch: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., window: _Optional[int] = ..., prompt_length: _Optional[int] = ..., stopping: _Optional[_Union[_generation_pb2.StoppingParams, _Mapping]] = ..., constraint: _Optional[_Union[_generation_pb2.Constraint, _Mapping]] = ..., rule: _Optional[_Union[_generation_pb2.VerificationRule, str]] = ..., draft_seed: _Optional[int] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("sequence_id", "epoch", "base_position", "num_accepted", "committed_token_ids", "window", "branch_tokens", "tail_tokens")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    BRANCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TAIL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    epoch: int
    base_position: int
    num_accepted: int
    committed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    window: int
    branch_tokens: int
    tail_tokens: int
    def __init__(self, sequence_id: _Optional[str] = ..., epoch: _Optional[int] = ..., base_position: _Optional[int] = ..., num_accepted: _Optional[int] = ..., committed_token_ids: _Optional[_Iterable[int]] = ..., window: _Optional[int] = ..., branch_tokens: _Optional[int] = ..., tail_tokens: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("sequence_id", "epoch")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    epoch: int
    def __init__(self, sequence_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...
