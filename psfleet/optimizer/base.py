"""What every optimizer does: differentiate, clip, push with the current rate, keep its state."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from psfleet.clip import ClipGradBase
from psfleet.errors import ConfigError, UsageError
from psfleet.optimizer import graph, state
from psfleet.optimizer.amp import Shortener
from psfleet.optimizer.arguments import as_documented
from psfleet.optimizer.binding import Seat, as_gradient, tables
from psfleet.optimizer.gradients import Elements, Grad, check_gradient
from psfleet.optimizer.lr.base import LRScheduler, check_rate
from psfleet.optimizer.lr.older import PerUpdate
from psfleet.optimizer.merging import GradientMerger
from psfleet.optimizer.standins import Promised
from psfleet.parameter import Parameter, SparseGrad
from psfleet.pipeline.links import here
from psfleet.regularizer import WeightDecay, as_decay, as_regularizer
from psfleet.rules.base import Rule
from psfleet.tables.spec import Decay

__all__ = ["Older", "Optimizer", "Rate"]

Rate = float | LRScheduler
Floats = NDArray[np.float32]
Pairs = Sequence[tuple[Parameter, Grad]]
T = TypeVar("T", bound="Optimizer")


class Older(TypedDict, total=False):
    """Arguments that the older face of the API names differently, and those shared by all."""

    parameter_list: Iterable[Any] | None
    regularization: WeightDecay | float | None
    multi_precision: bool


class Optimizer:
    """Base of the optimizers. A subclass sets `_rule`.

    The optimizer owns no array: weights and state live in the tables of the active runtime, made at
    the first update. What it does is the same embedded and on a cluster.

    Args:
        learning_rate: A number of at least 0, a schedule from `psfleet.optimizer.lr`, or a variable
            of the program being built, which is then read before each update.
        parameters: The parameters to update; None: those that are passed with their gradients.
        weight_decay: A number (L2), L1Decay or L2Decay; a parameter's own regularizer wins.
        grad_clip: Applied to each worker's gradients before they are sent.
        name: For messages.
        older: `parameter_list` and `regularization` are other names of `parameters` and
            `weight_decay`. `multi_precision`: the state has the float32 masters of float16 and
            bfloat16 parameters. (What is updated is the master in any case.)

    Raises:
        ConfigError: A value is out of range; it is quoted.
    """

    _rule: Rule
    lazy = False  # whether rows of a sparse parameter rest while they have no gradient
    every_row = False  # whether those of a parameter with rows for any id do not

    @as_documented("regularization", "name")
    def __init__(
        self,
        learning_rate: Rate = 0.001,
        parameters: Iterable[Any] | None = None,
        weight_decay: WeightDecay | float | None = None,
        grad_clip: ClipGradBase | None = None,
        name: str | None = None,
        **older: Unpack[Older],
    ) -> None:
        owner = type(self).__name__
        unknown = sorted(set(older) - set(Older.__annotations__))
        if unknown:
            raise TypeError(f"{owner} has no argument {unknown[0]!r}")
        self._name = name or owner
        self._rate = _rate(owner, learning_rate)
        self._parameters = _listed(
            owner,
            _one(owner, "parameters", parameters, "parameter_list", older.get("parameter_list")),
        )
        decay = _one(
            owner, "weight_decay", weight_decay, "regularization", older.get("regularization")
        )
        self.regularization = as_regularizer(decay, owner)
        self._grad_clip = _clip(owner, grad_clip)
        self.multi_precision = bool(older.get("multi_precision", False))
        self._known: dict[str, Parameter] = {}
        self._planned: list[Parameter] = []  # what runs of a program update, in all stages
        self._waiting: dict[str, Any] = {}  # state to set when its parameter is first updated
        self._updates = 0
        self.merger: GradientMerger[Parameter] | None = None
        self.shortener: Shortener | None = None
        self._promise(self._parameters or [], early=False)

    # -- what it is ----------------------------------------------------------------------------

    def rule(self, parameter: Parameter | None = None) -> Rule:
        """The update rule for a parameter; None: for one without exceptions."""
        return self._rule

    def decay(self, parameter: Parameter | None = None) -> Decay:
        """The regularization of a parameter, which the servers add to the gradient."""
        return as_decay(self._regularizer(parameter))

    def _regularizer(self, parameter: Parameter | None) -> WeightDecay | None:
        """A parameter's own regularizer, or else the optimizer's."""
        own = parameter.regularizer if parameter is not None else None
        return self.regularization if own is None else as_regularizer(own, self._name)

    def common(self) -> dict[str, Any]:
        """The arguments that every optimizer takes, to make another one like this."""
        return {
            "learning_rate": self._rate,
            "parameters": self._parameters,
            "weight_decay": self.regularization,
            "grad_clip": self._grad_clip,
            "multi_precision": self.multi_precision,
        }

    def rate_factor(self, parameter: Parameter) -> float:
        """What the rate is multiplied by for this parameter."""
        return parameter.learning_rate

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters that it was given, or else those that it has updated."""
        return list(self._known.values()) if self._parameters is None else list(self._parameters)

    # -- learning rate -------------------------------------------------------------------------

    def get_lr(self) -> float:
        """The learning rate of the next update."""
        return self._rate() if isinstance(self._rate, LRScheduler) else self._rate

    def set_lr(self, value: float) -> None:
        """Set the learning rate.

        Raises:
            UsageError: A schedule decides the rate; replace it with `set_lr_scheduler`.
        """
        if isinstance(self._rate, LRScheduler):
            raise UsageError(
                f"{self._name}: set_lr({value!r}) conflicts with "
                f"{type(self._rate).__name__}, which decides the rate; "
                "use set_lr_scheduler"
            )
        self._rate = check_rate(self._name, value)

    def set_lr_scheduler(self, scheduler: LRScheduler) -> None:
        """Let a schedule decide the rate from now on."""
        if not isinstance(scheduler, LRScheduler):
            raise ConfigError(
                f"{self._name}: scheduler is {scheduler!r}, it must be an LRScheduler"
            )
        self._rate = scheduler

    # -- minimizing ----------------------------------------------------------------------------

    def minimize(
        self,
        loss: Any,
        startup_program: Any = None,
        parameters: Iterable[Any] | None = None,
        no_grad_set: Iterable[Any] | None = None,
        grad_clip: ClipGradBase | None = None,
        *,
        parameter_list: Iterable[Any] | None = None,
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Differentiate the loss and update: at once if it has a value, else in each run.

        Args:
            loss: A variable with one element.
            startup_program: Accepted for the reference's sake: parameters start by themselves.
            parameters: Parameters or names to update; None: all that are trainable.
            no_grad_set: Parameters, variables or names that get no gradient.
            grad_clip: In place of the optimizer's own.
            parameter_list: Another name of `parameters`.

        Returns:
            (optimize_ops, params_grads).
        """
        if grad_clip is not None:
            self._grad_clip = _clip(self._name, grad_clip)
        chosen = _one(self._name, "parameters", parameters, "parameter_list", parameter_list)
        pairs = self.backward(loss, startup_program, chosen, no_grad_set)
        return self.apply_optimize(loss, startup_program, pairs), pairs

    def backward(
        self,
        loss: Any,
        startup_program: Any = None,
        parameter_list: Iterable[Any] | None = None,
        no_grad_set: Iterable[Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[tuple[Any, Any]]:
        """First part of minimize: differentiate.

        Args:
            callbacks: Called with (parameter, gradient) for each pair.

        Returns:
            (parameter, gradient) pairs. Gradients are variables of the program, or arrays if the
            loss has a value.
        """
        chosen = parameter_list
        if chosen is None and self._parameters is not None:
            chosen = graph.depended_on(loss, self._parameters)
        pairs = graph.differentiate(loss, chosen, no_grad_set)
        if not pairs:
            raise UsageError(f"{self._name}: the loss depends on no parameter that may be updated")
        for callback in callbacks or ():
            for parameter, gradient in pairs:
                callback(parameter, gradient)
        return pairs

    def apply_gradients(self, params_grads: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Second part of minimize: clip, regularize and update.

        Args:
            params_grads: (parameter, gradient) pairs: arrays in the parameter's shape or SparseGrad
                which update at once; or variables, which update in each run of the program.

        Returns:
            The update operations added to the program; none if the update was at once.
        """
        return self.apply_optimize(None, None, params_grads)

    def apply_optimize(
        self, loss: Any, startup_program: Any, params_grads: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """As `apply_gradients`; the loss is only shown in the progress display."""
        pairs = [(p, g) for p, g in _pairs(self._name, params_grads) if g is not None]
        if not pairs:
            raise UsageError(f"{self._name}: params_grads has no gradient")
        if graph.symbolic(pairs):
            self._planned = [graph.parameter_of(p) for p, _ in pairs]
            self._promise(self._planned, early=True)
            return [graph.add_update(self, pairs, loss)]
        self._check_whole()
        self.apply_values(pairs, loss=graph.value_of(loss))
        return []

    def append_regularization_ops(
        self,
        parameters_and_grads: Sequence[tuple[Any, Any]],
        regularization: WeightDecay | None = None,
    ) -> list[tuple[Any, Any]]:
        """The pairs with the regularizers' gradients added: arrays or variables.

        `apply_gradients` does this itself, on the servers.
        """
        out = []
        for parameter, gradient in parameters_and_grads:
            chosen = parameter.regularizer or regularization or self.regularization
            chosen = as_regularizer(chosen, self._name)
            out.append((parameter, graph.regularized(parameter, gradient, chosen)))
        return out

    def step(self) -> None:
        """Update the parameters by the gradients that the last backward pass left in `grad`."""
        if self._parameters is None:
            raise UsageError(
                f"{self._name}: step() needs to know the parameters; "
                "pass parameters=[...] to the optimizer"
            )
        self._check_whole()
        pairs = [(p, p.grad) for p in self._parameters if p.trainable and p.grad is not None]
        if pairs:
            self.apply_values(pairs)

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Set the gradients of the parameters to zero, or drop them."""
        for parameter in self.parameters:
            parameter.grad = _zero(parameter.grad) if set_to_zero else None

    clear_gradients = clear_grad

    # -- updating ------------------------------------------------------------------------------

    def apply_values(self, pairs: Pairs, samples: int = 0, loss: float | None = None) -> None:
        """Update by these gradients: the end of one step.

        Args:
            pairs: (parameter, float32 array or SparseGrad).
            samples: How many samples the step has used, for the progress display.
            loss: The step's loss, for the progress display.
        """
        if self.merger is not None:
            merged = self.merger.take(pairs, samples)
            if merged is None:
                return
            pairs, samples = merged
        self._update(pairs, samples, loss)

    def _update(self, pairs: Pairs, samples: int, loss: float | None) -> None:
        strangers = [p for p, _ in pairs if not isinstance(p, Parameter)]
        if strangers:
            raise UsageError(
                f"{self._name}: params_grads has {strangers[0]!r}, which is no parameter"
            )
        checked = [(p, check_gradient(p, g)) for p, g in pairs if p.trainable]
        doubled = len(checked) - len({p.name for p, _ in checked})
        if doubled:
            raise UsageError(
                f"{self._name}: {doubled} parameter(s) come with two gradients in one step"
            )
        home, rate = tables(), self.get_lr()
        seats = [self._seat(p, isinstance(g, SparseGrad)) for p, g in checked]
        if self._grad_clip is not None:
            checked = self._grad_clip(checked)
        gradients = [
            (seat, as_gradient(seat, self._sent(p, g), rate * self.rate_factor(p)))
            for seat, (p, g) in zip(seats, checked, strict=True)
        ]
        if self.shortener is not None:
            gradients = self.shortener.take(gradients)
        home.push(gradients, samples, loss)
        self.advance()

    def _check_whole(self) -> None:
        """Refuse to update at once, in every stage, what only a program can be cut for."""
        if here().processes > 1:
            raise UsageError(
                f"{self._name} updates at once by computed gradients, and this is "
                f"{here().name(here().process)}: stages run programs; build one and minimize() its "
                "loss, or start the job without --stages"
            )

    def shorten(self, shortener: Shortener) -> None:
        """Let gradients travel in 16 bits from now on."""
        self.shortener = shortener

    def _sent(self, parameter: Parameter, grad: Grad) -> Grad | Elements:
        """What is pushed for a gradient. A hook for compression."""
        return grad

    def _seat(self, parameter: Parameter, by_rows: bool = False) -> Seat:
        home = tables()
        known = home.find(self, parameter) is not None
        seat = home.seat(self, parameter, by_rows)
        self._known[parameter.name] = parameter
        if not known and self._waiting:
            state.restore(home, self._name, [seat], self._waiting)
        return seat

    def _promise(self, parameters: Sequence[Parameter], early: bool) -> None:
        """Let the parameters' values come from their tables, which are made when one is needed."""
        promised = Promised(self._seat, early)
        for parameter in parameters:
            parameter.binding = parameter.binding or promised

    def advance(self) -> None:
        """Count an update: schedules that count updates go on. An update here does this itself."""
        self._updates += 1
        if isinstance(self._rate, LRScheduler) and self._rate.steps_itself:
            self._rate.step()

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's whole state, gathered from the tables; empty before the first update.

        Returns:
            `name.slot`: float32 in the parameter's shape, `name.step`: how many updates it has had.
            State that was set and still waits for its parameter's first update is in it as well.
            A parameter with rows for any id has `name.ids` int64 [n] and slots [n, dim].
            `LR_Scheduler` and `global_step` are the schedule's state and the number of updates;
            with multi_precision `master_weights` has the float32 weights by name.
        """
        if not self._updates:
            return dict(self._waiting)
        home = tables()
        if here().processes > 1:
            for (
                parameter
            ) in self._planned:  # other stages have made, and update, the others' tables
                self._seat(parameter)
        home.runtime.flush()
        seats = [seat for p in self._known.values() if (seat := home.find(self, p)) is not None]
        seated = {seat.parameter.name for seat in seats}
        found = {
            key: value
            for key, value in self._waiting.items()
            if "." in key and key.rpartition(".")[0] not in seated
        }
        found |= state.gather(home, seats)
        if self.multi_precision:
            found["master_weights"] = state.masters(home, seats)
        found["global_step"] = self._updates
        if self.shortener is not None:
            found["loss_scaling"] = self.shortener.state_dict()
        if isinstance(self._rate, LRScheduler):
            found["LR_Scheduler"] = self._rate.state_dict()
        return found

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state made by `state_dict()`; weights are not part of it.

        State of a parameter that was not updated yet waits for its first update. On a cluster every
        worker must call it.

        Raises:
            UsageError: An entry is missing. ShapeError: One has another shape. Nothing was changed.
        """
        if not isinstance(state_dict, Mapping):
            raise UsageError(
                f"{self._name}: the state is {state_dict!r}, it must be what state_dict() gave"
            )
        home = tables()
        seats = [home.find(self, p) for p in self._known.values()]
        state.restore(home, self._name, [seat for seat in seats if seat is not None], state_dict)
        self._waiting = dict(state_dict)
        self._updates = int(state_dict.get("global_step", self._updates))
        if self.shortener is not None and "loss_scaling" in state_dict:
            self.shortener.set_state_dict(state_dict["loss_scaling"])
        if isinstance(self._rate, LRScheduler) and "LR_Scheduler" in state_dict:
            self._rate.set_state_dict(state_dict["LR_Scheduler"])

    set_dict = set_state_dict


def _rate(owner: str, value: Any) -> Rate:
    if isinstance(value, LRScheduler):
        return value
    if not graph.is_symbolic(value):
        return check_rate(owner, value)
    read = graph.reader(value)
    return PerUpdate(read(0), lambda updates: check_rate(owner, read(updates)))


def _pairs(owner: str, params_grads: Any) -> list[tuple[Any, Any]]:
    pairs = list(params_grads) if isinstance(params_grads, Iterable) else [params_grads]
    wrong = [pair for pair in pairs if not isinstance(pair, list | tuple) or len(pair) != 2]
    if wrong:
        raise UsageError(
            f"{owner}: params_grads has {wrong[0]!r}; it must be a list of (parameter, gradient)"
        )
    return [(parameter, graph.held_by(gradient)) for parameter, gradient in pairs]


def _clip(owner: str, value: Any) -> ClipGradBase | None:
    if value is not None and not isinstance(value, ClipGradBase):
        raise ConfigError(f"{owner}: grad_clip is {value!r}, it must be a ClipGradBy... or None")
    return value


def _one(owner: str, name: str, value: Any, older: str, older_value: Any) -> Any:
    if value is not None and older_value is not None:
        raise ConfigError(
            f"{owner}: {older}={older_value!r} repeats {name}={value!r}; give one of them"
        )
    return older_value if value is None else value


def _listed(owner: str, parameters: Any) -> list[Parameter] | None:
    if parameters is None:
        return None
    if isinstance(parameters, Parameter | str) or not isinstance(parameters, Iterable):
        raise ConfigError(f"{owner}: parameters is {parameters!r}, it must be a list of parameters")
    listed = [graph.parameter_of(item) for item in parameters]
    wrong = [item for item in listed if not isinstance(item, Parameter)]
    if wrong:
        raise ConfigError(f"{owner}: parameters has {wrong[0]!r}, which is no parameter")
    if not listed:
        raise ConfigError(f"{owner}: parameters is [], it must have at least one parameter")
    return listed


def _zero(grad: Grad | None) -> Grad | None:
    if isinstance(grad, SparseGrad):
        return SparseGrad(np.empty(0, np.int64), np.empty((0, grad.rows.shape[1]), np.float32))
    return None if grad is None else np.zeros_like(grad)
