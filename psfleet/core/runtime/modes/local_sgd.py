"""Local SGD (`localsgd` of a strategy): workers train dense tables separately and average their weights.

Averaging every `k_steps` pushes replaces a network round trip per step, for large dense tables or a slow
network. Sparse tables stay on the servers. It needs a mode with rounds (sync), since workers that average
wait for each other. Everything runs in the thread that trains.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.engine.gradient_checks import check_gradients
from psfleet.core.engine.runtime_interface import (
    CompletedPush,
    Gradient,
    PendingPull,
    PendingPush,
    Read,
    TableState,
)
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.runtime_bases import ForwardingRuntime, pull_parts, read_through
from psfleet.core.runtime.script_runtime import ScriptRuntime
from psfleet.core.runtime.strategy import LocalSGDSettings

Floats = NDArray[np.float32]


class LocalSGDRuntime(ForwardingRuntime):
    """Runtime of a cluster whose dense tables are trained in this process for `k_steps` pushes at a time.

    Each worker has its own optimizer state for the dense tables. Weights are averaged after every `k_steps`
    pushes and at each collective (barrier, all_reduce), in the order of the workers' numbers, over the
    workers that have trained since the last average. At a barrier worker 0 also writes the averages to the
    servers' tables, with its own optimizer state. A worker that saves writes its dense tables to the
    servers first.

    Workers may have different numbers of steps: a worker that waits at a barrier takes part in the averages
    of the other workers until all have arrived.

    Args:
        settings: First step of local training, and interval at which weights are averaged.
    """

    reads_ahead: bool = read_through("_fleet.reads_ahead")

    def __init__(self, fleet: ScriptRuntime, settings: LocalSGDSettings) -> None:
        super().__init__(fleet)
        self._settings = settings
        self._local = EmbeddedRuntime(watch=None if fleet.cluster is None else fleet.cluster.watch)
        self._pushes = 0
        self._begun = False
        self._since = 0  # steps since the last average
        self._trained = False  # at least one of these steps has changed the local tables
        self._near = False  # nothing was sent to the servers for the last step
        self._samples = 0
        self._unpublished = False  # the servers' tables are older than the average
        self._rewritten = False  # this worker has written tables on the servers

    @override
    def create(self, spec: TableSpec, value: Floats | None = None) -> int:
        key = self._fleet.create(spec, value)
        if self._begun and spec.kind == "dense" and key not in self._local.specs():
            self._take(spec)
        return key

    @override
    def pull(self, reads: Sequence[Read]) -> list[Floats]:
        return pull_parts(reads, self._local, self._fleet)

    @override
    def pull_ahead(self, reads: Sequence[Read]) -> PendingPull:
        """Start a pull, or pull at once if a requested table is trained in this process."""
        local = self._local.specs()
        if any(read.table in local for read in reads):
            return super().pull_ahead(reads)
        return self._fleet.pull_ahead(reads)

    @override
    def push(
        self, gradients: Sequence[Gradient], *, samples: int = 0, loss: float | None = None
    ) -> PendingPush:
        """Update the local tables and send the other gradients.

        Every `k_steps`-th push averages the weights.
        """
        local = self._local.specs()
        near = [gradient.untravelled() for gradient in gradients if gradient.table in local]
        far = [gradient for gradient in gradients if gradient.table not in local]
        check_gradients(self._spec_of, gradients)
        since = self._since + bool(near)
        ticket: PendingPush = CompletedPush()
        sends = bool(far) or not self._begun or since >= self._settings.k_steps
        # Before the local tables change, because it raises the refusal of an earlier push: a push that raises
        # has done nothing.
        if sends:
            ticket = self._send(far, loss, samples)
        else:
            self._samples += samples
        self._near = not sends
        if near:
            self._local.push(near)
            self._since, self._trained = since, True
        self._advance()
        return ticket

    def _send(
        self, gradients: Sequence[Gradient], loss: float | None, samples: int = 0
    ) -> PendingPush:
        ticket = self._fleet.push(gradients, samples=self._samples + samples, loss=loss)
        self._samples, self._near = 0, False
        return ticket

    def _advance(self) -> None:
        self._pushes += 1
        if not self._begun and self._pushes >= self._settings.begin_step:
            self._begin()
        elif self._since >= self._settings.k_steps:
            self._meet(stay=False)

    @override
    def skip_step(self) -> None:
        """Make a step for which nothing was pushed to the servers.

        The servers get an empty push, so that their round closes. A worker that had no samples also counts
        the step, so that all workers average in the same step.
        """
        idle = not self._near
        self._send([], None)
        if idle:
            self._since += self._begun
            self._advance()

    def _begin(self) -> None:
        """Copy every dense table from the servers, after all pushes of this worker are applied."""
        self._begun = True
        self._fleet.flush()
        for spec in self._fleet.specs().values():
            if spec.kind == "dense":
                self._take(spec)

    def _take(self, spec: TableSpec) -> None:
        state = self._fleet.read_table(spec.key)
        self._local.create(dataclasses.replace(spec, device=None), state.values[0])
        self._local.write_table(spec.key, state)

    def _meet(self, stay: bool) -> None:
        """Average with all workers. With `stay`, repeat until all workers have called this with `stay`."""
        # The sums are the same on all workers, so all workers take the same branch below and call the same
        # collectives in the same order. If a worker decided by its own flags, it could wait for the other
        # workers for ever.
        while True:
            words = np.array([self._trained, stay, self._rewritten, self._begun], np.int64)
            trainers, staying, writers, starters = self._fleet.all_reduce(words).tolist()
            self._rewritten = False
            if starters and not self._begun:
                self._begin()
            if writers:
                self._retake()
            elif trainers:
                self._average(trainers)
            if not stay or staying == self.worker_num:
                return

    def _average(self, trainers: int) -> None:
        keys = sorted(self._local.specs())
        states = [self._local.read_table(key) for key in keys]
        # All tables in one vector, in the order of their keys: one all-reduce instead of one per table.
        local_weights = np.concatenate([state.values[0].reshape(-1) for state in states])
        total = self._fleet.all_reduce(
            local_weights if self._trained else np.zeros_like(local_weights)
        )
        mean, at = (total / np.float32(trainers)).astype(np.float32, copy=False), 0
        for key, state in zip(keys, states, strict=True):
            weights = state.values[0]
            mean_here = mean[at : at + weights.size].reshape(weights.shape)
            self._local.write_table(key, TableState(state.step, [mean_here, *state.values[1:]]))
            at += weights.size
        self._since, self._trained, self._unpublished = 0, False, True

    def _retake(self) -> None:
        """Copy the dense tables from the servers, because a worker has written to them."""
        for spec in self._local.specs().values():
            self._take(spec)
        self._since, self._trained, self._unpublished = 0, False, False

    def _publish(self) -> None:
        """Write this worker's dense tables to the servers."""
        for key in self._local.specs():
            self._fleet.write_table(key, self._local.read_table(key))

    @override
    def barrier(self, timeout: float | None = None) -> None:
        """Wait for all workers. Afterwards all workers and the servers have the same dense weights."""
        self._meet(stay=True)
        if self._unpublished and self.worker_index == 0:
            self._publish()
        self._unpublished = False
        self._fleet.barrier(timeout)

    @override
    def all_reduce(self, value: NDArray[Any], mode: str = "sum") -> NDArray[Any]:
        self.barrier()
        return self._fleet.all_reduce(value, mode)

    @override
    def read_table(self, table: int) -> TableState:
        """Read a table. For a dense table that is trained here, returns this worker's copy."""
        here = table in self._local.specs()
        return self._local.read_table(table) if here else self._fleet.read_table(table)

    @override
    def write_table(self, table: int, state: TableState) -> None:
        """Overwrite a table on the servers and here. The other workers copy it at the next barrier."""
        self._fleet.write_table(table, state)
        if table in self._local.specs():
            self._local.write_table(table, state)
            self._rewritten = True

    @override
    def save(self, path: str, *, delta: bool = False, base: bool = False) -> str:
        """Save all tables. Dense tables are saved with this worker's weights and optimizer state."""
        self._publish()
        return self._fleet.save(path, delta=delta, base=base)

    @override
    def load(self, path: str) -> None:
        """Load all tables. The other workers copy the dense tables at the next barrier."""
        self._fleet.load(path)
        self._retake()
        self._rewritten = True

    @override
    def close(self) -> None:
        self._fleet.close()
        self._local.close()
