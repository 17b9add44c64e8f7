"""Checks, after a job under chaos, the promises of docs/chaos.md.

The launcher calls `findings` when the job has ended, and `show` prints the results. The checks read audit
files, logs and snapshots, and look for processes, files and shared memory that should be gone.
"""

import gc
import os
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from psfleet.core.base.errors import PsfleetError
from psfleet.core.base.json_documents import Format
from psfleet.core.base.object_store import is_whole, own_snapshots
from psfleet.core.base.scaling_files import read_scale, read_scaled
from psfleet_launch.chaos.audit import HELD, AuditedPushes, AuditedRow, read_pushed
from psfleet_launch.chaos.follower_processes import NotedCut, noted_cuts

_REPORT = Format("chaos report")
_MOMENT = 30.0  # seconds that gRPC may take to close its file descriptors
_VERDICTS = {True: "kept", False: "BROKEN", None: "not tried"}


@dataclass(frozen=True)
class PromiseResult:
    """Result of the check of one promise. `kept` is None if this job could not test the promise."""

    promise: str
    kept: bool | None
    evidence: str


@dataclass(frozen=True)
class Leftovers:
    """File descriptors and shared memory that a job might leave behind."""

    descriptors: frozenset[str]
    memory: frozenset[str]

    @classmethod
    def now(cls) -> "Leftovers":
        """Return the present file descriptors of this process, and psfleet's shared memory on this
        machine."""
        shared = Path("/dev/shm")
        names = [path.name for path in shared.iterdir()] if shared.is_dir() else []
        return cls(
            frozenset(os.listdir("/proc/self/fd")),
            frozenset(name for name in names if "psfleet" in name),
        )


@dataclass(frozen=True)
class FinishedJob:
    """A job that has ended, and where to find its files.

    Attributes:
        left: Processes of the job that were still running after its end.
        audit: Folder of the processes' audit files.
        snapshots: Folder or URL of the snapshots.
        private: Private folder of the job's sockets. It should be gone.
        before: Resources that existed before the job.
        began: Number of servers at the start of the job.
        moves: Number of times that the number of servers has changed.
    """

    code: int
    left: Sequence[str]
    audit: Path
    logs: Path
    snapshots: str
    private: Path
    before: Leftovers
    began: int
    moves: int = 0

    @property
    def servers(self) -> int:
        """Number of servers at the end of the job."""
        return len(read_scaled(self.logs).endpoints) or self.began

    @property
    def held(self) -> dict[int, dict[str, Any]]:
        """Final state of each server that ended regularly (`held.<server>.json`), by the server's number.

        Servers that were removed before the end of the job are left out.
        """
        states, kinds = {}, {"mode": str, "audit": dict, "tables": dict}
        for server in range(self.servers):
            path = self.audit / f"held.{server}.json"
            if path.exists():
                values = HELD.read(path, **kinds)
                states[server] = dict(zip(kinds, values, strict=True))
        return states


def findings(run: FinishedJob, plain: FinishedJob | None) -> list[PromiseResult]:
    """Check every promise.

    Args:
        plain: The same job without faults. None in modes other than sync, which do not promise identical
            bits.
    """
    return [
        _bits(run, plain),
        _once(run),
        _logs(run),
        *_cuts(run),
        _moved(run),
        _ended(run),
        followed(run, plain),
    ]


def followed(run: FinishedJob, plain: FinishedJob | None) -> PromiseResult:
    """Check that followers always had all acknowledged pushes.

    In sync mode also check that their weights are bit-identical to those in the job without faults.
    """
    promise = "8 a follower's cut equals the trainer"
    cuts = [*noted_cuts(run.audit)]
    if not cuts:
        return PromiseResult(
            promise, None, "no follower had a cut; a longer job, --chaos-followers"
        )
    wrong = [text for cut in cuts for text in cut.wrong]
    evidence = (
        f"{len(cuts)} cuts have all pushes that were acknowledged before, and none is taken back"
    )
    if plain is None:
        return PromiseResult(promise, not wrong, "; ".join(wrong[:3]) or evidence)
    expected = {cut.round: cut.tables for cut in noted_cuts(plain.audit) if cut.round is not None}
    same = [cut for cut in cuts if cut.round in expected]
    wrong += [f"other bits at round {cut.round}" for cut in same if _differs(cut, expected)]
    evidence += f"; {len(same)} of rounds that were noted without faults, too, have the same bits"
    return PromiseResult(
        promise, False if wrong else bool(same) or None, "; ".join(wrong[:3]) or evidence
    )


