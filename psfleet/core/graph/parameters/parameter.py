"""Parameter: a named trainable array, or a map from ids to rows, as programs and optimizers use it.

A parameter holds its value itself until an optimizer binds it. After that, a Binding (`binding.py`) reads the
value from the runtime's tables. Use parameters only in the thread that trains.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psfleet.core.base.errors import IdError, ShapeError
from psfleet.core.base.logs import log_of
from psfleet.core.base.validation.annotations import Must, NonNegative, checked
from psfleet.core.engine.gradient_checks import as_ids
from psfleet.core.engine.gradients import SparseGrad, as_numbers
from psfleet.core.engine.kernels.initial_values import initial_array, initial_rows
from psfleet.core.engine.runtime_interface import Asked, PooledIds
from psfleet.core.engine.schema.entry import Entry
from psfleet.core.engine.schema.table import InitializerSpec, RowPrecision, ServerCount
from psfleet.initializer import Assign, Initializer, starting

Floats = NDArray[np.float32]
_MANY = 10_000  # an embedding with this many rows and dense gradients causes a warning

_log = log_of(__name__)


_living: "weakref.WeakSet[Parameter]" = weakref.WeakSet()


class Parameter:
    """A named float32 array, or a map from ids to rows, that an optimizer updates.

        w = Parameter("w", np.zeros((4, 8)))
        users = Parameter("users", shape=(-1, 16), sparse=True, distributed=True)

    Until an optimizer binds the parameter, its value is in this object. After that, its value is in a table
    of the runtime, and `numpy()` pulls it if it may have changed.

    Attributes:
        name: Name, unique in the fleet. It is also the table's name.
        shape: Shape of the array. A `sparse` parameter has (rows, dim), or (-1, dim) for any 64-bit id.
        sparse: True if rows are in a sparse table and gradients are SparseGrad.
        distributed: True if ids are any int64 and rows are made when first updated. Only with `sparse`.
        entry: Rule that decides when an unknown id gets a row, or None to give every id a row. Only with
            `distributed`.
        precision: Storage of the rows on servers, as in TableSpec. Only with `sparse`.
        servers: Number of servers that hold the parameter. With None, rows are on all servers, and a dense
            table is on as many servers as its size requires.
        initializer, seed: Initializer of the values, and its seed. If the initializer has a seed of its own,
            that seed is used. For a parameter with a known shape, `value` replaces both.
        trainable, learning_rate, regularizer, need_clip: Settings for optimizers. `learning_rate` is a factor
            on the optimizer's rate.
        optimizer: Optimizer whose rule, decay and rate apply to this parameter, or None for the optimizer
            that minimizes the loss.
        gradient_clip: Clip set by psfleet.clip.set_gradient_clip.
        do_model_average: True if averages of the weights include this parameter.
        dtype: float32, or the precision in which the value is shown: float16 or bfloat16 (as float32, rounded
            to bfloat16). The tables hold and update the value in float32.
        grad: Gradient of the last backward pass: an array, a SparseGrad or None.
    """

    @checked
    def __init__(
        self,
        name: Annotated[str, Must(bool, "a text")],
        value: ArrayLike | None = None,
        *,
        shape: tuple[int, ...] | None = None,
        sparse: bool = False,
        distributed: bool = False,
        initializer: InitializerSpec | Initializer | None = None,
        seed: int = 0,
        trainable: bool = True,
        learning_rate: NonNegative = 1.0,
        regularizer: Any = None,
        do_model_average: bool = True,
        need_clip: bool = True,
        dtype: Literal["float32", "float16", "bfloat16"] | None = None,
        entry: Entry | None = None,
        precision: RowPrecision = "float32",
        servers: ServerCount | None = None,
    ) -> None:
        if entry is not None and not (sparse and distributed):
            raise ShapeError(
                f"parameter {name!r} has all its rows; {entry} is for distributed ones"
            )
        if isinstance(initializer, Assign) and not distributed and (shape or ())[:1] != (-1,):
            value, shape = _assigned(name, value, initializer, shape), None
            initializer = None
        if value is None and shape is None:
            raise ShapeError(f"parameter {name!r} needs a value or a shape")
        start = None if value is None else as_numbers(value, f"the value of parameter {name!r}")
        half = start is not None and start.dtype == np.float16
        self.dtype = dtype or ("float16" if half else "float32")
        self.name = name
        self._value = None if start is None else np.array(start, dtype=np.float32)
        self.shape: tuple[int, ...] = shape if self._value is None else self._value.shape  # type: ignore[assignment]
        self.sparse = sparse
        self.distributed = distributed
        self.entry = entry
        self.precision = precision
        self.servers = servers
        self.initializer, self.seed = starting(initializer, self.shape, seed, f"parameter {name!r}")
        self.trainable = trainable
        self.learning_rate = learning_rate
        self.regularizer = regularizer
        self.do_model_average = do_model_average
        self.need_clip = need_clip
        self.optimizer: Any = None
        self.gradient_clip: Any = None
        self.grad: Floats | SparseGrad | None = None
        self.binding: Binding | None = None
        _living.add(self)

    def __repr__(self) -> str:
        kind = ", sparse" if self.sparse else ""
        return f"Parameter({self.name!r}, shape={tuple(self.shape)}{kind})"

    def numpy(self) -> Floats:
        """Return the current value, float32 in the parameter's shape.

        Raises:
            ShapeError: The parameter has rows for any id, so there is no whole value. Use `lookup`.
        """
        if self.sparse:
            if self.shape[0] < 0:
                raise ShapeError(f"parameter {self.name!r} has rows for any id; use lookup(ids)")
            return self.lookup(np.arange(self.shape[0], dtype=np.int64))
        if self.binding is not None:
            return self._shown(self.binding.value(self))
        if self._value is None:
            self._value = initial_array(self.shape, self.initializer, self.seed, self.name)
        return self._shown(self._value)

    def lookup(self, ids: NDArray[np.int64]) -> Floats:
        """Return rows of a sparse parameter: float32 [*ids.shape, dim].

        Raises:
            IdError: An id is no whole number, or not one of the rows.
        """
        ids = as_ids(ids, f"parameter {self.name!r}")
        if self.binding is not None:
            return self._shown(self.binding.lookup(self, ids))
        check_rows(self, ids)
        if self._value is not None:
            return self._shown(self._value[ids])
        return self._shown(initial_rows(ids, self.shape[1], self.initializer, self.seed, self.name))

    def pooled(self, lookup: PooledIds) -> tuple[PooledIds, Floats]:
        """Pool rows of a distributed parameter: float32 [bags, dim].

        Returns:
            A pair. The first is the look-up to name in the gradient: `lookup`, or an equal look-up that was
            pooled before in this step. The second is the pooled rows.
        """
        if isinstance(self.binding, PoolingBinding):
            return self.binding.pooled(self, lookup)
        return lookup, lookup.pool(self.lookup(lookup.ids))

    def _shown(self, master: Floats) -> Floats:
        """Return float32 values rounded to the parameter's precision."""
        if self.dtype == "float16":
            return master.astype(np.float16)
        if self.dtype == "bfloat16":
            # bfloat16 is the upper half of a float32. Adding 0x7FFF, plus 1 if the upper half is odd, rounds
            # to nearest. Infinity and NaN stay as they are: the addition could turn a NaN into a number.
            bits = np.ascontiguousarray(master).view(np.uint32)
            even = (bits >> np.uint32(16)) & np.uint32(1)  # ties go to the even neighbour
            nearest = (bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)
            return np.where(np.isfinite(master), nearest.view(np.float32), master)
        return master


