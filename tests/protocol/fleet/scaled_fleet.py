"""A fleet that gets another number of servers while it trains: the launcher's part, and what must hold."""

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from psfleet.core.base.scaling_files import SCALE_READY, write_scale
from psfleet_launch.job.job_plan import Member
from psfleet_launch.supervision.job_events import ProcessExited, ServerReady
from psfleet_launch.supervision.scaling_requests import ScalingRequests, ScalingStep
from psfleet_server.coordinator.barriers import CollectiveReply
from psfleet_server.coordinator.coordinator_messages import Registration
from tests.protocol.fleet.calls import MoveRows, Register, Release, Request, Response
from tests.protocol.fleet.checks import check_cuts
from tests.protocol.fleet.fleet import Fleet
from tests.protocol.fleet.job import Job, Phase
from tests.protocol.fleet.kept import Start, check_log
from tests.protocol.fleet.moved_rows import check_rows
from tests.protocol.fleet.places import Place
from tests.protocol.fleet.server import Server
from tests.protocol.fleet.standby import Standby
from tests.protocol.fleet.strands import Died, scheduled
from tests.protocol.scheduler import Broken, Chances, Disk, Machine, Scheduler

_MOST = 4  # servers
_LAUNCHER = 0.2  # of the steps: the launcher looks at what there is
_READY = 0.5  # of its looks at a server that has started
_CUT = (200, 500)  # steps in which no call of other servers reaches one
_LATE = 0.02  # of the steps: a call that was lost comes nevertheless
_KILLS = 0.02  # of the steps in which rows move
_AHEAD = 0.1  # of these while rows are sent ahead, if servers have logs: any of them may die
_FATAL = 0.03  # of the deaths of servers without logs: one of the job's
_RECORD = ("append", "tear", "appended", "replay")
_IN_MOVE = 50  # times as often as within a record a server with a log dies at a point of a move
_PARTS = 0.05  # of the steps: a server that the job has no more ends


