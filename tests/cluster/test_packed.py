"""Gradients and weights in fewer bytes: the same bits on every fleet and lane, and the bytes promised."""

import contextlib
import dataclasses
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from psfleet.core.base.crash_points import Send
from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read, Runtime, TableState
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec
from psfleet.core.net import frame
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.strategy import ConsistencySettings, WireSettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_launch.chaos.message_faults import MessageFaults
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.trainings import TrainingWorkload, same_bits, train_together

TRAINING = TrainingWorkload(steps=15, dim=16)
NARROW = TrainingWorkload(steps=15, dim=3)


def on(fleet: LocalFleet, worker: int, wire: WireSettings, lane: str = "auto", **more: Any) -> Any:
    """One worker's runtime in sync mode."""
    environment: Any = dataclasses.replace(fleet.environment(worker), lane=lane)
    return ClusterRuntime(environment, "sync", wire=wire, **more)


def train(
    fleet: LocalFleet, wire: WireSettings, training: TrainingWorkload, **more: Any
) -> list[TableState]:
    """Two workers in rounds; the tables afterwards."""
    return train_together(2, training, lambda worker: on(fleet, worker, wire, **more))


class Sent:
    """Notes the bytes of every attempt at a push, under faults."""

    def __init__(self, faults: MessageFaults) -> None:
        self.faults = faults
        self.pushes: dict[tuple[int, int, int], list[bytes]] = defaultdict(list)
        self._lock = threading.Lock()

    def __call__(self, server: int, send: Send) -> Send:
        """`send` of one server."""

        def noted(method: str, request: bytes, seconds: float) -> bytes:
            if method == "Shard/Push":
                header, _ = frame.decode(request)
                with self._lock:
                    self.pushes[server, header.worker, header.sequence].append(request)
            return send(method, request, seconds)

        return self.faults(server, noted)


@pytest.mark.parametrize(("form", "training"), [("int8", TRAINING), ("bf16", NARROW)])
def test_servers_lanes_and_faults_do_not_change_a_bit(
    form: str, training: TrainingWorkload
) -> None:
    """Two workers in rounds: 1 server with shared memory, and 3 with messages of which many are lost or
    repeated, end with the same bits; a push that is sent again is the same bytes."""
    wire, sent = WireSettings(form, form), Sent(MessageFaults(3, drop=0.15, duplicate=0.15))
    with LocalFleet(1, 2, in_process=True) as fleet:
        expected = train(fleet, wire, training)
    with LocalFleet(3, 2, in_process=True) as fleet:
        same_bits(train(fleet, wire, training, lane="inline", inject_faults=sent), expected)
    assert sum(len(attempts) > 1 for attempts in sent.pushes.values()) > 3
    assert all(len(set(attempts)) == 1 for attempts in sent.pushes.values())


@pytest.mark.parametrize(
    "wire", [WireSettings("int8", "bf16"), WireSettings("bf16", "int8")], ids=str
)
def test_embedded_is_the_same(wire: WireSettings) -> None:
    """A script without a cluster rounds as one with 2 servers and a worker does."""
    alone = EmbeddedRuntime(wire=wire)
    TRAINING.run(alone)
    with LocalFleet(2, 1, in_process=True) as fleet:
        runtime = on(fleet, 0, wire)
        TRAINING.run(runtime)
        same_bits(TRAINING.result(runtime), TRAINING.result(alone))
        runtime.close()


def test_bytes_fall_as_promised() -> None:
    """Async, 4,000 distinct rows of 16 and 50,000 dense values: bytes for a value are 4, 2, and 1 with a
    step for each row or 256 values; in messages and in shared memory. Workers need not agree."""
    rows = TableSpec("bytes/rows", "sparse", (16,), make_rule("adam", {}))
    dense = TableSpec("bytes/dense", "dense", (50_000,), make_rule("adam", {}))
    ids, wires = (
        np.arange(4000),
        [WireSettings(), WireSettings("bf16", "bf16"), WireSettings("int8", "int8")],
    )
    sizes = {"fp32": (64, 200_000), "bf16": (32, 100_000), "int8": (20, 50_000 + 4 * 196)}
    lanes = [(wire, lane) for wire in wires for lane in ("inline", "auto")]
    with LocalFleet(2, len(lanes), in_process=True) as fleet, contextlib.ExitStack() as stack:
        for worker, (wire, lane) in enumerate(lanes):
            environment: Any = dataclasses.replace(fleet.environment(worker), lane=lane)
            runtime = ClusterRuntime(environment, "async", wire=wire)
            stack.callback(runtime.close)
            runtime.create(dense, np.zeros(50_000, np.float32))
            runtime.create(rows)
            for _ in range(3):  # shared memory grows until a step's tensors have room
                begun = _bytes(runtime)
                runtime.push(
                    [
                        Gradient(rows.key, np.ones((4000, 16), np.float32), ids, 0.1),
                        Gradient(dense.key, np.ones(50_000, np.float32), None, 0.1),
                    ]
                )
                runtime.pull([Read(rows.key, ids), Read(dense.key)])
                moved = _bytes(runtime) - begun
            row, whole = sizes[wire.push]
            question = 8 if lane == "inline" else 0
            expected = np.array([4000 * (8 + row + question), 4000 * row]) + whole
            assert (expected <= moved).all()
            assert (moved < expected + 2000).all()


