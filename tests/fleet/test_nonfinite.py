"""A loss or a gradient that is not finite is noticed before it is pushed."""

import numpy as np
import pytest

from psfleet.client import Client
from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.errors import ConfigError, UsageError
from psfleet.modes.switch import connect
from psfleet.optimizer import SGD
from psfleet.runtime.finiteness import NonFiniteCheck
from psfleet.runtime.interface import Gradient, Runtime
from psfleet.strategy import ConsistencySettings
from psfleet.testing.local_fleet import LocalFleet

IDS, BAD = np.arange(3), np.array([[1, 2], [3, np.inf], [5, 6]], np.float32)


def push_twice(runtime: Runtime, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """A good push, then two bad ones; what was said of them."""
    client = Client(runtime)
    table = client.sparse_table("rows", 2, SGD(0.5))
    table.push(IDS, np.ones((3, 2)))
    for _ in range(2):
        table.push(IDS, BAD)
    client.flush()
    client.dense_table("bias", np.zeros(2), SGD(0.5)).push([np.nan, 0])
    client.flush()
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("psfleet:")]


@pytest.mark.parametrize("mode", ["embedded", "sync", "async"])
def test_it_is_said_once(mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The worker, the step and the table are named, once; the push is made."""
    if mode == "embedded":
        said = push_twice(EmbeddedRuntime(), capfd)
    else:
        with LocalFleet(2, 1) as fleet:
            runtime = fleet.connect(0, mode)
            said = push_twice(runtime, capfd)
            assert np.isinf(Client(runtime).sparse_table("rows", 2, SGD(0.5)).pull([1])).any()
            runtime.close()
    assert len(said) == 1
    assert "worker 0, step 2: the gradient for table 'rows' has inf, and is pushed" in said[0]


@pytest.mark.parametrize("mode", ["embedded", "sync", "async"])
def test_it_can_stop_the_script(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PSFLEET_ON_NAN=stop the push is refused, nothing changes, and the worker can go on."""
    monkeypatch.setenv("PSFLEET_ON_NAN", "stop")
    with LocalFleet(2, 1) as fleet:
        runtime = EmbeddedRuntime() if mode == "embedded" else fleet.connect(0, mode)
        table = Client(runtime).sparse_table("rows", 2, SGD(0.5))
        before = table.pull(IDS)
        with pytest.raises(
            UsageError, match=r"worker 0, step 1: .*'rows' has inf; it was not pushed"
        ):
            table.push(IDS, BAD)
        with pytest.raises(UsageError, match="step 1: the loss is nan"):
            runtime.push([], loss=float("nan"))
        np.testing.assert_array_equal(table.pull(IDS), before)
        table.push(IDS, np.ones((3, 2)))
        np.testing.assert_array_equal(table.pull(IDS), before - np.float32(0.5))
        runtime.close()


def test_it_can_be_ignored(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With PSFLEET_ON_NAN=ignore nothing is said; another word is refused."""
    monkeypatch.setenv("PSFLEET_ON_NAN", "ignore")
    assert push_twice(EmbeddedRuntime(), capfd) == []
    monkeypatch.setenv("PSFLEET_ON_NAN", "halt")
    with pytest.raises(
        ConfigError, match="PSFLEET_ON_NAN is 'halt'; it must be say, stop or ignore"
    ):
        NonFiniteCheck(0)


def test_in_geo_mode_the_worker_looks_at_its_own_steps(capfd: pytest.CaptureFixture[str]) -> None:
    """Where pushes stay in the worker for a while, they are looked at when they are made."""
    with LocalFleet(1, 1) as fleet:
        runtime = connect(fleet.environment(0), ConsistencySettings("geo", k_steps=100))
        said = push_twice(runtime, capfd)
        runtime.close()
    assert len(said) == 1
    assert "worker 0, step 2: the gradient for table 'rows' has inf" in said[0]


def test_large_values_are_finite(capfd: pytest.CaptureFixture[str]) -> None:
    """Numbers whose squares overflow are no infinities."""
    NonFiniteCheck(0).look(1, 1e30, [("t", np.full((4, 4), 1e30, np.float32))])
    runtime = EmbeddedRuntime()
    table = Client(runtime).sparse_table("rows", 2, SGD(0.5))
    runtime.push([Gradient(table.spec.key, np.full((3, 2), 3e38, np.float32), IDS, 0.1)])
    assert capfd.readouterr().err == ""
