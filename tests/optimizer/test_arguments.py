"""Constructors take arguments in every form that the documents have, and refuse others clearly."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from psfleet import fluid, layers, optimizer, rules
from psfleet.clip import ClipGradByNorm
from psfleet.errors import PsfleetError, UsageError
from psfleet.execution.executor import Executor
from psfleet.optimizer import lr
from psfleet.parameters.parameter import Parameter, SparseGrad
from psfleet.program import names
from psfleet.program.program import Program, program_guard
from psfleet.regularizer import L2Decay
from psfleet.rules.rule import Rule

HALF = L2Decay(0.5)


def everywhere(parameter: Parameter) -> bool:
    """For `exclude_from_weight_decay_fn`."""
    return True


OLDER: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], Rule]] = {
    "SGDOptimizer": ((), (), rules.SGD()),
    "MomentumOptimizer": ((0.9, True), (), rules.Momentum(0.9, True)),
    "LarsMomentumOptimizer": ((0.9, 0.01, 0.02), (), rules.LarsMomentum(0.9, 0.01, 0.02)),
    "AdagradOptimizer": ((1e-4,), (0.3,), rules.Adagrad(1e-4, 0.3)),
    "DecayedAdagradOptimizer": ((0.9, 1e-4), (), rules.DecayedAdagrad(0.9, 1e-4)),
    "AdadeltaOptimizer": ((1e-4, 0.9), (), rules.Adadelta(0.9, 1e-4)),
    "AdamOptimizer": ((0.8, 0.9, 1e-4), (True,), rules.Adam(0.8, 0.9, 1e-4)),
    "AdamaxOptimizer": ((0.8, 0.9, 1e-4), (), rules.Adamax(0.8, 0.9, 1e-4)),
    "RMSPropOptimizer": ((0.9, 1e-4, 0.5, True), (), rules.RMSProp(0.9, 1e-4, 0.5, True)),
    "FtrlOptimizer": ((0.1, 0.2, -0.4), (), rules.Ftrl(0.1, 0.2, -0.4)),
}


@pytest.mark.parametrize("regularization", [HALF, None])
@pytest.mark.parametrize("name", ["mine", None])
@pytest.mark.parametrize("kind", OLDER)
def test_older_order(kind: str, name: str | None, regularization: L2Decay | None) -> None:
    """Every argument by place, in the order of the older documents."""
    numbers, after, rule = OLDER[kind]
    opt = getattr(optimizer, kind)(0.1, *numbers, regularization, name, *after)
    assert opt.rule() == rule
    assert opt.decay().l2 == (0.5 if regularization else 0)
    assert opt._name == (name or type(opt).__name__)
    assert opt.lazy == (kind in ("FtrlOptimizer", "AdamOptimizer"))


@pytest.mark.parametrize("regularization", [HALF, None])
def test_older_order_of_lamb(regularization: L2Decay | None) -> None:
    """Its function stands before the name there."""
    make: Any = fluid.optimizer.LambOptimizer
    opt = make(0.1, 0.2, 0.8, 0.9, 1e-4, regularization, everywhere, "mine")
    assert opt.decay().l2 == (0.5 if regularization else 0)
    assert opt.rule(Parameter("w", [1.0])) == rules.Lamb(0.8, 0.9, 1e-4, 0.0)


def test_newer_order_of_asgd() -> None:
    """`multi_precision` stands before the name."""
    w = Parameter("w", [1.0])
    make: Any = optimizer.ASGD
    opt = make(0.1, 3, [w], 0.5, ClipGradByNorm(1.0), True, "mine")
    assert (opt.rule(), opt.parameters, opt.decay().l2) == (rules.ASGD(3), [w], 0.5)
    assert opt.multi_precision
    assert opt._name == "mine"


def test_two_values() -> None:
    """An argument that is given by place and by name is refused."""
    with pytest.raises(TypeError, match="SGD got two values for 'regularization'"):
        optimizer.SGD(0.1, HALF, "mine", regularization=HALF)  # type: ignore[arg-type]


def test_tensors_are_numbers() -> None:
    """Rates and hyperparameters may be variables, arrays and NumPy's numbers."""
    beta = fluid.to_tensor([0.75], dtype="float32")
    opt = optimizer.Adam(fluid.to_tensor([0.5]), beta, np.float32(0.5), epsilon=np.array(0.25))  # type: ignore[arg-type]
    assert opt.get_lr() == 0.5
    assert opt.rule() == rules.Adam(0.75, 0.5, 0.25)
    assert all(type(value) is float for value in (opt.rule().beta1, opt.rule().beta2))  # type: ignore[attr-defined]


