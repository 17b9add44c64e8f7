"""16-bit floats: the bits of NumPy's float16, and of bfloat16 by its definition."""

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet.core.engine.kernels.number_formats import Half, decode, encode, overflows, rounded

pytestmark = pytest.mark.quick

Bits = NDArray[np.uint32]
HALVES: tuple[Half, ...] = ("bfloat16", "float16")


def patterns() -> Bits:
    """Random float32 patterns, and the neighbourhood of every border: subnormals, ties, overflow."""
    rng = np.random.default_rng(3)
    every = np.arange(1 << 16, dtype=np.uint16)
    halves = every.view(np.float16).astype(np.float32).view(np.uint32)
    tops = every.astype(np.uint32) << np.uint32(16)
    borders = [
        group + np.uint32(step)
        for group in (halves, tops)
        for step in (0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001)
    ]
    return np.concatenate([rng.integers(0, 1 << 32, 200_000, np.uint32), *borders])


def test_float16_is_numpys() -> None:
    """Every pattern but NaN has the bits of NumPy's cast; NaN stays NaN."""
    values = patterns().view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(np.float16)
    actual = encode(values, "float16").view(np.float16)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(
        actual[numbers].view(np.uint16), expected[numbers].view(np.uint16)
    )
    assert np.isnan(actual[~numbers]).all()


def test_bfloat16_is_the_nearest() -> None:
    """The upper 16 bits, plus one where the lower are above half, or half and the upper odd."""
    bits = patterns()
    values = bits.view(np.float32)
    upper, lower = bits >> 16, bits & 0xFFFF
    expected = upper + ((lower > 0x8000) | ((lower == 0x8000) & (upper & 1 == 1)))
    actual = encode(values, "bfloat16")
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(actual[numbers], expected[numbers].astype(np.uint16))
    assert np.isnan(decode(actual[~numbers], "bfloat16")).all()


@pytest.mark.parametrize("half", HALVES)
def test_every_pattern_comes_back(half: Half) -> None:
    """Decoding and encoding again gives the same bits, in any shape."""
    every = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    values = decode(every, half)
    kept = ~np.isnan(values)
    np.testing.assert_array_equal(encode(values, half)[kept], every[kept])


def test_a_scale_saves_small_values() -> None:
    """2^-30 is nothing in float16; scaled by 2^15 it comes back whole. An array of none stays one."""
    values = np.full((2, 3), 2.0**-30, np.float32)
    assert not rounded(values, "float16").any()
    np.testing.assert_array_equal(rounded(values, "float16", 2.0**15), values)
    assert rounded(values[:0], "float16").shape == (0, 3)


def test_overflow_is_seen_before_it_happens() -> None:
    """Exactly where float16 gets an infinity or NaN, and nowhere else."""
    for value in (0.0, 32759.0, 65519.0, 65520.0, -65520.0, 3e38, np.inf, -np.inf, np.nan):
        for scale in (1.0, 2.0, 0.5):
            values = np.array([1.0, value], np.float32)
            with np.errstate(over="ignore"):
                arrived = rounded(values, "float16", scale)
            assert overflows(values, scale) == (not np.isfinite(arrived).all()), (value, scale)
    assert not overflows(np.zeros(0, np.float32), 1.0)
