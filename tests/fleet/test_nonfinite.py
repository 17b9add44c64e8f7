"""A loss or a gradient that is not finite is noticed before it is pushed."""

from typing import Any

import numpy as np
import pytest

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.client import Client
from psfleet.core.engine.non_finite_check import NonFiniteCheck
from psfleet.core.engine.rules.momentum import ExactSum
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.modes.switch import connect
from psfleet.core.runtime.script_runtime import ScriptRuntime
from psfleet.core.runtime.strategy import ConsistencySettings, WireSettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer import SGD

IDS, BAD = np.arange(3), np.array([[1, 2], [3, np.inf], [5, 6]], np.float32)


def push_twice(runtime: ScriptRuntime, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """A good push, then three bad ones; what was said of them."""
    client = Client(runtime)
    table = client.sparse_table("rows", 2, SGD(0.5))
    table.push(IDS, np.ones((3, 2)))
    for _ in range(2):
        table.push(IDS, BAD)
    client.flush()
    client.dense_table("bias", np.zeros(2), SGD(0.5)).push([np.nan, 0])
    client.flush()
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("psfleet:")]


def counted(runtime: ScriptRuntime) -> int:
    """Steps in which something was not finite."""
    assert runtime.cluster is not None
    return runtime.cluster.watch.found


