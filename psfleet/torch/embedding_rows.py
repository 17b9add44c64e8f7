"""Rows of one embedding: the table that holds them, and the lookups of the current step.

`Embedding` and `EmbeddingBag` look rows up here. EmbeddingRows caches a lookup until the next step, for two
reasons: its rows may have been pulled ahead of the forward pass, and a forward pass that is computed again
must see the same values as the first.
"""

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from psfleet.core.base.errors import IdError, UsageError
from psfleet.core.base.memory import available_memory
from psfleet.core.engine.gradient_checks import as_ids
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.engine.runtime_interface import Asked, PooledIds, Read, Runtime, TableState
from psfleet.core.engine.schema.entry import Entry, ShowClickEntry, part_of
from psfleet.core.engine.schema.table import Device, InitializerSpec, RowPrecision, TableSpec
from psfleet.core.graph.parameters.parameter_client import (
    ParameterClient,
    are_equal,
    places_of,
    slots_of,
)
from psfleet.torch import device_tensors
from psfleet.torch.rule_mapping import RuleMapping
from psfleet.torch.table_weight import GradientBags, GradientIds, TableWeight, as_tensor, look_up

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_MOST_HELD = 64  # maximum number of lookups that one embedding caches within a step
_living: "weakref.WeakSet[EmbeddingRows]" = weakref.WeakSet()


class LookupObserver(Protocol):
    """Object that is notified of lookups and predicts those of the next step. A prefetching loader is one."""

    def note(self, rows: "EmbeddingRows", ids: Tensor) -> None:
        """Record that the script looks these ids up."""

    def expected(self, rows: "EmbeddingRows") -> list[Ids]:
        """Return the ids of each lookup in these rows that the next step is predicted to make."""


@dataclass(slots=True)
class _CachedLookup:
    """Cached values of one lookup.

    Attributes:
        ids: Ids that were looked up, or ids with their bags.
        used: Torch's change counter of `rows` (`_version`) when a forward pass got them, or None if none
            has. A higher counter later means that the model has changed the rows in place.
    """

    ids: Asked
    rows: Tensor
    used: int | None = None


