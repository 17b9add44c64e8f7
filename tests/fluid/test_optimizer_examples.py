"""The examples of the reference's fluid.optimizer page; only their imports are changed.

The page was extracted from the web and has lost lines (the optimizer, the reader): those are filled in.
"""
# The examples are printed as they stand, unused names, loop variables and formatting included, and
# use one name for things of several types.
# ruff: noqa: B007
# mypy: disable-error-code="assignment,attr-defined"

from typing import Any

import numpy
import numpy as np
import pytest

import psfleet.fluid as fluid

pytestmark = pytest.mark.quick


def reader(width: int = 13) -> list[tuple[Any, Any]]:
    """The lost line of the examples with a feeder: a batch of (x, y)."""
    random = numpy.random.default_rng(0)
    x = random.normal(size=(8, width)).astype("float32")
    return [(row, row[:1] * 2 + 1) for row in x]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: fluid.optimizer.AdagradOptimizer(learning_rate=0.2),
        lambda: fluid.optimizer.LarsMomentumOptimizer(learning_rate=0.001, momentum=0.9),
    ],
)
def test_adagrad_and_lars_momentum(optimizer: Any) -> None:
    """AdagradOptimizer and LarsMomentumOptimizer."""
    np_inp = np.array([[1.0, 2.0], [3.0, 4.0]], dtype=np.float32)
    inp = fluid.layers.data(name="inp", shape=[2, 2], append_batch_size=False)
    out = fluid.layers.fc(inp, size=3)
    out = fluid.layers.reduce_sum(out)
    optimizer = optimizer()
    optimizer.minimize(out)

    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    first = exe.run(feed={"inp": np_inp}, fetch_list=[out.name])
    assert exe.run(feed={"inp": np_inp}, fetch_list=[out.name])[0] < first[0]


def network() -> Any:
    """What the page leaves out."""
    x = fluid.data(name="x", shape=[None, 4])
    return fluid.layers.mean(fluid.layers.fc(x, size=1))


def test_apply_gradients() -> None:
    """The two halves of minimize."""
    loss = network()
    optimizer = fluid.optimizer.SGD(learning_rate=0.1)
    params_grads = optimizer.backward(loss)
    # you may append operations for params_grads here
    # ...
    optimizer.apply_gradients(params_grads)

    exe = fluid.Executor(fluid.CPUPlace())
    feed = {"x": np.ones((2, 4), "float32")}
    (first,) = exe.run(feed=feed, fetch_list=[loss])
    (second,) = exe.run(feed=feed, fetch_list=[loss])
    assert first - second == pytest.approx(0.1 * (4 + 1), rel=1e-4)


def test_set_dict() -> None:
    """State dicts of an embedding and of an optimizer go to files and come back."""
    with fluid.dygraph.guard():
        emb = fluid.dygraph.Embedding("emb", [10, 10])

        state_dict = emb.state_dict()
        fluid.save_dygraph(state_dict, "paddle_dy")

        adam = fluid.optimizer.Adam(learning_rate=fluid.layers.noam_decay(100, 10000))
        state_dict = adam.state_dict()
        fluid.save_dygraph(state_dict, "padle_dy")

        para_state_dict, opti_state_dict = fluid.load_dygraph("paddle_dy")

        adam.set_dict(opti_state_dict)
    np.testing.assert_array_equal(para_state_dict["weight"], emb.weight.numpy())


def test_adamax() -> None:
    """A program and a startup program of their own."""
    # First create the Executor.
    place = fluid.CPUPlace()  # fluid.CUDAPlace(0)
    exe = fluid.Executor(place)

    train_program = fluid.Program()
    startup_program = fluid.Program()
    with fluid.program_guard(train_program, startup_program):
        data = fluid.data(name="X", shape=[None, 1], dtype="float32")
        hidden = fluid.layers.fc(input=data, size=10)
        loss = fluid.layers.mean(hidden)
        adam = fluid.optimizer.AdamaxOptimizer(learning_rate=0.2)
        adam.minimize(loss)

    # Run the startup program once and only once.
    exe.run(startup_program)

    x = numpy.random.random(size=(10, 1)).astype("float32")
    outs = exe.run(program=train_program, feed={"X": x}, fetch_list=[loss.name])
    assert outs[0].shape == ()


OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda: fluid.optimizer.AdamOptimizer(0.01),
    "Ftrl": lambda: fluid.optimizer.Ftrl(learning_rate=0.1),
    "Momentum": lambda: fluid.optimizer.MomentumOptimizer(learning_rate=0.001, momentum=0.9),
    "RMSProp": lambda: fluid.optimizer.RMSProp(learning_rate=0.1),
    "SGD": lambda: fluid.optimizer.SGDOptimizer(learning_rate=0.001),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_with_a_feeder(name: str) -> None:
    """Adam, Ftrl, Momentum, RMSProp and SGD share one example."""
    place = fluid.CPUPlace()
    main = fluid.Program()
    with fluid.program_guard(main):
        x = fluid.layers.data(name="x", shape=[13], dtype="float32")
        y = fluid.layers.data(name="y", shape=[1], dtype="float32")
        y_predict = fluid.layers.fc(input=x, size=1, act=None)
        cost = fluid.layers.square_error_cost(input=y_predict, label=y)
        avg_cost = fluid.layers.mean(cost)

        optimizer = OPTIMIZERS[name]()
        optimizer.minimize(avg_cost)

        fetch_list = [avg_cost]
        feeder = fluid.DataFeeder(place=place, feed_list=[x, y])
        exe = fluid.Executor(place)
        exe.run(fluid.default_startup_program())
        losses = []
        for data in [reader()] * 5:
            losses.append(exe.run(main, feed=feeder.feed(data), fetch_list=fetch_list)[0])
    assert losses[-1] < losses[0]


