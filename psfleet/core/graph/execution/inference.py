"""Inference models: the part of a program that predicts, and its weights, in a folder.

    model/program.json                    the records up to the targets, as names and settings, and the
                                          name of the file of their weights
    model/features.json                   the features, if the program was saved with them
    model/weights.<sha256>.safetensors    dense parameters `value/<name>`; tables `ids/<name>`, `rows/<name>`

The folder has no optimizer state. program.json names its file of weights, and the file's name is the
checksum of its content. So a model is replaced in one step, by renaming the new program.json into place: a
reader finds either both old files or both new ones. docs/formats.md has the layout of both files. Loading a
model executes no code from the folder, because the operations are named and come from
psfleet.core.graph.program.ops.

`load_inference` can also read parameters from tables instead of the folder, for example from the tables of a
checkpoint or a running job.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.checkpoint.safetensors_files import digest, read_arrays, write_arrays
from psfleet.core.base.errors import TableConflict, UsageError
from psfleet.core.base.files import read_small, replace, sync
from psfleet.core.base.json_documents import Format, Misfit, exact, reading
from psfleet.core.base.logs import log_of
from psfleet.core.base.object_store import readable, upload
from psfleet.core.base.settings.kinds import local_path, url_of
from psfleet.core.base.validation.annotations import FilePath, checked
from psfleet.core.engine.rules.momentum import SGD
from psfleet.core.engine.runtime_interface import Asked, Read, Runtime, TableState
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec, key_of
from psfleet.core.graph.parameters.parameter import Parameter, check_rows
from psfleet.core.graph.program.operation import Record, ancestors, find_op
from psfleet.core.graph.program.program import Program, default_main_program
from psfleet.core.graph.program.variable import Variable
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import active
from psfleet.data.feature_sets.feature_document import write_features
from psfleet.data.feature_sets.feature_set import FeatureSet

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


_log = log_of(__name__)
_FORMAT = Format("inference model")
_WEIGHTS = Format("weights of an inference model")
_LONGEST = 256 << 20  # bytes of program.json
Loaded = tuple[Program, list[str], list[Variable]]
"""Model that was loaded: a program, the names of its feeds, and its targets."""


class FrozenTables:
    """Read-only binding of parameters to the tables of a runtime.

    Nothing is cached, so tables may change at any time. Implements
    psfleet.core.graph.parameters.parameter.Binding.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def __contains__(self, name: str) -> bool:
        return key_of(name) in self.runtime.specs()

    def add(self, parameter: Parameter, ids: Ids, rows: Floats) -> None:
        """Make a table with these rows for a sparse parameter, and bind the parameter to it."""
        start, seed = parameter.initializer, parameter.seed
        spec = TableSpec(
            parameter.name, "sparse", (parameter.shape[1],), SGD(), initializer=start, seed=seed
        )
        self.runtime.create(spec)
        self.runtime.write_table(spec.key, TableState(0, [rows], ids))
        parameter.binding = self

    def bind(self, parameter: Parameter) -> None:
        """Bind a parameter to the runtime's table of the same name.

        Raises:
            TableConflict: The table has another shape.
        """
        spec = self.runtime.specs()[key_of(parameter.name)]
        shape = parameter.shape if spec.kind == "dense" else parameter.shape[1:]
        if (*shape,) != spec.shape:
            raise TableConflict(
                f"table {spec.name!r} is {spec.kind} of shape {spec.shape}, and the program's parameter is "
                f"of shape {(*parameter.shape,)}"
            )
        parameter.binding = self

    def value(self, parameter: Parameter) -> Floats:
        """Return the whole value."""
        spec = self.runtime.specs()[key_of(parameter.name)]
        if spec.kind == "sparse":
            return self.lookup(parameter, np.arange(parameter.shape[0]))
        return self.runtime.pull([Read(spec.key)])[0]

    def lookup(self, parameter: Parameter, ids: Ids) -> Floats:
        """Return rows of a sparse parameter."""
        check_rows(parameter, ids)
        key = key_of(parameter.name)
        if self.runtime.specs()[key].kind == "dense":
            rows: Floats = self.value(parameter)[ids]
            return rows
        return self.runtime.pull([Read(key, ids)])[0]

    def prefetch(
        self, dense: Sequence[Parameter], sparse: Sequence[tuple[Parameter, Asked]]
    ) -> None:
        """Do nothing: each read pulls for itself."""


