# From protos/psfleet/v1/state.proto, SHA-256 a2cc682ccf78a77381af8de97764a385145bd80381b747f83cea8da2ee546c6b
from psfleet.core.net.v1 import frame_pb2 as _frame_pb2
from psfleet.core.net.v1 import membership_pb2 as _membership_pb2
from psfleet.core.net.v1 import shard_pb2 as _shard_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerState(_message.Message):
    __slots__ = ("version", "shard", "coordinator", "arrays")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    version: int
    shard: ShardState
    coordinator: CoordinatorState
    arrays: _containers.RepeatedCompositeFieldContainer[Array]
    def __init__(self, version: _Optional[int] = ..., shard: _Optional[_Union[ShardState, _Mapping]] = ..., coordinator: _Optional[_Union[CoordinatorState, _Mapping]] = ..., arrays: _Optional[_Iterable[_Union[Array, _Mapping]]] = ...) -> None: ...

class Array(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("leases", "samples")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    leases: int
    samples: int
    def __init__(self, leases: _Optional[int] = ..., samples: _Optional[int] = ...) -> None: ...

class Addressed(_message.Message):
    __slots__ = ("pushes",)
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    pushes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pushes: _Optional[_Iterable[int]] = ...) -> None: ...

class ShardState(_message.Message):
    __slots__ = ("mode", "staleness", "switches", "cut", "view", "incarnations", "newest", "sequences", "writes", "positions", "progress", "base", "seats", "closed", "first", "committed", "counted", "rests", "resting", "left", "held", "clocks", "leading_steps", "makers", "addressed", "mode_settings")
    class IncarnationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class NewestEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class SequencesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class WritesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class PositionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: Position
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...
    class ProgressEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    class FirstEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class CommittedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class CountedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class RestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class ClocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class MakersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class AddressedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: Addressed
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[Addressed, _Mapping]] = ...) -> None: ...
    MODE_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    RESTS_FIELD_NUMBER: _ClassVar[int]
    RESTING_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEADING_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAKERS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSED_FIELD_NUMBER: _ClassVar[int]
    MODE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    mode: _shard_pb2.Mode
    staleness: int
    switches: int
    cut: int
    view: int
    incarnations: _containers.ScalarMap[int, int]
    newest: _containers.ScalarMap[int, int]
    sequences: _containers.ScalarMap[int, int]
    writes: _containers.ScalarMap[int, int]
    positions: _containers.MessageMap[int, Position]
    progress: _containers.ScalarMap[int, str]
    base: int
    seats: _containers.RepeatedScalarFieldContainer[int]
    closed: int
    first: _containers.ScalarMap[int, int]
    committed: _containers.ScalarMap[int, int]
    counted: _containers.ScalarMap[int, int]
    rests: _containers.ScalarMap[int, int]
    resting: _containers.RepeatedScalarFieldContainer[int]
    left: _containers.RepeatedScalarFieldContainer[int]
    held: _containers.RepeatedCompositeFieldContainer[_frame_pb2.Header]
    clocks: _containers.ScalarMap[int, int]
    leading_steps: int
    makers: _containers.ScalarMap[int, int]
    addressed: _containers.MessageMap[int, Addressed]
    mode_settings: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, mode: _Optional[_Union[_shard_pb2.Mode, str]] = ..., staleness: _Optional[int] = ..., switches: _Optional[int] = ..., cut: _Optional[int] = ..., view: _Optional[int] = ..., incarnations: _Optional[_Mapping[int, int]] = ..., newest: _Optional[_Mapping[int, int]] = ..., sequences: _Optional[_Mapping[int, int]] = ..., writes: _Optional[_Mapping[int, int]] = ..., positions: _Optional[_Mapping[int, Position]] = ..., progress: _Optional[_Mapping[int, str]] = ..., base: _Optional[int] = ..., seats: _Optional[_Iterable[int]] = ..., closed: _Optional[int] = ..., first: _Optional[_Mapping[int, int]] = ..., committed: _Optional[_Mapping[int, int]] = ..., counted: _Optional[_Mapping[int, int]] = ..., rests: _Optional[_Mapping[int, int]] = ..., resting: _Optional[_Iterable[int]] = ..., left: _Optional[_Iterable[int]] = ..., held: _Optional[_Iterable[_Union[_frame_pb2.Header, _Mapping]]] = ..., clocks: _Optional[_Mapping[int, int]] = ..., leading_steps: _Optional[int] = ..., makers: _Optional[_Mapping[int, int]] = ..., addressed: _Optional[_Mapping[int, Addressed]] = ..., mode_settings: _Optional[_Iterable[int]] = ...) -> None: ...

class CoordinatorState(_message.Message):
    __slots__ = ("term", "members", "collectives", "dispatch")
    TERM_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    term: int
    members: Members
    collectives: Collectives
    dispatch: DataDispatch
    def __init__(self, term: _Optional[int] = ..., members: _Optional[_Union[Members, _Mapping]] = ..., collectives: _Optional[_Union[Collectives, _Mapping]] = ..., dispatch: _Optional[_Union[DataDispatch, _Mapping]] = ...) -> None: ...

class Members(_message.Message):
    __slots__ = ("seats", "incarnations", "view", "closed", "sync")
    SEATS_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    seats: _containers.RepeatedCompositeFieldContainer[Seat]
    incarnations: int
    view: int
    closed: int
    sync: bool
    def __init__(self, seats: _Optional[_Iterable[_Union[Seat, _Mapping]]] = ..., incarnations: _Optional[int] = ..., view: _Optional[int] = ..., closed: _Optional[int] = ..., sync: bool = ...) -> None: ...

