"""Predictors: functions from a batch to predictions, made from torch modules, programs and inference models.

`find_predictor` makes a predictor from a model's name, for serving and batch prediction. `predictor_of`
makes it from a model object in a training script, and `evaluate_cut` then evaluates the model on a snapshot
in the background. A predictor reads weights from the runtime that it was made with. So one model can
predict with the weights of a snapshot, of an export or of a running job.
"""

import contextlib
import importlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError, ShapeError, UsageError
from psfleet.core.base.settings.kinds import find_object
from psfleet.core.base.threads import ServiceThread
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.execution.inference import Loaded, frozen_program, load_inference
from psfleet.core.graph.execution.model_files import folder_of, save
from psfleet.core.graph.program import names
from psfleet.core.graph.program.program import Program, program_guard
from psfleet.core.graph.program.variable import Variable
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime, FrozenRuntime
from psfleet.core.runtime.process_runtime import using
from psfleet.core.runtime.script_runtime import ScriptRuntime
from psfleet.data.feature_sets.feature_lookup import feed
from psfleet.data.feature_sets.feature_set import Feature, FeatureSet
from psfleet.metrics.fleet_metrics import FleetMetrics, Slices, Tasks

Predictor = Callable[[Any], Any]
"""Function from a batch of n samples to an array or tensor [n], [n, 1] or [n, k], or a mapping of these."""

MakePredictor = Callable[[ScriptRuntime], Predictor]
"""Function from a runtime with the weights to a predictor."""


PROGRAM = "program.json"


def predictor_of(model: Any) -> MakePredictor:
    """Return a function that makes a predictor from a runtime. The predictor computes what the model
    computes.

        make = predictor_of(model)
        chances = make(runtime)(batch)

    The model is copied now, so later changes of the model have no effect.

    Args:
        model: A torch module, a variable of a program, or a mapping of such variables. The predictor of a
            module takes its argument, or a tuple of its arguments. The predictor of a program takes a
            mapping of feeds.

    Raises:
        UsageError: The model is something else.
    """
    if isinstance(model, Variable):
        return _of_variables({"": model})
    if (
        isinstance(model, Mapping)
        and model
        and all(isinstance(v, Variable) for v in model.values())
    ):
        return _of_variables(model)
    if any(kind.__module__ == "torch.nn.modules.module" for kind in type(model).__mro__):
        frozen: Any = importlib.import_module("psfleet.torch.conversion")
        make: MakePredictor = frozen.module_predictor(model)
        return make
    raise UsageError(
        f"the model is {model!r:.80}; it must be a variable of a program, a mapping of them, or a torch "
        "module"
    )


def _of_variables(targets: Mapping[str, Variable]) -> MakePredictor:
    names, load = list(targets), frozen_program(list(targets.values()))
    return lambda runtime: program_predictor(load(runtime), names)


def program_predictor(loaded: Loaded, names: Sequence[str]) -> Predictor:
    """Return the predictor of a loaded program.

    Args:
        names: Names of the predictions, in the order of the targets. With [""] the predictor returns a
            single array instead of a dict.
    """
    program, feeds, targets = loaded
    executor = Executor()

    def predict(inputs: Mapping[str, Any]) -> Any:
        feed = {name: inputs[name] for name in feeds if name in inputs}
        results = executor.run(program, feed=feed, fetch_list=targets)
        return results[0] if list(names) == [""] else dict(zip(names, results, strict=True))

    return predict


def is_folder(model: str) -> bool:
    """Return True if the name is the folder of an inference model."""
    return Path(model, PROGRAM).exists()


def check_model(model: str, *, has_weights: bool) -> None:
    """Check that a name is an inference model, or MODULE:NAME of a function.

    Args:
        has_weights: True if there is a checkpoint. A model that a function makes needs one.

    Raises:
        ConfigError: There is no such model, or it has no weights.
    """
    path = Path(model)
    if not is_folder(model) and (path.exists() or ":" not in model):
        problem = "is a file" if path.exists() else "does not exist"
        if path.is_dir():
            problem = f"is a folder without {PROGRAM}, so it is no inference model"
        raise ConfigError(
            f"the model {model!r} {problem}; name the folder of an inference model, or MODULE:NAME of a "
            "function that makes the model"
        )
    if not (has_weights or is_folder(model)):
        raise ConfigError(
            f"the model {model!r} is a function, which has no weights; name the checkpoint that has them, "
            "with --checkpoint or checkpoint="
        )


