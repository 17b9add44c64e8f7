"""DistributedOptimizer by its documented arguments; checkpoints of RecomputeOptimizer; Momentum 1.0."""

from typing import Any

import numpy as np
import pytest

from psfleet import fleet, fluid
from psfleet.core.base.errors import UsageError
from psfleet.core.engine import rules
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.fleet import DistributedStrategy
from tests.runtimes import own_programs

pytestmark = pytest.mark.quick


@pytest.fixture
def _no_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fleet has no strategy before and after the test."""
    monkeypatch.setattr(fleet._fleet, "_strategy", None)


@pytest.mark.usefixtures("_no_strategy")
@pytest.mark.parametrize("by_place", [False, True])
def test_a_strategy_that_says_the_mode(by_place: bool) -> None:
    """`a_sync` is the fleet's mode, not another optimizer; it counts as if `init` had been told."""
    strategy, local = DistributedStrategy(a_sync=True), fluid.optimizer.SGD(0.1)
    wrapped = fluid.optimizer.DistributedOptimizer
    opt = wrapped(local, strategy) if by_place else wrapped(optimizer=local, strategy=strategy)
    assert opt.optimizer is local
    assert opt.settings.consistency.mode == "async"
    assert fleet.settings().consistency.mode == "async"
    assert wrapped(local).settings.consistency.mode == "async"


@pytest.mark.usefixtures("_no_strategy")
def test_a_strategy_that_changes_the_optimizer() -> None:
    """Switches do what they do in `fleet.distributed_optimizer`, also in a strategy file's form."""
    wrapped = fluid.optimizer.DistributedOptimizer
    opt = wrapped(fluid.optimizer.Momentum(0.1, 0.9), DistributedStrategy(lars=True))
    assert isinstance(opt.optimizer, fluid.optimizer.LarsMomentum)
    parts: dict[str, Any] = {"gradient_merge": {"k_steps": 2, "avg": True}}
    w, merged = Parameter("w", [0.0]), wrapped(fluid.optimizer.SGD(1.0), strategy=parts)
    strategies = []
    for gradient in (1.0, 3.0):
        merged.apply_gradients([(w, [gradient])])
        strategies.append(w.numpy().item())
    assert strategies == [0.0, -2.0]


@pytest.mark.usefixtures("_no_strategy")
def test_a_launcher_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launcher says wins over the strategy."""
    monkeypatch.setenv("PSFLEET_STRATEGY", '{"consistency": {"mode": "sync"}}')
    fleet.init()
    try:
        opt = fluid.optimizer.DistributedOptimizer(
            fluid.optimizer.SGD(0.1), DistributedStrategy(a_sync=True)
        )
        assert opt.settings.consistency.mode == "sync"
    finally:
        monkeypatch.undo()
        fleet.init()


def trained(checkpoints: list[Any] | None) -> np.ndarray[Any, Any]:
    """A weight after three steps; `checkpoints` may name `x`, `w` (a Parameter), `w_var` and `fc`."""
    with own_programs():
        x = fluid.layers.data("x", [4])
        hidden = fluid.layers.fc(x, 8, act="tanh", name="first")
        loss = fluid.layers.mean(fluid.layers.fc(hidden, 1, name="second"))
        (w, *_) = fluid.default_main_program().all_parameters()
        known = {
            "x": x,
            "w": w,
            "w_var": fluid.default_main_program().variable(w.name),
            "fc": hidden,
            "name": w.name,
        }
        opt: Any = fluid.optimizer.Adam(0.1)
        if checkpoints is not None:
            opt = fluid.optimizer.RecomputeOptimizer(opt)
            opt._set_checkpoints([known[name] for name in checkpoints])
        opt.minimize(loss)
        exe, feed = fluid.Executor(), np.random.default_rng(5).normal(size=(3, 4))
        for _ in range(3):
            exe.run(feed={"x": feed})
        return w.numpy().copy()


@pytest.mark.parametrize(
    "checkpoints", [["fc"], ["w_var", "fc"], ["w", "fc"], ["fc", "x"], ["name", "fc"], ["w"]]
)
def test_checkpoints_that_are_kept_anyway(checkpoints: list[Any]) -> None:
    """Parameters and data among the checkpoints change nothing: the bits are those without them."""
    np.testing.assert_array_equal(trained(checkpoints), trained(None))


def test_load() -> None:
    """`load` of an optimizer is `set_state_dict`; wrapped for recomputing it is refused."""
    w = Parameter("w", [1.0, 2.0])
    first, second = (fluid.optimizer.Adam(0.1, parameters=[w]) for _ in "12")
    first.apply_gradients([(w, [1.0, -1.0])])
    wrapped = fluid.optimizer.RecomputeOptimizer(second)
    with pytest.raises(UsageError, match="call load or set_state_dict of the Adam that it wraps"):
        wrapped.load(first.state_dict())
    second.load(first.state_dict())
    state = wrapped.state_dict()
    np.testing.assert_array_equal(state["w.moment1"], first.state_dict()["w.moment1"])
    assert wrapped.get_opti_var_name_list() == []
    assert first.get_opti_var_name_list() == ["w.moment1", "w.moment2"]


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_of_one(nesterov: bool) -> None:
    """A momentum of 1.0 is taken: the velocity is the sum of all gradients."""
    w = Parameter("w", [0.0])
    opt = fluid.optimizer.Momentum(0.1, 1.0, use_nesterov=nesterov)
    assert opt.rule() == rules.Momentum(1.0, nesterov)
    expected, velocity = 0.0, 0.0
    for gradient in (1.0, -0.5, 2.0):
        opt.apply_gradients([(w, [gradient])])
        velocity += gradient
        expected -= 0.1 * (gradient + velocity if nesterov else velocity)
        assert w.numpy().item() == pytest.approx(expected, rel=1e-6)


def test_threads_of_sparse_adam() -> None:
    """`min_row_size_to_use_multithread` is taken, and changes nothing."""
    w, v = (Parameter(name, np.ones((3, 5)), sparse=True) for name in "wv")
    for p, options in ((w, {}), (v, {"min_row_size_to_use_multithread": 2})):
        opt = fluid.optimizer.Adam(0.1, lazy_mode=True, **options)  # type: ignore[arg-type]
        opt.apply_gradients([(p, np.ones((3, 5)))])
    np.testing.assert_array_equal(w.numpy(), v.numpy())