def _bytes(runtime: Runtime) -> Any:
    """What all servers have received and sent."""
    stats = runtime.stats()
    return np.array([sum(s[name] for s in stats) for name in ("bytes_in", "bytes_out")])


def zeros(runtime: Runtime, *specs: TableSpec) -> None:
    """Make the tables, all zero."""
    for spec in specs:
        runtime.create(spec, np.zeros(spec.shape, np.float32) if spec.kind == "dense" else None)


PLAIN = make_rule("sgd", {})
DENSE = TableSpec("packed/dense", "dense", (300,), PLAIN)
ROWS = TableSpec("packed/rows", "sparse", (8,), PLAIN, initializer=InitializerSpec("constant", 0.0))


def test_a_gradient_that_is_no_number_is_refused_and_the_next_one_is_not() -> None:
    """Nothing of the refused push has an effect; the worker goes on with the same number, so with the
    same bits as one that has made no such push."""
    wire, alone = WireSettings("int8", "int8"), EmbeddedRuntime(wire=WireSettings("int8", "int8"))
    good = np.linspace(-1, 1, 300, dtype=np.float32)
    bad = np.full((1, 8), 3e38, np.float32)
    with LocalFleet(2, 1, in_process=True) as fleet:
        runtime = ClusterRuntime(fleet.environment(0), "sync", wire=wire)
        for each in (runtime, alone):
            zeros(each, DENSE, ROWS)
            for rows, ids in ((np.full((1, 8), np.nan), [5]), (np.repeat(bad, 2, 0), [5, 5])):
                with pytest.raises(UsageError, match=r"packed/rows.*int8"):
                    each.push(
                        [
                            Gradient(DENSE.key, good, None, 1.0),
                            Gradient(ROWS.key, rows.astype(np.float32), np.array(ids), 1.0),
                        ]
                    )
            each.push([Gradient(DENSE.key, good, None, 1.0)])
            each.flush()
        same_bits([runtime.read_table(DENSE.key)], [alone.read_table(DENSE.key)])
        assert len(runtime.read_table(ROWS.key).values[0]) == 0
        with pytest.raises(ConfigError, match="geo"):
            runtime.set_mode(ConsistencySettings("geo"))
        runtime.close()


def losses(wire: WireSettings, steps: int = 300) -> Sequence[float]:
    """Logistic regression on ids and dense columns under Adam: the loss of each step."""
    runtime = EmbeddedRuntime(wire=wire)
    rule = make_rule("adam", {})
    dense = TableSpec("learn/dense", "dense", (20,), rule)
    rows = TableSpec("learn/rows", "sparse", (8,), rule, seed=3)
    zeros(runtime, dense, rows)
    truth = np.random.default_rng(0)
    reply, taste = truth.standard_normal(20), truth.standard_normal((50, 8))
    curve = []
    for step in range(steps):
        dice = np.random.default_rng((1, step))
        columns = dice.standard_normal((64, 20)).astype(np.float32)
        ids = dice.integers(0, 50, 64)
        late = (columns @ reply + taste[ids].sum(axis=1) > 0).astype(np.float32)
        weights, part = runtime.pull([Read(dense.key), Read(rows.key, ids)])
        p = 1 / (1 + np.exp(-(columns @ weights + part.sum(axis=1))))
        curve.append(float(-np.log(np.where(late > 0, p, 1 - p)).mean()))
        slope = ((p - late) / 64).astype(np.float32)
        runtime.push(
            [
                Gradient(dense.key, slope @ columns, None, 0.02),
                Gradient(rows.key, np.repeat(slope[:, None], 8, 1), ids, 0.02),
            ]
        )
    return curve


@pytest.mark.long
def test_learning_is_as_good() -> None:
    """The loss at the end is that of float32, to a twentieth; the beginning was twice as high."""
    plain = losses(WireSettings())
    expected = float(np.mean(plain[-50:]))
    assert expected < 0.5 * np.mean(plain[:20])
    for wire in (
        WireSettings("bf16", "bf16"),
        WireSettings("int8", "int8"),
        WireSettings("int8", "bf16"),
    ):
        assert abs(float(np.mean(losses(wire)[-50:])) - expected) < 0.05 * expected
