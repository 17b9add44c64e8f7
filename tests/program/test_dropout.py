"""Dropout masks are pure functions of (seed, name, step)."""

from typing import Any

import numpy as np

import psfleet as ps
from psfleet import layers
from psfleet.program.ops.activation import keep_mask
from psfleet.program.variable import to_variable

ONES = {"x": np.ones((64, 64), np.float32)}


def test_a_mask_is_the_same_for_the_same_key() -> None:
    """And another for another seed, name or step; its share of zeros is as asked for."""
    mask = keep_mask((1000, 101), 0.3, 1, "drop", 0)
    np.testing.assert_array_equal(mask, keep_mask((1000, 101), 0.3, 1, "drop", 0))
    for other in [(2, "drop", 0), (1, "drip", 0), (1, "drop", 1)]:
        assert (mask != keep_mask((1000, 101), 0.3, *other)).mean() > 0.3
    assert abs(mask.mean() - 0.7) < 0.005
    assert keep_mask((9, 9), 0.0, 0, "", 0).all()
    assert not keep_mask((9, 9), 1.0, 0, "", 0).any()


def test_a_mask_never_changes_between_versions() -> None:
    """The first bits of one mask, written down."""
    actual = keep_mask((16,), 0.5, 7, "dropout_0", 3).astype(int).tolist()
    assert actual == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 1]


def test_steps_differ_and_runs_of_one_script_agree() -> None:
    """Each training run has a mask of its own; a second process would see the same ones."""

    def masks(seed: int) -> list[Any]:
        x = layers.data(f"x{seed}", [None, 64])
        ps.default_main_program().random_seed = seed
        out = layers.dropout(x, 0.5, name=f"d{seed}", seed=4)
        exe = ps.Executor()
        ps.default_main_program().step = 0
        return [exe.run(feed={x.name: ONES["x"]}, fetch_list=[out])[0] for _ in range(2)]

    first, second = masks(1)
    assert not np.array_equal(first, second)
    assert set(np.unique(first)) == {0, 1}


def test_eager_masks_are_those_of_the_program() -> None:
    """A named dropout in an eager loop steps with each backward pass."""
    x = layers.data("x", [None, 64])
    out = layers.dropout(x, 0.5, name="drop")
    exe = ps.Executor()
    static = [exe.run(feed=ONES, fetch_list=[out])[0] for _ in range(2)]
    ps.default_main_program().step = 0
    for expected in static:
        eager = layers.dropout(to_variable(ONES["x"], stop_gradient=False), 0.5, name="drop")
        layers.mean(eager).backward()
        np.testing.assert_array_equal(eager.numpy(), expected)


def test_tests_drop_nothing() -> None:
    """downgrade_in_infer scales in tests, upscale_in_train in training."""
    x = layers.data("x", [None, 64])
    down = layers.dropout(x, 0.25)
    up = layers.dropout(x, 0.25, dropout_implementation="upscale_in_train")
    exe, program = ps.Executor(), ps.default_main_program()
    trained = exe.run(feed=ONES, fetch_list=[down, up])
    assert set(np.unique(trained[0])) == {0, 1}
    np.testing.assert_allclose(np.unique(trained[1]), [0, 4 / 3], rtol=1e-6)
    tested = exe.run(program.clone(for_test=True), feed=ONES, fetch_list=[down, up])
    assert [np.unique(value).tolist() for value in tested] == [[0.75], [1.0]]
