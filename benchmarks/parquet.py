"""Reading Parquet files in the shape of DLRM-DCNv2: 13 numbers and 26 multi-hot features, 214 ids per sample.

The files are written to a folder if it is empty. "pyarrow": read_row_group of all columns, one after the
other. "batches": ParquetFiles through fleet.dataset, in order. "shuffled": with a seed. "prefetched": in
order, two batches ahead in a thread. CPU is that of all threads of this process. "of pyarrow" compares MB per
CPU second with pyarrow's in the same round.
"""

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from reporting import Report, arguments, finish

# Number of rows of each feature's table, and of ids per sample, in the MLPerf benchmark of DLRM-DCNv2
# (mlcommons/training, recommendation_v2).
SIZES = [
    *(
        40_000_000,
        39_060,
        17_295,
        7_424,
        20_265,
        3,
        7_122,
        1_543,
        63,
        40_000_000,
        3_067_956,
        405_282,
        10,
    ),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
]
HOT = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
NUMBERS, GROUP = 13, 65_536


def make(folder: Path, rows: int, per_file: int = 4 * GROUP) -> None:
    """Write files with `rows` samples in all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    dice = np.random.default_rng(0)
    for number, first in enumerate(range(0, rows, per_file)):
        count = min(per_file, rows - first)
        columns: dict[str, Any] = {"label": dice.integers(0, 2, count).astype(np.int8)}
        for i in range(NUMBERS):
            columns[f"number{i}"] = dice.standard_normal(count, np.float32)
        for i, (size, hot) in enumerate(zip(SIZES, HOT, strict=True)):
            ids = (dice.zipf(1.3, count * hot) * 2_654_435_761 + i) % size
            offsets = np.arange(0, count * hot + 1, hot, dtype=np.int32)
            columns[f"ids{i}"] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
        pq.write_table(pa.table(columns), folder / f"{number:05}.parquet", row_group_size=GROUP)


def by_pyarrow(folder: Path) -> int:
    """Read every row group as a table of Arrow. Returns the number of rows."""
    import pyarrow.parquet as pq

    rows = 0
    for path in sorted(folder.glob("*.parquet")):
        with pq.ParquetFile(path) as file:
            rows += sum(file.read_row_group(i).num_rows for i in range(file.num_row_groups))
    return rows


def by_batches(folder: Path, batch_size: int, seed: int | None = None, prefetch: int = 0) -> int:
    """Read every row in batches of a feature set. Returns the number of rows."""
    from psfleet import fleet
    from psfleet.data.parquet import ParquetFiles
    from psfleet.features import Feature, FeatureSet, Number, Table

    table = Table("ids", 16)
    features = FeatureSet(
        [
            *(Number(f"number{i}") for i in range(NUMBERS)),
            *(Feature(f"ids{i}", table) for i in range(len(HOT))),
        ]
    )
    files = ParquetFiles(folder, features, ["label"])
    batches = fleet.dataset(files, batch_size, shuffle_seed=seed, prefetch=prefetch)
    return sum(map(len, batches))


def measured(name: str, read: Callable[[], int], size: int) -> dict[str, Any]:
    """Return a line of the report."""
    wall, cpu = time.perf_counter(), time.process_time()
    rows = read()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "reader": name,
        "rows": rows,
        "MB / s": size / wall / 1e6,
        "MB / CPU s": size / cpu / 1e6,
    }


def turn(readers: dict[str, Callable[[], int]], size: int) -> list[dict[str, Any]]:
    """Measure each reader once, compared with pyarrow."""
    rows: list[dict[str, Any]] = []
    for name, read in readers.items():
        row = measured(name, read, size)
        first = rows[0] if rows else row
        rows.append({**row, "of pyarrow": row["MB / CPU s"] / first["MB / CPU s"]})
        print(*(f"{key} {value}" for key, value in rows[-1].items()), sep=", ", flush=True)
    return rows


def warm_up(batch_size: int) -> None:
    """Do the work that a process needs once: import modules and load kernels."""
    with TemporaryDirectory() as folder:
        make(Path(folder), 2 * GROUP)
        by_pyarrow(Path(folder))
        by_batches(Path(folder), batch_size, seed=1)


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
            "batches": lambda: by_batches(folder, options.batch),
            "shuffled": lambda: by_batches(folder, options.batch, seed=1),
            "prefetched": lambda: by_batches(folder, options.batch, prefetch=2),
        }
        warm_up(options.batch)
        for _ in range(options.runs):
            report.rows += turn(readers, size)
    finish(report, options.json)


if __name__ == "__main__":
    main()
