"""Copies past the caches: the same bytes as np.copyto, and none beside them."""

import numpy as np
import pytest

from psfleet.core.engine.kernels.initial_values import STREAM_FROM, copy_over

pytestmark = pytest.mark.quick

EDGE = STREAM_FROM // 4


@pytest.mark.parametrize(
    "count", [0, 1, EDGE - 1, EDGE, EDGE + 1, EDGE + 15, EDGE + 16, EDGE + 333]
)
@pytest.mark.parametrize(("before", "shift"), [(0, 0), (1, 0), (15, 3), (7, 9)])
def test_it_copies(count: int, before: int, shift: int) -> None:
    """Arrays of any length and any place arrive whole; what lies around them stays as it was."""
    rng = np.random.default_rng(count + before)
    around = np.full(count + 40, 7, np.float32)
    source = rng.standard_normal(count + 20, np.float32)[shift : shift + count]
    copy_over(around[before : before + count], source)
    np.testing.assert_array_equal(around[before : before + count], source)
    assert (around[:before] == 7).all()
    assert (around[before + count :] == 7).all()


def test_a_place_off_the_words() -> None:
    """An array that begins between two words, as in a message, is copied too."""
    place = np.zeros(4 * EDGE + 200, np.uint8)
    for offset in (1, 2, 3, 61):
        out = place[offset : offset + 4 * EDGE].view(np.float32)
        values = np.arange(EDGE, dtype=np.float32) + offset
        copy_over(out, values)
        np.testing.assert_array_equal(out, values)


def test_values_in_strides() -> None:
    """A source that is not contiguous, and one of several axes."""
    values = np.arange(2 * EDGE, dtype=np.float32)[::2]
    out = np.zeros((4, EDGE // 4), np.float32)
    copy_over(out, values.reshape(4, -1))
    np.testing.assert_array_equal(out.reshape(-1), values)
