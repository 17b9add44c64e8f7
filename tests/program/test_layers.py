"""Layers: shapes known before anything runs, values, names, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import psfleet as ps
from psfleet import initializer, layers
from psfleet.errors import ConfigError, IdError, ShapeError, UsageError
from psfleet.program import names
from psfleet.program.attribute import ParamAttr
from psfleet.program.program import (
    Program,
    default_main_program,
    default_startup_program,
    program_guard,
)
from psfleet.program.variable import Variable, to_variable
from psfleet.regularizer import L2Decay
from psfleet.schema.table import InitializerSpec


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


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_shapes_are_known_before_anything_runs(number: int) -> None:
    """Unknown extents go through, and the run's shape agrees."""
    make, shape = SHAPES[number]
    out = make()
    assert out.shape == shape
    program = default_main_program()
    feed = {
        v.name: np.zeros([n or 2 for n in v.shape], v.dtype)
        for v in program.list_vars()
        if v.is_data
    }
    (value,) = ps.Executor().run(feed=feed, fetch_list=[out])
    assert len(value.shape) == len(shape)
    assert all(known in (None, extent) for known, extent in zip(shape, value.shape, strict=True))
    assert value.dtype == out.dtype


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: x(None, 3) + x(None, 4),
        ShapeError,
        r"cannot combine the shapes \(None, 3\) and \(None",
    ),
    (lambda: layers.fc(x(None, None), 2), ShapeError, "extents from axis 1 on must be known"),
    (lambda: layers.fc(x(None, 2), 2, act="swish"), ConfigError, "act is 'swish'; use log_softmax"),
    (lambda: layers.matmul(x(2, 3), x(4, 5)), ShapeError, "the inner extents 3 and 4 differ"),
    (lambda: layers.reshape(x(2, 3), [4, -1]), ShapeError, "6 values do not fill it"),
    (lambda: layers.reshape(x(2, 3), [-1, -1]), ShapeError, "only one extent may be -1"),
    (lambda: layers.concat([x(2, 3), x(3, 2)]), ShapeError, "the other extents differ"),
    (lambda: layers.stack([x(2, 3), x(3, 2)]), ShapeError, "the shapes differ"),
    (lambda: layers.split(x(2, 5), 2), ShapeError, "it cannot be split into 2"),
    (lambda: layers.split(x(2, None), 2), ShapeError, "the extent of axis 1 is unknown"),
    (lambda: layers.transpose(x(2, 3), [0, 0]), ShapeError, r"\(0, 0\) is not an order"),
    (lambda: layers.squeeze(x(2, 3), [0]), ShapeError, "are not all 1"),
    (lambda: layers.reduce_sum(x(2, 3), dim=2), ShapeError, "axis 2 is outside a shape of 2"),
    (lambda: layers.softmax(x(2), axis=1), ShapeError, "axis 1 is outside"),
    (lambda: layers.fc(x(None, 2, dtype="int64"), 2), ShapeError, "fc of 'x_0' needs floats"),
    (
        lambda: layers.sigmoid_cross_entropy_with_logits(x(2), x(2, dtype="int64")),
        ShapeError,
        "of 'x_1' needs floats, not int64; use layers.cast",
    ),
    (lambda: layers.concat([x(2), x(2, dtype="int64")]), ShapeError, "the dtypes differ"),
    (lambda: layers.mean(x(2, dtype="int64")), ShapeError, "mean of 'x_0' needs floats"),
    (lambda: layers.accuracy(x(2, 2), x(2)), IdError, "it must be int64"),
    (lambda: layers.exp(x(2, dtype="int64")), ShapeError, "needs floats, not int64"),
    (lambda: layers.embedding(x(None, 2), [5, 2]), IdError, "they must be int64"),
    (
        lambda: layers.embedding(x(None, dtype="int64"), [None, 2]),
        IdError,
        "is_distributed=True only",
    ),
    (lambda: layers.embedding(x(None, dtype="int64"), [5]), ShapeError, r"must be \[rows, dim\]"),
    (
        lambda: layers.embedding(x(None, dtype="int64"), [5, 2], dtype="float64"),
        ShapeError,
        "float32",
    ),
    (lambda: layers.square_error_cost(x(None, 1), x(None, 2)), ShapeError, "shapes must be equal"),
    (lambda: layers.cross_entropy(x(None, 3), x(None, 1)), IdError, "hard labels are int64"),
    (lambda: layers.cross_entropy(x(None, 3), x(None, 2, dtype="int64")), ShapeError, "it must be"),
    (lambda: layers.accuracy(x(None, 3, 2), x(None, 1)), ShapeError, r"\[n, classes\]"),
    (lambda: layers.auc(x(None, 1), x(None, 1), curve="PR"), ConfigError, "curve is 'PR'"),
    (lambda: layers.dropout(x(2), 1.5), ConfigError, r"dropout_prob is 1\.5"),
    (lambda: layers.dropout(x(2), 0.5, dropout_implementation="no"), ShapeError, "is 'no'; use"),
    (lambda: layers.clip(x(2), 1.0, 0.0), ShapeError, r"min 1\.0 is above max 0\.0"),
    (lambda: layers.cast(x(2), "complex64"), ShapeError, "dtype 'complex64' is unknown"),
    (lambda: layers.data("bad", [2.5]), ShapeError, r"has the extent 2\.5"),  # type: ignore[list-item]
    (lambda: (layers.data("twice", [2]), layers.data("twice", [2])), UsageError, "'twice' already"),
    (lambda: layers.relu("text"), UsageError, "a layer's input is 'text'"),  # type: ignore[arg-type]
    (lambda: layers.create_parameter([2], "float64"), ShapeError, "parameters are float32"),
    (lambda: layers.fc(x(None, 2), 2, param_attr=False), ShapeError, "but weights there must be"),
    (lambda: layers.fc(x(None, 2), 2, param_attr=3), UsageError, "a parameter attribute is 3"),
    (lambda: layers.elementwise_add(x(2, 3), x(3, 4), axis=1), ShapeError, "does not fit into"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_does_not_fit_is_refused_when_it_is_built(number: int) -> None:
    """With one sentence that quotes the value."""
    make, error, says = REFUSED[number]
    with pytest.raises(error, match=says):
        make()


def test_names_are_the_same_in_every_process() -> None:
    """Counted by kind; the user's own names as they are."""

    def build() -> list[str]:
        with names.guard(), program_guard(Program(), Program()):
            hidden = layers.fc(x(None, 2), 3, act="sigmoid")
            layers.fc(hidden, 3, name="tower")
            layers.fc([hidden, hidden], 2, bias_attr=False)
            layers.embedding(x(None, dtype="int64"), [5, 2], param_attr=ParamAttr(name="table"))
            return [*default_startup_program().parameters, *default_main_program().variables]

    first = build()
    assert first == build()
    assert first[:7] == [
        "fc_0.w_0",
        "fc_0.b_0",
        "tower.w_0",
        "tower.b_0",
        "fc_1.w_0",
        "fc_1.w_1",
        "table",
    ]
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


def test_hard_losses_ignore_and_check_their_labels() -> None:
    """An ignored label costs nothing; one outside the classes is refused."""
    p = to_variable(np.full((2, 2), 0.5))
    cost = layers.cross_entropy(p, to_variable([[-100], [1]]))
    np.testing.assert_allclose(cost.numpy(), [[0], [np.log(2)]], rtol=1e-6)
    with pytest.raises(IdError, match="labels are 1 to 2, there are classes 0 to 1"):
        layers.cross_entropy(p, to_variable([[2], [1]]))
    sure = layers.cross_entropy(to_variable([[1.0, 0.0]]), to_variable([[1]]))
    assert sure.item() == pytest.approx(1e20)


def test_ids_outside_are_refused_at_run_time() -> None:
    """gather and one_hot name the range."""
    with pytest.raises(IdError, match="indices are 5 to 5, there are rows 0 to 1"):
        layers.gather(to_variable(np.ones((2, 2))), to_variable([5]))
    with pytest.raises(IdError, match="values are 3 to 3, depth is 3"):
        layers.one_hot(to_variable([[3]]), 3)
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
    found = initializer.resolve(start, (200, 400))
    assert found.kind == expected.kind
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_bad_initializers_are_refused() -> None:
    """Unknown fans, arrays for tables, things that are none."""
    with pytest.raises(ShapeError, match="pass fan_in and fan_out"):
        initializer.Xavier().resolve((-1, 4))
    with pytest.raises(ConfigError, match="cannot initialise a sparse table"):
        initializer.Assign([1.0]).resolve((1, 1))
    with pytest.raises(ConfigError, match="initializer is 3"):
        initializer.resolve(3, (1,))  # type: ignore[arg-type]
    value = np.arange(6).reshape(2, 3)
    out = layers.create_parameter([2, 3], attr=ParamAttr(initializer=initializer.Assign(value)))
    np.testing.assert_array_equal(out.numpy(), value)
    with pytest.raises(ShapeError, match=r"of shape \(3, 2\) cannot start as an array of"):
        layers.create_parameter([3, 2], attr=initializer.Assign(value))


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
