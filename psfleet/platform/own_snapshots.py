"""The snapshots that a job keeps by number, in a folder or at a URL; without NumPy, for the launcher."""

import re
import shutil

from psfleet.platform.object_store import MARKS, ObjectStore, folders_in, is_whole
from psfleet.settings.kinds import local_path, url_of

_NAME = re.compile(r"snapshot-[0-9]{6}")


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
