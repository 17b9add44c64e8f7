"""Predictions for files with programs that take ids as arrays."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from psfleet import Executor, fleet, layers, optimizer
from psfleet.core.base.errors import ShapeError
from psfleet.core.graph.program.program import Program, program_guard
from psfleet.core.runtime.process_runtime import current

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")

import pyarrow as pa  # after the check
import pyarrow.parquet as pq

from psfleet_launch.prediction_job import PredictionJob

pytestmark = pytest.mark.quick


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with the input "ids" [None, 5], and a feature set for each pooling of that name."""
    before = current().use(None)
    fleet.init()
    with program_guard(Program(), Program()):
        ids = layers.data("ids", [None, 5], dtype="int64")
        rows = layers.embedding(ids, size=[None, 2], is_distributed=True, name="rows of ids")
        out = layers.reduce_sum(layers.reshape(rows, [-1, 10]), dim=1)
        optimizer.SGD(0.1).minimize(layers.mean(out))
        Executor().run(feed={"ids": np.arange(20).reshape(4, 5)}, fetch_list=[out])
        fleet.save_inference_model(str(tmp_path / "model"), ["ids"], [out])
    current().use(before)
    for name, options in {
        "none": 'pooling = "none"',
        "last": 'pooling = "none"\nlast = 5',
        "sum": "",
    }.items():
        text = f'[tables.unused]\ndim = 3\n[features.ids]\ntable = "unused"\n{options}\n'
        (tmp_path / f"{name}.toml").write_text(text)
    pq.write_table(
        pa.table({"ids": np.arange(20).reshape(4, 5).tolist()}), tmp_path / "rows.parquet"
    )
    pq.write_table(pa.table({"ids": [[1, 2], [3, 4, 5, 6, 7, 8, 9, 10]]}), tmp_path / "bad.parquet")
    return tmp_path


def job(model: Path, pooling: str, data: str = "rows") -> PredictionJob:
    """What writes the predictions into a folder named after the pooling."""
    names = str(model / "model"), [str(model / f"{data}.parquet")], str(model / pooling)
    return PredictionJob(*names, str(model / f"{pooling}.toml"), "", ["ids"], "fail", 3, 100)


def test_pooling_is_not_asked_of_plain_ids(model: Path) -> None:
    """An input with five ids a row takes the feature's ids, whatever its pooling."""
    sentences = []
    for pooling in ("none", "last", "sum"):
        job(model, pooling).run()
        sentences.append(pq.read_table(model / pooling))  # the whole folder
        assert sentences[-1].equals(sentences[0])
    assert sentences[0]["ids"].to_pylist() == np.arange(20).reshape(4, 5).tolist()
    with pytest.raises(ShapeError, match=r"'ids' takes 5 ids a row, and a row has 2"):
        replace(job(model, "none", "bad"), target=str(model / "other")).run()
