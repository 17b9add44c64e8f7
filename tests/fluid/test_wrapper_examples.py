"""The examples of RecomputeOptimizer, DistributedOptimizer and PipelineOptimizer's page."""

from typing import Any

import numpy as np
import pytest

import psfleet.fluid as fluid
from psfleet import fleet
from psfleet.errors import UsageError


def gen_data() -> Any:
    return {"x": np.random.random(size=(32, 32)).astype('float32'),
    "y": np.random.randint(2, size=(32, 1)).astype('int64')}


def mlp(input_x: Any, input_y: Any, hid_dim: int = 128, label_dim: int = 2) -> Any:
    print(input_x)
    fc_1 = fluid.layers.fc(input=input_x, size=hid_dim)
    prediction = fluid.layers.fc(input=[fc_1], size=label_dim, act='softmax')
    cost = fluid.layers.cross_entropy(input=prediction, label=input_y)
    sum_cost = fluid.layers.reduce_mean(cost)
    return sum_cost, fc_1, prediction


def test_recompute_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    """RecomputeOptimizer, as printed."""
    input_x = fluid.layers.data(name="x", shape=[32], dtype='float32')
    input_y = fluid.layers.data(name="y", shape=[1], dtype='int64')
    cost, fc_1, pred = mlp(input_x, input_y)

    sgd = fluid.optimizer.Adam(learning_rate=0.01)
    sgd = fluid.optimizer.RecomputeOptimizer(sgd)
    sgd._set_checkpoints([fc_1, pred])
    sgd.minimize(cost)

    print("Finished optimize")
    place = fluid.CPUPlace()
    exe = fluid.Executor(place)
    exe.run(fluid.default_startup_program())
    step = 10

    for i in range(step):
        cost_val = exe.run(feed=gen_data(),
               program=fluid.default_main_program(),
               fetch_list=[cost.name])
        print("step=%d cost=%f" % (i, cost_val[0]))
    assert "step=9 cost=0." in capsys.readouterr().out


def test_recompute_trains_to_the_same_bits() -> None:
    """Wrapped or not, alone or in a distributed optimizer."""
    feeds = [gen_data() for _ in range(4)]

    def weights(wrap: Any) -> Any:
        with fluid.unique_name.guard(), fluid.program_guard(fluid.Program(), fluid.Program()):
            cost, fc_1, _ = mlp(fluid.layers.data("x", [32]), fluid.layers.data("y", [1], dtype="int64"))
            wrap(fc_1).minimize(cost)
            exe = fluid.Executor()
            for feed in feeds:
                exe.run(feed=feed)
            return exe.run(fluid.default_main_program().clone(for_test=True),
                           fetch_list=["fc_0.w_0"])[0]

    def recompute(fc_1: Any) -> Any:
        wrapped = fluid.optimizer.RecomputeOptimizer(fluid.optimizer.SGD(0.1))
        wrapped._set_checkpoints([fc_1])
        return wrapped

    plain = weights(lambda fc_1: fluid.optimizer.SGD(0.1))
    for wrap in (recompute, lambda fc_1: fleet.distributed_optimizer(recompute(fc_1))):
        # Another run in this process needs tables of its own.
        from psfleet import runtime
        from psfleet.embedded import EmbeddedRuntime
        engine = EmbeddedRuntime()
        before = runtime.use(engine)
        np.testing.assert_array_equal(weights(wrap), plain)
        runtime.use(before)
        engine.close()


def test_recompute_without_checkpoints_is_refused() -> None:
    """With a sentence."""
    cost, _, _ = mlp(fluid.layers.data("x", [32]), fluid.layers.data("y", [1], dtype="int64"))
    with pytest.raises(UsageError, match="has no checkpoints; call _set_checkpoints first"):
        fluid.optimizer.RecomputeOptimizer(fluid.optimizer.SGD(0.1)).minimize(cost)


def test_distributed_optimizer() -> None:
    """DistributedOptimizer.apply_gradients, in a fleet of one process."""
    x = fluid.layers.data("x", [32])
    loss = fluid.layers.mean(fluid.layers.fc(x, 1))
    optimizer = fleet.distributed_optimizer(fluid.optimizer.SGD(learning_rate=0.1))
    params_grads = optimizer.backward(loss)
    # you may append operations for params_grads here
    # ...
    optimizer.apply_gradients(params_grads)
    feed = {"x": gen_data()["x"]}
    exe = fluid.Executor()
    first, = exe.run(feed=feed, fetch_list=[loss])
    assert exe.run(feed=feed, fetch_list=[loss])[0] < first
