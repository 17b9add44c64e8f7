"""Base class of all optimizers: differentiates a loss, clips the gradients and pushes them with the current
rate.

The update rule itself runs where the tables are: in the servers, or in this process without a cluster. An
optimizer chooses the parameters, the rule, the rate and the clip, and counts the updates. Its state, such
as moments, is stored in the tables and read when a script calls `state_dict()`
(`psfleet.optimizer.optimizer_state`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.validation.annotations import Must, NonNegative, check, checked
from psfleet.core.engine.gradients import Grad, SparseElements, SparseGrad, zeroed
from psfleet.core.engine.rules.rule import Rule
from psfleet.core.engine.schema.table import DecaySpec
from psfleet.core.graph.parameters.binding import BoundTable, as_gradient, tables
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.parameters.parameter_gradients import check_gradient
from psfleet.core.graph.parameters.table_kind import LazyBinding
from psfleet.core.runtime.stages import here
from psfleet.optimizer import program_access
from psfleet.optimizer.arguments import as_documented
from psfleet.optimizer.clip import ClipGradBase, clip_by_own
from psfleet.optimizer.lr.scheduler import LRScheduler
from psfleet.optimizer.lr.update_counted import PerUpdateSchedule
from psfleet.optimizer.optimizer_state import StatefulOptimizer, restore
from psfleet.optimizer.outgoing_gradients import GradientScaler
from psfleet.regularizer import WeightDecay, as_decay, as_regularizer

Rate = NonNegative | LRScheduler | Annotated[Any, Must(program_access.is_symbolic, "a variable")]
Floats = NDArray[np.float32]
Pairs = Sequence[tuple[Parameter, Grad]]
T = TypeVar("T", bound="Optimizer")


class LegacyArguments(TypedDict, total=False):
    """Older names of constructor arguments, and arguments that every optimizer accepts by name only."""

    parameter_list: Iterable[Any] | None
    regularization: WeightDecay | float | None
    multi_precision: bool


class Optimizer(StatefulOptimizer):
    """Base of the optimizers. A subclass sets `_rule`.

        optimizer = Adam(0.001)
        optimizer.minimize(loss)

    An optimizer has no arrays. Weights and state are stored in tables, on the servers or without a cluster
    in this process, which are created at the first update. A script gives the same results in both cases.

    Args:
        learning_rate: A number of at least 0, a schedule from `psfleet.optimizer.lr`, or a variable of the
            program being built. A variable is read before each update.
        parameters: Parameters to update. None means all parameters that are passed with gradients. May also
            be a list of groups, such as `[{"params": [w], "learning_rate": 0.1}]`. A group is a dict with
            `params` and settings for these parameters: `weight_decay`, `grad_clip`, hyperparameters of the
            rule, and `learning_rate`, which is a factor on the optimizer's rate. Each group's gradients are
            clipped separately, as in Paddle.
        weight_decay: A number (L2), L1Decay or L2Decay. A parameter's own regularizer overrides it.
        grad_clip: Clip that each worker applies to its gradients before it sends them.
        name: Name in error messages, or None for the name of the class.
        older: `parameter_list` and `regularization` are older names of `parameters` and `weight_decay`.
            With `multi_precision=True`, `state_dict` includes the float32 weights of float16 and bfloat16
            parameters. (Updates are always computed with these float32 weights.)

    Raises:
        ConfigError: A value is out of range. The message quotes the value.
    """

    _rule: Rule
    factor = 1.0  # factor on the learning rate, for the parameters of a group
    lazy = (
        False  # True if an update only changes the rows of a sparse parameter that have a gradient
    )
    every_row = (
        False  # True if an update changes all rows, also of a parameter whose rows may have any id
    )
    streams_evictions = False  # True if the tables must report the rows that they evict
    works_on_worker = (
        False  # True if part of the update runs on the worker, so that a direct push would skip it
    )

    @as_documented("regularization", "name")
    def __init__(
        self,
        learning_rate: Rate = 0.001,
        parameters: Iterable[Any] | None = None,
        weight_decay: WeightDecay | float | None = None,
        grad_clip: ClipGradBase | None = None,
        name: str | None = None,
        **older: Unpack[LegacyArguments],
    ) -> None:
        owner = type(self).__name__
        super().__init__(
            name or owner, _rate(owner, learning_rate), older.get("multi_precision", False)
        )
        self._parameters = program_access.parameters_of(
            owner,
            _one(owner, "parameters", parameters, "parameter_list", older.get("parameter_list")),
        )
        decay = _one(
            owner, "weight_decay", weight_decay, "regularization", older.get("regularization")
        )
        self.regularization = as_regularizer(decay, owner)
        self._grad_clip = grad_clip
        self._lenders: dict[str, Optimizer] = {}  # optimizer of its group, by name of a parameter
        self._promise(self._parameters or [], early=False)

    def rule(self, parameter: Parameter | None = None) -> Rule:
        """Return the update rule for a parameter, or the rule without regard to a parameter if None."""
        return self._rule

    def decay(self, parameter: Parameter | None = None) -> DecaySpec:
        """Return the weight decay that the servers add to a parameter's gradient."""
        return as_decay(self._regularizer(parameter))

    def _regularizer(self, parameter: Parameter | None) -> WeightDecay | None:
        """Return the parameter's own regularizer or, if it has none, the optimizer's."""
        own_regularizer = parameter.regularizer if parameter is not None else None
        return (
            self.regularization
            if own_regularizer is None
            else as_regularizer(own_regularizer, self._name)
        )

    def common(self) -> dict[str, Any]:
        """Return the arguments that every optimizer takes, with this optimizer's values, by name."""
        return {
            "learning_rate": self._rate,
            "parameters": self._parameters,
            "weight_decay": self.regularization,
            "grad_clip": self._grad_clip,
            "multi_precision": self.multi_precision,
        }

    def rate_factor(self, parameter: Parameter) -> float:
        """Return the factor on the learning rate for this parameter."""
        return self.factor * parameter.learning_rate

    def lend(self, lender: "Optimizer", parameters: Iterable[Any]) -> None:
        """Use the rule, decay, rate factor and clip of another optimizer for some parameters.

        Args:
            lender: Optimizer whose settings to use.
            parameters: Parameters of the group.

        Raises:
            ConfigError: A parameter is in another group already.
        """
        for parameter in program_access.parameters_of(self._name, parameters) or []:
            if parameter.name in self._lenders:
                raise ConfigError(
                    f"{self._name}: {parameter!r} is in two groups of parameters; each must be in one"
                )
            self._lenders[parameter.name] = lender

    @property
    def grouped(self) -> bool:
        """True if parameter groups were passed to the constructor."""
        return bool(self._lenders)

    def clip_by(self, clip: ClipGradBase) -> None:
        """Use this clip from now on."""
        for optimizer in (self, *self._lenders.values()):
            optimizer._grad_clip = clip

    def lender(self, parameter: Parameter) -> "Optimizer":
        """Return the optimizer whose settings apply to a parameter: the optimizer of the parameter or of its
        group if there is one, else this optimizer.
        """
        return parameter.optimizer or self._lenders.get(parameter.name, self)

    def _rate_of(self, parameter: Parameter, rate: float) -> float:
        lender = self.lender(parameter)
        base = rate if parameter.optimizer is None else lender.get_lr()
        return base * lender.rate_factor(parameter)

    @property
    def parameters(self) -> list[Parameter]:
        """Parameters passed to the constructor or, if none were passed, all parameters updated so far."""
        return list(self._known.values()) if self._parameters is None else list(self._parameters)

    def get_lr(self) -> float:
        """Return the learning rate of the next update."""
        return self._rate.last_lr if isinstance(self._rate, LRScheduler) else self._rate

    def current_step_lr(self) -> float:
        """Return the learning rate of the last update. Before the first update, return that of the next
        one."""
        return self.get_lr() if self._last_rate is None else self._last_rate

    @checked
    def set_lr(self, value: NonNegative) -> None:
        """Set the learning rate.

        Raises:
            UsageError: A schedule determines the rate. Replace the schedule with `set_lr_scheduler`.
        """
        if isinstance(self._rate, LRScheduler):
            raise UsageError(
                f"{self._name}: set_lr({value!r}) conflicts with {type(self._rate).__name__}, "
                "which decides the rate; use set_lr_scheduler"
            )
        self._rate = float(value)
        self._last_rate = None

    @checked
    def set_lr_scheduler(self, scheduler: LRScheduler) -> None:
        """Use the learning rate of a schedule from now on."""
        self._rate = scheduler
        self._last_rate = None

    @checked
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
        """Differentiate the loss and update the parameters.

            optimizer.minimize(loss)

        In eager mode the update happens at once. While a program is built, it happens in each run of the
        program.

        Args:
            loss: A variable with one element.
            startup_program: Accepted for Paddle scripts. Parameters initialize themselves.
            parameters: Parameters or names to update. None means all trainable parameters.
            no_grad_set: Parameters, variables or names that get no gradient.
            grad_clip: Clip that replaces the optimizer's clip from now on, or None to keep it.
            parameter_list: Older name of `parameters`.

        Returns:
            The operations that were added to the program, and (parameter, gradient) pairs.
        """
        targets = _one(self._name, "parameters", parameters, "parameter_list", parameter_list)
        pairs = self.backward(loss, startup_program, targets, no_grad_set)
        if grad_clip is not None:
            self.clip_by(grad_clip)
        return self.apply_optimize(loss, startup_program, pairs), pairs

    @checked
    def backward(
        self,
        loss: Any,
        startup_program: Any = None,
        parameter_list: Iterable[Any] | None = None,
        no_grad_set: Iterable[Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[tuple[Any, Any]]:
        """Differentiate the loss: the first part of `minimize`, whose arguments it shares.

        Args:
            callbacks: Functions to call with (parameter, gradient) for each pair.

        Returns:
            (parameter, gradient) pairs. Gradients are program variables, or arrays in eager mode.
        """
        pairs = program_access.differentiate(
            loss, parameter_list, no_grad_set, self._parameters, callbacks
        )
        if not pairs:
            raise UsageError(f"{self._name}: the loss depends on no parameter that may be updated")
        return pairs

    @checked
    def apply_gradients(self, params_grads: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Clip gradients and update with them: the second part of `minimize`.

        Args:
            params_grads: (parameter, gradient) pairs. If the gradients are arrays in the parameters' shapes
                or SparseGrad, the update happens at once. If they are program variables, it happens in each
                run.

        Returns:
            Update operations that were added to the program, or an empty list if the update happened at once.
        """
        return self.apply_optimize(None, None, params_grads)

    @checked
    def apply_optimize(
        self, loss: Any, startup_program: Any, params_grads: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """Update as `apply_gradients` does, and show the loss in the progress display."""
        pairs = [(p, g) for p, g in program_access.pairs(self._name, params_grads) if g is not None]
        if not pairs:
            raise UsageError(f"{self._name}: params_grads has no gradient")
        if program_access.symbolic(pairs):
            self._planned = [program_access.parameter_of(p) for p, _ in pairs]
            self._promise(self._planned, early=True)
            return [program_access.add_update(self, pairs, loss)]
        self._check_whole()
        self.apply_values(pairs, loss=program_access.value_of(loss))
        return []

    def get_opti_var_name_list(self) -> list[str]:
        """Return the names `parameter.slot` of the optimizer's state arrays, as in `state_dict()`."""
        parameters = self._known or {parameter.name: parameter for parameter in self._planned}
        return [
            f"{name}.{slot.name}"
            for name, parameter in parameters.items()
            for slot in self.lender(parameter).rule(parameter).slots
        ]

    @checked
    def append_regularization_ops(
        self,
        parameters_and_grads: Sequence[tuple[Any, Any]],
        regularization: WeightDecay | None = None,
    ) -> list[tuple[Any, Any]]:
        """Return the pairs with the gradients of weight decay added, as arrays or program variables.

        Do not call it before `apply_gradients`: there the servers add weight decay.
        """
        out = []
        for parameter, gradient in parameters_and_grads:
            default_regularization = self.lender(parameter).regularization
            regularizer = parameter.regularizer or regularization or default_regularization
            regularizer = as_regularizer(regularizer, self._name)
            out.append((parameter, program_access.regularized(parameter, gradient, regularizer)))
        return out

    @checked
    def step(self) -> None:
        """Update the parameters with the gradients in `Parameter.grad`, in eager mode.

            loss.backward()
            optimizer.step()
            optimizer.clear_grad()

        The optimizer must have been created with `parameters`.
        """
        if self._parameters is None:
            raise UsageError(
                f"{self._name}: step() needs to know the parameters; "
                "pass parameters=[...] to the optimizer"
            )
        self._check_whole()
        pairs = [(p, p.grad) for p in self._parameters if p.trainable and p.grad is not None]
        if pairs:
            self.apply_values(pairs)

    @checked
    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Set the gradients of the parameters to zero, or to None if `set_to_zero` is False."""
        for parameter in self.parameters:
            parameter.grad = zeroed(parameter.grad) if set_to_zero else None

    clear_gradients = clear_grad

    def apply_values(self, pairs: Pairs, samples: int = 0, loss: float | None = None) -> None:
        """Update with gradients, which ends one step of this worker.

        Args:
            pairs: (parameter, gradient) pairs with float32 arrays or SparseGrad.
            samples: Number of samples in the step, for the progress display.
            loss: The step's loss, for the progress display.
        """
        if self.merger is not None:
            step = self.merger.take(self._checked(pairs), samples)
            if step is None:
                return
            pairs, samples = step
        self._update(pairs, samples, loss)

    @checked
    def push_merged(self) -> None:
        """Push the gradients that gradient_merge has collected, even if there were fewer than k steps.

        All workers must call this at the end of training.
        """
        if self.merger is not None and (self.merger.waiting or tables().runtime.worker_num > 1):
            self._update(*self.merger.take_waiting(), None)

    def _update(self, pairs: Pairs, samples: int, loss: float | None) -> None:
        pairs = self._checked(pairs)
        repeats = len(pairs) - len({p.name for p, _ in pairs})
        if repeats:
            raise UsageError(
                f"{self._name}: {repeats} parameter(s) come with two gradients in one step"
            )
        home, rate = tables(), self.get_lr()
        bound_tables = [self._bind(p, isinstance(g, SparseGrad)) for p, g in pairs]
        gradients = [
            (bound, as_gradient(bound, self._sent(p, g), self._rate_of(p, rate)))
            for bound, (p, g) in zip(bound_tables, self._clip_pairs(pairs), strict=True)
        ]
        if self.scaler is not None:
            gradients = self.scaler.take(gradients)
        home.push(gradients, samples, loss)
        self._last_rate = rate
        self.advance()
        # A parameter may have its own optimizer. Advance each of these once, also if several parameters
        # share it.
        for parameter_optimizer in {
            id(p.optimizer): p.optimizer for p, _ in pairs if p.optimizer
        }.values():
            if parameter_optimizer is not self:
                parameter_optimizer.advance()

    def _checked(self, pairs: Pairs) -> list[tuple[Parameter, Grad]]:
        """Check the gradients, and return those of trainable parameters, as arrays in the parameters'
        shapes."""
        strangers = [p for p, _ in pairs if not isinstance(p, Parameter)]
        if strangers:
            raise UsageError(
                f"{self._name}: params_grads has {strangers[0]!r}, which is no parameter"
            )
        return [(p, check_gradient(p, g)) for p, g in pairs if p.trainable]

    def _clip_pairs(self, pairs: Pairs) -> Pairs:
        """Clip the pairs, each parameter group separately, and return them in the same order."""
        if not self._lenders:
            return (self._grad_clip or clip_by_own)(pairs)
        gradients: dict[str, Grad] = {p.name: g for p, g in pairs}
        for lender in dict.fromkeys((*self._lenders.values(), self)):
            lender_pairs = [(p, g) for p, g in pairs if self._lenders.get(p.name, self) is lender]
            gradients.update(
                {p.name: g for p, g in (lender._grad_clip or clip_by_own)(lender_pairs)}
            )
        return [(p, gradients[p.name]) for p, _ in pairs]

    def _check_whole(self) -> None:
        """Raise UsageError in a pipeline, because only a program can be divided into stages."""
        if here().processes > 1:
            raise UsageError(
                f"{self._name} updates at once by computed gradients, and this is "
                f"{here().name(here().process)}: stages run programs; build one and minimize() its "
                "loss, or start the job without --stages"
            )

    def scale(self, scaler: GradientScaler) -> None:
        """Send gradients in 16 bits from now on, with this scaler."""
        self.scaler = scaler

    def _sent(self, parameter: Parameter, grad: Grad) -> Grad | SparseElements:
        """Return the gradient to push. Subclasses override this to compress or rescale it."""
        return grad

    def _find(self, parameter: Parameter) -> BoundTable | None:
        return tables().find(self, parameter)

    def _bind(self, parameter: Parameter, by_rows: bool = False) -> BoundTable:
        home = tables()
        exists = self._find(parameter) is not None
        if parameter.optimizer is not None and not exists:
            check_outside(f"table {parameter.name!r}", parameter.optimizer)
        bound = home.bind(self, parameter, by_rows)
        self._known[parameter.name] = parameter
        if not exists and self._waiting:
            restore(home, self._name, [bound], self._waiting)
        return bound

    def _promise(self, parameters: Sequence[Parameter], early: bool) -> None:
        """Bind the parameters to their tables, which are created when a value is first needed."""
        binding = LazyBinding(self._bind, early)
        for parameter in parameters:
            parameter.binding = parameter.binding or binding

    def advance(self) -> None:
        """Count an update, and advance a schedule that counts updates. Each update of an optimizer calls
        this, so scripts do not.
        """
        self._updates += 1
        if isinstance(self._rate, LRScheduler) and self._rate.steps_itself:
            self._rate.step()


def _rate(owner: str, value: Any) -> float | LRScheduler:
    if not program_access.is_symbolic(value):
        return value if isinstance(value, LRScheduler) else float(value)
    rate_after = program_access.reader(value)
    return PerUpdateSchedule(
        rate_after(0),
        lambda updates: check(owner, "learning_rate", rate_after(updates), NonNegative),
    )


def _one(owner: str, name: str, value: Any, older: str, older_value: Any) -> Any:
    if value is not None and older_value is not None:
        raise ConfigError(
            f"{owner}: {older}={older_value!r} repeats {name}={value!r}; give one of them"
        )
    return older_value if value is None else value


def check_outside(owner: str, optimizer: Any) -> None:
    """Check that an optimizer works for a table whose gradients a script pushes directly.

    Such gradients do not pass through the optimizer on the worker, so they cannot be clipped or compressed.

    Raises:
        ConfigError: The optimizer does part of its update on the worker, has a clip, or is no psfleet
            optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"the optimizer of {owner} is {optimizer!r}; it must be one of psfleet.optimizer"
        )
    kind = type(optimizer).__name__
    if optimizer.works_on_worker:
        raise ConfigError(
            f"the optimizer of {owner} is {kind}, which works on the worker; pushes go straight to "
            "the servers: take any other"
        )
    if optimizer.common()["grad_clip"] is not None:
        raise ConfigError(
            f"the {kind} of {owner} has a grad_clip, which would not be applied; clip what you push"
        )
