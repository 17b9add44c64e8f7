"""The base class: plain use, rates, clipping, state, programs, eager mode, errors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet import fleet, layers, optimizer
from psfleet.core.base.errors import UsageError
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program.program import Program, eager_guard, program_guard
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import active, current
from psfleet.optimizer import SGD, Adam, ClipGradByNorm, L1Decay, L2Decay, Momentum, lr
from tests.runtimes import CountingRuntime

pytestmark = pytest.mark.quick

ONE = np.ones(3, np.float32)


def test_plain_use() -> None:
    """A parameter, an array, a gradient and an optimizer need neither graph nor fleet."""
    w, e = psfleet.Parameter("w", ONE), psfleet.Parameter("e", np.ones((4, 5)))
    opt = optimizer.Adam(0.1)
    assert opt.state_dict() == {}
    assert opt.parameters == []
    opt.apply_gradients(
        [(w, ONE), (e, psfleet.SparseGrad(np.array([2, 2]), np.ones((2, 5), np.float32)))]
    )
    assert opt.parameters == [w, e]
    np.testing.assert_allclose(w.numpy(), 0.9 * ONE, rtol=1e-6)
    # The sparse rule's corrections are a step ahead.
    ahead = 0.1 * np.sqrt(1 - 0.999**2) / (1 - 0.9**2)
    moved = 1 - ahead * 0.1 / np.sqrt(0.001)
    np.testing.assert_allclose(e.numpy()[:, 0], [1, 1, moved, 1], rtol=1e-6)
    state = opt.state_dict()
    slots = {f"{name}.{slot}" for name in "we" for slot in ("moment1", "moment2", "step")}
    assert set(state) == slots | {"global_step"}
    assert state["e.moment1"].shape == (4, 5)
    np.testing.assert_allclose(state["w.moment1"], 0.1 * ONE, rtol=1e-6)


def test_one_push_and_one_pull_a_step() -> None:
    """A step sends all gradients in one push; values that changed together come in one pull."""

    counting = CountingRuntime()
    current().use(counting)
    parameters = [Parameter(f"p{i}", ONE) for i in range(3)]
    opt = SGD(0.1)
    for _ in range(2):
        opt.apply_gradients([(p, ONE) for p in parameters])
        for p in parameters:
            p.numpy()
    assert counting.calls == [("push", 3), ("pull", 3)] * 2


def test_rate_factors() -> None:
    """A parameter's learning_rate multiplies the optimizer's."""
    w = Parameter("w", ONE, learning_rate=0.5)
    SGD(1.0).apply_gradients([(w, ONE)])
    assert w.numpy().tolist() == [0.5] * 3


def test_rates() -> None:
    """The rate of each push is the current one: set, scheduled, or advanced by itself."""
    w, opt = Parameter("w", 0 * ONE), SGD(1.0)
    opt.set_lr(0.5)
    assert opt.get_lr() == 0.5
    opt.apply_gradients([(w, -ONE)])
    scheduler = lr.StepDecay(0.25, 1, 0.5)
    opt.set_lr_scheduler(scheduler)
    opt.apply_gradients([(w, -ONE)])
    scheduler.step()
    opt.apply_gradients([(w, -ONE)])
    assert w.numpy().tolist() == [0.875] * 3
    with pytest.raises(UsageError, match=r"set_lr\(0.1\) conflicts with StepDecay"):
        opt.set_lr(0.1)
    older = SGD(lr.exponential_decay(1.0, 1, 0.5))
    for _ in range(3):
        older.apply_gradients([(w, -ONE)])
    assert w.numpy().tolist() == [0.875 + 1.75] * 3


def test_regularizers() -> None:
    """A parameter's own regularizer wins over the optimizer's; a number means L2."""
    names = [Parameter("own", ONE, regularizer=L1Decay(0.5)), Parameter("common", 2 * ONE)]
    SGD(1.0, weight_decay=0.25).apply_gradients([(p, 0 * ONE) for p in names])
    assert [p.numpy()[0] for p in names] == [0.5, 1.5]


def test_append_regularization() -> None:
    """The pairs come back with the regularizers' gradients added, sparse ones as arrays."""
    w, e = Parameter("w", 2 * ONE), Parameter("e", np.ones((3, 1)))
    pairs = [(w, ONE), (e, SparseGrad(np.array([1, 1]), np.ones((2, 1), np.float32)))]
    actual = SGD(0.1).append_regularization_ops(pairs, L2Decay(0.5))
    assert actual[0][1].tolist() == [2] * 3
    assert actual[1][1].ravel().tolist() == [0.5, 2.5, 0.5]


