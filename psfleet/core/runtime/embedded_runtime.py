"""EmbeddedRuntime: tables in this process, without servers or a network; and FrozenRuntime, a read-only copy.

A script that no launcher has started trains with EmbeddedRuntime. It runs the same shard, rules and kernels
as a server, so results are bit-identical to those of a cluster with one worker. FrozenRuntime has the weights
of a snapshot, for predictions.

Both may be used by one thread at a time. A push is applied before `push` returns. A process that was forked
from the training process may read tables but not change them.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.checkpoint import Snapshot, save_fleet
from psfleet.checkpoint.loading import Events, load_events
from psfleet.core.base.errors import CheckpointError, ConfigError, PsfleetError, UnknownTable
from psfleet.core.base.forks import check_process
from psfleet.core.base.settings.declaration import from_variable
from psfleet.core.base.settings.declared_settings import JobSettings
from psfleet.core.base.threads import deferred
from psfleet.core.engine.consistency import AsyncMode
from psfleet.core.engine.device_arrays import DeviceReader, DeviceSums
from psfleet.core.engine.eviction_records import EvictedIds
from psfleet.core.engine.gradient_checks import (
    check_gradients,
    check_ids,
    check_reduction,
    check_spec_value,
)
from psfleet.core.engine.gradients import without_values
from psfleet.core.engine.kernels.dedup import load_batch_kernels
from psfleet.core.engine.kernels.number_formats import rounded
from psfleet.core.engine.kernels.recent_batches import RecentBatches
from psfleet.core.engine.non_finite_check import NonFiniteCheck, SkippedGradients
from psfleet.core.engine.rules.momentum import SGD
from psfleet.core.engine.runtime_interface import (
    ClosedRuntime,
    CompletedPush,
    Gradient,
    PendingPush,
    PushCounter,
    Read,
    TableState,
    missing_table,
    with_counts,
)
from psfleet.core.engine.schema.table import DecaySpec, TableSpec, key_of
from psfleet.core.engine.shard.events import (
    CreateTable,
    EndCut,
    Join,
    Push,
    SendError,
    SendOutcome,
    Shrink,
    Tick,
)
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.shard_state import TickTimer
from psfleet.core.engine.shard.snapshot_cuts import PendingCut
from psfleet.core.engine.shard.table_placement import placed
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.memory_choice import MemoryChoice
from psfleet.core.engine.tables.row_data import ROW_IDS, RowData, row_columns, rows_of
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.net.connections import grpc_process
from psfleet.core.net.gradient_compressor import GradientCompressor, repacked, value_format
from psfleet.core.runtime.runtime_bases import ReadOnlyRuntime
from psfleet.core.runtime.script_runtime import ScriptRuntime
from psfleet.core.runtime.strategy import ConsistencySettings, WireSettings

Floats = NDArray[np.float32]
_CLOSED = "the fleet of this process is closed, and its tables are gone; use them before that"


Columns = Mapping[str, NDArray[Any]]


class EmbeddedRuntime(ScriptRuntime):
    """Runtime whose tables are in this process. Results are bit-identical to one server with one worker.

    Every push is applied before `push` returns, which for a single worker is what both sync and async mode
    do.

    Args:
        clock: Function that returns the time in seconds, for the expiry of rows.
        wire: Compression that a cluster would use for transfers. It is applied here too, so that a script
            gives the same results as on a cluster.
        watch: Check of gradients and losses for values that are not finite, or None for a new one.
        only_reads: True if tables are filled once and then only read.

    Attributes:
        wire: The argument `wire`, or settings without compression.
        counters: Counters, such as those of metrics. Each push adds their new counts to their tables.
    """

    worker_index = 0
    worker_num = 1
    server_num = 0
    pools = True

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wire: WireSettings | None = None,
        watch: NonFiniteCheck | None = None,
        only_reads: bool = False,
    ) -> None:
        self._shard = Shard()
        self._shard.tables.budget.only_reads = only_reads
        folder = "" if only_reads else from_variable(JobSettings, "disk", os.environ)
        self._shard.tables.choice = MemoryChoice.embedded(folder)
        self._process = os.getpid()
        self.wire = wire or WireSettings()
        self.counters: list[PushCounter] = []
        self._compressor = GradientCompressor(self.worker_index, self.wire.gradients)
        self._watch = watch or NonFiniteCheck(self.worker_index)
        self._clock = clock
        self._timer = TickTimer(clock())
        self._specs: dict[int, TableSpec] = {}
        grpc_process.prepare()  # tunes malloc: each step allocates megabytes
        self._batches = RecentBatches()
        self._pushes = 0
        self._saves = 0
        self._base: tuple[int, str] | None = None
        self._expect(self._shard.handle(Join(0, 1, AsyncMode()), "join"))

    @property
    @override
    def pushes(self) -> int:
        return self._pushes

    @deferred()
    def create(self, spec: TableSpec, value: Floats | None = None) -> int:
        check_process(self._process, "a table that is made here")
        flat = check_spec_value(spec, value)
        if spec.servers is not None:  # a cluster may resume from a snapshot of these tables
            spec = placed(spec, self._specs.values())
        self._shard.create(spec, flat)
        self._specs[spec.key] = spec
        load_batch_kernels(spec)
        return spec.key

    def open(self, name: str) -> TableSpec:
        table = self._shard.tables.get(key_of(name))
        if table is None:
            names = [table.spec.name for table in self._shard.tables.values()]
            raise UnknownTable(missing_table(name, names))
        return table.spec

    def table(self, key: int) -> DenseTable | SparseTable:
        """Return the table with this key, not a copy of it."""
        return self._shard.tables[key]

    def pull(self, reads: Sequence[Read]) -> list[Floats]:
        return [self._pull(read) for read in reads]

    @override
    def reader_to_device(self, table: int) -> DeviceReader | None:
        target = self._shard.tables[table]
        shares = isinstance(target, SparseTable) and target.can_share()
        return cast(SparseTable, target) if shares and self.wire == WireSettings() else None

    def _pull(self, read: Read) -> Floats:
        spec = self._shard.tables[read.table].spec
        if spec.kind == "dense":
            return self._arrived(spec, self._shard.tables.read([read])[0]).reshape(spec.shape)
        ids = check_ids(spec, read.ids)
        # Each row is read once, even if the batch repeats its id. `_batches` stores the distinct ids of
        # recent batches, because the push of this step will need them too.
        unique = self._batches.unique_ids(read.table, ids if ids.ndim == 1 else ids.reshape(-1), 1)
        if value_format(spec, self.wire.values) == "float32":
            table = self._shard.tables[read.table]
            assert isinstance(table, SparseTable)
            if read.bags is not None:
                if (pooled := table.pool(unique, read.bags)) is not None:
                    return pooled
            elif 8 * len(unique.unique[0]) > 7 * ids.size:
                # Few repeats: reading their rows again costs less than copying all rows to the batch.
                rows = np.empty((*ids.shape, spec.dim), np.float32)
                table.pull_into(ids.reshape(-1), rows)
                return rows
        [rows] = self._shard.tables.read([Read(read.table, unique.unique[0])])
        parts = [self._arrived(spec, rows)]
        if read.bags is not None:
            return unique.pool(parts, read.bags)
        return unique.expand(parts).reshape(*ids.shape, spec.dim)

    def _arrived(self, spec: TableSpec, values: Floats) -> Floats:
        """Return the values as a worker would receive them, after the compression of the wire."""
        form = value_format(spec, self.wire.values)
        return values if form == "float32" else repacked(values, form)

    @deferred()
    def push(
        self, gradients: Sequence[Gradient], *, samples: int = 0, loss: float | None = None
    ) -> PendingPush:
        check_process(self._process, "a push from here")
        sums = self._merged(with_counts(gradients, self.counters))
        values = ((spec.name, g.values, g.ids) for spec, g in sums)
        try:
            self._watch.check_push(self._pushes + 1, loss, values)
        except SkippedGradients:
            # A value is not finite. The step still counts, as a push that changes no weights.
            counted_gradients = with_counts(list(map(without_values, gradients)), self.counters)
            samples, loss, sums = 0, None, self._merged(counted_gradients)
        parts = tuple(self._compressor.sent(self._pushes + 1, sums))
        self._tick()  # time passes before the push, as on a server
        push = Push(0, 1, self._pushes + 1, parts, samples, loss)
        self._expect(self._shard.handle(push, "push"))
        self._pushes += 1
        self._watch.add_norms((spec.name, g.values) for spec, g in sums)
        for counter in self.counters:
            counter.arrived()
        return CompletedPush()

    def _tick(self) -> None:
        every, now = self._shard.tick_every, self._clock()
        if ticks := self._timer.due(every, now):
            self._expect(self._shard.handle(Tick(ticks), "tick"))
            self._timer.mark_ticked(now)

    def _merged(self, gradients: Sequence[Gradient]) -> list[tuple[TableSpec, Gradient]]:
        """Return gradients with distinct ids, rounded to 16 bits if amp is on, as a worker sends them."""
        parts = check_gradients(lambda key: self._shard.tables[key].spec, gradients)
        return [(part[0], self._with_sums(*part)) for part in parts]

    def _with_sums(
        self, spec: TableSpec, gradient: Gradient, values: Floats, ids: NDArray[np.int64] | None
    ) -> Gradient:
        if ids is not None and spec.kind == "sparse" and not isinstance(values, DeviceSums):
            unique = self._batches.unique_ids(spec.key, ids, 1)
            ids = unique.unique[0]
            sums = None
            if gradient.bags is not None and self._sums_later(spec, gradient):
                sums = unique.sums_later(values, gradient.bags)
            # BagSums does for the shard and the table what an array would do.
            values = unique.merge(values, gradient.bags)[0] if sums is None else cast(Floats, sums)
        if gradient.precision != "float32":
            values = rounded(values, gradient.precision, gradient.scale)
        return dataclasses.replace(gradient, values=values, ids=ids, bags=None)

    def _sums_later(self, spec: TableSpec, gradient: Gradient) -> bool:
        """Return whether the table should sum the gradients of bags itself, while it updates its rows."""
        table = self._shard.tables[spec.key]
        return (
            isinstance(table, SparseTable)
            and table.takes_sums
            and gradient.precision == "float32"
            and self._compressor.form_of(spec, gradient) == "float32"
        )

    def flush(self, timeout: float | None = None) -> None:
        """Do nothing: `push` returns only after the push is applied."""

    def barrier(self, timeout: float | None = None) -> None:
        """Do nothing: there is only one worker."""

    def all_reduce(self, value: NDArray[Any], mode: str = "sum") -> NDArray[Any]:
        """Return a copy of the array: there is only one worker."""
        check_reduction(mode)
        return np.array(value)

    def read_table(self, table: int) -> TableState:
        source = self._shard.tables[table]
        if isinstance(source, DenseTable):
            return TableState(source.step, [v.reshape(source.spec.shape) for v in source.state()])
        rows = source.page(0, len(source))
        planes = np.split(rows.values, 1 + len(source.spec.rule.slots), axis=1)
        return TableState(
            source.step,
            list(map(np.ascontiguousarray, planes)),
            rows.ids,
            rows.touched,
            rows.scores,
        )

    @deferred()
    def write_table(self, table: int, state: TableState) -> None:
        check_process(self._process, "what is written here")
        self._compressor.forget()  # rounding errors kept for the next push belong to the old values
        target = self._shard.tables[table]
        if isinstance(target, DenseTable):
            target.restore(state.step, [v.reshape(-1) for v in state.values])
            return
        target.restore_step(state.step)
        target.restore(
            check_ids(target.spec, state.ids),
            np.concatenate(state.values, axis=1),
            state.touched,
            state.scores,
        )

    @deferred()
    def shrink(
        self, table: int = 0, threshold: float | None = None, unseen: int | None = None
    ) -> int:
        check_process(self._process, "that rows are removed here")
        return self._expect(self._shard.handle(Shrink(table, threshold, unseen), "shrink"))

    def evictions(self, table: int, position: Sequence[int], limit: int) -> list[EvictedIds]:
        return [self._shard.tables.evicted(table, at, limit) for at in position]

    def save(self, path: str, *, delta: bool = False, base: bool = False) -> str:
        if not path:
            raise ConfigError(
                "without a cluster there is no job's folder; name one for the snapshot"
            )
        if delta and self._base is None:
            raise CheckpointError(
                "there is no snapshot that a delta could say the changes of; save a base first (mode 2)"
            )
        before = self._base if delta else None
        self._saves += 1
        cutting = PendingCut(self._saves, since=before[0] if before else 0, remember=delta or base)
        save_fleet(path, [self._shard], cutting, before[1] if before else None)
        if delta or base:
            self._base = self._saves, path
            self._shard.handle(EndCut(self._saves, self._saves), "save")
        return path

    @deferred()
    def load(self, path: str) -> None:
        check_process(self._process, "what is loaded here")
        self.restore(Snapshot(path).events(0, 1))

    def restore(self, events: Events) -> None:
        """Create and fill tables from a snapshot, given as events (declare a table, set its rows)."""
        self._compressor.forget()
        load_events(self._shard, events)
        self._specs = {key: table.spec for key, table in self._shard.tables.items()}

    def set_mode(self, consistency: ConsistencySettings) -> None:
        """Do nothing: with a single worker and no network all modes are the same."""

    def scale(self, servers: int) -> None:
        """Do nothing: there are no servers."""

    def specs(self) -> dict[int, TableSpec]:
        return dict(self._specs)

    def stats(self) -> list[dict[str, Any]]:
        counters = self._shard.counters
        return [
            {
                "server": 0,
                "pid": os.getpid(),
                "pushes": counters.pushes,
                "samples": sum(counters.samples.values()),
                "losses": dict(counters.losses),
                "tables": [
                    {
                        "name": t.spec.name,
                        "kind": t.spec.kind,
                        "bytes": t.bytes,
                        "device_bytes": t.device_bytes,
                        "step": t.step,
                        "count": t.count if isinstance(t, DenseTable) else len(t),
                    }
                    for t in self._shard.tables.values()
                ],
            }
        ]

    def close(self) -> None:
        """Release the memory of the tables. Later calls raise UsageError."""
        self._shard = cast(Shard, ClosedRuntime(_CLOSED))

    @staticmethod
    def _expect(instructions: Sequence[Any]) -> int:
        """Return the number of the last outcome that a shard reports, or raise the first error among them.

        `instructions`: Outcomes and errors that the shard has returned for an event.
        """
        number = 0
        for instruction in instructions:
            if isinstance(instruction, SendError):
                raise instruction.error
            if not isinstance(instruction, SendOutcome):
                raise PsfleetError(f"unexpected instruction {instruction!r}")
            number = instruction.number
        return number


class FrozenRuntime(ReadOnlyRuntime, EmbeddedRuntime):
    """Read-only runtime on the weights of a snapshot, for predictions. Optimizer state is not loaded.

    An id without a row has the initial values that it would have in training.

    Raises:
        CheckpointError: The snapshot is missing, incomplete or damaged.
    """

    pools = True

    def __init__(self, path: str) -> None:
        EmbeddedRuntime.__init__(self, only_reads=True)
        ReadOnlyRuntime.__init__(self, repr(path), "train on a fleet that has loaded it")
        self.restore(_weights(Snapshot(path)))


def _weights(snapshot: Snapshot) -> Events:
    """Yield events that load only the weights of a snapshot into a shard.

    They leave out optimizer state, scores (counts of shows and clicks) and candidates (ids seen too rarely
    for a row).
    """
    specs = {spec.key: spec for spec in snapshot.specs()}
    for event in snapshot.events(0, 1):
        if isinstance(event, CreateTable):
            yield CreateTable(_plain(event.spec), event.value)
        elif columns := _weight_columns(specs[event.table], event.columns):
            yield dataclasses.replace(event, columns=columns)


def _plain(spec: TableSpec) -> TableSpec:
    """Return the table's definition without optimizer state, decay, admission and expiry."""
    return dataclasses.replace(
        spec, rule=SGD(), decay=DecaySpec(), every_row=False, entry=None, device=None
    )


def _weight_columns(spec: TableSpec, columns: Columns) -> Columns:
    if spec.kind == "dense":
        name = spec.slot_names[0]
        return {name: columns[name]}
    if ROW_IDS not in columns:
        return {}
    rows = rows_of(spec, columns)
    weights = np.ascontiguousarray(rows.values[:, : spec.dim])
    return row_columns(RowData(rows.ids, weights, rows.touched, rows.scores[:, :0]))