@checked
def save_inference(
    path: FilePath,
    feeds: Sequence[Variable | str],
    targets: Sequence[Variable | str],
    program: Program | None = None,
    features: FeatureSet | None = None,
) -> None:
    """Write the part of a program that computes the targets from the feeds, with its weights.

        save_inference("model", [x], [prediction])

    Args:
        path: Folder to write, made if it is missing, or a URL in an object store.
        feeds: Data variables or their names. They must include all data that the targets need.
        targets: Variables to predict, or their names.
        program: Program that has these variables, or None for the default main program.
        features: Definition of the inputs, to be written as `features.json`, or None.

    Raises:
        UsageError: The targets need a feed that is not named, an operation cannot be saved, or the folder
            cannot be made.
    """
    program = program or default_main_program()
    outputs = [_variable(program, target) for target in targets]
    inputs = [_variable(program, feed).name for feed in feeds]
    leaves, document = _described(outputs)
    missing = sorted(v.name for v in leaves if v.is_data and v.name not in inputs)
    if missing:
        raise UsageError(
            f"the targets need feed {missing[0]!r}; name it among the feeded_var_names"
        )
    arrays: dict[str, NDArray[Any]] = {}
    for leaf in leaves:
        arrays.update(_arrays(leaf))
    if (url := url_of(path)) is not None:
        with tempfile.TemporaryDirectory(prefix="psfleet-") as staging:
            save_inference(staging, feeds, targets, program, features)
            upload(Path(staging), url)
        return
    folder = local_path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the folder {str(path)!r} cannot be made: {error.strerror}") from None
    if features is not None:
        write_features(features, folder / "features.json")
    weights = _write_weights(folder, arrays)
    document = _FORMAT.document(weights=weights.name, feeds=inputs, **document)
    replace(folder / "program.json", lambda to: to.write_text(json.dumps(document, indent=1)))
    # The new program.json is in place: no reader will open the old weights again.
    for stale_file in (*folder.glob("weights.*safetensors"), *folder.glob(".weights.*.partial")):
        if stale_file != weights:
            stale_file.unlink(missing_ok=True)


def _described(targets: Sequence[Variable]) -> tuple[list[Variable], dict[str, Any]]:
    """Return the leaves (data, constants, parameters) of the targets, and the fields of program.json.

    The fields describe how the targets are computed from the leaves.
    """
    records = ancestors(targets)
    variables = [v for record in records for v in record.needed(training=False)]
    leaves = {v.name: v for v in variables if v.record is None}
    leaves.update({v.name: v for v in targets if v.record is None})
    return list(leaves.values()), {
        "targets": [target.name for target in targets],
        "leaves": [_leaf(leaf) for leaf in leaves.values()],
        "records": [_record(record) for record in records],
    }


def frozen_program(targets: Sequence[Variable]) -> Callable[[Runtime], Loaded]:
    """Prepare a copy of the program up to the targets that reads its parameters from another runtime.

    Call this in the thread that trains. The function that it returns may be called in another thread,
    because it no longer uses this program.

    Returns:
        Function that makes the copy for a runtime. A parameter without a table in that runtime keeps the
        value it has now.
    """
    leaves, document = _described(targets)
    document = json.loads(json.dumps(document))  # as it is read: without tuples
    arrays: dict[str, NDArray[Any]] = {}
    for leaf in leaves:
        if leaf.parameter is None or key_of(leaf.parameter.name) not in active().specs():
            arrays.update(_arrays(leaf))
    feeds = [leaf.name for leaf in leaves if leaf.is_data]
    return lambda runtime: _built(document, feeds, _Weights(arrays, FrozenTables(runtime)))


def _write_weights(folder: Path, arrays: dict[str, NDArray[Any]]) -> Path:
    """Write the weights to a file that is named after its checksum, and return the file's path.

    The file is synced before program.json refers to it: after a crash, program.json must not be without
    weights.
    """
    partial = folder / f".weights.{os.getpid()}.partial"
    write_arrays(partial, arrays, _WEIGHTS.document())
    sync(partial)
    weights = folder / f"weights.{digest(partial)}.safetensors"
    partial.rename(weights)
    return weights


