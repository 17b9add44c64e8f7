"""What tests do with the state machine that takes snapshots: step by step, or in a random order."""

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

from psfleet.checkpoint import CutPosition
from psfleet.core.base.errors import ServerUnavailable
from psfleet.core.engine.shard.events import SendError
from psfleet_server.snapshots.snapshot_coordinator import SnapshotCoordinator
from psfleet_server.snapshots.snapshot_events import (
    AwaitParts,
    BeginCuts,
    CompleteSnapshot,
    CutLost,
    CutMade,
    DraftOpened,
    MembersChanged,
    OpenDraft,
    PublishSnapshot,
    ReleaseWorker,
    ServersReplied,
    SettleCuts,
    SnapshotEvent,
    SnapshotFailed,
    SnapshotInstruction,
    SnapshotPart,
    SnapshotPublished,
    SnapshotRequest,
    SnapshotRequested,
    Standing,
    TimePassed,
    WorkerIntroduced,
    WorkerLearned,
    WorkerStateArrived,
)

INCARNATIONS = {0: 11, 1: 12}
OPENED = DraftOpened("/job/snapshot-000001", "/job/.partial")
ASYNC = Standing("async", 0, INCARNATIONS)
PLACED = ServersReplied((ASYNC, ASYNC))


class Play:
    """A coordinator with its time; every event is followed by a look at its invariants."""

    def __init__(self) -> None:
        self.coordinator = SnapshotCoordinator()
        self.now = 100.0

    def __call__(self, *events: SnapshotEvent, seconds: float = 0.0) -> list[SnapshotInstruction]:
        """The instructions that the last event leads to, `seconds` later."""
        self.now += seconds
        instructions: list[SnapshotInstruction] = []
        for event in events:
            instructions = self.coordinator.handle(event, self.now)
            self.coordinator.validate()
        return instructions

    def request(self, call: str = "a", seen: int = 0, **expected: Any) -> list[SnapshotInstruction]:
        """Somebody asks for a snapshot."""
        return self(SnapshotRequested(call, SnapshotRequest(**expected), seen))

    def begin(self, *standings: Standing, **expected: Any) -> list[SnapshotInstruction]:
        """Up to where all servers have been asked where they stand."""
        self.request(**expected)
        return self(OPENED, ServersReplied(standings))

    def mark(self, **expected: Any) -> list[SnapshotInstruction]:
        """An asynchronous snapshot up to where workers are waited for."""
        self.begin(ASYNC, ASYNC, **expected)
        return self(PLACED)

    def write(self, **expected: Any) -> list[SnapshotInstruction]:
        """An asynchronous snapshot up to where its files are on the disk."""
        self.mark(**expected)
        self(*learned())
        return self(ServersReplied(), ServersReplied(parts({0: (11, 5), 1: (12, 7)})))

    def complete(self, **expected: Any) -> list[SnapshotInstruction]:
        """A whole snapshot, of workers without states."""
        self.write(**expected)
        self(SnapshotPublished())
        return self(ServersReplied())


def learned(number: int = 1, incarnations: Mapping[int, int] = INCARNATIONS) -> list[WorkerLearned]:
    """All workers have learned of a snapshot."""
    return [
        WorkerLearned(f"w{seat}", number, seat, incarnation)
        for seat, incarnation in incarnations.items()
    ]


def parts(pushes: dict[int, tuple[int, int]], number: int = 1) -> tuple[SnapshotPart, ...]:
    """Of two servers that are cut at the same pushes."""
    cut = CutPosition(number, "async", 0, pushes)
    return SnapshotPart(cut, "file 0"), SnapshotPart(cut, "file 1")


def failed(instructions: list[SnapshotInstruction]) -> Exception:
    """Why the one request that is refused is refused."""
    [refused] = [one for one in instructions if isinstance(one, SendError)]
    return refused.error


class Chaos:
    """Answers the coordinator's instructions in a random way, and brings other events in between."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.play = Play()
        self.due: list[SnapshotEvent] = []  # the answer to the last instruction
        self.number = 0
        self.replies: Counter[str] = Counter()
        self.requests = self.learned = 0
        self.begun: list[int] = []
        self.settled: list[int] = []
        self.published: list[int] = []

    def step(self) -> None:
        """One event, and what it leads to."""
        self.hand(self.due.pop() if self.due and self.dice.random() < 0.5 else self._event())

    def hand(self, event: SnapshotEvent) -> None:
        """This event, and what it leads to."""
        for instruction in self.play(event, seconds=self.dice.choice([0, 0, 0.1, 5])):
            self._take(instruction)

    def _event(self) -> SnapshotEvent:
        dice, seats = self.dice, range(3)
        seat, incarnation = dice.randrange(3), dice.choice([11, 12])
        number = self.number - dice.choice([0, 0, 0, 1])
        match dice.randrange(9):
            case 0:
                self.requests += 1
                expected = SnapshotRequest(
                    dice.choice(["", "/a"]),
                    dice.random() < 0.3,
                    dice.random() < 0.3,
                    dice.choice([0, 3]),
                )
                return SnapshotRequested(f"r{self.requests}", expected, dice.randrange(3))
            case 1 | 2 | 3:
                self.learned += 1
                return WorkerLearned(f"w{self.learned}", number, seat, incarnation)
            case 4:
                return WorkerStateArrived(number, seat, incarnation, {}, dice.randrange(3))
            case 5:
                return WorkerIntroduced(seat, incarnation, dice.random() < 0.5)
            case 6:
                left = frozenset(s for s in seats if dice.random() < 0.3)
                return MembersChanged(left, frozenset(seats))
            case 7:
                return CutMade(number) if dice.random() < 0.5 else CutLost(number)
            case _:
                return TimePassed()

    def _take(self, instruction: SnapshotInstruction) -> None:
        match instruction:
            case OpenDraft(number):
                assert not self.due
                assert number > self.number
                self.number = number
                self._reply(OPENED)
            case BeginCuts(_, cutting):
                self.begun.append(cutting.number)
                self._reply(ServersReplied((self._standing(), self._standing())))
            case AwaitParts(number, cut):
                self._reply(ServersReplied(() if cut else parts({}, number)))
            case PublishSnapshot(cut):
                self.published.append(cut.number)
                self._reply(SnapshotPublished())
            case SettleCuts(number, complete):
                assert not complete or number in self.published
                self.settled.append(number)
                self.due = [ServersReplied()]
            case ReleaseWorker(call):
                self.replies[f"{call}"] += 1
            case SendError(call):
                self.replies[f"{call}"] += 1
            case CompleteSnapshot(call, number):
                assert number in self.published
                self.replies[f"{call}"] += 1

    def _reply(self, event: SnapshotEvent) -> None:
        fails = self.dice.random() < 0.1
        self.due = [SnapshotFailed(ServerUnavailable("it is away")) if fails else event]

    def _standing(self) -> Standing:
        incarnations = self.dice.choice([INCARNATIONS, INCARNATIONS, INCARNATIONS, {0: 11}, {}])
        mode = "async" if self.number % 2 else "sync"
        return Standing(mode, self.dice.randrange(5), incarnations, tuple(self.published))
