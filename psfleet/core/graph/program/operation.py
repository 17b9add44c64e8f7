"""Core types of the graph: operations, records of their use, and the backward sweep through records.

An operation (Op) is a small frozen value: its kind and its settings. A record has an operation, the variables
it was applied to, and the variable that came out. Eager code and programs are made of the same records; they
differ only in when `forward` runs. To add an operation, subclass Op in a module of `ops`, and define its
shape inference, forward and backward pass as methods.

The helper functions for shapes and dtypes raise ShapeError with a sentence for the user. So a wrong program
fails in the line of the script that builds it, and not in its first run.
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

_kinds: dict[str, type["Op"]] = {}  # operations by the names under which program files save them
_serials = itertools.count()


# Default dtype of variables, by the kind of the NumPy dtype of their values.
_KINDS: dict[str, np.dtype[Any]] = {
    "f": np.dtype(np.float32),
    "i": np.dtype(np.int64),
    "u": np.dtype(np.int64),
    "b": np.dtype(np.bool_),
}


class Context:
    """State of one run of a record, which its forward pass keeps for its backward pass.

    Attributes:
        program: Running program. It has the seed, the step, the memory, and the flag for tests.
        record: Record that runs.
        needs: For each input, True if it needs a gradient. If none does, `save` keeps nothing.
        products: Implementation of matrix products in this run.
        saved: Values that `forward` has saved for `backward`.
    """

    __slots__ = ("needs", "products", "program", "record", "saved")

    def __init__(self, program: "Program", record: "Record", needs: tuple[bool, ...]) -> None:
        self.program = program
        self.record = record
        self.needs = needs
        self.products = program.products
        self.saved: tuple[Any, ...] = ()

    def save(self, *values: Any) -> None:
        """Keep values for `backward`, or nothing if no input needs a gradient."""
        if any(self.needs):
            self.saved = values


@dataclass(frozen=True)
class Op:
    """A kind of operation with its settings. Subclasses are frozen dataclasses of plain values.

    `forward` and `backward` compute in the dtype of their inputs and never write to the inputs.

    Attributes:
        differentiable: False if no gradient flows from the output to any input.
        by_rows: True if `forward` accepts sparse parameters and SparseGrads. For other operations they are
            converted to arrays first.
        saved: Name of the operation in program files, then the names of its settings in their order. Empty if
            the operation cannot be saved. Declared with the class:
            `class Scale(Op, saved="scale factor offset")`.
    """

    differentiable: ClassVar[bool] = True
    by_rows: ClassVar[bool] = False

    saved: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, saved: str = "") -> None:
        cls.saved = tuple(saved.split())
        if saved:
            _kinds[cls.saved[0]] = cls

    def settings(self) -> tuple[Any, ...]:
        """Return the values of the operation's settings, in the order in which they are declared."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def infer(self, *inputs: Any, **none: Any) -> Spec:
        """Return the shape and dtype of the output. Extents of input variables may be unknown (None).

        Raises:
            ShapeError: The operation cannot take inputs of these shapes or dtypes.
        """
        raise NotImplementedError

    def predicting(self, inputs: "tuple[Variable, ...]") -> "tuple[Variable, ...]":
        """Return the inputs that `forward` needs if no gradient flows through it: the first n inputs.

        The other inputs matter only for the gradient, such as the shows and clicks of an embedding.
        """
        return inputs

    def forward(self, context: Context, *inputs: Any, **none: Any) -> Array:
        """Compute the output. Inputs are arrays.

        With `by_rows`, a sparse parameter is passed as the Parameter.
        """
        raise NotImplementedError

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        """Return the vector-Jacobian product: one gradient per input, or None where `needs` is False.

        `gradient` is the gradient of the output.
        """
        raise NotImplementedError


def find_op(kind: str) -> type[Op] | None:
    """Return the class of the operation with this name in program files, or None if the name is unknown."""
    return _kinds.get(kind)


class Record:
    """Use of an operation in a program: the operation, its inputs and its output.

    Attributes:
        op, inputs, output: Operation, its arguments and its result.
        serial: Number that grows with each new record. A record can only use results that exist already, so
            sorting records by this number gives a valid order of execution.
        context: State of an eager record, from its forward pass until its backward pass has used it.
    """

    __slots__ = ("context", "inputs", "op", "output", "serial")

    def __init__(self, op: Op, inputs: tuple["Variable", ...], output: "Variable") -> None:
        self.op = op
        self.inputs = inputs
        self.output = output
        self.serial = next(_serials)
        self.context: Context | None = None

    def needed(self, training: bool) -> "tuple[Variable, ...]":
        """Return the inputs that a run needs.

        `training`: True if gradients flow through this record.
        """
        return self.inputs if training else self.op.predicting(self.inputs)

    def __repr__(self) -> str:
        names = ", ".join(variable.name for variable in self.inputs)
        return f"{self.output.name} = {self.op!r}({names})"


def dtype_of(dtype: DTypeLike) -> np.dtype[Any]:
    """Return the NumPy dtype for a user's dtype, such as "float32".

    Raises:
        ShapeError: Variables cannot have this dtype.
    """
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind not in (np.float32, np.float64, np.int64, np.int32, np.bool_):
        raise ShapeError(f"dtype {dtype!r} is unknown; use float32, float64, int64, int32 or bool")
    return kind


