"""LookAhead over tables from which rows go."""

from collections.abc import Callable

import numpy as np
import pytest

from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.engine.runtime_interface import Runtime
from psfleet.core.engine.schema import entry
from psfleet.core.engine.schema.table import InitializerSpec
from psfleet.core.graph.parameters.binding import tables
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import using
from psfleet.optimizer import SGD, LookAhead, Optimizer

pytestmark = pytest.mark.quick

ZERO = InitializerSpec("constant", 0.0)


def parameter(evicting: entry.Entry | None) -> Parameter:
    """One with rows for any id."""
    return Parameter(
        "w", shape=(1, 1), sparse=True, distributed=True, initializer=ZERO, entry=evicting
    )


def pushed(optimizer: Optimizer, row: Parameter, ids: list[int]) -> None:
    """Push a gradient of -1 for each id."""
    gradient = SparseGrad(np.array(ids), np.full((len(ids), 1), -1, np.float32))
    optimizer.apply_gradients([(row, gradient)])


def rows_of(runtime: Runtime) -> dict[int, float]:
    """The weight of each row there is."""
    state = runtime.read_table(next(iter(runtime.specs())))
    assert state.ids is not None
    return dict(zip(state.ids.tolist(), state.values[0][:, 0].tolist(), strict=True))


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(
    "evicting",
    [
        entry.TTLEntry(steps=4),
        entry.CapacityEntry(rows=4),
        entry.CapacityEntry(rows=4, policy="lfu"),
    ],
    ids=str,
)
def test_rows_go_as_without_it(evicting: entry.Entry, k: int) -> None:
    """A look makes no row recent: the same rows stay as under the inner optimizer alone."""
    left = []
    for make in (SGD, lambda rate: LookAhead(SGD(rate), k=k)):
        with using(EmbeddedRuntime()) as process:
            row = parameter(evicting)
            optimizer = make(1.0)
            for number in range(40):
                pushed(optimizer, row, [number, number // 8])
            left.append(rows_of(process.active()).keys())
    assert left[0] == left[1]
    assert len(left[0]) < 10


def _expire(optimizer: Optimizer, row: Parameter) -> None:
    for _ in range(3):
        pushed(optimizer, row, [1])


def _shrink(optimizer: Optimizer, row: Parameter) -> None:
    runtime = tables().runtime
    runtime.shrink()
    pushed(optimizer, row, [1])
    runtime.shrink(unseen=1)


@pytest.mark.parametrize("gone", [_expire, _shrink])
def test_a_row_that_comes_back_is_new(gone: Callable[[Optimizer, Parameter], None]) -> None:
    """A row that went after a look and has come back before the next one begins with its first value; one
    that stayed goes on from its slow weight."""
    evicting = entry.TTLEntry(steps=2) if gone is _expire else None
    with using(EmbeddedRuntime()) as process:
        row = parameter(evicting)
        optimizer = LookAhead(SGD(1.0), alpha=0.5, k=8)
        for _ in range(8):
            pushed(optimizer, row, [0, 1])
        # Slow is 1 after the first update; fast is 8.
        assert rows_of(process.active()) == {0: 4.5, 1: 4.5}
        gone(optimizer, row)
        assert 0 not in rows_of(process.active())
        while optimizer._updates < 15:
            pushed(optimizer, row, [1])
        pushed(optimizer, row, [0, 1])
        assert rows_of(process.active()) == {0: 0.5, 1: 8.5}
