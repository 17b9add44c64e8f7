"""Feeding samples and files."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet.fluid as fluid
from psfleet.core.base.errors import IdError, ShapeError, UsageError
from tests.refusals import check_refusals


def test_a_feeder_makes_batches_of_samples() -> None:
    """Flat fields get their variable's shape; names work in place of variables."""
    x = fluid.layers.data("x", [2, 2])
    fluid.layers.data("label", [1], dtype="int64")
    feed = fluid.DataFeeder([x, "label"]).feed([([1, 2, 3, 4], 7), ([5, 6, 7, 8], 9)])
    assert feed["x"].shape == (2, 2, 2)
    assert feed["x"].dtype == np.float32
    np.testing.assert_array_equal(feed["label"], [[7], [9]])
    with pytest.raises(ShapeError, match="sample 0 has 1 fields, the feeder has 2 variables"):
        fluid.DataFeeder([x, "label"]).feed([(1,)])
    with pytest.raises(ShapeError, match="feed 'x': the fields do not make an array"):
        fluid.DataFeeder([x, "label"]).feed([([1, 2, 3], 7)])


def test_fractional_ids_survive_the_feeder_to_be_refused() -> None:
    """The feeder does not cut fractions off."""
    label = fluid.layers.data("label", [1], dtype="int64")
    feed = fluid.DataFeeder([label]).feed([(0.5,)])
    with pytest.raises(IdError, match=r"whole numbers of 64 bits; one is 0\.5"):
        fluid.Executor().run(feed=feed, fetch_list=[label])


@pytest.fixture
def slots(tmp_path: Path) -> tuple[Any, Path]:
    """A dataset of x, 1 id, and y, 2 floats; and a file of five samples."""
    x = fluid.layers.data("x", [1], dtype="int64")
    y = fluid.layers.data("y", [2])
    path = tmp_path / "part-0.txt"
    path.write_text("".join(f"1 {i} 2 {i}.5 -1e-3\n" for i in range(5)) + "\n")
    dataset = fluid.DatasetFactory().create_dataset("InMemoryDataset")
    dataset.set_use_var([x, y])
    dataset.set_filelist([str(path)])
    return dataset, path


def test_files_are_read_in_batches(slots: tuple[Any, Path]) -> None:
    """The last batch has the rest."""
    _, path = slots
    dataset = fluid.DatasetFactory().create_dataset("QueueDataset")
    dataset.set_use_var([fluid.default_main_program().var(name) for name in ("x", "y")])
    dataset.set_filelist([str(path)])
    dataset.set_batch_size(2)
    batches = list(dataset)
    assert [len(batch["x"]) for batch in batches] == [2, 2, 1]
    np.testing.assert_array_equal(
        batches[1]["y"], np.array([[2.5, -1e-3], [3.5, -1e-3]], np.float32)
    )
    dataset.set_pipe_command("head -n 1")
    assert len(list(dataset)) == 1
    dataset.set_pipe_command("sh -c 'exit 3'")
    with pytest.raises(UsageError, match=r"pipe command .*exit 3.* failed on .* with exit code 3"):
        list(dataset)


def test_a_pipe_command_is_a_program(slots: tuple[Any, Path], tmp_path: Path) -> None:
    """No shell stands between it and this process, unless its text has signs of the shell."""
    dataset, _ = slots
    script = tmp_path / "parent of me.py"
    script.write_text("import os; print(1, os.getppid(), 2, 0, 0)")
    for command, is_direct in [
        (f"{sys.executable} '{script}'", True),
        (f"{sys.executable} -c 'import os; print(1, os.getppid(), 2, 0, 0)'", True),
        (f"cat | {sys.executable} '{script}' && true", False),
        (f"NAME=1 {sys.executable} '{script}' ; true", False),
    ]:
        dataset.set_pipe_command(command)
        dataset.load_into_memory()
        (batch,) = list(dataset)
        assert (int(batch["x"][0, 0]) == os.getpid()) == is_direct, command


