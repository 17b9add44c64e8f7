"""Layers: shapes known before anything runs, values, names, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import psfleet as ps
from psfleet import initializer, layers, metrics
from psfleet.core.base.errors import ConfigError, ShapeError
from psfleet.core.engine.schema.table import InitializerSpec
from psfleet.core.graph.program import names
from psfleet.core.graph.program.attribute import ParamAttr
from psfleet.core.graph.program.ops.activation import keep_mask
from psfleet.core.graph.program.program import (
    Program,
    default_main_program,
    default_startup_program,
    program_guard,
)
from psfleet.core.graph.program.variable import Variable, to_variable
from psfleet.regularizer import L2Decay
from tests.runtimes import own_programs

pytestmark = pytest.mark.quick


def x(*shape: int | None, dtype: str = "float32") -> Variable:
    """Data of this shape."""
    return layers.data(names.generate("x"), shape, dtype)


SHAPES: list[tuple[Callable[[], Variable], tuple[int | None, ...]]] = [
    (lambda: layers.fc(x(None, 3, 4), 5), (None, 5)),
    (lambda: layers.fc(x(None, 3, 4), 5, num_flatten_dims=2), (None, 3, 5)),
    (lambda: layers.fc([x(None, 3), x(None, 4)], 5, act="sigmoid"), (None, 5)),
    (lambda: layers.embedding(x(None, 10, dtype="int64"), [7, 3]), (None, 10, 3)),
    (lambda: layers.matmul(x(None, 2, 3), x(3, 4)), (None, 2, 4)),
    (lambda: layers.matmul(x(None, 3, 2), x(None, 4, 3), True, True), (None, 2, 4)),
    (lambda: x(None, 1) + x(4), (None, 4)),
    (lambda: layers.reshape(x(None, 10, 16), [-1, 160]), (None, 160)),
    (lambda: layers.reshape(x(None, 10, 16), [0, 0, 4, -1]), (None, 10, 4, 4)),
    (lambda: layers.reshape(x(6, 4), [3, -1]), (3, 8)),
    (lambda: layers.concat([x(None, 3), x(None, 4)], axis=1), (None, 7)),
    (lambda: layers.concat([x(None, 3), x(2, 3)], axis=0), (None, 3)),
    (lambda: layers.split(x(None, 6), 3)[0], (None, 2)),
    (lambda: layers.stack([x(None, 3), x(2, 3)], axis=1), (None, 2, 3)),
    (lambda: layers.transpose(x(None, 3, 4), [2, 0, 1]), (4, None, 3)),
    (lambda: layers.slice(x(None, 6), [1], [1], [-1]), (None, 4)),
    (lambda: layers.gather(x(5, 2), x(None, 1, dtype="int64")), (None, 2)),
    (lambda: layers.squeeze(x(None, 1, 3)), (None, 3)),
    (lambda: layers.unsqueeze(x(None, 3), 1), (None, 1, 3)),
    (lambda: layers.flatten(x(None, 2, 3)), (None, 6)),
    (lambda: layers.one_hot(x(None, 1, dtype="int64"), 5), (None, 5)),
    (lambda: layers.expand(x(2, 3), [2, 1]), (4, 3)),
    (lambda: layers.reduce_sum(x(None, 3, 4), dim=[0, -1]), (3,)),
    (lambda: layers.reduce_max(x(None, 3), dim=1, keep_dim=True), (None, 1)),
    (lambda: layers.mean(x(None, 3)), ()),
    (lambda: layers.argmax(x(None, 3), axis=-1), (None,)),
    (lambda: layers.cross_entropy(x(None, 3), x(None, 1, dtype="int64")), (None, 1)),
    (lambda: layers.cos_sim(x(None, 3), x(None, 3)), (None, 1)),
    (lambda: layers.layer_norm(x(None, 3), act="tanh"), (None, 3)),
    (lambda: layers.fill_constant([2, 3], "int64", 4), (2, 3)),
]


def test_shapes_are_known_before_anything_runs() -> None:
    """Unknown extents go through, and the run's shape agrees."""
    for make, shape in SHAPES:
        with own_programs():
            out = make()
            data = [v for v in default_main_program().list_vars() if v.is_data]
            feed = {v.name: np.zeros([n or 2 for n in v.shape], v.dtype) for v in data}
            (value,) = ps.Executor().run(feed=feed, fetch_list=[out])
        assert out.shape == shape
        assert len(value.shape) == len(shape)
        assert all(n in (None, extent) for n, extent in zip(shape, value.shape, strict=True))
        assert value.dtype == out.dtype


