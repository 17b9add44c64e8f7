"""Training on Arrow data of other libraries, such as Polars, Hugging Face or Ray: RecordBatches.

    rows = RecordBatches(datasets.load_dataset("csv", data_files="clicks.csv")["train"], features, ["click"])
    for batch in fleet.dataset(rows, batch_size=1024, epochs=2, shuffle_seed=7):
        loss = loss_fn(embed(batch.features), batch.labels["click"])

The data is divided into row groups, which are read as a whole. These have 65,536 rows, or are the data's
own fragments or blocks. Data that can only be iterated over is a single row group. `row_groups.py` does
everything after that.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from typing_extensions import override

from psfleet.core.base.arrow import pa
from psfleet.core.base.errors import UsageError
from psfleet.core.base.validation.annotations import PositiveInt, checked
from psfleet.core.engine.round_plan import Range
from psfleet.data.arrow_conversion import check_schema
from psfleet.data.feature_sets.feature_set import FeatureSet
from psfleet.data.row_groups import Records, RowGroup, RowGroupSource
from psfleet.data.sample_batch import SampleBatch

_GROUP = 65_536  # rows of a row group, for data that can be sliced


class RecordBatches(RowGroupSource):
    """Rows of Arrow data as samples of a feature set: a source of `fleet.dataset`.

        RecordBatches(polars_frame, features, ["click"])
        RecordBatches(lambda: read_batches("clicks"), features, ["click"], rows=1_000_000)

    All workers, and a job that resumes, must pass data with the same rows in the same order. The arguments
    that are not listed here, and the errors, are those of `psfleet.data.parquet.ParquetFiles`.

    Args:
        data: Rows in one of these forms.

            - A `pyarrow.Table`, a list of `pyarrow.RecordBatch`, or any object with `__arrow_c_stream__`,
              such as a data frame of Polars.
            - A `pyarrow.dataset.Dataset`.
            - A Dataset of Hugging Face, or of Ray. Ray then computes the blocks in their order.
            - An iterable of RecordBatches or Tables, or a function that returns one. It must give the same
              batches each time. Every worker reads all batches, in order, and they cannot be shuffled.
        rows: Number of rows to use, if `data` is an iterable. None reads the iterable once to count its rows.
    """

    @checked
    def __init__(
        self,
        data: Any,
        features: FeatureSet,
        labels: Sequence[str] = (),
        bad_rows: Literal["fail", "skip"] = "fail",
        interleave: PositiveInt = 4,
        rows: PositiveInt | None = None,
    ) -> None:
        self._rows = rows
        self._is_iterated = False
        super().__init__(data, features, labels, bad_rows, interleave)

    @override
    def prepare(
        self, ranges: Sequence[Range], batch_size: int, seed: int | None
    ) -> Callable[[], SampleBatch]:
        if self._is_iterated and seed is not None:
            raise UsageError(
                f"shuffle_seed is {seed}; the RecordBatches of an iterable come in their order, leave it out"
            )
        return super().prepare(ranges, batch_size, seed)

    @override
    def _records(
        self, group: RowGroup, names: Sequence[str], rows: int, is_raw: bool = False
    ) -> Iterator[Records]:
        count, schema = 0, None
        for batch in group.content():
            table = _table(batch)
            if table.schema != schema:
                schema = table.schema
                check_schema(schema, self.features, self.labels, group.file)
            table = table.slice(0, group.rows - count)
            for low in range(0, table.num_rows, rows):
                yield Records(table.slice(low, rows))
            count += table.num_rows
            if count == group.rows:
                return
        raise OSError(f"it has {count} rows, not {group.rows}")

    @override
    def _row_groups(self, paths: Any) -> Iterator[RowGroup]:
        if isinstance(paths, list | tuple):
            paths = pa.concat_tables(map(_table, paths)) if paths else ()
        if hasattr(paths, "__arrow_c_stream__"):
            table = pa.table(paths)
            yield from self._divided("the table", table.num_rows, table.slice)
        elif hasattr(paths, "get_fragments"):
            yield from self._fragments(paths)
        elif hasattr(paths, "to_arrow_refs"):
            yield from _ray_blocks(paths)
        elif hasattr(paths, "with_format") and hasattr(paths, "__len__"):
            view = paths.with_format("arrow").select_columns(self._columns)
            name = f"the Dataset of {len(paths)} rows"
            yield from self._divided(name, len(paths), lambda low, n: view[low : low + n])
        else:
            yield self._iterated(paths)

    def _divided(self, name: str, rows: int, read: Callable[[int, int], Any]) -> Iterator[RowGroup]:
        """Divide data that can be sliced into row groups.

        Args:
            name: Name of the data, for error messages.
            read: Function from the number of a first row and a number of rows to these rows.
        """

        def part(low: int, count: int) -> list[Any]:
            return [read(low, count)]

        if rows:
            check_schema(read(0, 1).schema, self.features, self.labels, name)
        for number, low in enumerate(range(0, rows, _GROUP)):
            count = min(_GROUP, rows - low)
            yield RowGroup(name, number, count, None, functools.partial(part, low, count))

    def _fragments(self, dataset: Any) -> Iterator[RowGroup]:
        check_schema(dataset.schema, self.features, self.labels, "the dataset")
        try:
            fragments = list(dataset.get_fragments())
        except ValueError as error:  # a filtered dataset gives no fragments
            raise UsageError(f"{error}; or pass its to_batches, an iterable") from None
        options = {"schema": dataset.schema, "columns": self._columns}
        for fragment in fragments:
            split = getattr(fragment, "split_by_row_group", lambda fragment=fragment: [fragment])
            for number, part in enumerate(split()):
                read = functools.partial(part.to_batches, **options)
                name = getattr(part, "path", "the dataset")
                yield RowGroup(name, number, _rows(part), None, read)

    def _iterated(self, data: Any) -> RowGroup:
        """Return an iterable as one row group, because it can only be read from its start."""
        begin = data if callable(data) else data.__iter__ if isinstance(data, Iterable) else None
        if begin is None or isinstance(data, Iterator):
            again = "that is read once only" if begin else "that is no Arrow data"
            raise UsageError(
                f"RecordBatches got {data!r:.80}, {again}; pass a table, or a function that returns an "
                "iterator of pyarrow.RecordBatch each time"
            )
        self._is_iterated = True
        rows = self._rows or sum(_table(batch).num_rows for batch in begin())
        return RowGroup("the iterable", 0, rows, None, begin)


def _rows(fragment: Any) -> int:
    """Return the number of rows in a fragment.

    For a fragment that is one Parquet row group, `count_rows` would count the whole file, so its metadata
    is used.
    """
    groups = getattr(fragment, "row_groups", None)
    if groups is None:
        return int(fragment.count_rows())
    return sum(int(group.num_rows) for group in groups)


def _table(data: Any) -> Any:
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if not isinstance(data, pa.Table):
        raise UsageError(
            f"RecordBatches got {data!r:.80} among its batches; it must be a pyarrow.RecordBatch or Table"
        )
    return data


def _ray_blocks(dataset: Any) -> Iterator[RowGroup]:
    """Yield the blocks of a Ray dataset as row groups. Ray's object store holds a block until it is read."""
    import ray

    dataset.context.execution_options.preserve_order = True
    references = dataset.to_arrow_refs()
    count: Any = ray.remote(num_cpus=0)(lambda block: block.num_rows)
    for number, rows in enumerate(ray.get([count.remote(reference) for reference in references])):
        read = functools.partial(_block, references[number])
        yield RowGroup("the Ray dataset", number, rows, None, read)


def _block(reference: Any) -> list[Any]:
    import ray

    return [ray.get(reference)]
