"""Variables: inputs and results of operations, with a value (concrete) or without one (symbolic).

    eager     x = to_variable(array); y = x * 2       computed at once; y.backward() fills x.grad
    program   x = layers.data("x", [4]); y = x * 2    recorded in the default program; Executor.run computes y

`apply` decides between the two from an operation's inputs. With a concrete input and no symbolic one, the
operation is computed at once; with a symbolic input, it becomes a record of the program. An eager result
keeps its record and saved values until a backward pass has used them. Within `no_grad` it keeps none.
"""

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
from psfleet.core.graph.program.program import default_main_program, in_eager_mode

if TYPE_CHECKING:
    from psfleet.core.graph.program.backward import Backward

_gradients_wanted = True  # False inside `no_grad`


@runtime_checkable
class VariableSource(Protocol):
    """Object that a program can use like a variable, such as a learning rate schedule that counts updates."""

    def as_variable(self, program: Any = None) -> Any:
        """Return the variable of this object in `program`, or in the default program if it is None."""


class Variable(Operators):
    """Value in a graph of operations: a *leaf* (data, constant or parameter), or the result of an operation.

    Attributes:
        name: Name, unique in the program.
        shape: Extents. None means that the extent depends on the feed.
        dtype: float32, int64 or bool; float64 and int32 if the script asks for them.
        stop_gradient: True if no gradient flows to or through this variable.
        persistable: True if the value outlives a run, as a parameter's does.
        value: Array of a concrete variable, or None for a symbolic one.
        record: Record of the operation that computes it, or None for a leaf.
        parameter: Parameter that this leaf represents, or None.
        backward_pass: Backward pass that computes it if the variable is a gradient, else None.
        is_data: True if the value comes from the feed.
        grad: Gradient of the last backward pass, for concrete leaves. A parameter has a `grad` of its own.
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
        """Return a layer's argument as a variable.

        The checks of arguments call this (`validation.annotations`).
        """
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
        """Return the value as an array.

        Raises:
            UsageError: The variable is symbolic, so only `Executor.run` can compute it.
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
        """Return the value of a variable with one element as a Python number."""
        return self.numpy().item()

    def gradient(self) -> Gradient | None:
        """Return the gradient of the last backward pass, or None if there is none."""
        return self.parameter.grad if self.parameter is not None else self.grad

    def clear_gradient(self) -> None:
        """Set the gradient to None. Otherwise the next backward pass adds to it."""
        self._set_gradient(None)

    def _set_gradient(self, gradient: Gradient | None) -> None:
        if self.parameter is not None:
            self.parameter.grad = gradient
        else:
            self.grad = gradient

    def detach(self) -> "Variable":
        """Return a variable with the same value that no gradient flows through."""
        return to_variable(self.numpy())

    @checked
    def backward(self, grad_tensor: Any = None, retain_graph: bool = False) -> None:
        """Compute gradients of this concrete variable, and add them to `grad` of the leaves it depends on.

            x = to_variable(np.array([1.0, 2.0]), stop_gradient=False)
            (x * x).backward()
            x.grad  # [2, 4]

        Args:
            grad_tensor: Gradient to start from, in the shape of this variable. The default is ones, so that
                the result is the gradient of the sum of the values.
            retain_graph: True to keep the saved values for another backward() over the same operations.

        Raises:
            UsageError: The variable is symbolic, or an earlier backward() has used up its graph.
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
        # An eager loop has no runs of a program. So each backward pass counts as a step, because dropout
        # draws new masks for every step.
        default_main_program().step += 1

    def __repr__(self) -> str:
        value = "" if self.value is None else f", value={self.value!r}"
        return f"Variable({self.name!r}, shape={self.shape}, dtype={self.dtype.name}{value})"

    def _apply(self, op: Op, *inputs: Any) -> "Variable":
        return apply(op, *inputs)


@checked
class no_grad:  # noqa: N801, RUF100  # a context manager that reads as a statement
    """Context manager in which eager operations keep nothing for a backward pass.

    with no_grad():
        prediction = model(x)
    """

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
    """Make a concrete variable. Operations on it are computed at once.

        x = to_variable(np.ones(3), stop_gradient=False)
        (x * x).backward()
        x.grad  # [2, 2, 2]

    Args:
        value: Array or numbers. A variable is returned unchanged.
        name: Name of the variable, or None for a generated one.
        dtype: Dtype of the variable. By default floats become float32 and whole numbers int64.
        stop_gradient: False if `backward()` should fill the variable's `grad`.
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


def leaf(parameter: Parameter) -> Variable:
    """Return a parameter's variable in the default main program. Adds it if the program has none.

    Raises:
        UsageError: The program has another variable or parameter of this name.
    """
    program = default_main_program()
    variable = program.variables.get(parameter.name)
    if variable is None:
        variable = _stand_in(parameter)
        program.add(variable)
    if variable.parameter is not parameter:
        raise UsageError(f"the program has another variable or parameter named {parameter.name!r}")
    variable.stop_gradient = not parameter.trainable
    return variable


def _stand_in(parameter: Parameter) -> Variable:
    """Make a variable that represents a parameter, without adding it to a program."""
    shape = tuple(None if extent is None or extent < 0 else extent for extent in parameter.shape)
    return Variable(
        parameter.name,
        shape,
        np.float32,
        parameter=parameter,
        stop_gradient=not parameter.trainable,
    )


def as_variable(value: Any) -> Variable:
    """Convert a layer's input to a variable. A variable is returned unchanged; numbers become constants.

    Raises:
        UsageError: The value is neither a variable, a parameter, an array nor a number.
    """
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
    """Apply an operation: compute it at once, or record it in the default program.

    - With a symbolic input, it is recorded.
    - With a concrete input and no symbolic one, it is computed.
    - With only parameters as inputs, it is recorded, or computed in eager mode.

    Args:
        inputs: Variables, parameters, arrays or numbers.
        name: Prefix of the result's name, which is `name.tmp_0` (`tmp_1`, ...). By default the kind of
            operation.
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
    """Return a value in the form that an operation takes.

    An operation that works by rows gets sparse parameters and SparseGrads unchanged. For other operations
    they are converted to arrays.

    Args:
        value: A sparse parameter, a SparseGrad or an array.

    Raises:
        UsageError: The parameter has rows for any id, so it cannot be converted to an array.
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
    """Run the forward pass of an operation.

    Raises:
        ShapeError: NumPy cannot combine the inputs. The message names the operation and their shapes.
    """
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
    context.products = (
        FLOAT32  # `products` of the default program is for its runs, not for eager operations
    )
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
        output.record = None  # so that the result does not keep its inputs alive


def _is_eager(variables: Sequence[Variable]) -> bool:
    symbolic = any(v.value is None and v.parameter is None for v in variables)
    return not symbolic and (in_eager_mode() or any(v.value is not None for v in variables))


def _settled(variables: Sequence[Variable]) -> tuple[Variable, ...]:
    """Return the inputs of a new record as variables of the default program.

    Concrete inputs are added to the program as constants. All uses of a parameter get the same variable.
    """
    program = default_main_program()
    for variable in variables:
        if variable.value is not None and variable.name not in program.variables:
            program.add(variable)
    return tuple(v if v.parameter is None else leaf(v.parameter) for v in variables)


def _left(record: Record) -> Context:
    """Return the values that an eager record (operation computed at once) has kept for its backward pass.

    Raises:
        UsageError: An earlier backward() has used them up.
    """
    if record.context is None:
        raise UsageError(
            f"the graph of {record.output.name!r} was used up by an earlier backward()"
            "; pass retain_graph=True to that one"
        )
    return record.context
