"""psfleet predict: predictions for Parquet files from a checkpoint, by any number of processes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")
pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")

import pyarrow as pa  # after the checks
import pyarrow.parquet as pq

SCRIPTS = Path(__file__).parent / "scripts"
ROWS, GROUP = 60, 10
BAD = 23  # the row with an infinite age
COMMAND = [sys.executable, "-m", "psfleet_launch.commands.psfleet_cli", "predict"]
JOB = ["-m", "psfleet_launch", "--no-progress", "--sync", "--servers", "2"]
OPTIONS = ["--batch-size", "4", "--part-rows", "20", "--column", "user", "--column", "note"]


def started(words: list[str], **variables: str) -> "subprocess.CompletedProcess[str]":
    """A command that has ended."""
    paths = [str(SCRIPTS), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        words,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files, a job that has trained on them on 2 servers, its models and what it predicts itself."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "data").mkdir()
    dice = np.random.default_rng(1)
    for number, (first, end) in enumerate(((0, 34), (34, ROWS))):
        rows = range(first, end)
        table = pa.table(
            {
                "user": [row % 11 for row in rows],
                "seen": [[f"s{n}" for n in dice.integers(0, 9, row % 4)] for row in rows],
                "age": pa.array([row / 60 for row in rows], pa.float32()),
                "note": [f"row {row}" for row in rows],
                "click": pa.array([row % 3 == 0 for row in rows]),
            }
        )
        pq.write_table(table, folder / "data" / f"{number}.parquet", row_group_size=GROUP)
    job = [sys.executable, *JOB, "--log-dir", str(folder / "logs")]
    done = started([*job, str(SCRIPTS / "predicted.py"), str(folder / "data"), str(folder)])
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def predict(trained: Path, model: str, target: Path, *options: str, **variables: str) -> str:
    """The output of the command, which succeeds."""
    done = attempt(trained, model, target, *options, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def attempt(
    trained: Path, model: str, target: Path, *options: str, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """The command."""
    module = "predicted" if model == "predicted:Net" else "predicted_program"
    named = ["--features", f"{module}:FEATURES", "--to", str(target)]
    words = [*COMMAND, model, str(trained / "data"), *named, *OPTIONS, *options]
    return started(words, **variables)


def content(folder: Path) -> Any:
    """All parts, one after the other."""
    parts = sorted(folder.glob("part-*.parquet"))
    assert [part.name for part in parts] == [f"part-{n:05}.parquet" for n in range(len(parts))]
    return pa.concat_tables([pq.read_table(part).replace_schema_metadata(None) for part in parts])


def expected(trained: Path, way: str) -> Any:
    """The forward pass of the training job, beside the columns of the files."""
    files = [pq.read_table(file) for file in sorted((trained / "data").glob("*.parquet"))]
    with np.load(trained / "expected.npz") as found:
        values = pa.array(found[way].reshape(-1))
    return pa.concat_tables(files).select(["user", "note"]).append_column("prediction", values)


MODELS = {
    "program": ("predicted_program:chance", "program"),
    "torch": ("predicted:Net", "torch"),
    "folder": ("", "program"),
}


@pytest.mark.parametrize(
    ("what", "processes"), [("program", 1), ("program", 3), ("torch", 3), ("folder", 1)]
)
def test_predictions_are_those_of_the_training_job(
    what: str, processes: int, trained: Path, tmp_path: Path, torch_zygote: None
) -> None:
    """All rows of two files, in order, with the bits of the job's own forward pass: of a program and a torch
    module from the snapshot, and of an inference model with weights of its own."""
    model, way = MODELS[what]
    weights = ["--checkpoint", str(trained / "model")] if model else []
    said = predict(
        trained,
        model or str(trained / "program"),
        tmp_path,
        *weights,
        "--processes",
        str(processes),
    )
    assert said == f"{tmp_path}: {ROWS} rows\n"
    assert content(tmp_path).equals(expected(trained, way))
    assert len(list(tmp_path.glob("part-*"))) == 4
    assert not list(tmp_path.glob(".*"))


def test_a_command_that_is_run_again_does_what_is_left(
    trained: Path, tmp_path: Path, torch_zygote: None
) -> None:
    """A process is killed in the middle of a part: that part is not there, whole ones are, and they stay as
    they are when the command is run again. No row is missing or doubled."""
    mark, target = tmp_path / "mark", tmp_path / "out"
    mark.touch()
    options = ["--checkpoint", str(trained / "model"), "--processes", "2"]
    first = attempt(
        trained, "predicted_program:dying", target, *options, PSFLEET_TEST_DIE=str(mark)
    )
    assert first.returncode == 2
    assert "was ended by signal 9; run the command again" in first.stderr
    before = {part: part.stat().st_ino for part in target.glob("part-*")}
    assert len(before) < 4
    predict(trained, "predicted_program:dying", target, *options, PSFLEET_TEST_DIE=str(mark))
    assert content(target).equals(expected(trained, "program"))
    assert all(part.stat().st_ino == inode for part, inode in before.items())
    assert not list(target.glob(".*"))


def test_another_model_needs_another_folder(
    trained: Path, tmp_path: Path, torch_zygote: None
) -> None:
    """A folder keeps predictions of one model, one set of files and one choice of columns."""
    predict(trained, str(trained / "program"), tmp_path)
    again = attempt(trained, str(trained / "program"), tmp_path, "--column", "age")
    assert again.returncode == 2
    assert "holds predictions with other columns (['user', 'note'], now" in again.stderr
    other = attempt(
        trained, str(trained / "program"), tmp_path, "--checkpoint", str(trained / "model")
    )
    assert "holds predictions with other model" in other.stderr
    strange = attempt(trained, str(trained / "program"), trained / "data")
    assert "holds Parquet files that are no predictions" in strange.stderr


def test_bad_rows(trained: Path, tmp_path: Path, torch_zygote: None) -> None:
    """They are fatal, with file, row group, row, column and value; or skipped and counted."""
    bad = tmp_path / "bad"
    (bad / "data").mkdir(parents=True)
    whole = pq.read_table(trained / "data" / "0.parquet")
    ages = whole.column("age").to_pylist()
    ages[BAD] = float("inf")
    changed = whole.set_column(2, "age", pa.array(ages, pa.float32()))
    pq.write_table(changed, bad / "data" / "0.parquet", row_group_size=GROUP)
    model = str(trained / "program")
    failed = attempt(bad, model, tmp_path / "a")
    assert failed.returncode == 2
    assert "0.parquet row group 2 row 3: age is inf; correct it" in failed.stderr
    said = predict(bad, model, tmp_path / "b", "--bad-rows", "skip", "--processes", "2")
    assert said == f"{tmp_path / 'b'}: 33 rows, 1 rows skipped\n"
    notes = content(tmp_path / "b").column("note").to_pylist()
    assert notes == [f"row {row}" for row in range(34) if row != BAD]


def test_what_is_asked_for_wrongly(trained: Path, tmp_path: Path, torch_zygote: None) -> None:
    """One sentence each, and no folder of predictions."""
    for model, options, sentence in (
        ("predicted_program:chance", [], "needs --checkpoint for its weights"),
        (
            "predicted_program:chance",
            ["--checkpoint", str(tmp_path)],
            "has no manifest.json; name a folder",
        ),
        (str(trained / "program"), ["--column", "nothing"], "has no column 'nothing'; it has user"),
    ):
        done = attempt(trained, model, tmp_path / "out", *options)
        assert done.returncode == 2
        assert sentence in done.stderr
        assert not list(tmp_path.glob("out/*"))
    done = attempt(
        trained,
        "predicted_program:nobody",
        tmp_path / "out",
        "--checkpoint",
        str(trained / "model"),
    )
    assert "the model 'predicted_program:nobody' cannot be imported (AttributeError" in done.stderr
