"""psfleet predict: predictions for Parquet files from a checkpoint, by any number of processes."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")

import pyarrow as pa  # after the check
import pyarrow.parquet as pq

from psfleet_launch.commands.psfleet_cli import main
from tests.programs import ended

SCRIPTS = Path(__file__).parent / "scripts"
ROWS, GROUP = 60, 10
BAD = 23  # the row with an infinite age
JOB = ["-m", "psfleet_launch", "--no-progress", "--sync", "--servers", "2"]
OPTIONS = ["--batch-size", "4", "--part-rows", "20", "--column", "user", "--column", "note"]


PATHS = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their modules can be imported, also by processes."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("PYTHONPATH", PATHS)


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
    process = ended(
        [*job, str(SCRIPTS / "predicted.py"), str(folder / "data"), str(folder)],
        env={**os.environ, "PYTHONPATH": PATHS},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return folder


class Command:
    """`psfleet predict` on the files.

    Args:
        trained: Where they and the models are.
        captured: What it prints.
    """

    def __init__(self, trained: Path, captured: pytest.CaptureFixture[str]) -> None:
        self.trained = trained
        self._captured = captured

    def run(self, model: str, target: Path, *options: str) -> str:
        """What it prints when it succeeds."""
        code, out, err = self.attempt(model, target, *options)
        assert code == 0, err
        return out

    def refused(self, model: str, target: Path, *options: str) -> str:
        """What it prints when it fails."""
        code, _, err = self.attempt(model, target, *options)
        assert code == 2
        return err

    def attempt(self, model: str, target: Path, *options: str) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        module = "predicted" if model == "predicted:Net" else "predicted_program"
        named = ["--features", f"{module}:FEATURES", "--to", str(target)]
        code = main(["predict", model, str(self.trained / "data"), *named, *OPTIONS, *options])
        return code, *self._captured.readouterr()


@pytest.fixture
def command(trained: Path, torch_zygote: None, capfd: pytest.CaptureFixture[str]) -> Command:
    """On what was trained."""
    return Command(trained, capfd)


def content(folder: Path) -> Any:
    """All parts, one after the other."""
    parts = sorted(folder.glob("part-*.parquet"))
    assert [part.name for part in parts] == [f"part-{n:05}.parquet" for n in range(len(parts))]
    return pa.concat_tables([pq.read_table(part).replace_schema_metadata(None) for part in parts])


def expected(trained: Path, way: str) -> Any:
    """The forward pass of the training job, beside the columns of the files."""
    files = [pq.read_table(file) for file in sorted((trained / "data").glob("*.parquet"))]
    with np.load(trained / "expected.npz") as archive:
        values = pa.array(archive[way].reshape(-1))
    return pa.concat_tables(files).select(["user", "note"]).append_column("prediction", values)


MODELS = {
    "program": ("predicted_program:chance", "program"),
    "torch": ("predicted:Net", "torch"),
    "folder": ("", "program"),
}


@pytest.mark.parametrize(
    ("what", "processes"),
    [("program", 3), pytest.param("torch", 3, marks=pytest.mark.long), ("folder", 1)],
)
def test_predictions_are_those_of_the_training_job(
    what: str, processes: int, command: Command, tmp_path: Path
) -> None:
    """All rows of two files, in order, with the bits of the job's own forward pass: of a program and a torch
    module from the snapshot, and of an inference model with weights of its own."""
    trained = command.trained
    model, way = MODELS[what]
    weights = ["--checkpoint", str(trained / "model")] if model else []
    named = model or str(trained / "program")
    message = command.run(named, tmp_path, *weights, "--processes", str(processes))
    assert message == f"{tmp_path}: {ROWS} rows\n"
    assert content(tmp_path).equals(expected(trained, way))
    assert len(list(tmp_path.glob("part-*"))) == 4
    assert not list(tmp_path.glob(".*"))


@pytest.mark.long
def test_csv(trained: Path, torch_zygote: None, tmp_path: Path) -> None:
    """Rows of CSV files have the predictions of the same rows in Parquet files."""
    data = []
    for file in sorted((trained / "data").glob("*.parquet")):
        rows = pq.read_table(file).to_pylist()
        lines = [f"{r['user']},{'|'.join(r['seen'])},{r['age']!r},{r['note']}" for r in rows]
        data.append(str(tmp_path / f"{file.stem}.csv"))
        Path(data[-1]).write_text("\n".join(["user,seen,age,note", *lines]))
    features = ["--features", "predicted:FEATURES", "--to", str(tmp_path / "p")]
    snapshot = ["--checkpoint", str(trained / "model")]
    assert main(["predict", "predicted:Net", *data, *features, *OPTIONS, *snapshot]) == 0
    actual, wanted = content(tmp_path / "p"), expected(trained, "torch")
    assert actual["note"].to_pylist() == wanted["note"].to_pylist()
    np.testing.assert_allclose(actual["prediction"], wanted["prediction"], rtol=1e-5)


@pytest.mark.long
def test_a_command_that_is_run_again_does_what_is_left(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed in the middle of the second part: that is not there, the first one is, and stays
    as it is when the command is run again with two processes. No row is missing or doubled."""
    mark, target = tmp_path / "mark", tmp_path / "out"
    mark.touch()
    monkeypatch.setenv("PSFLEET_TEST_DIE", str(mark))
    options = ["--checkpoint", str(command.trained / "model")]
    said = command.refused("predicted_program:dying", target, *options)
    assert "was ended by signal 9; run the command again" in said
    before = {part: part.stat().st_ino for part in target.glob("part-*")}
    assert [part.name for part in before] == ["part-00000.parquet"]
    command.run("predicted_program:dying", target, *options, "--processes", "2")
    assert content(target).equals(expected(command.trained, "program"))
    assert all(part.stat().st_ino == inode for part, inode in before.items())
    assert not list(target.glob(".*"))


