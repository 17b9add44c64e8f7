"""Rows that are pooled where they are looked up, and gradients of bags: the bits of pooling afterwards."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import psfleet
from psfleet import layers
from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.core.base.settings.environment import Environment
from psfleet.core.client import Client
from psfleet.core.engine import rules
from psfleet.core.engine.gradients import PooledGradient, SparseGrad, gradient_of
from psfleet.core.engine.kernels import dedup as dedup_module
from psfleet.core.engine.kernels.bags import RowBags, pool_parts, spread_parts
from psfleet.core.engine.kernels.dedup import dedup
from psfleet.core.engine.runtime_interface import Gradient, PooledIds
from psfleet.core.engine.schema.entry import ShowClickEntry
from psfleet.core.engine.schema.table import TableSpec, key_of
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.parameters.parameter_client import ParameterClient
from psfleet.core.graph.program.operation import summed
from psfleet.core.graph.program.program import Program, program_guard
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import current
from psfleet.core.runtime.runtime_bases import ForwardingRuntime
from psfleet.core.runtime.strategy.strategy_parts import AMPSettings
from psfleet.features import Feature, FeatureSet, Jagged, Number, Table, feed
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.initializer import Normal
from psfleet.optimizer import SGD, Adagrad, Adam, RowWiseAdagrad
from psfleet.optimizer.clip import ClipGradByGlobalNorm
from psfleet.optimizer.outgoing_gradients import GradientScaler
from tests.trainings import same_bits

Way = Callable[[Client, FeatureSet, int], dict[str, NDArray[Any]]]
STEPS, SAMPLES = 5, 30


def features(counts: bool = True) -> FeatureSet:
    """Every kind of feature, tables that features share, and one with more than a row's gradient.

    Args:
        counts: That one counts shows and clicks.
    """
    start = Normal(scale=1.0, seed=3)
    users, items = Table("users", 5, Adam(0.1), start), Table("items", 16, Adagrad(0.1), start)
    wide = Table("wide", 40, RowWiseAdagrad(0.1), start)
    entry = ShowClickEntry("shows", "clicks") if counts else None
    seen = Table("seen", 5, Adagrad(0.1), start, entry)
    return FeatureSet(
        [
            Feature("user", users),
            Feature("clicks", items),
            Feature("friends", users, pooling="mean"),
            Feature("liked", items, weighted=True, pooling="mean"),
            Feature("last", items, pooling="none", last=2),
            Feature("path", users, pooling="none"),
            Feature("lacking", items),
            Feature("shop", Table("shops", 3, Adagrad(0.1), start)),
            Feature("ads", seen),
            Feature("topics", wide),
            Feature("home", wide, pooling="mean"),
            Number("age"),
        ]
    )


def batch(step: int) -> dict[str, Any]:
    """Ids of a step, with repeats and empty bags."""
    dice = np.random.default_rng(step)

    def jagged() -> Jagged:
        lengths = dice.integers(0, 4, SAMPLES)
        count = int(lengths.sum())
        return Jagged(dice.integers(0, 20, count), lengths, weights=dice.uniform(-1, 2, count))

    single = {name: dice.integers(0, 20, SAMPLES) for name in ("user", "shop", "age")}
    return {
        **single,
        **{
            name: jagged()
            for name in ("clicks", "friends", "liked", "last", "path", "ads", "topics", "home")
        },
    }


def gradients(values: dict[str, NDArray[Any]], step: int) -> dict[str, Any]:
    """Of the features' values; one feature of a shared table has none in every second step."""
    gradients_by_name = {name: 0.1 * value + 1 for name, value in values.items() if name != "age"}
    return {**gradients_by_name, "friends": None} if step % 2 else gradients_by_name


def afterwards(client: Client, feature_set: FeatureSet, step: int) -> dict[str, NDArray[Any]]:
    """The rows of all ids are pulled and pooled then."""
    lookup = client.features(feature_set).batch(batch(step))
    values = lookup.pool(client.pull(lookup.ids))
    client.push(lookup.gradients(gradients(values, step)))
    return values


def at_once(client: Client, feature_set: FeatureSet, step: int) -> dict[str, NDArray[Any]]:
    """What is pulled is pooled."""
    lookup = client.features(feature_set).batch(batch(step))
    values = lookup.values(client.pull_ahead(lookup.pooled).wait())
    client.push(lookup.pooled_gradients(gradients(values, step)))
    return values


def trained(client: Client, way: Way, counts: bool = True) -> list[Any]:
    """The values of each step, and the tables at the end."""
    feature_set = features(counts)
    values = [way(client, feature_set, step) for step in range(STEPS)]
    client.flush()
    tables = client.features(feature_set).tables.values()
    return [values, [client.runtime.read_table(table.spec.key) for table in tables]]


