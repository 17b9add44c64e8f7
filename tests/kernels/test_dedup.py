"""Dedup, expand and merge against dictionaries."""

import ast
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import psfleet
from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.core.engine.kernels.bags import RowBags, pool_parts, spread_parts
from psfleet.core.engine.kernels.dedup import ascending, dedup, first_repeat, merge_pushes
from psfleet.core.engine.kernels.id_routing import VIRTUAL_SHARDS, owned_by, routes, virtual_shards
from tests.trainings import in_threads

pytestmark = pytest.mark.quick

Floats = NDArray[np.float32]
IDS = st.lists(st.one_of(st.integers(-5, 20), st.sampled_from([-(2**63), 2**63 - 1])), max_size=400)


def summed(ids: list[int], gradients: Floats) -> dict[int, Floats]:
    """The twin: each id's gradients added in order of occurrence, keys in first-seen order."""
    sums: dict[int, Floats] = {}
    for id_, gradient in zip(ids, gradients, strict=True):
        sums[id_] = sums.get(id_, np.zeros_like(gradient)) + gradient
    return sums


def unaligned(values: NDArray[Any]) -> NDArray[Any]:
    return np.frombuffer(b"x" + values.tobytes(), values.dtype, offset=1).reshape(values.shape)


@settings(max_examples=60, deadline=None)
@given(ids=IDS, groups=st.sampled_from([1, 2, 3, 7, 1024]), seed=st.integers(0, 99))
def test_dedup_equals_dictionary(ids: list[int], groups: int, seed: int) -> None:
    """Ids come out once, first seen first, each at its group; sums and expansion are the twin's bits."""
    batch = np.array(ids, np.int64)
    gradients = np.random.default_rng(seed).standard_normal((len(ids), 3)).astype(np.float32)
    gradients[::2, 0] = -0.0
    expected = summed(ids, gradients)
    actual = dedup(unaligned(batch), groups)
    owner = dict(zip(ids, routes(groups)[virtual_shards(batch)].tolist(), strict=True))
    for group, unique in enumerate(actual.unique):
        assert unique.tolist() == [id_ for id_ in expected if owner[id_] == group]
        assert owned_by(unique, group, groups).all()
    sums = actual.merge(unaligned(gradients))
    for unique, rows in zip(actual.unique, sums, strict=True):
        for id_, row in zip(unique.tolist(), rows, strict=True):
            assert row.tobytes() == expected[id_].tobytes()
    expanded = actual.expand([unaligned(rows) for rows in sums])
    np.testing.assert_array_equal(
        expanded, np.array([expected[id_] for id_ in ids], np.float32).reshape(len(ids), 3)
    )


@pytest.mark.parametrize("ids", [[1, 2, 3], [1, 1, 3]])
def test_a_sum_of_one_gradient_has_the_bits_of_a_sum(ids: list[int]) -> None:
    """Minus zero becomes zero, whether or not the batch names an id twice."""
    gradients = np.array([[-0.0, 1], [np.nan, -0.0], [-0.0, np.inf]], np.float32)
    [sums] = dedup(np.array(ids), 1).merge(gradients)
    expected = np.array(list(summed(ids, gradients).values()))
    np.testing.assert_array_equal(np.signbit(sums), np.signbit(expected))
    np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize("dim", [1, 8, 16, 33, 300])
def test_widths(dim: int) -> None:
    """Every width gives the twin's bits, also for a batch of several blocks."""
    random = np.random.default_rng(dim)
    ids = random.integers(0, 500, 3000)
    gradients = random.standard_normal((3000, dim)).astype(np.float32)
    expected, actual = summed(ids.tolist(), gradients), dedup(ids, 4)
    sums = actual.merge(gradients)
    expanded = actual.expand(sums)
    for place in range(0, 3000, 97):
        np.testing.assert_array_equal(expanded[place], expected[int(ids[place])])


def test_merge_pushes() -> None:
    """Pushes are joined in list order, and the factor is applied to the sums."""
    first = (np.array([7, 2]), np.array([[1.5, 2], [3, 4]], np.float32))
    second = (np.array([9, 7, 2**62]), np.array([[1, 1], [2, 2], [8, 8]], np.float32))
    ids, rows = merge_pushes([first, second], 0.5)
    assert ids.tolist() == [7, 2, 9, 2**62]
    np.testing.assert_array_equal(rows, [[1.75, 2], [1.5, 2], [0.5, 0.5], [4, 4]])
    ids, rows = merge_pushes([first], 1)
    assert ids.tolist() == [7, 2]
    np.testing.assert_array_equal(rows, first[1])


