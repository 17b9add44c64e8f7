"""Pushes and pulls that a server of the fleet takes plainly, with the log told beside."""

import numpy as np

from psfleet.core.engine.kernels.initial_values import address_of
from psfleet.core.engine.shard.event_shortcuts import apply_plain_call, is_plain, may_be_plain
from psfleet.core.engine.shard.events import Pull, Push
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.sparse import SparseTable


class PlacedUpdates:
    """The gradients of a push, which are all sparse."""

    def __init__(self, shard: Shard, push: Push | None) -> None:
        self._parts = []
        for one in () if push is None else push.gradients:
            table = shard.tables[one.table]
            shard.tables.check_gradient(one)
            assert isinstance(table, SparseTable)
            assert one.ids is not None
            rows = table.placed()
            assert rows is not None
            arrays = np.ascontiguousarray(one.ids), np.ascontiguousarray(one.values)
            self._parts.append((rows, *arrays, one.learning_rate))

    def fit(self, base: int) -> bool:
        return all(
            rows.can_push(base + address_of(ids), len(ids)) for rows, ids, _, _ in self._parts
        )

    def apply(self, base: int) -> None:
        for rows, ids, values, rate in self._parts:
            rows.push(base + address_of(ids), len(ids), base + address_of(values), rate)


def take_plainly(shard: Shard, event: Push | Pull) -> bool:
    """Take a push or a pull if it is plain, but that there may be a log; False: it is not."""
    push, pull = (event, None) if isinstance(event, Push) else (None, event)
    journal, shard.journal = shard.journal, None
    try:
        if not may_be_plain(shard):
            return False
        updates = PlacedUpdates(shard, push)
        if not is_plain(shard, push, updates, pull):
            return False
        if push is not None and journal is not None:
            journal(push)
        apply_plain_call(shard, push, updates, pull)
    finally:
        shard.journal = journal
    return True
