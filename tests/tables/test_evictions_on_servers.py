"""Eviction policies of a user and streams of evicted ids on real servers, over deaths and takeovers."""

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import psfleet
from psfleet import fleet, optimizer
from psfleet.core.engine.eviction_reader import EvictionReader
from psfleet.core.engine.rules import SGD, import_rules
from psfleet.core.engine.rules.eviction_policy import POLICIES
from psfleet.core.engine.runtime_interface import Gradient, Runtime
from psfleet.core.engine.schema.entry import CapacityEntry, DecayedFrequency, EvictionStreamEntry
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.process_runtime import current
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.standby.pairs import Pairs
from tests.trainings import in_threads
from tests.waiting import until

pytestmark = pytest.mark.long

SOURCE = '''
from dataclasses import dataclass
from psfleet.core.engine.schema.entry import EvictionPolicy

def worth(frequency, age, h):
    return frequency - h[0] * age

@dataclass(frozen=True)
class Fading(EvictionPolicy):
    """A use is worth as much as some updates without one."""
    price: float = 0.5
    name = "fading_use"

    def score(self):
        return worth

    def scalars(self):
        return (self.price,)
'''
STEPS = 60
Events = list[tuple[int, int, int]]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The module `own_policies`, which servers find too."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "own_policies.py").write_text(SOURCE)
    import_rules(["own_policies"])
    yield "own_policies"
    sys.modules.pop("own_policies", None)
    POLICIES.pop("fading_use", None)


def spec_of(policy: str) -> TableSpec:
    entry = CapacityEntry(rows=40, policy=policy) & EvictionStreamEntry(keep=4096)
    return TableSpec("rows", "sparse", (2,), SGD(), seed=3, entry=entry)


def batch(step: int, worker: int = 0) -> NDArray[np.int64]:
    return np.unique(np.random.default_rng((step, worker)).zipf(1.2, 14) % 300)


def push(runtime: Runtime, spec: TableSpec, step: int, worker: int = 0) -> None:
    ids = batch(step, worker)
    values = np.full((len(ids), 2), step % 5, np.float32)
    runtime.push([Gradient(spec.key, values, ids, 0.1)]).wait()


def read_all(reader: EvictionReader) -> Events:
    """What is there now, by server."""
    return [
        event
        for page in reader
        for event in zip(page.ids.tolist(), page.steps.tolist(), page.causes.tolist(), strict=True)
    ]


def content(runtime: Runtime, spec: TableSpec) -> list[bytes]:
    state = runtime.read_table(spec.key)
    assert state.ids is not None
    assert state.scores is not None
    return [state.ids.tobytes(), *(part.tobytes() for part in (state.scores, *state.values))]


def undisturbed(spec: TableSpec) -> tuple[Events, list[bytes]]:
    """The events and rows of training without a fault."""
    with (
        LocalFleet(servers=2, workers=1, in_process=True) as local,
        contextlib.closing(local.connect(0, "async")) as runtime,
    ):
        runtime.create(spec)
        for step in range(STEPS):
            push(runtime, spec, step)
        return read_all(EvictionReader(runtime, spec)), content(runtime, spec)


def test_a_server_that_dies_evicts_the_same_rows_again(module: str) -> None:
    """From a snapshot and the log: same rows, and a reader across two deaths sees each eviction once."""
    spec = spec_of("fading_use")
    expected, rows = undisturbed(spec)
    events: Events = []
    local = LocalFleet(servers=2, workers=1, durability="log", rules=[module])
    with local, local.reviving(), contextlib.closing(local.connect(0, "async")) as runtime:
        runtime.create(spec)
        reader = EvictionReader(runtime, spec)
        for step in range(STEPS):
            push(runtime, spec, step)
            if step == 15:
                runtime.save("")
            if step in (25, 40):
                events += read_all(reader)
                local.kill(step % 2)
        events += read_all(reader)
        assert content(runtime, spec) == rows
        again = read_all(EvictionReader(runtime, spec))
    assert local.restarts == 2
    assert len(expected) > 100
    assert sorted(events) == sorted(again) == sorted(expected)


def lose_primary(pairs: Pairs, index: int) -> None:
    """Kill a server and return when its standby has taken over."""
    before = pairs.takeovers
    pairs.process(index).kill()
    until(lambda: pairs.takeovers > before, "takeover")


def test_a_standby_goes_on_with_the_stream() -> None:
    """It has the positions of its primary, of evictions before its copy too; none is read twice."""
    spec = spec_of("lfu")
    expected, rows = undisturbed(spec)
    events: Events = []
    with (
        Pairs(servers=2, workers=1) as pairs,
        pairs.deciding(),
        contextlib.closing(pairs.connect(0, "async")) as runtime,
    ):
        runtime.create(spec)
        reader = EvictionReader(runtime, spec)
        for step in range(STEPS):
            push(runtime, spec, step)
            if step in (20, 40):  # the second standby begins with a copy of the first
                pairs.await_standbys()
                events += read_all(reader)
                lose_primary(pairs, 1)
        events += read_all(reader)
        assert content(runtime, spec) == rows
    assert pairs.takeovers == 2
    assert sorted(events) == sorted(expected)


def of_rounds(servers: int) -> tuple[list[int], list[bytes], int]:
    """Two workers in sync mode: ids that a shrink removed, the rows left, and evictions by the shrink."""
    entry = CapacityEntry(rows=4000, policy=DecayedFrequency(6.0)) & EvictionStreamEntry()
    spec = TableSpec("rows", "sparse", (2,), SGD(), seed=3, entry=entry)
    rounds: list[tuple[list[int], list[bytes], int]] = []

    def run(worker: int, local: LocalFleet) -> None:
        with contextlib.closing(local.connect(worker, "sync")) as runtime:
            runtime.create(spec)
            for step in range(12):
                push(runtime, spec, step, worker)
            runtime.barrier()
            if worker == 0:
                gone = runtime.shrink(spec.key, 0.5)
                ids = sorted(id_ for id_, *_ in read_all(EvictionReader(runtime, spec)))
                rounds.append((ids, content(runtime, spec), gone))
            runtime.barrier()

    with LocalFleet(servers=servers, workers=2, in_process=True) as local:
        in_threads([partial(run, worker, local) for worker in range(2)])
    return rounds[0]


def test_frequencies_of_rounds_are_the_same_on_1_and_4_servers() -> None:
    """A round counts once; a shrink by the decayed frequency removes the same rows, bit for bit."""
    one = of_rounds(1)
    assert len(one[0]) == one[2] > 20
    assert of_rounds(4) == one


def test_scripts_read_evictions_by_name() -> None:
    """`fleet.evictions` and a client's table read the same stream, each from its own position."""
    current().use(None)
    try:
        with psfleet.connect() as ps:
            entry = CapacityEntry(4, policy="lfu") & EvictionStreamEntry(keep=8)
            table = ps.sparse_table("rows", 1, optimizer.SGD(0.1), entry=entry)
            for id_ in (1, 1, 2, 2, 3, 3, 4, 5, 6):
                table.push([id_], [[1.0]])
            reader = fleet.evictions("rows")
            assert reader.read().ids.tolist() == [4, 5]
            state = reader.state_dict()
            table.push([7], [[1.0]])
            assert [page.ids.tolist() for page in reader] == [[6]]
            again = table.evictions()
            again.set_state_dict(state)
            assert again.read().ids.tolist() == [6]
            assert table.evictions(reader.position).read().ids.tolist() == []
    finally:
        current().use(None)
