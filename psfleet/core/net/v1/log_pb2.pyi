# From protos/psfleet/v1/log.proto, SHA-256 5dadfb6d25af7e94d5bcccfbb1883ed07c7ecb0434469d8518a4a8a474ba7a97
from psfleet.core.net.v1 import shard_pb2 as _shard_pb2
from psfleet.core.net.v1 import state_pb2 as _state_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogHeader(_message.Message):
    __slots__ = ("job", "server", "servers", "workers", "block", "after")
    JOB_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    job: str
    server: int
    servers: int
    workers: int
    block: int
    after: LogAfter
    def __init__(self, job: _Optional[str] = ..., server: _Optional[int] = ..., servers: _Optional[int] = ..., workers: _Optional[int] = ..., block: _Optional[int] = ..., after: _Optional[_Union[LogAfter, _Mapping]] = ...) -> None: ...

class LogAfter(_message.Message):
    __slots__ = ("snapshot", "chain", "end")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    snapshot: int
    chain: int
    end: int
    def __init__(self, snapshot: _Optional[int] = ..., chain: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class CreateRecord(_message.Message):
    __slots__ = ("spec", "maker", "value")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    MAKER_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    spec: _shard_pb2.TableSpec
    maker: int
    value: _state_pb2.Array
    def __init__(self, spec: _Optional[_Union[_shard_pb2.TableSpec, _Mapping]] = ..., maker: _Optional[int] = ..., value: _Optional[_Union[_state_pb2.Array, _Mapping]] = ...) -> None: ...

class CloseRecord(_message.Message):
    __slots__ = ("round", "members", "progress")
    class ProgressEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    round: int
    members: _containers.RepeatedScalarFieldContainer[int]
    progress: _containers.ScalarMap[int, str]
    def __init__(self, round: _Optional[int] = ..., members: _Optional[_Iterable[int]] = ..., progress: _Optional[_Mapping[int, str]] = ...) -> None: ...

class FillRecord(_message.Message):
    __slots__ = ("table", "clock", "columns")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    table: int
    clock: TableClock
    columns: _containers.RepeatedCompositeFieldContainer[_state_pb2.Array]
    def __init__(self, table: _Optional[int] = ..., clock: _Optional[_Union[TableClock, _Mapping]] = ..., columns: _Optional[_Iterable[_Union[_state_pb2.Array, _Mapping]]] = ...) -> None: ...

class TableClock(_message.Message):
    __slots__ = ("step", "shrinks", "ticks")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SHRINKS_FIELD_NUMBER: _ClassVar[int]
    TICKS_FIELD_NUMBER: _ClassVar[int]
    step: int
    shrinks: _containers.RepeatedScalarFieldContainer[int]
    ticks: _containers.RepeatedCompositeFieldContainer[TableTick]
    def __init__(self, step: _Optional[int] = ..., shrinks: _Optional[_Iterable[int]] = ..., ticks: _Optional[_Iterable[_Union[TableTick, _Mapping]]] = ...) -> None: ...

class TableTick(_message.Message):
    __slots__ = ("seconds", "step")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    step: int
    def __init__(self, seconds: _Optional[float] = ..., step: _Optional[int] = ...) -> None: ...

class CutRecord(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class TickRecord(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class EvictRecord(_message.Message):
    __slots__ = ("table", "ids")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    table: int
    ids: _state_pb2.Array
    def __init__(self, table: _Optional[int] = ..., ids: _Optional[_Union[_state_pb2.Array, _Mapping]] = ...) -> None: ...

class DecisionRecord(_message.Message):
    __slots__ = ("started", "view_decided", "completed", "left", "begun", "leased", "ended")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    VIEW_DECIDED_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    started: int
    view_decided: View
    completed: CollectiveCompleted
    left: Left
    begun: Begun
    leased: Leased
    ended: int
    def __init__(self, started: _Optional[int] = ..., view_decided: _Optional[_Union[View, _Mapping]] = ..., completed: _Optional[_Union[CollectiveCompleted, _Mapping]] = ..., left: _Optional[_Union[Left, _Mapping]] = ..., begun: _Optional[_Union[Begun, _Mapping]] = ..., leased: _Optional[_Union[Leased, _Mapping]] = ..., ended: _Optional[int] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("members", "dispatch")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    members: _state_pb2.Members
    dispatch: _state_pb2.DataDispatch
    def __init__(self, members: _Optional[_Union[_state_pb2.Members, _Mapping]] = ..., dispatch: _Optional[_Union[_state_pb2.DataDispatch, _Mapping]] = ...) -> None: ...

class CollectiveCompleted(_message.Message):
    __slots__ = ("number", "value", "mode_request", "switch")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    MODE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    SWITCH_FIELD_NUMBER: _ClassVar[int]
    number: int
    value: _state_pb2.Tensor
    mode_request: _state_pb2.ModeRequest
    switch: _state_pb2.Switch
    def __init__(self, number: _Optional[int] = ..., value: _Optional[_Union[_state_pb2.Tensor, _Mapping]] = ..., mode_request: _Optional[_Union[_state_pb2.ModeRequest, _Mapping]] = ..., switch: _Optional[_Union[_state_pb2.Switch, _Mapping]] = ...) -> None: ...

class Left(_message.Message):
    __slots__ = ("worker", "incarnation")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnation: int
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Begun(_message.Message):
    __slots__ = ("request", "plan")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    request: _state_pb2.DatasetRequest
    plan: _state_pb2.Plan
    def __init__(self, request: _Optional[_Union[_state_pb2.DatasetRequest, _Mapping]] = ..., plan: _Optional[_Union[_state_pb2.Plan, _Mapping]] = ...) -> None: ...

class Leased(_message.Message):
    __slots__ = ("incarnation", "dataset", "ranges", "used")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    dataset: int
    ranges: _containers.RepeatedScalarFieldContainer[int]
    used: int
    def __init__(self, incarnation: _Optional[int] = ..., dataset: _Optional[int] = ..., ranges: _Optional[_Iterable[int]] = ..., used: _Optional[int] = ...) -> None: ...
