"""What one run of the real machines is about: its fleet, its phases, and what may happen to it."""

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.consistency import ConsistencyMode, SspMode, find_mode
from psfleet.core.engine.kernels.id_routing import owned_by
from psfleet.core.engine.round_plan import Range
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.entry import CapacityEntry
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec
from psfleet_server.coordinator.barriers import ModeRequest

Rows = NDArray[np.float32]
Ids = NDArray[np.int64]

ROWS = TableSpec(
    "rows",
    "sparse",
    (2,),
    make_rule("adagrad", {}),
    initializer=InitializerSpec("uniform", -1.0, 1.0),
    seed=3,
)
"""Weights: in sync mode each gradient depends on what was pulled, so a wrong version, member or sample
changes the final bits."""
COUNTS = TableSpec(
    "counts", "sparse", (1,), make_rule("sgd", {}), initializer=InitializerSpec("constant", 0.0)
)
"""How often each sample was used: a row per sample, to which every use adds one; on every server."""
FEW = TableSpec("few", "sparse", (1,), make_rule("sgd", {}), entry=CapacityEntry(18))
"""With followers: rows that go when others come."""
IDS = np.arange(12)
_APART = 10_000  # between the samples of two servers
_OWN = 1000  # samples of one worker that brings its own data


@dataclass(frozen=True)
class Phase:
    """Steps in one mode, with a collective of all workers after them.

    Attributes:
        steps: Of each worker with data of its own; None: the fleet hands out the job's dataset.
    """

    mode: Mode
    steps: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        apart: The coordinator is a process of its own, not within server 0.
        removal: Silent workers are removed; some of the dead stay dead.
        standbys: Each server has one.
        machines: Whole machines lose their power or are cut off.
        snapshots: They are taken all the time.
        groups: Tables of a push are on some servers only, where the mode lets it skip the others.
        size, batch, epochs: Of the dataset.
        staleness: Of ssp.
        followers: Copies of the weights are taken all the time.
        lag: Events by which the streams to standbys are late: cuts matter that are ahead of these.
        moves: Another number of servers is wished for all the time.
        barriers: Within the dataset of each worker that comes to some.
        logs: Servers keep what changes; if not, the death of one ends the job.
        mode_requests: The job's mode is wished for from outside, all the time. `requested_modes`: what has
            been so far, as in the file that server 0 looks at.
    """

    servers: int
    workers: int
    phases: tuple[Phase, ...]
    apart: bool = False
    removal: bool = False
    standbys: bool = False
    machines: bool = False
    snapshots: bool = False
    groups: bool = False
    followers: int = 0
    size: int = 24
    batch: int = 2
    epochs: int = 1
    staleness: int = 1
    moves: bool = False
    logs: bool = True
    mode_requests: bool = False
    barriers: int = 3
    lag: int = 0
    requested_modes: list[ModeRequest] = field(default_factory=list)

    @property
    def deals(self) -> bool:
        """Whether the fleet hands out the data. Only then can workers die: who brings data of its own
        does not know which of them an incarnation before it has used."""
        return self.phases[0].steps is None

    @property
    def comes_together(self) -> bool:
        """Whether workers meet in the midst of the dataset, too."""
        return self.mode_requests or (self.moves and not self.removal)

    @property
    def home(self) -> str:
        """Where the coordinator is."""
        return "C" if self.apart else "S0"

    @property
    def samples(self) -> int:
        """How many the dataset hands out."""
        return self.size * self.epochs

    def declared(self, mode: str) -> ConsistencyMode:
        """The mode with the job's settings."""
        found = find_mode(mode)
        return SspMode(staleness=self.staleness) if isinstance(found, SspMode) else found


