"""Interface of an engine: it runs the processes of one job on some machines.

The supervisor decides and the runner performs; an engine is their hands and eyes. It starts and signals
processes and reports what becomes of them, and knows nothing of restarts, takeovers or failures. One
engine is one module of this package, which names its class ENGINE; `--engine` takes the module's name.

An engine declares there too what it asks of the user beside the job, with `setting()` as everywhere:

    @dataclass(frozen=True)
    class MySettings:
        hosts: tuple[str, ...] = setting((), "Engine mine: machines", names="--my-hosts engine.mine.hosts")

    class MyEngine(Engine):
        settings = MySettings        # and self.launch.of(MySettings).hosts says what was given

The launcher's help and job files know the settings of all engines, so their modules load gRPC and the
like within functions.

The order of calls: `open` once, then `spawn`, `send`, `command`, `expect` and `events` as the job goes, then
`sweep`, `close` and `left_behind`. What an engine waits for, such as sockets of agents or pipes of
processes, it registers with the selector, with a function without arguments as `data`; the runner calls
that when there is something to read. Only `open`, `sweep` and `close` may take their time.
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
    """An engine asks for nothing beside the job."""


class Engine(abc.ABC):
    """The processes of one job.

    Attributes:
        settings: Settings of the engine beside those of the job, a dataclass; see
            psfleet.core.base.settings.declaration.
        programs: Programs that it calls on the launcher's machine.
        spans_machines: Servers listen on TCP, since workers run on other machines.
        selector: Woken by what the engine registers.
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
        """Have a batch queue or a platform run the job; return the exit code. None: it runs here.

        With `launch.dry_run` nothing is handed over.

        Raises:
            ConfigError: It is refused.
        """
        return None

    @classmethod
    def is_requeued(cls) -> bool:
        """Return whether the job has run before and was restarted from outside, such as by a batch queue."""
        return False

    @abc.abstractmethod
    def open(self) -> None:
        """Get hold of machines and make room for logs. Nothing has started if this raises.

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
        """Return the requested endpoint of one of them, or of a further server."""

    @abc.abstractmethod
    def spawn(self, member: Member, told: Told) -> None:
        """Start a process for a member; one that was there before has ended.

        Its output goes to `job.log(member)` on the launcher's machine. A server is looked at until it is
        ready, see `expect`.
        """

    @abc.abstractmethod
    def send(self, member: Member, number: int) -> None:
        """Send a signal to a member's process and its children, unless it has ended."""

    @abc.abstractmethod
    def command(self, member: Member, line: str) -> None:
        """Write a line to the standard input of a server; do nothing if it has died."""

    @abc.abstractmethod
    def expect(self, member: Member) -> None:
        """Forget that a server was ready: what it writes from now on counts, as after a takeover."""

    @abc.abstractmethod
    def forget(self, member: Member) -> None:
        """The job has this member no more; it may still run, and another one may get its seat later."""

    @abc.abstractmethod
    def share(self) -> None:
        """Let all machines have what was written for servers in the folder of the job's logs."""

    def kill_machine(self, member: Member) -> None:
        """Let the machine of a member be lost with all that it runs; only where `placement` names several."""
        raise AssertionError(f"engine {self.name} has one machine")

    @abc.abstractmethod
    def events(self) -> list[Event | Shown]:
        """Return the events since the last call.

        Ready, once for every `spawn` of a server and every `expect`; Exited, once for every `spawn`, the
        likeliest cause first; LivenessSignal, ProcessEnding and Said of servers; Output of `job.shown` alone.
        """

    @property
    @abc.abstractmethod
    def pause(self) -> float:
        """Seconds after which `events` may have something that wakes no selector; inf: never."""

    @abc.abstractmethod
    def host(self, member: Member) -> str:
        """The machine of a member, for people."""

    @abc.abstractmethod
    def has_joined(self) -> bool:
        """Return whether any worker has joined the fleet."""

    @abc.abstractmethod
    def sweep(self) -> None:
        """Kill every process of the job, and of those that they have started."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of everything, after `sweep` and the last `events`, or if `open` has raised."""

    @abc.abstractmethod
    def left_behind(self) -> list[str]:
        """Processes of the job that are still there after `close`: none, if all is well."""

    def last_snapshot(self) -> str:
        """The job's last complete snapshot, as servers can open it; empty: there is none."""
        return latest_snapshot(self.job.snapshots)


def load_engine(name: str) -> type[Engine]:
    """The engine of this name.

    Raises:
        ConfigError: There is none.
    """
    names = _names()
    if name not in names:
        raise ConfigError(f"--engine is {name!r}; it must be one of {', '.join(names)}")
    children_without_grpc()  # an engine may load gRPC
    return _load(name)


class EngineSettings:
    """Settings of all engines, as one group."""

    @staticmethod
    def settings() -> list[Setting]:
        """Each once, also if several engines have it of one base."""
        return list(
            dict.fromkeys(one for name in _names() for one in settings_of(_load(name).settings))
        )

    @staticmethod
    def engines_with(name: str) -> list[str]:
        """The engines that have the setting of this name."""
        return [
            engine
            for engine in _names()
            if name in (one.name for one in settings_of(_load(engine).settings))
        ]


def _names() -> list[str]:
    modules = [module.name for module in pkgutil.iter_modules(engines.__path__) if not module.ispkg]
    return sorted({*modules} - {"launch_engine"})


def _load(name: str) -> type[Engine]:
    engine: type[Engine] = importlib.import_module(f"{engines.__name__}.{name}").ENGINE
    return engine
