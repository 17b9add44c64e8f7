"""One run: processes under the scheduler, and what is done to them."""

import random
from collections.abc import Callable, Iterable
from typing import Any

from psfleet.shard.shard import Shard
from tests.protocol.fleet.calls import Silent
from tests.protocol.fleet.checks import check
from tests.protocol.fleet.job import Job, job_of
from tests.protocol.fleet.server import Server
from tests.protocol.fleet.worker import Pushes, Worker
from tests.protocol.scheduler import Broken, Chances, Disk, Machine, Scheduler

__all__ = ["Fleet", "fleet"]

_LONG = 200.0  # seconds of silence after which also a worker that has never come is given up


class Fleet(Scheduler):
    """Servers "S0", "S1", ..., workers "w0", ..., perhaps a coordinator "C".

    Attributes:
        pushes: What workers have pushed.
        gone: Workers that are dead for good.
    """

    def __init__(
        self, job: Job, chances: Chances, seed: object, suppressed: Iterable[int] = ()
    ) -> None:
        self.job = job
        self.servers = [f"S{server}" for server in range(job.servers)]
        self.workers = [f"w{worker}" for worker in range(job.workers)]
        self.pushes: Pushes = {}
        self.gone: set[str] = set()
        apart = ["C"] if job.apart else []
        super().__init__([*apart, *self.servers, *self.workers], chances, seed, suppressed)

    # -- machines ------------------------------------------------------------------------------

    def make(self, name: str, disk: Disk, boot: int) -> Machine:
        """See Scheduler."""
        if name in self.workers:
            return Worker(int(name[1:]), self.job, boot, self.pushes)
        return Server(None if name == "C" else int(name[1:]), self.job, disk, boot)

    def may_die(self, name: str) -> bool:
        """See Scheduler."""
        return name not in self.workers or self.job.deals

    # -- faults --------------------------------------------------------------------------------

    def random_fault(self) -> None:
        """See Scheduler."""
        kind = self.dice.choice(["server", "worker", "restart", "restart", "silence"])
        if kind == "restart" and self.crashed:
            self.start(self.dice.choice(sorted(self.crashed)))
        elif kind == "silence" and self.job.removal:
            worker = self.dice.randrange(self.job.workers)
            if self.fault(f"w{worker} is silent"):
                self.counts["silences"] += 1
                self.do(self.job.home, Silent(worker, 2.0))
        else:
            self._kill(kind)

    def _kill(self, kind: str) -> None:
        names = self.workers if kind == "worker" else [*self.servers, self.job.home]
        name = self.dice.choice(names)
        if self.may_die(name) and name not in self.crashed and self.fault(f"{name} dies"):
            self.counts[f"dead {'workers' if name in self.workers else 'servers'}"] += 1
            self.crash(name)

    def sent(self, source: str, to: str, message: Any) -> None:
        """See Scheduler. Nobody gets values who is too far ahead."""
        server = self.machines.get(source)
        if not isinstance(server, Server) or server.shard is None or server.shard.mode != "ssp":
            return
        lead = server.shard.consistency.clocks.lead
        if lead > self.job.staleness:
            raise Broken(f"{source} let a worker be {lead} pushes ahead")

    # -- the end -------------------------------------------------------------------------------

    def calm(self) -> None:
        """See Scheduler. Some of the dead stay dead where the fleet may go on without them."""
        for name in sorted(self.crashed):
            others = [worker for worker in self.workers if worker not in self.crashed]
            stays = name in self.workers and self.job.removal and others
            if stays and self.dice.random() < 0.5:
                self.gone.add(name)
            else:
                self.start(name)

    def nudge(self, turn: int) -> None:
        """See Scheduler."""
        for name in sorted(self.gone):
            self.do(self.job.home, Silent(int(name[1:]), _LONG))

    def is_over(self) -> bool:
        """See Scheduler."""
        coordinator = self.machines[self.job.home].coordinator
        views = {self._shard(name).workers.view for name in self.servers}
        done = all(self.machines[name].done for name in self.workers if name not in self.gone)
        return done and not coordinator.is_busy and len(views) == 1

    def _shard(self, name: str) -> Shard:
        server: Server = self.machines[name]
        return server.its_shard

    def describe(self) -> str:
        """See Scheduler."""
        waiting = {
            name: [repr(queue[0].request)[:90] for queue in worker.queues.values() if queue]
            for name in self.workers
            if (worker := self.machines.get(name))
        }
        shards = {name: self._shard(name) for name in self.servers}
        standing = {
            name: (shard.workers.view, shard.workers.frozen, shard.rounds.closed)
            for name, shard in shards.items()
        }
        coordinator = self.machines[self.job.home].coordinator
        return f"{waiting} {standing} {coordinator.members.seats} {coordinator.due()}"

    def check(self) -> None:
        """See Scheduler."""
        shards = [self._shard(name) for name in self.servers]
        histories = [[record for _, _, record in self.disks[name].log] for name in self.servers]
        again = [
            Server(number, self.job, self.disks[name], 0).its_shard
            for number, name in enumerate(self.servers)
        ]
        coordinator = self.machines[self.job.home].coordinator
        check(self.job, shards, again, histories, coordinator.supply.torn, self.pushes)


def fleet(suite: str, seed: int) -> Callable[[Iterable[int]], Scheduler]:
    """What makes one run of a suite, without the faults of the numbers that it is given."""
    dice = random.Random(f"{suite}/{seed}")
    job = job_of(suite, dice)
    chances = Chances.drawn(dice, torn=dice.choice([0, 0.001, 0.01]))

    def make(without: Iterable[int] = ()) -> Scheduler:
        return Fleet(job, chances, f"{suite}/{seed}", without)

    return make
