"""Predictions for the rows of files, written to Parquet files by any number of processes.

Whole row groups make up parts. Each part is a file that appears whole or not at all, and a process that
writes one holds a lock on it. So processes share the work by themselves, and one that is started again, or
later, does what is left.
"""

import contextlib
import fcntl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from psfleet.core.base.arrow import pa, pq
from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.core.base.files import read_small, sync
from psfleet.core.base.json_documents import Format, reading
from psfleet.core.base.settings.kinds import local_path
from psfleet.data.arrow_rows import Rows, check_columns
from psfleet.data.row_groups import RowGroupSource

_FORMAT = Format("predictions")
_PLAN = "_predictions.json"  # readers of the folder skip what begins so
_FORMER_PLAN = "predictions.json"
_LONGEST = 256 << 20  # bytes of the plan
_SKIPPED = b"psfleet.skipped"
Predict = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class _PredictionPart:
    """A file of the target, and the numbers of the row groups whose rows it has."""

    name: str
    groups: tuple[int, ...]


class ParquetPredictions:
    """Predictions for all rows of some files, in a folder.

    Args:
        files: The rows. Labels are not needed.
        target: The folder. It is made; it may hold what was left of the same predictions.
        columns: Those of the files that the predictions come with.
        batch_size: Rows for which the model is asked at once. Batches end with their row group, so that they,
            and the bits of the predictions, do not depend on the number of processes.
        part_rows: A part ends with the row group that fills it.
        model: Text that tells the model apart from others, for the folder's plan.

    Raises:
        UsageError: The folder holds something else, or a file lacks a column.
    """

    def __init__(
        self,
        files: RowGroupSource,
        target: str,
        columns: Sequence[str],
        batch_size: int,
        part_rows: int,
        model: str,
    ) -> None:
        self._files, self._target = files, local_path(target)
        self._columns, self._batch_size = list(columns), batch_size
        self._parts = list(_parts(files, part_rows))
        self._check_columns()
        self._settle(
            {
                "model": model,
                "files": [[group.file, group.number, group.rows] for group in files.groups],
                "columns": self._columns,
                "batch_size": batch_size,
                "part_rows": part_rows,
            }
        )

    def _check_columns(self) -> None:
        for group in self._files.groups:
            check_columns(self._columns, self._files.names(group), group.file)

    def _settle(self, plan: dict[str, Any]) -> None:
        """Begin, or go on with the same."""
        self._target.mkdir(parents=True, exist_ok=True)
        where = self._target / _PLAN
        if not where.exists():
            with contextlib.suppress(FileNotFoundError):
                (self._target / _FORMER_PLAN).rename(where)
        if not where.exists():
            if any(file.suffix == ".parquet" for file in self._target.iterdir()):
                raise UsageError(
                    f"{str(self._target)!r} holds Parquet files that are no predictions of this command; "
                    "name another folder"
                )
            _FORMAT.write(where, **plan)
        with reading(where):
            present = _FORMAT.parse(read_small(where, _LONGEST))
        for name, value in plan.items():
            if present.get(name) != value:
                raise UsageError(
                    f"{str(self._target)!r} holds predictions with other {name} "
                    f"({present.get(name)!r:.60}, now {value!r:.60}); name another folder, or remove this one"
                )

    def write(self, predict: Predict) -> None:
        """Write what no other process has written; when it returns, every part is there.

        Args:
            predict: Gives the predictions for the features of a batch, see `SampleBatch`: an array or tensor
                [n], [n, 1] or [n, k] for the column "prediction", or a mapping of them by column.

        Raises:
            UsageError: A row cannot be used and bad rows are to fail, or the predictions cannot be written.
        """
        for waits in (False, True):  # what others are at comes last: they may have been killed
            for part in self._parts:
                self._take(part, predict, waits)

    def summary(self) -> tuple[int, int]:
        """Return the number of rows with predictions, and of those that were skipped."""
        files = [pq.read_metadata(self._target / part.name) for part in self._parts]
        rows: int = sum(metadata.num_rows for metadata in files)
        return rows, sum(int(metadata.metadata[_SKIPPED]) for metadata in files)

    def _take(self, part: _PredictionPart, predict: Predict, waits: bool) -> None:
        where = self._target / part.name
        partial = self._target / f".{part.name}.partial"
        if where.exists():
            return
        with partial.open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError:
                return
            if where.exists():  # another process was quicker
                partial.unlink(missing_ok=True)
                return
            self._write(partial, part, predict)
            sync(partial)
            partial.replace(where)
            sync(self._target)

    def _write(self, partial: Path, part: _PredictionPart, predict: Predict) -> None:
        """Write into the file that is locked."""
        before = self._files.skipped
        whole = pa.concat_tables([self._table(number, predict) for number in part.groups])
        skipped = str(self._files.skipped - before)
        pq.write_table(whole.replace_schema_metadata({_SKIPPED: skipped}), str(partial))

    def _table(self, number: int, predict: Predict) -> Any:
        """The chosen columns of a row group with its predictions."""
        rows = self._files.group(number)
        columns = self._files.columns(number, self._columns, rows.numbers)
        for name, values in self._predicted(rows, predict).items():
            if name in columns:
                raise UsageError(
                    f"the predictions have the column {name!r}, which comes with the rows too; leave it out"
                )
            columns[name] = _column(values)
        return pa.table(columns)

    def _predicted(self, rows: Rows, predict: Predict) -> dict[str, Any]:
        count = len(rows.numbers)
        predictions: dict[str, list[Any]] = {}
        for start in range(0, max(count, 1), self._batch_size):
            part = rows.chosen(slice(start, start + self._batch_size))
            for name, values in _named(predict(part.features)).items():
                if len(values) != len(part.numbers):
                    raise ShapeError(
                        f"the model gave predictions {name!r} of shape {values.shape} for a batch of "
                        f"{len(part.numbers)} rows; give one for each row"
                    )
                predictions.setdefault(name, []).append(values)
        return {name: np.concatenate(parts) for name, parts in predictions.items()}


def _parts(files: RowGroupSource, part_rows: int) -> Iterator[_PredictionPart]:
    """Row groups of one file that follow each other, until they have so many rows."""
    count, numbers, rows = 0, [], 0
    groups = list(files.groups)
    for number, group in enumerate(groups):
        numbers.append(number)
        rows += group.rows
        ends_file = number + 1 == len(groups) or groups[number + 1].file != group.file
        if rows >= part_rows or ends_file:
            yield _PredictionPart(f"part-{count:05}.parquet", tuple(numbers))
            count, numbers, rows = count + 1, [], 0


def _named(predictions: Any) -> dict[str, Any]:
    columns = predictions if isinstance(predictions, dict) else {"prediction": predictions}
    return {name: np.asarray(values) for name, values in columns.items()}


def _column(values: Any) -> Any:
    """A column of numbers [n] or [n, 1], or of lists of equally many [n, k]."""
    if values.ndim > 2 or values.ndim < 1:
        raise ShapeError(
            f"a prediction is of shape {values.shape}; it must be [n], [n, 1] or [n, k]"
        )
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    if values.ndim == 1 or values.shape[1] == 1:
        return flat
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
