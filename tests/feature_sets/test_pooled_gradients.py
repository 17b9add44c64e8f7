"""Gradients of pooled rows stand for those of the rows, in whatever an optimizer does with them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet import layers
from psfleet.client import Client
from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.execution.executor import Executor
from psfleet.features import Feature, FeatureSet, Jagged, Table, feed
from psfleet.initializer import Normal
from psfleet.kernels.bags import RowBags
from psfleet.optimizer import SGD, Adagrad
from psfleet.optimizer.clip import ClipGradByGlobalNorm
from psfleet.optimizer.outgoing_gradients import GradientScaler
from psfleet.parameters.gradients import PooledGradient, gradient_of
from psfleet.parameters.parameter import SparseGrad
from psfleet.parameters.parameter_client import ParameterClient
from psfleet.program.gradient import summed
from psfleet.program.program import Program, program_guard
from psfleet.runtime.pooled_ids import PooledIds
from psfleet.runtime.process_runtime import current
from psfleet.runtime.runtime_bases import ForwardingRuntime
from psfleet.schema.table import key_of
from psfleet.strategy.strategy_parts import AMPSettings
from tests.trainings import same_bits

FEATURES = FeatureSet(
    [
        Feature("sum", Table("shared", 4, None, Normal(seed=3))),
        Feature("mean", Table("shared", 4, None, Normal(seed=3)), pooling="mean", weighted=True),
        Feature("own", Table("own", 3, Adagrad(0.1), Normal(seed=4))),
    ]
)


def asked(seed: int, weighted: bool = False) -> PooledIds:
    """Bags with repeats."""
    dice = np.random.default_rng(seed)
    lengths = dice.integers(0, 4, 20)
    count = int(lengths.sum())
    weights = dice.standard_normal(count).astype(np.float32) if weighted else None
    return PooledIds(dice.integers(0, 9, count), (RowBags(lengths, weights, mean=weighted),))


def gradient(seed: int, weighted: bool = False) -> PooledGradient:
    """Of such bags."""
    values = np.random.default_rng(seed).standard_normal((20, 4)).astype(np.float32)
    return PooledGradient(asked(seed, weighted), values)


def by_rows(pooled: SparseGrad) -> SparseGrad:
    """The same gradient, in rows from the start."""
    return SparseGrad(pooled.ids, pooled.rows)


def test_sums() -> None:
    """The sum of two stays pooled, and that with a gradient by rows is one by rows."""
    one, two = gradient(1), gradient(2, weighted=True)
    expected: Any = summed(by_rows(one), by_rows(two))
    both: Any = summed(one, two)
    assert isinstance(both, PooledGradient)
    mixed: Any = summed(one, by_rows(two))
    for total in (both, mixed):
        assert total.ids.tobytes() == expected.ids.tobytes()
        assert total.rows.tobytes() == expected.rows.tobytes()


@pytest.mark.parametrize(
    "settings", [AMPSettings("float16", init_loss_scaling=16.0), AMPSettings("bfloat16")]
)
def test_16_bits(settings: AMPSettings) -> None:
    """What is sent in 16 bits is that of the rows."""
    seat: Any = SimpleNamespace(spec=SimpleNamespace(kind="sparse"))
    sent = [
        GradientScaler(settings).take([(seat, gradient_of(1, given, 0.1))])[0][1]
        for given in (gradient(1, weighted=True), by_rows(gradient(1, weighted=True)))
    ]
    mine, theirs = (each.spread() for each in sent)
    assert (mine.precision, mine.scale) == (theirs.precision, theirs.scale)
    assert mine.values.tobytes() == theirs.values.tobytes()


def batch(step: int) -> dict[str, Any]:
    """Of the features."""
    dice = np.random.default_rng(step)
    lengths = dice.integers(0, 4, 12)
    count = int(lengths.sum())
    ids = dice.integers(0, 9, count)
    jagged = Jagged(ids, lengths, weights=dice.uniform(0, 2, count))
    return {"sum": jagged, "mean": jagged, "own": dice.integers(0, 9, 12)}


def trained(runtime: Any, **settings: Any) -> list[Any]:
    """The tables after some steps of a program."""
    before = current().use(runtime)
    try:
        with program_guard(Program(), Program()):
            values = layers.features(FEATURES)
            loss = layers.sums([layers.reduce_sum(layers.square(v)) for v in values.values()])
            SGD(0.1, **settings).minimize(loss)
            executor = Executor()
            for step in range(4):
                executor.run(feed=feed(FEATURES, batch(step)), fetch_list=[loss])
        return [runtime.read_table(key_of(name)) for name in FEATURES.tables]
    finally:
        psfleet.reset()
        current().use(before)
        runtime.close()


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_runtime_that_does_not_pool(clip: float | None) -> None:
    """A program has the same bits where rows are pooled after they have come, also with clipping."""
    settings = {} if clip is None else {"grad_clip": ClipGradByGlobalNorm(clip)}
    pooled = trained(EmbeddedRuntime(), **settings)
    apart = trained(ForwardingRuntime(EmbeddedRuntime()), **settings)
    assert len(pooled[0].ids) > 5
    same_bits(pooled, apart)


def test_reading_ahead() -> None:
    """What was read ahead is taken by those who ask for the same bags, and by nobody else."""
    runtime = EmbeddedRuntime()
    with Client(runtime) as tables:
        table = tables.sparse_table("t", 4, SGD(1.0))
        client, key = ParameterClient(runtime), table.spec.key
        given, other = asked(1, weighted=True), asked(2, weighted=True)
        [old] = client.pull([], [(key, given)])[1]
        for expected, same in ((asked(1, weighted=True), True), (other, False)):
            client.begin_pull([], [(key, given)])
            table.push(np.arange(9), np.ones((9, 4)))
            [rows] = client.pull([], [(key, expected)])[1]
            [new] = client.pull([], [(key, expected)])[1]
            assert np.array_equal(rows, old) == same
            assert np.array_equal(rows, new) != same
            [old] = client.pull([], [(key, given)])[1]