def test_names_are_the_same_in_every_process() -> None:
    """Counted by kind; the user's own names as they are."""

    def build() -> list[str]:
        with own_programs():
            hidden = layers.fc(x(None, 2), 3, act="sigmoid")
            layers.fc(hidden, 3, name="tower")
            layers.fc([hidden, hidden], 2, bias_attr=False)
            layers.embedding(x(None, dtype="int64"), [5, 2], param_attr=ParamAttr(name="table"))
            return [*default_startup_program().parameters, *default_main_program().variables]

    first = build()
    assert first == build()
    expected = "fc_0.w_0 fc_0.b_0 tower.w_0 tower.b_0 fc_1.w_0 fc_1.w_1 table"
    assert first[:7] == expected.split()
    assert "fc_0.tmp_1" in first


def test_a_parameter_attribute_reaches_the_parameter() -> None:
    """Name, rate, regularizer, clip, start."""
    decay = L2Decay(0.5)
    said = ParamAttr("w", initializer.Constant(3.0), 0.5, decay, False, need_clip=False)
    layers.fc(x(None, 2), 2, param_attr=said, bias_attr="b")
    weights = default_startup_program().parameters["w"]
    assert (weights.learning_rate, weights.regularizer, weights.trainable, weights.need_clip) == (
        0.5,
        decay,
        False,
        False,
    )
    np.testing.assert_array_equal(weights.numpy(), np.full((2, 2), 3))
    assert not default_startup_program().parameters["b"].numpy().any()


def test_values_that_overflow_a_careless_formula_do_not() -> None:
    """Losses and activations at logits of 100 and -100, and their gradients, are finite."""
    logits = to_variable([[100.0, -100.0, 0.0]], stop_gradient=False)
    ones = to_variable(np.ones((1, 3), np.float32))
    zeros = to_variable(np.zeros((1, 3), np.float32))
    losses = [
        layers.sigmoid_cross_entropy_with_logits(logits, ones),
        layers.sigmoid_cross_entropy_with_logits(logits, zeros),
        layers.softmax_with_cross_entropy(logits, to_variable([[1]])),
        layers.log(layers.softmax(logits) + 1.0),
        layers.sigmoid(logits),
        layers.log_softmax(logits),
    ]
    np.testing.assert_allclose(losses[0].numpy(), [[0, 100, np.log(2)]], atol=1e-6)
    np.testing.assert_allclose(losses[2].numpy(), [[200]], rtol=1e-6)
    for loss in losses:
        assert loss.dtype == np.float32
        layers.reduce_sum(loss).backward()
    assert np.isfinite(np.asarray(logits.grad)).all()


def test_hard_losses_ignore_a_label() -> None:
    """An ignored label costs nothing."""
    p = to_variable(np.full((2, 2), 0.5))
    cost = layers.cross_entropy(p, to_variable([[-100], [1]]))
    np.testing.assert_allclose(cost.numpy(), [[0], [np.log(2)]], rtol=1e-6)
    sure = layers.cross_entropy(to_variable([[1.0, 0.0]]), to_variable([[1]]))
    assert sure.item() == pytest.approx(1e20)


