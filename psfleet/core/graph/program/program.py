"""Programs: the records that a script has made, and which program is being built."""

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


_eager = False


@dataclass(frozen=True)
class Update:
    """Update by an optimizer after each run: `optimizer.apply_values` with these gradients."""

    optimizer: Any
    params_grads: "list[tuple[Parameter, Variable]]"
    loss: "Variable | None"


@dataclass(eq=False)
class Program:
    """Records in the order in which they were made; running them is the Executor's part.

    Records are never changed, so programs share them and a clone costs nothing.

    Attributes:
        records, variables: The graph, and its variables by name.
        parameters: The parameters made while this was the startup program, by name. Programs that
            are built under one startup program share parameters of one name.
        updates: Updates by optimizers after a run.
        after_step: Called after each run that has updated, with the number of steps done.
        random_seed: Seed of initial values and dropout masks.
        for_test: Dropout is off and nothing is updated.
        step: Runs done so far in training.
        memory: State that operations such as auc keep from one run to the next, by variable name.
        observed: Statistics that operations such as batch_norm have seen in this run, by variable
            name: (parameter, momentum, value) of each moving average. A run that updates takes it.
        products: Way in which runs in training multiply matrices.
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
        """Take in a variable and the record that makes it."""
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
        """Let each run of this program end with `optimizer.apply_values`.

        Args:
            optimizer: Has `apply_values(values, samples=, loss=)`, where `values` is a list of
                (Parameter, array or SparseGrad).
            params_grads: Gradient variables from `append_backward`, or computed from those.
            loss: Its value goes to `apply_values` for the progress display.
        """
        update = Update(optimizer, list(params_grads), loss)
        self.updates.append(update)
        self.touch()
        return update

    def take_observed(self) -> list[tuple[Parameter, float, Any]]:
        """Take the values that the run has observed; they are then forgotten."""
        averages = [entry for entries in self.observed.values() for entry in entries]
        self.observed.clear()
        return averages

    def touch(self) -> None:
        """Forget how to run: the program has changed."""
        self.version = next(_numbers)

    @checked
    def clone(self, for_test: bool = False) -> "Program":
        """The same records and parameters. `for_test`: dropout off, no update."""
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
        """The variable of that name.

        Raises:
            UsageError: There is none.
        """
        variable = self.variables.get(name)
        if variable is None:
            raise UsageError(
                f"{what} {name!r} is not in the program; it has "
                f"{', '.join(sorted(self.variables)) or 'no variables'}"
            )
        return variable

    def all_parameters(self) -> list[Parameter]:
        """The parameters that the program's records use, in the order of their first use."""
        parameters = {
            variable.parameter.name: variable.parameter
            for record in self.records
            for variable in record.inputs
            if variable.parameter is not None
        }
        return list(parameters.values())

    def list_vars(self) -> "list[Variable]":
        """All variables, in the order in which they were made."""
        return list(self.variables.values())

    def global_block(self) -> "Program":
        """The program itself: it has one block."""
        return self

    @checked
    def var(self, name: str) -> "Variable":
        """The variable of that name, as the reference's blocks give it."""
        return self.variable(name)

    def backwards(self) -> "list[Backward]":
        """The backward passes that the updates ask for."""
        passes = {
            variable.backward_pass: None
            for update in self.updates
            for _, variable in update.params_grads
            if variable.backward_pass is not None
        }
        return list(passes)

    @checked
    def to_string(self, throw_on_error: bool = False, with_details: bool = False) -> str:
        """The records, one a line."""
        return "\n".join(repr(record) for record in self.records)

    def __str__(self) -> str:
        return self.to_string()


_main = Program()
_startup = Program()


def default_main_program() -> Program:
    """The program that layers are added to."""
    return _main


def default_startup_program() -> Program:
    """The program that parameters are made in."""
    return _startup


def renew() -> None:
    """Begin with empty default programs."""
    global _main, _startup
    _main, _startup = Program(), Program()


@contextlib.contextmanager
@checked
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    """Build into these programs inside the block."""
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
    """Return whether operations without a concrete or a symbolic input compute at once."""
    return _eager


@contextlib.contextmanager
def eager_guard(eager: bool = True) -> Iterator[None]:
    """Compute at once (or not) inside the block."""
    global _eager
    before, _eager = _eager, eager
    try:
        yield
    finally:
        _eager = before
