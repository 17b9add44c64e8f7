"""Folders in object stores, named by URLs such as s3://bucket/model, and a job's snapshots in them.

All access goes through fsspec. Every operation is tried up to six times. A store has no atomic rename.
Therefore a snapshot or model is complete only if its manifest (one of MARKS) exists. The manifest is
uploaded last, removed first, and copied last.

This module does not import NumPy, because the launcher uses it too.
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

from psfleet.core.base.errors import CheckpointError, ConfigError, optional_module
from psfleet.core.base.settings.kinds import local_path, shown_url, url_of

T = TypeVar("T")

_ATTEMPTS = 6
_PAUSE = 0.05  # seconds before the second attempt; doubled before each further one
# Errors that trying again would not change.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
MARKS = ("manifest.json", "program.json", "export.json")
"""Names of manifests. A folder is complete if it has one of them."""


# Folder for the copies of remote folders that this process has downloaded, or empty if there are none.
_copies: list[Path] = []
_NAME = re.compile(r"snapshot-[0-9]{6}")


class ObjectStore:
    """Files of one folder in an object store. Failed operations are tried again.

    Attributes:
        name: URL without credentials, for messages.

    Raises:
        ConfigError: fsspec, or its package for this scheme, is missing, or the URL names no folder.
    """

    def __init__(self, url: str) -> None:
        self.name = shown_url(url)
        fsspec = optional_module("fsspec", f"the URL {self.name!r} needs", "fsspec", "objects")
        try:
            self._system, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            # No request was made yet, so the text can contain credentials only if the URL has some.
            why = str(error).partition("\n")[0] if url == self.name else _why(error)
            raise ConfigError(
                f"{self.name!r} cannot be used: {why}; schemes are s3, gs, hdfs, file and others of fsspec"
            ) from None
        self._root = root.rstrip("/")
        if not self._root:
            raise ConfigError(f"{self.name!r} names no folder; add one")

    def put(self, file: Path, name: str) -> None:
        """Write a local file to the store under this name."""
        self._tried(f"write {name}", lambda: self._system.put_file(str(file), self._place(name)))

    def get(self, name: str, file: Path) -> None:
        """Copy a file of the store to a local path."""
        self._tried(f"read {name}", lambda: self._system.get_file(self._place(name), str(file)))

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        content: bytes = self._tried(
            f"read {name}", lambda: self._system.cat_file(self._place(name))
        )
        return content

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes, by name. Empty if the folder does not exist."""
        return self._listed("file")

    def folders(self) -> list[str]:
        """Return the names of the subfolders, sorted."""
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
        """Remove a file. Does nothing if the file does not exist."""
        try:
            self._tried(f"remove {name}", lambda: self._system.rm_file(self._place(name)))
        except CheckpointError:
            # An attempt may have removed the file although its reply was lost. The next attempt then finds
            # no file.
            if name in self.sizes():
                raise

    def _place(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _tried(self, action: str, call: Callable[[], T]) -> T:
        for attempt in range(_ATTEMPTS):
            try:
                return call()
            except Exception as error:  # each store's library has its own classes of errors
                if isinstance(error, _FINAL) or attempt == _ATTEMPTS - 1:
                    raise CheckpointError(
                        f"{self.name!r}: cannot {action}: {_why(error)}"
                    ) from None
            time.sleep(_PAUSE * 2**attempt)
        raise AssertionError


def _why(error: Exception) -> str:
    """Return a short reason. The error's text is left out, because a library may quote credentials in it."""
    return getattr(error, "strerror", None) or type(error).__name__


def readable(path: str | os.PathLike[str]) -> Path:
    """Return a local folder with the content of a path or URL.

    A URL is downloaded, together with the snapshots that it is based on. The copies are kept until this
    process ends.

    Raises:
        CheckpointError: The folder does not exist, or cannot be read.
    """
    url = url_of(path)
    return local_path(path) if url is None else _copied(url)


def folders_in(place: str) -> list[str]:
    """Return the sorted names of the subfolders of a folder or URL. Empty if it does not exist."""
    if (url := url_of(place)) is not None:
        return ObjectStore(url).folders()
    folder = local_path(place)
    return (
        sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    )


def is_whole(place: str) -> bool:
    """Return whether a folder or URL holds a complete snapshot, model or export."""
    if (url := url_of(place)) is not None:
        return not ObjectStore(url).sizes().keys().isdisjoint(MARKS)
    return any((local_path(place) / name).exists() for name in MARKS)


def _copied(url: str) -> Path:
    if not _copies:
        _copies.append(Path(tempfile.mkdtemp(prefix="psfleet-copies-")))
        atexit.register(shutil.rmtree, _copies[0], ignore_errors=True)
    store = ObjectStore(url)
    scheme, _, location = url.partition("://")
    folder = _copies[0] / scheme / location.strip("/")
    sizes = store.sizes()
    mark = next((name for name in MARKS if name in sizes), None)
    if mark is None:
        raise CheckpointError(
            f"{store.name!r} holds none of {', '.join(MARKS)}; it is no complete snapshot or model"
        )
    # An equal manifest means an equal snapshot, because it contains the checksums of all files.
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
    """Return the base of a delta snapshot: the folder or URL of the snapshot whose changes it holds.

    Returns "" for a full snapshot.

    Raises:
        CheckpointError, OSError: The manifest cannot be read.
    """
    if (url := url_of(place)) is not None:
        base = _named(ObjectStore(url).read(MARKS[0]))[1]
        return _beside(url, base) if base else ""
    folder = local_path(place)
    base = _named((folder / MARKS[0]).read_bytes())[1]
    return str((folder / base).resolve()) if base else ""


def _beside(url: str, base: str) -> str:
    scheme, _, location = url.partition("://")
    return f"{scheme}://{posixpath.normpath(posixpath.join(location, base))}"


def _named(content: bytes) -> tuple[list[str], str]:
    """Return the file names that a manifest lists, and the path of its base, without further checks."""
    try:
        document = json.loads(content)
        names = [entry["file"] for entry in document.get("files", ())]
        base = (document.get("base") or {}).get("path", "")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return [], ""
    # Ignore names with a path, which could lead out of the folder.
    return [name for name in names if posixpath.basename(name) == name], base


def upload(folder: Path, url: str, names: Sequence[str] | None = None) -> list[str]:
    """Copy files of a local folder to a URL, the manifest last. Returns the names of the files.

    Args:
        names: Files to copy, or None for all files of the folder.

    Raises:
        CheckpointError: A file cannot be written.
    """
    store = ObjectStore(url)
    file_names = names or sorted(path.name for path in folder.iterdir() if path.is_file())
    ordered = sorted(file_names, key=lambda name: name in MARKS)
    for name in ordered:
        store.put(folder / name, name)
    return ordered


def own_name(number: int) -> str:
    """Return the folder name of the snapshot with this number."""
    return f"snapshot-{number:06d}"


def own_place(place: str, number: int) -> str:
    """Return the folder or URL of a snapshot. `place` is the folder or URL of all the job's snapshots."""
    return f"{place}/{own_name(number)}"


def own_snapshots(place: str) -> list[str]:
    """Return the folders or URLs of a job's snapshots, sorted by number. Includes incomplete snapshots."""
    names = filter(_NAME.fullmatch, folders_in(place))
    return [f"{place.rstrip('/')}/{name}" for name in names]


def latest_snapshot(place: str) -> str:
    """Return the folder or URL of a job's last complete snapshot, or "" if there is none."""
    return next(filter(is_whole, reversed(own_snapshots(place))), "")


def remove_snapshot(place: str) -> None:
    """Remove a snapshot.

    In a store its manifest is removed first, so that an interrupted removal leaves no snapshot that looks
    complete.
    """
    if (url := url_of(place)) is None:
        shutil.rmtree(local_path(place), ignore_errors=True)
        return
    store = ObjectStore(url)
    for name in sorted(store.sizes(), key=lambda name: name not in MARKS):
        store.remove(name)