BAD = """
command("")  # pipe command is ''; name a program
command("grep 'x")  # "grep 'x"...No closing quotation
command("no-such-program")  # 'no-such-program'...No such file
line("2 1 2 2 0 0")  # UsageError: ...part-0.txt:2: slot 'x' says 2, and it must be 1
line("1 0.5 2 0 0")  # UsageError: ...part-0.txt:2: slot 'x': invalid literal
line("1 5 2 0")  # UsageError: ...part-0.txt:2: slot 'y' says 2, and it must be 2 followed by as many values
line("1 5")  # UsageError: ...part-0.txt:2: slot 'y' says nothing
line("1 5 2 0 0 9")  # UsageError: ...part-0.txt:2: 1 words are left after the last slot
line("1 99999999999999999999 2 0 0")  # UsageError: ...part-0.txt:2: slot 'x'
fluid.DatasetFactory().create_dataset("Fast")  # ConfigError: dataset 'Fast' is unknown
dataset.set_filelist("one.txt")  # it must be a list, each a path
dataset.set_filelist(["missing.txt"]); dataset.load_into_memory()  # dataset file 'missing.txt' does not exist
fluid.Executor().train_from_dataset()  # UsageError: ...needs a dataset
fluid.Executor().train_from_dataset(None, [], fetch_list=["a", "b"], fetch_info=["a"])  # 1 texts for 2
"""


def test_refusals(slots: tuple[Any, Path]) -> None:
    """Wrong commands, lines (by file, number and what is wrong) and lists of files: a sentence each."""
    dataset, path = slots

    def command(text: str) -> None:
        dataset.set_pipe_command(text)
        dataset.load_into_memory()

    def line(text: str) -> None:
        dataset.set_pipe_command("cat")
        path.write_text(f"1 5 2 0 0\n{text}\n")
        dataset.load_into_memory()

    check_refusals(BAD, {"command": command, "line": line, "dataset": dataset, "fluid": fluid})


def test_samples_in_memory_can_be_shuffled(slots: tuple[Any, Path]) -> None:
    """The same order for the same seed."""
    dataset, _ = slots
    with pytest.raises(UsageError, match="call load_into_memory"):
        list(dataset)
    dataset.load_into_memory()
    dataset.local_shuffle(1)
    order = [int(batch["x"][0, 0]) for batch in dataset]
    assert sorted(order) == [0, 1, 2, 3, 4] != order
    assert dataset.get_memory_data_size() == 5


def test_training_from_a_dataset_prints_and_counts(
    slots: tuple[Any, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every print_period batches; a handler gets the values in place of that."""
    dataset, _ = slots
    dataset.load_into_memory()
    y = fluid.default_main_program().var("y")
    loss = fluid.layers.mean(fluid.layers.fc(y, 1))
    fluid.optimizer.SGD(0.01).minimize(loss)
    exe = fluid.Executor()
    assert (
        exe.train_from_dataset(
            dataset=dataset, fetch_list=[loss], fetch_info=["loss"], print_period=2
        )
        == 5
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["batch 2 loss", "batch 4 loss"]
    losses: list[Any] = []
    step = fluid.default_main_program().step
    exe.infer_from_dataset(
        dataset=dataset, fetch_list=[loss], print_period=1, fetch_handler=losses.append
    )
    assert len(losses) == 5
    assert fluid.default_main_program().step == step


def test_models_are_saved_and_loaded_in_the_older_order() -> None:
    """fluid.io: persistables and inference models."""
    x = fluid.layers.data("x", [3])
    out = fluid.layers.fc(x, 2)
    fluid.optimizer.SGD(0.1).minimize(fluid.layers.mean(out))
    exe = fluid.Executor()
    feed = {"x": np.ones((1, 3), np.float32)}
    exe.run(feed=feed)
    fluid.io.save_persistables(exe, "all")
    test = fluid.default_main_program().clone(for_test=True)
    (kept,) = exe.run(test, feed=feed, fetch_list=[out])
    fluid.io.save_inference_model("model", ["x"], [out], exe)
    exe.run(feed=feed)
    fluid.io.load_persistables(exe, "all")
    np.testing.assert_array_equal(exe.run(test, feed=feed, fetch_list=[out])[0], kept)
    program, feeds, targets = fluid.io.load_inference_model("model", exe)
    np.testing.assert_array_equal(
        exe.run(program, feed=dict(zip(feeds, feed.values(), strict=True)), fetch_list=targets)[0],
        kept,
    )
