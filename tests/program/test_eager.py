"""Eager values and gradients are those of a program, and of a recomputed one, bit for bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import psfleet as ps
from psfleet import layers
from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program.operation import ancestors
from psfleet.core.graph.program.program import default_startup_program, eager_guard
from psfleet.core.graph.program.variable import Variable, no_grad, to_variable
from tests.program.hand import Build, assert_same, run_eager, run_static

pytestmark = pytest.mark.quick

R = np.random.default_rng(11)
FEED: dict[str, Any] = {
    "x": R.normal(size=(16, 6)).astype(np.float32),
    "ids": R.integers(0, 30, (16, 4)),
    "y": R.integers(0, 2, (16, 1)).astype(np.float32),
    "label": R.integers(0, 3, (16, 1)),
}


def wide_and_deep(x: Variable, ids: Variable, y: Variable, label: Variable) -> Variable:
    """Wide & Deep with dropout and layer norm."""
    wide = layers.reduce_sum(layers.embedding(ids, [None, 1], is_distributed=True), dim=1)
    deep = layers.reshape(layers.embedding(ids, [30, 4], is_sparse=True), [-1, 16])
    deep = layers.fc(layers.concat([deep, x], axis=1), 8, act="relu")
    deep = layers.layer_norm(layers.dropout(deep, 0.3))
    return layers.mean(layers.sigmoid_cross_entropy_with_logits(layers.fc(deep, 1) + wide, y))


def deep_fm(x: Variable, ids: Variable, y: Variable, label: Variable) -> Variable:
    """DeepFM: pairwise products by the square-of-sum trick, and a tower."""
    rows = layers.embedding(ids, [None, 4], is_distributed=True)
    total = layers.square(layers.reduce_sum(rows, dim=1))
    pairs = 0.5 * layers.reduce_sum(
        total - layers.reduce_sum(layers.square(rows), dim=1), dim=1, keep_dim=True
    )
    tower = layers.fc(layers.fc(layers.reshape(rows, [0, 16]), 8, act="relu"), 1, act="sigmoid")
    return layers.mean(layers.log_loss(layers.sigmoid(pairs) * tower, y))


@pytest.mark.parametrize("network", [wide_and_deep, deep_fm])
def test_eager_equals_static_bit_for_bit(network: Callable[..., Variable]) -> None:
    """Loss and every gradient, sparse ones included."""

    def build(*inputs: Variable) -> tuple[Variable, None]:
        return network(*inputs), None

    assert_same(run_static(build, FEED), run_eager(build, FEED))


def test_gradients_add_up_over_backward_passes() -> None:
    """Until cleared: dense ones are summed, sparse ones joined."""
    w = Parameter("w", np.ones((2, 2)))
    table = Parameter("t", shape=(5, 2), sparse=True)
    for _ in range(2):
        x = to_variable(np.ones((1, 2)))
        rows = layers.reduce_sum(x @ w)
        rows.backward()
    assert isinstance(w.grad, np.ndarray)
    np.testing.assert_array_equal(w.grad, np.full((2, 2), 2))
    from psfleet.core.graph.program.ops.embedding import Embedding
    from psfleet.core.graph.program.variable import apply

    for _ in range(2):
        layers.reduce_sum(apply(Embedding(), np.array([3]), table)).backward()
    assert isinstance(table.grad, SparseGrad)
    np.testing.assert_array_equal(table.grad.ids, [3, 3])


def test_a_used_up_graph_says_so() -> None:
    """The second backward() needs retain_graph on the first."""
    x = to_variable([1.0, 2.0], stop_gradient=False)
    loss = layers.reduce_sum(x * x)
    loss.backward(retain_graph=True)
    loss.backward()
    np.testing.assert_array_equal(x.numpy() * 4, np.asarray(x.gradient()))
    with pytest.raises(UsageError, match="used up by an earlier backward"):
        loss.backward()
    with pytest.raises(ShapeError, match=r"grad_tensor has shape \(1,\)"):
        (x * 2).backward(np.ones(1))


def test_no_grad_keeps_nothing() -> None:
    """Inside no_grad results are leaves."""
    x = to_variable([1.0], stop_gradient=False)
    with no_grad():
        y = x * 3
    assert y.stop_gradient
    assert y.record is None
    z = layers.reduce_sum(y * x)
    z.backward()
    np.testing.assert_array_equal(np.asarray(x.gradient()), [3.0])


def test_layers_with_one_name_share_parameters() -> None:
    """So an eager loop that names its layers trains the same weights; another shape is refused."""
    x = to_variable(np.ones((2, 3)))
    first, second = (layers.fc(x, 2, name="tower") for _ in range(2))
    np.testing.assert_array_equal(first.numpy(), second.numpy())
    assert sorted(default_startup_program().parameters) == ["tower.b_0", "tower.w_0"]
    with pytest.raises(ShapeError, match=r"parameter 'tower\.w_0' exists with shape \(3, 2\)"):
        layers.fc(x, 4, name="tower")


def test_concrete_inputs_of_a_program_are_constants() -> None:
    """An array met by a symbolic variable is recorded."""
    x = layers.data("x", [None, 2])
    out = x * np.array([2.0, 3.0], np.float32) + [[1.0, 1.0]]
    (value,) = ps.Executor().run(feed={"x": np.ones((1, 2))}, fetch_list=[out])
    np.testing.assert_array_equal(value, [[3, 4]])


def test_eager_mode_decides_for_operations_without_inputs() -> None:
    """fill_constant is recorded outside eager mode, computed inside."""
    assert layers.ones([2]).value is None
    with eager_guard():
        np.testing.assert_array_equal(layers.ones([2]).numpy(), [1, 1])


INPUTS = {"x": np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)}
Choices = list[tuple[int, int, int]]
GRAPHS = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 50), st.integers(0, 50)), min_size=2, max_size=14
)


def build(x: Variable, choices: Choices) -> tuple[Variable, list[Variable]]:
    """A loss over a graph with shared and unused variables; and the variables of the graph."""
    pool = [x]
    for kind, first, second in choices:
        a, b = pool[first % len(pool)], pool[second % len(pool)]
        match kind:
            case 0:
                new = layers.fc(a, 5, act="relu")
            case 1:
                new = layers.dropout(a, 0.3)
            case 2:
                new = layers.tanh(a) * b
            case 3:
                new = a + b
            case 4:
                new = layers.fc([a, b], 5)
            case 5:
                new = layers.layer_norm(a)
            case 6:
                new = layers.slice(layers.concat([a, b], axis=1), [1], [2], [7])
            case _:
                new = layers.softmax(layers.matmul(a, b, transpose_y=True) * 0.1)
                new = layers.matmul(new, b)
        pool.append(new)
    return layers.mean(layers.fc(pool[-1], 1) + layers.reduce_sum(x * 0.01)), pool[1:]


def graph(choices: Choices, marks: list[int] | None = None) -> Build:
    """A random graph, with checkpoints where there are marks."""

    def build_marked(x: Variable) -> tuple[Variable, list[Variable] | None]:
        loss, pool = build(x, choices)
        if marks is None:
            return loss, None
        needed = {record.output for record in ancestors([loss])}
        return loss, [v for i, v in enumerate(pool) if i in marks and v in needed]

    return build_marked


@given(GRAPHS)
@settings(max_examples=20, deadline=None)
def test_eager_is_static(choices: Choices) -> None:
    """Loss and gradients of random graphs."""
    assert_same(run_static(graph(choices), INPUTS), run_eager(graph(choices), INPUTS))


@given(GRAPHS, st.lists(st.integers(0, 13), max_size=6))
@settings(max_examples=25, deadline=None)
def test_recomputed_is_plain(choices: Choices, marks: list[int]) -> None:
    """Random checkpoints of random graphs."""
    assert_same(run_static(graph(choices), INPUTS), run_static(graph(choices, marks), INPUTS))
