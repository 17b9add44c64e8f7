"""fleet.dataset in one process, and the plans by which a fleet deals samples."""

import numpy as np
import pytest

from psfleet.core.base.errors import UsageError
from psfleet.core.runtime.process_runtime import current
from psfleet.fleet import Fleet


@pytest.fixture
def fleet() -> Fleet:
    """Of this process alone."""
    current().use(None)
    return Fleet()


def test_alone_all_batches_come_in_order(fleet: Fleet) -> None:
    """Indices, rows of an array or elements of a list; an epoch's last batch is shorter."""
    assert [b.tolist() for b in fleet.dataset(5, 2, 2)] == [[0, 1], [2, 3], [4]] * 2
    rows = np.arange(10).reshape(5, 2)
    assert np.concatenate([*fleet.dataset(rows, 3)]).tolist() == rows.tolist()
    assert [*fleet.dataset(["a", "b", "c"], 2)] == [["a", "b"], ["c"]]


def test_each_epoch_has_an_order_of_its_own(fleet: Fleet) -> None:
    """The order follows from the seed; every epoch has every sample once."""
    first, again, other = (
        np.concatenate([*fleet.dataset(50, 7, 2, shuffle_seed=seed)]) for seed in (3, 3, 4)
    )
    assert first.tolist() == again.tolist() != other.tolist()
    assert first[:50].tolist() != first[50:].tolist()
    assert sorted(first[:50]) == sorted(first[50:]) == [*range(50)]


def test_nonsense_is_refused(fleet: Fleet) -> None:
    """Sizes below one, and what is no whole number, before the first batch."""
    for source, batch, epochs in ((0, 1, 1), (5, 0, 1), (5, 2, 0), ([], 2, 1), (5, True, 1)):
        with pytest.raises(UsageError, match="it must be a whole number above 0"):
            fleet.dataset(source, batch, epochs)
    with pytest.raises(UsageError, match=r"dataset: batch_size is 2.5, it must be a whole number"):
        fleet.dataset(5, 2.5)  # type: ignore[arg-type]


def test_whole_numbers_of_numpy(fleet: Fleet) -> None:
    """What NumPy has counted is a number of samples too."""
    five, two, seven = (np.int64(number) for number in (5, 2, 7))
    batches = fleet.dataset(five, two, two, shuffle_seed=seven)  # type: ignore[arg-type]
    assert len(batches) == 6  # type: ignore[arg-type]
    expected = fleet.dataset(5, 2, 2, shuffle_seed=7)
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in expected]