def test_values_beyond_the_depth_may_be_allowed() -> None:
    """`allow_out_of_range` makes them rows of zeros."""
    blank = layers.one_hot(to_variable([[3]]), 3, allow_out_of_range=True)
    assert not blank.numpy().any()


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (initializer.Constant(2.0), InitializerSpec("constant", 2.0, 0.0)),
        (initializer.Uniform(-3, 3), InitializerSpec("uniform", -3, 3)),
        (initializer.Normal(1.0, 0.5), InitializerSpec("normal", 1.0, 0.5)),
        (initializer.TruncatedNormal(1.0, 0.5), InitializerSpec("truncated", 1.0, 0.5)),
        (initializer.Xavier(), InitializerSpec("uniform", -0.1, 0.1)),
        (
            initializer.Xavier(uniform=False, fan_in=40, fan_out=10),
            InitializerSpec("normal", 0.0, 0.2),
        ),
        (initializer.MSRA(), InitializerSpec("uniform", -((6 / 200) ** 0.5), (6 / 200) ** 0.5)),
        (initializer.MSRA(uniform=False, fan_in=50), InitializerSpec("normal", 0.0, 0.2)),
        (None, InitializerSpec()),
    ],
)
def test_initializers_become_what_tables_take(start: Any, expected: InitializerSpec) -> None:
    """Fans come from the shape [200, 400] unless they are given."""
    actual = initializer.resolve(start, (200, 400))
    assert actual.kind == expected.kind
    assert (actual.low, actual.high) == pytest.approx((expected.low, expected.high))


def test_seeds_change_the_start() -> None:
    """The program's seed, or the initializer's own."""

    def start(seed: int, own: int) -> Any:
        with names.guard(), program_guard(Program(random_seed=seed), Program()):
            return layers.create_parameter(
                [4], default_initializer=initializer.Uniform(seed=own)
            ).numpy()

    assert np.array_equal(start(1, 0), start(1, 0))
    assert not np.array_equal(start(1, 0), start(2, 0))
    assert np.array_equal(start(1, 5), start(2, 5))


R = np.random.default_rng(0)
LABELS = R.integers(0, 2, 3000)
SCORES = np.round(np.clip(R.normal(0.4 + 0.2 * LABELS, 0.2), 0, 1), 2)


def test_auc_and_log_loss_are_scikit_learns() -> None:
    """With many ties."""
    # Imported here, for each process that collects tests would take 1.3 CPU-s for it.
    from sklearn.metrics import log_loss, roc_auc_score

    assert metrics.auc(LABELS, SCORES) == pytest.approx(roc_auc_score(LABELS, SCORES), abs=1e-12)
    p = np.clip(SCORES, 0.01, 0.99)
    assert metrics.log_loss(LABELS, p) == pytest.approx(log_loss(LABELS, p), abs=1e-9)
    assert metrics.auc([1, 1], [0.1, 0.2]) == 0.5


def test_auc_over_batches_is_that_of_the_whole() -> None:
    """Scores of two decimals fall into bins of their own: exact."""
    streamed = metrics.Auc()
    for part in np.array_split(np.arange(3000), 7):
        streamed.update(np.stack([1 - SCORES[part], SCORES[part]], axis=1), LABELS[part, None])
    assert streamed.eval() == pytest.approx(metrics.auc(LABELS, SCORES), abs=1e-12)
    streamed.reset()
    assert streamed.eval() == 0.5
    with pytest.raises(ShapeError, match="needs scores in"):
        streamed.update([1.5], [1])
    with pytest.raises(ConfigError, match="curve is 'PR'"):
        metrics.Auc(curve="PR")  # type: ignore[arg-type]


def test_accuracy_breaks_ties_towards_the_lower_class() -> None:
    """As argmax; k guesses; weighted means over batches."""
    scores = [[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]]
    assert metrics.accuracy(scores, [0, 2]) == 1.0
    assert metrics.accuracy(scores, [1, 1]) == 0.0
    assert metrics.accuracy(scores, [[1], [1]], k=2) == 1.0
    with pytest.raises(ShapeError, match="k at most the number of classes"):
        metrics.accuracy(scores, [0, 1], k=4)
    mean = metrics.Accuracy()
    with pytest.raises(ConfigError, match="has had no batch"):
        mean.eval()
    mean.update(1.0, 1)
    mean.update([0.5], 3)
    assert mean.eval() == 0.625


