"""Local SGD: workers train dense parameters by themselves and average them now and then."""

import dataclasses
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.engine.interface import (
    CompletedPush,
    Gradient,
    PendingPull,
    PendingPush,
    Read,
    Runtime,
    TableState,
)
from psfleet.core.engine.round_plan import Range
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.runtime_bases import ForwardingRuntime
from psfleet.core.runtime.strategy import LocalSGDSettings

Floats = NDArray[np.float32]


class LocalSGDRuntime(ForwardingRuntime):
    """A cluster's runtime whose dense tables are trained in this process for `k_steps` pushes at a time.

    Sparse tables stay on the servers. Each worker has its own optimizer state for the dense tables.
    Their weights are averaged over the workers that have trained since the last average, in worker
    order, after every `k_steps` pushes and wherever all workers meet (barrier, all_reduce). There the
    first worker also writes them to the servers' tables, with its own optimizer state; saving does so too.

    Workers may have different numbers of steps: one that waits at a barrier takes part in the
    averages of the others until all have come.

    Args:
        fleet: The cluster.
        settings: First step of local training, and interval at which weights are averaged.
    """

    reads_ahead = property(attrgetter("_fleet.reads_ahead"))

    def __init__(self, fleet: Runtime, settings: LocalSGDSettings) -> None:
        super().__init__(fleet)
        self._settings = settings
        self._local = EmbeddedRuntime(watch=getattr(fleet, "watch", None))
        self._pushes = 0
        self._begun = False
        self._since = 0  # steps since the last average
        self._trained = False  # there were local pushes among them
        self._near = False  # the last step has stayed here
        self._samples = 0
        self._unpublished = False  # the servers' tables are older than the average
        self._rewritten = False  # this worker has changed tables for everybody

    # -- training ------------------------------------------------------------------------------

    @override
    def create(self, spec: TableSpec, value: Floats | None = None) -> int:
        key = self._fleet.create(spec, value)
        if self._begun and spec.kind == "dense" and key not in self._local.specs():
            self._take(spec)
        return key

    @override
    def pull(self, reads: Sequence[Read]) -> list[Floats]:
        local = self._local.specs()
        far = [read for read in reads if read.table not in local]
        values = iter(self._fleet.pull(far) if far else [])
        return [
            self._local.pull([read])[0] if read.table in local else next(values) for read in reads
        ]

    def pull_ahead(self, reads: Sequence[Read]) -> PendingPull:
        """Tables that are trained here are read at once."""
        local = self._local.specs()
        if any(read.table in local for read in reads):
            return super().pull_ahead(reads)
        return self._fleet.pull_ahead(reads)

    def push(
        self, gradients: Sequence[Gradient], *, samples: int = 0, loss: float | None = None
    ) -> PendingPush:
        """Every k-th waits for all workers and averages."""
        local = self._local.specs()
        near = [gradient.untravelled() for gradient in gradients if gradient.table in local]
        far = [gradient for gradient in gradients if gradient.table not in local]
        self._samples += samples
        ticket: PendingPush = CompletedPush()
        if near:
            self._local.push(near)
            self._since += 1
            self._trained = True
        self._near = True
        if far or not self._begun or self._since >= self._settings.k_steps:
            ticket = self._send(far, loss)
        self._advance()
        return ticket

    def _send(self, gradients: Sequence[Gradient], loss: float | None) -> PendingPush:
        ticket = self._fleet.push(gradients, samples=self._samples, loss=loss)
        self._samples, self._near = 0, False
        return ticket

    def _advance(self) -> None:
        self._pushes += 1
        if not self._begun and self._pushes >= self._settings.begin_step:
            self._begin()
        elif self._since >= self._settings.k_steps:
            self._meet(stay=False)

    def data_steps(self, trainer: Any, *arguments: Any) -> Iterator[tuple[Range, ...]]:
        """Iterate as the cluster's method does: each step is one push, also one without dense gradients."""
        steps: Iterator[tuple[Range, ...]] = self._fleet.data_steps(self, *arguments)  # type: ignore[attr-defined]  # only a cluster's runtime is wrapped
        return steps

    def skip(self) -> None:
        """End a step of `data_steps` that has pushed nothing to the servers.

        A worker without samples in it counts it as the others do, so that all average in the same step.
        """
        idle = not self._near
        self._send([], None)
        if idle:
            self._since += self._begun
            self._advance()

    def _begin(self) -> None:
        """Take every dense table from the servers, where all workers' pushes are in it."""
        self._begun = True
        self._fleet.flush()
        for spec in self._fleet.specs().values():
            if spec.kind == "dense":
                self._take(spec)

    def _take(self, spec: TableSpec) -> None:
        state = self._fleet.read_table(spec.key)
        self._local.create(dataclasses.replace(spec, device=None), state.values[0])
        self._local.write_table(spec.key, state)

    # -- collective -------------------------------------------------------------------------------

    def _meet(self, stay: bool) -> None:
        """Average with all workers; `stay`: until all of them stay."""
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
        mine = np.concatenate([state.values[0].reshape(-1) for state in states])
        total = self._fleet.all_reduce(mine if self._trained else np.zeros_like(mine))
        mean, at = (total / np.float32(trainers)).astype(np.float32, copy=False), 0
        for key, state in zip(keys, states, strict=True):
            weights = state.values[0]
            mean_here = mean[at : at + weights.size].reshape(weights.shape)
            self._local.write_table(key, TableState(state.step, [mean_here, *state.values[1:]]))
            at += weights.size
        self._since, self._trained, self._unpublished = 0, False, True

    def _retake(self) -> None:
        """Take what the servers hold: a worker has written tables, for everybody."""
        for spec in self._local.specs().values():
            self._take(spec)
        self._since, self._trained, self._unpublished = 0, False, False

    def _publish(self) -> None:
        """Bring this worker's dense tables to the servers."""
        for key in self._local.specs():
            self._fleet.write_table(key, self._local.read_table(key))

    def barrier(self, timeout: float | None = None) -> None:
        """Afterwards all workers and the servers have the same dense weights."""
        self._meet(stay=True)
        if self._unpublished and self.worker_index == 0:
            self._publish()
        self._unpublished = False
        self._fleet.barrier(timeout)

    @override
    def all_reduce(self, value: NDArray[Any], mode: str = "sum") -> NDArray[Any]:
        self.barrier()
        return self._fleet.all_reduce(value, mode)

    # -- whole tables --------------------------------------------------------------------------

    def read_table(self, table: int) -> TableState:
        """Return this worker's copy of a dense table."""
        here = table in self._local.specs()
        return self._local.read_table(table) if here else self._fleet.read_table(table)

    def write_table(self, table: int, state: TableState) -> None:
        """The other workers take it over at the next barrier."""
        self._fleet.write_table(table, state)
        if table in self._local.specs():
            self._local.write_table(table, state)
            self._rewritten = True

    def save(self, path: str, *, delta: bool = False, base: bool = False) -> str:
        """Dense tables are saved as this worker has them."""
        self._publish()
        return self._fleet.save(path, delta=delta, base=base)

    def load(self, path: str) -> None:
        """Every worker has it after the next barrier."""
        self._fleet.load(path)
        self._retake()
        self._rewritten = True

    @override
    def close(self) -> None:
        self._fleet.close()
        self._local.close()