@pytest.mark.parametrize("mode", ["embedded", "sync"])
def test_it_is_said_once(mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The worker, the step and the table are named, once; the push is made, and all such steps count."""
    if mode == "embedded":
        output = push_twice(EmbeddedRuntime(), capfd)
    else:
        with LocalFleet(2, 1, in_process=True) as fleet:
            runtime = fleet.connect(0, mode)
            output = push_twice(runtime, capfd)
            assert np.isinf(Client(runtime).sparse_table("rows", 2, SGD(0.5)).pull([1])).any()
            assert counted(runtime) == 3
            runtime.close()
    assert len(output) == 1
    assert (
        "worker 0, step 2: the gradient for table 'rows' has inf for id 1, and is pushed"
        in output[0]
    )


def test_what_float32_cannot_hold_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    """A gradient in float64 beyond float32 is infinite: psfleet says so, and NumPy does not warn besides."""
    runtime = EmbeddedRuntime()
    table = Client(runtime).sparse_table("rows", 2, SGD(0.5))
    table.push(IDS, np.full((3, 2), 1e300))
    runtime.push([Gradient(table.spec.key, np.full((3, 2), -1e300), IDS)])
    [output] = capfd.readouterr().err.splitlines()
    assert "the gradient for table 'rows' has inf for id 0" in output


@pytest.mark.parametrize("mode", ["embedded", "async"])
def test_it_can_stop_the_script(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PSFLEET_ON_NAN=stop the push is refused, nothing changes, and the worker can go on."""
    monkeypatch.setenv("PSFLEET_ON_NAN", "stop")
    with LocalFleet(2, 1, in_process=True) as fleet:
        runtime = EmbeddedRuntime() if mode == "embedded" else fleet.connect(0, mode)
        table = Client(runtime).sparse_table("rows", 2, SGD(0.5))
        before = table.pull(IDS)
        with pytest.raises(
            UsageError, match=r"worker 0, step 1: .*'rows' has inf for id 1; it was not pushed"
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
        ConfigError, match="PSFLEET_ON_NAN is 'halt'; it must be say, stop, skip or ignore"
    ):
        NonFiniteCheck(0)


def test_in_geo_mode_the_worker_looks_at_its_own_steps(capfd: pytest.CaptureFixture[str]) -> None:
    """Where pushes stay in the worker for a while, they are looked at when they are made."""
    with LocalFleet(1, 1, in_process=True) as fleet:
        runtime = connect(fleet.environment(0), ConsistencySettings("geo", k_steps=100))
        output = push_twice(runtime, capfd)
        assert counted(runtime) == 3  # the sums that are pushed are no steps
        runtime.close()
    assert len(output) == 1
    assert "worker 0, step 2: the gradient for table 'rows' has inf" in output[0]


def test_large_values_are_finite(capfd: pytest.CaptureFixture[str]) -> None:
    """Numbers whose squares overflow are no infinities."""
    NonFiniteCheck(0).check_push(1, 1e30, [("t", np.full((4, 4), 1e30, np.float32), np.arange(4))])
    runtime = EmbeddedRuntime()
    table = Client(runtime).sparse_table("rows", 2, SGD(0.5))
    runtime.push([Gradient(table.spec.key, np.full((3, 2), 3e38, np.float32), IDS, 0.1)])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("mode", "wire"), [("embedded", "int8"), ("sync", "fp32"), ("async", "int8"), ("geo", "fp32")]
)
def test_it_can_be_skipped(
    mode: Any, wire: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With PSFLEET_ON_NAN=skip a bad step changes nothing under SGD, and the others count."""
    monkeypatch.setenv("PSFLEET_ON_NAN", "skip")
    form = WireSettings(wire)
    with LocalFleet(2, 1, in_process=True) as fleet:
        runtime: ScriptRuntime = EmbeddedRuntime(wire=form)
        if mode != "embedded":
            runtime = connect(fleet.environment(0), ConsistencySettings(mode), form)
        client = Client(runtime)
        rows = client.sparse_table("rows", 2, SGD(0.5))
        bias = client.dense_table("bias", np.zeros(2), SGD(0.5))
        before = rows.pull(IDS)
        good, fine = np.ones((3, 2), np.float32), np.ones(2, np.float32)
        steps: list[tuple[float, Any, Any]] = [
            (0.5, good, fine),
            (0.5, BAD, fine),
            (0.5, good, np.array([1, np.nan], np.float32)),
            (float("inf"), good, fine),
            (0.5, good, fine),
        ]
        for loss, gradient, step in steps:
            runtime.push(
                [
                    Gradient(rows.spec.key, gradient, IDS, 0.5),
                    Gradient(bias.spec.key, step, None, 0.5),
                ],
                samples=4,
                loss=loss,
            )
        client.flush()
        np.testing.assert_allclose(rows.pull(IDS), before - 1, rtol=1e-6)
        np.testing.assert_allclose(bias.pull(), [-1, -1], rtol=1e-6)
        runtime.close()
    output = [line for line in capfd.readouterr().err.splitlines() if line.startswith("psfleet:")]
    assert len(output) == 1
    assert "worker 0, step 2: the gradient for table 'rows' has inf for id 1; the gr" in output[0]


def test_the_element_of_a_dense_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its position in the flattened array, also where only some elements are pushed."""
    monkeypatch.setenv("PSFLEET_ON_NAN", "stop")
    values = np.array([0, 0, np.nan, 0, 0, 0], np.float32)
    for shaped, ids, element in [
        (values, None, 2),
        (values.reshape(2, 3), None, 2),
        (values, np.arange(10, 16), 12),
    ]:
        with pytest.raises(UsageError, match=f"has nan at element {element};"):
            NonFiniteCheck(0).check_push(1, None, [("w", shaped, ids)])


def test_counts_that_are_infinite_are_skipped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A skipped step pushes the counts of metrics all the same, but not infinite ones."""
    monkeypatch.setenv("PSFLEET_ON_NAN", "skip")
    with LocalFleet(2, 1, in_process=True) as fleet:
        client = Client(fleet.connect(0, "async"))
        sums = client.runtime.create(
            TableSpec("sums", "dense", (2,), ExactSum()), np.zeros(2, np.float32)
        )
        bias = client.dense_table("bias", np.zeros(2), SGD(0.5))
        for step, counts in ((np.nan, 1.0), (np.nan, np.inf), (1.0, np.inf), (1.0, 2.0)):
            values = [np.full(2, value, np.float32) for value in (step, counts)]
            client.runtime.push(
                [
                    Gradient(bias.spec.key, values[0], None, 0.5),
                    Gradient(sums, values[1], None, 0.5),
                ]
            )
        client.flush()
        assert bias.pull().tolist() == [-0.5, -0.5]
        assert client.runtime.pull([Read(sums)])[0].tolist() == [3.0, 3.0]
        client.runtime.close()
