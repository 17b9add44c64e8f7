"""Base of engines for several machines. On each machine an agent runs the processes and connects to this
launcher.

Subclasses only start the agents: by ssh, srun, Ray, or by hand. This class assigns members to machines,
sends commands to agents, converts their messages to events for the job runner, and gives up agents that are
lost.

There are two time limits for a machine that does not answer (decision 20):

- *Cut off*: the machine's kernel has acknowledged nothing for a second. Standbys take over from servers on
  the machine. Nothing else happens yet.
- *Lost*: the agent was silent for 13 seconds, or its connection has ended. By then the agent has killed all
  processes on the machine, so their members may be started on other machines.

All methods run in the launcher's main thread. Threads of gRPC put messages into a queue (AgentHub) and wake
the selector.
"""

import abc
import contextlib
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.job_files import write_relocations
from psfleet.core.base.threads import Waker, handled
from psfleet.core.net.connections.credentials import Credentials
from psfleet_launch.engines.launch_engine import Engine
from psfleet_launch.engines.remote.agent_messages import (
    AgentMessage,
    Connect,
    Connected,
    Die,
    Expect,
    Hello,
    JobFile,
    LauncherFiles,
    LauncherMessage,
    Leaving,
    Opened,
    OutputChunk,
    Refused,
    Relocations,
    ServerCommand,
    Signal,
    Spawn,
    Sweep,
    Swept,
    invitation,
    version_mismatch,
)
from psfleet_launch.engines.remote.job_opening import AgentStarter, ConnectionChecks, JobOpening
from psfleet_launch.engines.remote.machine import (
    listen_endpoint,
    own_address,
    read_addresses,
    set_addresses,
)
from psfleet_launch.engines.remote.machine_placement import (
    MachinePlacement,
    RunningMembers,
    ServerLocations,
)
from psfleet_launch.job.job_plan import Job, Member, Told
from psfleet_launch.job.job_request import Launch
from psfleet_launch.job.resources import Resources
from psfleet_launch.job.spawn import MemberLogs, dismiss_guard, start_guard
from psfleet_launch.supervision.job_events import (
    Event,
    LivenessSignal,
    MachineCutOff,
    Output,
    ProcessEnding,
    ProcessExited,
    Said,
    ServerReady,
    Shown,
    causes_first,
)

if TYPE_CHECKING:  # it loads gRPC
    from psfleet_launch.engines.remote.agent_hub import AgentConnection, AgentHub

_LOOK = 0.25  # seconds between looks for agents that have become silent
_SWEEP = 10.0  # seconds for agents to end their processes
_KILLED = -9  # exit code of the processes of a lost machine, as if killed by SIGKILL


