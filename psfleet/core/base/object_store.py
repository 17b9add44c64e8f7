"""Files in remote stores, named by URLs such as s3://bucket/model, through fsspec; and a job's own snapshots.

Without NumPy, for the launcher.
"""

import atexit
import json
import os
import posixpath
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from psfleet.core.base.errors import CheckpointError, ConfigError, not_installed
from psfleet.core.base.settings.kinds import local_path, shown_url, url_of

T = TypeVar("T")

_ATTEMPTS = 6
_PAUSE = 0.05  # seconds after the first failed attempt, twice as many after each further one
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
MARKS = ("manifest.json", "program.json", "export.json")
"""Files that make a folder whole, which are written last."""


_copies: list[Path] = []
_NAME = re.compile(r"snapshot-[0-9]{6}")


class ObjectStore:
    """The files of one folder of a store. What fails is tried again.

    Args:
        url: URL of the folder.

    Attributes:
        name: The URL without credentials, for messages.

    Raises:
        ConfigError: fsspec or what it needs for this scheme is missing, or the URL names no folder.
    """

    def __init__(self, url: str) -> None:
        self.name = shown_url(url)
        try:
            import fsspec
        except ModuleNotFoundError:
            raise not_installed(f"the URL {self.name!r} needs", "fsspec", "objects") from None
        try:
            self._system, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            # Nothing was requested yet, so that only the URL itself can bring credentials into the text.
            why = str(error).partition("\n")[0] if url == self.name else _why(error)
            raise ConfigError(
                f"{self.name!r} cannot be used: {why}; schemes are s3, gs, hdfs, file and others of fsspec"
            ) from None
        self._root = root.rstrip("/")
        if not self._root:
            raise ConfigError(f"{self.name!r} names no folder; add one")

    def put(self, file: Path, name: str) -> None:
        """Write a local file to the store, as `name`."""
        self._tried(f"write {name}", lambda: self._system.put_file(str(file), self._place(name)))

    def get(self, name: str, file: Path) -> None:
        """Read a file of the store into a local one."""
        self._tried(f"read {name}", lambda: self._system.get_file(self._place(name), str(file)))

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        content: bytes = self._tried(
            f"read {name}", lambda: self._system.cat_file(self._place(name))
        )
        return content

    def sizes(self) -> dict[str, int]:
        """Return the files of the folder, and their bytes; {}: it is not there."""
        return self._listed("file")

    def folders(self) -> list[str]:
        """Return the names of the folders in it, ascending."""
        return sorted(self._listed("directory"))

    def _listed(self, kind: str) -> dict[str, int]:
        def listed() -> dict[str, int]:
            self._system.invalidate_cache()
            try:
                entries = self._system.ls(self._root, detail=True)
            except FileNotFoundError:
                return {}
            matching = [entry for entry in entries if entry["type"] == kind]
            return {
                posixpath.basename(entry["name"].rstrip("/")): int(entry["size"] or 0)
                for entry in matching
            }

        return self._tried("list it", listed)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        try:
            self._tried(f"remove {name}", lambda: self._system.rm_file(self._place(name)))
        except CheckpointError:
            if name in self.sizes():
                raise

    def _place(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _tried(self, what: str, call: Callable[[], T]) -> T:
        for attempt in range(_ATTEMPTS):
            try:
                return call()
            except Exception as error:  # each store has errors of its own
                if isinstance(error, _FINAL) or attempt == _ATTEMPTS - 1:
                    raise CheckpointError(f"{self.name!r}: cannot {what}: {_why(error)}") from None
            time.sleep(_PAUSE * 2**attempt)
        raise AssertionError


def _why(error: Exception) -> str:
    """Return reason without what a store's library may have put into it of a request, such as its headers."""
    return getattr(error, "strerror", None) or type(error).__name__


def readable(path: str | os.PathLike[str]) -> Path:
    """Return the local folder of a path; of a URL a copy, which lasts as long as this process.

    A snapshot comes with those that it builds on.

    Raises:
        CheckpointError: The folder is not there, or cannot be read.
    """
    url = url_of(path)
    return local_path(path) if url is None else _copied(url)


def folders_in(place: str) -> list[str]:
    """Return the names of the folders in a folder or URL, ascending; []: it is not there."""
    if (url := url_of(place)) is not None:
        return ObjectStore(url).folders()
    folder = local_path(place)
    return (
        sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
    )


def is_whole(place: str) -> bool:
    """Return whether a folder or URL has what is written last of a snapshot, a model or an export."""
    if (url := url_of(place)) is not None:
        return not ObjectStore(url).sizes().keys().isdisjoint(MARKS)
    return any((local_path(place) / name).exists() for name in MARKS)


def _copied(url: str) -> Path:
    if not _copies:
        _copies.append(Path(tempfile.mkdtemp(prefix="psfleet-copies-")))
        atexit.register(shutil.rmtree, _copies[0], ignore_errors=True)
    store = ObjectStore(url)
    scheme, _, rest = url.partition("://")
    folder = _copies[0] / scheme / rest.strip("/")
    sizes = store.sizes()
    mark = next((name for name in MARKS if name in sizes), None)
    if mark is None:
        raise CheckpointError(
            f"{store.name!r} holds none of {', '.join(MARKS)}; it is no complete snapshot or model"
        )
    content = store.read(mark)
    if (folder / mark).exists() and (folder / mark).read_bytes() == content:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names, base = _named(content)
    for name in names or [name for name in sizes if name != mark]:
        store.get(name, folder / name)
    if base:
        _copied(_beside(url, base))
    (folder / mark).write_bytes(content)
    return folder


def base_of(place: str) -> str:
    """Return the folder or URL of the snapshot on which a snapshot builds; empty: on none.

    Raises:
        CheckpointError, OSError: It cannot be read.
    """
    if (url := url_of(place)) is not None:
        base = _named(ObjectStore(url).read(MARKS[0]))[1]
        return _beside(url, base) if base else ""
    folder = local_path(place)
    base = _named((folder / MARKS[0]).read_bytes())[1]
    return str((folder / base).resolve()) if base else ""


def _beside(url: str, base: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{posixpath.normpath(posixpath.join(rest, base))}"


def _named(content: bytes) -> tuple[list[str], str]:
    """Return the files that a manifest names, and what it builds on; who reads them checks them."""
    try:
        document = json.loads(content)
        names = [entry["file"] for entry in document.get("files", ())]
        base = (document.get("base") or {}).get("path", "")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return [], ""
    return [name for name in names if posixpath.basename(name) == name], base


def upload(folder: Path, url: str, names: Sequence[str] | None = None) -> list[str]:
    """Write the files of a local folder to a URL, what makes it whole last; returns their names.

    Raises:
        CheckpointError: One cannot be written.
    """
    store = ObjectStore(url)
    found = names or sorted(path.name for path in folder.iterdir() if path.is_file())
    ordered = sorted(found, key=lambda name: name in MARKS)
    for name in ordered:
        store.put(folder / name, name)
    return ordered


def own_name(number: int) -> str:
    """Return the folder of a snapshot among those that a job keeps."""
    return f"snapshot-{number:06d}"


def own_place(place: str, number: int) -> str:
    """Return where the snapshot of this number lies in the folder or at the URL of a job's."""
    return f"{place}/{own_name(number)}"


def own_snapshots(place: str) -> list[str]:
    """Return the folders or URLs of the snapshots in a place, by number, those that are not whole too."""
    names = filter(_NAME.fullmatch, folders_in(place))
    return [f"{place.rstrip('/')}/{name}" for name in names]


def latest_snapshot(place: str) -> str:
    """Return the last whole one; empty: there is none."""
    return next(filter(is_whole, reversed(own_snapshots(place))), "")


def remove_snapshot(place: str) -> None:
    """Remove a snapshot, from a store what makes it whole first."""
    if (url := url_of(place)) is None:
        shutil.rmtree(local_path(place), ignore_errors=True)
        return
    store = ObjectStore(url)
    for name in sorted(store.sizes(), key=lambda name: name not in MARKS):
        store.remove(name)