@checked
def load_inference(path: FilePath, tables: Runtime | None = None) -> Loaded:
    """Load a program for prediction from a folder that `save_inference` has written.

        program, feeds, targets = load_inference("model")
        [prediction] = Executor().run(program, {feeds[0]: x}, targets)

    Args:
        path: Folder or URL of the model.
        tables: Runtime whose tables replace the folder's weights, such as that of a checkpoint. A parameter
            without a table there gets its weights from the folder, and a warning names it.

    Returns:
        The program, the names of its feeds, and its target variables.

    Raises:
        CheckpointError: The folder is not an inference model, or is damaged.
        TableConflict: A table has another shape than its parameter.
    """
    where = readable(path) / "program.json"
    with reading(where):
        document, feeds, arrays = _read(where)
        weights = _Weights(arrays, None if tables is None else FrozenTables(tables))
        model = _built(document, feeds, weights)
    if weights.unfound:
        _log.warning(
            f"psfleet: no table has the value of {', '.join(weights.unfound)}: it is that of {path!r}"
        )
    return model


def saved_tables(path: str) -> Iterator[tuple[TableSpec, Ids | None, NDArray[Any]]]:
    """Yield each parameter of an inference model as a table.

    Each is a triple: the definition of the table, its ids (None for a dense table), and its values.

    Raises:
        CheckpointError: The folder is not an inference model, or is damaged.
    """
    where = readable(path) / "program.json"
    with reading(where):
        document, _, arrays = _read(where)
        weights = _Weights(arrays, None)
        for leaf in document["leaves"]:
            variable = _read_leaf(leaf, weights)
            parameter = variable.parameter
            if parameter is None:
                continue
            if parameter.sparse:
                spec = weights.own.runtime.open(parameter.name)
                yield spec, arrays[f"ids/{variable.name}"], arrays[f"rows/{variable.name}"]
            else:
                value = arrays[f"value/{variable.name}"]
                yield TableSpec(parameter.name, "dense", value.shape, SGD()), None, value


def copy_operations(path: str, target: Path) -> None:
    """Copy the program and the constants of an inference model, without the values of its parameters.

    The target is the folder of an export, which stores these values as tables.

    Raises:
        CheckpointError: The folder is not an inference model, or is damaged.
    """
    where = local_path(path) / "program.json"
    with reading(where):
        document, feeds, arrays = _read(where)
    constant = {f"value/{leaf['name']}" for leaf in document["leaves"] if not leaf["parameter"]}
    constants = {name: array for name, array in arrays.items() if name in constant}
    weights = _write_weights(target, constants)
    document = _FORMAT.document(weights=weights.name, feeds=feeds, **document)
    replace(target / "program.json", lambda to: to.write_text(json.dumps(document, indent=1)))


def _read(where: Path) -> tuple[dict[str, Any], list[str], dict[str, NDArray[Any]]]:
    """Return the content of program.json, the names of the feeds, and the weights."""
    kinds = dict.fromkeys(("feeds", "targets", "leaves", "records"), list)
    fields = _FORMAT.parse(read_small(where, _LONGEST))
    name, feeds, targets, leaves, records = exact(fields, "program", weights=str, **kinds)
    arrays = _read_weights(where.parent / Path(name).name)
    return {"targets": targets, "leaves": leaves, "records": records}, feeds, arrays


def _built(document: Mapping[str, Any], feeds: Sequence[str], weights: "_Weights") -> Loaded:
    """Build the program that the fields of program.json describe."""
    program = Program(for_test=True)
    for entry in document["leaves"]:
        program.add(_read_leaf(entry, weights))
    for entry in document["records"]:
        program.add(_read_record(entry, program))
    return program, list(feeds), [program.variable(target) for target in document["targets"]]


def _read_weights(where: Path) -> dict[str, NDArray[Any]]:
    with reading(where):
        fields, arrays = read_arrays(where, _WEIGHTS)
        exact(fields, "header")
        if where.name != f"weights.{digest(where)}.safetensors":
            raise Misfit("is damaged: its checksum is not that of its name")
        return arrays


class _Weights:
    """Values for the leaves of a program that is being loaded.

    Args:
        arrays: Arrays of the model's file of weights.
        tables: Tables that are preferred to the arrays, or None.

    Attributes:
        unfound: Names of parameters that have no table in `tables`.
        own: Tables in memory for sparse parameters, made from the arrays.
    """

    def __init__(self, arrays: dict[str, NDArray[Any]], tables: FrozenTables | None) -> None:
        self.arrays = arrays
        self.unfound: list[str] = []
        self._tables = tables
        self.own = FrozenTables(EmbeddedRuntime())

    def has_table(self, name: str) -> bool:
        """Return whether a parameter reads a table of `tables`. Otherwise its value is in the arrays."""
        if self._tables is not None and name not in self._tables:
            self.unfound.append(name)
        return self._tables is not None and name in self._tables

    def give(self, parameter: Parameter, leaf: str) -> None:
        """Bind a parameter to its table in `tables`, or else to a new table with rows from the arrays."""
        if self._tables is not None and parameter.name in self._tables:
            self._tables.bind(parameter)
        else:
            self.own.add(parameter, self.arrays[f"ids/{leaf}"], self.arrays[f"rows/{leaf}"])


