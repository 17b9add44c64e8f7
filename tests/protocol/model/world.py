"""One run of the model: its processes under the scheduler, and what must hold at the end."""

import itertools
from collections.abc import Callable, Iterable

from tests.protocol.model.coordinator import (
    Coordinator,
    Expire,
    ExpireServer,
    TakeSnapshot,
    WantMode,
)
from tests.protocol.model.decisions import Decisions
from tests.protocol.model.invariants import Acknowledged, Outcome, check
from tests.protocol.model.messages import Applied, PullCall, PushCall, Values
from tests.protocol.model.replica import COORDINATOR
from tests.protocol.model.server import Server
from tests.protocol.model.settings import Rule, Settings, settings_of
from tests.protocol.model.values import open_life
from tests.protocol.model.worker import Worker
from tests.protocol.scheduler import Broken, Disk, Machine, Scheduler

__all__ = ["World", "world"]

_FAULTS = ["server"] * 2 + ["worker"] * 2 + ["coordinator"] + ["restart"] * 5
_REQUESTS = ["expire", "expire server", "snapshot", "snapshot"]


class World(Scheduler):
    """A coordinator "C", servers "S0.0", "S0.1", ..., workers "w0", ..."""

    def __init__(self, settings: Settings, seed: object, suppressed: Iterable[int] = ()) -> None:
        self.settings = settings
        self.servers = [
            f"S{shard}.{place}"
            for shard in range(settings.shards)
            for place in range(2 if settings.standby else 1)
        ]
        self.acknowledged: list[Acknowledged] = []
        self.gone: set[str] = set()
        names = [COORDINATOR, *self.servers, *settings.seats]
        super().__init__(names, settings.chances, seed, suppressed)

    # -- machines ------------------------------------------------------------------------------

    def first_disk(self, name: str) -> Disk:
        """See Scheduler."""
        if name == COORDINATOR:
            return Disk(fields={"decisions": Decisions.first(self.settings)})
        attachment = 1 if self.settings.standby else 0
        return Disk(fields={"attachment": attachment, "generation": 0, "base": None, "term": 0})

    def make(self, name: str, disk: Disk, boot: int) -> Machine:
        """See Scheduler."""
        if name == COORDINATOR:
            return Coordinator(self.settings, disk)
        if name in self.settings.seats:
            return Worker(name, self.settings, boot)
        shard = int(name[1:].split(".")[0])
        blocks = [b for b in range(self.settings.blocks) if b % self.settings.shards == shard]
        return Server(name, shard, blocks, self.settings, disk, boot)

    def coordinator(self) -> Coordinator:
        """The living coordinator."""
        found: Coordinator = self.machines[COORDINATOR]
        return found

    def primary(self, shard: int) -> Server:
        """The server that serves the shard."""
        found: Server = self.machines[self.coordinator().decisions.pairs[shard].primary]
        return found

    def sent(self, source: str, to: str, message: object) -> None:
        """See Scheduler. What a server answers must be true then, and stay so."""
        if not isinstance(message, (Applied, Values)) or to not in self.machines:
            return
        _, request = self.machines[to].calls.get(message.call, (None, None))
        server: Server = self.machines[source]
        if isinstance(message, Values):
            self._check_values(server, request, message)
        if isinstance(request, PushCall) or (isinstance(request, PullCall) and request.commit):
            self.acknowledged.append(
                Acknowledged(
                    isinstance(request, PushCall),
                    message.shard,
                    (request.seat, request.incarnation),
                    request.number,
                    server.generation,
                )
            )

    def _check_values(self, server: Server, request: object, values: Values) -> None:
        if not isinstance(request, PullCall):
            return
        if server.mode == "sync" and values.version != request.number:
            raise Broken(f"a pull of round {request.number} gets version {values.version}")
        bound = request.number - self.settings.staleness
        if values.clocks and min(values.clocks.values()) < bound:
            raise Broken(f"the bound of ssp is broken: {values.clocks} at {request.number}")

    # -- faults --------------------------------------------------------------------------------

    def may_die(self, name: str) -> bool:
        """See Scheduler."""
        return self.settings.crashes

    def random_fault(self) -> None:
        """See Scheduler."""
        kind = self.dice.choice(_FAULTS + _REQUESTS)
        if kind in ("server", "worker", "coordinator"):
            self._crash_one(kind)
        elif kind == "restart" and self.crashed:
            self.start(self.dice.choice(sorted(self.crashed)))
        elif kind == "expire" and self.settings.removal:  # of slow workers too
            self._expire(self.dice.choice(self.settings.seats))
        elif kind == "expire server" and self.settings.standby:  # of servers that are cut off, too
            name = self.dice.choice(self.servers)
            if self.fault(f"{name} expires"):
                self.counts["expired servers"] += 1
                self.do(COORDINATOR, ExpireServer(name))
        elif kind == "snapshot":
            self._ask()

    def _crash_one(self, kind: str) -> None:
        names = {
            "server": self.servers,
            "worker": self.settings.seats,
            "coordinator": [COORDINATOR],
        }
        name = self.dice.choice(names[kind])
        if self.settings.crashes and name not in self.crashed and self.fault(f"{name} dies"):
            self.counts[f"dead {kind}s"] += 1
            self.crash(name)

    def _expire(self, seat: str) -> None:
        if self.fault(f"{seat} expires"):
            self.counts["expired seats"] += 1
            self.do(COORDINATOR, Expire(seat))

    def _ask(self) -> None:
        if self.settings.switch and self.dice.random() < 0.5:
            self.counts["modes asked for"] += 1
            self.do(COORDINATOR, WantMode(self.dice.choice(["sync", "async", "ssp"])))
        else:
            self.do(COORDINATOR, TakeSnapshot())

    # -- the end -------------------------------------------------------------------------------

    def calm(self) -> None:
        """See Scheduler. Some of the dead stay dead where the fleet may go on without them."""
        self.start_if_dead(COORDINATOR)
        for name in sorted(self.crashed):
            others = [seat for seat in self.settings.seats if seat not in self.crashed]
            stays = name in self.settings.seats and self.settings.removal and others
            if (stays or self._is_spare(name)) and self.dice.random() < 0.5:
                self.gone.add(name)
            else:
                self.start(name)

    def _is_spare(self, name: str) -> bool:
        """Whether the server's shard has another one that lives and serves."""
        if name not in self.servers:
            return False
        serving = self.coordinator().decisions.pairs[int(name[1:].split(".")[0])].primary
        return serving != name and serving not in self.crashed

    def start_if_dead(self, name: str) -> None:
        """Start a machine that has crashed."""
        if name in self.crashed:
            self.start(name)

    def nudge(self, turn: int) -> None:
        """See Scheduler."""
        decisions = self.coordinator().decisions
        for name in sorted(self.gone):
            if name in self.servers:
                if turn % 60 == 0:  # every time begins a view change
                    self.do(COORDINATOR, ExpireServer(name))
            elif open_life(decisions.roster, name):
                self.do(COORDINATOR, Expire(name))
        if turn % 20 == 0:
            self.do(COORDINATOR, TakeSnapshot())

    def is_over(self) -> bool:
        """See Scheduler."""
        seats = [seat for seat in self.settings.seats if seat not in self.crashed]
        coordinator = self.coordinator()
        if coordinator.changing or coordinator.installing or coordinator.is_due:
            return False
        primaries = [self.primary(shard) for shard in range(self.settings.shards)]
        return all(self.machines[seat].done for seat in seats) and all(
            server.role == "primary" and server.done == len(server.log) for server in primaries
        )

    def describe(self) -> str:
        """See Scheduler."""
        coordinator = self.coordinator()
        workers = {
            seat: (worker.done, [type(request).__name__ for _, request in worker.calls.values()])
            for seat in self.settings.seats
            if (worker := self.machines.get(seat))
        }
        servers = {
            name: (server.role, server.term, server.thawed, server.view, server.core.closed)
            for name in self.servers
            if (server := self.machines.get(name))
        }
        return f"{coordinator.changing} {coordinator.decisions.roster} {workers} {servers}"

    def check(self) -> None:
        """See Scheduler."""
        decisions = self.coordinator().decisions
        primaries = [self.primary(shard) for shard in range(self.settings.shards)]
        self.counts["snapshots"] = len(decisions.snapshots)
        self.counts["roll-backs"] = decisions.generation
        files = [self._files(shard) for shard in range(self.settings.shards)]
        cores = [server.core for server in primaries]
        check(self.settings, Outcome(decisions, cores, files, self.acknowledged))
        kinds = [type(entry) for entry in cores[0].history]
        self.counts["switches"] = sum(
            before is not after for before, after in itertools.pairwise(kinds)
        )

    def _files(self, shard: int) -> dict[tuple[object, ...], object]:
        names = [name for name in self.servers if name.startswith(f"S{shard}.")]
        names.sort(key=lambda name: name == self.coordinator().decisions.pairs[shard].primary)
        return {number: core for name in names for number, core in self.disks[name].files.items()}


def world(
    suite: str, seed: int, broken: Rule | None = None
) -> Callable[[Iterable[int]], Scheduler]:
    """What makes one run of a suite, without the faults of the numbers that it is given."""
    settings = settings_of(suite, seed, broken)

    def make(without: Iterable[int] = ()) -> Scheduler:
        return World(settings, f"{suite}/{seed}", without)

    return make
