"""Programs: lists of the records that a script has made, and the default programs that layers add to.

As in the reference framework, a script builds two programs at a time. The main program gets the records of
layers. The startup program holds only the parameters, so programs built under the same startup program share
them. `program_guard` changes both for a block. The default programs are the same for all threads of the
process, so build programs in one thread only.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from psfleet.core.base.errors import UsageError
from psfleet.core.base.validation.annotations import checked
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program.operation import Record
from psfleet.core.graph.program.ops.matmul import FLOAT32, MatrixProducts

if TYPE_CHECKING:
    from psfleet.core.graph.program.backward import Backward
    from psfleet.core.graph.program.variable import Variable

_numbers = itertools.count()


_eager = False  # eager mode, as `eager_guard` sets it


@dataclass(frozen=True)
class Update:
    """Update that an optimizer makes after each run of a program, by `optimizer.apply_values`.

    Attributes:
        optimizer: Optimizer that gets the gradients.
        loss: Variable whose value is reported with the update, or None.
    """

    optimizer: Any
    params_grads: "list[tuple[Parameter, Variable]]"
    loss: "Variable | None"


@dataclass(eq=False)
class Program:
    """Graph of operations, as a list of records in the order in which the script made them.

        main = Program()
        with program_guard(main):
            y = layers.fc(layers.data("x", [4]), 1)
        [value] = Executor().run(main, {"x": x}, [y])

    Records are never changed. So programs share them, and a clone copies only the lists.

    Attributes:
        records, variables: Records of the graph, and its variables by name.
        parameters: Parameters made while this was the startup program, by name. Programs built under the same
            startup program share parameters of the same name.
        updates: Updates that optimizers make after a run.
        after_step: Functions to call after each run with an update, with the number of steps so far.
        random_seed: Seed of initial values and dropout masks.
        for_test: True if dropout is off and nothing is updated.
        step: Number of runs and of eager backward passes so far, with or without updates. Tests do not count:
            runs of a program that is `for_test`, or that shows averages in place of its weights.
        memory: State that operations such as auc keep from one run to the next, by variable name.
        observed: Statistics that operations such as batch_norm have stored in this run, by variable name: for
            each moving average (parameter, momentum, value). An update uses and clears them.
        products: Implementation of matrix products in training runs.
        version: Number that changes with each change of the program. Executors compare it to recognize an
            outdated plan.
    """

    records: list[Record] = field(default_factory=list)
    variables: "dict[str, Variable]" = field(default_factory=dict)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    updates: list[Update] = field(default_factory=list)
    after_step: list[Callable[[int], None]] = field(default_factory=list)
    random_seed: int = 0
    for_test: bool = False
    step: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    observed: dict[str, list[tuple[Parameter, float, Any]]] = field(default_factory=dict)
    products: MatrixProducts = FLOAT32
    version: int = field(default_factory=lambda: next(_numbers))

    def add(self, variable: "Variable") -> None:
        """Add a variable, and the record that computes it, if any.

        Raises:
            UsageError: Another variable has this name.
        """
        if self.variables.get(variable.name) not in (None, variable):
            raise UsageError(
                f"the program has a variable {variable.name!r} already; give this one "
                "another name, build in a new program (program_guard), or, to run a cell of a "
                "notebook again, begin it with psfleet.reset()"
            )
        self.variables[variable.name] = variable
        if variable.record is not None:
            self.records.append(variable.record)
        self.touch()

    def add_update(
        self,
        optimizer: Any,
        params_grads: "list[tuple[Parameter, Variable]]",
        loss: "Variable | None" = None,
    ) -> Update:
        """Make each run of this program end with a call of `optimizer.apply_values`.

        Args:
            optimizer: Object with `apply_values(values, samples=, loss=)`, where `values` is a list of
                (Parameter, array or SparseGrad).
            params_grads: Parameters with the gradient variables from `append_backward`, or with variables
                computed from these.
            loss: Variable whose value `apply_values` gets for the progress display.
        """
        update = Update(optimizer, list(params_grads), loss)
        self.updates.append(update)
        self.touch()
        return update

    def take_observed(self) -> list[tuple[Parameter, float, Any]]:
        """Return the statistics that operations have stored in this run, and clear them.

        Each is a triple: the parameter that is a moving average, its momentum, and the value to add to it.
        """
        averages = [entry for entries in self.observed.values() for entry in entries]
        self.observed.clear()
        return averages

    def touch(self) -> None:
        """Mark the program as changed, so that executors make new plans."""
        self.version = next(_numbers)

    @checked
    def clone(self, for_test: bool = False) -> "Program":
        """Copy the program. The copy shares records and parameters with this program, but no state of runs.

            test = main.clone(for_test=True)

        Args:
            for_test: True for a copy that only evaluates: without dropout and updates, in float32.
        """
        return Program(
            list(self.records),
            dict(self.variables),
            dict(self.parameters),
            [] if for_test else list(self.updates),
            [] if for_test else list(self.after_step),
            self.random_seed,
            for_test or self.for_test,
            products=FLOAT32 if for_test else self.products,
        )

    def variable(self, name: str, what: str = "variable") -> "Variable":
        """Return the variable with this name.

        Raises:
            UsageError: No variable has this name. The message calls the variable `what`.
        """
        variable = self.variables.get(name)
        if variable is None:
            raise UsageError(
                f"{what} {name!r} is not in the program; it has "
                f"{', '.join(sorted(self.variables)) or 'no variables'}"
            )
        return variable

    def all_parameters(self) -> list[Parameter]:
        """Return the parameters that the program's records use, in the order of their first use."""
        parameters = {
            variable.parameter.name: variable.parameter
            for record in self.records
            for variable in record.inputs
            if variable.parameter is not None
        }
        return list(parameters.values())

    def list_vars(self) -> "list[Variable]":
        """Return all variables, in the order in which they were made."""
        return list(self.variables.values())

    def global_block(self) -> "Program":
        """Return the program itself.

        In the reference framework a program consists of blocks. Here the program itself is its only block.
        """
        return self

    @checked
    def var(self, name: str) -> "Variable":
        """Return the variable with this name, as the method of blocks in the reference framework does."""
        return self.variable(name)

    def backwards(self) -> "list[Backward]":
        """Return the backward passes that the program's updates need."""
        passes = {
            variable.backward_pass: None
            for update in self.updates
            for _, variable in update.params_grads
            if variable.backward_pass is not None
        }
        return list(passes)

    @checked
    def to_string(self, throw_on_error: bool = False, with_details: bool = False) -> str:
        """Return the records as text, one per line. The arguments have no effect."""
        return "\n".join(repr(record) for record in self.records)

    def __str__(self) -> str:
        return self.to_string()


