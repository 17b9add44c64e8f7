# From protos/psfleet/v1/follower.proto, SHA-256 c4bfe1b1ccfd299f03f506f9d81e60352d8c2cf30b6c9b5747b20966e469a243
from psfleet.core.net.v1 import shard_pb2 as _shard_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChangesRequest(_message.Message):
    __slots__ = ("boot", "version", "round", "milliseconds", "part", "parts", "snapshot")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    boot: int
    version: int
    round: int
    milliseconds: int
    part: int
    parts: int
    snapshot: str
    def __init__(self, boot: _Optional[int] = ..., version: _Optional[int] = ..., round: _Optional[int] = ..., milliseconds: _Optional[int] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ..., snapshot: _Optional[str] = ...) -> None: ...

class FollowedPush(_message.Message):
    __slots__ = ("worker", "incarnation", "last")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnation: int
    last: int
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class TableChanges(_message.Message):
    __slots__ = ("table", "spec", "ids", "weights", "removed", "whole")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    table: int
    spec: _shard_pb2.TableSpec
    ids: bytes
    weights: bytes
    removed: bytes
    whole: bool
    def __init__(self, table: _Optional[int] = ..., spec: _Optional[_Union[_shard_pb2.TableSpec, _Mapping]] = ..., ids: _Optional[bytes] = ..., weights: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., whole: bool = ...) -> None: ...

class ChangesReply(_message.Message):
    __slots__ = ("boot", "version", "gap", "tables", "has_rounds", "round", "pushes", "server", "servers", "microseconds", "process_microseconds")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    HAS_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    boot: int
    version: int
    gap: bool
    tables: _containers.RepeatedCompositeFieldContainer[TableChanges]
    has_rounds: bool
    round: int
    pushes: _containers.RepeatedCompositeFieldContainer[FollowedPush]
    server: int
    servers: int
    microseconds: int
    process_microseconds: int
    def __init__(self, boot: _Optional[int] = ..., version: _Optional[int] = ..., gap: bool = ..., tables: _Optional[_Iterable[_Union[TableChanges, _Mapping]]] = ..., has_rounds: bool = ..., round: _Optional[int] = ..., pushes: _Optional[_Iterable[_Union[FollowedPush, _Mapping]]] = ..., server: _Optional[int] = ..., servers: _Optional[int] = ..., microseconds: _Optional[int] = ..., process_microseconds: _Optional[int] = ...) -> None: ...

class RowsRequest(_message.Message):
    __slots__ = ("table", "segment", "part", "parts")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    table: int
    segment: int
    part: int
    parts: int
    def __init__(self, table: _Optional[int] = ..., segment: _Optional[int] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ...) -> None: ...

class RowsReply(_message.Message):
    __slots__ = ("ids", "weights", "next")
    IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    weights: bytes
    next: int
    def __init__(self, ids: _Optional[bytes] = ..., weights: _Optional[bytes] = ..., next: _Optional[int] = ...) -> None: ...
