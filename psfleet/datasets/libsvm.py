"""Sparse samples as libsvm, libFM and XGBoost write them: `label index:value index:value ...`."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from psfleet.datasets.lines import lines_of, number, whole
from psfleet.errors import UsageError

__all__ = ["Samples", "read_libsvm"]


@dataclass(frozen=True)
class Samples:
    """Labels with their features, in the order of the file.

    Attributes:
        labels: float32 [n].
        starts: int64 [n + 1]; sample i has the features starts[i] to starts[i + 1].
        ids, values: int64 and float32, of all features.
    """

    labels: NDArray[np.float32]
    starts: NDArray[np.int64]
    ids: NDArray[np.int64]
    values: NDArray[np.float32]

    def padded(self, missing: int = -1) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """ids and values as [n, longest sample]; what a sample lacks has the id `missing`, value 0."""
        lengths = np.diff(self.starts)
        there = np.arange(lengths.max(initial=0)) < lengths[:, None]
        ids = np.full(there.shape, missing, np.int64)
        values = np.zeros(there.shape, np.float32)
        ids[there], values[there] = self.ids, self.values
        return ids, values


def read_libsvm(path: str | Path) -> Samples:
    """The samples of a libsvm file. Empty lines and what follows a `#` are skipped.

    Raises:
        UsageError: The file cannot be read or has no sample; or a label, index or value is no number,
            an index is negative or comes twice in a line. The text names file and line.
    """
    with lines_of(path) as lines:
        return _samples(lines, Path(path).name)


def _samples(lines: Iterable[str], name: str) -> Samples:
    labels, starts, ids, values = array("f"), array("q", [0]), array("q"), array("f")
    for at, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{name} line {at}"
        labels.append(number(words[0], "label", where))
        for word in words[1:]:
            index, value = _feature(word, where)
            ids.append(index)
            values.append(value)
        mine = ids[starts[-1] :]
        if len(set(mine)) < len(mine):
            twice = next(index for index in mine if mine.count(index) > 1)
            raise UsageError(f"{where}: index {twice} comes twice")
        starts.append(len(ids))
    if not labels:
        raise UsageError(f"{name} has no sample; a line is: label index:value index:value ...")
    return Samples(
        np.array(labels, np.float32),
        np.array(starts, np.int64),
        np.array(ids, np.int64),
        np.array(values, np.float32),
    )


def _feature(word: str, where: str) -> tuple[int, float]:
    index, colon, value = word.partition(":")
    if not colon:
        raise UsageError(f"{where}: feature {word!r} is not index:value")
    found = whole(index, "index", where)
    if found < 0:
        raise UsageError(f"{where}: index {found} is negative")
    return found, number(value, f"value of index {found}", where)