def _variable(program: Program, variable: Variable | str) -> Variable:
    return program.variable(variable) if isinstance(variable, str) else variable


def _arrays(leaf: Variable) -> dict[str, NDArray[Any]]:
    """Return the value of a leaf (data, constant or parameter) as arrays, by name in the file of weights.

    Returns no array for data, which has its value from the feed.
    """
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
        state = active().read_table(key_of(parameter.name))
        assert state.ids is not None
        ids, rows = state.ids, state.values[0]
    else:  # no optimizer has bound the parameter, so it has no rows yet
        ids, rows = np.zeros(0, np.int64), np.zeros((0, parameter.shape[1]), np.float32)
    return {f"ids/{leaf.name}": ids, f"rows/{leaf.name}": np.ascontiguousarray(rows)}


def _leaf(leaf: Variable) -> dict[str, Any]:
    parameter = leaf.parameter
    fields = {"name": leaf.name, "shape": leaf.shape, "dtype": leaf.dtype.name}
    return {
        **fields,
        "is_data": leaf.is_data,
        "parameter": None if parameter is None else _parameter(parameter),
    }


def _parameter(parameter: Parameter) -> dict[str, Any]:
    start = parameter.initializer
    return {
        "name": parameter.name,
        "sparse": parameter.sparse,
        "shape": parameter.shape,
        "distributed": parameter.distributed,
        "seed": parameter.seed,
        "initializer": {"kind": start.kind, "low": start.low, "high": start.high},
    }


def _record(record: Record) -> dict[str, Any]:
    op, output = record.op, record.output
    if not op.saved:
        raise UsageError(
            f"{output.name!r} comes of {op!r}, which an inference model cannot hold; name targets that "
            "do without it"
        )
    name, *settings = op.saved
    return {
        "op": name,
        "settings": dict(zip(settings, op.settings(), strict=True)),
        "inputs": [variable.name for variable in record.needed(training=False)],
        "output": {"name": output.name, "shape": output.shape, "dtype": output.dtype.name},
    }


def _read_leaf(entry: Any, weights: _Weights) -> Variable:
    kinds = {"name": str, "shape": list, "dtype": str, "is_data": bool, "parameter": dict | None}
    name, shape, dtype, is_data, document = exact(entry, "leaf", **kinds)
    variable = Variable(name, tuple(shape), dtype, stop_gradient=True)
    variable.is_data = is_data
    if document is None:
        variable.value = weights.arrays.get(f"value/{name}")
        return variable
    kinds = {"name": str, "sparse": bool, "shape": list, "distributed": bool}
    parameter_name, sparse, shape, distributed, seed, start = exact(
        document, "parameter", **kinds, seed=int, initializer=dict
    )
    has_table = weights.has_table(parameter_name)
    if not sparse and not has_table:
        variable.parameter = Parameter(parameter_name, weights.arrays[f"value/{name}"])
        return variable
    number = float | int
    parameter = Parameter(
        parameter_name,
        shape=tuple(shape),
        sparse=sparse,
        distributed=distributed,
        seed=seed,
        initializer=InitializerSpec(
            *exact(start, "initializer", kind=str, low=number, high=number)
        ),
        dtype="float16" if dtype == "float16" else None,
    )
    weights.give(parameter, name)
    variable.parameter = parameter
    return variable


def _read_record(entry: Any, program: Program) -> Variable:
    kinds = {"op": str, "settings": dict, "inputs": list, "output": dict}
    name, settings, inputs, output = exact(entry, "record", **kinds)
    op = find_op(name)
    if op is None:
        raise Misfit(
            f"has the unknown operation {name!r:.60}; read it with the psfleet version that wrote it"
        )
    fields = exact(settings, f"settings of {name}", **dict.fromkeys(op.saved[1:], object))
    values = [tuple(value) if isinstance(value, list) else value for value in fields]
    output_name, shape, dtype = exact(output, "output", name=str, shape=list, dtype=str)
    variable = Variable(output_name, tuple(shape), dtype, stop_gradient=True)
    variable.record = Record(op(*values), tuple(map(program.variable, inputs)), variable)
    return variable
