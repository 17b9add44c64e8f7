"""Which ids the batches of a worker name most: a look at the newest batches while somebody watches."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from psfleet.observability.exposition import gauge
from psfleet.observability.frequent_ids import FrequentIds
from psfleet.platform.notices import say

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["HotIds"]

Ids = NDArray[np.int64]

_SAMPLE = 8192  # ids of all tables in one look
_FADE = 63 / 64  # by which earlier looks weigh less: with one look a second about a minute counts
_MANY = 100
_HOT = 0.1  # share of an id that is worth a word
_ENOUGH = 1000  # ids that must have been seen before that word


class HotIds:
    """Samples the newest batch of each table. Costs the training nothing: it takes what is there.

    Args:
        worker: Its index.
        batches: The newest batch of each table by its name: int64 [n], with repeats.
    """

    def __init__(self, worker: int, batches: Callable[[], Mapping[str, Ids]]) -> None:
        self._worker = worker
        self._batches = batches
        self._found: dict[str, FrequentIds] = {}
        self._seen: dict[str, Ids] = {}
        self._named: set[str] = set()
        self._numbers = np.random.default_rng(worker)

    def families(self) -> "Iterator[Metric]":
        """Look, and tell what all looks have found."""
        self._look()
        found = self._found.items()
        yield gauge("hottest_id_share", "Most frequent id", {n: one.share(1) for n, one in found})
        shares = {name: one.share(_MANY) for name, one in found}
        yield gauge("hot_ids_share", f"The {_MANY} most frequent ids", shares)

    def _look(self) -> None:
        batches = self._batches()
        for name, ids in batches.items():
            if not len(ids) or self._seen.get(name) is ids:
                continue
            self._seen[name] = ids
            most = max(_SAMPLE // len(batches), 1)
            sample = ids if len(ids) <= most else ids[self._numbers.integers(len(ids), size=most)]
            found = self._found.setdefault(name, FrequentIds())
            found.fade(_FADE)
            found.add(sample)
            self._name(name, found)

    def _name(self, table: str, found: FrequentIds) -> None:
        """Say once which id it is: no metric has ids for labels."""
        share = found.share(1)
        if table in self._named or share < _HOT:
            return
        if found.total >= _ENOUGH and len(found.ids) > _MANY:
            self._named.add(table)
            say(
                f"psfleet: worker {self._worker}: {share:.0%} of the ids of table {table!r} are "
                f"{found.first()}; if it stands for a missing value, leave it out of the batches"
            )
