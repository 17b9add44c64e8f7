"""Most frequent ids in the newest batches of a worker, counted on request.

A summary of Misra and Gries (1982) that is merged with the counts of whole batches, as in Agarwal et al.,
"Mergeable summaries", PODS 2012. It holds what SpaceSaving holds, less its overestimates.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from psfleet.observability.exposition import gauge
from psfleet.platform.logs import log_of

Ids = NDArray[np.int64]


class FrequentIds:
    """Counts of at most `places` ids.

    A count is never too high, and too low by at most total / (places + 1): every id that makes up more
    than that share of the stream is held.

    Attributes:
        total: Number of ids; those before a `fade` count less.
        ids: int64 [at most places].
        counts: float64, of each of them.
    """

    def __init__(self, places: int = 1024) -> None:
        self._places = places
        self.total = 0.0
        self.ids: Ids = np.zeros(0, np.int64)
        self.counts: NDArray[np.float64] = np.zeros(0)

    def add(self, ids: Ids) -> None:
        """Count the ids of a batch, int64 [n], with repeats."""
        distinct, counts = np.unique(ids, return_counts=True)
        union, place = np.unique(np.concatenate([self.ids, distinct]), return_inverse=True)
        sums = np.zeros(len(union))
        np.add.at(sums, place, np.concatenate([self.counts, counts]))
        if len(union) > self._places:
            sums -= np.partition(sums, -self._places - 1)[-self._places - 1]
        positive = sums > 0
        self.ids, self.counts = union[positive], sums[positive]
        self.total += len(ids)

    def fade(self, factor: float) -> None:
        """Let all that was counted so far weigh less."""
        self.total *= factor
        self.counts *= factor

    def share(self, count: int) -> float:
        """Return the share of the stream that the `count` most frequent ids make up; 0 without ids."""
        if not self.total:
            return 0.0
        top = np.sort(self.counts)[-count:]
        return float(top.sum() / self.total)

    def first(self) -> int | None:
        """Return the most frequent id; None: none is held."""
        return int(self.ids[self.counts.argmax()]) if len(self.ids) else None


_log = log_of(__name__)

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_SAMPLE = 8192  # ids of all tables in one look
_FADE = 63 / 64  # by which earlier looks weigh less: with one look a second about a minute counts
_MANY = 100
_HOT = 0.1  # share of an id that is worth a word
_ENOUGH = 1000  # ids that must have been seen before that word


class HotIds:
    """Samples the newest batch of each table. Costs the training nothing: it takes what is there.

    Args:
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
        """Sample the newest batches; return the counts of all samples."""
        self._look()
        tables = self._found.items()
        yield gauge("hottest_id_share", "Most frequent id", {n: one.share(1) for n, one in tables})
        fractions = {name: one.share(_MANY) for name, one in tables}
        yield gauge("hot_ids_share", f"The {_MANY} most frequent ids", fractions)

    def _look(self) -> None:
        batches = self._batches()
        for name, ids in batches.items():
            if not len(ids) or self._seen.get(name) is ids:
                continue
            self._seen[name] = ids
            most = max(_SAMPLE // len(batches), 1)
            sample = ids if len(ids) <= most else ids[self._numbers.integers(len(ids), size=most)]
            frequent = self._found.setdefault(name, FrequentIds())
            frequent.fade(_FADE)
            frequent.add(sample)
            self._name(name, frequent)

    def _name(self, table: str, frequent: FrequentIds) -> None:
        """Say once which id it is: no metric has ids for labels."""
        share = frequent.share(1)
        if table in self._named or share < _HOT:
            return
        if frequent.total >= _ENOUGH and len(frequent.ids) > _MANY:
            self._named.add(table)
            _log.warning(
                f"psfleet: worker {self._worker}: {share:.0%} of the ids of table {table!r} are "
                f"{frequent.first()}; if it stands for a missing value, leave it out of the batches"
            )
