"""Constructors take arguments in every form that the documents have, and refuse others clearly."""

import itertools
from typing import Any

import numpy as np
import pytest

from psfleet import fluid, layers, optimizer
from psfleet.clip import ClipGradByNorm
from psfleet.core.base.errors import ConfigError
from psfleet.core.engine import rules
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.engine.rules.rule import Rule
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.optimizer.factory import RuleOptimizer
from psfleet.regularizer import L2Decay
from tests.runtimes import own_programs

pytestmark = pytest.mark.quick

HALF = L2Decay(0.5)
DENSE = Parameter("dense", [1.0])


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


@pytest.mark.parametrize("kind", OLDER)
def test_older_order(kind: str) -> None:
    """Every argument by place, in the order of the older documents."""
    numbers, after, rule = OLDER[kind]
    for regularization, name in ((HALF, "mine"), (None, None)):
        opt = getattr(optimizer, kind)(0.1, *numbers, regularization, name, *after)
        assert opt.rule(DENSE) == rule
        assert opt.decay().l2 == (0.5 if regularization else 0)
        assert opt._name == (name or type(opt).__name__)
        assert opt.lazy == (kind in ("FtrlOptimizer", "AdamOptimizer"))


def test_older_order_of_lamb() -> None:
    """Its function stands before the name there."""
    make: Any = fluid.optimizer.LambOptimizer
    opt = make(0.1, 0.2, 0.8, 0.9, 1e-4, HALF, everywhere, "mine")
    assert opt.decay().l2 == 0.5
    assert opt.rule(Parameter("w", [1.0])) == rules.Lamb(0.8, 0.9, 1e-4, 0.0)


def test_lamb_takes_a_weight_decay() -> None:
    """`weight_decay` is regularization, as of every optimizer, beside `lamb_weight_decay`."""
    opt = optimizer.Lamb(0.1, 0.2, weight_decay=0.5)
    assert opt.decay().l2 == 0.5
    assert opt.rule() == rules.Lamb(weight_decay=0.2)


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
    assert opt.rule(DENSE) == rules.Adam(0.75, 0.5, 0.25)
    assert all(type(value) is float for value in (opt.rule().beta1, opt.rule().beta2))  # type: ignore[attr-defined]


def test_variables_of_a_program_are_numbers() -> None:
    """Hyperparameters may be constants of the program being built; one that changes from run to run, which
    no table could follow, is refused.
    """
    with own_programs():
        half: Any = fluid.layers.create_global_var([1], 0.5, "float32", persistable=True)
        opt = optimizer.Adam(0.1, half, beta2=1 - half * half, epsilon=half * 0.5)
        assert opt.rule(DENSE) == rules.Adam(0.5, 0.75, 0.25)
        counter = fluid.layers.autoincreased_step_counter()
        fed = fluid.layers.data("fed", [1])
        for bad_beta in (counter, counter * counter, fed, fed * 0.5):
            with pytest.raises(
                ConfigError, match=f"beta1 is the variable '{bad_beta.name}', which"
            ):
                optimizer.Adam(0.1, bad_beta)  # type: ignore[arg-type]


def test_rate_of_a_program() -> None:
    """A rate may be a variable of the program: it is read before each update."""
    with own_programs():
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


def test_sparse_gradients_of_lists() -> None:
    """Ids and rows may be lists."""
    w = Parameter("w", np.zeros((3, 2)), sparse=True)
    gradient: Any = SparseGrad([2, 0, 2], [[1, 2], [3, 4], [5, 6]])  # type: ignore[arg-type]
    optimizer.SGD(1.0).apply_gradients([(w, gradient)])
    np.testing.assert_array_equal(w.numpy(), [[-3, -4], [0, 0], [-6, -8]])


def test_gradients_of_any_kind() -> None:
    """A gradient is a list, a tuple, or a variable with a value as well as an array."""
    for gradient in ([1, 2], (1.0, 2.0), fluid.to_tensor([1.0, 2.0]), np.array([1, 2])):
        w = Parameter("w", [1.0, 2.0])
        optimizer.SGD(0.5).apply_gradients([(w, gradient)])
        np.testing.assert_array_equal(w.numpy(), [0.5, 1.0])


def test_an_optimizer_is_declared_once() -> None:
    """In the file of its rule: all but those around another optimizer, or with work of the worker's own."""
    classes = [getattr(optimizer, name) for name in optimizer.__all__]
    others = {
        kind.__name__
        for kind in classes
        if isinstance(kind, type)
        and issubclass(kind, optimizer.Optimizer)
        and not issubclass(kind, RuleOptimizer)
    }
    wrapping = {"LookAhead", "PipelineOptimizer", "RecomputeOptimizer"}
    assert others == {"Optimizer", "DGCMomentum", *wrapping}
