"""Variables: what operations take and give, symbolic in a program or with a value at once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.core.base.validation.annotations import checked
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program import names
from psfleet.core.graph.program.operation import (
    Array,
    BackwardPass,
    Context,
    Gradient,
    Op,
    Record,
    Shape,
    ancestors,
    dense_rows,
    dtype_of,
    summed,
    usual_dtype,
)
from psfleet.core.graph.program.operators import Operators
from psfleet.core.graph.program.ops.matmul import FLOAT32
from psfleet.core.graph.program.program import Program, default_main_program, in_eager_mode

if TYPE_CHECKING:
    from psfleet.core.graph.program.backward import Backward

_gradients_wanted = True


@runtime_checkable
class VariableSource(Protocol):
    """Object that can stand for a variable in a program, such as a schedule that counts updates."""

    def as_variable(self, program: Any = None) -> Any:
        """The variable that stands for it in `program`; None: the one that is being built."""


class Variable(Operators):
    """One value of the graph.

    Attributes:
        name: Unique in the program.
        shape: Extents; None where only the feed decides.
        dtype: float32, int64, bool (or float64 where asked for).
        stop_gradient: No gradient flows to or through this variable.
        persistable: It outlives a run: a parameter.
        value: Concrete variables: the array.
        record: Record that computes it; None for leaves.
        parameter: For the leaf that stands for a parameter.
        backward_pass: For a gradient variable: the pass that computes it.
        grad: Concrete leaves that are no parameters: the gradient of the last backward pass.
    """

    def __init__(
        self,
        name: str,
        shape: Shape,
        dtype: DTypeLike,
        *,
        stop_gradient: bool = False,
        value: Array | None = None,
        parameter: Parameter | None = None,
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.stop_gradient = stop_gradient
        self.value = value
        self.record: Record | None = None
        self.parameter = parameter
        self.backward_pass: Backward | None = None
        self.is_data = False
        self.grad: Gradient | None = None

    @staticmethod
    def from_argument(value: Any) -> "Variable":
        """The variable of what a layer takes for one: see psfleet.core.base.validation.annotations."""
        if isinstance(value, str | list | tuple):
            raise TypeError
        try:
            return as_variable(value)
        except UsageError:
            raise TypeError from None

    @property
    def persistable(self) -> bool:
        return self.parameter is not None

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numpy(self) -> Array:
        """The value.

        Raises:
            UsageError: It is symbolic: only `Executor.run` gives it one.
        """
        if self.parameter is not None:
            return self.parameter.numpy()
        if self.value is None:
            raise UsageError(
                f"variable {self.name!r} has no value until a program runs; "
                "name it in the fetch_list of Executor.run"
            )
        return self.value

    def item(self) -> Any:
        """The only value, as a Python number."""
        return self.numpy().item()

    def gradient(self) -> Gradient | None:
        """The gradient of the last backward pass, None if there is none."""
        return self.parameter.grad if self.parameter is not None else self.grad

    def clear_gradient(self) -> None:
        """Forget the gradient."""
        self._set_gradient(None)

    def _set_gradient(self, gradient: Gradient | None) -> None:
        if self.parameter is not None:
            self.parameter.grad = gradient
        else:
            self.grad = gradient

    def detach(self) -> "Variable":
        """The same value, through which no gradient flows."""
        return to_variable(self.numpy())

    @checked
    def backward(self, grad_tensor: Any = None, retain_graph: bool = False) -> None:
        """Add the gradient of this concrete variable to `grad` of every parameter it depends on.

        Args:
            grad_tensor: Gradient by this variable, if known, in its shape; None: ones, so
                the gradient is that of the sum of its values.
            retain_graph: Keep what another backward() over the same operations needs.

        Raises:
            UsageError: It is symbolic, or its graph was used up before.
            ShapeError: grad_tensor has another shape.
        """
        if self.value is None:
            raise UsageError(
                f"variable {self.name!r} has no value; in a program let "
                "optimizer.minimize(loss) do the backward pass"
            )
        seed = np.ones_like(self.value) if grad_tensor is None else as_variable(grad_tensor).numpy()
        if seed.shape != self.value.shape:
            raise ShapeError(
                f"backward() of {self.name!r} with shape {self.shape}: grad_tensor has "
                f"shape {seed.shape}"
            )
        sweep = BackwardPass({self: seed})
        records = [r for r in ancestors([self]) if not r.output.stop_gradient]
        contexts = {record: _left(record) for record in records}
        sweep.run(records, contexts)
        for variable, part in sweep.gradients.items():
            if variable.record is None and not variable.stop_gradient:
                before = variable.gradient()
                variable._set_gradient(part if before is None else summed(before, part))
        if not retain_graph:
            for record in records:
                record.context = None
        default_main_program().step += 1

    def __repr__(self) -> str:
        value = "" if self.value is None else f", value={self.value!r}"
        return f"Variable({self.name!r}, shape={self.shape}, dtype={self.dtype.name}{value})"

    def _apply(self, op: Op, *inputs: Any) -> "Variable":
        return apply(op, *inputs)


@checked
class no_grad:  # noqa: N801, RUF100  # a context manager that reads as a statement
    """Inside the block eager operations keep nothing for a backward pass."""

    def __enter__(self) -> None:
        global _gradients_wanted
        self._before, _gradients_wanted = _gradients_wanted, False

    def __exit__(self, *exception: object) -> None:
        global _gradients_wanted
        _gradients_wanted = self._before


@checked
def to_variable(
    value: ArrayLike,
    name: str | None = None,
    dtype: DTypeLike | None = None,
    *,
    stop_gradient: bool = True,
) -> Variable:
    """A concrete variable: operations on it compute at once.

    Args:
        value: Floats become float32, whole numbers int64 unless `dtype` says otherwise.
        stop_gradient: False: `backward()` fills its `grad`.
    """
    if isinstance(value, Variable):
        return value
    array = np.asarray(value)
    kind = usual_dtype(array.dtype) if dtype is None else dtype_of(dtype)
    array = array.astype(kind, copy=False)
    return Variable(
        name or names.generate("constant"),
        array.shape,
        kind,
        value=array,
        stop_gradient=stop_gradient,
    )


def leaf(parameter: Parameter, program: Program | None = None) -> Variable:
    """The variable that stands for a parameter in a program, the default one if none is given."""
    program = program or default_main_program()
    variable = program.variables.get(parameter.name)
    if variable is None:
        variable = _stand_in(parameter)
        program.add(variable)
    if variable.parameter is not parameter:
        raise UsageError(f"the program has another variable or parameter named {parameter.name!r}")
    variable.stop_gradient = not parameter.trainable
    return variable


def _stand_in(parameter: Parameter) -> Variable:
    """A variable for a parameter, in no program yet."""
    shape = tuple(None if extent is None or extent < 0 else extent for extent in parameter.shape)
    return Variable(
        parameter.name,
        shape,
        np.float32,
        parameter=parameter,
        stop_gradient=not parameter.trainable,
    )


def as_variable(value: Any) -> Variable:
    """A variable as it is, one that stands for a parameter, or a constant of an array or number."""
    if isinstance(value, Variable):
        return value
    if isinstance(value, Parameter):
        return _stand_in(value)
    if isinstance(value, np.ndarray | np.generic | int | float | list | tuple):
        return to_variable(np.asarray(value))
    if isinstance(value, VariableSource):
        variable: Variable = value.as_variable()
        return variable
    raise UsageError(
        f"a layer's input is {value!r}; it must be a variable, a parameter or an array"
    )


def apply(op: Op, *inputs: Any, name: str | None = None) -> Variable:
    """The result of an operation: computed at once, or recorded in the default program.

    It is recorded if an input is symbolic, computed if one is concrete; of parameters and nothing
    else it is recorded unless eager mode is on.

    Args:
        name: The result is called `name.tmp_0` (`tmp_1`, ...); without it the kind of operation is.
    """
    variables = tuple(as_variable(value) for value in inputs)
    shape, dtype = op.infer(*variables)
    label = name or names.generate(type(op).__name__.lower())
    output = Variable(names.generate(f"{label}.tmp"), shape, dtype)
    output.stop_gradient = not op.differentiable or all(v.stop_gradient for v in variables)
    eager = _is_eager(variables)
    output.record = Record(op, variables if eager else _settled(variables), output)
    if eager:
        _compute_now(output.record)
    else:
        default_main_program().add(output)
    return output


def operand(op: Op, variable: Variable, value: Any) -> Any:
    """Return an operation's input: its value, whole where the operation does not work by rows.

    Args:
        value: A sparse parameter, a gradient or an array.

    Raises:
        UsageError: There is no whole: the parameter has rows for any id.
    """
    if op.by_rows or not isinstance(value, Parameter | SparseGrad):
        return value
    if any(extent is None or extent < 0 for extent in variable.shape):
        raise UsageError(
            f"{type(op).__name__} needs all rows of {variable.name!r}, which has rows for any id; compute "
            "with what layers.embedding looks up"
        )
    if isinstance(value, Parameter):
        return np.asarray(value.numpy(), np.float32)
    return dense_rows(value, tuple(int(extent or 0) for extent in variable.shape))


def compute(op: Op, context: Context, inputs: Sequence[Any], dtype: np.dtype[Any]) -> Any:
    """Run an operation's forward; what NumPy refuses becomes one sentence."""
    try:
        result: Any = op.forward(context, *inputs)
        return result if isinstance(result, SparseGrad) else np.asarray(result, dtype=dtype)
    except ShapeError:
        raise
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        shapes = ", ".join(str(np.shape(value)) for value in inputs)
        raise ShapeError(
            f"{context.record.output.name}: {type(op).__name__} cannot take inputs of "
            f"the shapes {shapes}: {error}"
        ) from error


