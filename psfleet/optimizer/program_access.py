"""Access of optimizers to programs and their variables.

Optimizers also accept arrays and SparseGrad, from scripts that never build a program. The functions here
import psfleet.core.graph only when they get a variable, so that such scripts do not load the graph.
Optimizers must not import it elsewhere.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import numpy as np

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.validation.annotations import Must, NonNegative, check
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.parameters.parameter_gradients import densify
from psfleet.core.graph.parameters.table_kind import has_any_id
from psfleet.core.runtime.strategy import AMPSettings
from psfleet.regularizer import L1Decay, WeightDecay


def parameter_of(item: Any) -> Any:
    """Return the parameter of a variable, or any other value unchanged."""
    return getattr(item, "parameter", None) or item


def held_by(item: Any) -> Any:
    """Return the array of an eager variable, or any other value unchanged."""
    value = getattr(item, "value", None)
    return value if isinstance(value, np.ndarray) else item


def value_of(loss: Any) -> float | None:
    """Return the loss as a number, or None if it only gets a value when a program runs."""
    value = getattr(loss, "value", loss)
    return None if value is None else float(np.asarray(value).reshape(-1)[0])


def training_program(trains: bool = False) -> Any:
    """Return the program being built if it updates parameters. Return None otherwise, and in eager mode.

    Args:
        trains: True to return the program also if no update was added to it yet.
    """
    module = sys.modules.get("psfleet.core.graph.program.program")
    if module is None or module.in_eager_mode():
        return None
    program = module.default_main_program()
    return program if program.updates or trains else None


def reader(source: Any) -> Callable[[int], float]:
    """Return a function that returns the present value of `source`, such as a step count or a rate.

    The returned function takes the number of training runs so far, which a program variable may depend on.

    Args:
        source: A number, a function without arguments, or a variable of the program being built.
    """
    if isinstance(source, int | float):
        return lambda runs: source
    if callable(source):
        return lambda runs: float(check("thres_steps", "its value", source(), NonNegative))
    from psfleet.core.graph.execution.executor import Executor
    from psfleet.core.graph.program.program import default_main_program

    if source.value is not None:
        return lambda runs: float(source.numpy().reshape(-1)[0])
    program, executor = default_main_program().clone(for_test=True), Executor()

    def rate(runs: int) -> float:
        program.step = runs
        return float(executor.run(program, fetch_list=[source])[0].reshape(-1)[0])

    return rate


def constant_of(owner: str, name: str, variable: Any) -> float:
    """Return the number of a program variable that has the same value in every run.

    Raises:
        ConfigError: The variable depends on data, parameters or the number of runs.
    """
    from psfleet.core.graph.program.operation import ancestors
    from psfleet.core.graph.program.ops.manipulate import StepCounter

    records = ancestors([variable])
    sources = [source for record in records for source in record.inputs]
    varies = any(source.record is None and source.value is None for source in sources)
    if not records or varies or any(isinstance(record.op, StepCounter) for record in records):
        raise ConfigError(
            f"{owner}: {name} is the variable {variable.name!r}, which is not the same in every run; "
            "only learning_rate may change, give a number or a constant"
        )
    return reader(variable)(0)


def is_variable(item: Any) -> bool:
    """Return whether the value is a variable, of a program or eager."""
    module = sys.modules.get("psfleet.core.graph.program.variable")
    return module is not None and isinstance(item, module.Variable)


AnyVariable = Annotated[Any, Must(is_variable, "a variable")]


def is_symbolic(item: Any) -> bool:
    """Return whether the value is a variable that only has a value while a program runs."""
    return is_variable(item) and item.value is None


def symbolic(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Return whether the gradients are variables of a program rather than arrays.

    Raises:
        UsageError: The list mixes both kinds.
    """
    kinds = {is_symbolic(gradient) for _, gradient in pairs}
    if len(kinds) > 1:
        raise UsageError("params_grads mixes arrays and variables; give one kind")
    return kinds == {True}


def pairs(owner: str, params_grads: Any) -> list[tuple[Any, Any]]:
    """Return checked (parameter, gradient) pairs, with arrays in place of eager variables."""
    entries = list(params_grads) if isinstance(params_grads, Iterable) else [params_grads]
    wrong = [pair for pair in entries if not isinstance(pair, list | tuple) or len(pair) != 2]
    if wrong:
        raise UsageError(
            f"{owner}: params_grads has {wrong[0]!r}; it must be a list of (parameter, gradient)"
        )
    return [(parameter, held_by(gradient)) for parameter, gradient in entries]


def parameters_of(owner: str, entries: Iterable[Any] | None) -> list[Parameter] | None:
    """Return the parameters in a list of parameters or of their variables, or None if `entries` is None."""
    if entries is None:
        return None
    if isinstance(entries, Parameter | str):
        raise ConfigError(f"{owner}: parameters is {entries!r}, it must be a list of parameters")
    parameters = [parameter_of(item) for item in entries]
    wrong = [item for item in parameters if not isinstance(item, Parameter)]
    if wrong:
        raise ConfigError(f"{owner}: parameters has {wrong[0]!r}, which is no parameter")
    if not parameters:
        raise ConfigError(f"{owner}: parameters is [], it must have at least one parameter")
    return parameters


