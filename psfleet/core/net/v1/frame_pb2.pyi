# From protos/psfleet/v1/frame.proto, SHA-256 91e34443293f5b38f3305ed6e67ae586bd38bff914a2ab01d2a3f6ff87d1e59b
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Precision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRECISION_FLOAT32: _ClassVar[Precision]
    PRECISION_BFLOAT16: _ClassVar[Precision]
    PRECISION_FLOAT16: _ClassVar[Precision]
    PRECISION_INT8: _ClassVar[Precision]

class Content(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTENT_UNSPECIFIED: _ClassVar[Content]
    CONTENT_IDS: _ClassVar[Content]
    CONTENT_ID_ROWS: _ClassVar[Content]
    CONTENT_ROWS: _ClassVar[Content]
    CONTENT_WHOLE: _ClassVar[Content]
    CONTENT_VALUES: _ClassVar[Content]
    CONTENT_STATE: _ClassVar[Content]
    CONTENT_ELEMENTS: _ClassVar[Content]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_APPLIED: _ClassVar[Outcome]
    OUTCOME_HELD: _ClassVar[Outcome]
PRECISION_FLOAT32: Precision
PRECISION_BFLOAT16: Precision
PRECISION_FLOAT16: Precision
PRECISION_INT8: Precision
CONTENT_UNSPECIFIED: Content
CONTENT_IDS: Content
CONTENT_ID_ROWS: Content
CONTENT_ROWS: Content
CONTENT_WHOLE: Content
CONTENT_VALUES: Content
CONTENT_STATE: Content
CONTENT_ELEMENTS: Content
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_APPLIED: Outcome
OUTCOME_HELD: Outcome

class Frame(_message.Message):
    __slots__ = ("header", "payload", "padding")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    header: Header
    payload: bytes
    padding: bytes
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., payload: _Optional[bytes] = ..., padding: _Optional[bytes] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("worker", "incarnation", "sequence", "commit", "segments", "samples", "loss", "outcome", "lane", "clock", "cut", "cut_after", "view", "leases", "lease_samples", "progress", "traceparent", "skipped", "addressed", "seatless", "round", "steps", "withdrawn", "servers")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    CUT_AFTER_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    ADDRESSED_FIELD_NUMBER: _ClassVar[int]
    SEATLESS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnation: int
    sequence: int
    commit: int
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    samples: int
    loss: float
    outcome: Outcome
    lane: Lane
    clock: int
    cut: int
    cut_after: int
    view: int
    leases: int
    lease_samples: int
    progress: str
    traceparent: str
    skipped: int
    addressed: _containers.RepeatedScalarFieldContainer[int]
    seatless: bool
    round: int
    steps: _containers.RepeatedScalarFieldContainer[int]
    withdrawn: bool
    servers: int
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., commit: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., samples: _Optional[int] = ..., loss: _Optional[float] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., lane: _Optional[_Union[Lane, _Mapping]] = ..., clock: _Optional[int] = ..., cut: _Optional[int] = ..., cut_after: _Optional[int] = ..., view: _Optional[int] = ..., leases: _Optional[int] = ..., lease_samples: _Optional[int] = ..., progress: _Optional[str] = ..., traceparent: _Optional[str] = ..., skipped: _Optional[int] = ..., addressed: _Optional[_Iterable[int]] = ..., seatless: bool = ..., round: _Optional[int] = ..., steps: _Optional[_Iterable[int]] = ..., withdrawn: bool = ..., servers: _Optional[int] = ...) -> None: ...

class Lane(_message.Message):
    __slots__ = ("generation", "turn")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    generation: int
    turn: int
    def __init__(self, generation: _Optional[int] = ..., turn: _Optional[int] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("table", "content", "count", "learning_rate", "step", "offset", "reply", "precision", "scale", "touched", "start")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    TOUCHED_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    table: int
    content: Content
    count: int
    learning_rate: float
    step: int
    offset: int
    reply: int
    precision: Precision
    scale: float
    touched: bool
    start: int
    def __init__(self, table: _Optional[int] = ..., content: _Optional[_Union[Content, str]] = ..., count: _Optional[int] = ..., learning_rate: _Optional[float] = ..., step: _Optional[int] = ..., offset: _Optional[int] = ..., reply: _Optional[int] = ..., precision: _Optional[_Union[Precision, str]] = ..., scale: _Optional[float] = ..., touched: bool = ..., start: _Optional[int] = ...) -> None: ...