def test_decayed_adagrad() -> None:
    """DecayedAdagradOptimizer."""
    x = fluid.data(name="x", shape=[None, 10], dtype="float32")
    trans = fluid.layers.fc(x, 100)
    cost = fluid.layers.reduce_mean(trans)
    optimizer = fluid.optimizer.DecayedAdagradOptimizer(learning_rate=0.2)
    optimizer.minimize(cost)
    fluid.Executor().run(feed={"x": np.ones((2, 10), "float32")}, fetch_list=[cost])


def test_dgc_momentum() -> None:
    """DGCMomentumOptimizer."""
    optimizer = fluid.optimizer.DGCMomentumOptimizer(
        learning_rate=0.0001,
        momentum=0.9,
        rampup_step=1000,
        rampup_begin_step=1252,
        sparsity=[0.999, 0.999],
    )
    assert optimizer.get_lr() == 0.0001


def test_exponential_moving_average() -> None:
    """Averages in place of the weights, with and without restoring at the end of the block."""
    data = fluid.data(name="x", shape=[-1, 5], dtype="float32")
    hidden = fluid.layers.fc(input=data, size=10)
    cost = fluid.layers.mean(hidden)

    test_program = fluid.default_main_program().clone(for_test=True)

    optimizer = fluid.optimizer.Adam(learning_rate=0.001)
    optimizer.minimize(cost)

    global_steps = fluid.layers.learning_rate_scheduler._decay_step_counter()
    ema = fluid.optimizer.ExponentialMovingAverage(0.999, thres_steps=global_steps)
    ema.update()

    place = fluid.CPUPlace()
    exe = fluid.Executor(place)
    exe.run(fluid.default_startup_program())

    for pass_id in range(3):
        for batch_id in range(6):
            data = numpy.random.random(size=(10, 5)).astype("float32")
            exe.run(program=fluid.default_main_program(), feed={"x": data}, fetch_list=[cost.name])
        trained = exe.run(test_program, feed={"x": data}, fetch_list=[hidden.name])[0]

        # usage 1
        with ema.apply(exe):
            data = numpy.random.random(size=(10, 5)).astype("float32")
            exe.run(program=test_program, feed={"x": data}, fetch_list=[hidden.name])

        # usage 2
        with ema.apply(exe, need_restore=False):
            exe.run(program=test_program, feed={"x": data}, fetch_list=[hidden.name])
        averaged = exe.run(test_program, feed={"x": data}, fetch_list=[hidden.name])[0]
        ema.restore(exe)
        again = exe.run(test_program, feed={"x": data}, fetch_list=[hidden.name])[0]
        assert not np.array_equal(averaged, again)
        assert trained.shape == again.shape


def test_lamb() -> None:
    """Parameters excluded from weight decay by a function of their names."""
    data = fluid.data(name="x", shape=[-1, 5], dtype="float32")
    hidden = fluid.layers.fc(input=data, size=10)
    cost = fluid.layers.mean(hidden)
    values = []

    def exclude_fn(param: Any) -> bool:
        values.append(param.name)
        return bool(param.name.endswith(".b_0"))

    optimizer = fluid.optimizer.Lamb(learning_rate=0.002, exclude_from_weight_decay_fn=exclude_fn)
    optimizer.minimize(cost)
    fluid.Executor().run(feed={"x": np.ones((2, 5), "float32")}, fetch_list=[cost])
    assert set(values) >= {"fc_0.w_0", "fc_0.b_0"}


@pytest.mark.parametrize("restoring", [True, False])
def test_model_average(restoring: bool) -> None:
    """The class's example (and that of apply), and that of restore, over some of its 12,500 steps."""
    # First create the Executor.
    place = fluid.CPUPlace()  # fluid.CUDAPlace(0)
    exe = fluid.Executor(place)

    train_program = fluid.Program()
    startup_program = fluid.Program()
    with fluid.program_guard(train_program, startup_program):
        # build net
        data = fluid.data(name="X", shape=[None, 1], dtype="float32")
        hidden = fluid.layers.fc(input=data, size=10)
        loss = fluid.layers.mean(hidden)
        optimizer = fluid.optimizer.Momentum(learning_rate=0.2, momentum=0.1)
        optimizer.minimize(loss)

        # build ModelAverage optimizer
        model_average = fluid.optimizer.ModelAverage(
            0.15, min_average_window=10000, max_average_window=12500
        )

    exe.run(startup_program)
    for i in range(100):
        x = numpy.random.random(size=(10, 1)).astype("float32")
        outs = exe.run(program=train_program, feed={"X": x}, fetch_list=[loss.name])
    evaluation = train_program.clone(for_test=True)
    weights = exe.run(evaluation, fetch_list=["fc_0.w_0"])[0]
    assert outs[0] < 0

    if restoring:
        # apply ModelAverage
        with model_average.apply(exe):
            x = numpy.random.random(size=(10, 1)).astype("float32")
            exe.run(program=train_program, feed={"X": x}, fetch_list=[loss.name])
            assert (exe.run(evaluation, fetch_list=["fc_0.w_0"])[0] > weights).all()
    else:
        # apply ModelAverage
        with model_average.apply(exe, False):
            x = numpy.random.random(size=(10, 1)).astype("float32")
            exe.run(program=train_program, feed={"X": x}, fetch_list=[loss.name])

        # restore Parameters
        model_average.restore(exe)
    np.testing.assert_array_equal(exe.run(evaluation, fetch_list=["fc_0.w_0"])[0], weights)
