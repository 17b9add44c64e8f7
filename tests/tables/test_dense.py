"""Dense tables: state, slices, refusals."""

import numpy as np
import pytest

from psfleet.rules import ASGD, SGD, Adam, RowWiseAdagrad, Rule
from psfleet.schema.table import TableSpec
from psfleet.tables.dense import DenseTable


@pytest.mark.parametrize("rule", [SGD(), Adam(), ASGD(2), RowWiseAdagrad()])
def test_state_restores_the_table(rule: Rule) -> None:
    """A table made from another's state goes on with the same bits."""
    random = np.random.default_rng(0)
    start = random.standard_normal(12).astype(np.float32)
    spec = TableSpec("t", "dense", (3, 4), rule)
    table, copy = DenseTable(spec, start), DenseTable(spec, np.zeros(12, np.float32))
    for _ in range(3):
        table.push(random.standard_normal(12).astype(np.float32), 0.1)
    copy.restore(table.step, table.state())
    gradient = random.standard_normal(12).astype(np.float32)
    for each in (table, copy):
        each.push(gradient, 0.1)
    assert table.step == copy.step == 4
    for actual, expected in zip(copy.state(), table.state(), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_the_table_owns_its_memory() -> None:
    """Later changes of what it was made from, or of what it gave away, do not reach it."""
    start = np.ones(4, np.float32)
    table = DenseTable(TableSpec("t", "dense", (4,), SGD()), start)
    start[:] = 7
    table.state()[0][:] = 7
    out = np.empty(4, np.float32)
    table.pull_into(out)
    np.testing.assert_array_equal(out, 1)


@pytest.mark.parametrize("rule", [SGD(), Adam(), RowWiseAdagrad()])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_an_empty_slice(rule: Rule, shape: tuple[int, ...]) -> None:
    """A server that holds nothing of an array still makes the steps."""
    table = DenseTable(TableSpec("t", "dense", shape, rule), np.zeros(0, np.float32))
    table.push(np.zeros(0, np.float32), 0.1)
    assert (table.step, table.count, table.bytes) == (1, 0, 0)
    table.restore(5, table.state())
    assert table.step == 5
