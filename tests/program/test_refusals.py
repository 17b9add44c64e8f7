"""What a script may get wrong in building and running a program: one sentence quotes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet import fluid, layers, optimizer
from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.errors import CheckpointError, PsfleetError
from psfleet.execution.executor import Executor
from psfleet.program.program import default_startup_program
from psfleet.runtime import interface


def ids() -> Any:
    return layers.data("ids", [None, 2], dtype="int64")


def run(x: Any) -> Any:
    """Feed a line and fetch its result."""
    out = layers.fc(layers.data("x", [None, 2]), 1)
    return Executor().run(feed={"x": x}, fetch_list=[out])


REFUSED: dict[str, Callable[[], Any]] = {
    "size is 0, it must be a whole number above 0": lambda: layers.fc(layers.data("x", [2]), 0),
    "size is 'a', it must be a whole number": lambda: layers.fc(layers.data("x", [2]), "a"),  # type: ignore[arg-type]
    "a shape is 10; it must be a list": lambda: layers.embedding(ids(), 10),  # type: ignore[arg-type]
    r"padding_idx is 10, it must be in \[-10, 10\)": lambda: layers.embedding(
        ids(), [10, 2], padding_idx=10
    ),
    r"padding_idx is -11, it must be in \[-10, 10\)": lambda: fluid.nn.Embedding(10, 2, -11),
    "has the extent 'a'; it must be a whole number": lambda: layers.data("x", ["a"]),  # type: ignore[list-item]
    "the name of data is 3; it must be a text": lambda: layers.data(3, [1]),  # type: ignore[arg-type]
    "feed 'x' cannot be read as an array": lambda: run([[1], [1, 2]]),
    "the program to run is 'main'; it must be a Program": lambda: Executor().run("main"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused(sentence: str) -> None:
    """With one sentence."""
    with pytest.raises(PsfleetError, match=sentence):
        REFUSED[sentence]()


def test_no_such_folder(tmp_path: Path) -> None:
    """A state that cannot be written says where."""
    with pytest.raises(CheckpointError, match=r"none/state.pdopt' cannot be written"):
        fluid.save({"step": 1}, str(tmp_path / "none" / "state.pdopt"))


def test_empty_batch() -> None:
    """A batch without samples has the loss NaN, as NumPy's mean, and changes no weight."""
    fresh = EmbeddedRuntime()
    before = interface.use(fresh)
    rows = layers.reshape(layers.embedding(ids(), [10, 3], is_sparse=True), [-1, 6])
    loss = layers.mean(layers.square(layers.fc(rows, 1)))
    optimizer.SGD(0.5).minimize(loss)
    weights = default_startup_program().parameters.values()
    started = [np.array(parameter.numpy()) for parameter in weights]
    (value,) = Executor().run(feed={"ids": np.empty((0, 2), np.int64)}, fetch_list=[loss])
    assert np.isnan(value)
    for parameter, start in zip(weights, started, strict=True):
        np.testing.assert_array_equal(parameter.numpy(), start)
    interface.use(before)
    fresh.close()
