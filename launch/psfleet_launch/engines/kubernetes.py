"""The engine of a Kubernetes cluster: the user's kubectl creates the objects of a job and watches their pods.

Kubernetes starts, places and restarts the processes itself, one per container. The supervisor hears of that
and comes to the same decisions, for both have the same limits. With `--render` the files are only written.
"""

import contextlib
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import click

from psfleet.errors import ConfigError
from psfleet.settings.declaration import setting
from psfleet_launch.engines.launch_engine import Engine, Told
from psfleet_launch.engines.remote.kubectl import Kubectl, KubectlStream, Objects
from psfleet_launch.engines.remote.kubernetes_files import SECRETS, secrets_of, write_files
from psfleet_launch.engines.remote.kubernetes_objects import (
    LOG_VOLUME,
    Manifest,
    endpoints,
    manifests,
)
from psfleet_launch.engines.remote.pod_states import Change, PodLog, PodStates
from psfleet_launch.engines.remote.startup_signals import interruptible
from psfleet_launch.job.job_plan import Job, Member
from psfleet_launch.job.job_request import JobRequest, Launch
from psfleet_launch.job.member_logs import MemberLogs
from psfleet_launch.supervision.job_events import (
    Event,
    Output,
    ProcessExited,
    Said,
    ServerReady,
    Shown,
    causes_first,
)
from psfleet_launch.supervision.job_phases import Timeouts

__all__ = ["ENGINE", "KubernetesEngine", "KubernetesSettings"]

_LOOK = 0.25  # seconds between looks at what is due
_LAST_WORDS = (
    60.0  # seconds that an exit waits for the end of the log, which comes late where a node is lost
)
_PODS_SAY = 10.0  # seconds that the end of a Job waits for what its pods say
_AGAIN = 2.0  # seconds until kubectl is started again
_PATIENCE = "--timeout=2m"  # of kubectl with a deletion
_STOPPED = -15
_WATCH = ("--watch", "--output-watch-events", "--output=json")


@dataclass(frozen=True, eq=False)
class _Exit:
    """An exit that is told at `due`, if `is_known` as soon as the log of the process is complete."""

    exited: ProcessExited
    due: float
    is_known: bool = True


@dataclass(eq=False)
class _Reader:
    """Takes a log from kubectl, which begins with its first byte each time that it is started.

    Attributes:
        known: Bytes that were taken.
        position: Bytes that have come since the last start.
    """

    log: PodLog
    known: int = 0
    position: int = 0

    def fresh(self, data: bytes) -> bytes:
        """The bytes of a piece that have not come before."""
        fresh = data[max(0, self.known - self.position) :]
        self.position += len(data)
        self.known = max(self.known, self.position)
        return fresh


@dataclass(frozen=True)
class KubernetesSettings:
    """What the engine asks for."""

    render: str = setting(
        "",
        "Engine kubernetes: write the files of the job to this folder, and do not run it",
        names="--render",
        metavar="FOLDER",
    )
    image: str = setting(
        "",
        "Engine kubernetes: image with psfleet and the script",
        names="--image engine.kubernetes.image",
    )
    storage_class: str = setting(
        "",
        "Engine kubernetes: storage class of the servers' logs; by default that of the cluster",
        names="--storage-class engine.kubernetes.storage_class",
        metavar="NAME",
    )
    volume_size: str = setting(
        "20Gi",
        "Engine kubernetes: size of the volume of each server's log, with `--jobset` of all servers",
        names="--volume-size engine.kubernetes.volume_size",
        metavar="SIZE",
    )
    jobset: bool = setting(
        False,
        "Engine kubernetes: one JobSet in place of a StatefulSet and a Job",
        names="--jobset engine.kubernetes.jobset",
    )
    kubectl_options: tuple[str, ...] = setting(
        (),
        "Engine kubernetes: arguments for `kubectl`, as in --context=lab,--namespace=ml",
        names="--kubectl-options engine.kubernetes.options",
        metavar="OPTION,...",
    )


