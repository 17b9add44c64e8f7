"""Interface of an engine, which runs the processes of one job on some kind of machines.

An engine starts and signals processes, and reports when they are ready or have ended. It knows nothing of
restarts, takeovers or failures: the supervisor decides about them, and the job runner tells the engine. Open
this file to write an engine. It is one module of this package, which names its class ENGINE; `--engine` takes
the module's name.

The module also declares what the engine asks of the user in addition to the job, with `setting()`:

    @dataclass(frozen=True)
    class MySettings:
        hosts: tuple[str, ...] = setting((), "Engine mine: machines", names="--my-hosts engine.mine.hosts")

    class MyEngine(Engine):
        settings = MySettings        # self.launch.of(MySettings).hosts has the user's value

The launcher's help lists the settings of all engines, so it imports all their modules. Import slow packages
such as gRPC within functions.

The runner calls `open` once, then `spawn`, `send`, `command`, `expect` and `events` in any order, then
`sweep`, `close` and `left_behind`, all in the main thread. Files that an engine waits for, such as sockets
of agents or pipes of processes, are registered with the selector, with a function without arguments as
`data`; the runner calls it when there is something to read. Only `open`, `sweep` and `close` may block.
"""

import abc
import importlib
import pkgutil
import selectors
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.object_store import latest_snapshot
from psfleet.core.base.settings.declaration import Setting, settings_of
from psfleet_launch import engines
from psfleet_launch.job.job_plan import Job, Member, Told
from psfleet_launch.job.job_request import JobRequest, Launch
from psfleet_launch.job.spawn import children_without_grpc
from psfleet_launch.supervision.job_events import Event, Shown, Timeouts


@dataclass(frozen=True)
class NoSettings:
    """Settings of an engine that asks the user for nothing in addition to the job."""