def test_untrainable_and_missing_gradients_rest() -> None:
    """A parameter that is not trainable or has no gradient is left alone."""
    still, idle, w = Parameter("s", ONE, trainable=False), Parameter("i", ONE), Parameter("w", ONE)
    SGD(1.0).apply_gradients([(still, ONE), (idle, None), (w, ONE)])
    assert [p.numpy()[0] for p in (still, idle, w)] == [1, 1, 0]


def test_step_and_clear() -> None:
    """step() uses the gradients left in `grad`; clear_grad sets them to zero or drops them."""
    w, e = Parameter("w", ONE), Parameter("e", np.ones((3, 5)), sparse=True)
    opt = Momentum(1.0, 0.5, parameters=[w, e])
    w.grad, e.grad = ONE.copy(), SparseGrad(np.array([1]), np.ones((1, 5), np.float32))
    opt.step()
    opt.clear_grad()
    assert w.grad.tolist() == [0] * 3
    assert isinstance(e.grad, SparseGrad)
    assert len(e.grad.ids) == 0
    opt.step()  # with zero gradients the velocity goes on
    assert w.numpy()[0] == -0.5
    assert e.numpy()[:, 2].tolist() == [1, -0.5, 1]
    opt.clear_grad(set_to_zero=False)
    assert w.grad is None


def test_a_loaded_model_is_seen(tmp_path: Path) -> None:
    """After fleet.load_model the next run and numpy() have the loaded values."""
    with program_guard(Program(), Program()):
        loss, _ = model()
        test = psfleet.default_main_program().clone(for_test=True)
        SGD(0.5).minimize(loss)
        exe = Executor()
        exe.run(feed=FEED)
        fleet.save_persistables(str(tmp_path / "model"))
        expected = exe.run(test, feed=FEED, fetch_list=[loss])[0]
        exe.run(feed=FEED)
        assert exe.run(test, feed=FEED, fetch_list=[loss])[0] != expected
        fleet.load_model(str(tmp_path / "model"))
        assert exe.run(test, feed=FEED, fetch_list=[loss])[0] == expected


