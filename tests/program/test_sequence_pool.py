"""Padded sequences become one row each: values, gradients, empty ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from psfleet import fluid, layers, to_variable
from psfleet.core.graph.execution.executor import Executor
from tests.program.numeric import check_gradient

pytestmark = pytest.mark.quick

X = np.random.default_rng(4).normal(size=(4, 5, 3))
LENGTHS = np.array([3, 0, 5, 1])
POOLS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda steps: steps.sum(axis=0),
    "average": lambda steps: steps.mean(axis=0),
    "sqrt": lambda steps: steps.sum(axis=0) / np.sqrt(len(steps)),
    "max": lambda steps: steps.max(axis=0),
    "last": lambda steps: steps[-1],
    "first": lambda steps: steps[0],
}


def expected(pool: str, present: Any, pad: float) -> Any:
    return np.stack(
        [
            POOLS[pool](x[here]) if here.any() else np.full(3, pad)
            for x, here in zip(X, present, strict=True)
        ]
    )


@pytest.mark.parametrize("pad", [0.0, -2.5])
@pytest.mark.parametrize("pool", POOLS)
def test_values(pool: str, pad: float) -> None:
    """By lengths, by a mask with holes and of all steps; a sequence without steps gives pad_value; what the
    padding holds (NaN too) does not show.
    """
    by_length = np.arange(5) < LENGTHS[:, None]
    holes = np.array([[0, 1, 0, 1, 0], [0] * 5, [1] * 5, [0, 0, 0, 0, 1]])
    for said, present in (
        ({"lengths": LENGTHS}, by_length),
        ({"lengths": LENGTHS[:, None]}, by_length),
        ({"mask": holes}, holes.astype(bool)),
        ({"mask": holes.astype(np.float32)}, holes.astype(bool)),
        ({}, np.ones((4, 5), bool)),
    ):
        x = np.where(present[:, :, None], X, np.nan).astype(np.float32)
        out = layers.sequence_pool(to_variable(x), pool.upper(), pad_value=pad, **said)
        np.testing.assert_allclose(out.numpy(), expected(pool, present, pad), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pool", POOLS)
def test_gradients(pool: str) -> None:
    """They are those of central differences, and 0 for the padding and for an empty sequence."""
    holes = np.array([[0, 1, 0, 1, 0], [0] * 5, [1] * 5, [0, 0, 0, 0, 1]])
    check_gradient(lambda x: layers.sequence_pool(x, pool, LENGTHS, pad_value=7.0), X)
    check_gradient(lambda x: layers.sequence_pool(x, pool, mask=holes), X)
    check_gradient(lambda x: layers.sequence_pool(x, pool), X)


def test_in_a_program() -> None:
    """A bag of ids: rows are pooled by fed lengths of any batch, also of no step and of no sample."""
    ids, lengths = layers.data("ids", [None, None], "int64"), layers.data("n", [None, 1], "int64")
    rows = layers.embedding(ids, [10, 4], is_sparse=True, name="e")
    out = layers.sequence_pool(rows, "sum", lengths)
    last = layers.sequence_last_step(rows, lengths)
    assert out.shape == (None, 4)
    for batch, time in ((3, 2), (2, 0), (0, 3)):
        feed = {"ids": np.ones((batch, time), int), "n": np.full((batch, 1), time)}
        total, end = Executor().run(feed=feed, fetch_list=[out, last])
        assert total.shape == end.shape == (batch, 4)
        np.testing.assert_allclose(total, time * end, rtol=1e-6)


def test_older_face() -> None:
    """fluid.layers has the reference's order of arguments."""
    x = to_variable(X)
    out = fluid.layers.sequence_pool(x, "average", False, 3.0, lengths=LENGTHS)
    np.testing.assert_array_equal(out.numpy()[1], 3.0)
    first = fluid.layers.sequence_first_step(x, LENGTHS)
    np.testing.assert_array_equal(first.numpy()[0], X[0, 0].astype(np.float32))
