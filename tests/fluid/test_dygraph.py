"""Eager layers as objects: training, states, modes."""

from pathlib import Path

import numpy as np
import pytest

import psfleet.fluid as fluid
from psfleet import layers
from psfleet.core.base.errors import CheckpointError, ShapeError, UsageError
from psfleet.core.engine.gradients import SparseGrad
from psfleet.fluid.dygraph import Layer, guard, to_variable
from psfleet.fluid.layer_modules import ParameterState, save

pytestmark = pytest.mark.quick


class Net(Layer):
    """Two linear layers with dropout in between."""

    def __init__(self) -> None:
        super().__init__("net")
        self.first = fluid.dygraph.Linear(4, 8, act="relu")
        self.drop = fluid.dygraph.Dropout(0.5)
        self.second = fluid.dygraph.Linear(8, 1)

    def forward(self, *inputs: fluid.Variable, **named: object) -> fluid.Variable:
        """[n, 4] to [n, 1]."""
        out: fluid.Variable = self.second(self.drop(self.first(inputs[0])))
        return out


X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
Y = X[:, :1] * 2 - X[:, 1:2]


def test_a_network_of_layers_learns() -> None:
    """forward, backward, minimize, clear_gradients."""
    with guard():
        net = Net()
        adam = fluid.optimizer.Adam(0.02, parameter_list=net.parameters())
        losses = []
        for _ in range(100):
            loss = layers.mean(layers.square_error_cost(net(to_variable(X)), to_variable(Y)))
            loss.backward()
            adam.minimize(loss)
            net.clear_gradients()
            losses.append(loss.item())
        net.eval()
        final = layers.mean(layers.square_error_cost(net(to_variable(X)), to_variable(Y)))
    assert np.mean(losses[-10:]) < 0.6 * losses[0]
    assert final.item() < 0.3 * losses[0]


def test_parameters_are_named_by_attribute_and_uniquely() -> None:
    """Keys of the state are attributes, names are those of tables."""
    net = Net()
    assert [name for name, _ in net.named_parameters()] == [
        "first.weight",
        "first.bias",
        "second.weight",
        "second.bias",
    ]
    assert [p.name for p in net.parameters()] == [
        "linear_0.w_0",
        "linear_0.b_0",
        "linear_1.w_0",
        "linear_1.b_0",
    ]
    assert len(net.sublayers()) == 3


def test_states_go_to_files_and_come_back_to_bound_parameters() -> None:
    """Loading sets the tables of parameters that an optimizer has bound; its state stays."""
    net = Net()
    sgd = fluid.optimizer.Momentum(0.1, 0.9, parameter_list=net.parameters())
    fluid.save_dygraph(net.state_dict(), "model")
    start = net.state_dict()
    layers.mean(net(to_variable(X))).backward()
    sgd.step()
    moved = net.state_dict()
    assert not np.array_equal(start["second.bias"], moved["second.bias"])
    fluid.save_dygraph(sgd.state_dict(), "model")
    parameters, state = fluid.load_dygraph("model")
    assert isinstance(parameters, ParameterState)
    assert state["global_step"] == 1
    net.set_dict(parameters)
    for name, value in net.state_dict().items():
        np.testing.assert_array_equal(value, start[name])
    np.testing.assert_array_equal(
        sgd.state_dict()["linear_1.b_0.velocity"], state["linear_1.b_0.velocity"]
    )


def test_bad_states_change_nothing() -> None:
    """A missing parameter, a wrong shape, a file that is none."""
    net = Net()
    start = net.state_dict()
    with pytest.raises(UsageError, match=r"the state has no parameter 'second\.bias'"):
        net.set_dict({k: v for k, v in start.items() if k != "second.bias"})
    with pytest.raises(ShapeError, match=r"'linear_1\.b_0' has shape \(1,\), the value has \(2,\)"):
        net.set_dict(start | {"second.bias": np.zeros(2), "first.bias": np.ones(8)})
    np.testing.assert_array_equal(net.state_dict()["first.bias"], start["first.bias"])
    with pytest.raises(CheckpointError, match="neither"):
        fluid.load_dygraph("nowhere")
    with open("broken.pdparams", "wb") as file:
        file.write(b"no tensors")
    with pytest.raises(CheckpointError, match="is damaged"):
        fluid.load_dygraph("broken")


def test_a_sparse_embedding_gets_sparse_gradients() -> None:
    """And starts with the bits of a dense one."""
    ids = to_variable(np.array([[1], [3]]))
    sparse = fluid.dygraph.Embedding([5, 2], is_sparse=True, param_attr="table")
    out = sparse(ids)
    assert out.shape == (2, 2)
    layers.mean(out).backward()
    assert isinstance(sparse.weight.grad, SparseGrad)
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        dense = fluid.nn.Embedding(5, 2, padding_idx=-1, weight_attr="table")
    np.testing.assert_array_equal(dense.weight.numpy(), sparse.weight.numpy())
    assert not dense(to_variable([4])).numpy().any()


def test_sequential_and_layer_norm() -> None:
    """Layers in a row."""
    net = fluid.nn.Sequential(
        fluid.nn.Linear(4, 6),
        fluid.nn.LayerNorm(6),
        fluid.nn.ReLU(),
        fluid.nn.Tanh(),
        fluid.nn.Sigmoid(),
    )
    out = net(to_variable(X))
    assert out.shape == (32, 6)
    assert len(net.parameters()) == 4
    assert next(iter(net.state_dict())) == "0.weight"


def test_the_older_face_has_every_layer() -> None:
    """A layer is in psfleet.fluid.layers by itself; three there have habits of their own."""
    others = {
        name for name in layers.__all__ if getattr(fluid.layers, name) is not getattr(layers, name)
    }
    assert others == {"data", "embedding", "sequence_pool"}
    assert set(fluid.layers.__all__) > set(layers.__all__)


def test_a_state_that_cannot_be_saved_leaves_nothing_behind(tmp_path: Path) -> None:
    """Where a folder has the file's name: one sentence, and no draft beside it."""
    (tmp_path / "state").mkdir()
    with pytest.raises(CheckpointError, match="state' cannot be written: "):
        save({"x": X}, str(tmp_path / "state"))
    assert [*tmp_path.iterdir()] == [tmp_path / "state"]
