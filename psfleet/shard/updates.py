"""Pushes become updates of tables: one for each table, however many of them name it."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.runtime.interface import Gradient
from psfleet.shard.events import Push
from psfleet.shard.shard_tables import Table
from psfleet.tables.assigned_weights import add_rows, add_values
from psfleet.tables.dense import DenseTable

__all__ = ["take", "update"]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def update(tables: Mapping[int, Table], pushes: Sequence[Push]) -> None:
    """One update of every table by its rule: the mean over the pushes that name it, in their order.

    A table that counts gets one update for each push.
    """
    if len(pushes) == 1:  # which names no table twice
        for gradient in pushes[0].gradients:
            _apply(tables[gradient.table], gradient, gradient.learning_rate)
        return
    by_table: dict[int, list[Gradient]] = {}
    for push in pushes:
        for gradient in push.gradients:
            by_table.setdefault(gradient.table, []).append(gradient)
    for key, gradients in by_table.items():
        table, rate = tables[key], gradients[0].learning_rate
        if isinstance(table, DenseTable):
            table.push(_mean(_whole(gradient, table.count) for gradient in gradients), rate)
        elif table.spec.rule.counts:
            for gradient in gradients:
                _apply(table, gradient, rate)
        else:
            table.push_mean(_parts(gradients), rate)


def _apply(table: Table, gradient: Gradient, rate: float) -> None:
    """One update by one gradient."""
    if isinstance(table, DenseTable):
        table.push(_whole(gradient, table.count), rate)
    elif gradient.ids is not None:
        table.push(gradient.ids, gradient.values, rate)


def take(tables: Mapping[int, Table], push: Push, adds: bool) -> None:
    """One push in a mode without rounds. `adds`: it brings what is to be added to the weights."""
    if adds:
        _add(tables, push)
    else:
        update(tables, [push])


def _add(tables: Mapping[int, Table], push: Push) -> None:
    """Geo mode: what a push brings has been learned elsewhere and is added to the weights."""
    for delta in push.gradients:
        table = tables[delta.table]
        if isinstance(table, DenseTable):
            add_values(table, _whole(delta, table.count))
        else:
            assert delta.ids is not None
            if table.spec.rule.counts:
                table.push(delta.ids, delta.values, delta.learning_rate)
            else:
                add_rows(table, delta.ids, delta.values)


def _parts(gradients: Sequence[Gradient]) -> list[tuple[Ids, Floats]]:
    """What pushes bring for a sparse table."""
    return [(gradient.ids, gradient.values) for gradient in gradients if gradient.ids is not None]


def _whole(gradient: Gradient, count: int) -> Floats:
    """A dense gradient of `count` values, zero where none was sent."""
    if gradient.ids is None:
        return gradient.values
    values = np.zeros(count, np.float32)
    values[gradient.ids] = gradient.values
    return values


def _mean(gradients: Iterator[Floats]) -> Floats:
    """The mean of gradients, summed in their order."""
    total = next(gradients)
    count = 1
    for values in gradients:
        total = np.add(total, values, out=total if count > 1 else None)
        count += 1
    return total if count == 1 else total * np.float32(1.0 / count)
