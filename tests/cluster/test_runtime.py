"""What a trainer script asks of a cluster, on a fleet that lives as long as the module."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet.core.base.errors import CheckpointError, ShapeError, UsageError
from psfleet.core.engine.kernels.initial_values import initial_rows
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read, TableState
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.refusals import check_refusals
from tests.trainings import TrainingWorkload, in_threads, same_bits

SGD = make_rule("sgd", {})
ZERO = InitializerSpec("constant", 0.0)


def sparse(name: str, dim: int = 3, initializer: InitializerSpec = ZERO) -> TableSpec:
    """A sparse table under SGD."""
    return TableSpec(name, "sparse", (dim,), SGD, initializer=initializer)


def dense(name: str, *shape: int) -> TableSpec:
    """A dense table under SGD."""
    return TableSpec(name, "dense", shape, SGD)


@pytest.fixture(scope="module")
def alone() -> Iterator[ClusterRuntime]:
    """The only worker of a fleet with 2 servers, async."""
    with LocalFleet(2, 1, in_process=True) as fleet:
        runtime = ClusterRuntime(fleet.environment(0), "async")
        # The first push starts a thread that lives as long as the runtime: longer than one test.
        key = runtime.create(dense("first", 1), np.zeros(1, np.float32))
        runtime.push([Gradient(key, np.zeros(1, np.float32))]).wait()
        yield runtime
        runtime.close()


def together(fleet: LocalFleet, mode: Any, work: Callable[[ClusterRuntime], None]) -> None:
    """Every worker of the fleet does the work."""

    def train(worker: int) -> None:
        runtime = ClusterRuntime(fleet.environment(worker), mode)
        work(runtime)
        runtime.close()

    in_threads([partial(train, worker) for worker in range(fleet.workers)])


def test_rows_come_in_the_shape_of_the_ids(alone: ClusterRuntime) -> None:
    """A pull of ids [2, 3] gives rows [2, 3, dim]; no ids give no rows; both ends of int64 work."""
    spec = sparse("shapes", 3, InitializerSpec("uniform", -1, 1))
    alone.create(spec)
    ids = np.array([[5, 5, -1], [2**63 - 1, -(2**63), 0]])
    rows, none = alone.pull([Read(spec.key, ids), Read(spec.key, np.zeros(0, np.int64))])
    assert rows.shape == (2, 3, 3)
    assert none.shape == (0, 3)
    np.testing.assert_array_equal(
        rows, initial_rows(ids, 3, spec.initializer, spec.seed, spec.name)
    )


def test_dense_arrays_of_any_shape(alone: ClusterRuntime) -> None:
    """Scalars, empty arrays and arrays of several blocks come back as they were and learn."""
    for shape in [(), (0, 3), (5,), (70, 3, 41)]:
        spec = dense(f"dense {shape}", *shape)
        value = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        value = np.asarray(value, np.float32).reshape(shape)
        alone.create(spec, value)
        np.testing.assert_array_equal(alone.pull([Read(spec.key)])[0], value)
        alone.push([Gradient(spec.key, np.ones(shape, np.float32), None, 0.5)])
        np.testing.assert_array_equal(alone.pull([Read(spec.key)])[0], value - np.float32(0.5))


def test_the_same_definition_twice_is_one_table(alone: ClusterRuntime) -> None:
    """Creating a table again keeps its content."""
    spec = dense("twice", 3)
    alone.create(spec, np.ones(3, np.float32))
    alone.create(spec, np.zeros(3, np.float32))
    np.testing.assert_array_equal(alone.pull([Read(spec.key)])[0], [1, 1, 1])


REFUSED = """
push(rows, ones((2, 4)), [0, 1])  # ShapeError
push(rows, ones((2, 3)), [0, 1, 2])  # ShapeError
push(rows, ones((2, 3)))  # ShapeError
push(rows, ones((2, 3)), [1, 1.5])  # IdError
push(rows, ones((2, 3)), [1, nan])  # IdError
push(square, ones(4))  # ShapeError
push(square, ones((2, 2)), [0, 1])  # ShapeError
push(5, ones((2, 2)))  # UnknownTable
push(square, ones((2, 2)), twice=True)  # UsageError: ...twice
create(sparse("checked", 4))  # TableConflict: ...'checked'"""


def test_what_cannot_be_meant_changes_nothing(alone: ClusterRuntime) -> None:
    """One sentence and no change, of the table that comes before it in the same push neither."""
    tables = [sparse("checked"), dense("checked dense", 2, 2)]
    alone.create(tables[0])
    square = alone.create(tables[1], np.zeros((2, 2), np.float32))
    before = [alone.read_table(spec.key) for spec in tables]
    good = Gradient(square, np.ones((2, 2), np.float32), None, 1.0)

    def push(table: int, values: Any, ids: Any = None, twice: bool = False) -> None:
        wrong = Gradient(table, values.astype(np.float32), None if ids is None else np.array(ids))
        alone.push([good, wrong] if twice or table != square else [wrong])

    names = {"push": push, "rows": tables[0].key, "square": square, "create": alone.create}
    check_refusals(REFUSED, vars(np) | names | {"sparse": sparse})
    same_bits([alone.read_table(spec.key) for spec in tables], before)
    alone.push([good]).wait(60)


def test_state_is_written_and_read(alone: ClusterRuntime) -> None:
    """write_table sets weights, optimizer state and step; rows not given stay."""
    training = TrainingWorkload(steps=3)
    training.run(alone)
    before = training.result(alone)
    training.run(alone)
    for spec, state in zip((training.dense, training.sparse), before, strict=True):
        alone.write_table(spec.key, state)
    after = training.result(alone)
    same_bits(after[:1], before[:1])
    kept = np.isin(after[1].ids, before[1].ids)  # type: ignore[arg-type]
    assert after[1].ids is not None
    same_bits(
        [TableState(after[1].step, [v[kept] for v in after[1].values], after[1].ids[kept])],
        before[1:],
    )


def test_reductions_of_one_worker_are_its_array(alone: ClusterRuntime) -> None:
    """A lone worker gets back what it brings, dtype and shape included."""
    for dtype in ("float32", "float64", "int32", "int64"):
        value = np.arange(6, dtype=dtype).reshape(2, 3)
        actual = alone.all_reduce(value)
        np.testing.assert_array_equal(actual, value)
        assert actual.dtype == value.dtype
    assert alone.all_reduce(np.array(3.0)).shape == ()
    with pytest.raises(UsageError, match="mean"):
        alone.all_reduce(np.zeros(1), "mean")
    with pytest.raises(ShapeError, match="float16"):
        alone.all_reduce(np.zeros(1, np.float16))
    alone.barrier()


def test_one_worker_gives_the_first_value_on_all_servers() -> None:
    """When workers come with different first values, one of them counts, everywhere."""
    spec = dense("whose", 40_000)
    seen: list[np.ndarray[Any, Any]] = []

    def work(runtime: ClusterRuntime) -> None:
        runtime.create(spec, np.full(40_000, runtime.worker_index, np.float32))
        seen.extend(runtime.pull([Read(spec.key)]))

    with LocalFleet(3, 4, in_process=True) as fleet:
        together(fleet, "async", work)
    assert len({value.tobytes() for value in seen}) == 1
    assert len(np.unique(seen[0])) == 1


def test_a_missing_checkpoint_is_one_sentence(alone: ClusterRuntime, tmp_path: Path) -> None:
    """Loading what is not there changes nothing; saving where servers cannot write leaves nothing."""
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        alone.load(str(tmp_path / "nowhere"))