def alone(way: Way, **settings: Any) -> list[Any]:
    """Trained in this process."""
    with psfleet.connect(Environment(None, 0, (), 1), **settings) as client:
        return trained(client, way)


def check(ours: list[Any], expected: list[Any]) -> None:
    """The same values in every step, and the same tables."""
    for mine, theirs in zip(ours[0], expected[0], strict=True):
        assert list(mine) == list(theirs)
        for name, value in mine.items():
            assert value.tobytes() == theirs[name].tobytes(), name
            assert value.shape == theirs[name].shape
    same_bits(ours[1], expected[1])


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_in_one_process(wire: str) -> None:
    """All values in every step, and all rows and their state, are the same."""
    check(alone(at_once, wire=wire), alone(afterwards, wire=wire))


@pytest.mark.parametrize("mode", ["sync", "geo"])
def test_on_servers(mode: Any) -> None:
    """Likewise on two servers, also in a mode that has rows of its own."""
    results = []
    for way in (at_once, afterwards):
        with (
            LocalFleet(2, 1, in_process=True) as fleet,
            psfleet.connect(fleet.environment(0), mode=mode) as client,
        ):
            results.append(trained(client, way, counts=mode != "geo"))
            client.close()
            assert fleet.wait(60) == [0, 0]
    check(*results)
    if mode == "sync":
        check(results[0], alone(at_once))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dim", [16, 33])
def test_kernels(groups: int, dim: int) -> None:
    """Sums over codes are those over rows, for bags of every kind."""
    dice = np.random.default_rng(dim)
    many = dice.integers(0, 9, 300)
    count = int(many.sum())
    parts = [
        RowBags(many),
        RowBags(np.ones(500, np.int64)),
        RowBags(many, mean=True),
        RowBags(many, dice.standard_normal(count).astype(np.float32), mean=True),
        RowBags(np.zeros(7, np.int64)),
    ]
    ids = dice.integers(0, 400, sum(part.rows for part in parts))
    joined = dedup(ids, groups)
    rows = [dice.standard_normal((len(own), dim)).astype(np.float32) for own in joined.unique]
    pooled = joined.pool(rows, parts)
    assert pooled.tobytes() == pool_parts(joined.expand(rows), parts).tobytes()
    for mine, theirs in zip(
        joined.merge(pooled, parts), joined.merge(spread_parts(pooled, parts)), strict=True
    ):
        assert mine.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dim", [1, 16, 40])
