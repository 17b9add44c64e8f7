"""The Frappe example on a small made-up log in the benchmark's format."""

import re
import sys
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")

import frappe_data  # after the check
from frappe_data import FIELDS, ITEM, LOG, TEST, VALIDATION
from numpy.typing import NDArray

from psfleet.checkpoint import compare, read_specs
from psfleet.core.base.errors import UsageError
from psfleet.core.engine.schema.table import OWN
from tests.programs import IN_DOCS, ended

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "frappe.py"
USERS, ITEMS = 6, 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of 240 rows, and a fifth and a tenth of its samples as libsvm files."""
    folder, rng = tmp_path_factory.mktemp("frappe"), np.random.default_rng(0)
    # Each user opens some of half of the apps.
    sizes = (USERS, ITEMS // 2, *(3 for _ in FIELDS[2:]))
    rows = np.stack([rng.integers(0, size, 240) for size in sizes], axis=1)
    rows[:ITEMS, ITEM] = np.arange(ITEMS)  # and every app is in the log
    lines = ["\t".join(FIELDS), *("\t".join(map(str, row)) for row in rows.tolist())]
    with zipfile.ZipFile(folder / LOG, "w") as archive:
        archive.writestr("Mobile_Frappe/frappe/frappe.csv", "\n".join(lines))
    samples = frappe_data.rebuild(frappe_data.read_log(folder / LOG), seed=3)
    order = rng.permutation(len(samples))
    for name, chosen in ((VALIDATION, order[:144]), (TEST, order[144:216])):
        part = samples[chosen]
        (folder / name).write_text(
            "".join(
                f"{2 * label - 1:g} {' '.join(f'{at}:1' for at in ids)}\n"
                for ids, label in zip(part.ids, part.labels, strict=True)
            )
        )
    return folder


def test_the_training_samples_are_what_the_held_ones_leave(folder: Path) -> None:
    """All parts together: each row of the log once, and two negatives with its user and context.

    No user opened the app of a negative, and no sample that is held is trained on.
    """
    log = frappe_data.read_log(folder / LOG)
    split = frappe_data.load(folder, is_checked=False)
    parts = (split.train, split.validation, split.test)
    assert [len(part) for part in parts] == [504, 144, 72]
    ids, labels = (np.concatenate([getattr(p, name) for p in parts]) for name in ("ids", "labels"))
    positives, negatives = ids[labels == 1], ids[labels == 0]
    assert _counted(positives) == _counted(log)
    contexts = [column for column in range(len(FIELDS)) if column != ITEM]
    assert _counted(negatives[:, contexts]) == _counted(np.repeat(log, 2, axis=0)[:, contexts])
    assert not _counted(negatives[:, :2]) & _counted(log[:, :2])
    held = np.concatenate([split.validation.ids, split.test.ids])[
        np.concatenate([split.validation.labels, split.test.labels]) == 0
    ]
    assert not _counted(split.train.ids) & _counted(held)


def _counted(rows: NDArray[np.int64]) -> "Counter[tuple[int, ...]]":
    return Counter(map(tuple, rows.tolist()))


@pytest.mark.parametrize("name", [LOG, VALIDATION, TEST])
def test_a_missing_file_is_named_with_its_source(name: str, folder: Path, tmp_path: Path) -> None:
    """One sentence says where to get it."""
    for other in {LOG, VALIDATION, TEST} - {name}:
        (tmp_path / other).write_bytes((folder / other).read_bytes())
    with pytest.raises(
        UsageError, match=rf"{name} is missing; download it from https://github.com/"
    ):
        frappe_data.load(tmp_path, is_checked=False)


def test_another_file_is_refused(folder: Path) -> None:
    """A file with another checksum is no base for figures that are compared with published ones."""
    with pytest.raises(UsageError, match=rf"{LOG} has the SHA-256 [0-9a-f]+, not 4adc616d"):
        frappe_data.load(folder)


def run(folder: Path, place: Path, job: list[str], *arguments: str) -> None:
    """Run the example; it saves its model as `model`."""
    place.mkdir(exist_ok=True)
    launch = ["-m", "psfleet_launch", "--no-progress", "--log-dir", str(place / "logs"), *job]
    options = ["--data", str(folder), "--any-data", "--epochs", "2", "--out", str(place / "model")]
    process = ended([sys.executable, *launch, str(EXAMPLE), *options, *arguments], cwd=place)
    assert process.returncode == 0, process.stdout + process.stderr
    matches = re.findall(r"(\w+) AUC ([\d.]+)   log loss ([\d.]+)", process.stdout)
    assert [name for name, _, _ in matches] == ["validation", "test"], process.stdout
    assert all(0 <= float(auc) <= 1 for _, auc, _ in matches)


def test_rows_are_the_same_bits_on_one_and_two_servers(folder: Path, tmp_path: Path) -> None:
    """DeepFM in a program, two workers, sync mode: weights and the optimizer's state."""
    for servers in ("1", "2"):
        job = ["--sync", "--servers", servers, "--workers", "2"]
        run(folder, tmp_path / servers, job, "--model", "deepfm")
    actual = compare(str(tmp_path / "1" / "model"), str(tmp_path / "2" / "model"))
    tables = [difference for difference in actual if not difference.table.startswith(OWN)]
    # The rows; weights and biases of four layers; scale, shift, mean and variance of three norms.
    assert len(tables) == 1 + 2 * 4 + 4 * 3
    assert all(difference.is_equal for difference in tables), actual


@IN_DOCS
def test_torch_trains_it_in_int8(folder: Path, tmp_path: Path) -> None:
    """FM in PyTorch, async with messages of 8 bits: it trains, and one table has weights and factors."""
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")
    job = ["--async", "--wire", "int8", "--servers", "2", "--workers", "2"]
    run(folder, tmp_path, job, "--model", "fm", "--torch")
    rows = next(spec for spec in read_specs(tmp_path / "model") if spec.name == "rows")
    assert rows.dim == 17