def _differs(cut: NotedCut, expected: Mapping[int, Mapping[str, str]]) -> bool:
    """Return whether a table of the cut is missing, or has other weights than in the run without faults.

    A table may be created a round earlier or later in another run. So a table that the cut lacks is missing
    only if the run without faults had it already in an earlier round.
    """
    assert cut.round is not None
    expected_digests = expected[cut.round]
    older = {name for number in expected if number < cut.round for name in expected[number]}
    differs = any(
        expected_digests.get(name, digest) != digest for name, digest in cut.tables.items()
    )
    return differs or not older <= cut.tables.keys()


def _bits(run: FinishedJob, plain: FinishedJob | None) -> PromiseResult:
    promise = "1 the bits are those of a run without faults"
    if plain is None:
        return PromiseResult(promise, None, "promised in sync mode")
    if len(plain.held) < plain.servers or len(run.held) < run.servers:
        return _unknown(promise, run)
    actual, expected = _tables(run), _tables(plain)
    names = actual.keys() | expected.keys()
    if wrong := sorted(name for name in names if actual.get(name) != expected.get(name)):
        return PromiseResult(promise, False, f"other bits in {', '.join(wrong)}")
    where = f"{run.servers} servers"
    where += "" if run.servers == plain.servers else f", and on {plain.servers} without faults"
    return PromiseResult(promise, True, f"{len(expected)} tables are equal on {where}")


def _tables(run: FinishedJob) -> dict[str, tuple[int, int, int]]:
    """Return, for each table, its number of updates, its number of rows on all servers, and their total
    hash."""
    parts: dict[str, list[dict[str, int]]] = defaultdict(list)
    for state in run.held.values():
        for name, part in state["tables"].items():
            parts[name].append(part)
    return {
        name: (
            max(part["step"] for part in table_parts),
            sum(part["rows"] for part in table_parts),
            sum(part["sum"] for part in table_parts) % 2**64,
        )
        for name, table_parts in parts.items()
    }


def _unknown(promise: str, run: FinishedJob) -> PromiseResult:
    """Return the result for a job in which some servers have no final state.

    This happens if a server is killed after all workers have left, because it is not restarted then. Any
    other server that is not restarted ends the job with an error.
    """
    evidence = f"{len(run.held)} of {run.servers} servers ended in order"
    if run.code:
        return PromiseResult(promise, False, evidence)
    return PromiseResult(promise, None, f"{evidence}, others died when all workers had left")


def _once(run: FinishedJob) -> PromiseResult:
    promise = "2 an acknowledged push takes effect once"
    pushes = read_pushed(run.audit)
    if len(run.held) < run.servers:
        return _unknown(promise, run)
    # A row of the audit starts at 0, each applied push adds 1, and the sequence numbers of a worker's
    # pushes have no gaps. So the count must be at least the number of acknowledged pushes and at most the
    # number of sent pushes of the row. (A push may be applied although its reply was lost.) Counts are
    # added over all servers, to find rows that were copied to a second server and exist twice.
    counts: Counter[tuple[int, int]] = Counter()
    for _, worker, row, count in _counted(run):
        counts[worker, row] += count
    wrong = [text for key, steps in pushes.items() if (text := _miscounted(counts, key, steps))]
    if wrong:
        return PromiseResult(promise, False, "; ".join(wrong[:3]))
    acknowledged = sum(p.acknowledged - p.first + 1 for p in pushes.values() if p.acknowledged)
    sent = sum(p.last - p.first + 1 for p in pushes.values())
    incarnations = len({(row.worker, row.incarnation) for row in pushes})
    servers = len({row.server for row in pushes})
    return PromiseResult(
        promise,
        bool(pushes) or None,
        f"{acknowledged:,} acknowledged of {sent:,} pushes to {servers} servers in {incarnations} "
        "incarnations are counted by the audit tables",
    )


