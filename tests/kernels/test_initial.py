"""First values against their NumPy twin."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from psfleet.core.engine.kernels.hashing import GOLDEN, hash_ids
from psfleet.core.engine.kernels.initial_values import initial_array, initial_rows
from psfleet.core.engine.schema.table import InitializerSpec, key_of

pytestmark = pytest.mark.quick

MASK = 2**64 - 1


def mix(x: int) -> int:
    return int(hash_ids(np.array([x], np.uint64).view(np.int64))[0])


def twin(
    id_: int, dim: int, initializer: InitializerSpec, seed: int, name: str
) -> NDArray[np.float32]:
    """A row by the description of the generator, one value after the other."""
    state = mix(mix(id_ & MASK) ^ (seed * GOLDEN + key_of(name)) & MASK)
    row = np.empty(dim, np.float32)
    low, high = initializer.low, initializer.high
    for k in range(dim):
        bits = mix(state + (k + 1) * GOLDEN & MASK)
        if initializer.kind == "constant":
            row[k] = low
        elif initializer.kind == "uniform":
            unit = np.float32(bits >> 40) * np.float32(2.0**-24)
            row[k] = np.float32(low) + unit * np.float32(high - low)
        else:
            while initializer.kind == "truncated" and abs(normal(bits)) > 2:
                bits = mix((bits + GOLDEN) & MASK)
            row[k] = low + high * normal(bits)
    return row


def normal(bits: int) -> float:
    radius = math.sqrt(-2 * math.log(((bits >> 32) + 1) * 2.0**-32))
    return radius * math.cos(2 * math.pi * ((bits & 0xFFFFFFFF) * 2.0**-32))


@settings(max_examples=40, deadline=None)
@given(
    ids=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
    dim=st.integers(1, 40),
    kind=st.sampled_from(["uniform", "normal", "truncated", "constant"]),
    seed=st.integers(0, 2**63 - 1),
)
def test_rows_equal_twin(ids: list[int], dim: int, kind: str, seed: int) -> None:
    """Every kind gives the twin's bits, for the whole range of ids."""
    initializer = InitializerSpec(kind, -0.5, 1.25)  # type: ignore[arg-type]
    rows = initial_rows(np.array(ids, np.int64), dim, initializer, seed, "t")
    for id_, row in zip(ids, rows, strict=True):
        np.testing.assert_array_equal(row, twin(id_, dim, initializer, seed, "t"))


def test_array_is_the_row_of_id_zero() -> None:
    """A dense array's first values are one long row, in the array's shape."""
    array = initial_array((3, 4, 5), InitializerSpec(), 7, "w")
    assert array.shape == (3, 4, 5)
    row = initial_rows(np.zeros(1, np.int64), 60, InitializerSpec(), 7, "w")
    np.testing.assert_array_equal(array.reshape(-1), row[0])


def test_distributions() -> None:
    """Uniform values fill their range evenly; normal ones have the mean and deviation asked for."""
    uniform = initial_array((200_000,), InitializerSpec("uniform", -1, 3), 0, "u")
    assert -1 <= uniform.min() < -0.999
    assert 2.999 < uniform.max() <= 3
    assert abs(float(uniform.mean()) - 1) < 0.02
    values = initial_array((200_000,), InitializerSpec("normal", 2, 0.5), 0, "n")
    assert abs(float(values.mean()) - 2) < 0.005
    assert abs(float(values.std()) - 0.5) < 0.005
    values = initial_array((200_000,), InitializerSpec("truncated", 2, 0.5), 0, "n")
    assert 1 <= values.min() < 1.001
    assert 2.999 < values.max() <= 3
    assert abs(float(values.mean()) - 2) < 0.005
    assert abs(float(values.std()) - 0.5 * 0.8796) < 0.005  # of the normal cut at two deviations


def test_values_depend_on_everything() -> None:
    """Another seed, name or id gives another row."""
    rows = [
        initial_rows(np.array([id_]), 4, InitializerSpec(), seed, name)[0].tobytes()
        for id_ in (0, 1, -1)
        for seed in (0, 1)
        for name in ("a", "b")
    ]
    assert len(set(rows)) == 12
