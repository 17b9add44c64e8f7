"""Backward passes of programs: adds the gradients of a loss to a program as variables.

`append_backward` makes no records of operations. It makes a variable for each gradient, which refers to a
`Backward`. If a run needs such a variable, it goes back through the records of the loss (`run.py`). So
gradients are computed only if they are fetched or an optimizer's update uses them. Gradients of gradients
are not available.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.core.base.validation.annotations import checked
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program.operation import Record, ancestors
from psfleet.core.graph.program.program import default_main_program
from psfleet.core.graph.program.variable import Variable, leaf


@dataclass(frozen=True)
class Automatic:
    """Setting of recomputation: the first run chooses the checkpoints, from times and sizes that it measures.

    Checkpoints are the variables whose values are kept. Activations between them are computed again in the
    backward pass.

    Attributes:
        budget: Bytes that activations may take. With None it is the number of bytes that they would take with
            a checkpoint after every sqrt(n) operations.
    """

    budget: int | None = None


@dataclass(eq=False)
class Backward:
    """Backward pass from a loss, as the script declared it.

    Attributes:
        loss: Variable to start from.
        gradients: For each leaf variable (parameter or data), the variable that represents its gradient.
        blocked: Names of variables through which no gradient flows.
        checkpoints: Variables whose values are kept. Activations between them are dropped and computed again.
            None keeps all activations.
        pipeline: PipelineSpec (`pipeline/cutting.py`) for running the program in stages and micro-batches, or
            None to run it as a whole.
    """

    loss: Variable
    gradients: dict[Variable, Variable]
    blocked: frozenset[str] = frozenset()
    checkpoints: "list[Variable] | Automatic | None" = None
    pipeline: Any = None

    def active(self) -> tuple[list[Record], set[Variable]]:
        """Return the records (uses of operations) that gradients flow through, and their variables.

        The records are in forward order.
        """
        variables = set(self.gradients)
        records = []
        for record in ancestors([self.loss]):
            output = record.output
            if output.stop_gradient or output.name in self.blocked:
                continue
            if any(v in variables for v in record.inputs):
                variables.add(output)
                records.append(record)
        return records, variables


@checked
def append_backward(
    loss: Variable,
    parameter_list: Iterable[Any] | None = None,
    no_grad_set: Iterable[Any] | None = None,
    callbacks: Sequence[Callable[..., Any]] | None = None,
    checkpoints: Sequence[Parameter | Variable | str] | Automatic | None = None,
) -> list[tuple[Parameter, Variable]]:
    """Add the gradients of a loss with respect to its parameters to the default program.

        pairs = append_backward(loss)
        [gradient] = exe.run(feed=feed, fetch_list=[pairs[0][1]])

    Args:
        loss: Symbolic variable with a single value.
        parameter_list: Parameters, their variables or names, or None for all that are trainable.
        no_grad_set: Parameters to leave out, and variables through which no gradient flows.
        callbacks: Functions to call with every parameter and the variable of its gradient.
        checkpoints: Variables to keep (or names of variables or layers). Values between them are computed
            again in the backward pass. With `Automatic(budget)` the first run chooses the checkpoints.

    Returns:
        Pairs of a parameter and the variable of its gradient, in the order in which the program first uses
        the parameters. A gradient can be fetched, used in further operations, and passed to an update. Its
        value is an array, or a SparseGrad for a sparse parameter.

    Raises:
        UsageError: The loss depends on none of the parameters, or on a gradient.
        ShapeError: The loss is not a single value.
    """
    if loss.value is not None:
        raise UsageError(f"{loss.name!r} has a value already; call its backward()")
    if loss.shape not in ((), (1,)):
        raise ShapeError(
            f"the loss {loss.name!r} has shape {loss.shape}; it must be a single "
            "value, for example layers.mean of it"
        )
    variables = _parameters_of(loss)
    blocked = frozenset(known_names(() if no_grad_set is None else no_grad_set, "no_grad_set"))
    names = variables if parameter_list is None else known_names(parameter_list, "parameter_list")
    leaves = [
        variables[name]
        for name in dict.fromkeys(names)
        if name in variables and name not in blocked and not variables[name].stop_gradient
    ]
    if not leaves:
        raise UsageError(f"the loss {loss.name!r} depends on no parameter that may be updated")
    backward = _make(loss, leaves, checkpoints, blocked)
    pairs = [(v.parameter, gradient) for v, gradient in backward.gradients.items() if v.parameter]
    for callback in callbacks or ():
        for parameter, variable in pairs:
            callback(parameter, variable)
    return pairs


@checked
def gradients(
    targets: Variable | Sequence[Variable], inputs: Variable | Sequence[Variable]
) -> list[Variable]:
    """Add the gradients of a target to the default program, and return their variables.

        [gradient] = gradients(loss, x)

    Args:
        targets: Variable with a single value, or a list of one such variable.
        inputs: Variables to differentiate by: parameters or data, but not results of operations.

    Raises:
        UsageError: The number of targets is not 1, or an input is computed by the program.
    """
    losses = [targets] if isinstance(targets, Variable) else list(targets)
    if len(losses) != 1:
        raise UsageError(f"gradients() got {len(losses)} targets; give it one, such as their sum")
    leaves = [inputs] if isinstance(inputs, Variable) else list(inputs)
    for variable in leaves:
        if variable.record is not None:
            raise UsageError(
                f"{variable.name!r} is computed by the program; gradients() takes "
                "data and parameters"
            )
    return list(_make(losses[0], leaves, None).gradients.values())


def check_checkpoints(checkpoints: Any) -> None:
    """Check that an argument is a list of checkpoints (variables to keep for the backward pass) or Automatic.

    Raises:
        UsageError: The argument is neither, such as a single name.
    """
    if isinstance(checkpoints, str) or not isinstance(checkpoints, Sequence | Automatic):
        raise UsageError(f"checkpoints is {checkpoints!r}; it must be a list of variables or names")


def _make(
    loss: Variable,
    leaves: list[Variable],
    checkpoints: Sequence[Parameter | Variable | str] | Automatic | None,
    blocked: frozenset[str] = frozenset(),
) -> Backward:
    program = default_main_program()
    gradients: dict[Variable, Variable] = {}
    backward = Backward(loss, gradients, blocked)
    for variable in leaves:
        name, number = f"{variable.name}@GRAD", 0
        while name in program.variables:
            number += 1
            name = f"{variable.name}@GRAD@{number}"
        gradient = Variable(name, variable.shape, variable.dtype, stop_gradient=True)
        gradient.backward_pass = backward
        gradients[variable] = gradient
        program.add(gradient)
    if isinstance(checkpoints, Automatic):
        backward.checkpoints = checkpoints
    elif checkpoints is not None:
        check_checkpoints(checkpoints)
        backward.checkpoints = [known_variable(entry, "checkpoint") for entry in checkpoints]
    return backward


def known_variable(entry: Any, what: str) -> Variable:
    """Return a variable of the default program that a user has named.

    Args:
        entry: The variable, its parameter, its name, or the name of a layer for the layer's last result.
        what: Noun for messages, such as "checkpoint".

    Raises:
        UsageError: The program has no such variable.
    """
    program = default_main_program()
    if isinstance(entry, Variable):
        return entry
    if isinstance(entry, Parameter):
        return leaf(entry)
    if not isinstance(entry, str):
        raise UsageError(f"{what} {entry!r} is neither a variable nor the name of one")
    results = [v for name, v in program.variables.items() if name.startswith(f"{entry}.tmp_")]
    if entry not in program.variables and results:
        return results[-1]
    return program.variable(entry, what)


def _parameters_of(loss: Variable) -> dict[str, Variable]:
    parameters: dict[str, Variable] = {}
    for record in ancestors([loss]):
        for variable in record.inputs:
            if variable.backward_pass is not None:
                raise UsageError(
                    f"the loss {loss.name!r} depends on the gradient "
                    f"{variable.name!r}; second derivatives are not available"
                )
            if variable.parameter is not None:
                leaf(variable.parameter)
                parameters.setdefault(variable.parameter.name, variable)
    return parameters


def known_names(
    entries: Iterable[Any], owner: str, vocabulary: Container[str] | None = None
) -> list[str]:
    """Return the names in a list that a user has passed, which may hold variables, parameters or names.

    Args:
        owner: Argument that the list was passed as, for messages.
        vocabulary: Names that are allowed as text, or None for the names of the default program.

    Raises:
        UsageError: The list is a single text, or an entry has no name or an unknown one.
    """
    if isinstance(entries, str) or not isinstance(entries, Iterable):
        raise UsageError(f"{owner} is {entries!r}; it must be a list of parameters or their names")
    names = []
    for entry in entries:
        if not isinstance(entry, str) and not hasattr(entry, "name"):
            raise UsageError(f"{owner} has {entry!r}; it must hold parameters or their names")
        if isinstance(entry, str) and vocabulary is None:
            default_main_program().variable(entry, owner)
        elif isinstance(entry, str) and vocabulary is not None and entry not in vocabulary:
            raise UsageError(f"{owner} has {entry!r}, which the loss does not depend on")
        names.append(entry if isinstance(entry, str) else str(entry.name))
    return names
