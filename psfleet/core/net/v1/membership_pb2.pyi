# From protos/psfleet/v1/membership.proto, SHA-256 1afa561f9092467de8012aaffbdf8cdb7742a2172e6f165e09b09da7cd4cd12c
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HeartbeatRequest(_message.Message):
    __slots__ = ("index", "server", "incarnation", "boot", "step", "metrics", "nonfinite", "nonfinite_at", "snapshot")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_AT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    index: int
    server: bool
    incarnation: int
    boot: int
    step: int
    metrics: bytes
    nonfinite: str
    nonfinite_at: float
    snapshot: int
    def __init__(self, index: _Optional[int] = ..., server: bool = ..., incarnation: _Optional[int] = ..., boot: _Optional[int] = ..., step: _Optional[int] = ..., metrics: _Optional[bytes] = ..., nonfinite: _Optional[str] = ..., nonfinite_at: _Optional[float] = ..., snapshot: _Optional[int] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("view", "snapshot", "wants_metrics", "complete")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    WANTS_METRICS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    view: int
    snapshot: SnapshotRequest
    wants_metrics: bool
    complete: CompleteSnapshot
    def __init__(self, view: _Optional[int] = ..., snapshot: _Optional[_Union[SnapshotRequest, _Mapping]] = ..., wants_metrics: bool = ..., complete: _Optional[_Union[CompleteSnapshot, _Mapping]] = ...) -> None: ...

class CompleteSnapshot(_message.Message):
    __slots__ = ("number", "folder")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    number: int
    folder: str
    def __init__(self, number: _Optional[int] = ..., folder: _Optional[str] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("number", "view")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    number: int
    view: int
    def __init__(self, number: _Optional[int] = ..., view: _Optional[int] = ...) -> None: ...

class AssignDataRequest(_message.Message):
    __slots__ = ("worker", "incarnation", "dataset", "size", "batch", "epochs", "seed", "round", "lease", "used", "group", "parts")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnation: int
    dataset: int
    size: int
    batch: int
    epochs: int
    seed: int
    round: int
    lease: int
    used: int
    group: int
    parts: int
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., dataset: _Optional[int] = ..., size: _Optional[int] = ..., batch: _Optional[int] = ..., epochs: _Optional[int] = ..., seed: _Optional[int] = ..., round: _Optional[int] = ..., lease: _Optional[int] = ..., used: _Optional[int] = ..., group: _Optional[int] = ..., parts: _Optional[int] = ...) -> None: ...

class AssignDataReply(_message.Message):
    __slots__ = ("view", "plan", "lease", "ended", "parts")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    view: int
    plan: _containers.RepeatedCompositeFieldContainer[PlanEntry]
    lease: _containers.RepeatedScalarFieldContainer[int]
    ended: bool
    parts: int
    def __init__(self, view: _Optional[int] = ..., plan: _Optional[_Iterable[_Union[PlanEntry, _Mapping]]] = ..., lease: _Optional[_Iterable[int]] = ..., ended: bool = ..., parts: _Optional[int] = ...) -> None: ...

class PlanEntry(_message.Message):
    __slots__ = ("first", "seats", "stream")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    first: int
    seats: _containers.RepeatedScalarFieldContainer[int]
    stream: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first: _Optional[int] = ..., seats: _Optional[_Iterable[int]] = ..., stream: _Optional[_Iterable[int]] = ...) -> None: ...
