"""Models by the name that a command is given, as functions from features to predictions."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ConfigError, ShapeError
from psfleet.execution.inference import Loaded, frozen_program, load_inference
from psfleet.feature_sets.feature_lookup import feed
from psfleet.feature_sets.feature_set import Feature, FeatureSet
from psfleet.platform.named_object import find_object
from psfleet.prediction.predictors import Predictor, predictor_of, program_predictor
from psfleet.program import names
from psfleet.program.program import Program, program_guard
from psfleet.program.variable import Variable
from psfleet.runtime.interface import Runtime
from psfleet.runtime.process_runtime import using

PROGRAM = "program.json"


def is_folder(model: str) -> bool:
    """Return whether this is the folder of an inference model."""
    return Path(model, PROGRAM).exists()


def find_predictor(model: str, features: FeatureSet | None, tables: Runtime | None) -> Predictor:
    """A function from the features of a batch to its predictions.

    Args:
        model: The folder of an inference model, or MODULE:NAME of a function that makes a torch module or
            the variables of a program.
        features: Its inputs; None: the function gets the feeds of a program, or what a module is
            called with.
        tables: The weights; None: the inference model has them.

    Raises:
        ConfigError: There is no such model, or it has no weights.
    """
    if is_folder(model):
        return _of_program(load_inference(model, tables), features)
    if tables is None:
        raise ConfigError(
            f"the model {model!r} is no folder of an inference model, so it needs a checkpoint for its "
            "weights"
        )
    with _building(tables):
        graph = _made(model)
        if not isinstance(graph, Mapping):
            return predictor_of(graph)(tables)
        inference = frozen_program(list(graph.values()))(tables)
        return _of_program(inference, features, list(graph) if "" not in graph else None)


def find_graph(model: str, tables: Runtime) -> Any:
    """Load an inference model, or the program of a function; or return the torch module that this makes."""
    if is_folder(model):
        return load_inference(model, tables)
    with _building(tables):
        graph = _made(model)
        return frozen_program(list(graph.values()))(tables) if isinstance(graph, Mapping) else graph


@contextlib.contextmanager
def _building(tables: Runtime) -> Iterator[None]:
    """A model that makes tables finds them there, and variables have the names of the first time."""
    with using(tables), program_guard(Program()), names.guard():
        yield


def _made(model: str) -> Any:
    """Call the function: a mapping of variables, of a single one by the name "", or a torch module."""
    graph = find_object(model, "model", "name a folder, or MODULE:NAME of a function")()
    return {"": graph} if isinstance(graph, Variable) else graph


def _of_program(
    inference: Loaded, features: FeatureSet | None, outputs: list[str] | None = None
) -> Predictor:
    """Return a function that runs a program on the features of a batch."""
    program, feeds, targets = inference
    several = [target.name for target in targets] if len(targets) > 1 else [""]
    predict = program_predictor(inference, outputs or several)
    if features is None:
        return predict
    # An input of the feature's name takes all ids of a sample, whatever else becomes of them.
    plainly = FeatureSet(
        replace(each, pooling="sum") if isinstance(each, Feature) and each.name in feeds else each
        for each in features.members
    )

    def on_features(batch: dict[str, Any]) -> Any:
        values = feed(features, batch)
        missing = [name for name in feeds if name not in values]
        ids = feed(plainly, batch) if missing else {}
        plain = {name: _plain(ids, program.variable(name)) for name in missing}
        return predict({**values, **plain})

    return on_features


def _plain(feeds: Mapping[str, NDArray[Any]], variable: Variable) -> NDArray[Any]:
    """The ids of a feature as an input of a program that has a number of ids for each sample."""
    ids, lengths = feeds.get(f"{variable.name}.ids"), feeds.get(f"{variable.name}.lengths")
    if ids is None or lengths is None:
        raise ConfigError(
            f"the model needs the input {variable.name!r}, and no feature has that name; add it to --features"
        )
    width = int(np.prod([extent for extent in variable.shape[1:] if extent is not None]))
    if (lengths != width).any():
        raise ShapeError(
            f"the input {variable.name!r} takes {width} ids a row, and a row has "
            f"{lengths[lengths != width][0]}; correct the column"
        )
    return ids.reshape(len(lengths), *variable.shape[1:])