class EmbeddingRows:
    """Rows of one embedding, float32, which are in a table on the servers.

    Attributes:
        name: Name of the table, or None if the optimizer derives it from the module's name in the model.
        count: Number of rows, with ids 0 to count - 1, or None if ids are any int64.
        dim: Width of a row.
        padding: Id whose row is zero at first, or None.
        initializer, seed: Initial values of the rows.
        entry: Rule that decides which new ids get a row, or None if every pushed id gets a row.
        precision: Number format in which the servers store the rows.
        servers: Number of servers that hold the table, or None for all.
        device: Kind of memory that stores the rows, or None for the servers' setting.
        weight: Parameter in place of the weight, as torch's optimizers see it. It takes no memory.
        content: Initial rows, float32 [count, dim], or None if `initializer` makes them.
        watcher: Object that is notified of each lookup, or None.
        bags: Collector of the gradients of pooled rows.
        counts: True if the table counts shows and clicks.
    """

    def __init__(
        self,
        name: str | None,
        count: int | None,
        dim: int,
        padding: int | None,
        initializer: InitializerSpec,
        seed: int,
        entry: Entry | None = None,
        precision: RowPrecision = "float32",
        servers: int | None = None,
        device: Device | None = None,
    ) -> None:
        self.name = name
        self.count = count
        self.dim = dim
        self.padding = padding
        self.initializer = initializer
        self.seed = seed
        self.entry = entry
        self.precision = precision
        self.servers = servers
        self.device = device
        self.weight = TableWeight(count, dim)
        self.content: Floats | None = None
        self.watcher: LookupObserver | None = None
        self._ledger = GradientIds(self.weight, count is not None)
        self.bags = GradientBags(self.weight)
        self._held: list[_CachedLookup] = []
        self._client: ParameterClient | None = None
        self._spec: TableSpec | None = None
        self.counts = part_of(entry, ShowClickEntry) is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> "EmbeddingRows":
        twin = EmbeddingRows(
            self.name,
            self.count,
            self.dim,
            self.padding,
            self.initializer,
            self.seed,
            self.entry,
            self.precision,
            self.servers,
            self.device,
        )
        twin.weight = copy.deepcopy(self.weight, memo)
        twin.content = self.content
        twin._ledger = GradientIds(twin.weight, self.count is not None)
        twin.bags = GradientBags(twin.weight)
        memo[id(self)] = twin
        return twin

    @property
    def bound(self) -> bool:
        """True if `bind` or `read_from` has connected a table."""
        return self._client is not None

    @property
    def client(self) -> ParameterClient:
        """Client for pulls and pushes of the table."""
        if self._client is None:
            raise UsageError(
                f"the embedding {self.name or '(unnamed)'!r} has no table yet; pass the "
                "model to psfleet.torch.DistributedOptimizer before its first lookup"
            )
        return self._client

    @property
    def runtime(self) -> Runtime:
        """Runtime that holds the table."""
        return self.client.runtime

    @property
    def spec(self) -> TableSpec:
        """Definition of the table."""
        assert self._spec is not None
        return self._spec

    @property
    def key(self) -> int:
        """Number that identifies the table in messages."""
        return self.spec.key

    def bind(self, client: ParameterClient, name: str, formula: RuleMapping) -> None:
        """Create the table on the servers. All workers must then call `fill`.

        Args:
            formula: Update rule of the table, with its weight decay.
        """
        if self._client is not None:
            raise UsageError(
                f"the embedding {self.name!r} has an optimizer already; give each model one"
            )
        spec = TableSpec(
            name,
            "sparse",
            (self.dim,),
            formula.rule,
            formula.decay,
            self.initializer,
            self.seed,
            formula.every_row,
            self.entry,
            servers=self.servers,
            precision=self.precision,
            device=self.device,
        )
        client.runtime.create(spec)
        self.read_from(client, spec)
        if client.runtime.reader_to_device(spec.key) is not None and not self.counts:
            # The gradient of a parameter must be on the parameter's device.
            self.weight.data = (
                self.weight.data[:1, :1].to(device_tensors.table_gpu()).expand_as(self.weight)
            )
            self._ledger.on_device = True
        if self.count is not None:
            # Weak, because rows refer to their weight: a cycle would keep a dropped model in `_living` until
            # the garbage collector runs.
            whole = weakref.WeakMethod(self._whole)
            self.weight.source = lambda: bring() if (bring := whole()) else None
        _living.add(self)

    def read_from(self, client: ParameterClient, spec: TableSpec) -> None:
        """Connect an existing table, only to look rows up."""
        self.name, self._client, self._spec = spec.name, client, spec

    def fill(self) -> None:
        """Write the initial rows into the table, where they differ from the initializer's. Call it within
        `ParameterClient.exclusively`.
        """
        if self.content is not None:
            ids, rows = np.arange(len(self.content), dtype=np.int64), self.content
        elif self.padding is not None:
            ids, rows = np.array([self.padding], np.int64), np.zeros((1, self.dim), np.float32)
        else:
            return
        self.client.begin_rows(self.spec, ids, rows)

    def replace(self, values: Floats, ids: Ids | None = None) -> None:
        """Set the values of all rows and keep the optimizer state. Call it within
        `ParameterClient.exclusively`.

        Args:
            values: float32 [count, dim], or [n, dim] with ids.
            ids: int64 [n], for a table whose ids are any int64. Must include every id that has a row.

        Raises:
            UsageError: `ids` lacks an id that has a row on the servers, and this row would keep its old
                value.
        """
        state = self.runtime.read_table(self.key)
        assert state.ids is not None
        if ids is None:
            ids = np.arange(len(values), dtype=np.int64)
        absent_ids = np.setdiff1d(state.ids, ids)
        if len(absent_ids):
            raise UsageError(
                f"embedding {self.name!r} has a row for id {absent_ids[0]} and the state dict has none; "
                "load it before the first step, or use fleet.load_model"
            )
        self.client.set_weights(self.spec, values, ids, state)
        self.forget()

    def saved(self) -> tuple[Ids | None, Floats]:
        """Return ids and values of all rows: int64 [n] or None if the number of rows is fixed, and float32
        [n, dim].

        Raises:
            UsageError: A state dict cannot hold the rows: memory is too short, or the embedding has an
                `entry`.
        """
        self._check_saved()
        if self.count is not None:
            ids = np.arange(self.count, dtype=np.int64)
            return None, self.runtime.pull([self.read(ids)])[0]
        state = self.runtime.read_table(self.key)
        return state.ids, state.values[0]

    def _whole(self) -> Tensor:
        return torch.from_numpy(self.saved()[1])

    def saved_state(self) -> tuple[int, Ids | None, list[Floats]]:
        """Return the optimizer state: the table's step count, the ids as in `saved`, and one array for each
        slot.

        A slot is a state value that the optimizer keeps for each weight, such as Adam's first moment.

        Raises:
            UsageError: A state dict cannot hold the state, as in `saved`.
        """
        self._check_saved()
        state = self.runtime.read_table(self.key)
        if self.count is None:
            return state.step, state.ids, state.values[1:]
        ids = np.arange(self.count, dtype=np.int64)
        return state.step, None, slots_of(self.spec, ids, state)

    def restore(self, step: int | None, slots: Sequence[Floats], ids: Ids | None = None) -> None:
        """Set the optimizer state and keep the values of the rows. Call it within
        `ParameterClient.exclusively`.

        Args:
            step: Step count of the table, or None to keep the present one.
            slots: One array for each slot of the rule (a state value of each weight), float32 [count, dim],
                or [n, dim] with ids. A row on the servers whose id is not in `ids` gets the slots' initial
                values.
            ids: int64 [n], for a table whose ids are any int64.
        """
        state = self.runtime.read_table(self.key)
        assert state.ids is not None
        if ids is None:
            assert self.count is not None
            ids = np.arange(self.count, dtype=np.int64)
        initial = [slot.initial for slot in self.spec.rule.slots]
        # An id with initial state is written only if the servers have a row for it: other rows are created
        # on demand.
        is_stored = np.isin(ids, state.ids)
        for values, first in zip(slots, initial, strict=True):
            is_stored |= (values != np.float32(first)).any(1)
        absent_ids = np.setdiff1d(state.ids, ids)
        ids = np.concatenate([ids[is_stored], absent_ids])
        whole = [
            np.concatenate(
                [values[is_stored], np.full((len(absent_ids), self.dim), first, np.float32)]
            )
            for values, first in zip(slots, initial, strict=True)
        ]
        rows = np.array(self.runtime.pull([self.read(ids)])[0])
        rows[places_of(ids, state.ids)] = state.values[0]
        step = state.step if step is None else step
        self.runtime.write_table(self.key, TableState(step, [rows, *whole], ids))
        self.forget()

    def _check_saved(self) -> None:
        instead = "save with fleet.save_persistables and load with fleet.load_model"
        if self.entry is not None:
            raise UsageError(
                f"embedding {self.name!r} has the entry {self.entry}, and a state dict cannot hold "
                f"its counts; {instead}"
            )
        count, free = self._saved_rows(), available_memory()
        size = 4 * self.dim * (1 + len(self.spec.rule.slots)) * count
        if free and size > free:
            raise UsageError(
                f"embedding {self.name!r} has {count} rows of {self.dim} values, with optimizer "
                f"state {size >> 30} GiB, and {free >> 30} GiB of memory are free; {instead}"
            )

    def _saved_rows(self) -> int:
        if self.count is not None:
            return self.count
        tables = (table for server in self.runtime.stats() for table in server["tables"])
        return sum(table["count"] for table in tables if table["name"] == self.name)

    def look_up(
        self, ids: Tensor, *, keep: bool, padding: int | None = None, scores: Floats | None = None
    ) -> Tensor:
        """Return the current rows: float32 [*ids.shape, dim] on the ids' device.

        Args:
            ids: int64 of any shape.
            keep: True to return the same values for the same ids until the next step, so that a forward
                pass that is computed again sees the values of the first.
            padding: Id that gets no gradient, or None.
            scores: Shows and clicks of each id, float32 [n, 2]. None means one show and no click for each id.

        Raises:
            IdError: An id is negative or not below `count`.
        """
        if (rows := self._on_device(ids)) is not None:
            return look_up(
                self.weight, lambda: rows, ids.detach().to(torch.int64), self._ledger, padding
            )
        numbers = as_ids(ids.detach().cpu().numpy(), f"embedding {self.name!r}")
        self._check(numbers)
        if self.watcher is not None:
            self.watcher.note(self, ids)
        entry = self._find(numbers)
        values = self._values_of(entry) if entry else self.runtime.pull([self.read(numbers)])[0]
        if scores is None and self.counts:
            scores = np.tile(np.array([1, 0], np.float32), (numbers.size, 1))
        out = look_up(
            self.weight,
            lambda: as_tensor(values).to(ids.device),
            as_tensor(numbers),
            self._ledger,
            padding,
            scores,
        )
        if entry and entry.used is None:
            entry.rows, entry.used = out.detach(), out._version
        elif keep and entry is None and len(self._held) < _MOST_HELD:
            self._held.append(_CachedLookup(numbers, out.detach(), out._version))
        return out

    def _on_device(self, ids: Tensor) -> Tensor | None:
        """Return the current rows of ids on the GPU that has the table, or None if `pull` must bring them.

        These rows need no cache: no other process changes the table between two forward passes of a step.
        """
        if not self._ledger.on_device or not device_tensors.is_shared(ids):
            return None
        if (reader := self.runtime.reader_to_device(self.key)) is None:
            return None
        if self.count is not None:
            self._check_range(*torch.stack(ids.aminmax()).tolist())
        flat_ids = device_tensors.TensorArray(ids.reshape(-1).to(torch.int64))
        rows = torch.empty(*ids.shape, self.dim, device=ids.device)
        flat_rows = device_tensors.TensorArray(rows.reshape(-1, self.dim))
        return rows if reader.pull_to_device(flat_ids, flat_rows) else None

    def read(self, ids: Ids) -> Read:
        """Return a read of these ids for Runtime.pull."""
        return Read(self.key, ids)

    def expected(self) -> list[Ids]:
        """Return the ids of each lookup that the watcher predicts for the next step. Without a watcher
        there are none, and none for a table on the GPU, whose rows are not worth a copy in host memory.
        """
        if self.watcher is None or self._ledger.on_device:
            return []
        return self.watcher.expected(self)

    def hold(self, ids: Asked, values: Floats) -> None:
        """Cache rows that were pulled ahead. The next lookup of the same ids uses them."""
        self._held.append(_CachedLookup(ids, as_tensor(values)))

    def forget(self) -> None:
        """Drop all cached lookups, because the table may have changed."""
        self._held.clear()

    def gradient(self) -> SparseGrad | None:
        """Return the sum of the gradients since the last zero_grad, or None if no backward pass has run."""
        return self.bags.gradient() if self.bags else self._ledger.gradient()

    def _find(self, ids: Asked) -> _CachedLookup | None:
        for entry in self._held:
            # Skip an entry whose tensor the model has changed in place: torch has raised its change
            # counter.
            unspoilt = entry.used is None or entry.used == entry.rows._version
            if unspoilt and are_equal(entry.ids, ids):
                return entry
        return None

    @staticmethod
    def _values_of(entry: _CachedLookup) -> Floats:
        # The first lookup may use the pulled memory. A later one gets a copy, so that an in-place change of
        # one result does not change another.
        values: Floats = entry.rows.cpu().numpy()
        return values if entry.used is None else values.copy()

    def _check(self, ids: Ids) -> None:
        if self.count is not None and ids.size:
            self._check_range(int(ids.min()), int(ids.max()))

    def _check_range(self, low: int, high: int) -> None:
        assert self.count is not None
        if low < 0 or high >= self.count:
            raise IdError(
                f"embedding {self.name!r} has rows 0 to {self.count - 1}; "
                f"id {low if low < 0 else high} is not one of them"
            )


