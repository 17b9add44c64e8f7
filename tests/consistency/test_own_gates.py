"""A mode of a user's own with a rule for what pulls wait for: servers ask it, and know its settings."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from psfleet.core.base.errors import ConfigError, FrameError
from psfleet.core.engine.consistency import ConsistencyMode, find_mode
from psfleet.core.engine.shard.events import (
    Expire,
    Join,
    Leave,
    Pull,
    Push,
    Record,
    SendError,
    SendOutcome,
    SendValues,
    Tick,
)
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.net.membership_messages import (
    combined_changes,
    mode_fields,
    read_change,
    read_mode_fields,
    write_change,
)
from psfleet.core.net.server_state import ServerState, read_state, write_state
from psfleet.core.net.v1 import shard_pb2
from psfleet.core.runtime.modes.switch import ModeSwitchRuntime
from psfleet.core.runtime.strategy import ConsistencySettings, Settings
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.consistency.module_of_modes import module_of_modes
from tests.consistency.workers import step, taken, together

SOURCE = '''
"""quorum: a pull waits while too many workers are too far behind. patient: it waits for a while at most."""
from dataclasses import dataclass
from psfleet.core.engine.consistency import ConsistencyMode, at_least_0, register
from psfleet.core.engine.shard.shard_state import PullGate

@dataclass
class QuorumGate(PullGate):
    def awaited(self, pull, live):
        behind = [seat for seat in live if self.at.get(seat, 0) < pull.clock - self.mode.lag]
        return behind if len(behind) > self.mode.stragglers else []

@register
@dataclass(frozen=True)
class QuorumMode(ConsistencyMode):
    """As async, but a pull waits while too many workers are too far behind."""
    lag: int = at_least_0(0, "pushes a worker may be behind another")
    stragglers: int = at_least_0(0, "workers that may be further behind")
    name = "quorum"
    number = 1001
    gate = "own_gates:QuorumGate"
    server_settings = ("lag", "stragglers")

@dataclass
class PatientGate(QuorumGate):
    seconds = 0.0
    tick_every = 0.5

    def tick(self, seconds):
        self.seconds += seconds

    def awaited(self, pull, live):
        return [] if self.seconds >= self.mode.patience else super().awaited(pull, live)

@register
@dataclass(frozen=True)
class PatientMode(QuorumMode):
    """As quorum, until a number of seconds has passed."""
    patience: int = at_least_0(3, "seconds")
    name = "patient"
    number = 1002
    gate = "own_gates:PatientGate"
    server_settings = ("lag", "stragglers", "patience")
'''
IDS = np.arange(8)


@pytest.fixture(autouse=True)
def own_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module `own_gates`, which servers find too; psfleet knows its modes until the test ends."""
    yield from module_of_modes("own_gates", SOURCE, tmp_path, monkeypatch)


def asked(mode: str, **settings: float) -> ConsistencySettings:
    """The mode with these settings, as a strategy file says it."""
    return Settings.from_parts({"consistency": {"mode": mode, **settings}}).consistency


def declared(mode: str, **settings: float) -> ConsistencyMode:
    """Likewise, as it is declared."""
    return asked(mode, **settings).declared


def shard_in(mode: ConsistencyMode) -> Shard:
    """A shard with three workers in the mode."""
    shard = Shard(workers=3)
    for worker in range(3):
        shard.handle(Join(worker, 1, mode), "join")
    return shard


def push(shard: Shard, worker: int, clock: int) -> list[object]:
    """A push, and the calls that are answered with values."""
    reply = shard.handle(Push(worker, 1, clock, (), clock=clock), "push")
    return [one.call for one in reply if isinstance(one, SendValues)]


def test_a_shard_asks_the_gate() -> None:
    """A pull waits as the rule says, with the settings of the mode: for a second worker, but not the third;
    then it is answered, or refused in the rule's words."""
    shard = shard_in(declared("quorum", lag=1, stragglers=1))
    assert push(shard, 0, 1) == push(shard, 0, 2) == []
    assert shard.handle(Pull(0, 1, (), clock=2), "early") == []
    assert push(shard, 1, 1) == ["early"]
    assert [type(one) for one in shard.handle(Pull(0, 1, (), clock=2), "now")] == [SendValues]
    assert push(shard, 0, 3) == []
    assert shard.handle(Pull(0, 1, (), clock=3), "late") == []
    (refused,) = shard.handle(Expire(), "late")
    assert isinstance(refused, SendError)
    assert str(refused.error) == (
        "worker 0 is too far ahead on server 0 and was not caught up with in time: "
        "it waits for worker 1, worker 2"
    )
    shard.validate()


