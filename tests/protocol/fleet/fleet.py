"""One run: processes under the scheduler, and what is done to them."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from psfleet.core.engine.shard.shard import Shard
from psfleet_server.coordinator.barriers import ModeRequest
from tests.protocol.fleet.calls import Promote, Published, Release, Silent
from tests.protocol.fleet.checks import check, check_cuts, check_snapshot
from tests.protocol.fleet.follower import Cuts, Follower
from tests.protocol.fleet.job import Job, Phase
from tests.protocol.fleet.places import Place
from tests.protocol.fleet.pushes import Pushes
from tests.protocol.fleet.server import Server
from tests.protocol.fleet.snapshots import published
from tests.protocol.fleet.standby import Standby
from tests.protocol.fleet.wisher import Wisher
from tests.protocol.fleet.worker import Worker
from tests.protocol.scheduler import Boot, Broken, Chances, Disk, Machine, Scheduler

_BEHIND_CUT = 0.3  # of the cuts with standbys: a place changes hands right after it
_LONG = 200.0  # seconds of silence after which also a worker that has never come is given up


class Fleet(Scheduler):
    """Servers "S0.0", "S1.0", ..., standbys "S0.1", ..., workers "w0", ..., perhaps a coordinator "C".

    Attributes:
        pushes: What workers have pushed.
        gone: Workers that are dead for good.
    """

    def __init__(
        self, job: Job, chances: Chances, seed: object, suppressed: Iterable[int] = ()
    ) -> None:
        self.job = job
        self.places = [Place(f"S{server}", job.standbys) for server in range(job.servers)]
        self.servers = [name for place in self.places for name in place.names]
        self.workers = [f"w{worker}" for worker in range(job.workers)]
        self.pushes = Pushes()
        self.gone: set[str] = set()
        self.followers = [f"f{number}" for number in range(job.followers)]
        self.cuts = Cuts()
        apart = ["C"] if job.apart else []
        names = [*apart, *self.servers, *self.workers, *self.followers]
        super().__init__(names, chances, seed, suppressed)

    # -- machines ------------------------------------------------------------------------------

    def make(self, name: str, disk: Disk, boot: int) -> Machine:
        if name in self.workers:
            kind = Wisher if self.job.comes_together else Worker
            return kind(int(name[1:]), self.job, boot, self.pushes)
        if name in self.followers:
            boot = 100 * boot + self.followers.index(name)
            counts = (self._newest, lambda: len(self.places))
            return Follower(self.job, boot, self.cuts, self.pushes, self._leads, *counts)
        if name == "C":
            return Server(None, self.job, disk, boot)
        index, number = map(int, name[1:].split("."))
        boot = 2 * boot + number  # of no other process of this place
        place = self.places[index]
        if name == place.primary:
            return Server(index, self.job, disk, boot)
        return Standby(index, self.job, boot, place.attach)

    def _leads(self, name: str) -> bool:
        return any(name == place.primary for place in self.places)

    def _newest(self) -> Published | None:
        """The newest snapshot in the folder that all processes share."""
        return max(
            published(self.disks[self.places[0].primary]).values(),
            key=lambda snapshot: snapshot.number,
            default=None,
        )

    def at(self, address: str, source: str = "") -> str:
        """Who takes over listens where the one before did, which may still live."""
        for place in self.places:
            if address == place.address:
                late = place.deposed and self.dice.random() < 0.2
                return place.deposed if late and source not in place.moved else place.primary
        return address

    def is_closed(self, source: str, to: str) -> bool:
        """A client that hears from who took over closes its connection to the one before."""
        place = self._place_of(source)
        if place is None or not place.deposed or to not in (*self.workers, *self.followers):
            return False
        if source == place.primary:
            place.moved.add(to)
        return source == place.deposed and to in place.moved

    def do(self, name: str, event: Any) -> None:
        """What a cut has is there for ever, whoever answers from now on."""
        before = self.cuts.count
        super().do(name, event)
        if self.cuts.count > before and self.job.standbys and not self.is_calm:
            self._after_cut()
        if not self.job.moves and (self.cuts.count > before or isinstance(event, Boot | Promote)):
            for server, place in enumerate(self.places):
                primary = self.machines.get(place.primary)
                if primary is not None:
                    self.cuts.check_kept(server, primary.its_shard)

    def start(self, name: str) -> None:
        """Who starts beside a primary is its next standby."""
        place = self._place_of(name)
        if place is not None and name != place.primary:
            self.disks[name] = self.first_disk(name)
            place.follows(name)
        super().start(name)
        if self.job.standbys and place is not None and name == place.primary:
            self.do(name, Release(place.attach))  # whoever followed the one before ended with it

    def crash(self, name: str) -> None:
        """The launcher knows it at once, and decides."""
        super().crash(name)
        place = self._place_of(name)
        if place is None:
            return
        if name == place.primary and place.orphan:
            super().crash(place.orphan)
            place.orphan = ""
        if name == place.deposed:
            place.deposed = ""
        elif name == place.orphan:
            place.orphan = ""
        elif name == place.standby:
            place.standby = ""
            self.do(place.primary, Release(place.attach))
        elif place.standby and name == place.primary:
            standby: Standby = self.machines[place.standby]
            if standby.is_ready:
                self._promote(place)
            else:  # it has lost its primary, which goes on from its log
                super().crash(place.standby)
                place.standby = ""

    def _promote(self, place: Place) -> None:
        self.counts["takeovers"] += 1
        place.take_over(incarnations=place.primary not in self.crashed)
        self.do(place.primary, Promote())

    def _place_of(self, name: str) -> Place | None:
        return next((place for place in self.places if name in place.names), None)

    def may_die(self, name: str) -> bool:
        return name not in self.workers or self.job.deals

    # -- faults --------------------------------------------------------------------------------

    def random_fault(self) -> None:
        if self.job.mode_requests and self.dice.random() < 0.3:
            self._mode_request()
            return
        if self.job.machines and self.dice.random() < 0.3:
            self._lose_machine(self.dice.randrange(2))
            return
        kinds = ["server", "worker", "restart", "restart", "silence", "takeover"]
        kind = self.dice.choice([*kinds, *(["follower"] if self.followers else [])])
        if kind == "restart" and self.crashed:
            self.start(self.dice.choice(sorted(self.crashed)))
        elif kind == "silence" and self.job.removal:
            worker = self.dice.randrange(self.job.workers)
            if self.fault(f"w{worker} is silent"):
                self.counts["silences"] += 1
                self.do(self.at(self.job.home), Silent(worker, 2.0))
        elif kind == "takeover":
            self._depose(self.dice.choice(self.places))
        else:
            self._kill(kind)

    def _after_cut(self) -> None:
        """A standby takes over right after a cut: now it matters what the cut rests on."""
        if self.dice.random() < _BEHIND_CUT:
            place = self.dice.choice(self.places)
            if self.dice.random() < 0.5:
                self._depose(place)
            elif place.primary not in self.crashed and self.fault(f"{place.primary} dies at a cut"):
                self.counts["dead servers"] += 1
                self.crash(place.primary)

    def _mode_request(self) -> None:
        """Somebody outside wants rounds, or leases."""
        mode = self.dice.choice(["sync", "async"])
        if self.fault(f"{mode} is wished for"):
            self.counts["mode_requests"] += 1
            self.job.requested_modes.append(ModeRequest(len(self.job.requested_modes) + 1, mode))

    def _depose(self, place: Place) -> None:
        """A standby takes over although its primary lives."""
        standby = self.machines.get(place.standby)
        ready = standby is not None and standby.is_ready and not place.deposed
        if ready and self.fault(f"{place.primary} is deposed"):
            self.counts["deposed"] += 1
            self._promote(place)

    def _lose_machine(self, machine: int) -> None:
        """One of two machines, each with a process of every place, loses its power or is cut off."""
        ours = [(place, place.names[(at + machine) % 2]) for at, place in enumerate(self.places)]
        if self.dice.random() < 0.5:
            if self.fault(f"machine {machine} loses its power"):
                self.counts["without power"] += 1
                for name in sorted({name for _, name in ours} - self.crashed):
                    self.crash(name)
        elif self.fault(f"machine {machine} is cut off"):
            self.counts["cut off"] += 1
            for place, name in ours:
                self._give_up(place, name)

    def _give_up(self, place: Place, name: str) -> None:
        """The launcher does without a process that may live, and speak again; others hear it as before."""
        if name == place.standby:
            place.standby, place.orphan = "", name
            self.do(place.primary, Release(place.attach))
        elif name == place.primary:
            self._depose(place)

    def _kill(self, kind: str) -> None:
        apart = ["C"] if self.job.apart else []
        clients = {"worker": self.workers, "follower": self.followers}
        names = clients.get(kind, [*self.servers, *apart])
        name = self.dice.choice(names)
        if self.may_die(name) and name not in self.crashed and self.fault(f"{name} dies"):
            self.counts[f"dead {kind if kind in clients else 'server'}s"] += 1
            self.crash(name)

    def sent(self, source: str, to: str, message: Any) -> None:
        """Nobody gets values who is too far ahead."""
        server = self.machines.get(source)
        if not isinstance(server, Server) or server.shard is None or server.shard.mode != "ssp":
            return
        leading_steps = server.shard.consistency.gate.leading_steps
        if leading_steps > self.job.staleness:
            raise Broken(f"{source} let a worker be {leading_steps} pushes ahead")

    # -- the end -------------------------------------------------------------------------------

    def calm(self) -> None:
        """Some of the dead stay dead where the fleet may go on without them."""
        if self.job.mode_requests:
            self._mode_request()
        self.job = replace(self.job, lag=0)
        for name in {*self.servers} & {*self.machines}:
            self.machines[name].hurry()
        for place in self.places:
            if place.deposed:
                self.crash(place.deposed)
        for name in sorted(self.crashed):
            others = [worker for worker in self.workers if worker not in self.crashed]
            stays = name in self.workers and self.job.removal and others
            if stays and self.dice.random() < 0.5:
                self.gone.add(name)
            else:
                self.start(name)

    def nudge(self, turn: int) -> None:
        for name in sorted(self.gone):
            self.do(self.at(self.job.home), Silent(int(name[1:]), _LONG))

    def is_over(self) -> bool:
        coordinator = self.machines[self.at(self.job.home)].coordinator
        views = {shard.workers.view for shard in self._shards()}
        done = all(self.machines[name].done for name in self.workers if name not in self.gone)
        over = done and not coordinator.is_busy and len(views) == 1
        return over and all(self.machines[name].is_at(self._shards()) for name in self.followers)

    def _shards(self) -> list[Shard]:
        return [self.machines[place.primary].its_shard for place in self.places]

    def describe(self) -> str:
        waiting = {
            name: [repr(queue[0].request)[:90] for queue in worker.queues.values() if queue]
            for name in self.workers
            if (worker := self.machines.get(name))
        }
        standing = {
            place.primary: (shard.workers.view, shard.workers.frozen, shard.rounds.closed)
            for place, shard in zip(self.places, self._shards(), strict=True)
        }
        coordinator = self.machines[self.at(self.job.home)].coordinator
        return f"{waiting} {standing} {coordinator.members.seats} {coordinator.due()}"

    def check(self) -> None:
        shards = self._shards()
        again = [
            Server(number, self.job, self.disks[place.primary], 0)
            for number, place in enumerate(self.places)
        ]
        coordinator = self.machines[self.at(self.job.home)].coordinator
        kept = [server.its_shard for server in again]
        histories = [server.history for server in again]
        snapshots = published(self.disks[self.places[0].primary])
        self.counts["snapshots"] = len(snapshots)
        self.counts["changes"] = shards[0].consistency.switches
        disks = [self.disks[place.primary] for place in self.places]
        for snapshot in snapshots.values():
            check_snapshot(self.job, snapshot, disks, self.pushes)
        if self.job.followers and self.job.phases == (Phase("sync"),):
            check_cuts(self.job, self.cuts.rows, histories, self.pushes)
        self.counts["cuts"] = self.cuts.count
        self.counts["gaps"] = self.cuts.gaps
        self.counts["begun"] = self.cuts.begun
        check(self.job, shards, kept, histories, coordinator.dispatch.torn, self.pushes)