def find_predictor(
    model: str, features: FeatureSet | None, tables: ScriptRuntime | None
) -> Predictor:
    """Return the predictor of a model with this name.

    Args:
        model: Folder of an inference model, or MODULE:NAME of a function that returns a torch module or the
            variables of a program.
        features: Feature set of the inputs. None means that the predictor takes the feeds of a program or
            the arguments of a module.
        tables: Runtime with the weights. None means the weights in the folder of the inference model.

    Raises:
        ConfigError: There is no such model, or it has no weights.
    """
    if is_folder(model):
        return _of_program(load_inference(model, tables), features)
    check_model(model, has_weights=tables is not None)
    assert tables is not None
    with _building(tables):
        graph = _made(model)
        if not isinstance(graph, Mapping):
            return predictor_of(graph)(tables)
        inference = frozen_program(list(graph.values()))(tables)
        return _of_program(inference, features, list(graph) if "" not in graph else None)


def find_graph(model: str, tables: ScriptRuntime) -> Any:
    """Load the model with this name as a program, or as a torch module if its function returns one."""
    if is_folder(model):
        return load_inference(model, tables)
    check_model(model, has_weights=True)
    with _building(tables):
        graph = _made(model)
        return frozen_program(list(graph.values()))(tables) if isinstance(graph, Mapping) else graph


@contextlib.contextmanager
def _building(tables: ScriptRuntime) -> Iterator[None]:
    """Return a context manager under which a function builds its model with the tables of a runtime.

    Tables that the function creates are opened in the runtime. Generated names of variables are counted
    from the start, so that they are the same as in training.
    """
    with using(tables), program_guard(Program()), names.guard():
        yield


def _made(model: str) -> Any:
    """Call the function with this name (MODULE:NAME), and return its torch module or mapping of variables.

    A single variable becomes a mapping with the name "".
    """
    graph = find_object(model, "model", "name a folder, or MODULE:NAME of a function")()
    return {"": graph} if isinstance(graph, Variable) else graph


def _of_program(
    inference: Loaded, features: FeatureSet | None, outputs: list[str] | None = None
) -> Predictor:
    """Return a predictor that runs a program on a batch of features."""
    program, feeds, targets = inference
    several = [target.name for target in targets] if len(targets) > 1 else [""]
    predict = program_predictor(inference, outputs or several)
    if features is None:
        return predict
    # A program input with the name of a feature takes all ids of each sample, however the feature pools rows.
    # With the pooling "sum", `feed` passes all ids and their lengths.
    plainly = FeatureSet(
        replace(feature, pooling="sum")
        if isinstance(feature, Feature) and feature.name in feeds
        else feature
        for feature in features.members
    )

    def on_features(batch: dict[str, Any]) -> Any:
        values = feed(features, batch)
        missing = [name for name in feeds if name not in values]
        ids = feed(plainly, batch) if missing else {}
        plain = {name: _plain(ids, program.variable(name)) for name in missing}
        return predict({**values, **plain})

    return on_features


def _plain(feeds: Mapping[str, NDArray[Any]], variable: Variable) -> NDArray[Any]:
    """Return the ids of a feature as a program input that has a fixed number of ids for each sample."""
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


