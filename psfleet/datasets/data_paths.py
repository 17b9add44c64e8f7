"""Files and URLs of data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from psfleet.errors import ConfigError, UsageError
from psfleet.platform.arrow import pa

__all__ = ["check_columns", "files_of", "opened", "reason_of"]


def files_of(paths: Any, endings: Sequence[str]) -> list[str]:
    """The files that paths and URLs name."""
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    found = [file for path in given for file in _inside(str(path), tuple(endings))]
    if not found:
        raise UsageError(f"{paths!r} names no {' or '.join(endings)} file")
    return found


def _inside(path: str, endings: tuple[str, ...]) -> list[str]:
    if "://" in path:
        system, place = _fsspec().core.url_to_fs(path)
        if not system.isdir(place):
            return [path]
        inside = sorted(name for name in system.ls(place, detail=False) if name.endswith(endings))
        return [system.unstrip_protocol(name) for name in inside]
    if Path(path).is_dir():
        return sorted(str(file) for file in Path(path).iterdir() if file.name.endswith(endings))
    return [path]


def opened(file: str) -> Any:
    """A file or URL to read bytes from, which may be sought in. The caller closes it."""
    return _fsspec().open(file).open() if "://" in file else pa.OSFile(file)


def _fsspec() -> Any:
    try:
        import fsspec
    except ModuleNotFoundError:
        raise ConfigError(
            "files at an URL need fsspec, which is not installed; run: pip install psfleet[parquet]"
        ) from None
    return fsspec


def check_columns(wanted: Sequence[str], columns: Sequence[str], where: str) -> None:
    """Refuse a file that lacks a column.

    Raises:
        UsageError: Names the file and the columns that it has.
    """
    for column in wanted:
        if column not in columns:
            raise UsageError(
                f"{where} has no column {column!r}; it has {', '.join(columns) or 'none'}"
            )


def reason_of(error: Exception) -> str:
    """What an error of reading says, in one short line."""
    return " ".join(str(error).split())[:200]