def test_rate_of_a_program() -> None:
    """A rate may be a variable of the program: it is read before each update."""
    with names.guard(), program_guard(Program(), Program()):
        x = layers.data("x", [None, 1])
        loss = layers.mean(layers.fc(x, 1, name="line", bias_attr=False))
        done = layers.cast(fluid.layers.learning_rate_scheduler._decay_step_counter(), "float32")
        opt = optimizer.SGD(1.0 / (done + 1.0))
        opt.minimize(loss)
        weights, feed = [], {"x": np.ones((1, 1), np.float32)}
        for _ in range(3):
            weights += Executor().run(feed=feed, fetch_list=["line.w_0"])
    steps = [float((a - b).item()) for a, b in itertools.pairwise(weights)]
    np.testing.assert_allclose(steps, [1, 1 / 2], rtol=1e-5)
    assert opt.get_lr() == pytest.approx(1 / 4)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "function": (
        lambda: optimizer.Lamb(exclude_from_weight_decay_fn=3),  # type: ignore[arg-type]
        "exclude_from_weight_decay_fn is 3, it must be a function",
    ),
    "ratio": (lambda: optimizer.AdamW(lr_ratio=2.0), "lr_ratio is 2.0, it must be a function"),  # type: ignore[arg-type]
    "parts": (
        lambda: optimizer.LarsMomentum(0.1, 0.9, exclude_from_weight_decay="bias"),
        "exclude_from_weight_decay is 'bias', it must be a list",
    ),
    "sparsity": (
        lambda: optimizer.DGCMomentum(0.1, 0.9, 0, sparsity=0.9),  # type: ignore[arg-type]
        "sparsity is 0.9, it must be a list",
    ),
    "pairs": (
        lambda: optimizer.SGD(0.1).apply_gradients([3]),  # type: ignore[list-item]
        r"params_grads has 3; it must be a list of \(parameter, gradient\)",
    ),
    "no pairs": (
        lambda: optimizer.SGD(0.1).apply_gradients(None),  # type: ignore[arg-type]
        "params_grads has None; it must be a list",
    ),
    "value": (
        lambda: Parameter("w", "abc"),
        "the value of parameter 'w' is 'abc'; it must be an array of real numbers",
    ),
    "ragged value": (
        lambda: Parameter("w", [[1], [1, 2]]),
        "the value of parameter 'w' cannot be read as an array",
    ),
    "complex value": (
        lambda: Parameter("w", np.ones(2, np.complex64)),
        "the value of parameter 'w' has the dtype complex64",
    ),
    "no name": (lambda: Parameter("", [1.0]), "a parameter's name is ''; it must be a text"),
    "gradient": (
        lambda: optimizer.SGD(0.1).apply_gradients([(Parameter("w", [1.0]), "x")]),
        "the gradient of parameter 'w' is 'x'; it must be an array",
    ),
    "rows": (
        lambda: SparseGrad([1], ["x"]),  # type: ignore[arg-type]
        r"the rows array of a sparse gradient is \['x'\]; it must be an array",
    ),
    "fractional id": (
        lambda: Parameter("w", shape=(3, 1), sparse=True).lookup(np.array([0.5])),
        "parameter 'w': id 0.5 is not a whole number",
    ),
    "id of no row": (
        lambda: Parameter("w", shape=(3, 1), sparse=True).lookup(np.array([3])),
        "parameter 'w' has rows 0 to 2; id 3 is not one of them",
    ),
    "state of a schedule": (
        lambda: lr.StepDecay(0.5, 7).set_state_dict(None),  # type: ignore[arg-type]
        "StepDecay: the state is None, it must be what state_dict",
    ),
    "milestones": (
        lambda: lr.MultiStepDecay(0.5, 3),  # type: ignore[arg-type]
        "milestones is 3, it must be a list",
    ),
    "period": (
        lambda: lr.CosineAnnealingDecay(0.5, "12"),  # type: ignore[arg-type]
        "T_max is '12', it must be a whole number above 0",
    ),
    "rate after a warm-up": (
        lambda: lr.LinearWarmup("0.5", 8, 0.0, 0.5),  # type: ignore[arg-type]
        "learning_rate is '0.5', it must be a finite number of at least 0 or an LRScheduler",
    ),
    "metric": (
        lambda: lr.ReduceOnPlateau(0.5).step("loss"),
        "metrics is 'loss', it must be one number",
    ),
    "decay of an average": (
        lambda: optimizer.ExponentialMovingAverage("0.9"),  # type: ignore[arg-type]
        r"decay is '0.9', it must be a finite number in \[0, 1\)",
    ),
    "window": (
        lambda: optimizer.ModelAverage("0.1"),  # type: ignore[arg-type]
        "average_window_rate is '0.1', it must be a finite number of at least 0",
    ),
    "alpha": (
        lambda: optimizer.LookAhead(optimizer.SGD(0.1), alpha="0.5"),  # type: ignore[arg-type]
        r"alpha is '0.5', it must be a finite number in \[0, 1\]",
    ),
    "clip": (
        lambda: optimizer.ClipGradByValue("1"),  # type: ignore[arg-type]
        "max is '1', it must be a finite number",
    ),
    "factor on the rate": (
        lambda: fluid.ParamAttr(learning_rate=-1.0),
        "ParamAttr: learning_rate is -1.0, it must be a finite number of at least 0",
    ),
    "name": (lambda: fluid.ParamAttr(name=3), "ParamAttr: name is 3, it must be a text"),  # type: ignore[arg-type]
    "loss": (
        lambda: optimizer.SGD(0.1, parameters=[Parameter("w", [1.0])]).minimize(3),
        "the loss is 3; it must be a variable",
    ),
    "state": (
        lambda: optimizer.SGD(0.1).set_state_dict(None),  # type: ignore[arg-type]
        "the state is None, it must be what state_dict",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """With one sentence that quotes the value."""
    call, sentence = REFUSED[case]
    with pytest.raises(PsfleetError, match=sentence):
        call()


def test_sparse_gradients_of_lists() -> None:
    """Ids and rows may be lists."""
    w = Parameter("w", np.zeros((3, 2)), sparse=True)
    gradient: Any = SparseGrad([2, 0, 2], [[1, 2], [3, 4], [5, 6]])  # type: ignore[arg-type]
    optimizer.SGD(1.0).apply_gradients([(w, gradient)])
    np.testing.assert_array_equal(w.numpy(), [[-3, -4], [0, 0], [-6, -8]])


def line() -> Any:
    """A loss of the parameters line.w_0 and line.b_0."""
    return layers.mean(layers.fc(layers.data("x", [None, 1]), 1, name="line"))


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("argument", ["parameter_list", "no_grad_set"])
def test_lists_of_parameters(argument: str, eager: bool) -> None:
    """A text in place of a list, and a name that is unknown, are refused, not passed over."""
    with names.guard(), program_guard(Program(), Program()):
        made = layers.fc(fluid.to_tensor(np.ones((1, 1), np.float32)), 1, name="line")
        loss = layers.mean(made) if eager else line()
        opt: Any = optimizer.SGD(0.1)
        with pytest.raises(UsageError, match=f"{argument} is 'line.w_0', it must be a list"):
            opt.minimize(loss, **{argument: "line.w_0"})
        with pytest.raises(UsageError, match=rf"{argument} (has )?'line.w_1'"):
            opt.minimize(loss, **{argument: ["line.w_0", "line.w_1"]})
        with pytest.raises(UsageError, match=f"{argument} has 3; it must hold parameters"):
            opt.minimize(loss, **{argument: [3]})
        _, pairs = opt.minimize(loss, **{argument: ["line.w_0"]})
        rest = "line.w_0" if argument == "parameter_list" else "line.b_0"
        assert [parameter.name for parameter, _ in pairs] == [rest]


def test_checkpoints_are_a_list() -> None:
    """One name in place of a list of checkpoints is refused."""
    with names.guard(), program_guard(Program(), Program()):
        opt = optimizer.RecomputeOptimizer(optimizer.SGD(0.1))
        opt._set_checkpoints("line")
        with pytest.raises(UsageError, match="checkpoints is 'line'; it must be a list"):
            opt.minimize(line())


def test_gradients_of_any_kind() -> None:
    """A gradient is a list, a tuple, or a variable with a value as well as an array."""
    for gradient in ([1, 2], (1.0, 2.0), fluid.to_tensor([1.0, 2.0]), np.array([1, 2])):
        w = Parameter("w", [1.0, 2.0])
        optimizer.SGD(0.5).apply_gradients([(w, gradient)])
        np.testing.assert_array_equal(w.numpy(), [0.5, 1.0])
