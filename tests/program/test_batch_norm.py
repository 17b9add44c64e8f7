"""Normalisation over batches: values, gradients, and the moving statistics as state of the fleet."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet import fluid, layers, optimizer, to_variable
from psfleet.checkpoint import read_specs
from psfleet.clip import ClipGradByGlobalNorm
from psfleet.core.base.errors import PsfleetError
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.execution.inference import load_inference, save_inference
from psfleet.core.graph.program.ops.normalize import BatchNorm
from psfleet.core.graph.program.program import default_main_program, eager_guard
from psfleet.core.graph.program.variable import apply
from tests.optimizer.workers import run_two_workers
from tests.program.numeric import check_gradient, concrete

RNG = np.random.default_rng(6)
BATCHES = (3 + 2 * RNG.normal(size=(6, 8, 3))).astype(np.float32)


def moving(momentum: float, batches: Any) -> tuple[Any, Any]:
    """Mean and variance after these batches, in float64."""
    mean, variance = np.zeros(batches.shape[-1]), np.ones(batches.shape[-1])
    for batch in batches.astype(np.float64):
        mean = momentum * mean + (1 - momentum) * batch.mean(axis=0)
        variance = momentum * variance + (1 - momentum) * batch.var(axis=0)
    return mean, variance


@pytest.mark.parametrize(
    ("shape", "layout", "axis"),
    [
        ((6, 3), "NCHW", 1),
        ((4, 3, 2, 5), "NCHW", 1),
        ((4, 2, 5, 3), "NHWC", 3),
        ((4, 3, 7), "NCHW", 1),
    ],
)
def test_values_in_training(shape: tuple[int, ...], layout: str, axis: int) -> None:
    """Each channel has mean 0 and variance 1 over all other axes, then scale and shift."""
    x = (5 + 3 * RNG.normal(size=shape)).astype(np.float32)
    data = layers.data("x", [None, *shape[1:]])
    out = layers.batch_norm(data, data_layout=layout, act="relu", name="n")
    plain = layers.batch_norm(data, data_layout=layout, param_attr=False, bias_attr=False)
    relu, normal = Executor().run(feed={"x": x}, fetch_list=[out, plain])
    others = tuple(i for i in range(x.ndim) if i != axis)
    expected = (x - x.mean(axis=others, keepdims=True)) / np.sqrt(
        x.var(axis=others, keepdims=True) + 1e-5
    )
    np.testing.assert_allclose(normal, expected, atol=2e-5)
    np.testing.assert_allclose(relu, np.maximum(expected, 0), atol=2e-5)


@pytest.mark.parametrize("how", ["batch", "is_test", "fixed"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_gradients(how: str, layout: str) -> None:
    """By input, scale and shift they are those of central differences."""
    axis = 1 if layout == "NCHW" else 3
    shape = (3, 2, 2, 4) if axis == 3 else (3, 4, 2, 2)
    op = BatchNorm(axis, 0.9, 1e-2, how == "is_test", how == "fixed")
    x, scale, shift = RNG.normal(size=shape), RNG.normal(size=4), RNG.normal(size=4)
    mean, variance = RNG.normal(size=4), 0.5 + RNG.random(4)

    def layer(x: Any, scale: Any, shift: Any) -> Any:
        return apply(op, x, concrete(mean), concrete(variance), scale, shift)

    check_gradient(layer, x, scale, shift)


def model(**options: Any) -> tuple[Any, Any]:
    """(output, loss) of one normalised layer."""
    x = layers.data("x", [None, 3])
    out = layers.batch_norm(x, name="n", **options)
    return out, layers.mean(layers.square(layers.fc(out, 1, name="fc")))


def test_moving_statistics(tmp_path: Path) -> None:
    """Each update takes the batch's mean and biased variance into the moving ones; a program cloned for tests
    normalises by them and leaves them; so do an inference model and a run without an optimizer.
    """
    out, loss = model(momentum=0.7)
    test = default_main_program().clone(for_test=True)
    executor = Executor()
    executor.run(feed={"x": BATCHES[0]}, fetch_list=[loss])
    optimizer.Adam(0.1).minimize(loss)
    for batch in BATCHES:
        executor.run(feed={"x": batch}, fetch_list=[loss])
    (outputs,) = executor.run(test, feed={"x": BATCHES[0]}, fetch_list=[out])
    names = ["n.w_1", "n.w_2", "n.w_0", "n.b_0"]
    mean, variance, scale, shift = executor.run(test, feed={"x": BATCHES[1]}, fetch_list=names)
    expected = moving(0.7, BATCHES)
    np.testing.assert_allclose(mean, expected[0], rtol=1e-5)
    np.testing.assert_allclose(variance, expected[1], rtol=1e-5)
    by_hand = (BATCHES[0] - mean) / np.sqrt(variance + 1e-5) * scale + shift
    np.testing.assert_allclose(outputs, by_hand, rtol=1e-4, atol=1e-5)
    save_inference(str(tmp_path), ["x"], [out])
    loaded, feeds, targets = load_inference(str(tmp_path))
    (predicted,) = executor.run(loaded, feed={feeds[0]: BATCHES[0]}, fetch_list=targets)
    np.testing.assert_array_equal(predicted, outputs)


def test_use_global_stats() -> None:
    """Training too normalises by the moving statistics, and leaves them as they are."""
    out, loss = model(use_global_stats=True, moving_mean_name="mu", moving_variance_name="var")
    optimizer.SGD(0.0).minimize(loss)
    outputs, mean, variance = Executor().run(feed={"x": BATCHES[0]}, fetch_list=[out, "mu", "var"])
    np.testing.assert_allclose(outputs, BATCHES[0] / np.sqrt(np.float32(1 + 1e-5)), rtol=1e-6)
    assert (mean.tolist(), variance.tolist()) == ([0] * 3, [1] * 3)


def recomputing(checkpoint: Any) -> Any:
    """An optimizer of a program that is computed twice from its begin to the checkpoint."""
    made = optimizer.RecomputeOptimizer(optimizer.SGD(0.1))
    made._set_checkpoints([checkpoint])
    return made


@pytest.mark.parametrize("name", ["SGD", "Ftrl", "DGCMomentum", "LookAhead", "clipped", "twice"])
def test_no_optimizer_trains_them(name: str) -> None:
    """Rule, decay, clip, compression and rate of the optimizer do not touch the moving statistics; a forward
    pass that recompute runs twice is one batch of them."""
    out, loss = model(momentum=0.7)
    made: dict[str, Any] = {
        "SGD": lambda: optimizer.SGD(0.3, weight_decay=0.5),
        "Ftrl": lambda: optimizer.Ftrl(0.3, 0.1, 0.1),
        "DGCMomentum": lambda: optimizer.DGCMomentum(0.1, 0.9, 0),
        "LookAhead": lambda: optimizer.LookAhead(optimizer.SGD(0.1), 0.5, 2),
        "clipped": lambda: optimizer.SGD(0.1, grad_clip=ClipGradByGlobalNorm(1e-3)),
        "twice": lambda: recomputing(out),
    }
    made[name]().minimize(loss)
    executor = Executor()
    for batch in BATCHES:
        executor.run(feed={"x": batch}, fetch_list=[loss])
    outputs = executor.run(
        default_main_program().clone(for_test=True),
        feed={"x": BATCHES[0]},
        fetch_list=["n.w_1", "n.w_2"],
    )
    for one, other in zip(outputs, moving(0.7, BATCHES), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("width", ["NCHW", "NHWC"])
def test_eager_layer(width: str) -> None:
    """nn.BatchNorm normalises by the batch in training, by the moving statistics after eval(); a step takes
    in the mean of the batches since the last one, and state_dict has all four arrays.
    """
    with eager_guard():
        layer = fluid.nn.BatchNorm(3, momentum=0.7, data_layout=width)
        opt = optimizer.SGD(0.1, parameters=layer.parameters())
        for pair in BATCHES.reshape(3, 2, 8, 3):
            for batch in pair:
                fluid.layers.mean(fluid.layers.square(layer(to_variable(batch)))).backward()
            opt.step()
            opt.clear_grad()
        expected_mean: Any = np.zeros(3)
        expected_variance: Any = np.ones(3)
        for both in BATCHES.reshape(3, 2, 8, 3).astype(np.float64):
            expected_mean = 0.7 * expected_mean + 0.3 * both.mean(axis=1).mean(axis=0)
            expected_variance = 0.7 * expected_variance + 0.3 * both.var(axis=1).mean(axis=0)
        state = layer.state_dict()
        mean, variance = state["_mean"], state["_variance"]
        np.testing.assert_allclose(mean, expected_mean, rtol=1e-5)
        np.testing.assert_allclose(variance, expected_variance, rtol=1e-5)
        layer.eval()
        out = layer(to_variable(BATCHES[0])).numpy()
        by_hand = (BATCHES[0] - mean) / np.sqrt(variance + 1e-5) * state["weight"] + state["bias"]
        np.testing.assert_allclose(out, by_hand, rtol=1e-4, atol=1e-5)
        other = fluid.dygraph.BatchNorm(3)
        other.set_state_dict(state)
        other.eval()
        np.testing.assert_array_equal(other(to_variable(BATCHES[0])).numpy(), out)


SCRIPT = """
import hashlib, sys
import numpy as np
import psfleet as ps
from psfleet import fleet, layers, optimizer

