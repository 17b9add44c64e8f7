"""Reading Parquet files in the shape of DLRM-DCNv2: 13 numbers and 26 multi-hot features, 214 ids a sample.

Makes the files in a folder if it is empty. "pyarrow": read_row_group of all columns, one after the other.
"batches": ParquetFiles through fleet.dataset, in order; "shuffled": with a seed. CPU is that of all
threads of this process.
"""

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from reporting import Report, arguments, finish

# Ids a sample of each feature, as the MLPerf benchmark of DLRM-DCNv2 makes them (mlcommons/training).
HOT = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
NUMBERS, GROUP = 13, 65_536


def make(folder: Path, rows: int, per_file: int = 4 * GROUP) -> None:
    """Files of `rows` samples in all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    dice = np.random.default_rng(0)
    for number, first in enumerate(range(0, rows, per_file)):
        count = min(per_file, rows - first)
        columns: dict[str, Any] = {"label": dice.integers(0, 2, count).astype(np.int8)}
        for i in range(NUMBERS):
            columns[f"number{i}"] = dice.standard_normal(count, np.float32)
        for i, hot in enumerate(HOT):
            ids = (dice.zipf(1.3, count * hot) * 2_654_435_761 + i) % 40_000_000
            offsets = np.arange(0, count * hot + 1, hot, dtype=np.int32)
            columns[f"ids{i}"] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
        pq.write_table(pa.table(columns), folder / f"{number:05}.parquet", row_group_size=GROUP)


def by_pyarrow(folder: Path) -> int:
    """Every row group as a table of Arrow."""
    import pyarrow.parquet as pq

    rows = 0
    for path in sorted(folder.glob("*.parquet")):
        with pq.ParquetFile(path) as file:
            rows += sum(file.read_row_group(i).num_rows for i in range(file.num_row_groups))
    return rows


def by_batches(folder: Path, batch_size: int, seed: int | None) -> int:
    """Every row in a batch of a feature set."""
    from psfleet import fleet
    from psfleet.datasets.parquet import ParquetFiles
    from psfleet.features import Feature, FeatureSet, Number, Table

    table = Table("ids", 16)
    features = FeatureSet(
        [
            *(Number(f"number{i}") for i in range(NUMBERS)),
            *(Feature(f"ids{i}", table) for i in range(len(HOT))),
        ]
    )
    files = ParquetFiles(folder, features, ["label"])
    return sum(len(batch) for batch in fleet.dataset(files, batch_size, shuffle_seed=seed))


def measured(name: str, read: Callable[[], int], size: int) -> dict[str, Any]:
    """A line of the report."""
    wall, cpu = time.perf_counter(), time.process_time()
    rows = read()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "reader": name,
        "rows": rows,
        "MB / s": size / wall / 1e6,
        "MB / CPU s": size / cpu / 1e6,
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--folder", help="where the files are, or are made; default: a temporary one"
    )
    parser.add_argument("--rows", type=int, default=2 * 4 * GROUP, help="12 million take 5 GB")
    parser.add_argument("--batch", type=int, default=8192)
    options = parser.parse_args()
    report = Report("parquet", f"Parquet in the shape of DLRM-DCNv2, batches of {options.batch}")
    with TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        if not any(folder.glob("*.parquet")):
            make(folder, options.rows)
        size = sum(path.stat().st_size for path in folder.glob("*.parquet"))
        readers: dict[str, Callable[[], int]] = {
            "pyarrow": lambda: by_pyarrow(folder),
            "batches": lambda: by_batches(folder, options.batch, None),
            "shuffled": lambda: by_batches(folder, options.batch, 1),
        }
        for _ in range(options.runs):
            report.rows += [measured(name, read, size) for name, read in readers.items()]
    finish(report, options.json)


if __name__ == "__main__":
    main()
