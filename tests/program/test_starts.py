"""Every initializer starts every kind of parameter and table, or one sentence says why not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from psfleet import initializer, layers, optimizer
from psfleet.core.base.errors import ConfigError, PsfleetError, ShapeError
from psfleet.core.client import Client
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program import names
from psfleet.core.graph.program.attribute import ParamAttr
from psfleet.core.runtime.process_runtime import active

ROWS, DIM = 2000, 5
MAKERS: dict[str, Callable[[int], initializer.Initializer]] = {
    "Constant": lambda seed: initializer.Constant(5.0),
    "Uniform": lambda seed: initializer.Uniform(-2.0, 4.0, seed),
    "Normal": lambda seed: initializer.Normal(3.0, 0.5, seed),
    "TruncatedNormal": lambda seed: initializer.TruncatedNormal(3.0, 0.5, seed),
    "Xavier": lambda seed: initializer.Xavier(True, 20, 10, seed),
    "Xavier normal": lambda seed: initializer.Xavier(False, 20, 10, seed),
    "MSRA": lambda seed: initializer.MSRA(True, 50, seed),
    "MSRA normal": lambda seed: initializer.MSRA(False, 50, seed),
}
MOMENTS = {
    "Constant": (5.0, 0.0),
    "Uniform": (1.0, 6 / 12**0.5),
    "Normal": (3.0, 0.5),
    "TruncatedNormal": (3.0, 0.5 * 0.7737**0.5),
    "Xavier": (0.0, (2 / 30) ** 0.5),
    "Xavier normal": (0.0, (2 / 30) ** 0.5),
    "MSRA": (0.0, 0.2),
    "MSRA normal": (0.0, 0.2),
}
IDS = np.arange(ROWS) * 7_000_003


def parameter_rows(start: Any) -> Any:
    """Rows of a distributed parameter, half of them after an update that changes nothing."""
    w = Parameter("t", shape=(-1, DIM), sparse=True, distributed=True, initializer=start)
    zero = np.zeros((ROWS // 2, DIM), np.float32)
    optimizer.SGD(0.1).apply_gradients([(w, SparseGrad(IDS[: ROWS // 2], zero))])
    return w.lookup(IDS)


def table_rows(start: Any) -> Any:
    """Rows of a table of a plain client."""
    return Client(active()).sparse_table("t", DIM, optimizer.SGD(0.1), start).pull(IDS)


def layer_rows(start: Any) -> Any:
    """Rows of an embedding of a program."""
    ids = layers.data(names.generate("ids"), [None], dtype="int64")
    rows = layers.embedding(
        ids, [None, DIM], is_distributed=True, param_attr=ParamAttr("t", initializer=start)
    )
    return Executor().run(feed={ids.name: IDS}, fetch_list=[rows])[0]


PLACES = {"parameter": parameter_rows, "table": table_rows, "layer": layer_rows}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, "parameter") for name in MAKERS),
        *(("Uniform", "table"), ("Xavier", "table"), ("Normal", "layer"), ("MSRA", "layer")),
    ],
)
def test_rows_for_any_id(name: str, place: str) -> None:
    """Rows have the initializer's mean and deviation, the same bits wherever it is given."""
    rows = PLACES[place](MAKERS[name](0))
    mean, deviation = MOMENTS[name]
    assert rows.mean() == pytest.approx(mean, abs=0.1 * max(deviation, 0.1))
    assert rows.std() == pytest.approx(deviation, rel=0.06, abs=1e-9)
    actual = initializer.resolve(MAKERS[name](0), (None, DIM))
    same = Parameter("t", shape=(-1, DIM), sparse=True, distributed=True, initializer=actual)
    np.testing.assert_array_equal(rows, same.lookup(IDS))


@pytest.mark.parametrize("place", PLACES)
def test_own_seed(place: str) -> None:
    """An initializer's own seed comes before the parameter's, the table's and the program's."""
    rows = PLACES[place](MAKERS["Uniform"](11))
    plain = initializer.resolve(MAKERS["Uniform"](0), (None, DIM))
    same = Parameter(
        "t", shape=(-1, DIM), sparse=True, distributed=True, initializer=plain, seed=11
    )
    np.testing.assert_array_equal(rows, same.lookup(IDS))


def test_torch_embeddings() -> None:
    """Embeddings of PyTorch models start as tables do, by the initializer's own seed."""
    embeddings = pytest.importorskip("psfleet.torch.embeddings")
    for name, make in MAKERS.items():
        made = embeddings.Embedding(None, DIM, name=name, seed=3, initializer=make(11))
        expected, seed = initializer.starting(make(11), (None, DIM), 3, name)
        assert (made.table.initializer, made.table.seed) == (expected, seed)
    with pytest.raises(ConfigError, match="embedding 'a': an array of shape"):
        embeddings.Embedding(None, 1, name="a", initializer=initializer.Assign([1.0]))
    with pytest.raises(ConfigError, match="Embedding: initializer is 'zeros'"):
        embeddings.Embedding(None, 1, initializer="zeros")


@pytest.mark.parametrize("place", PLACES)
def test_what_no_row_can_start_from(place: str) -> None:
    """An array, fans of an unknown number of rows and other things get a sentence that names the table."""
    for start, sentence in (
        (initializer.Assign(np.ones((3, DIM))), r"'t': an array of shape \(3, 5\) cannot"),
        (initializer.Xavier(), "'t': fans of the shape"),
        (initializer.MSRA(), "'t': fans of the shape"),
    ):
        with pytest.raises(PsfleetError, match=sentence):
            PLACES[place](start)
    with pytest.raises(PsfleetError, match="initializer is 'x'"):
        PLACES[place]("x")


def test_an_array_starts_a_known_number_of_rows() -> None:
    """A sparse parameter whose rows are known starts as an array, before its table is made and after."""
    start = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    ids = layers.data("ids", [None], dtype="int64")
    rows = layers.embedding(
        ids,
        [5, 3],
        is_sparse=True,
        param_attr=ParamAttr("e", initializer=initializer.Assign(start)),
    )
    loss = layers.mean(rows)
    predict = layers.scale(rows)
    optimizer.SGD(0.0).minimize(loss)
    for _ in range(2):
        (outputs,) = Executor().run(feed={"ids": np.arange(5)}, fetch_list=[predict])
        np.testing.assert_array_equal(outputs, start)
    with pytest.raises(ShapeError, match=r"'f' of shape \(5, 3\) cannot start as an array of"):
        Parameter("f", shape=(5, 3), sparse=True, initializer=initializer.Assign(start.T))
