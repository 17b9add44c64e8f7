"""Sparse parameters: the table that each gets, and that it has the dense semantics."""

from collections.abc import Callable

import numpy as np
import pytest

from psfleet import optimizer
from psfleet.core.base.errors import IdError, UsageError
from psfleet.core.engine import rules
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.engine.schema.table import DecaySpec, InitializerSpec
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.parameters.table_kind import LazyBinding, Placement, placement_of, reach
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime

pytestmark = pytest.mark.quick

MAKERS: dict[str, Callable[[], optimizer.Optimizer]] = {
    "SGD": lambda: optimizer.SGD(0.1),
    "SGD with decay": lambda: optimizer.SGD(0.1, weight_decay=0.1),
    "Momentum": lambda: optimizer.Momentum(0.1, 0.9),
    "Nesterov": lambda: optimizer.Momentum(0.1, 0.9, use_nesterov=True),
    "LarsMomentum": lambda: optimizer.LarsMomentum(0.1, 0.9),
    "Adagrad": lambda: optimizer.Adagrad(0.1),
    "DecayedAdagrad": lambda: optimizer.DecayedAdagrad(0.1),
    "RowWiseAdagrad": lambda: optimizer.RowWiseAdagrad(0.1),
    "Adadelta": lambda: optimizer.Adadelta(0.1),
    "Adam, full": lambda: optimizer.Adam(0.1, sparse_mode="full"),
    "Adam, epsilon 0": lambda: optimizer.Adam(0.1, epsilon=1e-30, sparse_mode="full"),
    "AdamW": lambda: optimizer.AdamW(0.1),
    "AMSGrad": lambda: optimizer.AMSGrad(0.1),
    "Adamax": lambda: optimizer.Adamax(0.1),
    "NAdam": lambda: optimizer.NAdam(0.1),
    "RAdam": lambda: optimizer.RAdam(0.1),
    "RMSProp": lambda: optimizer.RMSProp(0.1, momentum=0.5, centered=True),
    "Rprop": lambda: optimizer.Rprop(0.1),
    "Lamb": lambda: optimizer.Lamb(0.1),
    "DGCMomentum": lambda: optimizer.DGCMomentum(0.1, 0.9, 100),
    "ASGD": lambda: optimizer.ASGD(0.1, 3),
    "ASGD of one batch": lambda: optimizer.ASGD(0.1, 1),
    "ProximalGD": lambda: optimizer.ProximalGD(0.1, 0.1),
    "ProximalAdagrad": lambda: optimizer.ProximalAdagrad(0.1, 0.1),
}
LAZY: dict[str, Callable[[], optimizer.Optimizer]] = {
    "Ftrl": lambda: optimizer.Ftrl(0.1, 0.01, 0.01),
    "Adam, lazy": lambda: optimizer.Adam(0.1, sparse_mode="lazy"),
}


