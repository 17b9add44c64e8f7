"""State of Python objects as JSON and arrays, and back: what a snapshot keeps beside its tables.

Only these are taken: None, bool, int, float, str, list, tuple, set, dict, float32 and int64 arrays
(any dtype that NumPy can name without Python objects), and instances of the dataclasses that are
named when it is read. Nothing is ever called by a name that stands in a file.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import CheckpointError

__all__ = ["from_plain", "to_plain"]

_KINDS = "biuf"  # of dtypes: bool, int, unsigned, float


def to_plain(value: Any, arrays: list[NDArray[Any]]) -> Any:
    """The value as JSON can say it; its arrays go to `arrays`, in whose place stand numbers.

    Raises:
        TypeError: There is something in it that a snapshot cannot keep.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple() | set() | frozenset():
            kind = type(value).__name__
            items = sorted(value) if isinstance(value, set | frozenset) else value
            return {kind: [to_plain(item, arrays) for item in items]}
        case dict():
            return {"dict": [[to_plain(k, arrays), to_plain(v, arrays)] for k, v in value.items()]}
        case np.ndarray() if value.dtype.kind in _KINDS:
            arrays.append(np.ascontiguousarray(value))
            return {"array": len(arrays) - 1}
        case np.bool_() | np.integer() | np.floating():
            return value.item()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: to_plain(getattr(value, f.name), arrays) for f in dataclasses.fields(value)
        }
        return {"is": type(value).__name__, "fields": fields}
    raise TypeError(f"a snapshot cannot keep {value!r} of {type(value)}")


def from_plain(plain: Any, arrays: list[NDArray[Any]], classes: Iterable[type]) -> Any:
    """The value again; of dataclasses only those among `classes`.

    Raises:
        CheckpointError: It is not what `to_plain` makes of them.
    """
    named = {cls.__name__: cls for cls in classes}
    try:
        return _value(plain, arrays, named)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(f"the state in the snapshot is damaged: {error!r}") from None


def _value(plain: Any, arrays: list[NDArray[Any]], classes: Mapping[str, type]) -> Any:
    if not isinstance(plain, dict):
        if plain is None or isinstance(plain, bool | int | float | str):
            return plain
        raise TypeError(f"{plain!r} is no plain value")
    if "is" in plain:
        cls = classes[plain["is"]]
        return cls(**{name: _value(v, arrays, classes) for name, v in plain["fields"].items()})
    [(kind, content)] = plain.items()
    if kind == "array":
        return arrays[content]
    if kind == "dict":
        return {_value(k, arrays, classes): _value(v, arrays, classes) for k, v in content}
    make = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
    return make(_value(item, arrays, classes) for item in content)
