"""Inference models: a pruned program and its weights in a folder, without optimizer state.

    model/program.json                    the records up to the targets, as names and settings, and the
                                          name of the file of their weights
    model/weights.<sha256>.safetensors    dense parameters `value/<name>`; tables `ids/<name>`, `rows/<name>`

The program names its weights, so that a model is replaced in one step: when program.json is. Format 1 had
`weights.safetensors`, with the names `<name>`, `<name>/ids` and `<name>/rows`; it is read too.
Nothing in it is executed on loading but the operations of psfleet.program.ops.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from psfleet.checkpoint.tensors import digest
from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.errors import CheckpointError, UsageError
from psfleet.parameters.parameter import Parameter
from psfleet.platform.atomic_files import read_small, regular, replace, sync
from psfleet.program.gradient import ancestors
from psfleet.program.operation import Record, find_op
from psfleet.program.program import Program, default_main_program
from psfleet.program.variable import Variable
from psfleet.rules.sgd import SGD
from psfleet.runtime import interface as runtimes
from psfleet.runtime.interface import Read, TableState
from psfleet.schema.table import Initializer, TableSpec, key_of

__all__ = ["load_inference", "save_inference"]

FORMAT = 2
_LONGEST = 256 << 20  # bytes of program.json
Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def save_inference(
    path: str,
    feeds: Sequence[Variable | str],
    targets: Sequence[Variable | str],
    program: Program | None = None,
) -> None:
    """Write what computes the targets from the feeds.

    Args:
        path: The folder; it is made if it is not there.
        feeds: Data variables or their names. They must be all that the targets need.
        targets: Variables or their names.
        program: The default main program if None.
    """
    program = program or default_main_program()
    wanted = [_variable(program, target) for target in targets]
    fed = [_variable(program, feed).name for feed in feeds]
    records = ancestors(wanted)
    used = [v for record in records for v in record.needed(training=False)]
    leaves = {v.name: v for v in used if v.record is None}
    leaves.update({v.name: v for v in wanted if v.record is None})
    missing = sorted(name for name, v in leaves.items() if v.is_data and name not in fed)
    if missing:
        raise UsageError(
            f"the targets need feed {missing[0]!r}; name it among the feeded_var_names"
        )
    arrays: dict[str, NDArray[Any]] = {}
    for leaf in leaves.values():
        arrays.update(_arrays(leaf))
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    weights = _write_weights(folder, arrays)
    document = {
        "format": FORMAT,
        "weights": weights.name,
        "feeds": fed,
        "targets": [target.name for target in wanted],
        "leaves": [_leaf(leaf) for leaf in leaves.values()],
        "records": [_record(record) for record in records],
    }
    replace(folder / "program.json", lambda to: to.write_text(json.dumps(document, indent=1)))
    for other in (*folder.glob("weights.*safetensors"), *folder.glob(".weights.*.partial")):
        if other != weights:
            other.unlink(missing_ok=True)


def _write_weights(folder: Path, arrays: dict[str, NDArray[Any]]) -> Path:
    """The file of the weights, named after its content."""
    partial = folder / f".weights.{os.getpid()}.partial"
    save_file(arrays, partial)
    sync(partial)
    weights = folder / f"weights.{digest(partial)}.safetensors"
    partial.rename(weights)
    return weights


def load_inference(path: str) -> tuple[Program, list[str], list[Variable]]:
    """A program for prediction from a folder written by `save_inference`.

    Returns:
        (program, names of its feeds, target variables): `Executor.run(program, feed, targets)`.

    Raises:
        CheckpointError: The folder is no inference model, or damaged.
    """
    try:
        document = json.loads(read_small(Path(path) / "program.json", _LONGEST))
        arrays = _read_weights(Path(path), document)
        program = Program(for_test=True)
        tables = _Tables()
        for entry in document["leaves"]:
            program.add(_read_leaf(entry, arrays, tables))
        for entry in document["records"]:
            program.add(_read_record(entry, program))
        return program, document["feeds"], [program.variable(name) for name in document["targets"]]
    except Exception as error:  # there is no end to what a document can hold
        words = " ".join(str(error).split())
        raise CheckpointError(f"{path!r} is not a whole inference model: {words}") from None


def _read_weights(folder: Path, document: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """The arrays, under the names of the present format."""
    name = document.get("weights", "weights.safetensors")
    where = folder / Path(name).name
    if document["format"] == FORMAT and name != f"weights.{digest(where)}.safetensors":
        raise ValueError(f"{str(where)!r} is damaged: its checksum is not that of its name")
    with regular(where):
        arrays = load_file(where)
    return arrays if document["format"] == FORMAT else dict(_renamed(arrays, document["leaves"]))


def _renamed(
    arrays: dict[str, NDArray[Any]], leaves: list[dict[str, Any]]
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Arrays of format 1."""
    for name in (leaf["name"] for leaf in leaves):
        for old, new in ((name, "value"), (f"{name}/ids", "ids"), (f"{name}/rows", "rows")):
            if old in arrays:
                yield f"{new}/{name}", arrays[old]


