# From protos/psfleet/v1/shard.proto, SHA-256 06d88b2de659212d337dc33b2455095239d26d24a7ffe057a5e0332ef7e3e404
from psfleet.core.net.v1 import frame_pb2 as _frame_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_SYNC: _ClassVar[Mode]
    MODE_ASYNC: _ClassVar[Mode]
    MODE_SSP: _ClassVar[Mode]
    MODE_GEO: _ClassVar[Mode]
    MODE_HALF_ASYNC: _ClassVar[Mode]
MODE_UNSPECIFIED: Mode
MODE_SYNC: Mode
MODE_ASYNC: Mode
MODE_SSP: Mode
MODE_GEO: Mode
MODE_HALF_ASYNC: Mode

class JoinRequest(_message.Message):
    __slots__ = ("worker", "incarnation", "mode", "staleness", "switch", "last", "mode_settings")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    SWITCH_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    MODE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnation: int
    mode: Mode
    staleness: int
    switch: int
    last: int
    mode_settings: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., mode: _Optional[_Union[Mode, str]] = ..., staleness: _Optional[int] = ..., switch: _Optional[int] = ..., last: _Optional[int] = ..., mode_settings: _Optional[_Iterable[int]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("worker", "incarnation", "generation", "boot", "pid", "descriptor", "bytes", "token")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnation: int
    generation: int
    boot: str
    pid: int
    descriptor: int
    bytes: int
    token: bytes
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., generation: _Optional[int] = ..., boot: _Optional[str] = ..., pid: _Optional[int] = ..., descriptor: _Optional[int] = ..., bytes: _Optional[int] = ..., token: _Optional[bytes] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("attached",)
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    attached: bool
    def __init__(self, attached: bool = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("server", "servers", "sequence", "clock", "switches", "mode", "staleness", "mode_settings")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    MODE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    server: int
    servers: int
    sequence: int
    clock: int
    switches: int
    mode: Mode
    staleness: int
    mode_settings: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, server: _Optional[int] = ..., servers: _Optional[int] = ..., sequence: _Optional[int] = ..., clock: _Optional[int] = ..., switches: _Optional[int] = ..., mode: _Optional[_Union[Mode, str]] = ..., staleness: _Optional[int] = ..., mode_settings: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("worker", "incarnation", "last", "rest")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnation: int
    last: int
    rest: int
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., last: _Optional[int] = ..., rest: _Optional[int] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ("remaining",)
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    remaining: int
    def __init__(self, remaining: _Optional[int] = ...) -> None: ...

class TableSpec(_message.Message):
    __slots__ = ("name", "kind", "shape", "rule", "hyperparameters", "l1", "l2", "initializer", "low", "high", "seed", "every_row", "entry", "entry_values", "device", "servers", "first", "precision")
    class HyperparametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class EntryValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    L1_FIELD_NUMBER: _ClassVar[int]
    L2_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    EVERY_ROW_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    ENTRY_VALUES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    rule: str
    hyperparameters: _containers.ScalarMap[str, float]
    l1: float
    l2: float
    initializer: str
    low: float
    high: float
    seed: int
    every_row: bool
    entry: str
    entry_values: _containers.ScalarMap[str, float]
    device: str
    servers: int
    first: int
    precision: str
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., rule: _Optional[str] = ..., hyperparameters: _Optional[_Mapping[str, float]] = ..., l1: _Optional[float] = ..., l2: _Optional[float] = ..., initializer: _Optional[str] = ..., low: _Optional[float] = ..., high: _Optional[float] = ..., seed: _Optional[int] = ..., every_row: bool = ..., entry: _Optional[str] = ..., entry_values: _Optional[_Mapping[str, float]] = ..., device: _Optional[str] = ..., servers: _Optional[int] = ..., first: _Optional[int] = ..., precision: _Optional[str] = ...) -> None: ...

class CreateTableRequest(_message.Message):
    __slots__ = ("spec", "value", "worker", "incarnation")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    spec: TableSpec
    value: bytes
    worker: int
    incarnation: int
    def __init__(self, spec: _Optional[_Union[TableSpec, _Mapping]] = ..., value: _Optional[bytes] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class CreateTableReply(_message.Message):
    __slots__ = ("table", "created", "spec")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    table: int
    created: bool
    spec: TableSpec
    def __init__(self, table: _Optional[int] = ..., created: bool = ..., spec: _Optional[_Union[TableSpec, _Mapping]] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("table", "offset", "limit")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    table: int
    offset: int
    limit: int
    def __init__(self, table: _Optional[int] = ..., offset: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class LoadReply(_message.Message):
    __slots__ = ("loaded",)
    LOADED_FIELD_NUMBER: _ClassVar[int]
    loaded: int
    def __init__(self, loaded: _Optional[int] = ...) -> None: ...

class ShrinkRequest(_message.Message):
    __slots__ = ("table", "threshold", "unseen", "worker", "incarnation", "number")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    UNSEEN_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    table: int
    threshold: float
    unseen: int
    worker: int
    incarnation: int
    number: int
    def __init__(self, table: _Optional[int] = ..., threshold: _Optional[float] = ..., unseen: _Optional[int] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class ShrinkReply(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: int
    def __init__(self, removed: _Optional[int] = ...) -> None: ...

class EvictionsRequest(_message.Message):
    __slots__ = ("table", "position", "limit")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    table: int
    position: int
    limit: int
    def __init__(self, table: _Optional[int] = ..., position: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class EvictionsReply(_message.Message):
    __slots__ = ("ids", "steps", "causes", "next", "missed")
    IDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    steps: bytes
    causes: bytes
    next: int
    missed: int
    def __init__(self, ids: _Optional[bytes] = ..., steps: _Optional[bytes] = ..., causes: _Optional[bytes] = ..., next: _Optional[int] = ..., missed: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("server", "tables", "pushes", "repeats", "bytes_in", "bytes_out", "samples", "losses", "round", "cpu_seconds", "resident_bytes", "workers", "pid", "staleness", "leading_steps", "mode", "torn", "samples_left", "servers", "progress", "memory_used")
    class SamplesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class LossesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    class StalenessEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    SERVER_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    LEADING_STEPS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    TORN_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_LEFT_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_FIELD_NUMBER: _ClassVar[int]
    server: int
    tables: _containers.RepeatedCompositeFieldContainer[TableStatus]
    pushes: int
    repeats: int
    bytes_in: int
    bytes_out: int
    samples: _containers.ScalarMap[int, int]
    losses: _containers.ScalarMap[int, float]
    round: int
    cpu_seconds: float
    resident_bytes: int
    workers: int
    pid: int
    staleness: _containers.ScalarMap[int, int]
    leading_steps: int
    mode: Mode
    torn: _containers.RepeatedCompositeFieldContainer[TornStep]
    samples_left: int
    servers: int
    progress: int
    memory_used: float
    def __init__(self, server: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[TableStatus, _Mapping]]] = ..., pushes: _Optional[int] = ..., repeats: _Optional[int] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ..., samples: _Optional[_Mapping[int, int]] = ..., losses: _Optional[_Mapping[int, float]] = ..., round: _Optional[int] = ..., cpu_seconds: _Optional[float] = ..., resident_bytes: _Optional[int] = ..., workers: _Optional[int] = ..., pid: _Optional[int] = ..., staleness: _Optional[_Mapping[int, int]] = ..., leading_steps: _Optional[int] = ..., mode: _Optional[_Union[Mode, str]] = ..., torn: _Optional[_Iterable[_Union[TornStep, _Mapping]]] = ..., samples_left: _Optional[int] = ..., servers: _Optional[int] = ..., progress: _Optional[int] = ..., memory_used: _Optional[float] = ...) -> None: ...

class TornStep(_message.Message):
    __slots__ = ("worker", "incarnation", "sequences")
    class SequencesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnation: int
    sequences: _containers.ScalarMap[int, int]
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., sequences: _Optional[_Mapping[int, int]] = ...) -> None: ...

class TableStatus(_message.Message):
    __slots__ = ("name", "kind", "count", "bytes", "step", "device_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    count: int
    bytes: int
    step: int
    device_bytes: int
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., count: _Optional[int] = ..., bytes: _Optional[int] = ..., step: _Optional[int] = ..., device_bytes: _Optional[int] = ...) -> None: ...
