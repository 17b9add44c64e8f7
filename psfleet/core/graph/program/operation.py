"""Parts of the graph: operations, the records of their use, their values, and gradients on their way back.

An operation is a small frozen value: its kind and its settings. A record says which variables it
was applied to and which one came out. Eager and static programs are made of the same records.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from psfleet.core.base.errors import ShapeError
from psfleet.core.engine.gradients import PooledGradient, SparseGrad, joined_gradients

if TYPE_CHECKING:
    from psfleet.core.graph.program.program import Program
    from psfleet.core.graph.program.variable import Variable

Array = NDArray[Any]
Gradient = Array | SparseGrad
Shape = tuple[int | None, ...]
Spec = tuple[Shape, np.dtype[Any]]

_kinds: dict[str, type["Op"]] = {}
_serials = itertools.count()


_KINDS: dict[str, np.dtype[Any]] = {
    "f": np.dtype(np.float32),
    "i": np.dtype(np.int64),
    "u": np.dtype(np.int64),
    "b": np.dtype(np.bool_),
}


class Context:
    """One run of one record: what its forward leaves for its backward.

    Attributes:
        program: The program that runs: its seed, step, memory and whether it trains.
        needs: For each input whether a gradient is wanted. None is: nothing need be saved.
    """

    __slots__ = ("needs", "products", "program", "record", "saved")

    def __init__(self, program: "Program", record: "Record", needs: tuple[bool, ...]) -> None:
        self.program = program
        self.record = record
        self.needs = needs
        self.products = program.products
        self.saved: tuple[Any, ...] = ()

    def save(self, *values: Any) -> None:
        """Keep values for `backward`, if there is going to be one."""
        if any(self.needs):
            self.saved = values


@dataclass(frozen=True)
class Op:
    """A kind of operation with its settings. Subclasses are frozen dataclasses of plain values.

    `forward` and `backward` compute in the dtype of their inputs and never write to them.

    Attributes:
        saved: Operation as in a program file: its name, then those of its settings in their order.
            Empty: it cannot be saved. Given with the class: `class Scale(Op, saved="scale factor offset")`.
    """

    differentiable: ClassVar[bool] = True
    by_rows: ClassVar[bool] = False  # takes sparse parameters and gradients by rows as they are

    saved: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, saved: str = "") -> None:
        cls.saved = tuple(saved.split())
        if saved:
            _kinds[cls.saved[0]] = cls

    def settings(self) -> tuple[Any, ...]:
        """The values of the settings, in the order in which they are declared."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def infer(self, *inputs: Any, **none: Any) -> Spec:
        """Shape and dtype of the output for input variables of known or unknown (None) extents.

        Raises:
            ShapeError: The inputs do not fit.
        """
        raise NotImplementedError

    def predicting(self, inputs: "tuple[Variable, ...]") -> "tuple[Variable, ...]":
        """Those of the inputs that the output depends on, where nothing is trained: the first ones."""
        return inputs

    def forward(self, context: Context, *inputs: Any, **none: Any) -> Array:
        """The output for these inputs (arrays; a sparse parameter comes as itself)."""
        raise NotImplementedError

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        """The vector-Jacobian product: one gradient per input, None where `needs` says so."""
        raise NotImplementedError


def find_op(kind: str) -> type[Op] | None:
    """The operation that is saved under that name, once its family has been imported."""
    return _kinds.get(kind)


class Record:
    """One use of an operation.

    Attributes:
        op, inputs, output: The operation, its arguments and its result.
        serial: Grows with each record made, so sorting by it is a valid order of execution.
        context: Eager records only: what the forward left, until the backward has used it.
    """

    __slots__ = ("context", "inputs", "op", "output", "serial")

    def __init__(self, op: Op, inputs: tuple["Variable", ...], output: "Variable") -> None:
        self.op = op
        self.inputs = inputs
        self.output = output
        self.serial = next(_serials)
        self.context: Context | None = None

    def needed(self, training: bool) -> "tuple[Variable, ...]":
        """The inputs that a run needs; `training`: gradients go through this record."""
        return self.inputs if training else self.op.predicting(self.inputs)

    def __repr__(self) -> str:
        names = ", ".join(variable.name for variable in self.inputs)
        return f"{self.output.name} = {self.op!r}({names})"


