"""Pushes and pulls to which nothing else applies: most of those of an asynchronous fleet without a log.

`Shard.handle` takes them too. Here they take effect by the same functions after fewer questions. Whatever is
not so plain is left to `Shard.handle`, with nothing changed.
"""

from typing import Protocol

from psfleet.errors import PsfleetError
from psfleet.shard.events import Pull, Push
from psfleet.shard.shard import Shard


class TableUpdates(Protocol):
    """The gradients of a push, each checked (`ShardTables.check_gradient`)."""

    def fit(self, base: int) -> bool:
        """Return whether they name no id twice and the tables surely have room; `base`: as for `is_plain`."""

    def apply(self, base: int) -> None:
        """Update the tables, which have not changed since `fit`."""


def may_be_plain(shard: Shard) -> bool:
    """Return whether there are plain calls, whatever they ask."""
    mode = shard.consistency.declared
    return shard.is_quiet and not (mode.has_rounds or mode.adds_deltas or mode.gate)


def is_plain(
    shard: Shard, push: Push | None, updates: TableUpdates, pull: Pull | None, base: int = 0
) -> bool:
    """Return whether `take` may have a push, and the pull that came with it; see `may_be_plain` too.

    Whatever is wrong with them, it may not.

    Args:
        updates: Those of the push, whose own gradients do not count.
        base: Address from which the places of the updates count.
    """
    try:
        if push is not None:
            if push.cut is not None or push.correction is not None or push.withdrawn:
                return False
            shard.workers.admit(push.worker, push.incarnation)
            if not shard.workers.is_new_push(push) or not updates.fit(base):
                return False
        if pull is None:
            return True
        if push is None:
            shard.workers.admit(pull.worker, pull.incarnation)
        return not pull.commit and not pull.keeps and shard.consistency.is_ready(pull)
    except PsfleetError:
        return False


def take(
    shard: Shard, push: Push | None, updates: TableUpdates, pull: Pull | None, base: int = 0
) -> None:
    """Take what `is_plain` has found so, with no event of the shard since then."""
    if push is not None:
        shard.recent.add(push)
        shard.note(push)
        updates.apply(base)
        shard.counters.count(push, True)
    if pull is not None:
        shard.recent.add(pull)
        shard.serve(pull)
