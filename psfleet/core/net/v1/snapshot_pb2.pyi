# From protos/psfleet/v1/snapshot.proto, SHA-256 a8022c89caa811c456713bcf79f3387bd28a247872171e3b3f56a56c965a4437
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class BeginCutRequest(_message.Message):
    __slots__ = ("number", "folder", "hold", "at_round", "round", "members", "since", "remember", "servers")
    class MembersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    AT_ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    REMEMBER_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    number: int
    folder: str
    hold: bool
    at_round: bool
    round: int
    members: _containers.ScalarMap[int, int]
    since: int
    remember: bool
    servers: int
    def __init__(self, number: _Optional[int] = ..., folder: _Optional[str] = ..., hold: bool = ..., at_round: bool = ..., round: _Optional[int] = ..., members: _Optional[_Mapping[int, int]] = ..., since: _Optional[int] = ..., remember: bool = ..., servers: _Optional[int] = ...) -> None: ...

class BeginCutReply(_message.Message):
    __slots__ = ("mode", "closed", "incarnations", "delta_bases")
    class IncarnationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    MODE_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    DELTA_BASES_FIELD_NUMBER: _ClassVar[int]
    mode: int
    closed: int
    incarnations: _containers.ScalarMap[int, int]
    delta_bases: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, mode: _Optional[int] = ..., closed: _Optional[int] = ..., incarnations: _Optional[_Mapping[int, int]] = ..., delta_bases: _Optional[_Iterable[int]] = ...) -> None: ...

class MarkRequest(_message.Message):
    __slots__ = ("number", "worker", "incarnation", "last", "addressed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ADDRESSED_FIELD_NUMBER: _ClassVar[int]
    number: int
    worker: int
    incarnation: int
    last: int
    addressed: int
    def __init__(self, number: _Optional[int] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., last: _Optional[int] = ..., addressed: _Optional[int] = ...) -> None: ...

class MarkReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("number", "cut")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    number: int
    cut: bool
    def __init__(self, number: _Optional[int] = ..., cut: bool = ...) -> None: ...

class FinishReply(_message.Message):
    __slots__ = ("part",)
    PART_FIELD_NUMBER: _ClassVar[int]
    part: bytes
    def __init__(self, part: _Optional[bytes] = ...) -> None: ...

class SettleRequest(_message.Message):
    __slots__ = ("number", "complete", "base")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    number: int
    complete: bool
    base: int
    def __init__(self, number: _Optional[int] = ..., complete: bool = ..., base: _Optional[int] = ...) -> None: ...

class SettleReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListenRequest(_message.Message):
    __slots__ = ("worker", "number")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    worker: int
    number: int
    def __init__(self, worker: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class ListenReply(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class ReadyRequest(_message.Message):
    __slots__ = ("number", "worker", "incarnation")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    number: int
    worker: int
    incarnation: int
    def __init__(self, number: _Optional[int] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class ReadyReply(_message.Message):
    __slots__ = ("mark", "round", "script_waits")
    MARK_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_WAITS_FIELD_NUMBER: _ClassVar[int]
    mark: bool
    round: int
    script_waits: bool
    def __init__(self, mark: bool = ..., round: _Optional[int] = ..., script_waits: bool = ...) -> None: ...

class KeepRequest(_message.Message):
    __slots__ = ("worker", "incarnation", "number", "state", "last")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnation: int
    number: int
    state: bytes
    last: int
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., number: _Optional[int] = ..., state: _Optional[bytes] = ..., last: _Optional[int] = ...) -> None: ...

class KeepReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KeptRequest(_message.Message):
    __slots__ = ("worker", "servers", "incarnation", "keeps")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    worker: int
    servers: _containers.RepeatedScalarFieldContainer[str]
    incarnation: int
    keeps: bool
    def __init__(self, worker: _Optional[int] = ..., servers: _Optional[_Iterable[str]] = ..., incarnation: _Optional[int] = ..., keeps: bool = ...) -> None: ...

class KeptReply(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: bytes
    def __init__(self, state: _Optional[bytes] = ...) -> None: ...

class TakeRequest(_message.Message):
    __slots__ = ("path", "kind", "base", "script_waits")
    PATH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_WAITS_FIELD_NUMBER: _ClassVar[int]
    path: str
    kind: str
    base: bool
    script_waits: bool
    def __init__(self, path: _Optional[str] = ..., kind: _Optional[str] = ..., base: bool = ..., script_waits: bool = ...) -> None: ...

class TakeReply(_message.Message):
    __slots__ = ("number", "path")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    number: int
    path: str
    def __init__(self, number: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...
