"""Plain tables of `psfleet.connect()`: what a push may look like, and what is refused in one sentence."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet.client import Client
from psfleet.entry import ShowClickEntry
from psfleet.errors import ConfigError, IdError, ShapeError, TableConflict, UsageError, WrongType
from psfleet.optimizer import SGD, Adam
from psfleet.testing.local_fleet import LocalFleet

ONES = np.ones((2, 4), np.float32)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Tables of a fleet of two servers."""
    with (
        LocalFleet(2, 1, in_process=True) as fleet,
        psfleet.connect(fleet.environment(0)) as client,
    ):
        _rows(client).push([1, 2], ONES).wait(60)  # its thread is there from now on
        yield client


def test_gradients_in_the_shape_that_rows_come_in(client: Client) -> None:
    """What `pull` gives for ids of two axes, `push` takes; repeated ids are summed."""
    table = client.sparse_table("two axes", dim=4, optimizer=SGD(1.0))
    ids = np.array([[1, 2], [3, 1]])
    before = table.pull(ids)
    table.push(ids, np.ones_like(before)).wait(60)
    np.testing.assert_allclose((before - table.pull(ids))[..., 0], [[2, 1], [1, 2]], rtol=1e-6)


def test_shows_of_ids_with_two_axes(client: Client) -> None:
    """A show for each sample counts for all of its ids, one for each id counts alone."""
    entry = ShowClickEntry("show", "click")
    table = client.sparse_table("shown", dim=4, optimizer=SGD(1.0), entry=entry)
    ids = np.array([[1, 2], [3, 4]])
    table.push(ids, table.pull(ids), shows=[[1], [5]], clicks=np.zeros((2, 2))).wait(60)
    state = client.runtime.read_table(table.spec.key)
    assert state.ids is not None
    assert state.scores is not None
    assert dict(zip(state.ids.tolist(), state.scores[:, 0].tolist(), strict=True)) == {
        1: 1,
        2: 1,
        3: 5,
        4: 5,
    }
    with pytest.raises(
        ShapeError, match=r"the shows for table 'shown' are \(3,\), the ids \(2, 2\)"
    ):
        table.push(ids, table.pull(ids), shows=[1, 2, 3])


WRONG: dict[str, tuple[type[UsageError], str, Callable[[Any], object]]] = {
    "ragged ids": (IdError, "ids cannot be read", lambda c: _rows(c).pull([[1], [2, 3]])),
    "ids of text": (IdError, "hash them", lambda c: _rows(c).pull(["a"])),
    "text": (ShapeError, "'rows'", lambda c: _rows(c).push([1], [["a"] * 4])),
    "ragged": (ShapeError, "'rows'", lambda c: _rows(c).push([1, 2], [[1] * 4, [2] * 3])),
    "complex": (ShapeError, "complex", lambda c: _rows(c).push([1, 2], 1j * ONES)),
    "flat": (ShapeError, r"\(2, 4\) for ids \(1, 2\)", lambda c: _rows(c).push([[1, 2]], ONES)),
    "dense text": (ShapeError, "'dense' is 'x'", lambda c: _dense(c).push("x")),
    "dim": (WrongType, "dim is True", lambda c: c.sparse_table("flag", True, SGD(1.0))),
    "entry": (ConfigError, "entry is 5", lambda c: c.sparse_table("e", 4, SGD(1.0), entry=5)),
}


def _rows(client: Any) -> Any:
    return client.sparse_table("rows", dim=4, optimizer=SGD(1.0))


def _dense(client: Any) -> Any:
    return client.dense_table("dense", np.zeros((2, 3)), optimizer=SGD(1.0))


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_meant_is_refused(client: Client, case: str) -> None:
    """One sentence that names the table and quotes the value; the next push works."""
    error, words, use = WRONG[case]
    with pytest.raises(error, match=words):
        use(client)
    _rows(client).push([1, 2], ONES).wait(60)


def test_another_definition_says_what_differs(client: Client) -> None:
    """Two workers that declare a table differently hear in what, and of what is alike nothing."""
    with pytest.raises(
        TableConflict, match=r"'rows' exists .*: its shape is \(4,\), not \(5,\); dec"
    ):
        client.sparse_table("rows", dim=5, optimizer=SGD(1.0))
    with pytest.raises(TableConflict, match=r"definition: its rule is SGD\(\), not Adam\("):
        client.sparse_table("rows", dim=4, optimizer=Adam(1.0))