_PHASES: dict[str, tuple[Mode, ...]] = {
    "sync": ("sync",),
    "async": ("async",),
    "rests": ("sync", "sync"),
    "ssp": ("ssp", "ssp"),
    "switch": ("sync", "async", "ssp", "sync"),
}
_SUITES = """
sync, sync removal, sync standbys, sync standbys machines, sync snapshots, sync mode_requests
async, async removal, async standbys, async standbys machines, async snapshots, async snapshots removal
async mode_requests, async groups removal, async groups standbys, async groups snapshots
async groups mode_requests, rests, ssp, switch, switch standbys, switch followers
sync followers, sync removal followers, sync standbys followers, sync snapshots followers
async followers, async standbys followers, async standbys machines followers
async groups removal followers, async snapshots followers
sync moves, sync removal moves, sync mode_requests moves, sync followers moves, sync standbys moves
sync standbys followers moves, async moves, async removal moves, async groups moves
async followers moves, async standbys moves
sync logs moves, sync logs followers moves, sync logs removal moves, sync logs mode_requests moves
async logs moves, async logs removal moves, async groups logs moves"""
SUITES = {name: _PHASES[name.split()[0]] for name in re.split(", |\n", _SUITES.strip())}
"""By name the modes of the phases; those of sync and async use the fleet's data, the others their own."""


def job_of(suite: str, dice: random.Random) -> Job:
    """A random job of the suite."""
    workers = dice.choice([1, 2, 3])
    modes = SUITES[suite]
    deals = suite.split()[0] in ("sync", "async")
    steps = [None if deals else tuple(dice.randint(0, 6) for _ in range(workers)) for _ in modes]
    return Job(
        servers=dice.choice([1, 2, 3]),
        workers=workers,
        phases=tuple(map(Phase, modes, steps)),
        apart=dice.random() < 0.4 and "moves" not in suite,
        removal="removal" in suite,
        standbys="standbys" in suite,
        machines="machines" in suite,
        snapshots="snapshots" in suite,
        groups="groups" in suite,
        followers=dice.choice([1, 2]) if "followers" in suite else 0,
        mode_requests="mode_requests" in suite,
        moves="moves" in suite,
        logs="moves" not in suite or "logs" in suite,
        size=dice.choice([12, 24, 47]) * (2 if "logs" in suite else 1),
        barriers=8 if "logs" in suite else 3,
        epochs=dice.choice([1, 2]),
        staleness=dice.choice([0, 1, 2]),
        lag=dice.choice([0, 2, 5]) if "standbys" in suite and "followers" in suite else 0,
    )


def places(ranges: Iterable[Range]) -> Ids:
    """The samples of the dataset at these positions."""
    return np.array([at for low, high in ranges for at in range(low, high)], np.int64)


def count_ids(samples: Ids, server: int) -> Ids:
    """The ids in COUNTS of what a server counts of these samples; a copy has those of all servers."""
    return samples + _APART * server


def sample_of(key: int) -> int:
    """The sample of an id in COUNTS."""
    return key % _APART


def counted(samples: Ids, server: int, servers: int, moves: bool) -> Ids:
    """The ids in COUNTS of what one of the servers counts of these samples; with moves, its own alone."""
    return samples[owned_by(samples, server, servers)] if moves else count_ids(samples, server)


def gradients(
    samples: Ids, values: Rows | None, server: int, servers: int, job: Job
) -> tuple[Gradient, ...]:
    """A server's part of a push: of the gradient, which may be none, and a use of each sample."""
    values = np.zeros((len(IDS), 2), np.float32) if values is None else values
    mine, used = owned_by(IDS, server, servers), counted(samples, server, servers, job.moves)
    found = [
        Gradient(ROWS.key, values[mine], IDS[mine], 0.1),
        Gradient(COUNTS.key, np.full((len(used), 1), -1, np.float32), used, 1.0),
    ]
    if job.followers and len(samples):
        ids = np.unique(samples % 60)
        ids = ids[owned_by(ids, server, servers)]
        found.append(Gradient(FEW.key, np.ones((len(ids), 1), np.float32), ids, 0.1))
    return tuple(found)


def own_sample(worker: int, step: int) -> Ids:
    """The one sample of a worker's own data at a step, counted over all phases."""
    return np.array([_OWN * (worker + 1) + step], np.int64)


def slopes(rows: Rows, samples: Ids) -> Rows:
    """The gradient of these samples where these rows were pulled; without samples there is none."""
    if not len(samples):
        return np.zeros_like(rows)
    dice = np.random.default_rng(samples)
    return (rows * np.float32(0.5) + dice.standard_normal(rows.shape, np.float32)).astype(
        np.float32
    )
