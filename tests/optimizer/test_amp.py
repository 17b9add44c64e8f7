"""The strategy part amp: what is rounded, scaled and skipped."""

from typing import Any

import numpy as np
import pytest

from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.engine.kernels.number_formats import rounded
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.runtime.strategy import Settings
from psfleet.optimizer import SGD, Adam, LookAhead
from psfleet.optimizer.distributed import DistributedOptimizer

pytestmark = pytest.mark.quick


def distributed(inner: Any, **parts: dict[str, Any]) -> DistributedOptimizer:
    return DistributedOptimizer(inner, Settings.from_parts(parts))


def rows_of(values: Any, ids: Any) -> SparseGrad:
    return SparseGrad(np.array(ids), np.array(values, np.float32))


@pytest.mark.parametrize(("half", "scale"), [("bfloat16", 1.0), ("float16", 32768.0)])
def test_gradients_arrive_rounded(half: Any, scale: float) -> None:
    """Dense gradients and rows have the bits that 16 bits leave of them."""
    grad = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32) * np.float32(0.01)
    w, rows = Parameter("w", np.zeros((4, 5))), Parameter("rows", np.zeros((4, 5)), sparse=True)
    distributed(SGD(1.0), amp={"dtype": half}).apply_gradients(
        [(w, grad), (rows, SparseGrad(np.arange(4), grad))]
    )
    expected = -rounded(grad, half, scale)
    assert not np.array_equal(-expected, grad)
    np.testing.assert_array_equal(w.numpy(), expected)
    np.testing.assert_array_equal(rows.numpy(), expected)


def test_scaling_saves_what_float16_would_lose() -> None:
    """A gradient of 2^-30 is nothing in float16; scaled on its way it arrives whole."""
    tiny = np.full(3, 2.0**-30, np.float32)
    for scale, expected in ((1.0, 0.0), (32768.0, -(2.0**-30))):
        w = Parameter(f"w{scale}", np.zeros(3))
        distributed(SGD(1.0), amp={"dtype": "float16", "init_loss_scaling": scale}).apply_gradients(
            [(w, tiny)]
        )
        assert w.numpy().tolist() == [expected] * 3


@pytest.mark.parametrize("bad", [np.inf, np.nan, 3.0])
def test_a_step_that_does_not_fit_is_skipped(bad: float) -> None:
    """Nothing changes, not even Adam's count of steps; the scale falls, and the next step counts."""
    w, rows = Parameter("w", np.ones(2)), Parameter("rows", np.ones((3, 5)), sparse=True)
    amp = {"dtype": "float16", "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5}
    made = distributed(Adam(0.1, lazy_mode=True), amp=amp)
    fine = [(w, np.full(2, 0.5, np.float32)), (rows, rows_of([[0.5] * 5], [1]))]
    made.apply_gradients(fine)
    before = (w.numpy().copy(), rows.numpy().copy())
    made.apply_gradients([(w, np.array([0.5, bad])), (rows, rows_of([[0.5] * 5], [1]))])
    np.testing.assert_array_equal(w.numpy(), before[0])
    np.testing.assert_array_equal(rows.numpy(), before[1])
    assert made.state_dict()["w.step"] == 1
    assert made.scaler.scale == 16384
    made.apply_gradients(fine)
    assert made.state_dict()["w.step"] == 2


def test_the_sum_of_repeated_rows_has_to_fit() -> None:
    """1.5 fits times 32,768, twice 1.5 does not: the step is skipped."""
    rows = Parameter("rows", np.zeros((3, 1)), sparse=True)
    made = distributed(SGD(1.0), amp={"dtype": "float16"})
    made.apply_gradients([(rows, rows_of([[1.5], [1.5]], [1, 1]))])
    assert not rows.numpy().any()
    made.apply_gradients([(rows, rows_of([[1.5], [-0.5]], [1, 1]))])
    assert rows.numpy()[1, 0] == -1


def test_the_scale_goes_up_and_down() -> None:
    """Up after incr_every_n_steps good steps in a row, down after decr_every_n_nan_or_inf bad ones."""
    w = Parameter("w", np.zeros(1))
    amp = {"dtype": "float16", "init_loss_scaling": 64.0, "incr_ratio": 4.0, "decr_ratio": 0.5}
    amp |= {"incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 2}
    made = distributed(SGD(1.0), amp=amp)
    seen = []
    for good in (1, 1, 1, 0, 1, 0, 0, 0, 0):
        made.apply_gradients([(w, np.array([1.0 if good else np.inf]))])
        seen.append(made.scaler.scale)
    assert seen == [64, 64, 256, 256, 256, 256, 128, 128, 64]
    again = distributed(SGD(1.0), amp={"dtype": "float16"})
    again.set_state_dict(made.state_dict())
    assert again.scaler.scale == 64


def test_the_scale_stays_if_it_is_told_to() -> None:
    """Without dynamic scaling bad steps are skipped all the same."""
    w = Parameter("w", np.zeros(1))
    amp = {"dtype": "float16", "decr_every_n_nan_or_inf": 1, "incr_every_n_steps": 1}
    made = distributed(SGD(1.0), amp={**amp, "use_dynamic_loss_scaling": False})
    for value in (1.0, np.inf, 1.0):
        made.apply_gradients([(w, np.array([value]))])
    assert made.scaler.scale == 32768
    assert w.numpy().tolist() == [-2]


def test_with_gradient_merge_the_mean_is_rounded() -> None:
    """Gradients are added up in float32; one push of their mean travels in 16 bits."""
    w = Parameter("w", np.zeros(1))
    made = distributed(SGD(1.0), amp={}, gradient_merge={"k_steps": 2})
    for value in (1 + 2.0**-9, -1.0):
        made.apply_gradients([(w, np.array([value], np.float32))])
    assert w.numpy().tolist() == [-(2.0**-10)]


def test_lookahead_sends_16_bits_too() -> None:
    """A wrapper passes amp on to the optimizer that pushes."""
    w = Parameter("w", np.zeros(1))
    distributed(LookAhead(SGD(1.0), k=5), amp={}).apply_gradients(
        [(w, np.array([1 + 2.0**-12], np.float32))]
    )
    assert w.numpy().tolist() == [-1]
