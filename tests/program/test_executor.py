"""Running programs: feeds, fetches, updates, errors."""

from typing import Any

import numpy as np
import pytest

import psfleet as ps
from psfleet import layers
from psfleet.core.base.errors import ShapeError
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program.program import default_main_program
from psfleet.core.graph.program.variable import Variable
from tests.program.hand import HandSGD

pytestmark = pytest.mark.quick


def small() -> tuple[Variable, Variable, Variable]:
    """x [n, 3] -> fc -> prediction [n, 1]; loss against y."""
    x = layers.data("x", [None, 3])
    y = layers.data("y", [None, 1])
    prediction = layers.fc(x, 1)
    return prediction, layers.mean(layers.square_error_cost(prediction, y)), x


def batch(size: int = 4) -> dict[str, Any]:
    """A feed for `small`."""
    random = np.random.default_rng(size)
    return {
        "x": random.normal(size=(size, 3)).astype(np.float32),
        "y": random.normal(size=(size, 1)).astype(np.float32),
    }


def test_fetches_come_by_variable_and_by_name() -> None:
    """Variables, their names, parameters and gradients can all be fetched."""
    prediction, loss, _ = small()
    pairs = HandSGD().minimize(loss)
    feed = batch()
    exe = ps.Executor()
    values = exe.run(feed=feed, fetch_list=[prediction, loss.name, "fc_0.w_0", pairs[0][1], "x"])
    np.testing.assert_allclose(values[0], feed["x"] @ values[2], rtol=1e-6)
    np.testing.assert_allclose(values[1], np.mean((values[0] - feed["y"]) ** 2), rtol=1e-6)
    np.testing.assert_allclose(values[3], feed["x"].T @ (values[0] - feed["y"]) / 2, rtol=1e-5)
    np.testing.assert_array_equal(values[4], feed["x"])


def test_an_update_gets_values_samples_and_loss() -> None:
    """Each run of a program with an update ends with one apply_values."""
    _, loss, _ = small()
    sgd = HandSGD()
    pairs = sgd.minimize(loss)
    assert [p.name for p, _ in pairs] == ["fc_0.w_0", "fc_0.b_0"]
    exe = ps.Executor()
    (value,) = exe.run(feed=batch(6), fetch_list=[loss])
    assert sgd.calls == [(6, float(value))]
    (after,) = exe.run(feed=batch(6), fetch_list=[loss])
    assert after < value


def test_a_test_clone_shares_parameters_and_updates_nothing() -> None:
    """clone(for_test=True) sees the training program's weights and leaves them alone."""
    prediction, loss, _ = small()
    test = default_main_program().clone(for_test=True)
    sgd = HandSGD()
    sgd.minimize(loss)
    exe = ps.Executor()
    before = exe.run(test, feed=batch(), fetch_list=[prediction])[0]
    assert sgd.calls == []
    exe.run(feed=batch())
    after = exe.run(test, feed=batch(), fetch_list=[prediction.name])[0]
    assert not np.array_equal(before, after)
    later = default_main_program().clone(for_test=True)
    exe.run(later, feed=batch(), fetch_list=[loss])
    assert len(sgd.calls) == 1


def test_pruning_asks_only_for_the_feeds_that_results_need() -> None:
    """A prediction needs no label."""
    prediction, _, _ = small()
    (value,) = ps.Executor().run(feed={"x": batch()["x"]}, fetch_list=[prediction])
    assert value.shape == (4, 1)


def test_a_startup_program_is_nothing_to_do() -> None:
    """The reference's exe.run(startup_program) is accepted."""
    small()
    exe = ps.Executor()
    assert exe.run(ps.default_startup_program()) == []


def test_fetched_arrays_are_the_callers_own() -> None:
    """Writing into results changes neither parameters nor feeds."""
    small()
    feed = batch()
    exe = ps.Executor()
    weights, fed = exe.run(feed=feed, fetch_list=["fc_0.w_0", "x"])
    weights += 1
    fed += 1
    again = exe.run(feed=feed, fetch_list=["fc_0.w_0"])[0]
    np.testing.assert_allclose(again + 1, weights, rtol=1e-6)
    np.testing.assert_array_equal(feed["x"], batch()["x"])


def test_gradients_can_be_computed_with_before_the_update() -> None:
    """Operations between append_backward and add_update work on the gradients."""
    _, loss, _ = small()
    sgd = HandSGD()
    from psfleet.core.graph.program.backward import append_backward

    pairs = append_backward(loss)
    default_main_program().add_update(sgd, [(p, layers.scale(g, 0.5)) for p, g in pairs], loss)
    whole = ps.Executor().run(feed=batch(), fetch_list=[pairs[0][1]])[0]
    np.testing.assert_array_equal(sgd.last["fc_0.w_0"], whole * np.float32(0.5))


