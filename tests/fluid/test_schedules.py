"""Older schedules: used as variables of a program, as classes of eager mode, and by optimizers."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from psfleet import fluid
from psfleet.core.base.errors import UsageError
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program.program import Program, program_guard
from psfleet.fluid import dygraph
from psfleet.optimizer.lr.update_counted import PerUpdateSchedule

pytestmark = pytest.mark.quick

DECAYS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[int], float]]] = {
    "noam": (
        lambda: fluid.layers.noam_decay(64, 3, learning_rate=2.0),
        lambda: dygraph.NoamDecay(64, 3, learning_rate=2.0),
        lambda n: 2.0 * 64**-0.5 * min((n + 1) ** -0.5, (n + 1) * 3**-1.5),
    ),
    "exponential": (
        lambda: fluid.layers.exponential_decay(1.0, 3, 0.5, staircase=True),
        lambda: dygraph.ExponentialDecay(1.0, 3, 0.5, staircase=True),
        lambda n: 0.5 ** (n // 3),
    ),
    "natural": (
        lambda: fluid.layers.natural_exp_decay(1.0, 3, 0.5),
        lambda: dygraph.NaturalExpDecay(1.0, 3, 0.5),
        lambda n: math.exp(-0.5 * n / 3),
    ),
    "inverse": (
        lambda: fluid.layers.inverse_time_decay(1.0, 3, 0.5),
        lambda: dygraph.InverseTimeDecay(1.0, 3, 0.5),
        lambda n: 1 / (1 + 0.5 * n / 3),
    ),
    "polynomial": (
        lambda: fluid.layers.polynomial_decay(1.0, 5, 0.1, 2.0),
        lambda: dygraph.PolynomialDecay(1.0, 5, 0.1, 2.0),
        lambda n: 0.9 * (1 - min(n, 5) / 5) ** 2 + 0.1,
    ),
    "cosine": (
        lambda: fluid.layers.cosine_decay(1.0, 2, 4),
        lambda: dygraph.CosineDecay(1.0, 2, 4),
        lambda n: 0.5 * (math.cos(n // 2 * math.pi / 4) + 1),
    ),
    "piecewise": (
        lambda: fluid.layers.piecewise_decay([2, 4], [1.0, 0.5, 0.1]),
        lambda: dygraph.PiecewiseDecay([2, 4], [1.0, 0.5, 0.1], 0),
        lambda n: 1.0 if n < 2 else 0.5 if n < 4 else 0.1,
    ),
    "warm-up": (
        lambda: fluid.layers.linear_lr_warmup(
            fluid.layers.natural_exp_decay(1.0, 3, 0.5), 4, 0.0, 1.0
        ),
        lambda: dygraph.LinearLrWarmup(dygraph.NaturalExpDecay(1.0, 3, 0.5), 4, 0.0, 1.0, begin=0),
        lambda n: n / 4 if n < 4 else math.exp(-0.5 * n / 3),
    ),
}


@pytest.mark.parametrize("name", DECAYS)
def test_fetched(name: str) -> None:
    """A decay in a fetch list has, in each run of a program without an optimizer, the next rate."""
    make, _, expected = DECAYS[name]
    with program_guard(Program(), Program()):
        main, rate = fluid.default_main_program(), make()
    exe = fluid.Executor(fluid.CPUPlace())
    outputs = [exe.run(main, feed={}, fetch_list=[rate])[0] for _ in range(7)]
    assert {value.shape for value in outputs} == {(1,)}
    np.testing.assert_allclose(np.ravel(outputs), [expected(n) for n in range(7)], rtol=1e-6)


@pytest.mark.parametrize("name", DECAYS)
def test_eager_classes(name: str) -> None:
    """Each call of an eager decay gives the rate and goes on; so does each update."""
    _, make, expected = DECAYS[name]
    called, trained = make(), make()
    np.testing.assert_allclose([called() for _ in range(7)], [expected(n) for n in range(7)])
    w = Parameter("w", [0.0])
    opt = fluid.optimizer.SGD(trained)
    for n in range(7):
        before = w.numpy().item()
        opt.apply_gradients([(w, [1.0])])
        assert opt.current_step_lr() == pytest.approx(expected(n))
        assert before - w.numpy().item() == pytest.approx(expected(n), abs=1e-6)


def arithmetic(rate: Any) -> Any:
    """An expression of numbers and a rate, in every direction."""
    return 1.0 - (2.0 * rate / 4.0 + 0.25) + 0.5 / (rate + 1.0) - 0.125


def test_arithmetic_of_decays() -> None:
    """Arithmetic of numbers and decays gives a decay, for an optimizer and a fetch list."""
    with program_guard(Program(), Program()):
        x = fluid.layers.data("x", [1])
        loss = fluid.layers.mean(fluid.layers.fc(x, 1, bias_attr=False))
        rate = arithmetic(fluid.layers.exponential_decay(1.0, 1, 0.5))
        assert isinstance(rate, PerUpdateSchedule)
        opt = fluid.optimizer.SGD(rate)
        opt.minimize(loss)
        (w,) = fluid.default_main_program().all_parameters()
        exe, rates = fluid.Executor(), []
        for n in range(4):
            (shown,) = exe.run(feed={"x": [[1.0]]}, fetch_list=[rate])
            assert shown.item() == pytest.approx(arithmetic(0.5**n), rel=1e-6)
            assert opt.current_step_lr() == pytest.approx(arithmetic(0.5**n))
            rates.append(w.numpy().item())
    np.testing.assert_allclose(
        np.diff(rates), [-arithmetic(0.5**n) for n in range(1, 4)], rtol=1e-5
    )


def test_decays_in_layers() -> None:
    """With variables a decay is a variable: of layers, and of a rate that a program computes."""
    with program_guard(Program(), Program()):
        x = fluid.layers.data("x", [1])
        loss = fluid.layers.mean(fluid.layers.fc(x, 1, bias_attr=False))
        decay = fluid.layers.noam_decay(64, 3) * 2.0
        rate = fluid.layers.scale(decay, 0.5) * fluid.layers.fill_constant([1], "float32", 3.0)
        opt = fluid.optimizer.SGD(rate)
        opt.minimize(loss)
        exe = fluid.Executor()
        for n in range(4):
            (shown,) = exe.run(feed={"x": [[1.0]]}, fetch_list=[rate])
            expected = 3.0 * 64**-0.5 * min((n + 1) ** -0.5, (n + 1) * 3**-1.5)
            assert shown.item() == pytest.approx(expected, rel=1e-6)
            assert opt.current_step_lr() == pytest.approx(expected, rel=1e-6)


def test_current_step_lr() -> None:
    """It is the last update's rate; what `set_lr` sets shows at once, and not against a schedule."""
    w = Parameter("w", [0.0])
    opt = fluid.optimizer.Adam(dygraph.PiecewiseDecay([2, 4], [0.2, 0.4, 0.6], 0))
    assert opt.current_step_lr() == 0.2
    rates = []
    for _ in range(6):
        opt.apply_gradients([(w, [1.0])])
        rates.append(opt.current_step_lr())
    assert rates == [0.2, 0.2, 0.4, 0.4, 0.6, 0.6]
    with pytest.raises(UsageError, match="PiecewiseDecay, which decides the rate"):
        opt.set_lr(0.1)
    plain = fluid.optimizer.LookAhead(fluid.optimizer.SGD(0.5))
    assert plain.current_step_lr() == 0.5
    plain.apply_gradients([(w, [1.0])])
    plain.set_lr(np.float64(0.25))
    assert plain.current_step_lr() == 0.25