def _counted(run: FinishedJob) -> Iterator[tuple[int, int, int, int]]:
    """Yield (server, worker, row, count) for each row of the audit."""
    for server, state in run.held.items():
        for worker, rows in state["audit"].items():
            for row, count in rows.items():
                yield server, int(worker), int(row), count


def _miscounted(
    counts: Mapping[tuple[int, int], int], key: AuditedRow, pushes: AuditedPushes
) -> str:
    """Describe an error in the count of an incarnation on a server, or return "" if the count is right."""
    count = counts.get((key.worker, key.row), 0)
    acknowledged = pushes.acknowledged - pushes.first + 1 if pushes.acknowledged else 0
    sent = pushes.last - pushes.first + 1
    if acknowledged <= count <= sent:
        return ""
    return (
        f"{count} pushes of incarnation {key.incarnation} of worker {key.worker} to server {key.server} "
        f"are counted, of which it has sent {sent} and got {acknowledged} acknowledged"
    )


def _moved(run: FinishedJob) -> PromiseResult:
    promise = "6 rows move to other servers, all and once"
    total, _ = read_scale(run.logs)
    if not run.moves:
        evidence = f"none of {total} requests was carried out, at a collective" if total else "none"
        why = (
            f"{evidence}; a longer job with more collectives"
            if total
            else "the job cannot, or had no time"
        )
        return PromiseResult(promise, None, why)
    if len(run.held) < run.servers:
        return _unknown(promise, run)
    import numpy as np

    from psfleet_launch.chaos.injection import owners  # loads NumPy

    rows = [(server, row) for server, _, row, _ in _counted(run)]
    held_by = np.array([server for server, _ in rows])
    owned_by = owners(np.array([row for _, row in rows], np.int64), run.servers)
    if strange := int((held_by != owned_by).sum()):
        evidence = (
            f"{strange} of {len(rows)} rows of the audit are on a server that does not own them"
        )
        return PromiseResult(promise, False, evidence)
    return PromiseResult(
        promise,
        not run.code,
        f"{run.moves} of {total} requests carried out; {len(rows)} rows of the audit are each on its owner",
    )


def _logs(run: FinishedJob) -> PromiseResult:
    promise = "3 the log is the truth"
    logs = sorted({*_present_logs(run)})
    if not logs:
        return PromiseResult(promise, None, "no log is kept; --durability log")
    program = [sys.executable, "-P", "-m", "psfleet_server.durability.inspect_log", "replay"]
    for log in logs:
        process = subprocess.run(
            [*program, str(log), run.snapshots], capture_output=True, text=True, check=False
        )
        if process.returncode:
            last = (process.stderr or process.stdout).strip().splitlines()[-1:]
            return PromiseResult(promise, False, f"{log.relative_to(run.logs)}: {' '.join(last)}")
    return PromiseResult(promise, True, f"{len(logs)} logs are whole and replay to their end")


def _present_logs(run: FinishedJob) -> Iterator[Path]:
    """Yield the first file of each server's log since the number of servers last changed."""
    generation = read_scaled(run.logs).generation
    name = re.compile(
        rf"(server\.(\d+){f'.move{generation}' if generation else ''})(\.\d{{6,}})?\.log"
    )
    for path in [*run.logs.glob("server.*.log"), *run.logs.glob("standby.*/server.*.log")]:
        match = name.fullmatch(path.name)
        if match and int(match[2]) < run.servers:
            yield path.with_name(f"{match[1]}.log")


