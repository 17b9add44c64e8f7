"""What one run of the model is: its suite's settings, drawn from a seed, and the rule it does without."""

import random
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from tests.protocol.scheduler import Chances

__all__ = ["MUTANTS", "SUITES", "Mode", "Rule", "Settings", "settings_of"]

Mode = Literal["sync", "async", "ssp"]


class Rule(Enum):
    """Rules that a run can do without, to see whether the checks notice."""

    LOG_FIRST = "a push is answered when its record is logged"
    STANDBY_FIRST = "a record takes effect when the standby has it (R1)"
    TERM_ON_DISK = "a server remembers its term (R13)"
    BOOT_FENCE = "a freeze or install for an earlier process is ignored (R7)"
    FLOOR = "a standby that was dropped is required no more (R10)"
    CALL_TERM = "calls name a term, which never goes back (R17)"
    FROZEN = "a frozen server closes no round (R6)"
    COMMIT_FIRST = "a round closes when all members have committed it (R2)"
    COMMIT_ALL = "a worker commits when every server holds its push (R2)"
    LAST_COMMIT = "a dead life counts up to its last commit"
    LEFTOVERS = "samples of a push that does not count are dealt again (R5)"
    PERSIST_FIRST = "a decision is on disk before it is told"
    LIFE_FENCE = "pushes of a life that is over are refused"
    FINISHED_ENDS = "'finished' belongs to a generation (R9)"
    ONCE = "a push that was applied is not applied again"
    ALIGN = "pushes behind a mark wait for the cut"
    MARKS_GROW = "marks of earlier snapshots are ignored (R12)"
    VIEW_ABORTS = "a view change gives up the snapshot under way (R11)"
    TORN_NAMED = "a torn step is declared"
    LEASE_BACK = "what is left of a dead worker's lease is dealt again"
    BOUND = "ssp pulls wait for the slowest worker"
    IDLE = "a worker that waits for data holds nobody back (R14)"
    DRAINED_BEFORE = "drained is what was drained before the freeze (R18)"


SUITES = (
    "network",
    "sync",
    "sync-removal",
    "sync-standby",
    "sync-standby-removal",
    "sync-snapshot",
    "sync-snapshot-removal",
    "async",
    "async-removal",
    "async-standby-removal",
    "async-snapshot-removal",
    "ssp-removal",
    "ssp-standby-removal",
    "switch",
    "switch-removal",
    "switch-standby-removal",
)
"""What may happen beside faults of the network and, but for the first, crashes."""

MUTANTS = {
    Rule.LOG_FIRST: "sync",
    Rule.STANDBY_FIRST: "sync-standby",
    Rule.TERM_ON_DISK: "sync-standby",
    Rule.BOOT_FENCE: "sync-standby",
    Rule.FLOOR: "async-standby-removal",
    Rule.CALL_TERM: "sync-standby",
    Rule.FROZEN: "sync-removal",
    Rule.COMMIT_FIRST: "sync-removal",
    Rule.COMMIT_ALL: "sync-removal",
    Rule.LAST_COMMIT: "sync-removal",
    Rule.LEFTOVERS: "sync-removal",
    Rule.PERSIST_FIRST: "sync-removal",
    Rule.LIFE_FENCE: "async-removal",
    Rule.FINISHED_ENDS: "sync-snapshot-removal",
    Rule.ONCE: "async",
    Rule.ALIGN: "async",
    Rule.MARKS_GROW: "async",
    Rule.VIEW_ABORTS: "async-removal",
    Rule.TORN_NAMED: "async-removal",
    Rule.LEASE_BACK: "async-removal",
    Rule.BOUND: "ssp-removal",
    Rule.IDLE: "ssp-removal",
    Rule.DRAINED_BEFORE: "switch",
}
"""Which suite shows what is missing when a rule is."""


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        samples: Of the one epoch; `batch` of them are in a push.
        blocks: Of the weights; block b lies on shard b mod `shards`.
        durability: log: a server replays it; snapshot: the fleet goes back when one dies.
        standby: Each shard has two servers.
        removal: Silent seats are removed.
        switch: Other modes are asked for.
        crashes: Processes die.
        window: Pushes under way at most (async).
        snapshot_every: Rounds.
        broken: A rule that does not hold in this run.
    """

    mode: Mode
    chances: Chances
    shards: int
    seats: tuple[str, ...]
    samples: int
    durability: Literal["log", "snapshot"] = "log"
    standby: bool = False
    removal: bool = False
    switch: bool = False
    crashes: bool = True
    window: int = 1
    staleness: int = 0
    batch: int = 2
    blocks: int = 3
    snapshot_every: int = 3
    broken: Rule | None = None

    def obeys(self, rule: Rule) -> bool:
        """Whether the rule holds in this run."""
        return rule is not self.broken


def settings_of(suite: str, seed: int, broken: Rule | None = None) -> Settings:
    """The settings of one run of a suite."""
    dice = random.Random(f"{suite}/{seed}")
    parts = suite.split("-")
    modes: list[Mode] = ["sync", "async", "ssp"]
    named = [mode for mode in modes if mode in parts]
    network_only = suite == "network"
    return Settings(
        mode=dice.choice(modes) if "switch" in parts else named[0] if named else "sync",
        chances=Chances.drawn(dice, **({"torn": 0.0} if network_only else {})),
        shards=dice.choice([1, 2, 3]),
        seats=tuple(f"w{seat}" for seat in range(dice.choice([1, 2, 3]))),
        samples=dice.choice([12, 24, 48]),
        durability="snapshot" if "snapshot" in parts else "log",
        standby="standby" in parts,
        removal="removal" in parts,
        switch="switch" in parts,
        crashes=not network_only,
        window=dice.choice([1, 2, 3]),
        staleness=dice.choice([0, 1, 2]),
        broken=broken,
    )
