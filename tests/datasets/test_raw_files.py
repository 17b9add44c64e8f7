"""Files as they are published: gzip, no header, libsvm without an ending; and batches as a sequence."""

import gzip
import io
import random
from pathlib import Path
from typing import Any

import pytest

from psfleet import fleet
from psfleet.core.base.errors import UsageError

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")

from psfleet.data import gzip_file, text_files
from psfleet.data.batches import Batches
from psfleet.data.gzip_file import GzipFile
from psfleet.data.text_files import TextFiles
from psfleet.features import Feature, FeatureSet, Number
from tests.datasets.click_features import TABLE

pytestmark = pytest.mark.quick

NUMBERS, IDS = [f"I{n}" for n in range(1, 14)], [f"C{n}" for n in range(1, 27)]
CRITEO = FeatureSet(
    [*map(Number, NUMBERS), *(Feature(name, TABLE, hashed=True, salt=name) for name in IDS)]
)
LIBSVM = FeatureSet([Feature("index", TABLE, weighted=True, weights_column="value")])


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups have 4 lines, and there is a point every 300 bytes."""
    monkeypatch.setattr(text_files, "_GROUP", 4)
    monkeypatch.setattr(text_files, "_BUFFER", 100)
    monkeypatch.setattr(gzip_file, "_DISTANCE", 300)


def criteo(path: Path, rows: int = 30) -> Path:
    """A file in the form of the Criteo logs, whose labels are the numbers of its rows."""
    lines = []
    for row in range(rows):
        numbers = ["" if number == 3 else str(row - number) for number in range(1, 14)]
        ids = ["" if number == 5 else f"{row * number:08x}" for number in range(1, 27)]
        lines.append("\t".join([str(row), *numbers, *ids]) + "\n")
    text = "".join(lines).encode()
    if path.suffix == ".gz":  # as parallel compressors write it: of several members
        text = b"".join(gzip.compress(text[at : at + 700]) for at in range(0, len(text), 700))
    path.write_bytes(text)
    return path


def criteo_files(path: Path, **options: Any) -> TextFiles:
    """The rows of a file in the form of the Criteo logs."""
    columns = ["label", *NUMBERS, *IDS]
    return TextFiles(path, CRITEO, ["label"], format="tsv", columns=columns, **options)


def labels(batches: Any) -> list[int]:
    """The labels: the numbers of the rows."""
    return [int(label) for batch in batches for label in batch.labels["label"]]


@pytest.mark.parametrize("name", ["day_0", "train.txt.gz"])
def test_criteo(tmp_path: Path, name: str) -> None:
    """A Criteo log is read in one line, compressed or not, with all of its columns."""
    files = criteo_files(criteo(tmp_path / name))
    batches = Batches(files, 8)
    assert sorted(labels(batches)) == list(range(30))
    first = batches[0]
    assert first.features["I1"].tolist() == [[-1], [0], [1], [2], [-1 + 4], [4], [5], [6]]
    assert first.features["I3"].tolist() == [[0]] * 8
    assert first.features["C2"].values.tolist()[:4] == [f"{row * 2:08x}" for row in range(4)]
    assert first.features["C5"].lengths.tolist() == [0] * 8


def test_compressed_rows_in_any_order(tmp_path: Path) -> None:
    """Shuffled epochs, and batches from anywhere, are those of the file that is not compressed."""
    plain = criteo_files(criteo(tmp_path / "a.txt"), interleave=2)
    zipped = criteo_files(criteo(tmp_path / "a.gz"), interleave=2)
    batches, same = Batches(zipped, 4, 2, shuffle_seed=3), Batches(plain, 4, 2, shuffle_seed=3)
    assert labels(batches) == labels(same)
    assert labels(batches) != sorted(labels(batches))
    for number in (15, 0, 7, 8, 3):
        assert labels([batches[number]]) == labels([same[number]])
    assert labels(fleet.dataset(zipped, 4, 2, shuffle_seed=3)) == labels(same)


def test_seeking(tmp_path: Path) -> None:
    """A gzip file gives the same bytes wherever it is sought; what was passed is not read from its start."""
    dice = random.Random(1)
    data = dice.randbytes(3000) + b"a" * 3000 + dice.randbytes(50)
    path = tmp_path / "f.gz"
    path.write_bytes(gzip.compress(data[:4000]) + b"\0" * 20 + gzip.compress(data[4000:]))
    points: list[Any] = []
    with io.BufferedReader(GzipFile(path.open("rb"), points), 100) as file:
        assert b"".join(iter(lambda: file.read(50), b"")) == data
    with io.BufferedReader(GzipFile(path.open("rb"), points), 100) as file:
        for at in (5000, 17, 3999, 4000, 0, 6049, 6050, 2999):
            assert file.seek(at) == at
            assert file.read(40) == data[at : at + 40]
    positions = [point.position for point in points]
    assert positions == sorted(set(positions))
    assert len(points) > 5


def test_damaged_compression(tmp_path: Path) -> None:
    """A file that ends too early, or is not gzip at all, is named."""
    path = criteo(tmp_path / "a.gz")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UsageError, match=r"a\.gz cannot be read: it ends within its compressed"):
        criteo_files(path)
    (tmp_path / "b.gz").write_bytes(b"1\t2\n")
    with pytest.raises(UsageError, match=r"b\.gz cannot be read: it is not gzip, or damaged"):
        criteo_files(tmp_path / "b.gz")


def test_bad_row_of_a_log(tmp_path: Path) -> None:
    """A line that is no line of the log is named by file and line."""
    path = criteo(tmp_path / "a.txt", 6)
    path.write_text(path.read_text().replace("\t-8\t", "\tx\t", 1))
    with pytest.raises(UsageError, match=r"a\.txt line 1: I8 is 'x'"):
        list(Batches(criteo_files(path), 8))
    path.write_text("1\t2\n")
    with pytest.raises(UsageError, match=r"a\.txt line 1: it has 2 cells for 40 columns"):
        list(Batches(criteo_files(path), 8))


def test_libsvm(tmp_path: Path) -> None:
    """A folder of libsvm files is read in one line, whatever their names; hidden ones are left out."""
    (tmp_path / "a9a").write_text("1 3:0.5 7:1\n-1 2:1\n")
    (tmp_path / "b.txt").write_text("1 9:2 # more\n")
    (tmp_path / "_SUCCESS").write_text("")
    (batch,) = Batches(TextFiles(tmp_path, LIBSVM, ["label"], format="libsvm"), 8)
    assert batch.labels["label"].tolist() == [1, -1, 1]
    assert batch.features["index"].values.tolist() == [3, 7, 2, 9]
    assert batch.features["index"].weights.tolist() == [0.5, 1, 1, 2]


def test_batches_are_a_sequence(tmp_path: Path) -> None:
    """Batches are those of fleet.dataset, by number and in slices, read ahead or not, as often as asked."""
    files = criteo_files(criteo(tmp_path / "a.txt"))
    batches = Batches(files, 4, 2, shuffle_seed=5, prefetch=2)
    expected = labels(fleet.dataset(files, 4, 2, shuffle_seed=5))
    assert len(batches) == 16
    assert labels(batches) == labels(batches) == expected
    assert labels(batches[:3]) + labels(batches[3:]) == expected
    assert len(batches[1::3]) == 5
    assert sorted(n for part in range(3) for n in labels(batches[part::3])) == sorted(expected)
    assert labels([batches[-1]]) == labels(batches[-1:]) == expected[-2:]
    assert labels(fleet.shard(Batches(files, 4))) == labels(Batches(files, 4))
    with pytest.raises(IndexError):
        batches[16]


def test_too_many_epochs(tmp_path: Path) -> None:
    """More samples than positions are refused."""
    files = criteo_files(criteo(tmp_path / "a.txt"))
    with pytest.raises(UsageError, match=r"epochs is 1152921504606846976, too many for 30 samples"):
        Batches(files, 4, 1 << 60)
