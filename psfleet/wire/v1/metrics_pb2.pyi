# From protos/psfleet/v1/metrics.proto, SHA-256 a8d9cc524ff4ed64063093a1edf0875cc8d5395a52d75c111c2786eccea211e5
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
