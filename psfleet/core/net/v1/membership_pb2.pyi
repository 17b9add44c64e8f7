# From protos/psfleet/v1/membership.proto, SHA-256 4505540c7bae45d5da0c4b3798ff96c40255979f6904e94e240c7c3c4430b1fe
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

class FreezeRequest(_message.Message):
    __slots__ = ("boot", "view", "ended", "coordinator")
    class EndedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    BOOT_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    boot: int
    view: int
    ended: _containers.ScalarMap[int, int]
    coordinator: str
    def __init__(self, boot: _Optional[int] = ..., view: _Optional[int] = ..., ended: _Optional[_Mapping[int, int]] = ..., coordinator: _Optional[str] = ...) -> None: ...

class FreezeReply(_message.Message):
    __slots__ = ("boot", "standing")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    boot: int
    standing: Standing
    def __init__(self, boot: _Optional[int] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("mode", "closed", "seats")
    MODE_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    mode: str
    closed: int
    seats: _containers.RepeatedCompositeFieldContainer[SeatStanding]
    def __init__(self, mode: _Optional[str] = ..., closed: _Optional[int] = ..., seats: _Optional[_Iterable[_Union[SeatStanding, _Mapping]]] = ...) -> None: ...

class SeatStanding(_message.Message):
    __slots__ = ("worker", "incarnation", "committed", "rests", "left", "sequence", "leases", "samples", "progress", "addressed")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    RESTS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSED_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnation: int
    committed: int
    rests: int
    left: bool
    sequence: int
    leases: int
    samples: int
    progress: str
    addressed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., committed: _Optional[int] = ..., rests: _Optional[int] = ..., left: bool = ..., sequence: _Optional[int] = ..., leases: _Optional[int] = ..., samples: _Optional[int] = ..., progress: _Optional[str] = ..., addressed: _Optional[_Iterable[int]] = ...) -> None: ...

class InstallRequest(_message.Message):
    __slots__ = ("boot", "view", "seats", "closed")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    boot: int
    view: int
    seats: _containers.RepeatedCompositeFieldContainer[SeatView]
    closed: int
    def __init__(self, boot: _Optional[int] = ..., view: _Optional[int] = ..., seats: _Optional[_Iterable[_Union[SeatView, _Mapping]]] = ..., closed: _Optional[int] = ...) -> None: ...

class SeatView(_message.Message):
    __slots__ = ("worker", "incarnations", "rests", "left")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    RESTS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnations: _containers.RepeatedCompositeFieldContainer[IncarnationView]
    rests: int
    left: bool
    def __init__(self, worker: _Optional[int] = ..., incarnations: _Optional[_Iterable[_Union[IncarnationView, _Mapping]]] = ..., rests: _Optional[int] = ..., left: bool = ...) -> None: ...

class IncarnationView(_message.Message):
    __slots__ = ("incarnation", "first", "last")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    first: int
    last: int
    def __init__(self, incarnation: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class InstallReply(_message.Message):
    __slots__ = ("boot", "installed")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    INSTALLED_FIELD_NUMBER: _ClassVar[int]
    boot: int
    installed: bool
    def __init__(self, boot: _Optional[int] = ..., installed: bool = ...) -> None: ...

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
