# From protos/psfleet/v1/scaling.proto, SHA-256 3b10845219b297fde09540fe6f735c08577c295188835d06eb5896b496620e6d
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenMoveRequest(_message.Message):
    __slots__ = ("number", "servers", "ahead")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    number: int
    servers: int
    ahead: bool
    def __init__(self, number: _Optional[int] = ..., servers: _Optional[int] = ..., ahead: bool = ...) -> None: ...

class OpenMoveReply(_message.Message):
    __slots__ = ("boot", "alone")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    boot: int
    alone: bool
    def __init__(self, boot: _Optional[int] = ..., alone: bool = ...) -> None: ...

class SendRowsRequest(_message.Message):
    __slots__ = ("number", "servers", "ahead", "hurry")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    HURRY_FIELD_NUMBER: _ClassVar[int]
    number: int
    servers: _containers.RepeatedScalarFieldContainer[str]
    ahead: bool
    hurry: bool
    def __init__(self, number: _Optional[int] = ..., servers: _Optional[_Iterable[str]] = ..., ahead: bool = ..., hurry: bool = ...) -> None: ...

class SendRowsReply(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    def __init__(self, rows: _Optional[int] = ...) -> None: ...

class FillRowsRequest(_message.Message):
    __slots__ = ("number", "records")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    records: _containers.RepeatedCompositeFieldContainer[MovedRecord]
    def __init__(self, number: _Optional[int] = ..., records: _Optional[_Iterable[_Union[MovedRecord, _Mapping]]] = ...) -> None: ...

class MovedRecord(_message.Message):
    __slots__ = ("kind", "body")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    kind: int
    body: bytes
    def __init__(self, kind: _Optional[int] = ..., body: _Optional[bytes] = ...) -> None: ...

class FillRowsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrepareMoveRequest(_message.Message):
    __slots__ = ("number", "state")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    number: int
    state: bytes
    def __init__(self, number: _Optional[int] = ..., state: _Optional[bytes] = ...) -> None: ...

class PrepareMoveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdoptRowsRequest(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class AdoptRowsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbandonMoveRequest(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class AbandonMoveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
