"""8-bit values: the bits of their NumPy twins, errors within a step, averages that are right."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet.core.engine.kernels.hashing import hash_ids
from psfleet.core.engine.kernels.number_formats import (
    decode_int8,
    encode_int8,
    encode_int8_drawn,
    encode_int8_fed,
)

pytestmark = pytest.mark.quick

Floats = NDArray[np.float32]


def values_of(seed: int, size: int) -> Floats:
    """Values of all magnitudes, zeros and equal ones among them."""
    dice = np.random.default_rng(seed)
    scales = np.float32(2.0) ** dice.integers(-130, 120, size).astype(np.float32)
    values = dice.standard_normal(size).astype(np.float32) * scales
    values[dice.random(size) < 0.1] = 0
    return values.astype(np.float32)


def blocks(values: Floats, block: int) -> Floats:
    """Rows of `block` values, the last one filled up with zeros."""
    padded = np.zeros(-(-len(values) // block) * block, np.float32)
    padded[: len(values)] = values
    return padded.reshape(-1, block)


def steps_of(rows: Floats) -> tuple[Floats, Floats]:
    """The twin of what all encoders begin with: scales, and values in steps, clamped."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        most = np.abs(rows).max(axis=1)
        counts = most >= np.float32(2.0**-100)
        scales = np.where(counts, most / np.float32(127), np.float32(0)).astype(np.float32)
        inverse = np.where(counts, np.float32(127) / most, np.float32(0)).astype(np.float32)
        steps = np.clip(rows * inverse[:, None], np.float32(-127), np.float32(127))
    return scales, steps.astype(np.float32)