def pooled_of(lookups: Sequence[tuple[EmbeddingRows, PooledIds]], keep: bool) -> list[Floats]:
    """Return pooled rows of several tables, float32 [bags, dim] for each. One pull brings all that are not
    cached.

    Args:
        lookups: Tables of one runtime, each with the ids to look up and the bags to pool them by.
        keep: True to cache the results until the next step, as in `EmbeddingRows.look_up`.
    """
    entries = [rows._find(ids) for rows, ids in lookups]
    missing = [pair for pair, entry in zip(lookups, entries, strict=True) if entry is None]
    pulls = iter(_pull(missing))
    values = []
    for (rows, ids), entry in zip(lookups, entries, strict=True):
        values.append(next(pulls) if entry is None else rows._values_of(entry))
        if keep and entry is None and len(rows._held) < _MOST_HELD:
            rows.hold(ids, values[-1])
    return values


def _pull(lookups: Sequence[tuple[EmbeddingRows, PooledIds]]) -> list[Floats]:
    reads = [(rows.key, ids) for rows, ids in lookups if rows.client]
    return lookups[0][0].client.pull([], reads)[1] if reads else []


def living_rows() -> list[EmbeddingRows]:
    """Return the rows of all embeddings of this process that have a table, sorted by the table's name."""
    return sorted(_living, key=lambda rows: rows.name or "")
