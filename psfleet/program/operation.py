"""What the graph is made of: operations and the records of their use.

An operation is a small frozen value: its kind and its settings. A record says which variables it
was applied to and which one came out. Eager and static programs are made of the same records.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from psfleet.parameters.parameter import SparseGrad

if TYPE_CHECKING:
    from psfleet.program.program import Program
    from psfleet.program.variable import Variable

__all__ = ["Array", "Context", "Gradient", "Op", "Record", "Shape", "Spec", "find_op"]

Array = NDArray[Any]
Gradient = Array | SparseGrad
Shape = tuple[int | None, ...]
Spec = tuple[Shape, np.dtype[Any]]

_kinds: dict[str, type["Op"]] = {}
_serials = itertools.count()


class Context:
    """One run of one record: what its forward leaves for its backward.

    Attributes:
        program: The program that runs: its seed, step, memory and whether it trains.
        record: The record.
        needs: For each input whether a gradient is wanted. None is: nothing need be saved.
        products: How to multiply matrices.
        saved: What `forward` keeps for `backward`.
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
        saved: As a program file has the operation: its name, then those of its settings in their order.
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
        op, inputs, output: What was applied to what, and the result.
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
