"""Backward passes of programs: which gradients a run is to compute."""

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
    """Checkpoints chosen at the first run, from what that run measures.

    Attributes:
        budget: Bytes that activations may take; None: what cuts at every sqrt(n)-th operation take.
    """

    budget: int | None = None


@dataclass(eq=False)
class Backward:
    """One pass back from a loss.

    Attributes:
        gradients: By leaf variable, the variable that stands for its gradient.
        blocked: Names of variables through which no gradient flows.
        checkpoints: Activations between these are dropped and computed again; None: all are kept.
        pipeline: psfleet.core.graph.program.pipeline.cutting.PipelineSpec: run in micro-batches by stages;
            None: whole.
    """

    loss: Variable
    gradients: dict[Variable, Variable]
    blocked: frozenset[str] = frozenset()
    checkpoints: "list[Variable] | Automatic | None" = None
    pipeline: Any = None

    def active(self) -> tuple[list[Record], set[Variable]]:
        """The records that gradients go through, in order, and the variables that get one."""
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
    """Gradients of a loss by the parameters it depends on.

    Args:
        loss: Symbolic, a single value.
        parameter_list: Parameters, their variables or names; None: all that are trainable.
        no_grad_set: Parameters to leave out, and variables through which no gradient flows.
        callbacks: Each is called with every (parameter, gradient variable).
        checkpoints: Variables (or names of variables or layers) to keep; what lies between them is
            computed again in the backward pass. Automatic(budget): the first run chooses.

    Returns:
        (parameter, variable of its gradient), in the order in which the parameters were first used.
        A gradient can be fetched, computed with, and given to an update. It has a value once the
        backward pass has run; that of a sparse parameter is a SparseGrad.

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
    """Gradients of one single-valued target by leaf variables: parameters or data.

    Raises:
        UsageError: There is not one target, or an input is computed by the program.
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
    """Refuse what is no list of checkpoints, such as a single name.

    Raises:
        UsageError: It is none.
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
    """A variable of the default program, by itself, by its name or by its layer's name.

    Args:
        entry: Or a parameter, for the variable that stands for it.
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
    """The names of variables, parameters or names; a name must be one of the `vocabulary`.

    Args:
        vocabulary: None: the names of the default program.

    Raises:
        UsageError: It is one text and no list, or an entry has no name or an unknown one.
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