def test_sums_of_bags_by_blocks(groups: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that are made when they are read have the bits of sums of rows, at once and by blocks."""
    monkeypatch.setattr(dedup_module, "_SUMS_BYTES", 4 * dim * 37)
    dice = np.random.default_rng(dim)
    many = dice.integers(0, 9, 300)
    parts = [RowBags(many), RowBags(np.ones(500, np.int64)), RowBags(many, mean=True)]
    ids = dice.integers(0, 400, sum(part.rows for part in parts))
    joined = dedup(ids, groups)
    gradients = dice.standard_normal((1100, dim)).astype(np.float32)
    gradients[::3] = -0.0
    expected = np.concatenate(joined.merge(spread_parts(gradients, parts)))
    sums = joined.sums_later(gradients, parts)
    assert sums is not None
    assert sums.shape == expected.shape
    assert np.asarray(sums).tobytes() == expected.tobytes()
    blocks = [block.copy() for block in sums.blocks()]
    assert len(blocks) == -(-len(expected) // 37)
    assert np.concatenate(blocks).tobytes() == expected.tobytes()
    assert sums.square == pytest.approx(float((expected.astype(np.float64) ** 2).sum()), rel=1e-5)
    mask = dice.random(len(expected)) < 0.5
    assert sums[mask].tobytes() == expected[mask].tobytes()
    weighted = RowBags(many, dice.standard_normal(parts[2].rows).astype(np.float32))
    assert joined.sums_later(gradients, [*parts[:2], weighted]) is None


@pytest.mark.parametrize("value", [np.inf, np.nan, 3e38])
def test_sums_that_are_not_finite_change_nothing(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table sums while it updates rows, and yet a push is refused before if a sum is infinite."""
    monkeypatch.setenv("PSFLEET_ON_NAN", "stop")
    runtime = EmbeddedRuntime()
    table = Client(runtime).sparse_table("t", 40, SGD(1.0))
    table.push(np.arange(9), np.ones((9, 40)))
    before = runtime.read_table(table.spec.key)
    gradients = np.zeros((2, 40), np.float32)
    gradients[:, 7] = value
    bags = (RowBags(np.array([3, 2])),)
    with pytest.raises(
        UsageError, match=r"step 2: the gradient for table 't' has (inf|nan) for id 1"
    ):
        runtime.push(
            [Gradient(table.spec.key, gradients, np.array([1, 2, 3, 1, 4]), 1.0, bags=bags)]
        )
    same_bits([runtime.read_table(table.spec.key)], [before])


def test_norms_of_sums() -> None:
    """The norm of sums that a table makes is that of the same gradient by rows."""
    norms = []
    for given in (gradient(1), by_rows(gradient(1))):
        runtime = EmbeddedRuntime()
        key = Client(runtime).sparse_table("t", 4, SGD(1.0)).spec.key
        runtime.push([gradient_of(key, given, 0.1)])
        runtime.push([])
        norms.append(runtime._watch.norms.tables["t"])
    assert norms[0].total == pytest.approx(norms[1].total)
    assert norms[0].counts == norms[1].counts


def test_pooled_in_place() -> None:
    """Rows are pooled where they lie, those without a row too; packed and short rows are not."""
    ids = dedup(np.array([5, 3, 5, 90, 4]), 1)
    bags = (RowBags(np.array([2, 0, 1]), mean=True), RowBags(np.ones(2, np.int64)))
    table = SparseTable(TableSpec("t", "sparse", (40,), rules.RowWiseAdagrad()))
    table.push(np.arange(5), np.ones((5, 40), np.float32), 0.1)
    rows = np.empty((4, 40), np.float32)
    assert table.pull_into(ids.unique[0], rows) == 2
    pooled = table.pool(ids, bags)
    assert pooled is not None
    assert pooled.tobytes() == ids.pool([rows], bags).tobytes()
    assert (table.traffic.pulled, table.traffic.unknown) == (8, 4)
    short = TableSpec("t", "sparse", (16,), rules.SGD())
    packed = TableSpec("t", "sparse", (40,), rules.SGD(), precision="bfloat16")
    assert SparseTable(short).pool(ids, bags) is None
    assert SparseTable(packed).pool(ids, bags) is None


def test_refusals() -> None:
    """A gradient that does not fit its bags is refused, and nothing is pushed."""
    with psfleet.connect(Environment(None, 0, (), 1)) as client:
        lookup = client.features(features()).batch(batch(0))
        with pytest.raises(UsageError, match="a gradient is for the feature 'x'"):
            lookup.pooled_gradients({"x": 1})
        with pytest.raises(
            ShapeError, match=r"the gradient of feature 'user' has the shape \(1,\)"
        ):
            lookup.pooled_gradients({"user": [1]})
        [(table, one)] = lookup.pooled_gradients({"shop": np.ones((SAMPLES, 3))}).items()
        wrong = Gradient(table.spec.key, np.ones((4, 3), np.float32), one.of.ids, bags=one.of.parts)
        with pytest.raises(ShapeError, match=r"the gradient has \(4, 3\) for 30 bags of 30 ids"):
            client.runtime.push([wrong])
        assert client.runtime.read_table(table.spec.key).step == 0


TWO_TABLES = FeatureSet(
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


def fed(step: int) -> dict[str, Any]:
    """Of the features."""
    dice = np.random.default_rng(step)
    lengths = dice.integers(0, 4, 12)
    count = int(lengths.sum())
    ids = dice.integers(0, 9, count)
    jagged = Jagged(ids, lengths, weights=dice.uniform(0, 2, count))
    return {"sum": jagged, "mean": jagged, "own": dice.integers(0, 9, 12)}


def trained_program(runtime: Any, **settings: Any) -> list[Any]:
    """The tables after some steps of a program."""
    before = current().use(runtime)
    try:
        with program_guard(Program(), Program()):
            values = layers.features(TWO_TABLES)
            loss = layers.sums([layers.reduce_sum(layers.square(v)) for v in values.values()])
            SGD(0.1, **settings).minimize(loss)
            executor = Executor()
            for step in range(4):
                executor.run(feed=feed(TWO_TABLES, fed(step)), fetch_list=[loss])
        return [runtime.read_table(key_of(name)) for name in TWO_TABLES.tables]
    finally:
        psfleet.reset()
        current().use(before)
        runtime.close()


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_runtime_that_does_not_pool(clip: float | None) -> None:
    """A program has the same bits where rows are pooled after they have come, also with clipping."""
    settings = {} if clip is None else {"grad_clip": ClipGradByGlobalNorm(clip)}
    pooled = trained_program(EmbeddedRuntime(), **settings)
    apart = trained_program(ForwardingRuntime(EmbeddedRuntime()), **settings)
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