class ScaledFleet(Fleet):
    """Servers come and go, started by the product's `ScalingRequests`.

    Attributes:
        endpoints: Of the servers that are the job's.
        ended: Why the job has ended before its workers did.
    """

    def __init__(
        self, job: Job, chances: Chances, seed: object, suppressed: Iterable[int] = ()
    ) -> None:
        super().__init__(job, chances, seed, suppressed)
        self.endpoints = [place.address for place in self.places]
        self.ended = ""
        self.patience = 1000 if job.logs or job.standbys else self.patience  # there is more to do
        self._arriving: dict[int, Place] = {}  # servers that are none of the job's yet
        self._made: set[tuple[str, int]] = set()  # calls between servers
        self._late: list[tuple[str, str, Any]] = []  # calls whose callers may have given up waiting
        self._cut, self._cut_until = "", 0
        self._looks = 0
        self._acting = self._doomed = ""
        self._leaving: list[Place] = []  # of servers that have been told to end
        self._prepared: dict[str, Member] = {}  # standbys of the servers that there are to be
        self._next_servers = 0

    def run(self) -> None:
        shared = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
            self.folder = Path(folder)
            self._requests = ScalingRequests(
                self.folder, self._refusal, lambda rank: f"S{rank}", self._standbys_of
            )
            try:
                with scheduled(self.dies_at):
                    super().run()
            finally:
                for name in [*self.machines]:
                    self._bury(name)

    # -- machines ------------------------------------------------------------------------------

    def make(self, name: str, disk: Disk, boot: int) -> Machine:
        if name in self.workers or name in self.followers:
            return super().make(name, disk, boot)
        rank, number = map(int, name[1:].split("."))
        place = self._place_of(name)
        if place is not None and name != place.primary:
            servers = self._next_servers if name in self._prepared else len(self.endpoints)
            job, boot = replace(self.job, servers=servers), 2 * (boot + 1000 * number) + 1
            return Standby(rank, job, boot, place.attach, lambda: self._start_of(rank))
        start = self._start_of(rank)
        job = replace(self.job, servers=start.servers)
        return Server(start.environment.rank, job, disk, 2 * boot, start)

    def _start_of(self, rank: int) -> Start:
        known = [*self.endpoints, *(f"S{new}" for new in range(len(self.endpoints), rank + 1))]
        return Start(rank, known, self.folder, self.job)

    @property
    def _all_places(self) -> list[Place]:
        return [*self.places, *self._arriving.values(), *self._leaving]

    def _place_of(self, name: str) -> Place | None:
        return next((place for place in self._all_places if name in place.names), None)

    def at(self, address: str, source: str = "") -> str:
        places = self._all_places
        return next((place.primary for place in places if place.address == address), address)

    def start(self, name: str) -> None:
        """A process may end before it is ready."""
        self._acting = name
        if any(name in place.names for place in self.places):
            self._keep_servers(name)
        try:
            super().start(name)
        except Died:
            self.crash(name)

    def _keep_servers(self, name: str) -> None:
        self._take_step(self._requests.give_up(f"{name} has a new process", self.endpoints))

    def _promote(self, place: Place) -> None:
        self._keep_servers(place.standby)
        super()._promote(place)
        self.do(place.primary, Release(place.attach))  # messages of those before may be late

    def _after_cut(self) -> None:
        if self.job.logs or all(self._has_other(place.primary) for place in self.places):
            super()._after_cut()

    def _depose(self, place: Place) -> None:
        """Who is replaced has ended: one that was cut off would not have the files of this folder."""
        if self._has_other(place.primary) and self.fault(f"{place.primary} dies"):
            self.crash(place.primary)

    def do(self, name: str, event: Any) -> None:
        """A process may end at a crash point, or by itself."""
        self._acting = name
        try:
            super().do(name, event)
        except Died:
            self.crash(name)
            if self.is_calm and name in self.crashed:
                self.start(name)
        if self._doomed == name:  # it has answered, and starts again before anybody misses it
            self._doomed = ""
            self.crash(name)
            if name in self.crashed:
                self.start(name)

    def dies_at(self, point: str) -> bool:
        """Whether the process that is having its turn dies at this point; it may do so with its answer."""
        if self.is_calm or not (self.job.logs or self._has_other(self._acting)):
            return False
        after = 10 if point in ("decided", "adopted") and self.job.standbys else 1
        chance = self.chances.torn * (1 if point in _RECORD else _IN_MOVE * after)
        if self.dice.random() >= chance or not self.fault(f"{self._acting} dies at {point!r}"):
            return False
        self.counts["dead at points"] += 1
        if point in _RECORD or self.dice.random() < 0.5:
            return True
        self._doomed = self._acting
        return False

    def crash(self, name: str) -> None:
        """Without logs the death of a server that is the job's ends the job."""
        self._bury(name)
        if name in self._prepared:
            self._requests.take(ProcessExited(self._prepared[name], -9))
            self._gone(name)
            return
        if any(name == place.standby for place in self.places):
            self._keep_servers(name)
        super().crash(name)
        if name in self.workers or name in self.followers:
            return
        member = Member("server", int(name[1:].split(".")[0]))
        if any(name == place.primary for place in self._leaving):
            self._gone(name)
        elif self._requests.is_new(member):
            self._gone(name)
            self._requests.take(ProcessExited(member, -9))
        elif not self.job.logs and any(name == place.primary for place in self.places):
            self._gone(name)
            if self.job.standbys and not self.counts["fatal"]:
                raise Broken(f"{member} has died, and no process has what it had")
            self.ended = self.ended or f"{member} has ended"

    def _gone(self, name: str) -> None:
        """Nobody starts a process again, if it is one that anybody knows."""
        self._bury(name)
        self.machines.pop(name, None)
        self.crashed.discard(name)
        if name in self.names:
            self.names.remove(name)
        self._leaving = [place for place in self._leaving if place.primary != name]

    def _deliver(self, to: str, source: str, message: Any) -> None:
        """Calls between servers may be lost or late, but each is made once."""
        match message:
            case Request(number, MoveRows()):
                if (source, number) in self._made:
                    return
                if to == self._cut and self.step < self._cut_until and not self.is_calm:
                    self.lose(to, source, message)
                    return
                self._made.add((source, number))
            case Request(_, Register(boot=boot)) if self.job.logs or self.job.standbys:
                worker = self.machines.get(source)  # these runs are long, and nobody registers
                if worker is None or worker.boot != boot:  # long after death
                    return
        super()._deliver(to, source, message)

    def lose(self, to: str, source: str, message: Any) -> None:
        """A call between servers comes late, or never."""
        if isinstance(message, Request) and isinstance(message.content, MoveRows):
            self._late.append((to, source, message))

    def _bury(self, name: str) -> None:
        machine = self.machines.get(name)
        if isinstance(machine, Server) and machine.moved is not None:
            machine.moved.die()

    def may_die(self, name: str) -> bool:
        if name in self.workers:
            return self.job.deals
        is_new = any(name == place.primary for place in self._arriving.values())
        if self.job.logs or is_new or self._has_other(name) or name in self.followers:
            return True
        self.counts["fatal"] += (dies := self.dice.random() < _FATAL)
        return dies

    def _has_other(self, name: str) -> bool:
        """Whether a process has what this one has."""
        place = self._place_of(name)
        standby = self.machines.get("" if place is None else place.standby)
        return self.job.standbys and (
            name in self._prepared or (standby is not None and standby.is_ready)
        )

    # -- the launcher ----------------------------------------------------------------------------

    def _refusal(self, servers: int) -> str:
        return "" if 1 <= servers <= _MOST else f"{servers} servers are too many"

    def _one_step(self) -> None:
        if self.ended:
            return
        super()._one_step()
        if self._late and self.dice.random() < _LATE:
            self._deliver(*self._late.pop(self.dice.randrange(len(self._late))))
        self._kill_at_move()
        if self._leaving and self.dice.random() < _PARTS:
            self._gone(self._leaving[0].primary)
        if self.dice.random() < _LAUNCHER:
            self._look()

    def nudge(self, turn: int) -> None:
        super().nudge(turn)
        for place in [*self._leaving]:
            self._gone(place.primary)
        self._look()

    def _look(self) -> None:
        if self.ended or self._leaving:
            return
        for rank, place in self._arriving.items():
            if place.primary in self.machines and self.dice.random() < _READY:
                self._requests.take(ServerReady(Member("server", rank), place.address))
        self._looks += 1
        if self._requests.under_way or all(place.primary in self.machines for place in self.places):
            self._take_step(self._requests.step(self.endpoints))

    def _take_step(self, step: ScalingStep) -> None:
        if (ready := self.folder / SCALE_READY).exists():  # the clocks of files are coarse
            os.utime(ready, ns=(self._looks, self._looks))
        for member in step.start:
            self._begin(member.rank)
        for member in step.standbys:
            self._begin_standby(member)
        if step.servers is not None:
            self.counts["moves"] += 1
            self._rescale(step.endpoints)
        elif step.said:
            self.counts["given up"] += 1
        for name in [name for name, one in self._prepared.items() if one in step.given_up]:
            del self._prepared[name]
            self._gone(name)
        for member in step.end:
            if member.copy < 0:
                self._end(self._arriving[member.rank])
        for member in step.given_up:
            if member.copy < 0:
                del self._arriving[member.rank]

    def _begin(self, rank: int) -> None:
        place = self._arriving[rank] = Place(f"S{rank}", False)
        place.attach = self._looks  # above those of an earlier server of this rank
        name = place.primary
        self.names.append(name)
        self.disks[name] = self.first_disk(name)
        self.boots.setdefault(name, 0)
        self.start(name)

    def _standbys_of(self, servers: int) -> tuple[Member, ...]:
        self._next_servers = servers
        places = [*self.places, *self._arriving.values()][: servers if self.job.standbys else 0]
        copies = [place.attach + 1 for place in places]
        return tuple(Member("server", rank, copy=copy) for rank, copy in enumerate(copies))

    def _begin_standby(self, member: Member) -> None:
        place = [*self.places, *self._arriving.values()][member.rank]
        taken = {place.primary, place.standby, *self.crashed}
        name = next(one for number in range(9) if (one := f"{place.address}.{number}") not in taken)
        place.attach = member.copy
        place.names = sorted({*place.names, name})
        self._prepared[name] = member
        self.names = sorted({*self.names, name})
        self.disks[name] = self.first_disk(name)
        self.boots.setdefault(name, 0)
        Scheduler.start(self, name)

    def _rescale(self, endpoints: Sequence[str]) -> None:
        for rank in sorted(self._arriving):
            if rank < len(endpoints):
                self.places.append(self._arriving.pop(rank))
        for place in self.places if self.job.standbys else ():
            for name in sorted({*place.names} - {place.primary, *self._prepared}):
                self._gone(name)
            place.standby = next((one for one in place.names if one in self._prepared), "")
            place.names = [place.primary, place.standby]
        self._prepared.clear()
        for place in self.places[len(endpoints) :]:
            self._end(place)
        del self.places[len(endpoints) :]
        self.endpoints = [*endpoints]
        self.servers = [name for place in self.places for name in place.names]

    def _end(self, place: Place) -> None:
        """Tell a server to end, which takes it a while."""
        self._leaving.append(place)
        if place.primary not in self.machines:
            self._gone(place.primary)

    # -- faults ----------------------------------------------------------------------------------

    def random_fault(self) -> None:
        at = self.dice.random()
        if at < 0.4:
            self._ask(self.dice.randint(1, _MOST))
        elif at < 0.5 and self._arriving:
            place = self._arriving[self.dice.choice(sorted(self._arriving))]
            if place.primary in self.machines and self.fault(f"{place.primary} dies, a new one"):
                self.counts["dead new servers"] += 1
                self.crash(place.primary)
        else:
            super().random_fault()

    def _kill_at_move(self) -> None:
        """While rows move, or are about to, deaths and silence matter most."""
        home = self.machines.get(self.at(self.job.home))
        if home is None or self.dice.random() > _KILLS:
            return
        scaling = home.coordinator.scaling
        keeps = self.job.logs or self.job.standbys
        if keeps and not scaling.moving and self.dice.random() > _AHEAD:
            return
        if scaling.moving and self.step >= self._cut_until and self.dice.random() < 0.5:
            if self.fault(f"{(to := self.dice.choice(self.endpoints))} is cut off"):
                self._cut, self._cut_until = to, self.step + self.dice.randint(*_CUT)
            return
        new = [place.primary for place in self._arriving.values()] if scaling.moving else []
        old = [self.servers[0], *self.servers] if keeps else []
        old += self._prepared
        names = [*new, *old, *self.workers] if scaling.request is not None else []
        name = self.dice.choice(names) if names else ""
        if name in self.machines and self.may_die(name) and self.fault(f"{name} dies at a move"):
            self.counts["dead at moves"] += 1
            self.crash(name)
            if name in self.crashed and self.dice.random() < 0.5:
                self.start(name)  # before anybody misses it

    def _ask(self, servers: int) -> None:
        """`psfleet scale`, which may be killed before it has asked."""
        if self.fault(f"{servers} servers are wished for") and self.dice.random() < 0.9:
            write_scale(self.folder, servers)

    # -- the end ---------------------------------------------------------------------------------

    def calm(self) -> None:
        super().calm()
        if self.dice.random() < 0.5:
            self._ask(self.dice.randint(1, _MOST))

    def is_over(self) -> bool:
        return bool(self.ended) or super().is_over()

    def sent(self, source: str, to: str, message: Any) -> None:
        """Who is let go on finds every server with the number that it is told of."""
        super().sent(source, to, message)
        match message:
            case Response(_, CollectiveReply() | Registration(), servers):
                if self.machines[source].coordinator.scaling.moving is None:  # or it is a repeat
                    self._check_map(servers)

    def _check_map(self, servers: tuple[str, ...]) -> None:
        for address in servers or [f"S{one}" for one in range(self.job.servers)]:
            server = self.machines.get(self.at(address))
            if server is None:
                continue  # its death ends the job, or it starts again
            shard = server.its_shard
            count = len(servers) or self.job.servers
            if shard.servers != count:
                held = f"holds the rows of one of {shard.servers}"
                raise Broken(f"{address} {held} when workers go on with {count}")

    def check(self) -> None:
        self.counts["ended"] += bool(self.ended)
        if self.ended:
            return
        shards = self._shards()
        if {shard.servers for shard in shards} != {len(shards)}:
            raise Broken(f"servers know other numbers of servers than {len(shards)}")
        for name in set(self.workers) - self.gone:
            if self.machines[name].servers != self.endpoints:
                raise Broken(f"{name} knows the servers {self.machines[name].servers}")
        for rank, shard in enumerate(shards if self.job.logs else ()):
            check_log(self._start_of(rank), shard)
        home = self.machines[self.at(self.job.home)]
        torn = home.coordinator.dispatch.torn
        check_rows(self.job, self.pushes, shards, home.history, torn)
        self.counts["cuts"] += self.cuts.count
        if self.job.followers and self.job.phases == (Phase("sync"),):
            check_cuts(self.job, self.cuts.rows, [home.history], self.pushes)