class RemoteEngine(Engine):
    """Base of engines for several machines. A subclass defines `machines` and `start_agents`.

    Attributes:
        agents: Agents that were accepted and are not lost, by name of their machine.
        starters: Running commands on this machine that have started agents, by name.
    """

    spans_machines: ClassVar[bool] = True

    def __init__(
        self, job: Job, selector: selectors.BaseSelector, launch: Launch | None = None
    ) -> None:
        super().__init__(job, selector, launch)
        self.agents: dict[str, AgentConnection] = {}
        self.starters: dict[str, AgentStarter] = {}
        self._running = RunningMembers()
        self._hosts: dict[Member, str] = {}  # machine of each member's last start
        self._unplaced: dict[Member, Told] = {}  # standbys that wait for a machine
        self._locations = ServerLocations()
        self._checks = ConnectionChecks()
        self._files = LauncherFiles(job.logs)
        self._logs = MemberLogs(job)
        self._events: list[Event | Shown] = []
        self._opening = JobOpening(job)
        self._swept: dict[str, Swept] = {}
        self._guard: subprocess.Popen[bytes] | None = None
        self._hub: AgentHub | None = None
        self._places: MachinePlacement | None = None
        self._waker = Waker()
        selector.register(self._waker, selectors.EVENT_READ, self._waker.drain)

    @abc.abstractmethod
    def machines(self) -> Sequence[str]:
        """Return a name for each machine, one for each agent. Works before the agents have connected.

        Raises:
            ConfigError: The user's settings do not name machines, or contain an error.
        """

    @abc.abstractmethod
    def start_agents(self, endpoint: str, invitation: bytes) -> None:
        """Start an agent on every machine.

        Args:
            invitation: Credentials for the agents' connection, a line of text to keep secret. Empty if
                agents have credentials already.
        """

    def control_credentials(self) -> tuple[Path, bytes]:
        """Return the folder with the launcher's credentials for its connections to agents, and the
        credentials for agents as a line of text (`invitation` in agent_messages.py).
        """
        from psfleet.core.net.connections.certificates import make_credentials  # loads cryptography

        folders = make_credentials(self.job.folder / "agents")
        return folders["server"], invitation(folders["worker"])

    def check_agents(self) -> None:  # most engines cannot know
        """Check whether an agent can no longer connect. Called while the engine waits for agents.

        Raises:
            ConfigError: An agent has failed to start. The message has the reason.
        """

    def start(self, name: str, command: Sequence[str], invitation: bytes) -> None:
        """Run a command on this machine that starts agents, and keep it running until `stop_agents`."""
        self.starters[name] = AgentStarter(
            command, invitation, self.job.folder / name, self.job.token
        )

    def stop_agents(self) -> None:
        """End the commands that have started agents. Called after all connections of agents have ended."""
        for starter in self.starters.values():
            starter.let_go()
        for starter in self.starters.values():
            starter.wait()

    def placement(self) -> Mapping[str, Sequence[Member]]:
        names = list(self.agents) or list(self.machines())
        placement = self._places or self._placed(names)
        return {name: placement.on(name) for name in names}

    def _placed(self, names: Sequence[str]) -> MachinePlacement:
        """Return a placement on these machines. Resources are checked for machines whose agents have
        connected."""
        recent = {name: agent.hello for name, agent in self.agents.items()}
        sizes = {name: Resources(hello.cores, hello.memory) for name, hello in recent.items()}
        return MachinePlacement(self.job, names, sizes)

    def open(self) -> None:
        from psfleet.core.net.connections.access import Access  # these load gRPC
        from psfleet_launch.engines.remote.agent_hub import AgentHub

        names = self.machines()
        addresses = read_addresses(self.launch.addresses)
        self._placed(names)  # raises if the job cannot be placed, before any agent is started
        self._guard = start_guard(self.job.token, self.job.folder)
        self._logs.open_all()
        credentials_folder, secret = self.control_credentials()
        access = Access(Credentials.read(credentials_folder))
        self._hub = AgentHub(access, self._waker.wake)
        endpoint = self._hub.listen(listen_endpoint(self.launch.listen or self.default_address()))
        # There is no supervisor yet that could end the job regularly, so a signal raises KeyboardInterrupt.
        with handled((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler):
            self.start_agents(endpoint, secret)
            self._await(lambda: len(self.agents) >= len(names), f"{len(names)} agents")
            set_addresses(addresses, self.agents)
            # Sort the machines in the order in which the user named them, and others by name. In the order
            # of their connections the placement would differ from run to run.
            machine_names = sorted(self.agents, key=lambda name: ([*names, name].index(name), name))
            self._places = self._placed(machine_names)
            with self._opening.told(self.agents, self._places):
                replies = self._opening.replies
                self._await(lambda: len(replies) == len(self.agents), "answers of all agents")
            self._opening.check()
            self._files.add(self._opening.without_shared_logs)

    def default_address(self) -> str:
        """Return the address of the launcher that agents connect to, if the user has not chosen one."""
        return own_address()

    def _await(self, is_complete: Callable[[], bool], awaited: str) -> None:
        """Handle agents' messages until `is_complete` returns True.

        Args:
            is_complete: Function that returns True when the expected messages have come.
            awaited: The expected messages in words, for an error.

        Raises:
            ConfigError: An agent cannot take part, or the time limit for the start is over.
        """
        deadline = time.monotonic() + self.launch.start_timeout
        while not is_complete():
            if time.monotonic() > deadline:
                recent = ", ".join(self.agents) or "none"
                raise ConfigError(
                    f"{awaited} were not there within {self.launch.start_timeout:g} s; heard of: {recent}"
                )
            for key, _ in self.selector.select(_LOOK):
                key.data()
            self._take()
            self.check_agents()
            for event in self._events:
                if isinstance(event, Said) and event.member is None:
                    raise ConfigError(event.text)

    def asked_endpoint(self, rank: int) -> str:
        port = self.job.request.port
        return self._endpoint(rank, port + rank if port else 0)

    def _endpoint(self, rank: int, port: int = 0) -> str:
        assert self._places is not None
        return f"{self.agents[self._places.of_server(rank)].hello.address}:{port}"

    def spawn(self, member: Member, told: Told) -> None:
        if told.follows and not self._free_for(member, told):
            self._unplaced[member] = told
            self._events.append(
                Said(member, f"no other machine is free; {member.seat} goes on without it")
            )
            return
        try:
            name = self._place(member, told)
        except ConfigError as error:
            self._events.append(ProcessExited(member, 1, cause=str(error)))
            return
        self._running[member] = self._hosts[member] = name
        # Send request files first. Messages to an agent keep their order, so the new process finds all
        # files that were written before its start, such as the decision about a change of the number of
        # servers.
        self.share()
        parameters = replace(
            told,
            endpoints=[*self._reachable(told.endpoints)],
            listen=f"{self.agents[name].hello.address}:0" if told.follows else "",
        )
        self.agents[name].send(Spawn(member, parameters))

    def _place(self, member: Member, start: Told) -> str:
        assert self._places is not None
        if not self.agents:
            raise ConfigError(f"no machine is left for {member}")
        if start.follows:
            return self._places.put_standby(member, self._free_for(member, start))
        if member.role == "server" and member.rank in self._locations.lost:
            self._opening.check_log(member)
        # A standby that had taken over loses its placement with its machine. Use the placement of its
        # server, which has been placed again.
        return self._places[member if member in self._places else member.seat]

    def _free_for(self, standby: Member, start: Told) -> set[str]:
        """Return the reachable machines that have no other process of the standby's server."""
        away = {name for name, agent in self.agents.items() if agent.is_cut_off}
        return set(self.agents) - self._running.of_server(standby, start.displaces) - away

    def _reachable(self, endpoints: Sequence[str]) -> Iterator[str]:
        """Yield the endpoints of all servers for a new process. For a server whose machine was lost, yield
        an endpoint on its new machine.
        """
        for rank, endpoint in enumerate(endpoints):
            yield self._endpoint(rank) if rank in self._locations.lost else endpoint

    def send(self, member: Member, number: int) -> None:
        if self._unplaced.pop(member, None):
            self._events.append(ProcessExited(member, -number))
        self._tell(member, Signal(member, number))

    def command(self, member: Member, line: str) -> None:
        self.share()
        self._tell(member, ServerCommand(member, line))

    def expect(self, member: Member) -> None:
        self._tell(member, Expect(member))

    def forget(self, member: Member) -> None:
        assert self._places is not None
        self._places.remove(member)
        if member == member.seat:
            self._locations.forget(member.rank)

    def share(self) -> None:
        for name, file in self._files.changed():
            if name in self.agents:
                self.agents[name].send(file)

    def kill_machine(self, member: Member) -> None:
        self._tell(member, Die())

    def _tell(self, member: Member, message: LauncherMessage) -> None:
        agent = self.agents.get(self._running.get(member, ""))
        if agent is not None:
            agent.send(message)

    def host(self, member: Member) -> str:
        return self._hosts.get(member, "of no agent")

    @property
    def pause(self) -> float:
        return 0.0 if self._events else _LOOK

    def events(self) -> list[Event | Shown]:
        self._take()
        for agent in list(self.agents.values()):
            if agent.is_silent:
                why = "it has been silent for too long"
                agent.send(
                    Refused(why)
                )  # in case the agent was only stopped: it then ends when it goes on
                self._lose(agent, why)
            elif agent.look():
                self._events.append(Said(None, f"host {agent.name} cannot be reached"))
            if agent.is_cut_off:
                self._events.append(self._cut_off(agent.name))
        for member, start in [*self._unplaced.items()]:
            if self._free_for(member, start):
                self.spawn(member, self._unplaced.pop(member))
        self.share()
        events, self._events = self._events, []
        return events

    def _take(self) -> None:
        assert self._hub is not None
        for agent, message in self._hub.take():
            if agent.ended:
                continue
            if message is None:
                self._lose(agent, "its connection has ended")
            else:
                self._take_message(agent, message)

    def _take_message(self, agent: "AgentConnection", message: AgentMessage) -> None:
        match message:
            case Hello():
                self._welcome(agent, message)
            case Opened():
                self._opening.replies[agent.name] = message
            case OutputChunk(member, data, is_error):
                self._keep(member, data, is_error)
            case Swept():
                self._swept[agent.name] = message
            case Connected(endpoint, error):
                self._events += self._checks.answered(agent.name, endpoint, error)
            case Leaving(why):
                self._lose(agent, why)
            case JobFile():
                self._files.take(agent.name, message)
            case ServerReady():
                self._events += self._is_ready(message)
            case ProcessExited(member):
                self._running.pop(member, None)
                self._checks.forget(member)
                self._events.append(message)
            case LivenessSignal() | ProcessEnding() | Said():
                self._events.append(message)

    def _is_ready(self, event: ServerReady) -> list[Event | Shown]:
        """Return the events after a server has reported that it is ready.

        If the server was ready on another machine before, its new endpoint is sent to all machines. At the
        first start of a server with this rank all machines must connect to it first. Its event then comes
        later.
        """
        ready, has_moved = self._locations.ready(event)
        if has_moved:
            moved = Relocations(dict(self._locations.moved))
            with contextlib.suppress(
                OSError
            ):  # a full disk keeps readers away, but must not end the job
                write_relocations(self.job.moved_file, self._locations.moved)
            for agent in self.agents.values():
                agent.send(moved)
        if not self._checks.begin(ready, self.host(ready.member), self.agents):
            return [ready]
        for agent in self.agents.values():
            agent.send(Connect(ready.endpoint))
        return []

    def _welcome(self, agent: "AgentConnection", hello: Hello) -> None:
        """Accept a new agent, or refuse it and end its connection."""
        agent.hello = hello
        why = version_mismatch(hello)
        if why and not self._places:
            self._events.append(Said(None, f"host {hello.name}: {why}"))
        elif hello.name in self.agents:
            why = f"another agent is called {hello.name!r}; give each a --name of its own"
        elif self._places or len(self.agents) == len(self.machines()):
            why = f"the job has all of its {len(self.agents)} agents"
        if not why:
            self.agents[hello.name] = agent
            return
        agent.ended = True
        agent.send(Refused(why))
        agent.end()

    def _keep(self, member: Member, data: bytes, is_error: bool) -> None:
        if complaint := self._logs.write(member, data):
            self._events.append(Said(None, complaint))
        if member == self.job.shown:
            self._events.append(Output(data, is_error))

    def _cut_off(self, machine: str) -> MachineCutOff:
        """Return the event that a machine is unreachable, so that standbys take over before it is lost."""
        recent = {name for name, agent in self.agents.items() if agent.is_recent}
        return MachineCutOff(self._running.on([machine]), self._running.on(recent))

    def _lose(self, agent: "AgentConnection", why: str) -> None:
        """Give up an agent, and report the exits of all its processes.

        The processes have ended or are about to end, because an agent without a connection kills them.
        """
        agent.ended = True
        agent.end()
        if self.agents.get(agent.name) is not agent:
            return
        del self.agents[agent.name]
        cause = f"the agent on host {agent.name} is lost: {why}"
        if self._places is not None:
            self._locations.lose(self._places.lose(agent.name))
        lost = self._running.on([agent.name])
        for member in lost:
            del self._running[member]
            self._checks.forget(member)
        self._events.append(Said(None, cause))
        self._events += self._checks.lose(agent.name)
        self._events += causes_first(
            ProcessExited(lost_member, _KILLED, cause=cause) for lost_member in lost
        )

    def has_joined(self) -> bool:
        return any(sweep.joined for sweep in self._swept.values())

    def sweep(self) -> None:
        for agent in self.agents.values():
            agent.send(Sweep())
        deadline = time.monotonic() + _SWEEP
        while set(self.agents) - set(self._swept) and time.monotonic() < deadline:
            for key, _ in self.selector.select(_LOOK):
                key.data()
            self._take()

    def close(self) -> None:
        if self._hub is not None:
            self._hub.close()
        self.stop_agents()
        self.selector.unregister(self._waker)
        self._waker.close()
        self._logs.close()
        if self._guard is not None:
            dismiss_guard(self._guard)

    def left_behind(self) -> list[str]:
        return [
            f"{process} on host {name}"
            for name, sweep in self._swept.items()
            for process in sweep.left_behind
        ]
