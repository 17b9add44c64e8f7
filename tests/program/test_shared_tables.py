"""One table that a program looks up in several places, by different ids."""

from typing import Any

import numpy as np
import pytest

from psfleet import layers, optimizer
from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.execution.executor import Executor
from psfleet.program import names
from psfleet.program.program import Program, program_guard
from psfleet.runtime.process_runtime import current

KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "sparse": {"is_sparse": True},
    "distributed": {"is_distributed": True},
}


def trained(kind: str, places: int) -> tuple[list[float], np.ndarray]:
    """The losses of three steps of SGD and the table's rows after them."""
    fresh = EmbeddedRuntime()
    before, startup = current().use(fresh), Program()
    with names.guard(), program_guard(Program(), startup):
        fields = [layers.data(f"ids_{i}", [None, 2], dtype="int64") for i in range(places)]
        rows = [layers.embedding(ids, [20, 4], name="shared", **KINDS[kind]) for ids in fields]
        loss = layers.mean(layers.square(layers.sums(rows) - 1.0))
        optimizer.SGD(0.5).minimize(loss)
        dice, losses = np.random.default_rng(places), []
        for _ in range(3):
            feed = {f"ids_{i}": dice.integers(0, 20, (4, 2)) for i in range(places)}
            losses += Executor().run(feed=feed, fetch_list=[loss])
        found = startup.parameters["shared.w_0"].lookup(np.arange(20))
    current().use(before)
    fresh.close()
    return [float(loss) for loss in losses], found


@pytest.mark.parametrize("places", [1, 2, 10])
@pytest.mark.parametrize("kind", ["sparse", "distributed"])
def test_places(kind: str, places: int) -> None:
    """However many places look it up, a table by rows trains as a dense one.

    To rounding: a dense gradient is summed in each place and then over the places.
    """
    losses, rows = trained(kind, places)
    expected_losses, expected = trained("dense", places)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-6)
    assert (
        np.abs(expected).max() > 0.05
    )  # it has moved from the first values, which are within 0.01