@pytest.mark.long
def test_another_model_needs_another_folder(command: Command, tmp_path: Path) -> None:
    """A folder keeps predictions of one model, one set of files and one choice of columns."""
    model, snapshot = str(command.trained / "program"), str(command.trained / "model")
    command.run(model, tmp_path)
    said = command.refused(model, tmp_path, "--column", "age")
    assert "holds predictions with other columns (['user', 'note'], now" in said
    said = command.refused(model, tmp_path, "--checkpoint", snapshot)
    assert "holds predictions with other model" in said
    said = command.refused(model, command.trained / "data")
    assert "holds Parquet files that are no predictions" in said
    (tmp_path / "_predictions.json").rename(tmp_path / "predictions.json")  # as it was named before
    command.run(model, tmp_path)
    assert pq.read_table(tmp_path).num_rows == ROWS
    (tmp_path / "_predictions.json").write_text("{")
    assert "_predictions.json" in command.refused(model, tmp_path)


@pytest.mark.long
def test_bad_rows(command: Command, tmp_path: Path) -> None:
    """They are fatal, with file, row group, row, column and value; or skipped and counted."""
    bad = tmp_path / "bad"
    (bad / "data").mkdir(parents=True)
    whole = pq.read_table(command.trained / "data" / "0.parquet")
    ages = whole.column("age").to_pylist()
    ages[BAD] = float("inf")
    changed = whole.set_column(2, "age", pa.array(ages, pa.float32()))
    pq.write_table(changed, bad / "data" / "0.parquet", row_group_size=GROUP)
    model, command.trained = str(command.trained / "program"), bad
    output = command.refused(model, tmp_path / "a")
    assert "0.parquet row group 2 row 3: age is inf; correct it" in output
    output = command.run(model, tmp_path / "b", "--bad-rows", "skip", "--processes", "2")
    assert output == f"{tmp_path / 'b'}: 33 rows, 1 rows skipped\n"
    column = content(tmp_path / "b").column("note").to_pylist()
    assert column == [f"row {row}" for row in range(34) if row != BAD]


def test_what_is_asked_for_wrongly(command: Command, tmp_path: Path) -> None:
    """One sentence each, and no predictions."""
    made, folder = "predicted_program:chance", str(command.trained / "program")
    for model, options, sentence in (
        (made, [], "which has no weights; name the checkpoint that has them"),
        (made, ["--checkpoint", str(tmp_path)], "has no manifest.json; name a folder"),
        (folder, ["--column", "nothing"], "has no column 'nothing'; it has user"),
    ):
        assert sentence in command.refused(model, tmp_path / "out", *options)
        assert not list(tmp_path.glob("out/*"))
    weights = ["--checkpoint", str(command.trained / "model")]
    said = command.refused("predicted_program:nobody", tmp_path / "out", *weights)
    assert "the model 'predicted_program:nobody' cannot be imported (AttributeError" in said