class Engine(abc.ABC):
    """Runs and watches the processes of one job.

    Attributes:
        name: Name for `--engine`, that of the module.
        settings: Dataclass with the engine's settings; see psfleet.core.base.settings.declaration.
        programs: Programs that the engine calls on the launcher's machine.
        timeouts: Time limits of a job's phases on this kind of machines.
        spans_machines: True if workers may run on other machines than servers, which then listen on TCP.
        job: The job.
        selector: Selector of the runner, with which the engine registers the files that it reads.
        launch: The user's settings of the launch.
    """

    name: ClassVar[str]
    settings: ClassVar[type] = NoSettings
    programs: ClassVar[Sequence[str]] = ()
    timeouts: ClassVar[Timeouts] = Timeouts()
    spans_machines: ClassVar[bool] = False

    def __init__(
        self, job: Job, selector: selectors.BaseSelector, launch: Launch | None = None
    ) -> None:
        self.job = job
        self.selector = selector
        self.launch = launch or Launch()

    @classmethod
    def hand_over(
        cls, request: JobRequest, name: str, launch: Launch, words: Sequence[str]
    ) -> int | None:
        """Have a batch queue or platform run the whole job and wait for it, if the engine is for one.

        With `launch.dry_run` nothing is handed over.

        Args:
            request: Job to run.
            name: Name of the job.
            launch: Settings of the launch.
            words: Arguments of this `psfleet-launch`, for the launcher that runs in the queue.

        Returns:
            Exit code of the job, or None if this launcher is to run the job itself.

        Raises:
            ConfigError: The queue or platform refuses the job.
        """
        return None

    @classmethod
    def is_requeued(cls) -> bool:
        """Return whether the job has run before and was restarted from outside, such as by a batch queue."""
        return False

    @abc.abstractmethod
    def open(self) -> None:
        """Connect to the machines and open the logs. No member has been started when this raises.

        Raises:
            ConfigError: The job cannot run here as it is asked for.
        """

    @abc.abstractmethod
    def placement(self) -> Mapping[str, Sequence[Member]]:
        """Return the members that each machine is going to run; the same before and after `open`.

        Raises:
            ConfigError: The job cannot run here as it is asked for.
        """

    def endpoints(self) -> list[str]:
        """Return the requested endpoints of the servers, in order of rank; port 0 stands for any."""
        return [self.asked_endpoint(member.rank) for member in self.job.servers]

    @abc.abstractmethod
    def asked_endpoint(self, rank: int) -> str:
        """Return the endpoint on which the server of this rank is asked to listen, also for a new server."""

    @abc.abstractmethod
    def spawn(self, member: Member, told: Told) -> None:
        """Start a process for a member. An earlier process of the member must have ended.

        The process's output goes to `job.log(member)` on the launcher's machine. For a server, `events`
        reports when it is ready, as after `expect`.
        """

    @abc.abstractmethod
    def send(self, member: Member, number: int) -> None:
        """Send a signal to a member's process and its children, unless it has ended."""

    @abc.abstractmethod
    def command(self, member: Member, line: str) -> None:
        """Write a line to the standard input of a server; do nothing if it has died."""

    @abc.abstractmethod
    def expect(self, member: Member) -> None:
        """Forget that a server was ready, and report it when it is ready again, as after a takeover."""

    @abc.abstractmethod
    def forget(self, member: Member) -> None:
        """Free the place of a member that was removed from the job. Its process may still run.

        A later member with the same name may be placed elsewhere.
        """

    @abc.abstractmethod
    def share(self) -> None:
        """Copy the request files in the folder of the job's logs to machines that do not share that
        folder."""

    def kill_machine(self, member: Member) -> None:
        """Kill everything on the machine of a member, as if it lost power. For chaos with several
        machines."""
        raise AssertionError(f"engine {self.name} has one machine")

    @abc.abstractmethod
    def events(self) -> list[Event | Shown]:
        """Return the events since the last call.

        - ServerReady, once for every `spawn` of a server and every `expect`,
        - ProcessExited, once for every `spawn`; of several, the likeliest cause comes first,
        - LivenessSignal, ProcessEnding and Said of servers,
        - Output of `job.shown`; other members' output goes to their logs only.
        """

    @property
    @abc.abstractmethod
    def pause(self) -> float:
        """Seconds after which to call `events` even if the selector did not wake. Infinity if not needed."""

    @abc.abstractmethod
    def host(self, member: Member) -> str:
        """Return the name of the member's machine, for people."""

    @abc.abstractmethod
    def has_joined(self) -> bool:
        """Return whether any worker has joined the fleet."""

    @abc.abstractmethod
    def sweep(self) -> None:
        """Kill every process of the job, and every process that these have started."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release all resources, after `sweep` and the last `events`, or after `open` has raised."""

    @abc.abstractmethod
    def left_behind(self) -> list[str]:
        """Return descriptions of the job's processes that still run after `close`. Normally there are
        none."""

    def last_snapshot(self) -> str:
        """Return the path or URL of the job's last complete snapshot, or "" if there is none."""
        return latest_snapshot(self.job.snapshots)


def load_engine(name: str) -> type[Engine]:
    """Return the class of the engine of this name.

    Raises:
        ConfigError: No engine has this name.
    """
    names = _names()
    if name not in names:
        raise ConfigError(f"--engine is {name!r}; it must be one of {', '.join(names)}")
    children_without_grpc()  # before the engine's module, which may import gRPC
    return _load(name)


class EngineSettings:
    """Settings of all engines, as one group for help texts and job files."""

    @staticmethod
    def settings() -> list[Setting]:
        """Return the settings of all engines. A setting that engines inherit from a common base is there
        once."""
        return list(
            dict.fromkeys(
                setting for name in _names() for setting in settings_of(_load(name).settings)
            )
        )

    @staticmethod
    def engines_with(name: str) -> list[str]:
        """Return the names of the engines that have the setting of this name."""
        return [
            engine
            for engine in _names()
            if name in (setting.name for setting in settings_of(_load(engine).settings))
        ]


def _names() -> list[str]:
    modules = [module.name for module in pkgutil.iter_modules(engines.__path__) if not module.ispkg]
    return sorted({*modules} - {"launch_engine"})


def _load(name: str) -> type[Engine]:
    engine: type[Engine] = importlib.import_module(f"{engines.__name__}.{name}").ENGINE
    return engine
