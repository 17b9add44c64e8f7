"""Every operation's vector-Jacobian product against central differences in float64."""

import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from psfleet import layers
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program import ops
from psfleet.core.graph.program.operation import Op
from psfleet.core.graph.program.variable import Variable, apply
from tests.program.numeric import check_gradient, concrete

pytestmark = pytest.mark.quick

R = np.random.default_rng(3)


def normal(*shape: int) -> Any:
    """float64 values around 0."""
    return R.normal(size=shape)


def positive(*shape: int) -> Any:
    """float64 values well above 0."""
    return R.uniform(0.5, 2, size=shape)


def apart(*shape: int) -> Any:
    """float64 values of which no two are close, none close to 0 or to a multiple of 0.5."""
    size = int(np.prod(shape))
    return (R.permutation(size) * 0.5 - size // 2 * 0.5 + 0.2).reshape(shape)


def probabilities(*shape: int) -> Any:
    """Rows that sum to 1."""
    values = positive(*shape)
    return values / values.sum(axis=-1, keepdims=True)


def by(op: Op) -> Callable[..., Variable]:
    """The operation itself as a layer."""
    return lambda *inputs: apply(op, *inputs)


LABEL = np.array([[2], [0], [1]])
CASES: dict[str, tuple[Callable[..., Variable], list[Any]]] = {
    "Add": (layers.elementwise_add, [normal(3, 4), normal(4)]),
    "Add outer": (layers.elementwise_add, [normal(3, 1), normal(1, 4)]),
    "Add axis": (lambda x, y: layers.elementwise_add(x, y, axis=0), [normal(3, 4), normal(3)]),
    "Add twice": (lambda x: x + x, [normal(3)]),
    "Sub": (layers.elementwise_sub, [normal(3, 4), normal(3, 1)]),
    "Mul": (layers.elementwise_mul, [normal(3, 4), normal(1, 4)]),
    "Mul self": (lambda x: x * x * x, [normal(3)]),
    "Div": (layers.elementwise_div, [normal(3, 4), positive(4)]),
    "Max": (layers.elementwise_max, [apart(3, 4), apart(3, 4) + 0.1]),
    "Min": (layers.elementwise_min, [apart(3, 4), apart(4) + 0.1]),
    "Pow": (layers.elementwise_pow, [positive(3, 4), normal(4)]),
    "Scale": (lambda x: layers.scale(x, 3.0, 2.0, bias_after_scale=False), [normal(3, 4)]),
    "Power": (lambda x: layers.pow(x, 2.5), [positive(3, 4)]),
    "Exp": (layers.exp, [normal(3, 4)]),
    "Log": (layers.log, [positive(3, 4)]),
    "Sqrt": (layers.sqrt, [positive(3, 4)]),
    "Square": (layers.square, [normal(3, 4)]),
    "Abs": (layers.abs, [apart(3, 4)]),
    "Clip": (lambda x: layers.clip(x, -1.0, 1.0), [apart(3, 4)]),
    "operators": (
        lambda x, y: (1 - x) / y + 2 / y - (-x) * 3 + x**2 - x / 4,
        [normal(3), positive(3)],
    ),
    "Relu": (layers.relu, [apart(3, 4)]),
    "Sigmoid": (layers.sigmoid, [normal(3, 4) * 3]),
    "Tanh": (layers.tanh, [normal(3, 4)]),
    "Softmax": (layers.softmax, [normal(3, 4)]),
    "Softmax axis": (lambda x: layers.softmax(x, axis=0), [normal(3, 4)]),
    "LogSoftmax": (layers.log_softmax, [normal(3, 4)]),
    "MatMul": (layers.matmul, [normal(3, 4), normal(4, 2)]),
    "MatMul batched": (layers.matmul, [normal(2, 3, 4), normal(2, 4, 2)]),
    "MatMul broadcast": (layers.matmul, [normal(2, 3, 4), normal(4, 2)]),
    "MatMul transposed": (
        lambda x, y: layers.matmul(x, y, True, True, alpha=2.0),
        [normal(4, 3), normal(2, 4)],
    ),
    "MatMul vectors": (layers.matmul, [normal(4), normal(4)]),
    "MatMul column": (layers.matmul, [normal(2, 3, 4), normal(4)]),
    "MatMul row": (layers.matmul, [normal(4), normal(2, 4, 3)]),
    "Affine": (by(ops.matmul.Affine()), [normal(3, 4), normal(4, 2), normal(2)]),
    "Affine relu": (by(ops.matmul.Affine(relu=True)), [normal(3, 4), normal(4, 2), normal(2)]),
    "Affine flattened": (by(ops.matmul.Affine(axes=2)), [normal(2, 3, 2, 2), normal(4, 2)]),
    "ReduceSum": (layers.reduce_sum, [normal(3, 4)]),
    "ReduceSum axis": (lambda x: layers.reduce_sum(x, dim=1), [normal(3, 4, 2)]),
    "ReduceSum kept": (
        lambda x: layers.reduce_sum(x, dim=[0, -1], keep_dim=True),
        [normal(3, 4, 2)],
    ),
    "ReduceMean": (layers.mean, [normal(3, 4)]),
    "ReduceMean axis": (lambda x: layers.reduce_mean(x, dim=-1), [normal(3, 4)]),
    "ReduceMax": (lambda x: layers.reduce_max(x, dim=1), [apart(3, 4)]),
    "ReduceMin": (lambda x: layers.reduce_min(x, dim=0, keep_dim=True), [apart(3, 4)]),
    "ReduceMin all": (layers.reduce_min, [apart(3, 4)]),
    "sum": (lambda x, y: layers.sum([x, y, x]), [normal(3), normal(3)]),
    "Concat": (lambda x, y: layers.concat([x, y, x], axis=1), [normal(3, 2), normal(3, 4)]),
    "Stack": (lambda x, y: layers.stack([x, y], axis=-1), [normal(3, 2), normal(3, 2)]),
    "split": (lambda x: layers.split(x, [1, -1], dim=1)[1], [normal(3, 4)]),
    "Reshape": (lambda x: layers.reshape(x, [0, -1]), [normal(3, 2, 2)]),
    "flatten": (lambda x: layers.flatten(x, 2), [normal(3, 2, 2)]),
    "squeeze": (lambda x: layers.squeeze(x, [1]), [normal(3, 1, 2)]),
    "unsqueeze": (lambda x: layers.unsqueeze(x, [0, 2]), [normal(3, 2)]),
    "Transpose": (lambda x: layers.transpose(x, [2, 0, 1]), [normal(3, 4, 2)]),
    "Slice": (lambda x: layers.slice(x, [0, 1], [1, -3], [3, -1]), [normal(3, 4)]),
    "Gather": (layers.gather, [normal(4, 2), np.array([3, 1, 3, 0])]),
    "Expand": (lambda x: layers.expand(x, [2, 3]), [normal(3, 2)]),
    "Cast": (lambda x: layers.cast(x, "float64"), [normal(3)]),
    "SquareError": (layers.square_error_cost, [normal(3, 1), normal(3, 1)]),
    "SigmoidCrossEntropy": (
        layers.sigmoid_cross_entropy_with_logits,
        [normal(3, 2) * 3, R.uniform(size=(3, 2))],
    ),
    "SigmoidCrossEntropy ignored": (
        lambda x: layers.sigmoid_cross_entropy_with_logits(
            x, concrete(np.array([[1.0], [-1], [0]])), ignore_index=-1, normalize=True
        ),
        [normal(3, 1)],
    ),
    "LogLoss": (layers.log_loss, [R.uniform(0.1, 0.9, (3, 1)), R.uniform(size=(3, 1))]),
    "CrossEntropy": (layers.cross_entropy, [probabilities(3, 4), LABEL]),
    "CrossEntropy ignored": (
        lambda x, y: layers.cross_entropy(x, y, ignore_index=0),
        [probabilities(3, 4), LABEL],
    ),
    "CrossEntropy soft": (
        lambda x, y: layers.cross_entropy(x, y, soft_label=True),
        [probabilities(3, 4), probabilities(3, 4)],
    ),
    "SoftmaxCrossEntropy": (layers.softmax_with_cross_entropy, [normal(3, 4), LABEL]),
    "SoftmaxCrossEntropy axis": (
        lambda x, y: layers.softmax_with_cross_entropy(x, y, axis=1, ignore_index=1),
        [normal(2, 3, 2), np.array([[[0, 1]], [[2, 2]]])],
    ),
    "SoftmaxCrossEntropy soft": (
        lambda x, y: layers.softmax_with_cross_entropy(x, y, soft_label=True),
        [normal(3, 4), positive(3, 4)],
    ),
    "LayerNorm": (by(ops.normalize.LayerNorm()), [normal(3, 4), normal(4), normal(4)]),
    "LayerNorm bare": (by(ops.normalize.LayerNorm(1, 1e-5, False, False)), [normal(2, 3, 2)]),
    "LayerNorm axis": (
        by(ops.normalize.LayerNorm(2, 1e-5, True, False)),
        [normal(2, 2, 3), normal(3)],
    ),
    "Dropout": (lambda x: layers.dropout(x, 0.4, name="drop", seed=5), [normal(4, 5)]),
    "Dropout test": (lambda x: layers.dropout(x, 0.4, is_test=True), [normal(4, 5)]),
    "Dropout upscale": (
        lambda x: layers.dropout(
            x, 0.4, name="drop", seed=5, dropout_implementation="upscale_in_train"
        ),
        [normal(4, 5)],
    ),
    "DenseEmbedding": (
        lambda w: apply(ops.embedding.DenseEmbedding(padding=1), np.array([[0, 1], [2, 0]]), w),
        [normal(4, 3)],
    ),
    "BatchNorm": (
        lambda x, scale, shift: apply(
            ops.normalize.BatchNorm(), x, concrete(np.zeros(4)), concrete(np.ones(4)), scale, shift
        ),
        [normal(3, 4, 2), normal(4), normal(4)],
    ),
    "SequencePool": (
        lambda x: layers.sequence_pool(x, "sqrt", np.array([3, 0, 2])),
        [normal(3, 4, 2)],
    ),
    "SequencePool max": (lambda x: layers.sequence_pool(x, "max"), [normal(3, 4, 2)]),
    "dot": (layers.dot, [normal(3, 4), normal(3, 4)]),
    "l2_normalize": (lambda x: layers.l2_normalize(x, axis=1), [normal(3, 4)]),
    "cos_sim": (layers.cos_sim, [normal(3, 4), normal(1, 4)]),
}


@pytest.mark.parametrize("case", CASES)
def test_gradient_is_that_of_central_differences(case: str) -> None:
    """The backward of each operation agrees with its forward to 1e-7 in float64."""
    layer, inputs = CASES[case]
    check_gradient(layer, *inputs)


@pytest.mark.parametrize("case", [name for name, (_, inputs) in CASES.items() if len(inputs) > 1])
def test_each_gradient_can_be_had_alone(case: str) -> None:
    """An operation asked for one input's gradient gives the same bits as when asked for all."""
    layer, inputs = CASES[case]
    floats = [i for i, value in enumerate(inputs) if np.asarray(value).dtype.kind == "f"]

    def gradients(expected: list[int]) -> list[Any]:
        variables = [concrete(value, i in expected) for i, value in enumerate(inputs)]
        layers.reduce_sum(layer(*variables)).backward()
        return [variables[i].grad for i in floats]

    together = gradients(floats)
    for place, i in enumerate(floats):
        alone = gradients([i])
        np.testing.assert_array_equal(np.asarray(alone[place]), np.asarray(together[place]))
        assert all(other is None for j, other in enumerate(alone) if j != place)


def test_every_differentiable_operation_has_a_case() -> None:
    """An operation added without a gradient check fails here."""
    names = {
        kind.__name__
        for family in (getattr(ops, file.name) for file in pkgutil.iter_modules(ops.__path__))
        for kind in vars(family).values()
        if isinstance(kind, type) and issubclass(kind, Op) and kind.differentiable
    }
    names = {name for name in names if name[0] != "_"} - {"Op"}
    assert "Add" in names
    # PooledEmbedding takes float32 alone; tests/torch/test_interfaces.py compares it with torch.
    assert (
        names - {"Embedding", "PooledEmbedding", "Unary"}
        == {case.split()[0] for case in CASES} & names
    )


def test_sparse_embedding_gradient_holds_the_rows_of_the_output() -> None:
    """The gradient of a sparse table is the flat ids and the output's gradient, padding left out."""
    table = Parameter("table", R.normal(size=(5, 2)), sparse=True)
    ids = np.array([[4, 1], [1, 2]])
    out = apply(ops.embedding.Embedding(padding=2), ids, table)
    weights = R.normal(size=(2, 2, 2)).astype(np.float32)
    layers.reduce_sum(out * concrete(weights)).backward()
    assert isinstance(table.grad, SparseGrad)
    np.testing.assert_array_equal(table.grad.ids, [4, 1, 1])
    np.testing.assert_array_equal(table.grad.rows, weights.reshape(-1, 2)[:3])
    assert not out.numpy()[1, 1].any()
