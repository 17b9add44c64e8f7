"""ExponentialMovingAverage and ModelAverage: recordings, apply and restore, programs."""

from typing import Any

import numpy as np
import pytest

from psfleet import layers
from psfleet.clip import ClipGradByNorm
from psfleet.core.base.errors import UsageError
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program.attribute import ParamAttr
from psfleet.core.graph.program.ops.manipulate import StepCounter
from psfleet.core.graph.program.program import (
    Program,
    default_startup_program,
    eager_guard,
    program_guard,
)
from psfleet.core.graph.program.variable import apply
from psfleet.optimizer import SGD, ExponentialMovingAverage, ModelAverage
from tests.recordings import arrays, hyper

pytestmark = pytest.mark.quick

TOLERANCE = 2e-6


@pytest.mark.parametrize("shape", ["7", "5x3"])
def test_ema_recording(shape: str) -> None:
    """The average, and the weights that apply() shows, agree with the reference in each step."""
    z, h = arrays(f"ema_{shape}"), hyper(f"ema_{shape}")
    w = Parameter("w", z["param0"])
    opt, ema = SGD(h["sgd_lr"]), ExponentialMovingAverage(h["decay"])
    for t, gradient in enumerate(z["grads"]):
        opt.apply_gradients([(w, gradient)])
        ema.update()
        np.testing.assert_allclose(w.numpy(), z["params"][t], rtol=0, atol=TOLERANCE)
        with ema.apply():
            np.testing.assert_allclose(w.numpy(), z["applied"][t], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(w.numpy(), z["params"][t], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("shape", ["7", "5x3"])
def test_model_average_recording(shape: str) -> None:
    """Sums, counts and the shown weights agree with the reference in each step."""
    z, h = arrays(f"modelaverage_{shape}"), hyper(f"modelaverage_{shape}")
    w = Parameter("w", z["param0"])
    opt = SGD(h["lr"])
    average = ModelAverage(h["rate"], h["min_average_window"], h["max_average_window"])
    for t, gradient in enumerate(z["grads"]):
        opt.apply_gradients([(w, gradient)])
        average.step()
        state = average.state_dict()
        for i in (1, 2, 3):
            np.testing.assert_allclose(
                state[f"w.sum_{i}"], z[f"state_sum_{i}"][t], rtol=0, atol=TOLERANCE
            )
        for count in ("num_updates", "num_accumulates", "old_num_accumulates"):
            assert state[count] == z[f"state_{count}"][t]
        with average.apply():
            np.testing.assert_allclose(w.numpy(), z["applied"][t], rtol=0, atol=TOLERANCE)


def test_thres_steps() -> None:
    """The decay is min(decay, (1 + s) / (10 + s)), and the shown weights are divided by 1 - decay^t."""
    w, steps = Parameter("w", np.zeros(3)), iter([0, 5, 1000])
    ema = ExponentialMovingAverage(0.9, thres_steps=lambda: next(steps), parameters=[w])
    opt, expected = SGD(1.0), np.zeros(3)
    for t, decay in enumerate([0.1, 0.4, 0.9], 1):
        opt.apply_gradients([(w, -np.ones(3))])
        ema.update()
        expected = decay * expected + (1 - decay) * t
        with ema.apply():
            np.testing.assert_allclose(w.numpy(), expected / (1 - decay**t), rtol=1e-6)


def test_kept_until_restored() -> None:
    """need_restore=False shows the average until restore(); updates in between are refused."""
    w, opt = Parameter("w", np.ones(2)), SGD(0.5)
    ema = ExponentialMovingAverage(0.5)
    opt.apply_gradients([(w, np.ones(2))])
    ema.update()
    opt.apply_gradients([(w, np.ones(2))])
    with ema.apply(need_restore=False):
        pass
    assert w.numpy().tolist() == [0.5, 0.5]
    with pytest.raises(UsageError, match="restore"):
        opt.apply_gradients([(w, np.ones(2))])
    ema.restore()
    assert w.numpy().tolist() == [0.0, 0.0]


def test_state_goes_on() -> None:
    """An average with the state of another shows the same weights from there on."""
    w, opt = Parameter("w", np.arange(4)), SGD(0.1)
    kinds: list[tuple[Any, Any]] = [
        (ExponentialMovingAverage(0.9), ExponentialMovingAverage(0.9)),
        (ModelAverage(0.5, 1, 4), ModelAverage(0.5, 1, 4)),
    ]
    for _ in range(3):
        opt.apply_gradients([(w, np.ones(4))])
        for first, _ in kinds:
            first.update()
    for first, second in kinds:
        second.set_state_dict(first.state_dict())
    opt.apply_gradients([(w, np.ones(4))])
    for first, second in kinds:
        first.update()
        second.update()
        with first.apply():
            shown = w.numpy().copy()
        with second.apply():
            np.testing.assert_array_equal(w.numpy(), shown)


def test_thres_steps_of_a_program() -> None:
    """A variable that counts the program's runs decides the decay of each of them."""
    with program_guard(Program(), Program()):
        out = layers.fc(layers.data("x", [None, 1]), 1, bias_attr=False)
        SGD(1.0).minimize(layers.mean(out))
        counter = apply(StepCounter())
        ema = ExponentialMovingAverage(0.999, thres_steps=counter)
        ema.update()
        exe = Executor()
        for run in range(1, 4):
            seen = exe.run(feed={"x": [[1.0]]}, fetch_list=[counter])[0]
            assert seen.tolist() == [run]
            assert ema.state_dict()["decay"] == (1 + run) / (10 + run)


def test_in_a_program() -> None:
    """Registered while a program is built, averages take in the weights after each run."""
    main, startup = Program(), Program()
    with program_guard(main, startup):
        x = layers.data("x", [None, 2])
        out = layers.fc(x, 1, bias_attr=False)
        SGD(0.1).minimize(layers.mean(out))
        ema, average = ExponentialMovingAverage(0.5), ModelAverage(1.0, 10, 10)
        ema.update()
    exe, seen = Executor(), []
    (w,) = main.all_parameters()
    for _ in range(3):
        exe.run(main, feed={"x": np.ones((2, 2))})
        seen.append(w.numpy().copy())
    with average.apply(exe):
        (shown,) = exe.run(main.clone(for_test=True), feed={"x": np.eye(2)}, fetch_list=[out])
        np.testing.assert_allclose(shown, np.mean(seen, axis=0), rtol=1e-6)
    with ema.apply(exe):
        expected = (seen[0] / 4 + seen[1] / 2 + seen[2]) / 2 / (1 - 0.5**3)
        np.testing.assert_allclose(w.numpy(), expected, rtol=1e-6)
    np.testing.assert_array_equal(w.numpy(), seen[-1])


def test_parameters_that_are_not_averaged() -> None:
    """do_model_average=False keeps a parameter out of both averages, also when a layer makes it."""
    kept = Parameter("kept", np.ones(2), do_model_average=False)
    plain, grad = Parameter("plain", np.ones(2)), np.ones(2, np.float32)
    opt = SGD(1.0)
    ema, mean = ExponentialMovingAverage(0.5), ModelAverage(1.0, 1, 10)
    for _ in range(3):
        opt.apply_gradients([(kept, grad), (plain, grad)])
        ema.update()
        mean.step()
    for average in (ema, mean):
        with average.apply():
            np.testing.assert_array_equal(kept.numpy(), [-2, -2])
            assert plain.numpy()[0] > -2
    made = layers.create_parameter([2], attr=ParamAttr("m", do_model_average=False))
    assert not default_startup_program().parameters["m"].do_model_average
    assert made.shape == (2,)


def test_model_average_as_an_optimizer_in_a_program() -> None:
    """minimize() with the documented arguments takes in the weights after each run, and trains nothing."""
    with program_guard(Program(), Program()):
        out = layers.fc(layers.data("x", [None, 2]), 1, bias_attr=False, name="line")
        loss = layers.mean(out)
        average = ModelAverage(1.0, 10, 10)
        clip = ClipGradByNorm(0.1)
        ops, pairs = average.minimize(loss, None, no_grad_set=None, grad_clip=clip)
        assert ops == []
        assert [p.name for p, _ in pairs] == ["line.w_0"]
        average.apply_optimize(loss, None, average.backward(loss, parameter_list=["line.w_0"]))
        SGD(0.1).minimize(loss)
        exe, seen = Executor(), []
        for _ in range(3):
            exe.run(feed={"x": np.ones((2, 2))})
            seen.append(pairs[0][0].numpy().copy())
        assert average.num_updates == 3
        with average.apply(exe):
            np.testing.assert_allclose(pairs[0][0].numpy(), np.mean(seen, axis=0), rtol=1e-6)


def test_model_average_as_an_optimizer_of_arrays() -> None:
    """apply_gradients takes in the weights; clear_grad and set_dict are those of optimizers."""
    w, plain = Parameter("w", np.ones(2)), Parameter("plain", np.ones(2))
    opt, first, second = SGD(0.5), ModelAverage(1.0, 10, 10), ModelAverage(1.0, 10, 10)
    for _ in range(3):
        opt.apply_gradients([(w, np.ones(2))])
        assert first.apply_gradients([(w, np.ones(2))]) == []
    second.set_dict(first.state_dict())
    with second.apply():
        np.testing.assert_array_equal(w.numpy(), [0, 0])  # the mean of 0.5, 0 and -0.5
    w.grad = np.ones(2, np.float32)
    first.clear_grad()
    assert w.grad.tolist() == [0, 0]
    first.clear_grad(False)
    assert w.grad is None
    called = []
    with eager_guard():
        loss = layers.mean(layers.square(plain))
        pairs = ModelAverage(1.0).backward(loss, callbacks=[lambda p, g: called.append(p)])
    assert [p for p, _ in pairs] == called == [plain]
    np.testing.assert_array_equal(pairs[0][1], [1, 1])
