"""Training on Parquet files: ParquetFiles, a source of `fleet.dataset`.

    files = ParquetFiles("clicks/", features, labels=["click"])
    for batch in fleet.dataset(files, batch_size=1024, epochs=2, shuffle_seed=7):
        values = embed(batch.features)
        loss = loss_fn(values, batch.labels["click"])

This module reads one row group. `row_groups.py` has everything that is the same for all file formats.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from typing_extensions import override

from psfleet.core.base.arrow import pa, pq
from psfleet.data.arrow_conversion import check_schema, reason_of
from psfleet.data.data_files import files_of, opened
from psfleet.data.row_groups import Records, RowGroup, RowGroupSource
from psfleet.data.sample_batch import SampleBatch

__all__ = ["ParquetFiles", "RowGroup", "SampleBatch"]

_BUFFER = 1 << 16  # bytes of a column that are read at once


class ParquetFiles(RowGroupSource):
    """Rows of Parquet files as samples of a feature set: a source of `fleet.dataset`.

        ParquetFiles("s3://bucket/clicks/dt=2026-11-*", features, ["click"], bad_rows="skip")

    The constructor reads only the metadata of the files. All workers must pass the same files.

    Args:
        paths: A file, a folder, a pattern such as `clicks/*.parquet`, or a list of these. A folder means
            the `.parquet` files in it and in its partitions, which are folders such as `dt=2026-11-01`. A
            URL such as `s3://bucket/clicks/` is read through fsspec.
        features: Features of a sample. Each is read from the column that it names, by default the column of
            its own name. A cell is a value or a list of values. Null is a missing feature.
        labels: Columns with the labels, which must be numbers.
        bad_rows: Treatment of rows that have an unusable value, such as a null label, and of row
            groups and files that cannot be read. "fail" raises UsageError. "skip" leaves them out, counts
            their rows in `skipped` and logs the first few. To find all bad rows, "skip" also tries the
            features' transforms on each row.
        interleave: Number of row groups that are read in turn. In sync mode, if this is a multiple of the
            number of workers, no two workers decode the same row group.

    Attributes:
        skipped: Number of rows that this process has left out.

    Raises:
        UsageError: A file cannot be read or lacks a column, or the files have no row.
    """

    @override
    def _row_groups(self, paths: Any) -> Iterator[RowGroup]:
        for file in files_of(paths, [".parquet"]):
            try:
                with opened(file) as content:
                    source = pq.ParquetFile(content)
                    schema, metadata = source.schema_arrow, source.metadata
            except (OSError, pa.ArrowException) as error:
                self._skip_unreadable(
                    f"{file} cannot be read as Parquet: {reason_of(error)}", "it is skipped"
                )
                continue
            check_schema(schema, self.features, self.labels, file)
            for number in range(metadata.num_row_groups):
                yield RowGroup(file, number, metadata.row_group(number).num_rows, schema, metadata)

    @override
    def _records(
        self, group: RowGroup, names: Sequence[str], rows: int, is_raw: bool = False
    ) -> Iterator[Records]:
        buffer = 0 if "://" in group.file else _BUFFER  # many small reads of an URL are slow
        file_columns = [name for name in names if name in group.schema.names]
        with opened(group.file) as file:
            source = pq.ParquetFile(file, metadata=group.content, buffer_size=buffer)
            for batch in source.iter_batches(rows, [group.number], file_columns):
                yield Records(pa.Table.from_batches([batch]))
