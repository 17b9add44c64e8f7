"""Chains that are broken in every way there is: each bit, each length, each file for another one.

PSFLEET_TORTURE tries all bits and all lengths; otherwise it is one bit of every third byte, and each 24th
length.
"""

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from psfleet.checkpoint import MANIFEST
from psfleet.core.base.errors import LogError, PsfleetError
from tests.fuzz.chains import TIP, ChainedLog, a_log, loaded, reseal_snapshots, some_snapshots
from tests.fuzz.files import of_folder

pytestmark = pytest.mark.long

ALL = bool(os.environ.get("PSFLEET_TORTURE"))


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, if there is such a place."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as place:
        yield Path(place)


def is_refused(snapshot: Path) -> bool:
    """Whether it cannot be loaded; nothing has changed then, and a sentence says why."""
    try:
        loaded(snapshot)
    except PsfleetError as error:
        return is_sentence(error)
    return False


def is_sentence(error: PsfleetError) -> bool:
    """Whether a person is told in one line."""
    return str(error) != "" and "\n" not in str(error)


def damaged(whole: bytes) -> Iterator[bytes]:
    """With one bit changed, or cut short."""
    for bit in range(0, 8 * len(whole), 1 if ALL else 25):
        at = bit // 8
        yield whole[:at] + bytes((whole[at] ^ 1 << bit % 8,)) + whole[at + 1 :]
    for length in range(0, len(whole), 1 if ALL else 24):
        yield whole[:length]


@pytest.mark.timeout(1200 if ALL else 180)
def test_every_flip_and_every_cut_in_a_delta_and_its_base(folder: Path) -> None:
    """Whichever of the four files it is in, the delta is refused."""
    files = some_snapshots(folder, 1, 2)
    expected = loaded(folder / "1")
    assert len(files) == 4
    for name, whole in files.items():
        for content in damaged(whole):
            (folder / name).write_bytes(content)
            assert is_refused(folder / "1"), f"{name} with {content!r} was read"
        (folder / name).write_bytes(whole)
    assert loaded(folder / "1") == expected


def test_every_file_of_a_chain_in_the_place_of_every_other(folder: Path) -> None:
    """Missing, or another file of its own chain or of one that looks the same: refused."""
    own, other = (some_snapshots(folder / name, seed) for seed, name in ((1, "own"), (2, "other")))
    tried = 0
    for name, content in itertools.product(own, [None, *own.values(), *other.values()]):
        where = folder / "own" / name
        if content == own[name]:
            continue
        where.unlink()
        if content is not None:
            where.write_bytes(content)
        assert is_refused(folder / "own" / TIP), f"{name} was replaced by {content!r}"
        where.write_bytes(own[name])
        tried += 1
    assert tried > 70
    loaded(folder / "own" / TIP)


def test_every_order_of_the_snapshots_of_two_chains(folder: Path) -> None:
    """Whole folders in each other's place, twice, or missing: what is loaded is what was saved as this.

    (A folder in the place of the last one is itself a snapshot, and may be good with what is before it.)
    """
    saved: dict[bytes, object] = {}
    kinds: list[Path] = []
    for seed, name in ((1, "own"), (2, "other")):
        some_snapshots(folder / name, seed)
        for link in range(3):
            kinds.append(folder / name / str(link))
            saved[(kinds[-1] / MANIFEST).read_bytes()] = loaded(kinds[-1])
    assert len(saved) == 6
    place, good = folder / "place", 0
    for order in itertools.product([None, *kinds], repeat=3):
        shutil.rmtree(place, ignore_errors=True)
        for link, kind in enumerate(order):
            if kind is not None:
                shutil.copytree(kind, place / str(link))
        if is_refused(place / TIP):
            continue
        good += 1
        assert loaded(place / TIP) == saved[(place / TIP / MANIFEST).read_bytes()]
    # By what is the last: a base needs nothing; a first delta its base; a second one both in order.
    assert good == 2 * 7 * 7 + 2 * 7 + 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("kind", [1]), ("kind", "x"), ("seed", 0.5), ("shape", [2.5]), ("every_row", 1)],
)
def test_a_definition_that_cannot_be_is_refused_before_anything_is_made(
    folder: Path, name: str, value: object
) -> None:
    """Of the second table, in a manifest whose checksums are right: there is no first one either."""
    some_snapshots(folder, 1)
    where = folder / TIP / MANIFEST
    document = json.loads(where.read_bytes())
    document["tables"][1][name] = value
    where.write_text(json.dumps(document))
    reseal_snapshots(folder)
    assert is_refused(folder / TIP)


def starts(log: ChainedLog, folder: Path, missing_end: bool) -> bool:
    """Whether a server starts from these files; what it is then, it once was."""
    files = of_folder(folder)
    try:
        log.read(folder)
    except LogError as error:
        return not is_sentence(error)
    *_, last = log.ends
    assert missing_end or files.get(last) == log.files[last]
    return True


@pytest.mark.parametrize("complete", [(), (1,), (2,), (1, 2)])
def test_every_file_of_a_log_in_the_place_of_every_other(
    folder: Path, complete: tuple[int, ...]
) -> None:
    """Missing, doubled, of another server, job or run: refused, or not needed.

    The last file alone may be missing, if the snapshot with which it begins is not complete: that is how a
    server leaves its log which dies before it begins the file. (A file of another run of the same job is
    known by the file before it; where a complete snapshot is all that is before it, it is not.)
    """
    log = a_log(folder / "own", 1, complete=complete)
    strange = [
        *(() if 2 in complete else a_log(folder / "run", 2).files.values()),
        *a_log(folder / "job", 1, "k").files.values(),
        *a_log(folder / "server", 1, "j", 1).files.values(),
    ]
    names = [*log.ends, "server.0.000003.log"]
    whole = [log.files[name] for name in log.ends]
    for name, content in itertools.product(names, [None, *whole, *strange]):
        if content == log.files.get(name):
            continue
        shutil.rmtree(folder / "own")
        for other, good in {**log.files, name: content}.items():
            if good is not None:
                (folder / "own" / other).parent.mkdir(parents=True, exist_ok=True)
                (folder / "own" / other).write_bytes(good)
        is_end = name == names[2] and content is None and 2 not in complete
        is_needed = name not in names[: max(complete, default=0)]
        started = starts(log, folder / "own", is_end)
        if content is None or is_needed:
            assert started == (is_end or not is_needed), f"{name} with {content!r}"