def _compute_now(record: Record) -> None:
    output = record.output
    if not _gradients_wanted:
        output.stop_gradient = True
    needs = tuple(not v.stop_gradient and not output.stop_gradient for v in record.inputs)
    context = Context(default_main_program(), record, needs)
    context.products = FLOAT32  # how a program multiplies is the matter of its runs
    values = [
        operand(record.op, v, v.parameter)
        if v.parameter is not None and v.parameter.sparse
        else v.numpy()
        for v in record.inputs
    ]
    output.value = compute(record.op, context, values, output.dtype)
    output.shape = output.value.shape
    if any(needs):
        record.context = context
    else:
        output.record = None


def _is_eager(variables: Sequence[Variable]) -> bool:
    symbolic = any(v.value is None and v.parameter is None for v in variables)
    return not symbolic and (in_eager_mode() or any(v.value is not None for v in variables))


def _settled(variables: Sequence[Variable]) -> tuple[Variable, ...]:
    """The inputs as the program has them: one leaf per parameter; what is concrete is a constant."""
    program = default_main_program()
    for variable in variables:
        if variable.value is not None and variable.name not in program.variables:
            program.add(variable)
    return tuple(v if v.parameter is None else leaf(v.parameter) for v in variables)


def _left(record: Record) -> Context:
    if record.context is None:
        raise UsageError(
            f"the graph of {record.output.name!r} was used up by an earlier backward()"
            "; pass retain_graph=True to that one"
        )
    return record.context
