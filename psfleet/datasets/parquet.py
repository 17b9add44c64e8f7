"""Samples in Parquet files, which fleet.dataset hands out to the workers.

files = ParquetFiles("clicks/", features, labels=["click"])
for batch in fleet.dataset(files, batch_size=1024, epochs=2, shuffle_seed=7):
    values = embed(batch.features)
    loss = loss_fn(values, batch.labels["click"])
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.datasets.parquet_rows import Rows, check_schema, opened, reason_of, rows_of
from psfleet.datasets.row_group_files import RowGroup, RowGroupFiles
from psfleet.datasets.sample_batch import SampleBatch
from psfleet.errors import UsageError
from psfleet.platform.arrow import pa, pq

__all__ = ["ParquetFiles", "RowGroup", "SampleBatch"]

_BUFFER = 1 << 16  # bytes that are read at once of a column


class ParquetFiles(RowGroupFiles):
    """The rows of Parquet files, as samples of a feature set: a source of `fleet.dataset`.

    Only the files' metadata is read when it is made. All workers must name the same files.

    Args:
        paths: A file, a folder (all of its `.parquet` files, by name) or several of them. An URL such as
            `s3://bucket/clicks/` is read through fsspec.
        features: The set; each feature has a column of its name, or of the name that it says. A cell is a
            value or a list of values; a null is a feature that is missing.
        labels: Columns of labels, numbers.
        bad_rows: Handling of a row with a value that cannot be used, such as a label that is null,
            and to row groups and files that cannot be read: "fail", or "skip" it, which is counted
            in `skipped` and reported on standard error.
        interleave: Row groups that are read in turn. In sync mode each worker decodes only its own if the
            number of workers divides it.
        time: A column of whole numbers or timestamps that says when each sample happened, for
            `SampleBatch.times` and `EventTimeSequence`. Unshuffled rows then come as they are in the files,
            one row group after the other; timestamps count microseconds.

    Attributes:
        skipped: Number of rows that this process has skipped.

    Raises:
        UsageError: A file cannot be read or lacks a column, or there is no row.
    """

    endings = (".parquet",)

    @override
    def names(self, group: RowGroup) -> Sequence[str]:
        column_names: list[str] = group.metadata.schema.to_arrow_schema().names
        return column_names

    def columns(self, number: int, names: Sequence[str], rows: NDArray[np.int64]) -> dict[str, Any]:
        """Columns of rows of a row group, as pyarrow has them, by name.

        Raises:
            UsageError: They cannot be read.
        """
        group = self._groups[number]
        if not names or not len(rows):
            schema = group.metadata.schema.to_arrow_schema()
            return {name: pa.array([], schema.field(name).type) for name in names}
        try:
            with opened(group.file) as file:
                source = pq.ParquetFile(file, metadata=group.metadata)
                table = source.read_row_group(group.number, columns=list(names))
        except (OSError, pa.ArrowException) as error:
            raise UsageError(
                f"{group.file} row group {group.number}: columns {', '.join(names)} cannot be read: "
                f"{reason_of(error)}"
            ) from None
        return {name: table.column(name).take(pa.array(rows)) for name in names}

    def _row_parts(self, group: RowGroup, rows: int) -> Iterator[Rows]:
        buffer = 0 if "://" in group.file else _BUFFER  # many small reads of an URL are slow
        first = 0
        with opened(group.file) as file:
            source = pq.ParquetFile(file, metadata=group.metadata, buffer_size=buffer)
            for batch in source.iter_batches(rows, [group.number], self._columns):
                table = pa.Table.from_batches([batch])
                yield rows_of(table, self.features, self.labels, first, self._time)
                first += batch.num_rows

    def _row_groups(self, file: str) -> Iterator[RowGroup]:
        try:
            with opened(file) as content:
                source = pq.ParquetFile(content)
                schema, metadata = source.schema_arrow, source.metadata
        except (OSError, pa.ArrowException) as error:
            what = f"{file} cannot be read as Parquet: {reason_of(error)}"
            if not self._skips:
                raise UsageError(what) from None
            self._say(f"{what}; it is skipped")
            return
        check_schema(schema, self.features, self.labels, file, self._time)
        for number in range(metadata.num_row_groups):
            yield RowGroup(file, number, metadata.row_group(number).num_rows, metadata)