def differentiate(
    loss: Any,
    parameters: Iterable[Any] | None,
    no_grad_set: Iterable[Any] | None,
    candidates: Sequence[Any] | None = None,
    callbacks: Sequence[Callable[..., Any]] | None = None,
) -> list[tuple[Parameter, Any]]:
    """Differentiate a loss, and return (parameter, gradient) pairs. Gradients of an eager loss are arrays.

    Args:
        loss: Loss variable.
        parameters: Parameters, their variables or names. None chooses them by `candidates`.
        no_grad_set: Parameters, variables or names that get no gradient.
        candidates: If `parameters` is None, these parameters get a gradient if the loss depends on them.
            None means all trainable parameters.
        callbacks: Functions to call with (parameter, gradient) for each pair.
    """
    if parameters is None and candidates is not None:
        parameters = depended_on(loss, candidates)
    pairs = _pairs_of(loss, parameters, no_grad_set)
    for callback in callbacks or ():
        for parameter, gradient in pairs:
            callback(parameter, gradient)
    return pairs


def _pairs_of(
    loss: Any, parameters: Iterable[Any] | None, no_grad_set: Iterable[Any] | None
) -> list[tuple[Parameter, Any]]:
    from psfleet.core.graph.program.backward import append_backward, known_names
    from psfleet.core.graph.program.operation import ancestors

    _check_loss(loss)
    if loss.value is None:
        return list(append_backward(loss, parameter_list=parameters, no_grad_set=no_grad_set))
    records = ancestors([loss])
    by_name = {
        v.parameter.name: v.parameter
        for record in records
        for v in record.inputs
        if v.parameter is not None and not v.stop_gradient
    }
    names = {v.name for record in records for v in (*record.inputs, record.output)}
    targets = by_name if parameters is None else known_names(parameters, "parameter_list", names)
    exclusions = known_names(no_grad_set or (), "no_grad_set", names)
    trainable = [
        p
        for name, p in by_name.items()
        if name in targets and name not in exclusions and p.trainable
    ]
    fresh = any(record.context is not None for record in records)
    if fresh and all(_is_zero(p.grad) for p in trainable):  # the script has not called backward()
        loss.backward()
    return [(p, p.grad) for p in trainable if p.grad is not None]


def depended_on(loss: Any, parameters: Sequence[Any]) -> list[Any]:
    """Return those of the given parameters that the loss depends on."""
    from psfleet.core.graph.program.operation import ancestors

    _check_loss(loss)
    names = {v.name for record in ancestors([loss]) for v in record.inputs}
    return [item for item in parameters if name_of(item) in names]


def _check_loss(loss: Any) -> None:
    from psfleet.core.graph.program.variable import Variable

    if not isinstance(loss, Variable):
        raise UsageError(f"the loss is {loss!r}; it must be a variable made by layers")


def _is_zero(grad: Any) -> bool:
    return grad is None or not np.any(grad.rows if isinstance(grad, SparseGrad) else grad)


def name_of(item: Any) -> str:
    """Return the name of a parameter or variable, or a string unchanged."""
    return item if isinstance(item, str) else str(item.name)


def add_update(optimizer: Any, pairs: Sequence[tuple[Any, Any]], loss: Any) -> Any:
    """Add an update with these gradient variables to the end of each run of the program."""
    from psfleet.core.graph.program.program import default_main_program

    program = default_main_program()
    if any(u.optimizer is optimizer and u.loss is loss is not None for u in program.updates):
        raise UsageError(
            f"this optimizer minimizes the loss {loss.name!r} already; each run would train twice: call "
            "minimize(loss) once, and exe.run for every step"
        )
    wrong = [p for p, _ in pairs if not isinstance(parameter_of(p), Parameter)]
    if wrong:
        raise UsageError(f"params_grads has {wrong[0]!r} where a parameter is expected")
    return program.add_update(
        optimizer, [(parameter_of(p), gradient) for p, gradient in pairs], loss
    )


def set_products(settings: AMPSettings) -> None:
    """Make training runs of the default program multiply matrices in the precision of the strategy's part
    amp."""
    from psfleet.core.graph.program.ops.matmul import products_under
    from psfleet.core.graph.program.program import default_main_program

    default_main_program().products = products_under(settings)


def regularized(parameter: Parameter, gradient: Any, regularizer: WeightDecay | None) -> Any:
    """Return the gradient plus the gradient of the regularizer: an array for an array or SparseGrad, and a
    variable for a variable.
    """
    if regularizer is None or gradient is None:
        return gradient
    if has_any_id(parameter):
        raise UsageError(
            f"append_regularization_ops: parameter {parameter.name!r} has rows for any id, and no array of "
            "them; apply_gradients lets the servers regularize its rows"
        )
    gradient = held_by(gradient)
    if isinstance(gradient, SparseGrad):
        gradient = densify(parameter, gradient)
    if isinstance(gradient, np.ndarray):
        return gradient + regularizer.gradient(np.asarray(parameter.numpy(), np.float32))
    from psfleet.core.graph.program.ops.arithmetic import Sign
    from psfleet.core.graph.program.variable import apply, leaf

    weights = leaf(parameter)
    if isinstance(regularizer, L1Decay):
        weights = apply(Sign(), weights)
    return gradient + weights * regularizer.coeff