def test_sparse_tables_are_fetched_before_the_forward_in_one_call() -> None:
    """Dense parameters and lookups whose ids are fed or computed from feeds come in one prefetch."""
    ids = layers.data("ids", [None, 2], dtype="int64")
    rows = layers.embedding(ids, [None, 4], is_distributed=True, name="a")
    other = layers.embedding(layers.cast(ids, "int64") + 0, [9, 4], is_sparse=True, name="b")
    loss = layers.mean(layers.fc(rows + other, 1, num_flatten_dims=2))
    calls: list[Any] = []
    values: list[str] = []

    class Binding:
        def value(self, parameter: Parameter) -> Any:
            values.append(parameter.name)
            return np.ones(parameter.shape, np.float32)

        def lookup(self, parameter: Parameter, ids: Any) -> Any:
            values.append(parameter.name)
            return np.zeros((*ids.shape, 4), np.float32)

        def prefetch(self, dense: Any, sparse: Any) -> None:
            assert values == []
            calls.append(([p.name for p in dense], [(p.name, i.shape) for p, i in sparse]))

    binding = Binding()
    for parameter in default_main_program().all_parameters():
        parameter.binding = binding
    ps.Executor().run(feed={"ids": np.ones((3, 2), np.int64)}, fetch_list=[loss])
    assert calls == [(["fc_0.w_0", "fc_0.b_0"], [("a.w_0", (3, 2)), ("b.w_0", (3, 2))])]


def test_whole_floats_are_good_ids() -> None:
    """Ids may come as floats as long as they are whole."""
    ids = layers.data("ids", [None], dtype="int64")
    out = layers.embedding(ids, [7, 2], is_sparse=True)
    feed = {"ids": np.array([1.0, 6.0])}
    assert ps.Executor().run(feed=feed, fetch_list=[out])[0].shape == (2, 2)


def test_shapes_that_only_the_feed_shows_to_differ_are_one_sentence() -> None:
    """What NumPy would refuse deep inside names the variable and the shapes."""
    total = layers.data("a", [None, 2]) + layers.data("b", [None, 2])
    with pytest.raises(
        ShapeError, match=r"Add cannot take inputs of the shapes \(2, 2\), \(3, 2\)"
    ):
        ps.Executor().run(feed={"a": np.ones((2, 2)), "b": np.ones((3, 2))}, fetch_list=[total])


def test_large_dense_embeddings_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """One line names an embedding with many rows and dense gradients; none a small or a sparse one."""
    ids = layers.data("ids", [None], "int64")
    for _ in range(2):
        layers.embedding(ids, [10_000, 2], name="large")
    layers.embedding(ids, [9_999, 2], name="small")
    layers.embedding(ids, [10_000, 2], is_sparse=True, name="rows")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("psfleet: embedding 'large.w_0' has 10,000 rows and dense gradients")
    assert "is_sparse=True" in line


def test_return_numpy_false_gives_variables() -> None:
    """As the reference's tensors, with .numpy()."""
    prediction, _, _ = small()
    (out,) = ps.Executor().run(feed=batch(), fetch_list=[prediction], return_numpy=False)
    assert isinstance(out, Variable)
    assert out.numpy().shape == (4, 1)


def test_sparse_gradients_are_fetched_as_such() -> None:
    """Ids and rows, repeats not merged."""
    ids = layers.data("ids", [None], dtype="int64")
    loss = layers.reduce_sum(layers.embedding(ids, [None, 2], is_distributed=True))
    ((_, gradient),) = HandSGD(0).minimize(loss)
    default_main_program().updates.clear()
    default_main_program().touch()
    (value,) = ps.Executor().run(feed={"ids": np.array([5, -5, 5])}, fetch_list=[gradient])
    assert isinstance(value, SparseGrad)
    np.testing.assert_array_equal(value.ids, [5, -5, 5])
    assert (value.rows == 1).all()


def test_two_losses_in_one_program_both_update() -> None:
    """Each minimize has a backward pass of its own over shared records."""
    x = layers.data("x", [None, 3])
    hidden = layers.fc(x, 4, act="relu")
    first, second = layers.mean(layers.fc(hidden, 1)), layers.mean(layers.square(hidden))
    one, two = HandSGD(), HandSGD()
    one.minimize(first)
    pairs = two.minimize(second)
    assert pairs[0][1].name == "fc_0.w_0@GRAD@1"
    ps.Executor().run(feed={"x": np.ones((2, 3))})
    assert set(one.last) == {"fc_0.w_0", "fc_0.b_0", "fc_1.w_0", "fc_1.b_0"}
    assert set(two.last) == {"fc_0.w_0", "fc_0.b_0"}
    assert not np.array_equal(one.last["fc_0.w_0"], two.last["fc_0.w_0"])
