"""What becomes of the pods of a job: updates of the cluster in, events of the job out.

Pure: no process, no clock. Updates are what `kubectl get --watch --output-watch-events` writes. A container
that Kubernetes starts again in the same pod, and a pod in the place of another one, are lives of one seat.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from psfleet_launch.engines.remote.kubernetes_objects import Manifest, member_of
from psfleet_launch.job.exit_codes import USAGE_EXIT
from psfleet_launch.job.job_plan import Member
from psfleet_launch.supervision.job_events import ProcessExited, Said, ServerReady

__all__ = ["TRIES", "Change", "PodLog", "PodStates"]

TRIES = 30
"""Watches that fail, one after the other, until the job counts as lost."""
_KILLED, _STOPPED, _SIGNALS = -9, -15, 128
_NO_IMAGE = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_TRANSIENT = ("ContainerCreating", "PodInitializing", "CrashLoopBackOff")
_WARNINGS = (
    "FailedAttachVolume",
    "FailedCreate",
    "FailedCreatePodSandBox",
    "FailedMount",
    "NodeNotReady",
    "ProvisioningFailed",
)
"""Reasons of events whose cause no pod shows."""
_GIVEN_UP = (
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
)
"""Reasons for which a Job fails."""


@dataclass(frozen=True)
class PodLog:
    """A container has a log to be read.

    Attributes:
        uid: Of the pod; another one may have the same name.
        previous: It is that of the container's life before this one.
    """

    member: Member
    pod: str
    uid: str
    life: int
    previous: bool


Change = ProcessExited | Said | ServerReady | PodLog


@dataclass
class _PodSeat:
    """The newest pod of a seat; its lives are counted from 0.

    Attributes:
        logged: The last life whose log was asked for.
        ready: The last life that was ready.
        ended: The last life that has ended.
        said: What was said of its waiting.
        past: Earlier pods of the seat.
    """

    uid: str = ""
    life: int = 0
    logged: int = -1
    ready: int = -1
    ended: int = -1
    said: set[str] = field(default_factory=set)
    past: set[str] = field(default_factory=set)


class PodStates:
    """What is known of the pods of a job.

    Args:
        name: Of the job.
        members: All seats.
        keeps_log: Servers go on from their logs, so evictions cost them nothing.

    Attributes:
        hosts: The node of each seat.
        is_stopping: The job is being deleted, so pods that vanish are no news.
    """

    def __init__(self, name: str, members: Sequence[Member], keeps_log: bool) -> None:
        self.hosts: dict[Member, str] = {}
        self.is_stopping = False
        self._name = name
        self._members = members
        self._failures = 0
        self._keeps_log = keeps_log
        self._seats: dict[Member, _PodSeat] = {}
        self._done: set[Member] = set()
        self._warned: set[tuple[str, str]] = set()

    def update(self, kind: str, pod: Manifest) -> list[Change]:
        """What has happened to a pod; `kind` is ADDED, MODIFIED or DELETED."""
        self._failures = 0
        member = member_of(pod)
        if member is None:
            return []
        uid, seat = pod["metadata"]["uid"], self._seats.get(member)
        if seat is not None and uid in seat.past:
            return []
        changes: list[Change] = []
        if seat is None or uid != seat.uid:
            changes += self._replace(member, seat)
            seat = self._seats[member] = _PodSeat(
                uid, past=seat.past | {seat.uid} if seat else set()
            )
        if node := pod["spec"].get("nodeName"):
            self.hosts[member] = node
        changes += self._look(member, seat, pod)
        if kind == "DELETED" and seat.ended < seat.life:
            changes += self._vanish(member, seat, pod)
        return [one for one in changes if not (self.is_stopping and isinstance(one, Said))]

    def is_complete(self, log: PodLog) -> bool:
        """Whether nothing more is written to a log."""
        seat = self._seats[log.member]
        return seat.uid != log.uid or seat.ended >= log.life

    def warn(self, event: Manifest) -> tuple[str, bool]:
        """What to say of an event of the cluster, once, and whether Kubernetes gives a Job up by it."""
        about, reason = event["involvedObject"], event.get("reason", "")
        is_end = about["kind"] == "Job" and reason in _GIVEN_UP
        key = (about["name"], reason)
        is_news = is_end or (reason in _WARNINGS and key not in self._warned)
        if not is_news or not key[0].startswith(f"{self._name}-"):
            return "", False
        self._warned.add(key)
        return f"{about['kind']} {key[0]}: {_reason(event)}", is_end

    def disconnect(self, complaint: str) -> list[Change]:
        """A watch has failed. Say so once; after many failures in a row the job counts as lost."""
        self._failures += 1
        if self._failures == TRIES:
            return [*self.lose(f"the cluster cannot be reached: {complaint}")]
        return [Said(None, f"kubectl: {complaint}; trying again")] if self._failures == 1 else []

    def lose(self, cause: str) -> list[ProcessExited]:
        """Nothing more will be heard of the job; those of its members that are not done count as killed."""
        lost = [member for member in self._members if member not in self._done]
        return [ProcessExited(one, _KILLED, cause=cause, is_final=True) for one in lost]

    # -- lives -----------------------------------------------------------------------------------

    def _replace(self, member: Member, seat: _PodSeat | None) -> list[Change]:
        """Another pod takes the seat. Nobody may have seen the end of the one before it."""
        if seat is None or seat.ended >= seat.life:
            return []
        return self._end(member, _KILLED, "its pod was replaced", "")

    def _look(self, member: Member, seat: _PodSeat, pod: Manifest) -> list[Change]:
        status = pod.get("status", {})
        evicted = _eviction(status)
        changes: list[Change] = []
        for container in status.get("containerStatuses", [])[:1]:
            seat.life = container.get("restartCount", 0)
            state, before = container.get("state", {}), container.get("lastState", {})
            changes += self._ended(member, seat, seat.life - 1, before, pod, evicted)
            if "running" in state or "terminated" in state:
                changes += _log(member, seat, seat.life, pod)
            changes += self._ended(member, seat, seat.life, state, pod, evicted)
            if container.get("ready") and member.role == "server" and seat.ready < seat.life:
                seat.ready = seat.life
                changes.append(ServerReady(member))
            changes += self._waits(member, seat, state.get("waiting", {}))
        if status.get("phase") == "Failed" and seat.ended < seat.life:
            seat.ended = seat.life
            why = evicted or _reason(status) or "its pod has failed"
            changes += self._end(member, _KILLED, why, evicted)
        return [*changes, *_say(member, seat, _condition(status, "PodScheduled", "False"))]

    def _ended(
        self,
        member: Member,
        seat: _PodSeat,
        life: int,
        state: Manifest,
        pod: Manifest,
        evicted: str,
    ) -> Iterator[Change]:
        """The end of a life, the first time that it is seen."""
        if "terminated" not in state or seat.ended >= life:
            return
        yield from _log(member, seat, life, pod)
        seat.ended = life
        said = state["terminated"]
        code = said.get("exitCode", 0)
        code = _SIGNALS - code if code > _SIGNALS else code
        yield from self._end(member, code, evicted or _cause(said), evicted)

    def _vanish(self, member: Member, seat: _PodSeat, pod: Manifest) -> list[Change]:
        """A pod is gone, and nothing is known of the end of its process."""
        seat.ended = seat.life
        if self.is_stopping:
            return [ProcessExited(member, _STOPPED)]
        if member.role == "server" and self._done.issuperset(self._workers()):
            return [ProcessExited(member, 0)]  # nobody needs it any more
        evicted = _eviction(pod.get("status", {}))
        return self._end(member, _KILLED, evicted or "its pod was deleted", evicted)

    def _workers(self) -> set[Member]:
        return {member for member in self._members if member.role == "worker"}

    def _end(self, member: Member, code: int, cause: str, evicted: str) -> list[Change]:
        if code == 0:
            self._done |= {member} if member.role == "worker" else set()
            return [ProcessExited(member, 0, left=member.role == "worker")]
        if evicted and not self.is_stopping and (member.role == "worker" or self._keeps_log):
            return [Said(member, f"{evicted}; Kubernetes starts it again")]
        is_final = code == USAGE_EXIT and member.role == "worker"
        return [ProcessExited(member, code, cause=cause, is_final=is_final)]

    # -- what it waits for -----------------------------------------------------------------------

    def _waits(self, member: Member, seat: _PodSeat, waiting: Manifest) -> Iterator[Change]:
        """Say once what a container waits for. An image that cannot be had at first ends the job."""
        reason = waiting.get("reason", "")
        if not reason or reason in _TRANSIENT:
            return
        if reason in _NO_IMAGE and seat.logged < 0 and not seat.past and seat.ended < seat.life:
            seat.ended = seat.life
            cause = f"its image cannot be pulled: {_reason(waiting)}"
            yield ProcessExited(member, 1, cause=cause, is_final=True)
        else:
            yield from _say(member, seat, waiting)


def _say(member: Member, seat: _PodSeat, why: Manifest) -> Iterator[Change]:
    """Say what a pod waits for, once."""
    if why and why.get("reason") not in seat.said:
        seat.said.add(why.get("reason", ""))
        yield Said(member, f"waits: {_reason(why)}")


def _log(member: Member, seat: _PodSeat, life: int, pod: Manifest) -> Iterator[Change]:
    """Have the log of a life read, once."""
    if seat.logged < life:
        seat.logged = life
        name = pod["metadata"]["name"]
        yield PodLog(member, name, seat.uid, life, previous=life < seat.life)


def _cause(terminated: Manifest) -> str:
    """Why a container has ended, where its exit code does not say it."""
    if terminated.get("reason") == "OOMKilled":
        return "the memory of its container has run out (OOMKilled)"
    return "" if terminated.get("reason") in ("Error", "Completed") else _reason(terminated)


def _eviction(status: Manifest) -> str:
    """Why Kubernetes has taken a pod off its node; empty: it has not."""
    found = _condition(status, "DisruptionTarget", "True")
    if not found and status.get("reason") != "Evicted":
        return ""
    return f"it was taken off its node: {_reason(status) or _reason(found)}"


def _condition(status: Manifest, kind: str, value: str) -> Manifest:
    for one in status.get("conditions", []):
        if one["type"] == kind and one["status"] == value:
            return dict(one)
    return {}


def _reason(said: Manifest) -> str:
    """`Reason: what it means`, in one line."""
    texts = (said.get("reason", ""), " ".join(said.get("message", "").split()))
    return ": ".join(filter(None, texts))
