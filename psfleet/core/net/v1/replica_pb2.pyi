# From protos/psfleet/v1/replica.proto, SHA-256 febeeee8c72e8eaf6f8c813416b6ed67c7ea92925c74e732236c216aa2bc8a98
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class FollowRequest(_message.Message):
    __slots__ = ("server", "attach", "taken", "term", "version", "metrics", "servers")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    server: int
    attach: int
    taken: int
    term: int
    version: int
    metrics: bytes
    servers: int
    def __init__(self, server: _Optional[int] = ..., attach: _Optional[int] = ..., taken: _Optional[int] = ..., term: _Optional[int] = ..., version: _Optional[int] = ..., metrics: _Optional[bytes] = ..., servers: _Optional[int] = ...) -> None: ...

class FollowReply(_message.Message):
    __slots__ = ("number", "kind", "body", "more", "required", "over", "complete", "padding", "wants_metrics")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    WANTS_METRICS_FIELD_NUMBER: _ClassVar[int]
    number: int
    kind: int
    body: bytes
    more: bool
    required: bool
    over: bool
    complete: int
    padding: bytes
    wants_metrics: bool
    def __init__(self, number: _Optional[int] = ..., kind: _Optional[int] = ..., body: _Optional[bytes] = ..., more: bool = ..., required: bool = ..., over: bool = ..., complete: _Optional[int] = ..., padding: _Optional[bytes] = ..., wants_metrics: bool = ...) -> None: ...
