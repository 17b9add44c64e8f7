"""The changes of a shard's tables that followers ask for: a limited number, and none while nobody asks."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from psfleet.shard.change_log import ChangeLog

Ids = NDArray[np.int64]


def listed(changed: Mapping[int, Ids | None] | None) -> dict[int, list[int] | None] | None:
    """The same as ascending lists."""
    if changed is None:
        return None
    return {key: None if ids is None else sorted(ids.tolist()) for key, ids in changed.items()}


def test_since() -> None:
    """Each question gets what changed since a version, by table, each id once; arrays are copied."""
    log, ids = ChangeLog(), np.array([3, 1])
    log.add(1, ids)
    assert not log.version  # nobody follows
    assert log.since(0) is None
    first = log.version
    log.add(1, ids)
    ids[:] = 7
    log.add(2, ids)
    second = log.version
    log.add(1, np.array([2, 3]))
    log.add(3, None)
    assert listed(log.since(first)) == {1: [1, 2, 3], 2: [7], 3: None}
    assert listed(log.since(second)) == {1: [2, 3], 3: None}
    assert listed(log.since(log.version)) == {}
    assert log.since(log.version + 1) is None


def test_limit() -> None:
    """Of too many ids the oldest are forgotten, and whoever needs them is told that they are not known."""
    log = ChangeLog(limit=10)
    log.since(0)
    versions = []
    for low in range(0, 40, 4):
        versions.append(log.version)
        log.since(log.version)
        log.add(1, np.arange(low, low + 4))
    assert log.since(versions[-3]) is None
    assert listed(log.since(versions[-2])) == {1: list(range(32, 40))}


def test_nobody_asks() -> None:
    """As many ids as it may hold without a question: it keeps nothing until the next one."""
    log = ChangeLog(limit=10)
    log.since(0)
    last = log.version
    for _ in range(5):
        log.add(1, np.arange(4))
    assert not log.is_kept
    assert log.since(last) is None
    assert log.is_kept
    assert listed(log.since(log.version)) == {}
