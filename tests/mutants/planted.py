"""Planted faults: each changes one line of what keeps a fleet exact, and names the tests that notice it."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A fault of one line.

    Attributes:
        old: Text that stands once in the shipped code.
        new: What stands there instead.
        tests: Tests of `make test` that are to fail with it.
    """

    old: str
    new: str
    tests: str


SHARD = "tests/shard tests/protocol"
PLAIN = "tests/server/test_plain_calls.py"
FLEET = "tests/cluster tests/consistency"
ROWS = "tests/tables"
LOG = "tests/recovery tests/fuzz tests/standby"
COORDINATOR = "tests/server/test_coordinator.py tests/protocol"
STREAM = "tests/session tests/protocol tests/cluster"
DATA = "tests/membership tests/protocol"

_FAULTS = {
    SHARD: """
- if push.sequence <= self.closed:
+ if push.sequence < self.closed:
- if push.sequence != self.closed + 1:
+ if push.sequence > self.closed + 2:
- if number < self.first.get(worker, 1):
+ if number <= self.first.get(worker, 1):
- return number > self.rests.get(worker, 0)
+ return number >= self.rests.get(worker, 0)
- if self.rests[seat] > slowest}
+ if self.rests[seat] >= slowest}
- self.committed[seat] = push.sequence
+ self.committed[seat] = push.sequence - 1
- self.committed.get(seat, 0) <= self.closed
+ self.committed.get(seat, 0) < self.closed
- for seat in sorted(self.held)]
-         self.held.clear()
+ for seat in self.held]
+         self.held.clear()
- self.counted[push.worker] = self.closed
+ self.counted[push.worker] = self.closed - 1
- return push.sequence > last
+ return push.sequence >= last
- if push.sequence - 1 - push.skipped > last:
+ if push.sequence - 1 - push.skipped > last + 1:
- if event.view < self.promised or event.view <= self.view:
+ if event.view < self.view:
- if incarnation < present:
+ if incarnation <= present:
- return not self.frozen and self.promised <= self.view
+ return not self.frozen
- if event.switch <= self.switches:
+ if event.switch < self.switches:
- return pull.commit <= self.rounds.closed
+ return True
- last = max(self.progress(), event.last)
+ last = self.progress()""",
    PLAIN: """
-         shard.note(push)
+         shard.staleness.pushed(push.worker)
- keeps = self.tables.changes.is_kept, self.journal is not None
+ keeps = self.tables.changes.is_kept, False
- or turn <= shared.turn:
-                 return False
+ or not turn:
+                 return False
- unknown == 0 or (unknown > 0 and self._account.can_surely_add(count))
+ unknown >= 0""",
    SHARD + " tests/cluster": """
- return write.number > self.writes[write.worker]
+ return True""",
    SHARD + " tests/snapshots": """
- if self.round < last_closed:
+ if self.round + 1 < last_closed:
- sequence > now.marks.get(worker, sequence)
+ sequence > now.marks.get(worker, sequence) + 1
- return now.round is not None and now.round <= last_closed
+ return now.round is not None
- self.cuts.give_up()  # the snapshot does not know
+ pass  # the snapshot does not know""",
    ROWS: """
- if sum(bounds) <= max(budget.available_for(), 0):
+ if max(bounds, default=0) <= max(budget.available_for(), 0):
- totals = self._taken if plans is None else self._taken | plans
+ totals = self._taken
-         budget.held = before
+         pass
- return max(missing, capacity // _PART) if missing > 0 else 0
+ return max(missing - 1, capacity // _PART) if missing > 1 else 0
- first = max(position, self.next - self._held)
+ first = position
- over = [step for time, step in ticks if time <= now - ttl]
+ over = [step for time, step in ticks if time <= now]
- self._sweep(EVERY, step, step - self._shrinks[-unseen]
+ self._sweep(EVERY, step, step - self._shrinks[0]
- ["counts"] + 1 >= self._needed
+ ["counts"] >= self._needed
- first[~np.isin(first, ids)][:count]
+ first[:count]
- if not self.evicts and len(new) > max(row_limit - row_count, 0):
+ if not self.evicts and len(new) > row_limit:""",
    FLEET: """
- np.float32(1.0 / count)
+ np.float32(1.0)""",
    "tests/consistency tests/shard": """
- return [seat for seat in live if self.at.get(seat, 0) < slowest]
+ return []""",
    "tests/server/test_snapshot_coordinator.py": """
-         if now.request.every:
-             self._last
+         if now.round:
+             self._last
- max(self._number, now.seen, self._workers.last_snapshot) + 1
+ max(self._number, now.seen) + 1""",
    COORDINATOR: """
- if arrival.number <= self.completed:
+ if arrival.number < self.completed:
- if len(self._waiting) < max(len(seats), 1) or not self._waiting.keys() >= set(seats):
+ if not self._waiting:
- if self.switch is not None and number <= self.switch.number:
+ if False:
- if len(change.reports) < self.servers:
+ if len(change.reports) < self.servers - 1:
- if seat is not None and boot in seat.earlier:
+ if False:
- self.closed = max(report.closed for report in reports)
+ self.closed = min(report.closed for report in reports)
- max(incarnation.first - 1, *lasts) if
+ min(lasts) if
- if last is not None and self.closed <= last and not seat.left:
+ if last is not None and not seat.left:
- first = self.closed + LOOKAHEAD + 1
+ first = self.closed + 1""",
    COORDINATOR + " tests/cluster": """
- for worker in sorted(self._waiting)]
+ for worker in self._waiting]""",
    "tests/membership tests/server": """
- if at - last[1] > patience:
+ if at - last[1] > 1000 + patience:""",
    DATA + " tests/pipeline": """
- seat for seat in seats if seat % self.group == 0
+ seat for seat in seats""",
    DATA: """
- if number >= used
+ if number > used
- max(leases.confirmed, leases.forgotten) < leases.count
+ leases.forgotten < leases.count""",
    COORDINATOR + " tests/membership": """
- if last <= sequences.get(server, -1) <= sequences[0]:
+ if False:""",
    LOG + " tests/server": """
- return not self._fsync or self._synced >= end
+ return True""",
    LOG: """
- if after.snapshot != number or last not in (None, (after.end, after.chain)):
+ if after.snapshot != number:
- if _CRC.unpack_from(head, _FIELDS.size) != (chain,) or kind == 0:
+ if kind == 0:
- if zlib.crc32(body.data) != crc:
+ if False:
- self._cut_off(self._end)
-             size
+ size""",
    LOG + " tests/snapshots": """
- if number_of_file < number:
+ if number_of_file <= number:""",
    "tests/standby tests/protocol": """
- if number <= self._floor:
+ if number < self._floor:
- return not self.required or self._taken >= end
+ return True
- return self._connected and self._attach == attach
+ return self._connected
- self._attach, self.required = 0, False
+ self._attach, self.required = 0, self.required""",
    "tests/standby": """
- if self._attach and self._attach <= self._floor:
+ if self._attach:""",
    STREAM: """
- if number <= self.last_snapshot:
+ if number < self.last_snapshot:
- last = max(self._begun, session.sequence)
+ last = session.sequence
- before = self._addressed or (sequence - 1,) * len(goes_to)
+ before = (sequence - 1,) * len(goes_to)
- return self.collectives < self._completed_before
+ return self.collectives <= self._completed_before
- if self.changes > self._switches:
+ if self.changes >= self._switches:""",
    ROWS + " tests/checkpoint": """
- if since is not None and since[0] == self._sets:
+ if since is not None:""",
    "tests/serving/test_followers.py": """
- ids, removed = _part(changes.ids, request), _part(changes.removed, request)
+ ids, removed = _part(changes.ids, request), NO_IDS
- lambda: rows_of_snapshot(path, self._form, part=self._part),
+ lambda: rows_of_snapshot(path, self._form),
- [: 2 if only_reads else 1]
+ [:2]""",
    "tests/shard/test_follower_changes.py": """
- changes.first = changes.first or step
+ changes.first = step""",
}
"""By the tests that notice them; text with "- " before each line becomes the text below it."""

_HUNK = re.compile(r"((?:^- .*\n)+)((?:^\+ .*\n)+)", re.MULTILINE)


def _text(lines: str) -> str:
    return "\n".join(line[2:] for line in lines.splitlines())


MUTANTS = [
    Mutant(_text(old), _text(new), tests)
    for tests, faults in _FAULTS.items()
    for old, new in _HUNK.findall(f"{faults}\n")
]
