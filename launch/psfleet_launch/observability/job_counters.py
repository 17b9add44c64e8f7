"""What has happened to the processes of a job, counted by its launcher."""

from collections import Counter
from typing import TYPE_CHECKING

from psfleet.observability.exposition import PREFIX
from psfleet_launch.job.job_plan import Member
from psfleet_launch.supervision.job_events import (
    Action,
    Event,
    ProcessExited,
    ReportHung,
    ServerReady,
    Shown,
    StartProcesses,
)
from psfleet_launch.supervision.standbys import PromoteStandby

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["JobCounters"]

Who = tuple[str, str]


class JobCounters:
    """Takes what the runner of a job hears and does. One thread takes, any may ask."""

    def __init__(self) -> None:
        self._alive: set[Member] = set()
        self._known: dict[Who, None] = {}  # in the order in which they came
        self._deaths: Counter[Who] = Counter()
        self._restarts: Counter[Who] = Counter()
        self._hung: Counter[Who] = Counter()
        self._died: dict[Member, float] = {}
        self._promoted: dict[Member, float] = {}  # by standby when its server had died
        self._leads: set[Member] = set()  # standbys that have taken the places of their servers
        self._takeovers: dict[str, tuple[int, float]] = {}

    def take(self, item: Event | Shown | Action, now: float) -> None:
        """Something has happened or is done, at this time in seconds."""
        match item:
            case StartProcesses(members):
                for member in members:
                    self._start(member)
            case ProcessExited(member, code):
                self._alive.discard(member)
                self._died[member] = now
                self._deaths[self._who(member)] += code != 0
            case ReportHung(member):
                self._hung[self._who(member)] += 1
            case PromoteStandby():
                self._promoted[item.member] = self._died.get(item.before, now)
                self._leads.add(item.member)
            case ServerReady(member) if member in self._promoted:
                count, seconds = self._takeovers.get(str(member.rank), (0, 0.0))
                spent = now - self._promoted.pop(member)
                self._takeovers[str(member.rank)] = count + 1, seconds + spent

    def _start(self, member: Member) -> None:
        self._restarts[self._who(member)] += member in self._died
        self._known[self._who(member)] = None
        self._alive.add(member)

    def _who(self, member: Member) -> Who:
        is_standby = member.role == "server" and member.copy >= 0 and member not in self._leads
        return ("standby" if is_standby else member.role), str(member.rank)

    def families(self) -> "list[Metric]":
        """As metrics; role and rank are those of the process that a sample is about."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            SummaryMetricFamily,
        )

        labels = ["role", "rank"]
        alive = Counter(map(self._who, [*self._alive]))
        up = GaugeMetricFamily(f"{PREFIX}process_up", "Processes that run", labels=labels)
        for who in [*self._known]:
            up.add_metric(list(who), alive[who])
        found: list[Metric] = [up]
        for name, help, counts in (
            ("deaths", "Processes that ended with an error or by a signal", self._deaths),
            ("restarts", "Processes that were started again", self._restarts),
            ("hung", "Times that a server was silent for too long", self._hung),
        ):
            family = CounterMetricFamily(PREFIX + name, help, labels=labels)
            for who in [*self._known]:
                family.add_metric(list(who), counts[who])
            found.append(family)
        took = SummaryMetricFamily(
            f"{PREFIX}takeover_seconds",
            "Time from the death of a server until its standby answered",
            labels=labels,
        )
        for rank in [rank for role, rank in [*self._known] if role == "server"]:
            count, seconds = self._takeovers.get(rank, (0, 0.0))
            took.add_metric(["server", rank], count, seconds)
        return [*found, took]
