"""Norms of gradients are counted by powers of two; which worker had the first that was not finite."""

import numpy as np
import pytest

from psfleet.core.base.observability.exposition import NormHistogram
from psfleet.core.engine.non_finite_check import NonFiniteCheck, SkippedGradients
from psfleet_server.engine.server_measurements import FirstNonFinite


def counted(*steps: np.ndarray) -> NormHistogram:
    """What is counted of the gradients of one table."""
    check = NonFiniteCheck(0)
    for step, gradient in enumerate(steps, 1):
        try:
            check.check_push(step, None, [("t", gradient.astype(np.float32), None)])
        except SkippedGradients:
            assert not np.isfinite(gradient).all()
    check.check_push(len(steps) + 1, None, [])
    return check.norms.tables["t"]


@pytest.mark.parametrize("norm", [0.0, 1e-9, 2.0**-14, 0.3, 0.5, 0.7, 1.0, 3.0, 4.0, 1e4, 1e6])
def test_a_norm_is_in_the_buckets_above_it(norm: float) -> None:
    """Also those of 0 and beyond the bounds that are shown; a bound itself is in the next one."""
    actual = counted(np.array([norm]))
    assert actual.buckets() == [
        (bound, float(np.float32(norm) < float(bound))) for bound, _ in actual.buckets()
    ]
    assert actual.total == pytest.approx(norm)


def test_parts_of_a_step_are_one_gradient() -> None:
    """3 and 4 in two parts of a push are a norm of 5."""
    check = NonFiniteCheck(0)
    for value in (3.0, 4.0):
        check.check_push(1, None, [("t", np.array([value], np.float32), None)])
    check.check_push(2, None, [])
    assert check.norms.tables["t"].total == 5.0


def test_bad_steps_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN spoils no sum; squares that overflow are above all bounds."""
    monkeypatch.setenv("PSFLEET_ON_NAN", "skip")
    actual = counted(np.array([1.0]), np.array([np.nan]), np.full(4, 3e38), np.array([2.0]))
    assert actual.total == 3.0
    assert actual.buckets()[-2:] == [("16384", 2.0), ("+Inf", 3.0)]


def test_the_earliest_of_all_workers_is_named_once() -> None:
    """However late its heartbeat comes: the others are only told of when all have been heard since."""
    first = FirstNonFinite()
    assert first.take("", at=0.0, now=1.0, oldest=0.5) == ""
    assert first.take("victim", at=9.5, now=10.0, oldest=9.2) == ""
    assert first.take("culprit", at=9.4, now=10.3, oldest=10.0) == "culprit"
    assert first.take("another", at=1.0, now=11.0, oldest=10.3) == ""


def test_a_worker_that_has_died_is_not_waited_for() -> None:
    """After some seconds the earliest is named without its heartbeat."""
    first = FirstNonFinite()
    assert first.take("victim", at=9.5, now=10.0, oldest=3.0) == ""
    assert first.take("victim", at=9.5, now=14.0, oldest=3.0) == ""
    assert first.take("", at=0.0, now=15.0, oldest=3.0) == "victim"