_main = Program()
_startup = Program()


def default_main_program() -> Program:
    """Return the program that layers add their records to."""
    return _main


def default_startup_program() -> Program:
    """Return the program that new parameters are added to."""
    return _startup


def renew() -> None:
    """Replace the default programs with empty ones."""
    global _main, _startup
    _main, _startup = Program(), Program()


@contextlib.contextmanager
@checked
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    """Make these programs the default programs within the block.

        with program_guard(Program(), Program()):
            y = layers.fc(layers.data("x", [4]), 1)

    Args:
        main_program: Program that gets the records of layers.
        startup_program: Program that gets new parameters, or None for the present one.
    """
    global _main, _startup
    for program in (main_program, startup_program):
        if not isinstance(program, Program | None):
            raise UsageError(f"program_guard needs programs; it got {program!r}")
    before = _main, _startup
    _main, _startup = main_program, startup_program or _startup
    try:
        yield
    finally:
        _main, _startup = before


def in_eager_mode() -> bool:
    """Return whether eager mode is on.

    In eager mode, an operation whose inputs are all parameters is computed at once; otherwise it becomes a
    part of the program. (Operations on values that are known already are always computed at once.)
    """
    return _eager


@contextlib.contextmanager
def eager_guard(eager: bool = True) -> Iterator[None]:
    """Switch eager mode on or off within the block."""
    global _eager
    before, _eager = _eager, eager
    try:
        yield
    finally:
        _eager = before