def usual_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the default dtype of a variable for values of this dtype: float32, int64 or bool.

    Raises:
        ShapeError: The dtype is not numeric.
    """
    kind = _KINDS.get(dtype.kind)
    if kind is None:
        raise ShapeError(f"a variable cannot hold values of dtype {dtype}")
    return kind


def extents(shape: Iterable[int | None]) -> Shape:
    """Check a user's shape. Returns it with None for unknown extents, which users may also write as -1."""
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
    """Return the shape of an elementwise result, by NumPy's rules for broadcasting.

    An unknown extent (None) combined with 1 stays unknown. Combined with n it becomes n, because at run time
    only n or 1 is possible.

    `what`: Subject of the error message.

    Raises:
        ShapeError: The shapes cannot be combined.
    """
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
    """Return whether two shapes, which may have unknown extents, can be equal at run time."""
    return len(first) == len(second) and all(
        a is None or b is None or a == b for a, b in zip(first, second, strict=True)
    )


def axis_of(axis: int, shape: Sequence[object], what: str) -> int:
    """Convert an axis to a number from 0 to rank - 1; a negative axis counts from the end.

    Checks its range.
    """
    rank = len(shape)
    if not -rank <= axis < rank:
        raise ShapeError(f"{what}: axis {axis} is outside a shape of {rank} dimensions")
    return axis % rank


def size_of(shape: Shape) -> int | None:
    """Return the number of values of a shape, or None if it depends on an unknown extent."""
    size = 1
    for extent in shape:
        if extent is None:
            return None
        size *= extent
    return size


def need_floats(what: str, *inputs: "Variable") -> None:
    """Check that inputs are floats, and all of the same dtype.

    `what`: Subject of the error message.
    """
    for x in inputs:
        if x.dtype.kind != "f":
            raise ShapeError(f"{what} of {x.name!r} needs floats, not {x.dtype}; use layers.cast")
    need_one_dtype(what, *inputs)


def need_one_dtype(what: str, *inputs: "Variable") -> None:
    """Check that inputs have the same dtype. No input is converted without the user's knowledge.

    `what`: Subject of the error message.
    """
    for variable in inputs[1:]:
        if variable.dtype != inputs[0].dtype:
            raise ShapeError(
                f"{what} of {inputs[0].name!r} ({inputs[0].dtype}) and {variable.name!r} "
                f"({variable.dtype}): the dtypes differ; use layers.cast on one"
            )


def scatter_rows(ids: NDArray[np.int64], rows: Array, shape: tuple[int, ...]) -> Array:
    """Return zeros of `shape` with rows[i] added to row ids[i]. Rows of the same id are added in their order.

    Rows are sorted by id and each run of equal ids is summed, which is several times faster than np.add.at.
    """
    out: NDArray[Any] = np.zeros(shape, rows.dtype)
    if len(ids) == 0:
        return out
    # A stable sort keeps the rows of an id in the order of the batch. Float addition is not associative, so
    # another order could give another result in the last bits.
    order = np.argsort(ids, kind="stable")
    in_order = ids[order]
    starts = np.flatnonzero(np.concatenate([[True], in_order[1:] != in_order[:-1]]))
    out[in_order[starts]] = np.add.reduceat(rows[order], starts, axis=0)
    return out


def ancestors(targets: "Iterable[Variable]") -> list[Record]:
    """Return every record (use of an operation) that the targets depend on, in order of execution."""
    records: set[Record] = set()
    waiting = [target.record for target in targets if target.record is not None]
    while waiting:
        record = waiting.pop()
        if record not in records:
            records.add(record)
            waiting += [v.record for v in record.inputs if v.record is not None]
    return sorted(records, key=lambda record: record.serial)


def summed(first: Gradient, second: Gradient) -> Gradient:
    """Add two gradients of the same parameter. The result is a SparseGrad if both gradients are."""
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
    """Convert a SparseGrad to an array. Rows of a repeated id are summed in order."""
    return scatter_rows(grad.ids, grad.rows, shape)


class BackwardPass:
    """Backward sweep: goes back through records (uses of operations) and computes their inputs' gradients.

    It starts at the loss and ends at the leaves: parameters and data, which no record computes.

    Args:
        seeds: Gradients to start from, such as 1 for the loss.

    Attributes:
        gradients: Gradients computed so far of variables that the sweep has not passed yet. At the end these
            are the gradients of the leaves.
    """

    def __init__(self, seeds: "dict[Variable, Gradient]") -> None:
        self.gradients = dict(seeds)
        # Variables whose gradient is an array made here, so that further parts can be added in place. An
        # array that an operation returned may share memory with a forward value or with another variable's
        # gradient.
        self._own: set[Variable] = set()

    def run(
        self, records: Sequence[Record], contexts: dict[Record, Context], keep: bool = False
    ) -> None:
        """Go back through records, and compute the gradients of their inputs.

        Args:
            records: Records in forward order.
            contexts: Context of each record. Each is removed as soon as it is used, to free its memory.
            keep: True to leave the contexts for another sweep.
        """
        for record in reversed(records):
            context = contexts[record] if keep else contexts.pop(record)
            gradient = self.gradients.pop(record.output, None)
            if gradient is not None:
                self.step(record, context, gradient)

    def step(self, record: Record, context: Context, gradient: Gradient) -> None:
        """Compute the gradients of a record's inputs from the gradient of its output.

        Adds each to the gradient that `gradients` already has for the variable.
        """
        parts = record.op.backward(context, gradient)  # type: ignore[arg-type]  # only leaves are sparse
        for variable, need, part in zip(record.inputs, context.needs, parts, strict=True):
            if need and part is not None:
                self.add(variable, part)

    def add(self, variable: "Variable", part: Gradient) -> None:
        """Add to the gradient of a variable the part that comes from one record."""
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
            # Without axes the sum is a NumPy scalar, which += does not change in place.
            if isinstance(before, np.ndarray) and before.ndim:
                self._own.add(variable)
