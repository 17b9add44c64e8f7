"""The log of one server process of the model, and the core that it builds, with a standby or as one."""

from typing import Any

from tests.protocol.model.messages import Hello, Replicate, Replicated, SnapshotDone, SnapshotNoted
from tests.protocol.model.settings import Rule, Settings
from tests.protocol.model.values import Core, CutNumber, Record, View, key_of
from tests.protocol.scheduler import Append, Disk, Instruction, Send, Store, WriteFile

__all__ = ["COORDINATOR", "Replica"]

COORDINATOR = "C"


class Replica:
    """Records in order: logged, sent to the standby, applied, and then answered.

    Attributes:
        role: None until a Freeze or a primary says which.
        attachment: As a standby, the one of its primary that it answers.
        standby: As a primary; `attached` is that one's attachment. `synced`: it is required (R1).
        done: Records that are applied.
        waiters: Who waits for a record, by its key, and the answer.
        base: What the first record of the log follows; None: nothing.
    """

    def __init__(
        self, name: str, shard: int, blocks: list[int], settings: Settings, disk: Disk, boot: int
    ) -> None:
        self.name, self.shard, self.blocks, self.settings, self.boot = (
            name,
            shard,
            blocks,
            settings,
            boot,
        )
        self.out: list[Instruction] = []
        self.log: list[Record] = list(disk.log)
        self.files: dict[CutNumber, Core] = dict(disk.files)
        self.attachment: int = disk.fields["attachment"]
        self.generation: int = disk.fields["generation"]
        self.base: Core | None = disk.fields["base"]
        self.term: int = disk.fields["term"] if settings.obeys(Rule.TERM_ON_DISK) else 0
        self.role: str | None = None
        self.thawed = False
        self.standby: str | None = None
        self.attached = 0
        self.synced = False
        self.acknowledged = 0
        self.core = Core.fresh(blocks)
        self.done = 0
        self.waiters: dict[tuple[Any, ...], list[tuple[str, Any]]] = {}
        self.reported: dict[CutNumber, SnapshotDone] = {}

    def obeys(self, rule: Rule) -> bool:
        """Whether the rule holds in this run."""
        return self.settings.obeys(rule)

    def send(self, to: str, message: Any) -> None:
        """Send a message when what was ordered before is done."""
        self.out.append(Send(to, message))

    # -- the log -------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Begin again to apply the log."""
        self.core = self.base.copy() if self.base else Core.fresh(self.blocks)
        self.done = 0

    def propose(self, record: Record) -> None:
        """Log a record; it takes effect once it is safe."""
        self.log.append(record)
        if self.settings.durability == "log":
            self.out.append(Append(record))
        if self.standby:
            self.send(
                self.standby,
                Replicate(self.term, self.attached, len(self.log) - 1, (record,), self.generation),
            )
        self.advance()

    def advance(self) -> None:
        """Apply what is safe, answer who waits for it, and see what follows from that."""
        limit = len(self.log)
        if self.standby and self.synced and self.obeys(Rule.STANDBY_FIRST):
            limit = min(limit, self.acknowledged)
        while self.done < limit:
            record = self.log[self.done]
            self.done += 1
            self.core.apply(record)
            self.applied(record)
            for to, answer in self.waiters.pop(key_of(record), []):
                self.send(to, answer)
        self.advanced()

    def applied(self, record: Record) -> None:
        """A record has taken effect."""
        raise NotImplementedError

    def advanced(self) -> None:
        """Everything that is safe has taken effect."""
        raise NotImplementedError

    def follow(self) -> None:
        """Become a standby that knows nothing of clients."""
        raise NotImplementedError

    def keep(self, number: CutNumber, view: View | None) -> None:
        """Write a snapshot of the core as it is, and report it until that is noted."""
        core = self.core.copy()
        self.files[number] = core
        self.out.append(WriteFile(number, core))
        self.reported[number] = SnapshotDone(
            number, view, self.shard, self.generation, self.term, dict(core.sequences), core.closed
        )
        self.send(COORDINATOR, self.reported[number])

    def noted(self, message: SnapshotNoted) -> None:
        """The coordinator knows of a snapshot."""
        self.reported.pop(message.number, None)

    def beat(self) -> None:
        """Say to coordinator and standby again what they may not have heard."""
        caught_up = (self.standby, self.attached) if self.synced and self.standby else None
        self.send(COORDINATOR, Hello(self.name, self.shard, self.boot, caught_up))
        for report in self.reported.values():
            self.send(COORDINATOR, report)
        if self.role == "primary" and self.standby:
            start = self.acknowledged if self.synced else 0
            self.send(
                self.standby,
                Replicate(
                    self.term,
                    self.attached,
                    start,
                    tuple(self.log[start:]),
                    self.generation,
                    full=not self.synced,
                    base=None if self.synced else self.base,
                ),
            )

    # -- primary and standby -------------------------------------------------------------------

    def replicate(self, source: str, message: Replicate) -> None:
        """As a standby: take records; a deposed primary is never answered."""
        if message.term < self.term or (self.role == "primary" and message.term <= self.term):
            return
        if message.full and message.attachment > self.attachment:
            self._copy(message)
        if message.attachment != self.attachment or self.role == "primary":
            return
        if message.term > self.term:
            self.term = message.term
            self.out.append(Store({"term": self.term}))
        for place, record in enumerate(message.records, message.start):
            if place == len(self.log):
                self.log.append(record)
                self.out.append(Append(record))
        self.send(source, Replicated(self.attachment, len(self.log)))

    def _copy(self, message: Replicate) -> None:
        self.role, self.thawed, self.standby, self.synced = "standby", False, None, False
        self.waiters = {}
        self.follow()
        self.log = list(message.records)
        self.attachment, self.generation = message.attachment, message.generation
        self.base = message.base
        self.rebuild()
        self.out.append(
            Store(
                {
                    "attachment": self.attachment,
                    "base": self.base,
                    "generation": self.generation,
                    "log": list(self.log),
                }
            )
        )

    def replicated(self, message: Replicated) -> None:
        """As a primary: the standby has more."""
        if self.role != "primary" or not self.standby or message.attachment != self.attached:
            return
        self.acknowledged = max(self.acknowledged, message.length)
        if not self.synced and self.acknowledged >= len(self.log):
            self.synced = True  # required first, registered later (R10)
        self.advance()