class Seat(_message.Message):
    __slots__ = ("worker", "boot", "earlier", "incarnations", "left", "rests", "progress")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    EARLIER_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    RESTS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    worker: int
    boot: int
    earlier: _containers.RepeatedScalarFieldContainer[int]
    incarnations: _containers.RepeatedCompositeFieldContainer[_membership_pb2.IncarnationView]
    left: bool
    rests: int
    progress: str
    def __init__(self, worker: _Optional[int] = ..., boot: _Optional[int] = ..., earlier: _Optional[_Iterable[int]] = ..., incarnations: _Optional[_Iterable[_Union[_membership_pb2.IncarnationView, _Mapping]]] = ..., left: bool = ..., rests: _Optional[int] = ..., progress: _Optional[str] = ...) -> None: ...

class Collectives(_message.Message):
    __slots__ = ("completed", "results", "told", "switch")
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    SWITCH_FIELD_NUMBER: _ClassVar[int]
    completed: int
    results: _containers.RepeatedCompositeFieldContainer[Result]
    told: _containers.RepeatedCompositeFieldContainer[Told]
    switch: Switch
    def __init__(self, completed: _Optional[int] = ..., results: _Optional[_Iterable[_Union[Result, _Mapping]]] = ..., told: _Optional[_Iterable[_Union[Told, _Mapping]]] = ..., switch: _Optional[_Union[Switch, _Mapping]] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("number", "value")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    number: int
    value: Tensor
    def __init__(self, number: _Optional[int] = ..., value: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class Told(_message.Message):
    __slots__ = ("number", "mode_request")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MODE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    number: int
    mode_request: ModeRequest
    def __init__(self, number: _Optional[int] = ..., mode_request: _Optional[_Union[ModeRequest, _Mapping]] = ...) -> None: ...

class ModeRequest(_message.Message):
    __slots__ = ("number", "mode", "settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    number: int
    mode: str
    settings: _containers.ScalarMap[str, int]
    def __init__(self, number: _Optional[int] = ..., mode: _Optional[str] = ..., settings: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Switch(_message.Message):
    __slots__ = ("number", "mode", "staleness", "rounds", "positions", "mode_settings")
    class RoundsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class PositionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: Position
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    MODE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    number: int
    mode: _shard_pb2.Mode
    staleness: int
    rounds: _containers.ScalarMap[int, int]
    positions: _containers.MessageMap[int, Position]
    mode_settings: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., mode: _Optional[_Union[_shard_pb2.Mode, str]] = ..., staleness: _Optional[int] = ..., rounds: _Optional[_Mapping[int, int]] = ..., positions: _Optional[_Mapping[int, Position]] = ..., mode_settings: _Optional[_Iterable[int]] = ...) -> None: ...

class DataDispatch(_message.Message):
    __slots__ = ("datasets", "leases", "torn")
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    TORN_FIELD_NUMBER: _ClassVar[int]
    datasets: _containers.RepeatedCompositeFieldContainer[Dataset]
    leases: _containers.RepeatedCompositeFieldContainer[Leases]
    torn: _containers.RepeatedCompositeFieldContainer[_shard_pb2.TornStep]
    def __init__(self, datasets: _Optional[_Iterable[_Union[Dataset, _Mapping]]] = ..., leases: _Optional[_Iterable[_Union[Leases, _Mapping]]] = ..., torn: _Optional[_Iterable[_Union[_shard_pb2.TornStep, _Mapping]]] = ...) -> None: ...

class Dataset(_message.Message):
    __slots__ = ("request", "plan", "pool", "ended", "resumed")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    request: DatasetRequest
    plan: Plan
    pool: _containers.RepeatedScalarFieldContainer[int]
    ended: bool
    resumed: bool
    def __init__(self, request: _Optional[_Union[DatasetRequest, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., pool: _Optional[_Iterable[int]] = ..., ended: bool = ..., resumed: bool = ...) -> None: ...

class DatasetRequest(_message.Message):
    __slots__ = ("number", "size", "batch", "epochs", "seed", "round", "lease", "used", "known", "group", "parts")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    number: int
    size: int
    batch: int
    epochs: int
    seed: int
    round: int
    lease: int
    used: int
    known: int
    group: int
    parts: int
    def __init__(self, number: _Optional[int] = ..., size: _Optional[int] = ..., batch: _Optional[int] = ..., epochs: _Optional[int] = ..., seed: _Optional[int] = ..., round: _Optional[int] = ..., lease: _Optional[int] = ..., used: _Optional[int] = ..., known: _Optional[int] = ..., group: _Optional[int] = ..., parts: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("size", "batch", "entries", "withdrawn")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    size: int
    batch: int
    entries: _containers.RepeatedCompositeFieldContainer[_membership_pb2.PlanEntry]
    withdrawn: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, size: _Optional[int] = ..., batch: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[_membership_pb2.PlanEntry, _Mapping]]] = ..., withdrawn: _Optional[_Iterable[int]] = ...) -> None: ...

class Leases(_message.Message):
    __slots__ = ("incarnation", "forgotten", "kept", "confirmed")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    forgotten: int
    kept: _containers.RepeatedCompositeFieldContainer[Lease]
    confirmed: int
    def __init__(self, incarnation: _Optional[int] = ..., forgotten: _Optional[int] = ..., kept: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., confirmed: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("dataset", "ranges")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    dataset: int
    ranges: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dataset: _Optional[int] = ..., ranges: _Optional[_Iterable[int]] = ...) -> None: ...
