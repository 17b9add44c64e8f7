"""The state of an optimizer: saved and set, of several optimizers, and in another runtime."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from psfleet import optimizer
from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.engine.schema.table import InitializerSpec
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import current
from psfleet.optimizer import SGD, Adam, Momentum, lr
from tests.optimizer import test_placement

pytestmark = pytest.mark.quick

ONE = np.ones(3, np.float32)

MAKERS: dict[str, Callable[[], optimizer.Optimizer]] = {
    **test_placement.MAKERS,
    "Ftrl": lambda: optimizer.Ftrl(0.1, 0.01),
    "Adam of a schedule": lambda: Adam(lr.ExponentialDecay(0.1, 0.9)),
    "Adam, lazy": lambda: Adam(0.1, lazy_mode=True),
    "Adam, catch-up": lambda: Adam(0.1, sparse_mode="catch-up"),
    "DGCMomentum": lambda: optimizer.DGCMomentum(0.1, 0.9, 2, sparsity=[0.5]),
    "LookAhead": lambda: optimizer.LookAhead(Momentum(0.1), k=3),
}
IDS, HALF = np.array([-7, 0, 3, 10**15]), InitializerSpec("constant", 0.5)


def three(prefix: str) -> list[Parameter]:
    """A dense parameter, one by rows, and one with rows for any id."""
    return [
        Parameter(f"{prefix}_dense", np.ones((4, 5))),
        Parameter(f"{prefix}_rows", np.ones((4, 5)), sparse=True),
        Parameter(f"{prefix}_any", shape=(-1, 5), sparse=True, distributed=True, initializer=HALF),
    ]


def train(opt: optimizer.Optimizer, them: list[Parameter], numbers: range) -> None:
    for number in numbers:
        rng = np.random.default_rng(number)
        grad, places = rng.normal(size=(4, 5)).astype(np.float32), rng.integers(0, 4, 4)
        rows, anywhere = SparseGrad(places, grad), SparseGrad(IDS[places], grad)
        opt.apply_gradients([*zip(them, (grad, rows, anywhere), strict=True)])


def weights(them: list[Parameter]) -> list[Any]:
    return [them[0].numpy(), them[1].numpy(), them[2].lookup(IDS)]


@pytest.mark.parametrize("name", MAKERS)
def test_state_goes_on(name: str) -> None:
    """A second optimizer with the state of the first continues with the same bits: dense parameters,
    sparse ones, and those with rows for any id.
    """
    whole, halves = three("whole"), three("halves")
    one, first, second = (MAKERS[name]() for _ in range(3))
    train(one, whole, range(8))
    train(first, halves, range(4))
    second.set_state_dict(first.state_dict())
    train(second, halves, range(4, 8))
    for expected, actual in zip(weights(whole), weights(halves), strict=True):
        np.testing.assert_array_equal(actual, expected)
    for key, value in one.state_dict().items():
        np.testing.assert_array_equal(second.state_dict()[key.replace("whole", "halves")], value)


def test_state_before_and_after_the_first_update() -> None:
    """State set on an optimizer at work replaces its own; a state that does not fit changes nothing."""
    w, v = Parameter("w", ONE), Parameter("v", ONE)
    opt, fresh = Momentum(1.0, 0.5), Momentum(1.0, 0.5)
    opt.apply_gradients([(w, ONE)])
    state = opt.state_dict()
    opt.apply_gradients([(w, ONE)])
    with pytest.raises(ShapeError, match=r"w.velocity has shape \(2,\), it must be \(3,\)"):
        opt.set_state_dict(state | {"w.velocity": np.zeros(2)})
    with pytest.raises(UsageError, match=r"no entry 'w.velocity'"):
        opt.set_state_dict({"w.step": 1})
    assert opt.state_dict()["w.velocity"].tolist() == [1.5] * 3
    opt.set_state_dict(state)
    assert opt.state_dict()["w.velocity"].tolist() == [1.0] * 3
    loaded = {"v.velocity": 4 * ONE, "v.step": 7, "u.velocity": ONE, "u.step": 3, "global_step": 7}
    fresh.set_state_dict(loaded)
    assert set(fresh.state_dict()) == set(loaded)
    fresh.apply_gradients([(v, 0 * ONE)])
    assert fresh.state_dict()["u.step"] == 3
    with pytest.raises(UsageError, match="params_grads has 'v', which is no parameter"):
        fresh.apply_gradients([("v", ONE)])
    assert v.numpy().tolist() == [-1.0] * 3
    assert fresh.state_dict()["v.step"] == 8


def test_two_optimizers_in_turn() -> None:
    """Two optimizers on one parameter share its value and keep states of their own."""
    w, a, b = Parameter("w", np.zeros(2)), Momentum(1.0, 0.5), SGD(1.0)
    for opt in (a, b, a, b):
        opt.apply_gradients([(w, -np.ones(2))])
    assert w.numpy().tolist() == [1 + 1 + 1.5 + 1] * 2


def test_another_runtime() -> None:
    """A parameter that is trained on in another runtime takes its weights along: arrays and rows."""
    them = three("moved")
    train(SGD(0.1), them, range(2))
    before = [value.copy() for value in weights(them)]
    current().use(EmbeddedRuntime())
    opt = SGD(0.0)
    train(opt, them, range(1))
    for expected, actual in zip(before, weights(them), strict=True):
        np.testing.assert_array_equal(actual, expected)
