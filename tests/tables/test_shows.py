"""Shows and clicks of programs reach the table that counts them, whatever is done to the gradients."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet import Executor, clip, fluid, layers, optimizer
from psfleet.core.base.errors import ConfigError, ShapeError, UsageError
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.engine.runtime_interface import Runtime
from psfleet.core.engine.schema.entry import ShowClickEntry
from psfleet.core.engine.schema.table import key_of
from psfleet.core.graph.execution.inference import load_inference, save_inference
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program.program import Program, program_guard
from psfleet.core.runtime.process_runtime import current
from psfleet.core.runtime.strategy import DistributedStrategy, resolve
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer.distributed import DistributedOptimizer
from tests.runtimes import own_runtime

ENTRY = ShowClickEntry("show", "click", decay_rate=1.0)
IDS = np.array([[1, 2], [3, 1], [9, 9]])
SHOW, CLICK = np.array([[4], [2], [1]]), np.array([[1.0], [0.0], [1.0]])
FEED = {"ids": IDS, "show": SHOW, "click": CLICK, "late": np.ones((3, 1), np.float32)}
COUNTED = {1: [6, 1], 2: [4, 1], 3: [2, 0]}  # 9 is the padding


@pytest.fixture(params=["embedded", "fleet"])
def home(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """The active runtime: in this process, or two real servers."""
    if request.param == "embedded":
        with own_runtime() as embedded:
            yield embedded
    else:
        with own_runtime(), LocalFleet(2, 1, in_process=True) as fleet:
            runtime = fleet.connect(0, "async")
            current().use(runtime)
            yield runtime
            runtime.close()


@pytest.fixture
def alone() -> Iterator[Runtime]:
    """A runtime in this process."""
    with own_runtime() as runtime:
        yield runtime


def build(entry: Any = ENTRY, **options: Any) -> tuple[Any, Any]:
    """(loss, prediction) of a table of shows and clicks."""
    ids = layers.data("ids", [None, 2], dtype="int64")
    layers.data("show", [None, 1], dtype="int64")
    layers.data("click", [None, 1])
    late = layers.data("late", [None, 1])
    rows = layers.embedding(
        ids, [None, 2], is_distributed=True, padding_idx=9, name="t", entry=entry, **options
    )
    logit = layers.fc(layers.reshape(rows, [-1, 4]), 1)
    return layers.mean(layers.sigmoid_cross_entropy_with_logits(logit, late)), logit


def counted(home: Runtime) -> dict[int, list[float]]:
    """Shows and clicks by id."""
    state = home.read_table(key_of("t.w_0"))
    assert state.ids is not None
    assert state.scores is not None
    return dict(zip(state.ids.tolist(), state.scores.tolist(), strict=True))


def test_a_program_counts(home: Runtime) -> None:
    """One value a sample counts for each of its ids; the padding does not; shrink goes by the score."""
    with program_guard(Program(), Program()):
        optimizer.Adam(0.1).minimize(build()[0])
        for _ in range(3):
            Executor().run(feed=FEED)
        assert counted(home) == {id_: [3 * s, 3 * c] for id_, (s, c) in COUNTED.items()}
        assert home.shrink(key_of("t.w_0"), 0.7) == 1  # 3 has 6 shows: 0.6
        assert [*counted(home)] == [1, 2]


def test_what_else_becomes_of_gradients(alone: Runtime) -> None:
    """Clipping, merging and recomputing change gradients, and leave shows and clicks as they are."""
    strategy = DistributedStrategy()
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": 2, "avg": True}
    strategy.recompute = True
    with program_guard(Program(), Program()):
        loss, logit = build()
        strategy.recompute_configs = {"checkpoints": [logit.name]}
        local = optimizer.SGD(0.1, grad_clip=clip.ClipGradByGlobalNorm(1e-3))
        DistributedOptimizer(local, resolve(strategy, "")).minimize(loss)
        for _ in range(4):
            Executor().run(feed=FEED)
        assert counted(alone) == {id_: [4 * s, 4 * c] for id_, (s, c) in COUNTED.items()}


def test_by_id_and_by_plain_number(alone: Runtime) -> None:
    """Values may have the shape of the ids, or be one number a sample; another shape is refused."""
    with program_guard(Program(), Program()):
        ids = layers.data("ids", [None, 2], dtype="int64")
        layers.data("show", [None, 2])
        layers.data("click", [None])
        rows = layers.embedding(ids, [None, 1], is_distributed=True, name="t", entry=ENTRY)
        optimizer.SGD(0.1).minimize(layers.mean(rows))
        feed = {"ids": IDS, "show": [[1, 2], [3, 4], [5, 6]], "click": [1, 0, 2]}
        Executor().run(feed=feed)
        assert counted(alone) == {1: [5, 1], 2: [2, 1], 3: [3, 0], 9: [11, 4]}
        with pytest.raises(ShapeError, match=r"'click' has shape \(2,\) for ids \(3, 2\)"):
            Executor().run(feed={**feed, "click": [1, 0]})


def test_predicting_needs_none(alone: Runtime, tmp_path: Path) -> None:
    """Test programs and inference models are fed neither; training programs must be."""
    with program_guard(Program(), Program()) as _:
        loss, logit = build()
        test = fluid.default_main_program().clone(for_test=True)
        optimizer.SGD(0.1).minimize(loss)
        with pytest.raises(UsageError, match="feed 'show' is missing"):
            Executor().run(feed={"ids": IDS, "late": FEED["late"]})
        Executor().run(feed=FEED)
        (here,) = Executor().run(test, feed={"ids": IDS}, fetch_list=[logit])
        save_inference(str(tmp_path), ["ids"], [logit])
    loaded, feeds, targets = load_inference(str(tmp_path))
    assert feeds == ["ids"]
    (there,) = Executor().run(loaded, feed={"ids": IDS}, fetch_list=targets)
    np.testing.assert_array_equal(here, there)


def test_the_older_face(alone: Runtime) -> None:
    """fluid data and embeddings count as well."""
    with program_guard(Program(), Program()):
        ids = fluid.layers.data("ids", [1], dtype="int64")
        fluid.layers.data("show", [1], dtype="int64")
        fluid.layers.data("click", [1], dtype="int64")
        rows = fluid.layers.embedding(
            ids, [10, 2], is_distributed=True, param_attr="t.w_0", entry=ENTRY
        )
        fluid.optimizer.SGD(0.1).minimize(fluid.layers.mean(rows))
        fluid.Executor(fluid.CPUPlace()).run(
            feed={"ids": [[5], [6], [5]], "show": [[2], [1], [1]], "click": [[1], [0], [0]]}
        )
        assert counted(alone) == {5: [3, 1], 6: [1, 0]}


def test_inputs_that_are_not_there() -> None:
    """An entry that names what the program lacks is refused by that name."""
    with program_guard(Program(), Program()), pytest.raises(UsageError, match="the input 'views'"):
        build(ShowClickEntry("views", "click"))


def test_a_table_that_does_not_count() -> None:
    """Gradients of plain tables bring no scores."""
    rows = np.ones((1, 2), np.float32)
    plain = Parameter("p", shape=(-1, 2), sparse=True, distributed=True)
    with pytest.raises(ShapeError, match="'p' counts no shows and clicks"):
        optimizer.SGD(0.1).apply_gradients(
            [(plain, SparseGrad(np.array([1]), rows, np.ones((1, 2), np.float32)))]
        )


def test_amp_is_refused(alone: Runtime) -> None:
    """16 bits would round counts: the sentence says so."""
    strategy = DistributedStrategy()
    strategy.amp, strategy.amp_configs = True, {"compute": "float32"}  # torch is not needed
    with program_guard(Program(), Program()):
        DistributedOptimizer(optimizer.SGD(0.1), resolve(strategy, "")).minimize(build()[0])
        with pytest.raises(ConfigError, match="counts shows and clicks"):
            Executor().run(feed=FEED)