fleet.init()
x = layers.data("x", [None, 3])
loss = layers.mean(layers.square(layers.fc(layers.batch_norm(x, momentum=0.7, name="n"), 1, name="fc")))
fleet.distributed_optimizer(optimizer.Adam(0.1)).minimize(loss)
exe = ps.Executor()
for step in np.load("batches.npy").reshape(3, 2, 8, 3):
    exe.run(feed={"x": step[fleet.worker_index()]}, fetch_list=[loss])
names = ["n.w_1", "n.w_2", "n.w_0", "n.b_0", "fc.w_0"]
test = ps.default_main_program().clone(for_test=True)
found = exe.run(test, feed={"x": np.ones((1, 3))}, fetch_list=names)
if fleet.worker_index() == 0:
    np.savez("end.npz", *found)
fleet.save_persistables("model")
print(hashlib.sha256(b"".join(a.tobytes() for a in found)).hexdigest())
fleet.stop_worker()
"""


def test_two_workers(tmp_path: Path) -> None:
    """In sync mode a round takes in the mean of the workers' statistics: every worker ends with the same
    bits, for any number of servers, and the checkpoint has them.
    """
    np.save(tmp_path / "batches.npy", BATCHES)
    (tmp_path / "train.py").write_text(SCRIPT)
    digests = {d for servers in (1, 2) for d in run_two_workers(tmp_path / "train.py", servers)}
    assert len(digests) == 1
    mean: Any = np.zeros(3)
    variance: Any = np.ones(3)
    for pair in BATCHES.reshape(3, 2, 8, 3).astype(np.float64):
        mean = 0.7 * mean + 0.3 * pair.mean(axis=1).mean(axis=0)
        variance = 0.7 * variance + 0.3 * pair.var(axis=1).mean(axis=0)
    with np.load(tmp_path / "end.npz") as actual:
        np.testing.assert_allclose(actual["arr_0"], mean, rtol=1e-5)
        np.testing.assert_allclose(actual["arr_1"], variance, rtol=1e-5)
    assert {"n.w_1", "n.w_2"} <= {spec.name for spec in read_specs(tmp_path / "model")}


def test_inputs_that_do_not_fit() -> None:
    """Unknown channels, one axis only, and a batch without samples get a sentence."""
    with pytest.raises(PsfleetError, match="a known number of channels"):
        layers.batch_norm(layers.data("a", [None, None]))
    with pytest.raises(PsfleetError, match="a known number of channels"):
        layers.batch_norm(layers.data("b", [None]))
    _, loss = model()
    optimizer.SGD(0.1).minimize(loss)
    with pytest.raises(PsfleetError, match="trains on a batch without samples"):
        Executor().run(feed={"x": np.ones((0, 3))}, fetch_list=[loss])


def test_pipelines_refuse_it() -> None:
    """Micro-batches have other statistics than the batch: a pipeline says so."""
    out, loss = model()
    optimizer.PipelineOptimizer(optimizer.SGD(0.1), [[out], [loss]]).minimize(loss)
    with pytest.raises(PsfleetError, match="a pipeline cuts batches into micro-batches"):
        Executor().run(feed={"x": BATCHES[0]}, fetch_list=[loss])
