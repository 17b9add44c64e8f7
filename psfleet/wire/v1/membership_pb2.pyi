# From protos/psfleet/v1/membership.proto, SHA-256 f3f583c18e5a8a9b5572c5c788f3b6027120151df12487587f05e227c3d44399
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BeatRequest(_message.Message):
    __slots__ = ("index", "server", "incarnation", "boot", "step")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    index: int
    server: bool
    incarnation: int
    boot: int
    step: int
    def __init__(self, index: _Optional[int] = ..., server: bool = ..., incarnation: _Optional[int] = ..., boot: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class BeatReply(_message.Message):
    __slots__ = ("view", "snapshot", "drain")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    view: int
    snapshot: SnapshotRequest
    drain: DrainRequest
    def __init__(self, view: _Optional[int] = ..., snapshot: _Optional[_Union[SnapshotRequest, _Mapping]] = ..., drain: _Optional[_Union[DrainRequest, _Mapping]] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("number", "view")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    number: int
    view: int
    def __init__(self, number: _Optional[int] = ..., view: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("mode",)
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: str
    def __init__(self, mode: _Optional[str] = ...) -> None: ...
