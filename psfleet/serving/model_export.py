"""Export of a trained model for prediction: weights without optimizer state, in few bytes, or as ONNX.

`psfleet export` calls `export`. It writes to a temporary folder first, so that the target folder appears
complete or not at all. row_source.py describes the folder and reads it.
"""

import importlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from psfleet.core.base.errors import CheckpointError, ConfigError, optional_module
from psfleet.core.base.files import reason
from psfleet.core.base.object_store import ObjectStore, readable, upload
from psfleet.core.base.settings.kinds import ExportFormat, RowForm, local_path, shown_url, url_of
from psfleet.core.base.validation.annotations import FilePath, NonNegative, checked
from psfleet.core.graph.execution.inference import copy_operations
from psfleet.data.feature_sets.feature_set import Feature, FeatureSet
from psfleet.serving.model import FEATURES, Model, features_file, features_of, rows_for
from psfleet.serving.onnx_files import onnx_module
from psfleet.serving.onnx_programs import OnnxGraph
from psfleet.serving.prediction import find_graph, is_folder
from psfleet.serving.row_source import ServedRows, SourceRuntime, write_rows

_ITEMS = 4096  # number of items whose vectors are computed at a time


@checked
def export(
    model: str,
    target: FilePath,
    kind: ExportFormat = "safetensors",
    rows: RowForm | None = None,
    *,
    checkpoint: FilePath | None = None,
    features: FilePath | None = None,
    min_count: NonNegative = 0,
    example: Any = None,
) -> None:
    """Write the weights of a model, without optimizer state, to a folder for `psfleet.serving.load`.

        psfleet.serving.export("model", "small", rows="int8")
        psfleet.serving.load("small")
        psfleet.serving.export("app:model", "weights", checkpoint="snapshots/best")
        psfleet.serving.load("app:model", checkpoint="weights")

    The export of an inference model contains the model's operations too, so it can be loaded by itself. If
    a function makes the model, load the export as its checkpoint.

    Args:
        model: Folder of an inference model or an export, or MODULE:NAME of a function that makes a model.
            The function is called only if `kind` is "onnx" or "faiss".
        target: Folder or URL to create. It must not exist, and appears complete or not at all.
        kind: Kind of the file of weights. "onnx" and "faiss" write safetensors and one file more. For
            "onnx" this is `model.onnx`, whose inputs are the feeds of a program or the tensors of a torch
            module, and the looked-up rows of each embedding. For "faiss" it is `index.faiss`, an index for
            nearest neighbours.
        rows: Number format of the rows: float32, bfloat16, or int8 or int4 with a scale for each row. None
            means the format of `model` if it is an export, and float32 otherwise.
        checkpoint: Snapshot with the weights. None means the weights in the model's folder.
        features: TOML or JSON file that describes the inputs. It is copied into the export. None means the
            model's own file, if there is one.
        min_count: Minimum number of shows of a row, or minimum frequency if the table counts frequencies.
            Rows below it are left out, and their ids get initial values again.
        example: Example of the inputs, with at least two samples. Only for "onnx", and necessary if a torch
            module has no features. A tuple gives several arguments.

    Raises:
        CheckpointError: The weights cannot be read, or the folder cannot be written.
        ConfigError: There are no weights, or `min_count` is set and a table counts neither shows nor
            frequency.
    """
    url = url_of(target)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "export") if url else local_path(target)
        if ObjectStore(url).sizes() if url else folder.exists():
            raise ConfigError(
                f"{shown_url(str(target))!r} is there already; name a new folder for the export"
            )
        _export(model, folder, kind, rows, checkpoint, features, min_count, example)
        if url:
            upload(folder, url)


def _export(
    model: str,
    folder: Path,
    kind: ExportFormat,
    rows: RowForm | None,
    checkpoint: FilePath | None,
    features: FilePath | None,
    min_count: float,
    example: Any,
) -> None:
    model = str(model if url_of(model) is None else readable(model))
    weights = rows_for(model, str(checkpoint or ""), rows, min_count)
    description = Path(features) if features is not None else features_file(model)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise _unwritten(folder, error) from None
    try:
        if is_folder(model):
            copy_operations(model, draft)
        if description is not None and description.is_file():
            shutil.copyfile(description, draft / FEATURES[description.suffix == ".json"])
        if kind == "onnx":
            inputs = features_of(model, features)
            _write_onnx(draft / "model.onnx", model, weights, inputs, example)
        if kind == "faiss":
            tower = Model(model, features_of(model, features), weights)
            write_index(draft / "index.faiss", tower, weights)
        write_rows(draft, weights, "safetensors" if kind == "onnx" or kind == "faiss" else kind)
        draft.chmod(0o755)
        draft.rename(folder)
    except OSError as error:
        raise _unwritten(folder, error) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_onnx(
    where: Path, model: str, rows: ServedRows, features: FeatureSet | None, example: Any
) -> None:
    onnx_module()
    runtime = SourceRuntime(rows, model)
    graph = find_graph(model, runtime)
    if isinstance(graph, tuple):
        OnnxGraph(graph).write(where)
        return
    modules: Any = importlib.import_module("psfleet.torch.onnx_modules")
    modules.write_onnx(where, graph, runtime, features, example)


def _unwritten(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the export {str(folder)!r} cannot be written: {reason(error)}; choose another folder"
    )


def write_index(where: Path, tower: Model, rows: ServedRows) -> None:
    """Write a faiss index for nearest neighbours: it finds the ids whose output vectors have the largest
    inner products.

    The index is exact (IndexFlatIP). It has the output vector of each id that has a row.

    Args:
        tower: Model with one feature and one output [n, k]. The feature's ids must not be hashed.

    Raises:
        ConfigError: The tower has other inputs or outputs, or faiss is not installed.
    """
    faiss = optional_module("faiss", "an index needs", "faiss", "faiss")
    inputs = list(tower.features or ())
    only = inputs[0] if len(inputs) == 1 else None
    if not isinstance(only, Feature) or only.hashed or only.transform:
        raise ConfigError(
            f"the tower {tower.name!r} has the inputs {[entry.name for entry in inputs]}; an index needs a "
            "model with one feature of ids that are neither hashed nor transformed, and its --features"
        )
    ids = rows.sparse[only.table.name].content()[0]
    index: Any = None
    for start in range(0, len(ids), _ITEMS):
        part = ids[start : start + _ITEMS]
        vectors = tower({only.name: part})
        if isinstance(vectors, dict) or vectors.ndim != 2:
            raise ConfigError(f"the tower {tower.name!r} must have one output of the shape [n, k]")
        if index is None:
            index = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
        index.add_with_ids(np.ascontiguousarray(vectors, np.float32), part)
    if index is None:
        raise ConfigError(f"the table {only.table.name!r} has no row to index")
    faiss.write_index(index, str(where))