def test_auc_and_accuracy_run_inside_programs() -> None:
    """auc accumulates over runs; the batch's own starts again."""
    score, label = layers.data("score", [None, 1]), layers.data("label", [None, 1], dtype="int64")
    total, own, _ = layers.auc(score, label)
    both = layers.concat([1 - score, score], axis=1)
    right = layers.accuracy(both, label)
    exe = ps.Executor()
    good = {"score": np.array([[0.1], [0.9]]), "label": np.array([[0], [1]])}
    bad = {"score": np.array([[0.9], [0.1]]), "label": np.array([[0], [1]])}
    assert [v.item() for v in exe.run(feed=good, fetch_list=[total, own, right])] == [1, 1, 1]
    assert [v.item() for v in exe.run(feed=bad, fetch_list=[total, own, right])] == [0.5, 0, 0]


ONES = {"x": np.ones((64, 64), np.float32)}


def test_a_mask_is_the_same_for_the_same_key() -> None:
    """And another for another seed, name or step; its share of zeros is as asked for."""
    mask = keep_mask((1000, 101), 0.3, 1, "drop", 0)
    np.testing.assert_array_equal(mask, keep_mask((1000, 101), 0.3, 1, "drop", 0))
    for other in [(2, "drop", 0), (1, "drip", 0), (1, "drop", 1)]:
        assert (mask != keep_mask((1000, 101), 0.3, *other)).mean() > 0.3
    assert abs(mask.mean() - 0.7) < 0.005
    assert keep_mask((9, 9), 0.0, 0, "", 0).all()
    assert not keep_mask((9, 9), 1.0, 0, "", 0).any()


def test_a_mask_never_changes_between_versions() -> None:
    """The first bits of one mask, written down."""
    actual = keep_mask((16,), 0.5, 7, "dropout_0", 3).astype(int).tolist()
    assert actual == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 1]


def test_steps_differ_and_runs_of_one_script_agree() -> None:
    """Each training run has a mask of its own; a second process would see the same ones."""

    def masks(seed: int) -> list[Any]:
        x = layers.data(f"x{seed}", [None, 64])
        ps.default_main_program().random_seed = seed
        out = layers.dropout(x, 0.5, name=f"d{seed}", seed=4)
        exe = ps.Executor()
        ps.default_main_program().step = 0
        return [exe.run(feed={x.name: ONES["x"]}, fetch_list=[out])[0] for _ in range(2)]

    first, second = masks(1)
    assert not np.array_equal(first, second)
    assert set(np.unique(first)) == {0, 1}


def test_eager_masks_are_those_of_the_program() -> None:
    """A named dropout in an eager loop steps with each backward pass."""
    x = layers.data("x", [None, 64])
    out = layers.dropout(x, 0.5, name="drop")
    exe = ps.Executor()
    static = [exe.run(feed=ONES, fetch_list=[out])[0] for _ in range(2)]
    ps.default_main_program().step = 0
    for expected in static:
        eager = layers.dropout(to_variable(ONES["x"], stop_gradient=False), 0.5, name="drop")
        layers.mean(eager).backward()
        np.testing.assert_array_equal(eager.numpy(), expected)


def test_tests_drop_nothing() -> None:
    """downgrade_in_infer scales in tests, upscale_in_train in training."""
    x = layers.data("x", [None, 64])
    down = layers.dropout(x, 0.25)
    up = layers.dropout(x, 0.25, dropout_implementation="upscale_in_train")
    exe, program = ps.Executor(), ps.default_main_program()
    trained = exe.run(feed=ONES, fetch_list=[down, up])
    assert set(np.unique(trained[0])) == {0, 1}
    np.testing.assert_allclose(np.unique(trained[1]), [0, 4 / 3], rtol=1e-6)
    tested = exe.run(program.clone(for_test=True), feed=ONES, fetch_list=[down, up])
    assert [np.unique(value).tolist() for value in tested] == [[0.75], [1.0]]
