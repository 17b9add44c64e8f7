"""Plain tables take the optimizers whose rule is all there is to them, and refuse the others."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet import fluid, optimizer
from psfleet.client import Client
from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.errors import PsfleetError

SGD = optimizer.SGD(0.1)
CLIP = optimizer.ClipGradByNorm(1.0)


@pytest.fixture
def client() -> Iterator[Client]:
    """On an embedded fleet."""
    with Client(EmbeddedRuntime()) as found:
        yield found


REFUSED: dict[str, Callable[[Client], Any]] = {
    "there is no table 't', and without an optimizer": lambda ps: ps.sparse_table("t", 2, None),
    "optimizer of table 't' is 'sgd'": lambda ps: ps.dense_table("t", [1.0], "sgd"),  # type: ignore[arg-type]
    "is LookAhead, which works on the worker": lambda ps: ps.sparse_table(
        "t", 2, optimizer.LookAhead(optimizer.SGD(0.1))
    ),
    "is DGCMomentum, which works on the worker": lambda ps: ps.dense_table(
        "t", [1.0], optimizer.DGCMomentum(0.1, 0.9, 0)
    ),
    "the SGD of table 't' has a grad_clip": lambda ps: ps.sparse_table(
        "t", 2, optimizer.SGD(0.1, grad_clip=CLIP)
    ),
    "counts updates, which a plain table does not have": lambda ps: ps.sparse_table(
        "t", 2, optimizer.SGD(fluid.layers.noam_decay(64, 10))
    ),
    "dim is '2', it must be a whole number": lambda ps: ps.sparse_table("t", "2", SGD),  # type: ignore[arg-type]
    "a table's name is 3": lambda ps: ps.sparse_table(3, 2, optimizer.SGD(0.1)),  # type: ignore[arg-type]
    "the value of table 't' is 'x'": lambda ps: ps.dense_table("t", "x", optimizer.SGD(0.1)),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused(client: Client, sentence: str) -> None:
    """With one sentence, before a table is made."""
    with pytest.raises(PsfleetError, match=sentence):
        REFUSED[sentence](client)
    assert not client.runtime.specs()


def test_schedules_that_the_script_steps(client: Client) -> None:
    """A schedule that the script steps decides the rate of the next push."""
    rate = psfleet.optimizer.lr.StepDecay(1.0, 1, 0.5)
    table = client.sparse_table("t", 1, optimizer.SGD(rate))
    moved = []
    for _ in range(3):
        before = table.pull([7])
        table.push([7], [[1.0]]).wait()
        moved.append(float((before - table.pull([7])).item()))
        rate.step()
    np.testing.assert_allclose(moved, [1, 0.5, 0.25], atol=1e-6)