class _Tables:
    """Rows of a loaded model. Implements psfleet.parameters.parameter.Binding; nobody updates them."""

    def __init__(self) -> None:
        self._runtime = EmbeddedRuntime()

    def add(self, parameter: Parameter, ids: Ids, rows: Floats) -> None:
        spec = TableSpec(
            parameter.name,
            "sparse",
            (parameter.shape[1],),
            SGD(),
            initializer=parameter.initializer,
            seed=parameter.seed,
        )
        self._runtime.create(spec)
        self._runtime.write_table(spec.key, TableState(0, [rows], ids))
        parameter.binding = self

    def value(self, parameter: Parameter) -> Floats:
        return self.lookup(parameter, np.arange(parameter.shape[0]))

    def lookup(self, parameter: Parameter, ids: Ids) -> Floats:
        return self._runtime.pull([Read(key_of(parameter.name), ids)])[0]

    def prefetch(self, dense: Sequence[Parameter], sparse: Sequence[tuple[Parameter, Ids]]) -> None:
        """Nothing to bring: the rows are here."""


def _variable(program: Program, said: Variable | str) -> Variable:
    return program.variable(said) if isinstance(said, str) else said


def _arrays(leaf: Variable) -> dict[str, NDArray[Any]]:
    parameter = leaf.parameter
    if parameter is None:
        return (
            {} if leaf.value is None else {f"value/{leaf.name}": np.ascontiguousarray(leaf.value)}
        )
    if not parameter.sparse:
        return {f"value/{leaf.name}": np.ascontiguousarray(parameter.numpy())}
    if not parameter.distributed:
        ids, rows = np.arange(parameter.shape[0], dtype=np.int64), parameter.numpy()
    elif parameter.binding is not None:
        state = runtimes.active().read_table(key_of(parameter.name))
        assert state.ids is not None
        ids, rows = state.ids, state.values[0]
    else:
        ids, rows = np.zeros(0, np.int64), np.zeros((0, parameter.shape[1]), np.float32)
    return {f"ids/{leaf.name}": ids, f"rows/{leaf.name}": np.ascontiguousarray(rows)}


def _leaf(leaf: Variable) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": leaf.name,
        "shape": list(leaf.shape),
        "dtype": leaf.dtype.name,
        "is_data": leaf.is_data,
    }
    parameter = leaf.parameter
    if parameter is not None:
        entry["parameter"] = {
            "name": parameter.name,
            "sparse": parameter.sparse,
            "shape": list(parameter.shape),
            "distributed": parameter.distributed,
            "seed": parameter.seed,
            "initializer": dataclasses.asdict(parameter.initializer),
        }
    return entry


def _record(record: Record) -> dict[str, Any]:
    output = record.output
    return {
        "op": type(record.op).__name__,
        "settings": dataclasses.asdict(record.op),
        "inputs": [variable.name for variable in record.needed(training=False)],
        "output": {"name": output.name, "shape": list(output.shape), "dtype": output.dtype.name},
    }


def _read_leaf(entry: dict[str, Any], arrays: dict[str, NDArray[Any]], tables: _Tables) -> Variable:
    name, described = entry["name"], entry.get("parameter")
    variable = Variable(name, tuple(entry["shape"]), entry["dtype"], stop_gradient=True)
    variable.is_data = entry["is_data"]
    if described is None:
        variable.value = arrays.get(f"value/{name}")
    elif described["sparse"]:
        parameter = Parameter(
            described["name"],
            shape=tuple(described["shape"]),
            sparse=True,
            distributed=described["distributed"],
            seed=described["seed"],
            initializer=Initializer(**described["initializer"]),
        )
        tables.add(parameter, arrays[f"ids/{name}"], arrays[f"rows/{name}"])
        variable.parameter = parameter
    else:
        variable.parameter = Parameter(described["name"], arrays[f"value/{name}"])
    return variable


def _read_record(entry: dict[str, Any], program: Program) -> Variable:
    kind = find_op(entry["op"])
    if kind is None:
        raise ValueError(f"operation {entry['op']!r} is unknown")
    settings = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in entry["settings"].items()
    }
    described = entry["output"]
    output = Variable(
        described["name"], tuple(described["shape"]), described["dtype"], stop_gradient=True
    )
    inputs = tuple(program.variable(name) for name in entry["inputs"])
    output.record = Record(kind(**settings), inputs, output)
    return output
