"""The ratings example on small made-up files."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.programs import IN_DOCS, ended

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "movielens.py"
LAUNCH = [sys.executable, "-m", "psfleet_launch", "--servers", "2", "--workers", "2", "--sync"]
WAYS = {"embedded": [sys.executable], "sync": LAUNCH}


def write(folder: Path, ending: str) -> Path:
    """8,000 ratings of 40 films by 60 users: tastes of two kinds, and what users and films are worth."""
    rng = np.random.default_rng(0)
    users, films = rng.integers(0, 60, 8000), rng.integers(0, 40, 8000)
    taste, kind = rng.normal(size=(60, 2)), rng.normal(size=(40, 2))
    worth = 3.5 + 0.3 * rng.normal(size=60)[users] + 0.5 * rng.normal(size=40)[films]
    ratings = worth + 0.5 * (taste[users] * kind[films]).sum(axis=1) + 0.2 * rng.normal(size=8000)
    ratings = np.clip(np.round(2 * ratings) / 2, 0.5, 5)
    path = folder / f"ratings.{ending}"
    if ending == "csv":
        lines = [f"{u},{f},{r},0" for u, f, r in zip(users, films, ratings, strict=True)]
        path.write_text("\n".join(["userId,movieId,rating,timestamp", *lines]))
    else:
        path.write_text(
            "\n".join(
                f"{r} {u}:1 {60 + f}:1" for u, f, r in zip(users, films, ratings, strict=True)
            )
        )
    return path


def run(way: str, folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    logs = [] if way == "embedded" else ["--no-progress", "--log-dir", str(folder / "logs")]
    return ended([*WAYS[way], *logs, str(EXAMPLE), *arguments], cwd=folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "ending"), [("embedded", "csv"), pytest.param("sync", "libsvm", marks=IN_DOCS)]
)
def test_it_learns(way: str, ending: str, tmp_path: Path) -> None:
    """The error on ratings that it has not seen is under 0.55 of the mean's; the model is saved."""
    process = run(
        way,
        tmp_path,
        str(write(tmp_path, ending)),
        *("--epochs", "6", "--batch", "64", "--rate", "0.02"),
        "--out",
        str(tmp_path / "model"),
    )
    assert process.returncode == 0, process.stdout + process.stderr
    match = re.search(r"test RMSE ([\d.]+)   of the mean ([\d.]+)", process.stdout)
    assert match, process.stdout
    assert float(match[1]) < 0.55 * float(match[2]), process.stdout
    assert (tmp_path / "model").is_dir()


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    """One sentence with file, line and value; no traceback."""
    path = write(tmp_path, "csv")
    lines = path.read_text().splitlines()
    lines[16] = "1,2,x,0"
    path.write_text("\n".join(lines))
    process = run("embedded", tmp_path, str(path))
    assert process.returncode == 1
    assert (
        process.stderr.strip()
        == f"movielens.py: {path} line 17: rating is 'x'; correct it, or set bad_rows='skip'"
    )
