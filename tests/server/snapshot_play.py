"""What tests do with the state machine that takes snapshots: step by step, or in a random order."""

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

from psfleet.checkpoint import Part
from psfleet.checkpoint.manifest import ShardFile
from psfleet.core.base.errors import NotReady, ServerUnavailable
from psfleet.core.engine.shard.events import SendError
from psfleet_server.snapshots.snapshot_coordinator import (
    AwaitParts,
    BeginCuts,
    CompleteSnapshot,
    Instructions,
    OpenDraft,
    PublishSnapshot,
    ReleaseWorker,
    SettleCuts,
    SnapshotCoordinator,
    SnapshotEvent,
    SnapshotInstruction,
    SnapshotRequest,
    SnapshotTimeouts,
    Standing,
)

INCARNATIONS = {0: 11, 1: 12}
PATH, DRAFT = "/job/snapshot-000001", "/job/.partial"
ASYNC = Standing("async", 0, INCARNATIONS)


class Play:
    """A coordinator with its time. Every call is followed by a check of the coordinator's invariants."""

    def __init__(self) -> None:
        self.now = 100.0
        self._machine = SnapshotCoordinator(SnapshotTimeouts(), lambda: self.now)

    @property
    def coordinator(self) -> SnapshotCoordinator:
        """The coordinator, for the next call; its invariants hold."""
        self._machine.validate()
        return self._machine

    def wait(self, seconds: float = 0.0) -> Instructions:
        """That much time passes, and the coordinator hears of it."""
        self.now += seconds
        return self.coordinator.time_passed()

    def request(self, call: str = "a", seen: int = 0, **expected: Any) -> Instructions:
        """Somebody asks for a snapshot."""
        return self.coordinator.request(call, SnapshotRequest(**expected), seen)

    def begin(self, *standings: Standing, **expected: Any) -> Instructions:
        """Up to where all servers have been asked where they stand."""
        self.request(**expected)
        self.coordinator.draft_opened(PATH, DRAFT)
        return self.coordinator.servers_replied(standings)

    def mark(self, **expected: Any) -> Instructions:
        """An asynchronous snapshot up to where workers are waited for."""
        self.begin(ASYNC, ASYNC, **expected)
        return self.coordinator.servers_replied([ASYNC, ASYNC])

    def learn(
        self, number: int = 1, incarnations: Mapping[int, int] = INCARNATIONS
    ) -> Instructions:
        """All workers learn of a snapshot."""
        instructions: Instructions = []
        for seat, incarnation in incarnations.items():
            instructions = self.coordinator.worker_learned(f"w{seat}", number, seat, incarnation)
        return instructions

    def write(self, **expected: Any) -> Instructions:
        """An asynchronous snapshot up to where its files are on the disk."""
        self.mark(**expected)
        self.learn()
        self.coordinator.servers_replied()
        return self.coordinator.servers_replied(parts({0: (11, 5), 1: (12, 7)}))

    def complete(self, **expected: Any) -> Instructions:
        """A whole snapshot, of workers without states."""
        self.write(**expected)
        return self.publish()

    def publish(self) -> Instructions:
        """The last two steps of a snapshot whose files are on the disk."""
        self.coordinator.published()
        return self.coordinator.servers_replied()


def parts(
    pushes: dict[int, tuple[int, int]], mode: str = "async", round_: int = 0
) -> tuple[Part, ...]:
    """Files of two servers that are cut at the same pushes."""
    return tuple(
        Part(ShardFile(f"file {index}", "", 0, {}, {}), (), mode, round_, pushes)
        for index in range(2)
    )


def failed(instructions: Instructions) -> Exception:
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
        self.play.now += self.dice.choice([0, 0, 0.1, 5])
        for instruction in event(self.play.coordinator):
            self._take(instruction)
        self.play.coordinator.validate()

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
                call, seen = f"r{self.requests}", dice.randrange(3)
                return lambda machine: machine.request(call, expected, seen)
            case 1 | 2 | 3:
                self.learned += 1
                call = f"w{self.learned}"
                return lambda machine: machine.worker_learned(call, number, seat, incarnation)
            case 4:
                last = dice.randrange(3)
                if number:
                    return lambda machine: machine.state_delivered(
                        number, seat, incarnation, last, {}
                    )
                return lambda machine: machine.farewell_delivered(seat, incarnation, [[last, {}]])
            case 5:
                keeps = dice.random() < 0.5
                return lambda machine: machine.worker_introduced(seat, incarnation, keeps=keeps)
            case 6:
                left = frozenset(s for s in seats if dice.random() < 0.3)
                return lambda machine: machine.members_changed(left, frozenset(seats))
            case 7:
                failure = None if dice.random() < 0.5 else NotReady("members change")
                return lambda machine: machine.cut_ended(number, failure)
            case _:
                return SnapshotCoordinator.time_passed

    def _take(self, instruction: SnapshotInstruction) -> None:
        match instruction:
            case OpenDraft(number):
                assert not self.due
                assert number > self.number
                self.number = number
                self._reply(lambda machine: machine.draft_opened(PATH, DRAFT))
            case BeginCuts(_, cutting):
                self.begun.append(cutting.number)
                standings = [self._standing(), self._standing()]
                self._reply(lambda machine: machine.servers_replied(standings))
            case AwaitParts(_, cut):
                written = () if cut else parts({})
                self._reply(lambda machine: machine.servers_replied(written))
            case PublishSnapshot(number):
                self.published.append(number)
                self._reply(SnapshotCoordinator.published)
            case SettleCuts(number, complete):
                assert not complete or number in self.published
                self.settled.append(number)
                self.due = [SnapshotCoordinator.servers_replied]
            case ReleaseWorker(call):
                self.replies[f"{call}"] += 1
            case SendError(call):
                self.replies[f"{call}"] += 1
            case CompleteSnapshot(call, number):
                assert number in self.published
                self.replies[f"{call}"] += 1

    def _reply(self, event: SnapshotEvent) -> None:
        if self.dice.random() < 0.1:
            error = ServerUnavailable("it is away")
            self.due = [lambda machine: machine.step_failed(error)]
        else:
            self.due = [event]

    def _standing(self) -> Standing:
        incarnations = self.dice.choice([INCARNATIONS, INCARNATIONS, INCARNATIONS, {0: 11}, {}])
        mode = "async" if self.number % 2 else "sync"
        return Standing(mode, self.dice.randrange(5), incarnations, tuple(self.published))
