"""Predictions for all rows of some files, written as Parquet files by any number of processes.

`psfleet predict` uses this module. The work is divided into parts, each of which covers some whole row
groups of one file. A process that writes part 3 locks `.part-00003.parquet.partial` and at the end renames
it to `part-00003.parquet`. So processes share the work without any communication, and a part is complete or
absent. A process that starts later writes the parts that are missing. `_predictions.json` in the folder
describes the model and the inputs, and a run with other settings is refused.
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
from psfleet.data.arrow_conversion import Rows, check_columns
from psfleet.data.row_groups import RowGroupSource

_FORMAT = Format("predictions")
_PLAN = "_predictions.json"  # readers of Parquet folders skip names that begin with "_"
_FORMER_PLAN = "predictions.json"  # name of the plan in folders of earlier versions
_LONGEST = 256 << 20  # maximum bytes of the plan
_SKIPPED = b"psfleet.skipped"
Predict = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class _PredictionPart:
    """File to write, and the numbers of the row groups whose rows it covers."""

    name: str
    groups: tuple[int, ...]


class ParquetPredictions:
    """Folder of predictions for all rows of some files.

    Args:
        files: Source of the rows. It needs no labels.
        target: Folder to write. It is created, or already has some parts of the same predictions.
        columns: Columns of the input files to copy beside the predictions.
        batch_size: Number of rows in a call of the model. A batch is always from one row group. So the
            batches, and the exact bits of the predictions, do not depend on the number of processes.
        part_rows: Minimum number of rows in a part. A part ends after the row group in which it reaches
            this number.
        model: Text that identifies the model. A later run with another text is refused.

    Raises:
        UsageError: The folder has other content, or an input file lacks a column.
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
        """Write the plan, which describes model and inputs, or check that the folder's plan is the same.

        Raises:
            UsageError: The folder has other predictions, or Parquet files without a plan.
        """
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
        """Write all parts that no other process writes. Returns when all parts are complete.

        Args:
            predict: Function from the features of a batch, as in `SampleBatch`, to predictions. It returns
                an array or tensor [n], [n, 1] or [n, k] for the column "prediction", or a mapping from
                columns to such arrays.

        Raises:
            UsageError: A row cannot be used and `bad_rows` of the source is "fail", or the predictions
                cannot be written.
        """
        # First write the parts that no process is writing. Then wait for the parts of other processes: if
        # such a process is killed, its lock becomes free, and this process writes the part.
        for waits in (False, True):
            for part in self._parts:
                self._take(part, predict, waits)

    def summary(self) -> tuple[int, int]:
        """Return the number of rows with predictions and the number of skipped rows, over all parts."""
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
            # Another process may have finished the part before this process got the lock. Then this process
            # has created a new `partial`.
            if where.exists():
                partial.unlink(missing_ok=True)
                return
            self._write(partial, part, predict)
            sync(partial)
            partial.replace(where)
            sync(self._target)

    def _write(self, partial: Path, part: _PredictionPart, predict: Predict) -> None:
        before = self._files.skipped
        whole = pa.concat_tables([self._table(number, predict) for number in part.groups])
        skipped = str(self._files.skipped - before)
        pq.write_table(whole.replace_schema_metadata({_SKIPPED: skipped}), str(partial))

    def _table(self, number: int, predict: Predict) -> Any:
        """Return the columns to copy from a row group, together with its predictions."""
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
    """Divide the row groups of each file into parts of at least `part_rows` rows. Only a file's last part
    may be smaller.
    """
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
    """Convert predictions to an Arrow column: [n] or [n, 1] to numbers, [n, k] to lists of k numbers."""
    if values.ndim > 2 or values.ndim < 1:
        raise ShapeError(
            f"a prediction is of shape {values.shape}; it must be [n], [n, 1] or [n, k]"
        )
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    if values.ndim == 1 or values.shape[1] == 1:
        return flat
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