def test_routes_are_even_and_ascending() -> None:
    """Every server gets its share of the virtual shards, in one run."""
    for groups in (1, 2, 3, 5, 1000, 1024):
        table = routes(groups)
        assert len(table) == VIRTUAL_SHARDS
        assert (np.diff(table.astype(int)) >= 0).all()
        assert np.ptp(np.bincount(table, minlength=groups)) <= 1


def test_refusals() -> None:
    """Wrong shapes and numbers of servers are refused by name."""
    with pytest.raises(UsageError, match="there are 0 servers"):
        dedup(np.arange(3), 0)
    actual = dedup(np.arange(3), 1)
    with pytest.raises(ShapeError, match=r"\(2, 4\)"):
        actual.merge(np.zeros((2, 4), np.float32))
    with pytest.raises(ShapeError, match=r"\(3, 4\), they must be \(3, 2\)"):
        actual.merge_into(np.zeros((3, 4), np.float32), [np.zeros((3, 2), np.float32)])
    with pytest.raises(ShapeError, match=r"\(2, 4\)"):
        actual.expand([np.zeros((2, 4), np.float32)])


def test_threads_do_not_share_buffers() -> None:
    """Batches that are numbered at the same time come out right."""
    random = np.random.default_rng(0)
    batches = [random.integers(0, 3000, 20000) for _ in range(4)]
    wrong: list[int] = []

    def work(place: int) -> None:
        for _ in range(20):
            actual = dedup(batches[place], 2)
            rows = [unique.astype(np.float32)[:, None] for unique in actual.unique]
            if not np.array_equal(actual.expand(rows)[:, 0], batches[place].astype(np.float32)):
                wrong.append(place)

    in_threads([partial(work, place) for place in range(4)])
    assert not wrong


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 20), max_size=200))
def test_first_repeat_equals_set(ids: list[int]) -> None:
    """The first id that has come before is found, wherever it is; distinct ids have none."""
    expected = next((place for place, id_ in enumerate(ids) if id_ in ids[:place]), None)
    assert first_repeat(np.array(ids, np.int64)) == expected


def test_kernels_get_addresses_of_arrays_that_stay() -> None:
    """`address_of` gets no array that a call has just made: it would be freed before the kernel runs."""
    for path in Path(psfleet.__file__).parent.rglob("*.py"):
        text = path.read_text()
        if "address_of(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "address_of":
                assert not isinstance(node.args[0], ast.Call), f"{path}:{node.lineno}"


@given(st.lists(IDS, max_size=4))
def test_ascending_equals_sorted_set(parts: list[list[int]]) -> None:
    """The distinct ids of all parts come in order, whatever their distance."""
    actual = ascending([np.array(ids, np.int64) for ids in parts])
    assert actual.tolist() == sorted({id_ for ids in parts for id_ in ids})


@pytest.mark.parametrize("dim", [5, 16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_pooling_and_merging_of_bags_have_the_bits_of_rows(
    dim: int, weighted: bool, mean: bool
) -> None:
    """Rows pooled where they arrive, and gradients merged by bags, have the bits of those that are spread out
    first: in parts whose ids repeat and others, of widths for registers or not, for several servers."""
    dice = np.random.default_rng(7)
    ids, parts = [], []
    for bags, most, size in ((50, 40, 40), (90, 4, 300), (20, 2, 9), (60, 40, 50)):
        lengths = dice.integers(0, most, bags)
        count = int(lengths.sum())
        weights = dice.standard_normal(count).astype(np.float32) if weighted else None
        parts.append(RowBags(lengths, weights, mean))
        ids.append(dice.integers(0, size, count))
    for groups in (1, 3):
        unique = dedup(np.concatenate(ids), groups)
        gradients = dice.standard_normal((220, dim)).astype(np.float32)
        gradients[::7] = -0.0
        spread = unique.merge(spread_parts(gradients, parts))
        rows = [array - np.float32(0.5) for array in spread]
        rows[0][::5] = -0.0
        for sums, own in zip(unique.merge(gradients, parts), spread, strict=True):
            assert sums.tobytes() == own.tobytes()
        pooled = pool_parts(unique.expand(rows), parts)
        assert unique.pool(rows, parts).tobytes() == pooled.tobytes()
