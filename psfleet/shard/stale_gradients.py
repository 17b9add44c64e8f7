"""Corrections of gradients that arrive late, in the modes that apply a push when it arrives.

A gradient is taken at the weights w0 that its worker pulled and applied to the weights w of now. Between
them lie the pushes of other workers, whose number is the staleness. Two corrections, each off at 0:

- damping p: the learning rate is divided by (1 + staleness)^p. p = 1 is about the staleness-aware rate of
  Zhang et al. (2016), "Staleness-aware Async-SGD for Distributed Deep Learning", who divide by it.
- compensation c: the gradient g becomes g + c * g * g * (w - w0), the first-order term of its change with
  the diagonal of g * g for the Hessian. This is DC-ASGD-c of Zheng et al. (2017), "Asynchronous Stochastic
  Gradient Descent with Delay Compensation". A server keeps the values of each worker's last pull for it.

A push is corrected before it is recorded, so a replay or a standby needs neither staleness nor old values.
"""

import dataclasses
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.runtime.interface import Gradient, Read
from psfleet.schema.table import OWN
from psfleet.shard.events import Correction, Push
from psfleet.shard.shard_tables import ShardTables
from psfleet.tables.dense import DenseTable

__all__ = ["StaleGradients"]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class StaleGradients:
    """What one shard corrects, and the values that it keeps for it."""

    def __init__(self) -> None:
        self._pulled: dict[int, dict[int, tuple[Ids | None, Floats]]] = {}
        self._lock = threading.Lock()

    def keep(self, worker: int, reads: Sequence[Read], values: Sequence[Floats]) -> None:
        """Remember what a worker is given; any thread may call."""
        kept = {
            read.table: (None, array.copy()) if read.ids is None else _by_id(read.ids, array)
            for read, array in zip(reads, values, strict=True)
        }
        with self._lock:
            self._pulled.setdefault(worker, {}).update(kept)

    def forget(self, worker: int) -> None:
        """The worker's life is over, or a new one begins."""
        with self._lock:
            self._pulled.pop(worker, None)

    def correct(self, push: Push, staleness: int, tables: ShardTables) -> Push:
        """The push as it is to be applied; it itself if there is nothing to correct."""
        asked = push.correction
        if asked is None or not staleness:
            return push
        damped = float((1 + staleness) ** -asked.damping)
        gradients = tuple(
            gradient
            if tables[gradient.table].spec.name.startswith(OWN)
            else dataclasses.replace(
                gradient,
                values=self._compensated(push.worker, gradient, asked, tables),
                learning_rate=gradient.learning_rate * damped,
            )
            for gradient in push.gradients
        )
        return dataclasses.replace(push, gradients=gradients)

    def _compensated(
        self, worker: int, gradient: Gradient, asked: Correction, tables: ShardTables
    ) -> Floats:
        with self._lock:
            kept = self._pulled.get(worker, {}).get(gradient.table)
        if not asked.compensation or kept is None:
            return gradient.values
        table = tables[gradient.table]
        if isinstance(table, DenseTable):
            moved = np.empty(table.count, np.float32)
            table.pull_into(moved)
            moved -= kept[1]
            return _with_delay(gradient.values, _at(moved, gradient.ids), asked.compensation)
        assert gradient.ids is not None
        there, places = _found(gradient.ids, kept[0])
        now = np.empty((len(gradient.ids), table.spec.dim), np.float32)
        table.pull_into(gradient.ids, now)
        moved = np.where(there[:, None], now - kept[1][places], np.float32(0))
        values = gradient.values.copy()  # shows and clicks behind the gradient stay
        dim = table.spec.dim
        values[:, :dim] = _with_delay(values[:, :dim], moved, asked.compensation)
        return values


def _with_delay(gradient: Floats, moved: Floats, compensation: float) -> Floats:
    corrected: Floats = gradient + np.float32(compensation) * gradient * gradient * moved
    return corrected


def _at(values: Floats, places: Ids | None) -> Floats:
    return values if places is None else values[places]


def _by_id(ids: Ids, rows: Floats) -> tuple[Ids, Floats]:
    """Copies in ascending order of id."""
    order = np.argsort(ids)
    return ids[order], rows[order]


def _found(ids: Ids, kept: Ids | None) -> tuple[NDArray[np.bool_], Ids]:
    """Which ids are among the kept ones, ascending, and where; 0 for those that are not."""
    if kept is None or not len(kept):
        return np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.int64)
    places = np.minimum(np.searchsorted(kept, ids), len(kept) - 1)
    return kept[places] == ids, places
