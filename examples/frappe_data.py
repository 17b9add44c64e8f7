"""The Frappe log: which of 4,082 apps 957 users opened, and in which context.

Baltrunas, Church, Karatzoglou and Oliver, "Frappe: Understanding the Usage and Perception of Mobile App
Recommendations In-The-Wild", arXiv:1505.03014. Its terms forbid redistribution, so you have to download it.

Published results use the split of NFM (He and Chua, SIGIR 2017). Each of the 96,203 rows of the log is a
positive sample. For each there are two negative samples: the same user and context, with apps that this user
never opened. 70 % of the 288,609 samples train, 20 % validate, 10 % test. `load` reads the published
validation and test samples unchanged. It makes the training samples from the remaining rows of the log, and
draws the apps of the negative samples itself.
"""

import csv
import hashlib
import io
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from psfleet import UsageError
from psfleet.data.batches import Batches
from psfleet.data.text_files import TextFiles
from psfleet.features import Feature, FeatureSet, Table

__all__ = ["FIELDS", "Samples", "Split", "load", "rebuild"]

Ints = NDArray[np.int64]

FIELDS = (
    *("user", "item", "daytime", "weekday", "isweekend"),
    *("homework", "cost", "weather", "country", "city"),
)
ITEM = FIELDS.index("item")
IDS = 5382
"""Number of ids of all fields together."""
LOG, VALIDATION, TEST = "Mobile_Frappe.zip", "frappe.validation.libfm", "frappe.test.libfm"
SOURCES = {
    LOG: (
        "https://github.com/irecsys/CARSKit/raw/master/context-aware_data_sets/Mobile_Frappe.zip",
        "4adc616de57170f282397f6e6e30215f97fa7ad1b7f40bd12ef5dceaaf3e9b4e",
    ),
    VALIDATION: (
        "https://github.com/hexiangnan/neural_factorization_machine/raw/master/data/frappe/frappe.validation.libfm",
        "fdf4be563a7dd9b15f7a6e8b32671e90e6e7a2a2bd3af4e10bf13c5ad7e76e9e",
    ),
    TEST: (
        "https://github.com/hexiangnan/neural_factorization_machine/raw/master/data/frappe/frappe.test.libfm",
        "a2ebaef3a9af8e55f8bb0d08bc4923965e42e43760ebd7635ac2f8c5db99e097",
    ),
}
"""URL and SHA-256 of each file."""


@dataclass(frozen=True)
class Samples:
    """Samples with one id of each field.

    Attributes:
        ids: int64 [n, fields]. No two fields share an id.
        labels: float32 [n]. 1 if the user opened the app, else 0.
    """

    ids: Ints
    labels: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Ints) -> "Samples":
        return Samples(self.ids[rows], self.labels[rows])

    @property
    def batch(self) -> dict[str, Ints]:
        """Ids [n] of each feature, by name."""
        return dict(zip(FIELDS, self.ids.T, strict=True))


@dataclass(frozen=True)
class Split:
    """Samples to train on, to choose settings on, and to test on."""

    train: Samples
    validation: Samples
    test: Samples


def load(folder: Path, is_checked: bool = True) -> Split:
    """Return the benchmark's samples.

    Args:
        folder: Folder with the files of `SOURCES`.
        is_checked: If True, refuse files with another SHA-256.

    Raises:
        UsageError: A file is missing or has another SHA-256. The message names the file and its URL.
    """
    for name in SOURCES:
        _check(folder / name, is_checked)
    log = read_log(folder / LOG)
    validation, test = (_read(folder / name) for name in (VALIDATION, TEST))
    return Split(rebuild(log, validation, test), validation, test)


def _check(path: Path, is_checked: bool) -> None:
    url, digest = SOURCES[path.name]
    if not path.is_file():
        raise UsageError(f"{path} is missing; download it from {url}")
    actual_digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if is_checked and actual_digest != digest:
        raise UsageError(
            f"{path} has the SHA-256 {actual_digest}, not {digest}; download it again from {url}"
        )


def read_log(path: Path) -> Ints:
    """Return the log, int64 [rows, fields], with the ids of the published split.

    Ids are assigned field by field, and within a field by first occurrence.
    """
    with zipfile.ZipFile(path) as archive, archive.open("Mobile_Frappe/frappe/frappe.csv") as file:
        rows = list(csv.DictReader(io.TextIOWrapper(file, "utf-8"), delimiter="\t"))
    ids, first = np.empty((len(rows), len(FIELDS)), np.int64), 0
    for column, field in enumerate(FIELDS):
        numbers: dict[str, int] = {}
        ids[:, column] = [numbers.setdefault(row[field], first + len(numbers)) for row in rows]
        first += len(numbers)
    return ids


def _read(path: Path) -> Samples:
    pairs = Feature("index", Table("ids", 1), weighted=True, weights_column="value")
    files = TextFiles(path, FeatureSet([pairs]), ["label"], format="libsvm")
    [batch] = Batches(files, len(files))
    labels = batch.labels["label"]
    ids = batch.features["index"].values.reshape(len(labels), -1)
    return Samples(ids, (labels > 0).astype(np.float32))


def rebuild(log: Ints, *held_out: Samples, seed: int = 0) -> Samples:
    """Return the training samples: positive and negative samples that are not held out.

    Users and contexts of the negative samples are the benchmark's, because its negative samples have those of
    the log. Their apps are drawn uniformly from the apps that the user never opened.

    Args:
        log: int64 [rows, fields].
        held_out: Samples of the benchmark that must not be trained on.
        seed: Seed of the random apps.
    """
    held_positives = _ids(log, held_out, 1)
    held_negatives = _ids(log, held_out, 0)
    positives = _less(log, held_positives)
    negatives = _less(_without_item(np.repeat(log, 2, axis=0)), _without_item(held_negatives))
    rng, first, end = np.random.default_rng(seed), log[:, ITEM].min(), log[:, ITEM].max() + 1
    opened = _codes(log[:, :2])
    held_rows = {row.tobytes() for row in held_negatives}
    wrong = np.ones(len(negatives), bool)
    while wrong.any():
        negatives[wrong, ITEM] = rng.integers(first, end, int(wrong.sum()))
        wrong = np.isin(_codes(negatives[:, :2]), opened)
        wrong |= np.array([row.tobytes() in held_rows for row in negatives], bool)
    labels = np.repeat([1, 0], [len(positives), len(negatives)]).astype(np.float32)
    return Samples(np.concatenate([positives, negatives]), labels)


def _ids(log: Ints, held_out: Sequence[Samples], label: int) -> Ints:
    """Return the ids of the held-out samples with this label."""
    return np.concatenate([log[:0], *(part.ids[part.labels == label] for part in held_out)])


def _less(rows: Ints, removed: Ints) -> Ints:
    """Remove rows: each row of `removed` removes one equal row of `rows`."""
    left = Counter(row.tobytes() for row in removed)
    is_kept = np.ones(len(rows), bool)
    for at, row in enumerate(rows):
        if left[key := row.tobytes()]:
            left[key] -= 1
            is_kept[at] = False
    return rows[is_kept]


def _without_item(rows: Ints) -> Ints:
    cleared = rows.copy()
    cleared[:, ITEM] = 0
    return cleared


def _codes(pairs: Ints) -> Ints:
    """Combine user and app into one number. Both are below 2^32."""
    return pairs[:, 0] << 32 | pairs[:, 1]
