"""Samples in Parquet files.

files = ParquetFiles("clicks/", features, labels=["click"])
for batch in fleet.dataset(files, batch_size=1024, epochs=2, shuffle_seed=7):
    values = embed(batch.features)
    loss = loss_fn(values, batch.labels["click"])
"""

from collections.abc import Iterator, Sequence
from typing import Any

from typing_extensions import override

from psfleet.core.base.arrow import pa, pq
from psfleet.data.arrow_rows import check_schema, reason_of
from psfleet.data.data_files import files_of, opened
from psfleet.data.row_groups import Records, RowGroup, RowGroupSource
from psfleet.data.sample_batch import SampleBatch

__all__ = ["ParquetFiles", "RowGroup", "SampleBatch"]

_BUFFER = 1 << 16  # bytes that are read at once of a column


class ParquetFiles(RowGroupSource):
    """The rows of Parquet files, as samples of a feature set: a source of `fleet.dataset`.

    Only the files' metadata is read when it is made. All workers must name the same files.

    Args:
        paths: A file, a folder (its `.parquet` files, and those of folders in it such as `dt=2026-11-01`), a
            pattern such as `clicks/*.parquet`, or several of them. An URL such as `s3://bucket/clicks/` is
            read through fsspec.
        features: The set; each feature has a column of its name, or of the name that it says. A cell is a
            value or a list of values; a null is a feature that is missing.
        labels: Columns of labels, numbers.
        bad_rows: Handling of a row with a value that cannot be used, such as a label that is null, and of
            row groups and files that cannot be read: "fail", or "skip" it, which is counted in `skipped` and
            reported on standard error. Only with "skip" the transforms of the set are tried too.
        interleave: Row groups that are read in turn. In sync mode each worker decodes only its own if the
            number of workers divides it.

    Attributes:
        skipped: Number of rows that this process has skipped.

    Raises:
        UsageError: A file cannot be read or lacks a column, or there is no row.
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
        own = [name for name in names if name in group.schema.names]
        with opened(group.file) as file:
            source = pq.ParquetFile(file, metadata=group.content, buffer_size=buffer)
            for batch in source.iter_batches(rows, [group.number], own):
                yield Records(pa.Table.from_batches([batch]))
