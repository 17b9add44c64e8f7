"""Finding and opening of data files by path, pattern or URL, and columns in folder names (`dt=2026-11-01/`).

All readers of files use this module. So a folder, a pattern such as `clicks/*.parquet` and a URL such as
`s3://bucket/clicks/` mean the same for each file format. URLs are read through fsspec.
"""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from psfleet.core.base.arrow import pa
from psfleet.core.base.errors import UsageError, optional_module


def files_of(paths: Any, endings: Sequence[str]) -> list[str]:
    """Return all files that are given by paths, patterns such as `clicks/*.parquet`, or URLs.

    Args:
        paths: A path, pattern or URL, or several.
        endings: Endings of the file names to take from a folder, in upper or lower case. () takes all
            files. Hidden and temporary files in a folder, with names that begin with `.` or `_`, are never
            taken.

    Raises:
        UsageError: There is no such file.
    """
    names = [paths] if isinstance(paths, str | Path) else list(paths)
    files = [file for path in names for file in _matching(str(path), tuple(endings))]
    if not files:
        raise UsageError(f"{paths!r} names no {' or '.join(endings)} file")
    return files


def _matching(path: str, endings: tuple[str, ...]) -> list[str]:
    """Return the files that one path, pattern or URL gives, sorted by name."""
    system, location = _fsspec().core.url_to_fs(path) if "://" in path else (None, path)
    exists, is_folder = (system.exists, system.isdir) if system else (os.path.exists, os.path.isdir)
    if is_folder(location):
        files = list(_inside(system, location, endings))
    elif (magic := re.search(r"[*[]" if system else r"[*?[]", location)) and not exists(location):
        files, base = [], len(location[: magic.start()].rpartition("/")[0])
        for name in system.glob(location) if system else glob.glob(location, recursive=True):
            if any(map(_is_hidden, name[base:].split("/"))):
                continue
            files += _inside(system, name, endings) if is_folder(name) else [name]
    else:
        return [path]
    return sorted({system.unstrip_protocol(name) for name in files} if system else set(files))


def _inside(system: Any, folder: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Yield the data files in a folder and in its partitions, which are folders such as `dt=2026-11-01`."""
    if system:
        entries = [(e["name"], e["type"] == "directory") for e in system.ls(folder, detail=True)]
    else:
        entries = [(str(entry), entry.is_dir()) for entry in Path(folder).iterdir()]
    for name, is_folder in entries:
        last = Path(name).name
        if _is_hidden(name) or name.strip("/") == folder.strip("/"):
            continue
        if is_folder and "=" in last:
            yield from _inside(system, name, endings)
        elif not is_folder and (not endings or last.lower().endswith(endings)):
            yield name


def _is_hidden(name: str) -> bool:
    return Path(name).name.startswith((".", "_"))


def opened(file: str) -> Any:
    """Open a file or URL for reading bytes. The returned file has `seek`, and the caller closes it."""
    return _fsspec().open(file).open() if "://" in file else pa.OSFile(file)


def _fsspec() -> Any:
    return optional_module("fsspec", "files at a URL need", "fsspec", "parquet")


def partition_of(file: str) -> dict[str, str | None]:
    """Return the columns in the folder names of a path: {"dt": "2026"} for `dt=2026/0.parquet`."""
    pairs = (part.split("=", 1) for part in file.split("/")[:-1] if "=" in part)
    return {
        name: None if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value)
        for name, value in pairs
    }


def with_partition(table: Any, file: str, columns: Sequence[str]) -> Any:
    """Add columns from the folder names of a path, such as `dt=2026-11-01`, to the file's table, as texts.

    If the table has a column of the same name, that column is kept.

    Args:
        table: Content of the file, as a pyarrow.Table.
        columns: Requested columns. Only these are added.
    """
    for name, value in partition_of(file).items():
        if name in columns and name not in table.column_names:
            texts = pa.repeat(pa.scalar(value, pa.string()), table.num_rows)
            table = table.append_column(name, texts)
    return table
