"""Where standbys go when machines are lost: an engine and its agents, without a supervisor."""

import os
import selectors
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from psfleet.core.net.connections.certificates import make_credentials
from psfleet_launch.engines.remote.job_opening import AgentStarter, agent_command
from psfleet_launch.engines.remote.remote_engine import RemoteEngine
from psfleet_launch.job.job_plan import Job, Member, Told
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.supervision.job_events import (
    Event,
    LivenessSignal,
    ProcessExited,
    Said,
    ServerReady,
    Shown,
)
from tests.agents.conftest import TRAINER
from tests.waiting import until

SERVER = Member("server", 0)
HEIR = Member("server", 0, copy=1)


class OneMachine(RemoteEngine):
    """Two agents on this machine.

    Attributes:
        seen: All events so far, but for liveness signals.
    """

    name = "join"

    def __init__(self, job: Job, selector: selectors.BaseSelector) -> None:
        super().__init__(job, selector)
        self.seen: list[Event | Shown] = []
        self.starters: dict[str, AgentStarter] = {}

    def machines(self) -> Sequence[str]:
        return ("alpha", "beta")

    def default_address(self) -> str:
        return "127.0.0.1"

    def start_agents(self, endpoint: str, invitation: bytes) -> None:
        for number, name in enumerate(self.machines()):
            place = ("--name", name, "--address", f"127.0.0.{number + 2}")
            command = [*agent_command(endpoint), *place]
            output = self.job.folder / f"agent.{name}"
            self.starters[name] = AgentStarter(command, invitation, output, self.job.token)

    def stop_agents(self) -> None:
        for starter in self.starters.values():
            starter.let_go()
            starter.wait()

    def kill(self, name: str) -> None:
        """End an agent; everything that it has started ends with it."""
        os.kill(self.agents[name].hello.pid, signal.SIGKILL)

    def hear(self, wanted: type, member: Member | None) -> Event | Shown:
        """Wait for such an event of this member and return it. All events stay in `seen`."""

        def found() -> list[Event | Shown]:
            for key, _ in self.selector.select(self.pause):
                key.data()
            self.seen += [one for one in self.events() if not isinstance(one, LivenessSignal)]
            return [one for one in self.seen if isinstance(one, wanted) and _member(one) == member]

        until(found, lambda: self.seen)
        return found()[-1]

    def ready(self, member: Member) -> str:
        """Wait until a server is ready, once more than before; its endpoint."""
        self.seen.clear()
        said = self.hear(ServerReady, member)
        assert isinstance(said, ServerReady)
        return said.endpoint


def _member(event: Event | Shown) -> Member | None:
    return getattr(event, "member", None)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[OneMachine]:
    """An engine with a job of one server that has a log and a standby."""
    asked = JobRequest(TRAINER, port=0, replicas=1, durability="log")
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "private").mkdir(mode=0o700)
    keys = make_credentials(tmp_path / "tls")
    job = Job(asked, "j", os.urandom(8).hex(), tmp_path / "private", logs, keys)
    with selectors.DefaultSelector() as selector:
        made = OneMachine(job, selector)
        made.open()
        try:
            yield made
        finally:
            made.sweep()
            made.close()
        assert made.left_behind() == []


def test_a_standby_waits_where_no_machine_is_left(engine: OneMachine) -> None:
    """It is told of once and has not ended, so it costs no attempt; a signal ends it."""
    setting = Told(engine.endpoints(), follows=True, takes_commands=True)
    engine.spawn(SERVER, replace(setting, follows=False))
    engine.ready(SERVER)
    engine.kill("beta")
    assert "the agent on host beta is lost" in str(engine.hear(Said, None))
    engine.spawn(HEIR, setting)
    said = Said(HEIR, "no other machine is free; server 0 goes on without it")
    assert engine.hear(Said, HEIR) == said
    for _ in range(3):
        engine.events()
    assert engine.seen.count(said) == 1
    assert not any(isinstance(one, ProcessExited) for one in engine.seen)
    engine.send(HEIR, signal.SIGTERM)
    assert engine.hear(ProcessExited, HEIR) == ProcessExited(HEIR, -signal.SIGTERM)


def test_one_that_has_taken_over_starts_again_elsewhere(engine: OneMachine) -> None:
    """Its machine is lost, and it goes on from its log at the place of its server."""
    setting = Told(engine.endpoints(), takes_commands=True)
    engine.spawn(SERVER, setting)
    setting = replace(setting, endpoints=[engine.ready(SERVER)])
    engine.spawn(HEIR, replace(setting, follows=True))
    engine.ready(HEIR)
    assert (engine.host(SERVER), engine.host(HEIR)) == ("alpha", "beta")
    engine.send(SERVER, signal.SIGKILL)
    engine.hear(ProcessExited, SERVER)
    engine.expect(HEIR)
    engine.command(HEIR, "promote 2")
    endpoint = engine.ready(HEIR)
    assert endpoint.startswith("127.0.0.3:")
    engine.kill("beta")
    engine.hear(ProcessExited, HEIR)
    engine.spawn(HEIR, replace(setting, endpoints=[endpoint]))
    assert engine.ready(HEIR).startswith("127.0.0.2:")
    assert engine.host(HEIR) == "alpha"