def test_global_variables() -> None:
    """`create_global_var` is a rate of eager mode and of programs."""
    with dygraph.guard():
        opt = fluid.optimizer.SGD(0.5)
        opt.set_lr(fluid.layers.create_global_var([1], 0.75, "float32"))  # type: ignore[arg-type]
        assert opt.current_step_lr() == 0.75
    with program_guard(Program(), Program()):
        x = fluid.layers.data("x", [1])
        loss = fluid.layers.mean(fluid.layers.fc(x, 1, bias_attr=False))
        rate = fluid.layers.create_global_var([1], 0.25, "float32", persistable=True, name="rate")
        opt = fluid.optimizer.SGD(rate)
        opt.minimize(loss)
        (shown,) = fluid.Executor().run(feed={"x": [[1.0]]}, fetch_list=[rate])
        assert (shown.tolist(), opt.get_lr()) == ([0.25], 0.25)


def test_epochs() -> None:
    """The eager classes that count epochs go on with `epoch()`, and with a loss for the plateau."""
    step, cut = dygraph.StepDecay(1.0, 2, 0.5), dygraph.MultiStepDecay(1.0, [1, 3], 0.5)
    free = dygraph.LambdaDecay(1.0, lambda epoch: 1 / (epoch + 1))
    plateau = dygraph.ReduceLROnPlateau(1.0, decay_rate=0.5, patience=1)
    rates = []
    for _ in range(4):
        rates.append((step(), cut(), free(), plateau()))
        for schedule in (step, cut, free):
            schedule.epoch()
        plateau.step(1.0)
    assert rates == [
        (1.0, 1.0, 1.0, 1.0),
        (1.0, 0.5, 1 / 2, 1.0),
        (0.5, 0.5, 1 / 3, 1.0),
        (0.5, 0.25, 1 / 4, 0.5),
    ]
