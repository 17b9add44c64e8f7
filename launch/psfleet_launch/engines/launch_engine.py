"""Interface of an engine. An engine runs the processes of one job on one kind of machines, such as a Slurm
cluster.

An engine starts and signals processes, and reports when they are ready or have ended. It does not know about
restarts, takeovers or failures: the supervisor decides about these, and the job runner calls the engine.

To write an engine, add a module to this package that assigns its class to the name ENGINE. `--engine`
accepts the module's name. The module declares the engine's own settings with `setting()`:

    @dataclass(frozen=True)
    class MySettings:
        hosts: tuple[str, ...] = setting((), "Engine mine: machines", names="--my-hosts engine.mine.hosts")

    class MyEngine(Engine):
        settings = MySettings        # self.launch.of(MySettings).hosts has the user's value

The launcher's help lists the settings of all engines and imports all their modules. So import slow packages
such as gRPC within functions.

The job runner calls `open` once, then `spawn`, `send`, `command`, `expect` and `events` in any order, then
`sweep`, `close` and `left_behind`. All calls are made in the main thread, and only `open`, `sweep` and
`close` may block. To wait for a socket or pipe, an engine registers it with the selector, with a function
as `data`. The runner calls this function, without arguments, when there is something to read.
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
    """Settings of an engine without settings of its own."""


class Engine(abc.ABC):
    """Base class of engines. An engine runs and watches the processes of one job.

    Attributes:
        name: Name for `--engine`, which is the name of the module.
        settings: Dataclass with the engine's settings (psfleet.core.base.settings.declaration).
        programs: Programs that the engine needs on the launcher's machine.
        timeouts: Time limits of a job's phases on this kind of machines.
        spans_machines: True if the job may run on several machines, so that servers must listen on TCP.
        selector: Selector of the runner. The engine registers the sockets and pipes that it reads.
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
        """Submit the job to a batch queue or platform, and wait for its end. Other engines return None at
        once.

        With `launch.dry_run` nothing is submitted.

        Args:
            words: Arguments of this `psfleet-launch`, for the launcher that runs in the queue.

        Returns:
            Exit code of the job, or None if this launcher must run the job itself.

        Raises:
            ConfigError: The queue or platform refuses the job.
        """
        return None

    @classmethod
    def is_requeued(cls) -> bool:
        """Return whether a batch queue or platform has restarted this job, so that it must resume."""
        return False

    @abc.abstractmethod
    def open(self) -> None:
        """Connect to the machines and open the logs. Must not start members.

        Raises:
            ConfigError: A job with these settings cannot run here.
        """

    @abc.abstractmethod
    def placement(self) -> Mapping[str, Sequence[Member]]:
        """Return the members that each machine will run. The result is the same before and after `open`.

        Raises:
            ConfigError: A job with these settings cannot run here.
        """

    def endpoints(self) -> list[str]:
        """Return the endpoint that each server should listen on, in order of rank. Port 0 means any free
        port."""
        return [self.asked_endpoint(member.rank) for member in self.job.servers]

    @abc.abstractmethod
    def asked_endpoint(self, rank: int) -> str:
        """Return the endpoint that the server of this rank should listen on. Works for servers to be added
        too."""

    @abc.abstractmethod
    def spawn(self, member: Member, told: Told) -> None:
        """Start a process for a member. An earlier process of the member must have ended.

        The process's output is written to `job.log(member)` on the launcher's machine. When a server is
        ready, `events` returns ServerReady.
        """

    @abc.abstractmethod
    def send(self, member: Member, number: int) -> None:
        """Send a signal to a member's process and its children, unless the process has ended."""

    @abc.abstractmethod
    def command(self, member: Member, line: str) -> None:
        """Write a line to the standard input of a server. Do nothing if the server has died."""

    @abc.abstractmethod
    def expect(self, member: Member) -> None:
        """Report a server that was ready once more when it is ready again, for example after a takeover."""

    @abc.abstractmethod
    def forget(self, member: Member) -> None:
        """Remove a member from the placement, because it no longer belongs to the job. Its process may
        still run.

        A later member with the same name may run on another machine.
        """

    @abc.abstractmethod
    def share(self) -> None:
        """Copy the request files in the folder of the job's logs to machines that do not share this
        folder."""

    def kill_machine(self, member: Member) -> None:
        """Kill all processes on the machine of a member, as a power failure would. Used by `--chaos`."""
        raise AssertionError(f"engine {self.name} has one machine")

    @abc.abstractmethod
    def events(self) -> list[Event | Shown]:
        """Return the events since the last call.

        - ServerReady, once for every `spawn` of a server and every `expect`.
        - ProcessExited, once for every `spawn`. If several processes have ended, the likeliest cause comes
          first.
        - LivenessSignal, ProcessEnding and Said of servers.
        - Output of `job.shown` (worker 0). Output of other members is written to their logs only.
        """

    @property
    @abc.abstractmethod
    def pause(self) -> float:
        """Return the seconds after which to call `events` although no registered file is readable.

        Infinity if the engine does not need this.
        """

    @abc.abstractmethod
    def host(self, member: Member) -> str:
        """Return the name of the member's machine, for messages."""

    @abc.abstractmethod
    def has_joined(self) -> bool:
        """Return whether any worker has joined the fleet."""

    @abc.abstractmethod
    def sweep(self) -> None:
        """Kill every process of the job, including children that these have started."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release all resources. Called after `sweep` and the last `events`, or after an error in `open`."""

    @abc.abstractmethod
    def left_behind(self) -> list[str]:
        """Return descriptions of processes of the job that are still running after `close`. Normally none."""

    def last_snapshot(self) -> str:
        """Return the path or URL of the job's last complete snapshot, or "" if there is none."""
        return latest_snapshot(self.job.snapshots)


def load_engine(name: str) -> type[Engine]:
    """Return the class of an engine, by the engine's name.

    Raises:
        ConfigError: No engine has this name.
    """
    names = _names()
    if name not in names:
        raise ConfigError(f"--engine is {name!r}; it must be one of {', '.join(names)}")
    children_without_grpc()  # before the engine's module, which may import gRPC
    return _load(name)


class EngineSettings:
    """Settings of all engines as one group, for help texts and job files."""

    @staticmethod
    def settings() -> list[Setting]:
        """Return the settings of all engines. A setting that several engines inherit is included once."""
        return list(
            dict.fromkeys(
                setting for name in _names() for setting in settings_of(_load(name).settings)
            )
        )

    @staticmethod
    def engines_with(name: str) -> list[str]:
        """Return the names of the engines that have a setting, by the setting's name."""
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