class KubernetesEngine(Engine):
    """Holds the kubectl processes that watch a job and read its logs."""

    name = "kubernetes"
    settings = KubernetesSettings
    programs = ("kubectl",)
    timeouts: ClassVar[Timeouts] = Timeouts(leave=30.0, grace=60.0)
    spans_machines = True
    reaches_servers = False

    def __init__(
        self, job: Job, selector: selectors.BaseSelector, launch: Launch | None = None
    ) -> None:
        super().__init__(job, selector, launch)
        self._said = self.launch.of(KubernetesSettings)
        self._files = manifests(job.request, job.name, self.launch, self._said)
        self._kubectl = Kubectl(self._said.kubectl_options, selector)
        self._pods = PodStates(
            job.name, [*job.servers, *job.workers], keeps_log=job.request.keeps_log
        )
        self._logs = MemberLogs(job)
        self._spawned: set[Member] = set()
        self._events: list[Event | Shown] = []
        self._exits: list[_Exit] = []
        self._streams: dict[KubectlStream, Member | None] = {}  # whose log it is, if it is one
        self._again: list[tuple[float, Callable[[], None]]] = []
        self._deletion: subprocess.Popen[bytes] | None = None

    @classmethod
    def hand_over(
        cls, request: JobRequest, name: str, launch: Launch, words: Sequence[str]
    ) -> int | None:
        said = launch.of(KubernetesSettings)
        files = manifests(request, name, launch, said)
        if not said.render:
            return None
        if not launch.dry_run:
            from psfleet.wire.certificates import make_credentials  # loads cryptography

            with tempfile.TemporaryDirectory(prefix="psfleet-") as parent:
                secrets = secrets_of(name, make_credentials(Path(parent) / "tls"))
            write_files(Path(said.render), {**files, SECRETS: secrets})
        click.echo("\n".join(f"{said.render}/{file}" for file in sorted([*files, SECRETS])))
        return 0

    # -- the objects of the job ------------------------------------------------------------------

    @property
    def _folder(self) -> Path:
        return self.job.folder / "objects"

    @property
    def _selector(self) -> str:
        """The option that selects the objects of the job."""
        return f"--selector=psfleet.job={self.job.name}"

    @property
    def _kinds(self) -> str:
        """What a job of this name would have in the cluster, also in part."""
        return "statefulsets,jobs,persistentvolumeclaims" + ",jobsets" * self._said.jobset

    def open(self) -> None:
        name = self.job.name
        found = self._kubectl.ask("get", self._kinds, self._selector, "--output=name").split()
        if found:
            raise ConfigError(
                f"job {name!r} is in the cluster already: {', '.join(found)}; choose another --job, or run "
                f"kubectl delete {self._kinds} {self._selector}"
            )
        self._logs.open_all()
        write_files(self._folder, {**self._files, SECRETS: secrets_of(name, self.job.credentials)})
        with interruptible():
            try:
                self._kubectl.ask("create", f"--filename={self._folder}")
            except BaseException:
                self.sweep()
                raise
        self._watch("pods")
        self._watch("events")

    def placement(self) -> Mapping[str, Sequence[Member]]:
        return {"kubernetes": [*self.job.servers, *self.job.workers]}

    def endpoints(self) -> list[str]:
        return endpoints(self.job.request, self.job.name, self._said)

    def host(self, member: Member) -> str:
        return self._pods.hosts.get(member, "none")

    def has_joined(self) -> bool:
        return True  # nobody here can tell

    def spawn(self, member: Member, told: Told) -> None:
        """Tell of a member from now on. Kubernetes starts it by itself, also again."""
        self._spawned.add(member)

    def expect(self, member: Member) -> None:
        """Do nothing: only standbys need it, and this engine refuses them."""

    def order(self, member: Member, line: str) -> None:
        """Do nothing: only standbys need it, and this engine refuses them."""

    def send(self, member: Member, number: int) -> None:
        """Delete the job: whoever ends one of its processes ends all of them."""
        self._delete()
        if number == signal.SIGKILL:
            with contextlib.suppress(ConfigError):
                now = ("--grace-period=1", "--wait=false")
                self._kubectl.ask("delete", "pods", self._selector, *now)

    def _delete(self) -> None:
        """Begin to delete all that was created, but for volumes."""
        if self._deletion is None:
            self._pods.is_stopping = True
            ours = sorted({*self._files, SECRETS} - {LOG_VOLUME})
            files = [f"--filename={self._folder / one}" for one in ours]
            words = ("delete", "--ignore-not-found", "--cascade=foreground", _PATIENCE, *files)
            with (self.job.folder / "deletion").open("wb") as log:
                self._deletion = self._kubectl.start(log, *words)

    def sweep(self) -> None:
        self._delete()
        assert self._deletion is not None
        if self._deletion.wait():
            said = (self.job.folder / "deletion").read_text(errors="replace")
            print(
                f"the job may still be in the cluster ({said.strip()}); delete it: "
                f"kubectl delete {self._kinds},services,secrets,networkpolicies,pdb {self._selector}",
                file=sys.stderr,
            )

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._logs.close()

    def left_behind(self) -> list[str]:
        return []  # `sweep` has said it

    # -- what happens ----------------------------------------------------------------------------

    @property
    def pause(self) -> float:
        return _LOOK

    def events(self) -> list[Event | Shown]:
        now = time.monotonic()
        again = [start for due, start in self._again if due <= now]
        self._again = [one for one in self._again if one[0] > now]
        for start in again:
            start()
        told = [*self._told(now)]
        self._exits = [one for one in self._exits if one not in told]
        happened, self._events = self._events, []
        return [*happened, *causes_first(one.exited for one in told), *self._gone()]

    def _told(self, now: float) -> Iterator[_Exit]:
        """The exits to tell of now, in their order: one for each time that a member was spawned."""
        for one in self._exits:
            if one.exited.member not in self._spawned:
                continue
            is_read = one.is_known and one.exited.member not in self._streams.values()
            if is_read or one.due <= now:
                self._spawned.discard(one.exited.member)
                yield one
            elif one.is_known:
                return

    def _gone(self) -> list[ProcessExited]:
        """When all is deleted, everybody has ended, also who never had a pod."""
        if self._deletion is None or self._deletion.poll() is None:
            return []
        return [ProcessExited(member, _STOPPED) for member in sorted(self._spawned)]

    def _watch(self, kind: str) -> None:
        words = ["get", kind, *_WATCH, self._selector if kind == "pods" else "--watch-only"]
        take, end = partial(self._read, kind, Objects()), partial(self._lose_watch, kind)
        self._streams[self._kubectl.follow(words, take, end)] = None

    def _lose_watch(self, kind: str, stream: KubectlStream, code: int, complaint: str) -> None:
        """A watch has ended, as each does after a while."""
        del self._streams[stream]
        self._try_again(partial(self._watch, kind))
        if code and kind == "pods":
            self._take(self._pods.disconnect(complaint))

    def _try_again(self, start: Callable[[], None]) -> None:
        self._again.append((time.monotonic() + _AGAIN, start))

    def _read(self, kind: str, objects: Objects, data: bytes) -> None:
        for found in objects.feed(data):
            if kind == "pods":
                self._take(self._pods.update(found["type"], found["object"]))
            else:
                self._warn(found["object"])

    def _warn(self, event: Manifest) -> None:
        """Say it. If it is the end of a Job, wait a moment for what its pods say of that."""
        text, is_end = self._pods.warn(event)
        if text:
            self._events.append(Said(None, text))
        if is_end:
            due = time.monotonic() + _PODS_SAY
            self._exits += [_Exit(one, due, is_known=False) for one in self._pods.lose(text)]

    def _take(self, changes: Iterable[Change]) -> None:
        for change in changes:
            match change:
                case PodLog():
                    self._read_log(_Reader(change))
                case ProcessExited():
                    self._exits.append(_Exit(change, time.monotonic() + _LAST_WORDS))
                case ServerReady(member):
                    self._events.append(ServerReady(member, self.endpoints()[member.rank]))
                case Said(member, text):
                    if member is not None:  # a report quotes its log
                        self._logs.write(member, f"{text}\n".encode())
                    self._events.append(change)

    # -- logs ------------------------------------------------------------------------------------

    def _read_log(self, reader: _Reader) -> None:
        log, reader.position = reader.log, 0
        words = ("logs", "--previous" if log.previous else "--follow", log.pod)
        take, end = partial(self._note, reader), partial(self._end_log, reader)
        self._streams[self._kubectl.follow(words, take, end)] = log.member

    def _note(self, reader: _Reader, data: bytes) -> None:
        """Write what a member has written to its log, and show that of the one that is shown."""
        fresh, member = reader.fresh(data), reader.log.member
        if complaint := self._logs.write(member, fresh):
            self._events.append(Said(None, complaint))
        if member == self.job.shown:
            self._events.append(Output(fresh, is_error=False))

    def _end_log(self, reader: _Reader, stream: KubectlStream, code: int, complaint: str) -> None:
        """Read on if the container has not ended: the cluster ends such a connection after some hours."""
        del self._streams[stream]
        if not self._pods.is_complete(reader.log):
            self._try_again(partial(self._read_log, reader))


ENGINE = KubernetesEngine
