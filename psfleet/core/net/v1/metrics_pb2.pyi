# From protos/psfleet/v1/metrics.proto, SHA-256 a3862ee73fd379b28afe352ade12052bf90a5c7d5918e3f7d27bdb89cef028fc
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CollectRequest(_message.Message):
    __slots__ = ("at_end",)
    AT_END_FIELD_NUMBER: _ClassVar[int]
    at_end: bool
    def __init__(self, at_end: bool = ...) -> None: ...

class CollectReply(_message.Message):
    __slots__ = ("processes",)
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedCompositeFieldContainer[ProcessMetrics]
    def __init__(self, processes: _Optional[_Iterable[_Union[ProcessMetrics, _Mapping]]] = ...) -> None: ...

class ProcessMetrics(_message.Message):
    __slots__ = ("role", "rank", "text", "at")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    role: str
    rank: int
    text: bytes
    at: float
    def __init__(self, role: _Optional[str] = ..., rank: _Optional[int] = ..., text: _Optional[bytes] = ..., at: _Optional[float] = ...) -> None: ...
