# From protos/psfleet/v1/serving.proto, SHA-256 f4880a2e97694a5012fbc6224f6340c8c72ac90bfb297cb297f530e1d98faba2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InputValues(_message.Message):
    __slots__ = ("name", "ids", "texts", "numbers", "lengths", "weights", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    ids: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    numbers: _containers.RepeatedScalarFieldContainer[float]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[float]
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ..., texts: _Optional[_Iterable[str]] = ..., numbers: _Optional[_Iterable[float]] = ..., lengths: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[float]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class PredictRequest(_message.Message):
    __slots__ = ("model", "version", "inputs")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: int
    inputs: _containers.RepeatedCompositeFieldContainer[InputValues]
    def __init__(self, model: _Optional[str] = ..., version: _Optional[int] = ..., inputs: _Optional[_Iterable[_Union[InputValues, _Mapping]]] = ...) -> None: ...

class OutputValues(_message.Message):
    __slots__ = ("name", "values", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    values: _containers.RepeatedScalarFieldContainer[float]
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., values: _Optional[_Iterable[float]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Freshness(_message.Message):
    __slots__ = ("version", "cut", "age")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    version: int
    cut: int
    age: float
    def __init__(self, version: _Optional[int] = ..., cut: _Optional[int] = ..., age: _Optional[float] = ...) -> None: ...

class PredictReply(_message.Message):
    __slots__ = ("outputs", "freshness")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FRESHNESS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[OutputValues]
    freshness: Freshness
    def __init__(self, outputs: _Optional[_Iterable[_Union[OutputValues, _Mapping]]] = ..., freshness: _Optional[_Union[Freshness, _Mapping]] = ...) -> None: ...

class LookUpRequest(_message.Message):
    __slots__ = ("model", "version", "table", "ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: int
    table: str
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., version: _Optional[int] = ..., table: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LookUpReply(_message.Message):
    __slots__ = ("rows", "dim", "freshness")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    FRESHNESS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    dim: int
    freshness: Freshness
    def __init__(self, rows: _Optional[bytes] = ..., dim: _Optional[int] = ..., freshness: _Optional[_Union[Freshness, _Mapping]] = ...) -> None: ...

class ModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VersionStatus(_message.Message):
    __slots__ = ("freshness", "loaded", "percentage", "bytes")
    FRESHNESS_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    PERCENTAGE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    freshness: Freshness
    loaded: bool
    percentage: float
    bytes: int
    def __init__(self, freshness: _Optional[_Union[Freshness, _Mapping]] = ..., loaded: bool = ..., percentage: _Optional[float] = ..., bytes: _Optional[int] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("name", "versions")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    versions: _containers.RepeatedCompositeFieldContainer[VersionStatus]
    def __init__(self, name: _Optional[str] = ..., versions: _Optional[_Iterable[_Union[VersionStatus, _Mapping]]] = ...) -> None: ...

class ModelsReply(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ...) -> None: ...

class RouteRequest(_message.Message):
    __slots__ = ("model", "version", "percentage")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PERCENTAGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: int
    percentage: float
    def __init__(self, model: _Optional[str] = ..., version: _Optional[int] = ..., percentage: _Optional[float] = ...) -> None: ...