def _cuts(run: FinishedJob) -> list[PromiseResult]:
    names = ("4 a snapshot is one cut", "5 snapshots are checksummed and whole")
    paths = [*filter(is_whole, own_snapshots(run.snapshots))]
    if not paths:
        return [PromiseResult(name, None, "none was taken; --snapshot-every") for name in names]
    torn = []
    for path in paths:
        try:
            torn += [f"{path[-15:]}: {text}" for text in _torn(path)]
        except PsfleetError as error:
            return [PromiseResult(name, False, f"{path[-15:]}: {error}") for name in names]
    evidence = f"in each of {len(paths)} all servers have counted the same pushes of each worker"
    return [
        PromiseResult(names[0], not torn, "; ".join(torn[:3]) or evidence),
        PromiseResult(names[1], True, f"{len(paths)} verified, every byte"),
    ]


def _torn(path: str) -> list[str]:
    """Describe the workers whose counts in a snapshot differ between the servers.

    Only the last incarnation of each worker is compared.
    """
    from psfleet.checkpoint import load_shard  # loads NumPy
    from psfleet.core.engine.shard.shard import Shard
    from psfleet_launch.chaos.injection import audited, counted_in

    shard = Shard()
    load_shard(path, shard)
    differences = []
    # Every push goes to all servers, so in a consistent snapshot a worker's rows have the same count. Only
    # rows of the last incarnation and period are compared, because the last push of a dead incarnation may
    # have reached only some servers.
    for worker, rows in audited(shard).items():
        present = max(map(counted_in, rows), default=None)
        counts = [count for row, count in rows.items() if counted_in(row) == present]
        if len(set(counts)) > 1:
            differences.append(f"worker {worker} is cut at {counts}")
    return differences


def _ended(run: FinishedJob) -> PromiseResult:
    promise = "7 it ends, and nothing is left"
    leftovers = [*run.left, *(f"descriptor {number}" for number in _descriptors_beyond(run.before))]
    now = Leftovers.now()
    leftovers += [f"shared memory {name}" for name in sorted(now.memory - run.before.memory)]
    leftovers += [str(run.private)] if run.private.exists() else []
    if run.code:
        leftovers.append(f"exit code {run.code}")
    evidence = "no process, socket, descriptor or shared memory is left; exit code 0"
    return PromiseResult(promise, not leftovers, ", ".join(leftovers) or evidence)


def _descriptors_beyond(before: Leftovers) -> list[str]:
    """Return the file descriptors that were not open before. Waits first until gRPC has closed its
    descriptors."""
    gc.collect()  # a call that its client has not ended keeps gRPC's server in a cycle
    deadline = time.monotonic() + _MOMENT
    while True:
        beyond = sorted(Leftovers.now().descriptors - before.descriptors)
        if not beyond or time.monotonic() > deadline:
            return beyond
        time.sleep(0.05)


def show(results: Sequence[PromiseResult], faults: Sequence[Any], to: Path, seed: int) -> bool:
    """Print the results and write them to a JSON file. Return False if a promise is broken."""
    kinds: dict[str, int] = {}
    for fault in faults:
        label = f"{fault['kind']} {fault['member'].split()[0]}"
        kinds[label] = kinds.get(label, 0) + 1
    total = ", ".join(f"{count} x {label}" for label, count in sorted(kinds.items())) or "none"
    table = Table(title=f"chaos {seed}: {total}; answers lost, calls doubled and late")
    for column in ("promise", "verdict", "evidence"):
        table.add_column(column)
    for finding in results:
        table.add_row(finding.promise, _VERDICTS[finding.kept], finding.evidence)
    Console(stderr=True, highlight=False).print(table)
    promises = [
        {"promise": f.promise, "verdict": _VERDICTS[f.kept], "evidence": f.evidence}
        for f in results
    ]
    _REPORT.write(to, seed=seed, faults=list(faults), promises=promises)
    return all(finding.kept is not False for finding in results)