def dtype_of(dtype: DTypeLike) -> np.dtype[Any]:
    """A dtype by name.

    Raises:
        ShapeError: It is none that variables can have.
    """
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind not in (np.float32, np.float64, np.int64, np.int32, np.bool_):
        raise ShapeError(f"dtype {dtype!r} is unknown; use float32, float64, int64, int32 or bool")
    return kind


def usual_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that values of this one get by default: float32, int64 or bool.

    Raises:
        ShapeError: They are no numbers.
    """
    kind = _KINDS.get(dtype.kind)
    if kind is None:
        raise ShapeError(f"a variable cannot hold values of dtype {dtype}")
    return kind


def extents(shape: Iterable[int | None]) -> Shape:
    """A user's shape: None and -1 both mean unknown."""
    if isinstance(shape, str) or not isinstance(shape, Iterable):
        raise ShapeError(f"a shape is {shape!r}; it must be a list of extents")
    result: list[int | None] = []
    for extent in shape:
        whole = isinstance(extent, int | float | np.number) and int(extent) == extent
        if extent is not None and (not whole or extent < -1):
            raise ShapeError(
                f"shape {tuple(shape)} has the extent {extent!r}; "
                "it must be a whole number, or None where it is unknown"
            )
        result.append(None if extent is None or extent == -1 else int(extent))
    return tuple(result)


def broadcast(first: Shape, second: Shape, what: str) -> Shape:
    """NumPy's rule; an unknown extent against 1 stays unknown, against n becomes n."""
    rank = max(len(first), len(second))
    a_shape = (1,) * (rank - len(first)) + first
    b_shape = (1,) * (rank - len(second)) + second
    result: list[int | None] = []
    for a, b in zip(a_shape, b_shape, strict=True):
        if a == b or b == 1:
            result.append(a)
        elif a == 1 or a is None:
            result.append(b)
        elif b is None:
            result.append(a)
        else:
            raise ShapeError(f"{what} cannot combine the shapes {first} and {second}")
    return tuple(result)


def same(first: Shape, second: Shape) -> bool:
    """Return whether the two can be equal at run time."""
    return len(first) == len(second) and all(
        a is None or b is None or a == b for a, b in zip(first, second, strict=True)
    )


def axis_of(axis: int, shape: Sequence[object], what: str) -> int:
    """A possibly negative axis as 0 to rank - 1."""
    rank = len(shape)
    if not -rank <= axis < rank:
        raise ShapeError(f"{what}: axis {axis} is outside a shape of {rank} dimensions")
    return axis % rank


def size_of(shape: Shape) -> int | None:
    """The number of values, None if it depends on an unknown extent."""
    size = 1
    for extent in shape:
        if extent is None:
            return None
        size *= extent
    return size


def need_floats(what: str, *inputs: "Variable") -> None:
    """Refuse inputs of whole numbers, and floats of different widths."""
    for x in inputs:
        if x.dtype.kind != "f":
            raise ShapeError(f"{what} of {x.name!r} needs floats, not {x.dtype}; use layers.cast")
    need_one_dtype(what, *inputs)


def need_one_dtype(what: str, *inputs: "Variable") -> None:
    """Refuse inputs of different dtypes: nothing is widened behind the user's back."""
    for other in inputs[1:]:
        if other.dtype != inputs[0].dtype:
            raise ShapeError(
                f"{what} of {inputs[0].name!r} ({inputs[0].dtype}) and {other.name!r} "
                f"({other.dtype}): the dtypes differ; use layers.cast on one"
            )


