"""Checks and replays a server's log without the server, for people who investigate a job.

    python -m psfleet_server.durability.inspect_log verify PATH
    python -m psfleet_server.durability.inspect_log replay PATH SNAPSHOTS SAVE

`verify` checks every byte and counts the records. `replay` rebuilds the server's state, describes it, and
saves the tables as a checkpoint if SAVE is given. PATH may be any file of the log. The log itself is only
read.
"""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from psfleet.checkpoint import save_fleet
from psfleet.core.base.errors import LogError, PsfleetError
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.dense import DenseTable
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.durability.log import chained, files_of, read_header
from psfleet_server.durability.records import name_of
from psfleet_server.durability.recovery import restored

# Highest number of servers or workers that a header may have. Otherwise a damaged header could request any
# amount of memory.
_MOST = 2**20


def verify(path: str) -> str:
    """Check every byte of a log and describe its content.

    Raises:
        LogError: The log is damaged, or the path is not a log.
    """
    first = _first(path)
    kinds: Counter[str] = Counter()
    whole = 0
    for kind, _, end, _ in chained(first, min(files_of(first))):
        whole = end
        if kind:
            kinds[name_of(kind)] += 1
    last = list(files_of(first).values())[-1]
    torn = last.stat().st_size - whole
    counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    return (
        f"{path} is whole: {len(files_of(first))} file(s), {sum(kinds.values()):,} records "
        f"({counts or 'none'})" + (f"; {_torn(torn)}" if torn else "")
    )


def _torn(size: int) -> str:
    return (
        f"behind them the beginning of a record, {size:,} bytes, which a server that starts from the log "
        "cuts off. A process that died while it wrote it has not acknowledged it; if the file was cut "
        "later, it and others may have been acknowledged"
    )


def replay(path: str, snapshots: str = "", save: str = "") -> str:
    """Rebuild a server's state from its log, and describe the state.

    Args:
        path: Path of the log, which is only read.
        snapshots: Folder or URL of the snapshots that files of the log begin with. Empty means the folder
            `snapshots` beside the log.
        save: Path of a checkpoint to write the tables to, or empty to write none.

    Raises:
        LogError: The log is damaged, or has a record that no server can have written.
    """
    first = _first(path)
    index, servers, workers = _whose(next(iter(files_of(first).values())))
    shard = Shard(index, servers, workers)
    coordinator = Coordinator(workers) if index == 0 else None
    snapshots_place = snapshots or str(first.parent / "snapshots")
    count = restored(first, snapshots_place, shard, coordinator)
    if save:
        save_fleet(save, [shard])
    lines = [
        f"server {shard.index} of {shard.servers} after {count:,} records: mode {shard.mode}, "
        f"round {shard.rounds.closed}, pushes {dict(sorted(shard.workers.sequences.items()))}"
    ]
    for table in shard.tables.values():
        size = (
            f"{table.count:,} values" if isinstance(table, DenseTable) else f"{len(table):,} rows"
        )
        lines.append(f"  {table.spec.name}: {size}, {table.step:,} updates")
    return "\n".join(lines)


def _whose(path: Path) -> tuple[int, int, int]:
    """Return the index of the server that wrote the log, and the counts of servers and workers in its job."""
    header = read_header(path)
    server, servers, workers = header.server, header.servers, header.workers
    if not (server < servers <= _MOST and 0 < workers <= _MOST):
        raise LogError(
            f"log {str(path)!r} is of server {server} of {servers} with {workers} workers, "
            "which cannot be; it is not as a server wrote it"
        )
    return server, servers, workers


def _first(path: str) -> Path:
    """Return the path of a log's first file, from the path of any of its files."""
    start = Path(path)
    name = re.sub(r"\.\d{6,}(\.log)?$", r"\1", start.name)
    if not name or "\0" in path or not files_of(start.with_name(name)):
        raise LogError(f"{path!r} is no log; name a file like server.0.log")
    return start.with_name(name)


def main(words: Sequence[str]) -> int:
    """Run `verify PATH` or `replay PATH SNAPSHOTS SAVE`, and return the exit code."""
    try:
        command, *arguments = words
        print(verify(*arguments) if command == "verify" else replay(*arguments))
    except (PsfleetError, OSError) as error:
        print(f"psfleet: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