class CutEvaluation:
    """Evaluation that runs in a thread, as `evaluate_cut` returns it.

    Attributes:
        folder: Snapshot that is evaluated, or None if the snapshot is only temporary.
    """

    def __init__(self, run: Callable[[], dict[str, float]], folder: Path | None) -> None:
        self.folder = folder
        self._found: Future[dict[str, float]] = Future()
        self._thread = ServiceThread(self._fulfil, "evaluation", (run,))
        self._thread.start()

    def _fulfil(self, run: Callable[[], dict[str, float]]) -> None:
        try:
            self._found.set_result(run())
        except BaseException as error:  # an error of the model or the data, which `result` raises
            self._found.set_exception(error)

    @property
    def is_done(self) -> bool:
        """True if the evaluation has ended, so that `result` does not wait."""
        return self._found.done()

    def result(self, timeout: float | None = None) -> dict[str, float]:
        """Wait for the evaluation, and return the metrics by name, such as "auc" or "click/auc[phone]".

        Args:
            timeout: Maximum number of seconds to wait, or None to wait without limit.

        Raises:
            TimeoutError: The evaluation takes longer.
            Exception: An error of the model, the data or the metrics, raised as it is.
        """
        try:
            return self._found.result(timeout)
        finally:
            if self.is_done:
                self._thread.join()


def evaluate_cut(
    runtime: ScriptRuntime,
    make: MakePredictor,
    batches: Iterable[Any],
    metrics: Tasks,
    slices: Slices = (),
    folder: Any = None,
    transform: Callable[[Any], Any] | None = None,
) -> CutEvaluation:
    """Take a snapshot, and evaluate a model on it in a thread while training goes on.

        evaluation = evaluate_cut(runtime, predictor_of(model), batches, [psfleet.metrics.Auc()])
        metrics = evaluation.result()

    Args:
        make: Function from a runtime to a predictor, as `predictor_of` returns it.
        batches: Tuples (inputs, labels) or (inputs, labels, arguments), which the thread reads. `arguments`
            is a mapping of further arguments of the metrics, such as {"weights": ..., "slices": ...,
            "groups": ...}. With several tasks, labels and predictions are mappings by task.
        metrics, slices: As in `FleetMetrics`.
        folder: Folder for the snapshot, which is kept. None means the folder for temporary files, from
            which the snapshot is removed afterwards. All servers must see the folder under the same path.
        transform: Function from the model's predictions of a task to the predictions for the metrics. None
            means that they are the same.

    Raises:
        CheckpointError: The snapshot cannot be taken.
        ConfigError: A metric or a slice is invalid.
    """
    scores = FleetMetrics(EmbeddedRuntime(), metrics, slices=slices)
    temporary = None if folder is not None else tempfile.mkdtemp(prefix="psfleet-cut-")
    cut = Path(
        folder_of(folder or temporary, "evaluate"), *(["cut"] if temporary else [])
    ).absolute()
    try:
        save(runtime, str(cut), resumes=False)
    except BaseException:
        _remove(temporary)
        raise

    # FrozenRuntime reads the whole snapshot at once, so a temporary snapshot is removed before the
    # evaluation starts.
    def run() -> dict[str, float]:
        try:
            tables = FrozenRuntime(str(cut))
        finally:
            _remove(temporary)
        predict = make(tables)
        for batch in batches:
            _count(scores, predict, batch, transform or (lambda predictions: predictions))
        scores.publish()
        return scores.read().run

    return CutEvaluation(run, None if temporary else cut)


def _remove(temporary: str | None) -> None:
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)


def _count(
    scores: FleetMetrics, predict: Predictor, batch: Any, transform: Callable[[Any], Any]
) -> None:
    if not isinstance(batch, tuple) or not 2 <= len(batch) <= 3:
        raise UsageError(
            f"a batch of the evaluation is {batch!r:.80}; it must be a tuple (inputs, labels) or "
            "(inputs, labels, {'weights': ...})"
        )
    inputs, labels, *arguments = batch
    extra = arguments[0] if arguments else {}
    predictions = predict(inputs)
    if not isinstance(labels, Mapping):
        scores.update(transform(predictions), labels, **extra)
        return
    for task, task_labels in labels.items():
        if not isinstance(predictions, Mapping) or task not in predictions:
            raise UsageError(
                f"there are labels of the task {task!r}, and no predictions of that name"
            )
        scores.update(transform(predictions[task]), task_labels, task=task, **extra)