def test_a_name_used_again() -> None:
    """Another parameter of the same name starts from its own value."""
    for start in (1.0, 5.0):
        w = Parameter("w", [start])
        Adam(0.1).apply_gradients([(w, np.ones(1))])
        np.testing.assert_allclose(w.numpy(), start - 0.1, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_multi_precision(dtype: str) -> None:
    """A half-precision parameter shows its float32 master rounded; small updates are not lost, and a
    state with the masters goes on with the same bits.
    """
    start = np.array([1.0, -3.0, 0.125], np.float16)
    w, v = Parameter("w", start, dtype=dtype), Parameter("v", start.astype(np.float32))  # type: ignore[arg-type]
    first, second, plain = (Momentum(1e-5, 0.9, multi_precision=True) for _ in range(3))
    for number in range(400):
        if number == 200:
            second.set_state_dict(first.state_dict())
        (first if number < 200 else second).apply_gradients([(w, ONE)])
        plain.apply_gradients([(v, ONE)])
    masters = second.state_dict()["master_weights"]
    np.testing.assert_array_equal(masters["w"], v.numpy())
    assert plain.state_dict()["master_weights"] == {}
    digits = 11 if dtype == "float16" else 8
    mantissa, exponent = np.frexp(v.numpy())
    expected = np.ldexp(np.rint(np.ldexp(mantissa, digits)), exponent - digits)
    np.testing.assert_array_equal(w.numpy().astype(np.float32), expected)
    assert w.numpy().dtype == (np.float16 if dtype == "float16" else np.float32)


def model() -> tuple[Any, list[Any]]:
    """A loss over a lookup and a dense layer."""
    ids, y = layers.data("ids", [None, 2], "int64"), layers.data("y", [None, 1])
    rows = layers.embedding(ids, size=[6, 5], is_sparse=True, param_attr="table")
    out = layers.fc(layers.reshape(rows, [-1, 10]), 1, param_attr="fc.w", bias_attr="fc.b")
    return layers.mean(layers.square_error_cost(out, y)), [out]


FEED = {"ids": np.array([[0, 1], [1, 5]]), "y": np.array([[1.0], [-1.0]], np.float32)}


def test_static_minimize() -> None:
    """minimize() returns (operations, pairs); each run of the program then ends with an update."""
    with program_guard(Program(), Program()):
        loss, _ = model()
        operations, pairs = Adam(0.05).minimize(loss)
        exe = Executor()
        losses = [float(exe.run(feed=FEED, fetch_list=[loss])[0]) for _ in range(30)]
    assert len(operations) == 1
    assert [p.name for p, _ in pairs] == ["table", "fc.w", "fc.b"]
    assert losses[-1] < 0.1 * losses[0]


def test_minimize_equals_its_parts() -> None:
    """backward and apply_gradients together do what minimize does; callbacks see each pair."""
    weights = []
    for parts in (False, True):
        current().use(EmbeddedRuntime())
        main = Program()
        with program_guard(main, Program()):
            loss, _ = model()
            opt = Momentum(0.1, grad_clip=ClipGradByNorm(0.5))
            if parts:
                seen: list[str] = []
                pairs = opt.backward(loss, callbacks=[lambda p, g, seen=seen: seen.append(p.name)])
                assert seen == [p.name for p, _ in pairs]
                opt.apply_gradients(pairs)
            else:
                opt.minimize(loss)
            for _ in range(4):
                Executor().run(feed=FEED)
            weights.append([p.numpy() for p in main.all_parameters()])
    for first, second in zip(*weights, strict=True):
        np.testing.assert_array_equal(first, second)


def test_parameter_choice() -> None:
    """parameters (names or parameters) and no_grad_set choose what is updated."""
    with program_guard(Program(), Program()):
        loss, _ = model()
        opt, other = SGD(0.1), Parameter("unused", ONE)
        listed = SGD(0.1, parameters=[other, *psfleet.default_main_program().all_parameters()[1:]])
        assert [p.name for p, _ in listed.backward(loss)] == ["fc.w", "fc.b"]
        chosen = opt.backward(loss, parameter_list=["fc.w", "fc.b"])
        assert [p.name for p, _ in chosen] == ["fc.w", "fc.b"]
        assert [p.name for p, _ in opt.backward(loss, no_grad_set={"table", "fc.b"})] == ["fc.w"]


def test_epsilon_of_zero_is_the_formula_as_it_stands() -> None:
    """0 is allowed; a value that has had no gradient but 0 is then 0 / 0, as in the reference."""
    for make in (optimizer.Adam, optimizer.Adagrad, optimizer.RMSProp, optimizer.Adadelta):
        w = Parameter("w", ONE)
        made: Any = make(0.1, epsilon=0.0)
        made.apply_gradients([(w, np.array([1, 0, -1], np.float32))])
        assert np.isnan(w.numpy()).tolist() == [False, True, False]


def test_eager_minimize() -> None:
    """With a loss that has a value minimize() updates at once, with or without backward() before."""
    with eager_guard():
        w = Parameter("w", np.ones((2, 1)))
        opt = SGD(1.0, parameters=[w])
        for explicit in (True, False, False):
            loss = layers.mean(layers.matmul(psfleet.to_variable(np.ones((1, 2), np.float32)), w))
            if explicit:
                loss.backward()
            operations, pairs = opt.minimize(loss)
            assert operations == []
            assert [p.name for p, _ in pairs] == ["w"]
            opt.clear_grad()
        assert w.numpy().ravel().tolist() == [-2, -2]


def test_empty_rows_are_a_step() -> None:
    """A gradient by rows without rows counts as an update and changes nothing, clipped or not."""
    for clip in (None, optimizer.ClipGradByGlobalNorm(1.0)):
        e, opt = Parameter("e", np.ones((3, 2)), sparse=True), SGD(1.0, grad_clip=clip)
        opt.apply_gradients([(e, SparseGrad(np.empty(0, np.int64), np.empty((0, 2), np.float32)))])
        assert opt.state_dict()["e.step"] == 1
        assert e.numpy().tolist() == np.ones((3, 2)).tolist()


def test_a_run_starts_from_the_fleet_s_value() -> None:
    """A program's first run uses what the tables hold (a loaded checkpoint), not its own start."""
    with program_guard(Program(), Program()):
        loss, _ = model()
        SGD(0.0).minimize(loss)
        exe = Executor()
        before = exe.run(feed=FEED, fetch_list=[loss])[0]
        parameter = psfleet.default_main_program().all_parameters()[1]
    other = EmbeddedRuntime()
    for spec in active().specs().values():
        other.create(spec, np.full(spec.shape, 2, np.float32) if spec.kind == "dense" else None)
    current().use(other)
    with program_guard(Program(), Program()):
        loss, _ = model()
        SGD(0.0).minimize(loss)
        after = exe.run(feed=FEED, fetch_list=[loss])[0]
    assert before != after
    assert parameter.numpy()[0] != 2