def _assigned(
    name: str, value: ArrayLike | None, start: Assign, shape: tuple[int, ...] | None
) -> ArrayLike:
    """Return the value that a parameter starts with: `value`, or else the array of the initializer."""
    if value is not None:
        return value
    if shape is not None and start.value.shape != tuple(shape):
        raise ShapeError(
            f"parameter {name!r} of shape {tuple(shape)} cannot start as an array of "
            f"shape {start.value.shape}"
        )
    return start.value


def living_names() -> set[str]:
    """Return the names of all parameters in this process, including those without a table."""
    return {parameter.name for parameter in list(_living)}


def check_rows(parameter: Parameter, ids: NDArray[np.int64]) -> None:
    """Check that a parameter with a fixed number of rows has all of these ids.

    Raises:
        IdError: An id is not one of the rows.
    """
    rows = parameter.shape[0]
    if (parameter.sparse and parameter.distributed) or rows < 0 or ids.size == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= rows:
        raise IdError(
            f"parameter {parameter.name!r} has rows 0 to {rows - 1}; "
            f"id {low if low < 0 else high} is not one of them"
        )


class Binding(Protocol):
    """Source of a bound parameter's value. The optimizer that owns the parameter sets it."""

    def value(self, parameter: Parameter) -> Floats:
        """Return the whole current value."""

    def lookup(self, parameter: Parameter, ids: NDArray[np.int64]) -> Floats:
        """Return current rows of a sparse parameter."""

    def prefetch(
        self, dense: Sequence[Parameter], sparse: Sequence[tuple[Parameter, Asked]]
    ) -> None:
        """Pull all values that a step needs, in one call. The other methods then return these values."""


@runtime_checkable
class PoolingBinding(Binding, Protocol):
    """Binding that can also pool rows as they arrive, so that callers need not get every single row."""

    def pooled(self, parameter: Parameter, lookup: PooledIds) -> tuple[PooledIds, Floats]:
        pass


def fetch(dense: Sequence[Parameter], sparse: Sequence[tuple[Parameter, Asked]]) -> None:
    """Pull the values that a step is about to use, with one call for each binding."""
    bindings = {id(p.binding): p.binding for p in [*dense, *(p for p, _ in sparse)] if p.binding}
    for binding in bindings.values():
        binding.prefetch(
            [p for p in dense if p.binding is binding],
            [(p, ids) for p, ids in sparse if p.binding is binding],
        )


def note_dense_rows(label: str, rows: int, instead: str) -> None:
    """Warn once about an embedding that has at least 10,000 rows and dense gradients.

    Args:
        instead: Clause of the warning that names the remedy.
    """
    if rows >= _MANY:
        _warn_once(
            f"psfleet: {label} has {rows:,} rows and dense gradients, so each step sends and brings all of "
            f"them; {instead}, it would be those of the batch"
        )


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning(text)