def scatter_rows(ids: NDArray[np.int64], rows: Array, shape: tuple[int, ...]) -> Array:
    """Zeros of `shape` with rows[i] added to row ids[i], those of one id in their order.

    Sorted and summed in runs: several times faster than np.add.at.
    """
    out: NDArray[Any] = np.zeros(shape, rows.dtype)
    if len(ids) == 0:
        return out
    order = np.argsort(ids, kind="stable")
    in_order = ids[order]
    starts = np.flatnonzero(np.concatenate([[True], in_order[1:] != in_order[:-1]]))
    out[in_order[starts]] = np.add.reduceat(rows[order], starts, axis=0)
    return out


def ancestors(targets: "Iterable[Variable]") -> list[Record]:
    """Every record that the targets are computed by, in order of execution."""
    records: set[Record] = set()
    waiting = [target.record for target in targets if target.record is not None]
    while waiting:
        record = waiting.pop()
        if record not in records:
            records.add(record)
            waiting += [v.record for v in record.inputs if v.record is not None]
    return sorted(records, key=lambda record: record.serial)


def summed(first: Gradient, second: Gradient) -> Gradient:
    """The sum of two gradients of one parameter."""
    if isinstance(first, PooledGradient) and isinstance(second, PooledGradient):
        return joined_gradients([first, second])
    if isinstance(first, SparseGrad) and isinstance(second, SparseGrad):
        counts = first.scores is not None or second.scores is not None
        return SparseGrad(
            np.concatenate([first.ids, second.ids]),
            np.concatenate([first.rows, second.rows]),
            np.concatenate([first.counted(), second.counted()]) if counts else None,
        )
    if isinstance(first, SparseGrad) and isinstance(second, np.ndarray):
        first = dense_rows(first, second.shape)
    elif isinstance(second, SparseGrad) and isinstance(first, np.ndarray):
        second = dense_rows(second, first.shape)
    total: Gradient = first + second  # type: ignore[operator]  # both are arrays
    return total


def dense_rows(grad: SparseGrad, shape: tuple[int, ...]) -> NDArray[Any]:
    """The array that a gradient by rows stands for; rows of a repeated id are summed in order."""
    return scatter_rows(grad.ids, grad.rows, shape)


class BackwardPass:
    """Gradients on their way from the loss to the leaves.

    Attributes:
        gradients: By variable; those of leaves are left when the sweep is over.
    """

    def __init__(self, seeds: "dict[Variable, Gradient]") -> None:
        self.gradients = dict(seeds)
        self._own: set[Variable] = set()  # gradients without another reference: summed in place

    def run(
        self, records: Sequence[Record], contexts: dict[Record, Context], keep: bool = False
    ) -> None:
        """Go back through records; a context is let go as soon as it is used, unless `keep`."""
        for record in reversed(records):
            context = contexts[record] if keep else contexts.pop(record)
            gradient = self.gradients.pop(record.output, None)
            if gradient is not None:
                self.step(record, context, gradient)

    def step(self, record: Record, context: Context, gradient: Gradient) -> None:
        """Hand a record's output gradient on to its inputs."""
        parts = record.op.backward(context, gradient)  # type: ignore[arg-type]  # only leaves are sparse
        for variable, need, part in zip(record.inputs, context.needs, parts, strict=True):
            if need and part is not None:
                self.add(variable, part)

    def add(self, variable: "Variable", part: Gradient) -> None:
        """Add to a variable's gradient."""
        before = self.gradients.get(variable)
        if before is None:
            self.gradients[variable] = part
        elif (
            variable in self._own
            and isinstance(before, np.ndarray)
            and isinstance(part, np.ndarray)
        ):
            before += part
        else:
            self.gradients[variable] = summed(before, part)
            if isinstance(before, np.ndarray) and before.ndim:
                self._own.add(variable)
