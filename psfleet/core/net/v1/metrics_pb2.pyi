# From protos/psfleet/v1/metrics.proto, SHA-256 4c8d7ca8c5e9a61673dbe3bb5a031bd6a38b217b371e78a8225158d23abe4303
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CollectRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CollectReply(_message.Message):
    __slots__ = ("processes",)
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedCompositeFieldContainer[ProcessMetrics]
    def __init__(self, processes: _Optional[_Iterable[_Union[ProcessMetrics, _Mapping]]] = ...) -> None: ...

class ProcessMetrics(_message.Message):
    __slots__ = ("role", "rank", "text")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    role: str
    rank: int
    text: bytes
    def __init__(self, role: _Optional[str] = ..., rank: _Optional[int] = ..., text: _Optional[bytes] = ...) -> None: ...
