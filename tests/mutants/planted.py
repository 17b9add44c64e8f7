"""Planted faults: each changes one line of what keeps a fleet exact, and names the tests that notice it."""

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

MUTANTS = (
    # -- shard: rounds and incarnations --------------------------------------------------------------
    Mutant("if push.sequence <= self.closed:", "if push.sequence < self.closed:", SHARD),
    Mutant("if push.sequence != self.closed + 1:", "if push.sequence > self.closed + 2:", SHARD),
    Mutant(
        "if number < self.first.get(worker, 1):", "if number <= self.first.get(worker, 1):", SHARD
    ),
    Mutant(
        "return number > self.rests.get(worker, 0)",
        "return number >= self.rests.get(worker, 0)",
        SHARD,
    ),
    Mutant("if self.rests[seat] > slowest}", "if self.rests[seat] >= slowest}", SHARD),
    Mutant(
        "self.committed[seat] = push.sequence", "self.committed[seat] = push.sequence - 1", SHARD
    ),
    Mutant(
        "self.committed.get(seat, 0) <= self.closed",
        "self.committed.get(seat, 0) < self.closed",
        SHARD,
    ),
    Mutant(
        "for seat in sorted(self.held)]\n        self.held.clear()",
        "for seat in self.held]\n        self.held.clear()",
        SHARD,
    ),
    Mutant(
        "self.counted[push.worker] = self.closed",
        "self.counted[push.worker] = self.closed - 1",
        SHARD,
    ),
    Mutant("return push.sequence > last", "return push.sequence >= last", SHARD),
    Mutant("        shard.note(push)", "        shard.staleness.pushed(push.worker)", PLAIN),
    Mutant(
        "keeps = self.tables.changes.is_kept, self.journal is not None",
        "keeps = self.tables.changes.is_kept, False",
        PLAIN,
    ),
    Mutant(
        "or turn <= shared.turn:\n                return False",
        "or not turn:\n                return False",
        PLAIN,
    ),
    Mutant(
        "unknown == 0 or (unknown > 0 and self._account.can_surely_add(count))",
        "unknown >= 0",
        PLAIN,
    ),
    Mutant(
        "if push.sequence - 1 - push.skipped > last:",
        "if push.sequence - 1 - push.skipped > last + 1:",
        SHARD,
    ),
    Mutant(
        "return write.number > self.writes[write.worker]", "return True", SHARD + " tests/cluster"
    ),
    Mutant(
        "if event.view < self.promised or event.view <= self.view:",
        "if event.view < self.view:",
        SHARD,
    ),
    Mutant("if incarnation < present:", "if incarnation <= present:", SHARD),
    Mutant(
        "return not self.frozen and self.promised <= self.view", "return not self.frozen", SHARD
    ),
    Mutant("if event.switch <= self.switches:", "if event.switch < self.switches:", SHARD),
    Mutant("return pull.commit <= self.rounds.closed", "return True", SHARD),
    Mutant(
        "if self.round < last_closed:",
        "if self.round + 1 < last_closed:",
        SHARD + " tests/snapshots",
    ),
    Mutant(
        "sequence > now.marks.get(worker, sequence)",
        "sequence > now.marks.get(worker, sequence) + 1",
        SHARD + " tests/snapshots",
    ),
    Mutant(
        "return now.round is not None and now.round <= last_closed",
        "return now.round is not None",
        SHARD + " tests/snapshots",
    ),
    Mutant(
        "self.cuts.give_up()  # the snapshot does not know",
        "pass  # the snapshot does not know",
        SHARD + " tests/snapshots",
    ),
    Mutant(
        "if sum(bounds) <= max(budget.available_for(), 0):",
        "if max(bounds, default=0) <= max(budget.available_for(), 0):",
        ROWS,
    ),
    Mutant(
        "totals = self._taken if plans is None else self._taken | plans",
        "totals = self._taken",
        ROWS,
    ),
    Mutant("        budget.held = before\n", "        pass\n", ROWS),
    Mutant("np.float32(1.0 / count)", "np.float32(1.0)", FLEET),
    Mutant("last = max(self.progress(), event.last)", "last = self.progress()", SHARD),
    Mutant(
        "return [seat for seat in live if self.at.get(seat, 0) < slowest]",
        "return []",
        "tests/consistency tests/shard",
    ),
    # -- snapshot coordinator ------------------------------------------------------------------------
    Mutant(
        "        if now.request.every:\n            self._last",
        "        if now.round:\n            self._last",
        "tests/server/test_snapshot_coordinator.py",
    ),
    Mutant(
        "max(self._number, now.seen, self._workers.last_snapshot) + 1",
        "max(self._number, now.seen) + 1",
        "tests/server/test_snapshot_coordinator.py",
    ),
    # -- coordinator ---------------------------------------------------------------------------------
    Mutant(
        "if arrival.number <= self.completed:", "if arrival.number < self.completed:", COORDINATOR
    ),
    Mutant(
        "if len(self._waiting) < max(len(seats), 1) or not self._waiting.keys() >= set(seats):",
        "if not self._waiting:",
        COORDINATOR,
    ),
    Mutant(
        "for worker in sorted(self._waiting)]",
        "for worker in self._waiting]",
        COORDINATOR + " tests/cluster",
    ),
    Mutant(
        "if self.switch is not None and number <= self.switch.number:", "if False:", COORDINATOR
    ),
    Mutant(
        "if len(change.reports) < self.servers:",
        "if len(change.reports) < self.servers - 1:",
        COORDINATOR,
    ),
    Mutant("if seat is not None and boot in seat.earlier:", "if False:", COORDINATOR),
    Mutant(
        "if at - last[1] > patience:",
        "if at - last[1] > 1000 + patience:",
        "tests/membership tests/server",
    ),
    Mutant(
        "self.closed = max(report.closed for report in reports)",
        "self.closed = min(report.closed for report in reports)",
        COORDINATOR,
    ),
    Mutant("max(incarnation.first - 1, *lasts) if", "min(lasts) if", COORDINATOR),
    Mutant(
        "if last is not None and self.closed <= last and not seat.left:",
        "if last is not None and not seat.left:",
        COORDINATOR,
    ),
    Mutant("first = self.closed + LOOKAHEAD + 1", "first = self.closed + 1", COORDINATOR),
    Mutant(
        "seat for seat in seats if seat % self.group == 0",
        "seat for seat in seats",
        DATA + " tests/pipeline",
    ),
    Mutant("if number >= used", "if number > used", DATA),
    Mutant(
        "max(leases.confirmed, leases.forgotten) < leases.count",
        "leases.forgotten < leases.count",
        DATA,
    ),
    Mutant(
        "if last <= sequences.get(server, -1) <= sequences[0]:",
        "if False:",
        COORDINATOR + " tests/membership",
    ),
    # -- durability ----------------------------------------------------------------------------------
    Mutant("return not self._fsync or self._synced >= end", "return True", LOG + " tests/server"),
    Mutant(
        "if after.snapshot != number or last not in (None, (after.end, after.chain)):",
        "if after.snapshot != number:",
        LOG,
    ),
    Mutant(
        "if _CRC.unpack_from(head, _FIELDS.size) != (chain,) or kind == 0:", "if kind == 0:", LOG
    ),
    Mutant("if zlib.crc32(body.data) != crc:", "if False:", LOG),
    Mutant("self._cut_off(self._end)\n            size", "size", LOG),
    Mutant("if number_of_file < number:", "if number_of_file <= number:", LOG + " tests/snapshots"),
    Mutant("if number <= self._floor:", "if number < self._floor:", "tests/standby tests/protocol"),
    Mutant(
        "return not self.required or self._taken >= end",
        "return True",
        "tests/standby tests/protocol",
    ),
    Mutant(
        "return self._connected and self._attach == attach",
        "return self._connected",
        "tests/standby tests/protocol",
    ),
    Mutant(
        "self._attach, self.required = 0, False",
        "self._attach, self.required = 0, self.required",
        "tests/standby tests/protocol",
    ),
    Mutant("if self._attach and self._attach <= self._floor:", "if self._attach:", "tests/standby"),
    # -- the worker's stream -------------------------------------------------------------------------
    Mutant("if number <= self.last_snapshot:", "if number < self.last_snapshot:", STREAM),
    Mutant("last = max(self._begun, session.sequence)", "last = session.sequence", STREAM),
    Mutant(
        "before = self._addressed or (sequence - 1,) * len(goes_to)",
        "before = (sequence - 1,) * len(goes_to)",
        STREAM,
    ),
    Mutant(
        "return self.collectives < self._completed_before",
        "return self.collectives <= self._completed_before",
        STREAM,
    ),
    Mutant("if self.changes > self._switches:", "if self.changes >= self._switches:", STREAM),
    # -- tables --------------------------------------------------------------------------------------
    Mutant(
        "return max(missing, capacity // _PART) if missing > 0 else 0",
        "return max(missing - 1, capacity // _PART) if missing > 1 else 0",
        ROWS,
    ),
    Mutant("first = max(position, self.next - self._held)", "first = position", ROWS),
    Mutant(
        "if since is not None and since[0] == self._sets:",
        "if since is not None:",
        ROWS + " tests/checkpoint",
    ),
    Mutant(
        "over = [step for time, step in ticks if time <= now - ttl]",
        "over = [step for time, step in ticks if time <= now]",
        ROWS,
    ),
    Mutant(
        "self._sweep(EVERY, step, step - self._shrinks[-unseen]",
        "self._sweep(EVERY, step, step - self._shrinks[0]",
        ROWS,
    ),
    Mutant('["counts"] + 1 >= self._needed', '["counts"] >= self._needed', ROWS),
    Mutant("first[~np.isin(first, ids)][:count]", "first[:count]", ROWS),
    Mutant(
        "if not self.evicts and len(new) > max(row_limit - row_count, 0):",
        "if not self.evicts and len(new) > row_limit:",
        ROWS,
    ),
    # -- followers -----------------------------------------------------------------------------------
    Mutant(
        "ids, removed = _part(changes.ids, request), _part(changes.removed, request)",
        "ids, removed = _part(changes.ids, request), NO_IDS",
        "tests/serving/test_followers.py",
    ),
    Mutant(
        "changes.first = changes.first or step",
        "changes.first = step",
        "tests/shard/test_follower_changes.py",
    ),
    Mutant(
        "lambda: rows_of_snapshot(path, self._form, part=self._part),",
        "lambda: rows_of_snapshot(path, self._form),",
        "tests/serving/test_followers.py",
    ),
    Mutant("[: 2 if only_reads else 1]", "[:2]", "tests/serving/test_followers.py"),
)
