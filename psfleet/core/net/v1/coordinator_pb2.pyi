# From protos/psfleet/v1/coordinator.proto, SHA-256 5b64dfe7ad2a5f46e9d71ec8794715ff319527a3ff390b0ebff0a3b81343defa
from psfleet.core.net.v1 import membership_pb2 as _membership_pb2
from psfleet.core.net.v1 import shard_pb2 as _shard_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("worker", "boot", "workers", "servers")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    worker: int
    boot: int
    workers: int
    servers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker: _Optional[int] = ..., boot: _Optional[int] = ..., workers: _Optional[int] = ..., servers: _Optional[_Iterable[str]] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("incarnation", "first", "view", "completed", "switches", "mode", "staleness", "last", "progress", "mode_settings", "servers")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    MODE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    first: int
    view: int
    completed: int
    switches: int
    mode: _shard_pb2.Mode
    staleness: int
    last: int
    progress: str
    mode_settings: _containers.RepeatedScalarFieldContainer[int]
    servers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, incarnation: _Optional[int] = ..., first: _Optional[int] = ..., view: _Optional[int] = ..., completed: _Optional[int] = ..., switches: _Optional[int] = ..., mode: _Optional[_Union[_shard_pb2.Mode, str]] = ..., staleness: _Optional[int] = ..., last: _Optional[int] = ..., progress: _Optional[str] = ..., mode_settings: _Optional[_Iterable[int]] = ..., servers: _Optional[_Iterable[str]] = ...) -> None: ...

class BarrierRequest(_message.Message):
    __slots__ = ("worker", "incarnation", "number")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnation: int
    number: int
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class BarrierReply(_message.Message):
    __slots__ = ("mode_request", "servers")
    MODE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    mode_request: RequestedMode
    servers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, mode_request: _Optional[_Union[RequestedMode, _Mapping]] = ..., servers: _Optional[_Iterable[str]] = ...) -> None: ...

class RequestedMode(_message.Message):
    __slots__ = ("mode", "settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MODE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    mode: str
    settings: _containers.ScalarMap[str, int]
    def __init__(self, mode: _Optional[str] = ..., settings: _Optional[_Mapping[str, int]] = ...) -> None: ...

class AllReduceRequest(_message.Message):
    __slots__ = ("worker", "incarnation", "number", "mode", "dtype", "shape", "value", "round", "leases", "samples", "change")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnation: int
    number: int
    mode: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    value: bytes
    round: int
    leases: int
    samples: int
    change: int
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., number: _Optional[int] = ..., mode: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., value: _Optional[bytes] = ..., round: _Optional[int] = ..., leases: _Optional[int] = ..., samples: _Optional[int] = ..., change: _Optional[int] = ...) -> None: ...

class AllReduceReply(_message.Message):
    __slots__ = ("value", "servers")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    servers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, value: _Optional[bytes] = ..., servers: _Optional[_Iterable[str]] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("servers",)
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    servers: int
    def __init__(self, servers: _Optional[int] = ...) -> None: ...

class ScaleReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