def steps(every: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(8)
    ids = [rng.permutation(6) if every else rng.integers(0, 6, 3) for _ in range(7)]
    return [(i, rng.normal(size=(len(i), 5)).astype(np.float32)) for i in ids]


def dense_of(ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
    whole = np.zeros((6, 5), np.float32)
    np.add.at(whole, ids, rows)
    return whole


def both(make: Callable[[], optimizer.Optimizer], every: bool, sparse: Parameter) -> None:
    """Train a sparse parameter and a dense one alike; weights and state must be the same bits."""
    dense, by_rows = make(), make()
    w = Parameter("dense", sparse.numpy())
    for ids, rows in steps(every):
        dense.apply_gradients([(w, dense_of(ids, rows))])
        by_rows.apply_gradients([(sparse, SparseGrad(ids, rows))])
        np.testing.assert_array_equal(sparse.numpy(), w.numpy())
    state = by_rows.state_dict()
    for key, value in dense.state_dict().items():
        np.testing.assert_array_equal(state[key.replace("dense", "sparse")], value)


def rows(kind: str) -> Parameter:
    start = InitializerSpec("normal", 0.0, 1.0)
    if kind == "plain":
        return Parameter("sparse", np.random.default_rng(1).normal(size=(6, 5)))
    return Parameter("sparse", shape=(6, 5), sparse=True, initializer=start)


PLAIN = ("SGD with decay", "Momentum", "Lamb", "Ftrl")


@pytest.mark.parametrize(
    ("name", "kind"), [*((n, "sparse") for n in MAKERS | LAZY), *((n, "plain") for n in PLAIN)]
)
def test_a_sparse_parameter_gets_the_bits_of_a_dense_one(name: str, kind: str) -> None:
    """With gradients for some of its rows; under a lazy optimizer with gradients for every row."""
    both((MAKERS | LAZY)[name], name in LAZY, rows(kind))


@pytest.mark.parametrize("name", LAZY)
def test_lazy_rows_rest(name: str, fleet: EmbeddedRuntime) -> None:
    """Under a lazy optimizer a row without a gradient keeps weights and state."""
    w, opt = rows("sparse"), LAZY[name]()
    before = w.numpy().copy()
    opt.apply_gradients([(w, SparseGrad(np.array([1]), np.ones((1, 5), np.float32)))])
    one = w.numpy()[1].copy()
    opt.apply_gradients([(w, SparseGrad(np.array([2, 4]), np.ones((2, 5), np.float32)))])
    np.testing.assert_array_equal(w.numpy()[[0, 1, 3, 5]], [before[0], one, before[3], before[5]])
    assert fleet.stats()[0]["tables"][0]["count"] == 3


def test_reach() -> None:
    """What a zero gradient does to rows is found out from the rule itself."""
    every = (rules.AdamW(), rules.Adamax(), rules.Lamb(), rules.Ftrl())
    for expected, group in (
        ("touched", (rules.SGD(), rules.Adagrad(), rules.RowWiseAdagrad())),
        ("stored", (rules.Adam(), rules.Momentum(), rules.RMSProp(), rules.DGCMomentum(0.9, 2))),
        ("all", (*every, rules.Adam(epsilon=0.0))),
    ):
        assert {reach(rule) for rule in group} == {expected}


def test_distributed_rows_are_lazy() -> None:
    """A parameter with rows for any id updates the rows with a gradient only, decay or not."""
    w = Parameter("w", shape=(-1, 4), sparse=True, distributed=True)
    plain, decay, all_rows = DecaySpec(), DecaySpec(l2=0.1), Placement("sparse", every_row=True)
    assert placement_of(w, rules.Adam(), decay, False) == Placement("sparse")
    assert placement_of(w, rules.Adam(), plain, False, True) == all_rows
    bounded = Parameter("b", shape=(10, 4), sparse=True)
    assert placement_of(bounded, rules.Adam(), plain, False) == all_rows
    assert placement_of(bounded, rules.Adam(), decay, False) == Placement("dense")
    assert placement_of(bounded, rules.Adam(), plain, True) == Placement("sparse")
    wide = Parameter("wide", shape=(10, 4000), sparse=True)
    assert placement_of(wide, rules.SGD(), DecaySpec(), False) == Placement("dense")


def test_lookahead_of_rows_that_come_later() -> None:
    """The slow weights of rows that the first update did not name start where a dense array's do."""
    rng, first = np.random.default_rng(3), Parameter("w", shape=(6, 5), sparse=True)
    w, dense = Parameter("w", shape=(6, 5), sparse=True), Parameter("dense", first.numpy())
    by_rows, whole = (
        optimizer.LookAhead(optimizer.Adam(0.1, sparse_mode="full"), k=2) for _ in range(2)
    )
    for ids in ([0, 1], [2, 0], [3, 3], [4, 1], [1, 2], [0, 3]):
        rows = rng.normal(size=(2, 5)).astype(np.float32)
        by_rows.apply_gradients([(w, SparseGrad(np.array(ids), rows))])
        whole.apply_gradients([(dense, dense_of(np.array(ids), rows))])
        np.testing.assert_array_equal(w.numpy(), dense.numpy())


def test_lookahead_of_rows_that_have_gone(fleet: EmbeddedRuntime) -> None:
    """Slow weights of rows that a shrink has removed are left out; the others go on with theirs."""
    w = Parameter("w", shape=(-1, 5), sparse=True, distributed=True)
    opt = optimizer.LookAhead(optimizer.SGD(0.5), k=2)
    for number, ids in enumerate(([1, 2, 9], [1, 2], [1, 2], [1, 2])):
        rows = np.ones((len(ids), 5), np.float32)
        if number:
            fleet.shrink(0, None, 1)
        opt.apply_gradients([(w, SparseGrad(np.array(ids), rows))])
    state = opt.state_dict()
    assert state["w.slow_ids"].tolist() == [1, 2]
    np.testing.assert_array_equal(state["w.slow"], w.lookup(np.array([1, 2])))


def test_a_read_that_fails_leaves_the_parameter_bound() -> None:
    """A table that cannot be made, or an id that is out of range, raises its error again at the next read.
    Else that would return the parameter's first value in silence."""

    def refuse(parameter: Parameter) -> None:
        raise UsageError(f"there is no memory for {parameter.name}")

    parameter = Parameter("unbound", shape=(3, 1), sparse=True)
    parameter.binding = LazyBinding(refuse, early=True)
    for _ in range(2):
        with pytest.raises(UsageError, match="no memory for unbound"):
            parameter.lookup(np.array([1]))
        with pytest.raises(UsageError, match="no memory for unbound"):
            parameter.numpy()
    parameter.binding = lazy = LazyBinding(lambda parameter: None, early=True)
    with pytest.raises(IdError, match="id 3"):
        parameter.lookup(np.array([3]))
    assert parameter.binding is lazy