def encoded(values: Floats, block: int) -> tuple[Floats, NDArray[np.int8]]:
    scales = np.empty(-(-len(values) // block), np.float32)
    codes = np.empty(len(values), np.int8)
    encode_int8(values, block, scales, codes)
    return scales, codes


def decoded(codes: NDArray[np.int8], scales: Floats, block: int) -> Floats:
    values = np.empty(len(codes), np.float32)
    decode_int8(codes, scales, block, values)
    return values


@pytest.mark.parametrize(("block", "size"), [(5, 5 * 300), (16, 16 * 200), (256, 1999), (256, 100)])
def test_the_nearest_steps_are_those_of_the_twin(block: int, size: int) -> None:
    """Scales, codes and what comes back have the twin's bits; errors are half a step at most."""
    values = values_of(block, size)
    scales, codes = encoded(values, block)
    expected, steps = steps_of(blocks(values, block))
    np.testing.assert_array_equal(scales, expected)
    np.testing.assert_array_equal(codes, np.rint(steps).astype(np.int8).reshape(-1)[:size])
    back = decoded(codes, scales, block)
    each = np.repeat(scales, block)[:size]
    np.testing.assert_array_equal(back, codes.astype(np.float32) * each)
    assert (np.abs(back - values) <= np.maximum(each * np.float32(0.5001), 2.0**-100)).all()


def test_no_values_are_no_blocks() -> None:
    """An empty part of an array has neither scales nor codes."""
    scales, codes = encoded(np.empty(0, np.float32), 256)
    assert decoded(codes, scales, 256).size == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_shows(bad: float) -> None:
    """A block with an infinity or NaN comes back as NaN, its neighbours as they are."""
    values = np.ones(12, np.float32)
    values[5] = bad
    scales, codes = encoded(values, 4)
    back = decoded(codes, scales, 4)
    assert np.isnan(back[4:8]).all()
    assert (back[:4] == 1).all()
    assert (back[8:] == 1).all()


def test_the_rest_is_what_did_not_travel() -> None:
    """With feedback: the twin's bits, and all that was given has arrived or is in the rest."""
    size, block = 1000, 256
    rests = np.zeros(size, np.float32)
    twin = np.zeros(size, np.float32)
    scales, codes = np.empty(4, np.float32), np.empty(size, np.int8)
    given, arrived = np.zeros(size), np.zeros(size)
    for step in range(20):
        values = np.random.default_rng(step).standard_normal(size).astype(np.float32)
        encode_int8_fed(values, rests, block, scales, codes)
        twin += values
        expected, steps = steps_of(blocks(twin, block))
        rounded = np.rint(steps)
        np.testing.assert_array_equal(scales, expected)
        np.testing.assert_array_equal(codes, rounded.astype(np.int8).reshape(-1)[:size])
        twin -= (rounded * expected[:, None]).reshape(-1)[:size]
        np.testing.assert_array_equal(rests, twin)
        given += values
        arrived += decoded(codes, scales, block)
    np.testing.assert_allclose(arrived + rests, given, rtol=0, atol=1e-5)


def test_a_sum_beyond_float32_leaves_no_infinity() -> None:
    """A gradient and the rest of the one before may exceed float32 together: the largest number travels, and
    later values are right again."""
    largest = float(np.finfo(np.float32).max)
    first = np.array([largest, largest * (126.4 / 127), 1.0, 0.0], np.float32)
    rests, scales, codes = np.zeros(4, np.float32), np.empty(1, np.float32), np.empty(4, np.int8)
    encode_int8_fed(first, rests, 4, scales, codes)
    assert rests[1] > 1e36
    assert np.isfinite(decoded(codes, scales, 4)).all()
    for sign in (1, -1):
        encode_int8_fed(np.full(4, sign * largest, np.float32), rests, 4, scales, codes)
        assert np.isfinite(rests).all()
        back = decoded(codes, scales, 4)
        np.testing.assert_allclose(back, sign * largest, rtol=0.01)
    for _ in range(2):
        encode_int8_fed(-rests, rests, 4, scales, codes)
    assert not rests.any()


def drawn(rows: Floats, ids: Any, salt: int) -> tuple[Floats, NDArray[np.int8]]:
    scales, codes = np.empty(len(rows), np.float32), np.empty(rows.size, np.int8)
    assert encode_int8_drawn(rows, ids, np.uint64(salt), scales, codes) is None
    return scales, codes


def parts_of(ids: NDArray[np.int64], salt: int, dim: int) -> Floats:
    """The twin of the draws: a number in [0, 1) for each place of each row."""
    base = hash_ids((ids.view(np.uint64) ^ np.uint64(salt)).view(np.int64)).astype(np.uint32)
    x = base[:, None] + np.arange(dim, dtype=np.uint32) * np.uint32(0x9E3779B9)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    x = x ^ (x >> np.uint32(16))
    parts: Floats = (x >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
    return parts


@pytest.mark.parametrize("dim", [5, 16, 33])
def test_draws_are_those_of_the_twin(dim: int) -> None:
    """Codes have the twin's bits, whatever other rows there are; errors are less than a step."""
    ids = np.random.default_rng(dim).integers(-(2**63), 2**63 - 1, 300)
    rows = values_of(dim, 300 * dim).reshape(300, dim)
    scales, codes = drawn(rows, ids, 77)
    expected, steps = steps_of(rows)
    np.testing.assert_array_equal(scales, expected)
    floors = np.floor(steps + parts_of(ids, 77, dim))
    np.testing.assert_array_equal(codes.reshape(300, dim), floors.astype(np.int8))
    _, some = drawn(rows[100:200].copy(), ids[100:200], 77)
    np.testing.assert_array_equal(some, codes[100 * dim : 200 * dim])
    back = decoded(codes, scales, dim).reshape(300, dim)
    assert (np.abs(back - rows) <= np.maximum(scales[:, None] * 1.0001, 2.0**-100)).all()


def test_draws_are_right_on_average() -> None:
    """The mean of 4,000 pushes of a row is the row, to a fiftieth of a step."""
    row = np.array([[1.0, 0.3, -0.0501, 0.007, -0.7313]], np.float32)
    total = np.zeros(5)
    for salt in range(4000):
        scales, codes = drawn(row, np.array([9]), salt)
        total += decoded(codes, scales, 5)
    assert np.abs(total / 4000 - row[0]).max() < scales[0] / 50


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_row_that_cannot_travel_is_named(bad: float) -> None:
    """An infinity or NaN is found, and which row has it."""
    rows = np.ones((4, 5), np.float32)
    rows[2, 4] = bad
    scales, codes = np.empty(4, np.float32), np.empty(20, np.int8)
    assert encode_int8_drawn(rows, np.arange(4), np.uint64(0), scales, codes) == 2