def test_time_lets_pulls_pass() -> None:
    """A gate that wants ticks gets them, and pulls that wait are asked about again; nothing is recorded."""
    records: list[Record] = []
    shard = shard_in(declared("patient", patience=2))
    assert shard.tick_every == 0.5
    push(shard, 0, 1)
    shard.journal = records.append
    assert shard.handle(Pull(0, 1, (), clock=1), "pull") == []
    assert shard.handle(Tick(1.0), "tick") == [SendOutcome("tick")]
    assert shard.handle(Tick(1.0), "tick") == [SendOutcome("tick"), SendValues("pull", ())]
    assert records == []


def test_a_worker_that_joins_leaves_the_gate_as_it_is() -> None:
    """What a gate has learned of the time is not forgotten when a worker comes back."""
    shard = shard_in(declared("patient", patience=2))
    push(shard, 0, 1)
    assert shard.handle(Pull(0, 1, (), clock=1), "pull") == []
    shard.handle(Tick(1.0), "tick")
    shard.handle(Join(2, 2, declared("patient", patience=2)), "join")
    assert shard.handle(Tick(1.0), "tick")[1:] == [SendValues("pull", ())]


def test_all_must_agree_on_every_setting() -> None:
    """A worker that asks for another value of the second one is refused."""
    shard = shard_in(declared("quorum", stragglers=1))
    (refused,) = shard.handle(Join(2, 2, declared("quorum")), "join")
    assert isinstance(refused, SendError)
    assert "asks for a stragglers of 0, but the fleet runs with 1" in str(refused.error)


def test_it_travels_and_is_stored() -> None:
    """Messages and the state of a server hold every setting of servers, and no other."""
    mode = declared("patient", lag=3, stragglers=0, patience=5)
    fields = mode_fields(mode)
    assert fields == {"mode": 1002, "staleness": 3, "mode_settings": [0, 5]}
    assert read_mode_fields(shard_pb2.JoinRequest(**fields)) == mode.agreed()
    assert read_change(write_change(mode, 9)) == (mode.agreed(), 9)
    with pytest.raises(
        FrameError, match=r"comes with the settings \[3, 0, 5\]; .* \['staleness'\]"
    ):
        read_mode_fields(shard_pb2.JoinRequest(**(fields | {"mode": find_mode("ssp").number})))
    shard = shard_in(mode)
    push(shard, 1, 1)
    shard.handle(Leave(2, 1, 0), "leave")
    stored = memoryview(b"".join(bytes(part) for part in write_state(ServerState(shard.state()))))
    again = read_state(stored).shard.consistency
    assert again == shard.state().consistency
    assert (again.declared, again.gate.at) == (mode.agreed(), {0: 0, 1: 1, 2: 0})
    assert type(again.gate).__name__ == "PatientGate"


@pytest.mark.parametrize("other", ["async", "ssp", "patient", "quorum"])
def test_different_mode_requests_are_no_agreement(other: str) -> None:
    """Of whatever modes and numbers of settings, in any order; the same wishes are one."""
    mine, theirs = declared("quorum", stragglers=1), find_mode(other)
    both = write_change(mine, 4), write_change(theirs, 7)
    assert read_change(combined_changes(*both)) == (None, 7)
    assert read_change(combined_changes(*both[::-1])) == (None, 7)
    assert read_change(combined_changes(both[0], write_change(mine, 5))) == (mine, 5)


def test_it_trains_on_a_server_that_is_killed() -> None:
    """Workers that want different modes are told so; then both want the same, and its second setting lets
    worker 0 run ahead of worker 1, on a server that dies meanwhile and comes back from its log."""
    ahead = threading.Event()

    def work(runtime: ModeSwitchRuntime) -> None:
        step(runtime, IDS)
        runtime.barrier()
        other = asked("quorum", stragglers=1) if runtime.worker_index else asked("async")
        with pytest.raises(ConfigError, match="another worker for something else"):
            runtime.set_mode(other)
        runtime.set_mode(asked("quorum", stragglers=1))
        if runtime.worker_index:
            assert ahead.wait(60)
        for _ in range(5):
            step(runtime, IDS)
        assert runtime.pull([]) == []
        ahead.set()
        runtime.barrier()
        assert taken(runtime, IDS) == (12, [12] * 8)
        (server,) = runtime.stats()
        assert server["mode"] == "quorum"
        assert server["leading_steps"] >= 4

    fleet = LocalFleet(1, 2, durability="log", crashes={0: ["applied:20"]}, rules=["own_gates"])
    with fleet, fleet.reviving():
        together(fleet, asked("quorum"), work)
        assert fleet.wait() == [0]
        assert fleet.restarts == 1
