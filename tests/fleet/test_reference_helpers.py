"""The reference's helpers across workers: gathered values, shuffled samples, sums for metrics; generators."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet.fleet as fleet
import psfleet.fluid as fluid
from psfleet.core.base.errors import UsageError
from psfleet.metrics import auc
from tests.programs import ended
from tests.refusals import check_refusals
from tests.runtimes import own_programs

SCRIPT = Path(__file__).with_name("scripts") / "reference_helpers.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two workers have got."""
    folder = tmp_path_factory.mktemp("helpers")
    command = [sys.executable, "-m", "psfleet_launch", "--servers", "1", "--workers", "2", "--sync"]
    command += ["--log-dir", str(folder), "--no-progress", str(SCRIPT), str(folder)]
    done = ended(command, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{index}.json").read_text()) for index in (0, 1)]


def test_every_worker_gets_what_all_have(found: list[dict[str, Any]]) -> None:
    """`util.all_gather` gives the values in worker order, of arrays and of numbers."""
    for one in found:
        assert one["gathered"] == [[0, 7], [1, 7]]
        assert one["numbers"] == [1, 2]


def test_samples_of_all_workers_are_shuffled_together(found: list[dict[str, Any]]) -> None:
    """Every sample is at one worker once, whole, in equal parts; the next shuffle is another one."""
    assert [one["before"] for one in found] == [12, 12]
    assert [one["after"] for one in found] == [6, 6]
    for key in ("ids", "again"):
        assert sorted(found[0][key] + found[1][key]) == list(range(12))
        assert found[0][key] != sorted(found[0][key])
    assert found[0]["ids"] != found[0]["again"]
    for one in found:
        assert one["values"] == [i + 0.5 for i in one["ids"]]


def test_sums_over_all_workers(found: list[dict[str, Any]]) -> None:
    """`fleet.metrics.sum` and its kin combine what each worker has counted."""
    scores, labels = [0, 0, 0, 0, 1, 1, 2, 1, 2, 2, 3, 3, 3, 3], [0] * 7 + [1] * 7
    for one in found:
        assert one["sum"] == [[3.0, 1.0]]
        assert (one["max"], one["min"]) == ([1, 0], [0, -1])
        assert one["auc"] == pytest.approx(auc(labels, scores))
        assert (one["mae"], one["mse"], one["acc"]) == (1.0, 8.0, pytest.approx(1 / 3))
        assert one["rmse"] == 2.0


REFUSED = """
fleet.metrics.sum("loss")  # fleet.metrics.sum got 'loss'; give numbers
fleet.metrics.acc([], [1])  # fleet.metrics.acc got []
fleet.metrics.auc([1, 2], [1])  # stat_pos has 2 bins and stat_neg 1
fleet.InMemoryDataset().init(batch=3)  # has no setting 'batch'; it has batch_size
fleet.QueueDataset().init(fs_name="hdfs:")  # fs_name is 'hdfs:'; it must be ''
fleet.InMemoryDataset().wait_preload_done()  # call preload_into_memory
fleet.InMemoryDataset().global_shuffle("x")  # fleet is 'x'
fleet.InMemoryDataset().slots_shuffle("x")  # slots is 'x'"""


def test_wrong_use_is_one_sentence() -> None:
    """Each quotes what is wrong."""
    check_refusals(REFUSED, {"fleet": fleet})


def test_values_of_a_variable_are_shuffled(tmp_path: Path) -> None:
    """`slots_shuffle` exchanges the values of one variable and leaves the others."""
    (tmp_path / "part").write_text("".join(f"1 {i} 1 {i}\n" for i in range(9)))
    dataset = fleet.InMemoryDataset()
    with own_programs():
        dataset.init(batch_size=9, use_var=[fluid.layers.data(n, [1], dtype="int64") for n in "xy"])
    dataset.set_filelist([str(tmp_path / "part")])
    dataset.load_into_memory(is_shuffle=False)
    dataset.slots_shuffle(["y"])
    (batch,) = dataset
    np.testing.assert_array_equal(batch["x"][:, 0], range(9))
    assert sorted(batch["y"][:, 0]) == list(range(9)) != list(batch["y"][:, 0])


class Words(fleet.MultiSlotStringDataGenerator):
    """Samples of a line of numbers: a user and all others, and the same in reverse."""

    def generate_sample(self, line: str | None) -> Callable[[], Iterator[Any]]:
        def samples() -> Iterator[Any]:
            words = (line or "7 8 9").split()
            yield [("user", words[:1]), ("items", words[1:])]
            yield None
            yield [("user", words[-1:]), ("items", words[:-1])]

        return samples


class Doubled(fleet.MultiSlotDataGenerator):
    """Numbers, and each batch of samples twice."""

    def generate_sample(self, line: str | None) -> Callable[[], Iterator[Any]]:
        return lambda: iter([[("x", [1]), ("y", [0.5, 2])], [("x", [2]), ("y", [1, 2])]])

    def generate_batch(self, samples: list[Any]) -> Callable[[], Iterator[Any]]:
        return lambda: iter(samples + samples)


def test_generators_print_the_format(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Number of values and values of each slot, a sample a line; from lines or from memory."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("1 2 3\n4 5 6\n"))
    Words().run_from_stdin()
    assert capsys.readouterr().out == "1 1 2 2 3\n1 3 2 1 2\n1 4 2 5 6\n1 6 2 4 5\n"
    Words().run_from_memory()
    assert capsys.readouterr().out == "1 7 2 8 9\n1 9 2 7 8\n"
    doubled = Doubled()
    doubled.set_batch(1)
    doubled.run_from_memory()
    assert capsys.readouterr().out == "1 1 2 0.5 2\n1 1 2 0.5 2\n1 2 2 1 2\n1 2 2 1 2\n"


@pytest.mark.parametrize("sample", [[("x", ["1"])], [("x", [])], [("x", 1, 2)], [("x", [True])]])
def test_samples_that_are_none_are_refused(sample: Any) -> None:
    """With the sample or the value quoted; nothing is printed for it."""

    class Wrong(fleet.MultiSlotDataGenerator):
        def generate_sample(self, line: str | None) -> Callable[[], list[Any]]:
            return lambda: [sample]

    with pytest.raises(UsageError, match="Wrong: "):
        Wrong().run_from_memory()
