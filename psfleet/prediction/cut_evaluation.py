"""Metrics of a model at one cut through the training, which goes on meanwhile."""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from psfleet.embedded.runtime import EmbeddedRuntime, FrozenRuntime
from psfleet.errors import UsageError
from psfleet.execution.model_files import folder_of, save
from psfleet.metrics.fleet_metrics import FleetMetrics, Slices, Tasks
from psfleet.platform.threads import ServiceThread
from psfleet.prediction.predictors import MakePredictor
from psfleet.runtime.interface import Runtime


class CutEvaluation:
    """An evaluation under way, in a thread of this process.

    Attributes:
        folder: The snapshot whose values it uses; None: it is not kept.
    """

    def __init__(self, run: Callable[[], dict[str, float]], folder: Path | None) -> None:
        self.folder = folder
        self._found: Future[dict[str, float]] = Future()
        self._thread = ServiceThread(self._fulfil, "evaluation", (run,))
        self._thread.start()

    def _fulfil(self, run: Callable[[], dict[str, float]]) -> None:
        try:
            self._found.set_result(run())
        except BaseException as error:  # of the model or the data: `result` raises it
            self._found.set_exception(error)

    @property
    def is_done(self) -> bool:
        """True if `result` would not wait."""
        return self._found.done()

    def result(self, timeout: float | None = None) -> dict[str, float]:
        """The values of the metrics by name, such as "auc" or "click/auc[phone]"; waits for them.

        Args:
            timeout: Seconds; None: as long as it takes.

        Raises:
            TimeoutError: It takes longer.
            Exception: Any error of the model, the data or the metrics.
        """
        try:
            return self._found.result(timeout)
        finally:
            if self.is_done:
                self._thread.join()


def evaluate_cut(
    runtime: Runtime,
    make: MakePredictor,
    batches: Iterable[Any],
    metrics: Tasks,
    slices: Slices = (),
    folder: Any = None,
) -> CutEvaluation:
    """Take a snapshot and evaluate a model on it.

    Args:
        runtime: Runtime whose tables are meant.
        make: The model.
        batches: Each a tuple (inputs, labels), or (inputs, labels, more): `more` goes to the metrics, such as
            {"weights": ..., "slices": ..., "groups": ...}. Labels, and predictions, of several tasks are
            mappings by task. They are read in a thread of their own.
        metrics, slices: As for `FleetMetrics`.
        folder: Folder of the snapshot, which stays; all servers see it. None: it is removed, and
            must fit into the folder for temporary files, which all servers see.

    Raises:
        CheckpointError: The snapshot cannot be taken.
        ConfigError: The metrics cannot be meant.
    """
    scores = FleetMetrics(EmbeddedRuntime(), metrics, slices=slices)
    temporary = None if folder is not None else tempfile.mkdtemp(prefix="psfleet-cut-")
    cut = Path(
        folder_of(folder or temporary, "evaluate"), *(["cut"] if temporary else [])
    ).absolute()
    try:
        save(runtime, str(cut))
    except BaseException:
        _remove(temporary)
        raise

    def run() -> dict[str, float]:
        try:
            tables = FrozenRuntime(str(cut))
        finally:
            _remove(temporary)
        predict = make(tables)
        for batch in batches:
            _count(scores, predict, batch)
        scores.publish()
        return scores.read().run

    return CutEvaluation(run, None if temporary else cut)


def _remove(temporary: str | None) -> None:
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)


def _count(scores: FleetMetrics, predict: Callable[[Any], Any], batch: Any) -> None:
    if not isinstance(batch, tuple) or not 2 <= len(batch) <= 3:
        raise UsageError(
            f"a batch of the evaluation is {batch!r:.80}; it must be a tuple (inputs, labels) or "
            "(inputs, labels, {'weights': ...})"
        )
    inputs, labels, *more = batch
    extra = more[0] if more else {}
    predictions = predict(inputs)
    if not isinstance(labels, Mapping):
        scores.update(predictions, labels, **extra)
        return
    for task, own in labels.items():
        if not isinstance(predictions, Mapping) or task not in predictions:
            raise UsageError(
                f"there are labels of the task {task!r}, and no predictions of that name"
            )
        scores.update(predictions[task], own, task=task, **extra)
