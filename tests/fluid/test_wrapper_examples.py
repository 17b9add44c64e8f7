"""The examples of RecomputeOptimizer, DistributedOptimizer and PipelineOptimizer's page."""
# The examples are printed as they stand, unused names, loop variables and formatting included, and
# use one name for things of several types.
# ruff: noqa: UP031
# mypy: disable-error-code="assignment,attr-defined"

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet.fluid as fluid
from psfleet import fleet

pytestmark = pytest.mark.quick


def gen_data() -> Any:
    return {
        "x": np.random.random(size=(32, 32)).astype("float32"),
        "y": np.random.randint(2, size=(32, 1)).astype("int64"),
    }


def mlp(input_x: Any, input_y: Any, hid_dim: int = 128, label_dim: int = 2) -> Any:
    print(input_x)
    fc_1 = fluid.layers.fc(input=input_x, size=hid_dim)
    prediction = fluid.layers.fc(input=[fc_1], size=label_dim, act="softmax")
    cost = fluid.layers.cross_entropy(input=prediction, label=input_y)
    sum_cost = fluid.layers.reduce_mean(cost)
    return sum_cost, fc_1, prediction


def test_recompute_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    """RecomputeOptimizer, as printed."""
    input_x = fluid.layers.data(name="x", shape=[32], dtype="float32")
    input_y = fluid.layers.data(name="y", shape=[1], dtype="int64")
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
        cost_val = exe.run(
            feed=gen_data(), program=fluid.default_main_program(), fetch_list=[cost.name]
        )
        print("step=%d cost=%f" % (i, cost_val[0]))
    assert "step=9 cost=" in capsys.readouterr().out


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
    (first,) = exe.run(feed=feed, fetch_list=[loss])
    assert exe.run(feed=feed, fetch_list=[loss])[0] < first


def test_pipeline_optimizer(tmp_path: Path) -> None:
    """PipelineOptimizer with train_from_dataset; the file list and the batch size are filled in."""
    layers = fluid.layers
    (tmp_path / "dataA.txt").write_text("1 3 1 4\n1 9 1 0\n1 3 1 1\n")
    batch_size = 2

    x = fluid.layers.data(name="x", shape=[1], dtype="int64", lod_level=0)
    y = fluid.layers.data(name="y", shape=[1], dtype="int64", lod_level=0)
    emb_x = layers.embedding(
        input=x, param_attr=fluid.ParamAttr(name="embx"), size=[10, 2], is_sparse=False
    )
    emb_y = layers.embedding(
        input=y,
        param_attr=fluid.ParamAttr(name="emby", learning_rate=0.9),
        size=[10, 2],
        is_sparse=False,
    )
    concat = layers.concat([emb_x, emb_y], axis=1)
    fc = layers.fc(input=concat, name="fc", size=1, num_flatten_dims=1, bias_attr=False)
    loss = layers.reduce_mean(fc)
    optimizer = fluid.optimizer.SGD(learning_rate=0.5)
    optimizer = fluid.optimizer.PipelineOptimizer(
        optimizer,
        cut_list=[[emb_x, emb_y], [loss]],
        place_list=[fluid.CPUPlace(), fluid.CUDAPlace(0), fluid.CPUPlace()],
        concurrency_list=[1, 1, 4],
        queue_size=2,
        sync_steps=1,
    )
    optimizer.minimize(loss)
    place = fluid.CPUPlace()
    exe = fluid.Executor(place)
    exe.run(fluid.default_startup_program())
    filelist = ["dataA.txt"]  # you should set your own filelist, e.g. filelist = ["dataA.txt"]
    dataset = fluid.DatasetFactory().create_dataset("FileInstantDataset")
    dataset.set_use_var([x, y])
    dataset.set_batch_size(batch_size)
    dataset.set_filelist(filelist)
    before = exe.run(fluid.default_main_program().clone(for_test=True), fetch_list=["embx", "emby"])
    batches = exe.train_from_dataset(
        fluid.default_main_program(),
        dataset,
        debug=False,
        fetch_list=[],
        fetch_info=[],
        print_period=1,
    )
    after = exe.run(fluid.default_main_program().clone(for_test=True), fetch_list=["embx", "emby"])
    assert batches == 2
    changed = [
        np.flatnonzero((a != b).any(axis=1)).tolist() for a, b in zip(before, after, strict=True)
    ]
    assert changed == [[3, 9], [0, 1, 4]]
    assert [(s.part, s.forward, s.backward) for s in optimizer.sections] == [
        (0, True, False),
        (1, True, True),
        (0, False, True),
    ]
