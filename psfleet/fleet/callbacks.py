"""Callbacks of a training loop: early stopping, the best snapshot, loggers (W&B, MLflow), and your own.

    fleet.init()
    fleet.add_callbacks(EarlyStopping("auc", patience=3), KeepBest("auc", "best"))
    fleet.add_callbacks(WandbLogger(project="clicks"), MlflowLogger("clicks", "http://mlflow:5000"))
    for step, batch in enumerate(fleet.dataset(files, 1024, epochs=5), 1):
        ...  # one step
        if step % 1000 == 0:
            fleet.report_evaluation({"auc": auc})  # ends the loop after the third one that is no better

`--tensorboard` needs no logger.
"""

import atexit
import importlib
import math
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, SupportsFloat

import numpy as np
from typing_extensions import override

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.observability.logged_values import LoggedValues
from psfleet.core.base.settings.environment import read_environment
from psfleet.core.base.validation.annotations import FilePath, PositiveInt, checked
from psfleet.core.runtime.process_runtime import active, current
from psfleet.fleet.data_loops import DataLoops
from psfleet.fleet.fleet_saving import FleetSaving


class Callback:
    """Actions at points of the training loop; derive from it, and override what you need.

    One with `state_dict()` and `set_state_dict(state)` goes on where it was, in a worker that starts again
    and in a job that is resumed, as with `fleet.remember`.

    Attributes:
        fleet: The fleet, from `add_callbacks` on.
        is_stopped: True ends the loops over `fleet.dataset` and `fleet.shard` after this step. Set it on all
            workers at the same step.
    """

    fleet: Any = None
    is_stopped = False

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """A step of this worker is over; `values`: what it has logged with `fleet.log` since the last one."""

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """`fleet.report_evaluation` was called; all workers get the same values."""

    def on_snapshot(self, step: int, folder: str) -> None:
        """A snapshot is complete in a folder, or the tables are saved there. Only on worker 0.

        `step` is the last one in the snapshot. Those of `--snapshot-every` are heard of at the end of a step,
        with a heartbeat: of several between two only the newest. A worker that is started again hears of it
        again.
        """

    def close(self) -> None:
        """The worker leaves the fleet."""


class BestValue(Callback):
    """Tracks the best value of a metric over the evaluations.

    Args:
        metric: Its name among the values.
        mode: "max" if the largest value is the best, else "min".

    Attributes:
        best: Best value; None: there is none yet.
        best_step: Step at which it came.
    """

    @checked
    def __init__(self, metric: str, mode: Literal["max", "min"] = "max") -> None:
        self.metric, self.mode = metric, mode
        self.best: float | None = None
        self.best_step = 0

    def is_better(self, step: int, values: Mapping[str, float]) -> bool:
        """Return whether the value is the best one so far, which it then is; NaN is no value.

        Raises:
            UsageError: The evaluation lacks the metric.
        """
        if self.metric not in values:
            raise UsageError(
                f"{type(self).__name__} watches {self.metric!r}; the evaluation has "
                f"{', '.join(values) or 'nothing'}"
            )
        value = values[self.metric]
        if math.isnan(value) or (self.best is not None and not self._exceeds(value, self.best)):
            return False
        self.best, self.best_step = value, step
        return True

    def _exceeds(self, value: float, best: float) -> bool:
        return value > best if self.mode == "max" else value < best

    def state_dict(self) -> dict[str, Any]:
        """The best value and its step."""
        return {"best": self.best, "best_step": self.best_step}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """The opposite."""
        vars(self).update(state)


class EarlyStopping(BestValue):
    """Ends training after evaluations that are no better than the best one before.

    Args:
        metric: Its name among the values.
        patience: So many such evaluations in a row.
        mode: "max" if the largest value is the best, else "min".
        least_change: An evaluation counts as better only if it is by more than this.
    """

    @checked
    def __init__(
        self,
        metric: str,
        patience: PositiveInt = 1,
        mode: Literal["max", "min"] = "max",
        least_change: float = 0.0,
    ) -> None:
        super().__init__(metric, mode)
        self.patience, self.least_change = patience, least_change
        self.worse = 0  # evaluations in a row

    @override
    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self.worse = 0 if self.is_better(step, values) else self.worse + 1
        self.is_stopped = self.worse >= self.patience

    @override
    def _exceeds(self, value: float, best: float) -> bool:
        return super()._exceeds(value, best) and abs(value - best) > self.least_change

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"worse": self.worse, "is_stopped": self.is_stopped}


class KeepBest(BestValue):
    """Saves all tables to a folder whenever an evaluation is the best so far; `fleet.load_model` loads it.

    Args:
        metric: Its name among the values.
        folder: Folder, visible to all servers. The best one before is replaced once this one is complete.
        mode: "max" if the largest value is the best, else "min".
    """

    @checked
    def __init__(self, metric: str, folder: FilePath, mode: Literal["max", "min"] = "max") -> None:
        super().__init__(metric, mode)
        self.folder = folder

    @override
    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        if self.is_better(step, values):
            self.fleet.save_persistables(self.folder)


@checked
class FleetCallbacks(FleetSaving):
    """Callbacks of a process, and what they are told: values of the script, evaluations and snapshots."""

    def __init__(self) -> None:
        super().__init__()
        self._callbacks: list[Callback] = []
        self._step_values: dict[str, float] = {}
        self._told: set[str] = set()  # folders of which the callbacks know
        self._logged = LoggedValues(lambda: (self._joined or read_environment()).event_folder)

    def add_callbacks(self, *callbacks: Callback) -> None:
        """Call these at the steps, evaluations and snapshots of this process, in this order.

        Call it after `init`, on all workers, with the same callbacks in every run of the script.

        Args:
            *callbacks: Such as `EarlyStopping` and `WandbLogger` of psfleet.fleet.callbacks.
        """
        for callback in callbacks:
            callback.fleet = self
            self._callbacks.append(callback)
            if hasattr(callback, "state_dict"):
                name = f"psfleet.callbacks.{len(self._callbacks)}.{type(callback).__name__}"
                self._own_loops().remember(name, callback)

    def log(self, name: str, value: SupportsFloat, step: int | None = None) -> None:
        """Show a value of this worker in the job's displays.

            fleet.log("accuracy", accuracy)

        The newest value of each name is in the progress line, in `psfleet top`, on the page of `--watch` and
        in its metrics, and in the report. With `--tensorboard FOLDER` every value is in an event file.
        Callbacks get it at the end of the step.

        Args:
            name: One line, the same on all workers that log the value; at most 100 names.
            value: A number, or an array or tensor of one.
            step: Its place on TensorBoard's axis of steps; None: how many pushes this worker has made.

        Raises:
            UsageError: It is no such name or value. Nothing is logged.
            ConfigError: The event file cannot be written, or tensorboardX is not installed.
        """
        number = self._logged.log(name, value, current().pushes if step is None else step)
        if self._callbacks:
            self._step_values[name] = number

    def report_evaluation(self, values: Mapping[str, SupportsFloat]) -> None:
        """Hand the metrics of an evaluation to the callbacks, and log them.

        Every worker calls it, at the same step and with the same names. Values of worker 0 count for all, so
        that all workers decide alike; the others may pass NaN.

        Args:
            values: By name.

        Raises:
            UsageError: A value is no number, or a callback needs another one.
        """
        names = sorted(values)
        numbers = np.array([float(values[name]) for name in names], np.float64)
        if self.worker_num() > 1:
            counts = self.is_first_worker() and not self.is_later_stage()
            numbers = active().all_reduce(numbers if counts else np.zeros_like(numbers), "sum")
        evaluation = dict(zip(names, numbers.tolist(), strict=True))
        step = current().pushes
        for name, value in evaluation.items() if self.is_first_worker() else ():
            self._logged.log(name, value, step)
        for callback in self._callbacks:
            callback.on_evaluation(step, evaluation)

    def _own_loops(self) -> DataLoops:
        """The loops of this process."""
        raise NotImplementedError

    def _end_step(self) -> bool:
        """Call the callbacks at the end of a step; whether the loop ends here."""
        values, self._step_values = self._step_values, {}
        self._hear_of_snapshots()
        for callback in self._callbacks:
            callback.on_step(current().pushes, values)
        return self._is_stopped()

    def _is_stopped(self) -> bool:
        return any(callback.is_stopped for callback in self._callbacks)

    def _close_callbacks(self) -> None:
        """Close them, once: the next loop has none."""
        self._logged.close()
        self._hear_of_snapshots()
        while self._callbacks:
            self._callbacks.pop(0).close()

    def _hear_of_snapshots(self) -> None:
        """Tell the callbacks of the newest snapshot that the servers took by themselves."""
        newest = current().newest_snapshot
        if newest is not None and newest[0] not in self._told and self.is_first_worker():
            self._has_saved(*newest)

    @override
    def _has_saved(self, folder: str, step: int = 0) -> None:
        self._told.add(folder)
        for callback in self._callbacks:
            callback.on_snapshot(step or current().pushes, folder)


class _RunLogger(Callback):
    """Logs from worker 0 to one run, also after a restart: its id is remembered."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._run: Any = None
        self._run_id = ""
        self._steps = 0

    @override
    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        self._steps += 1
        if values and self._steps % self._every == 0:
            self._log(step, values)

    @override
    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._log(step, values)

    @override
    def on_snapshot(self, step: int, folder: str) -> None:
        self._note(self._opened(), folder)

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        if self.fleet.is_first_worker():
            self._write(self._opened(), step, values)

    def _opened(self) -> Any:
        if self._run is None:
            self._run = self._open()
        return self._run

    @abstractmethod
    def _open(self) -> Any:
        """Begin the run, or go on with the one that is remembered."""

    @abstractmethod
    def _write(self, run: Any, step: int, values: Mapping[str, float]) -> None: ...

    @abstractmethod
    def _note(self, run: Any, folder: str) -> None:
        """Note where the newest snapshot is."""

    def state_dict(self) -> dict[str, Any]:
        """The id of the run."""
        return {"run": self._run_id}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """The opposite."""
        self._run_id = state["run"]


class WandbLogger(_RunLogger):
    """Logs values, evaluations and the folder of the newest snapshot to Weights & Biases.

    Args:
        every: Steps between values of `fleet.log`; evaluations are all logged.
        **options: Arguments of `wandb.init`, such as project="clicks" or mode="offline".
    """

    @checked
    def __init__(self, every: PositiveInt = 1, **options: Any) -> None:
        super().__init__(every)
        self._options = options
        _imported("wandb", "wandb")

    @override
    def _open(self) -> Any:
        same = {"id": self._run_id, "resume": "allow"} if self._run_id else {}
        run = _imported("wandb", "wandb").init(**(self._options | same))
        self._run_id = run.id
        atexit.register(self.close)  # before wandb's own, which takes the connection away
        return run

    @override
    def _write(self, run: Any, step: int, values: Mapping[str, float]) -> None:
        run.log(dict(values), step=step)

    @override
    def _note(self, run: Any, folder: str) -> None:
        run.summary["snapshot"] = folder

    @override
    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()


class MlflowLogger(_RunLogger):
    """Logs values, evaluations and the folder of the newest snapshot to a run of MLflow.

    Args:
        experiment: Its name; it is made if there is none.
        tracking_uri: Address of the tracking server; None: as MLflow is configured.
        every: Steps between values of `fleet.log`; evaluations are all logged.
    """

    @checked
    def __init__(
        self, experiment: str, tracking_uri: str | None = None, every: PositiveInt = 1
    ) -> None:
        super().__init__(every)
        self._experiment = experiment
        self._mlflow = _imported("mlflow", "mlflow-skinny")
        self._client = self._mlflow.MlflowClient(tracking_uri=tracking_uri)

    @override
    def _open(self) -> str:
        if not self._run_id:
            experiment = self._client.get_experiment_by_name(self._experiment)
            number = (
                experiment.experiment_id
                if experiment
                else self._client.create_experiment(self._experiment)
            )
            self._run_id = self._client.create_run(number).info.run_id
        return self._run_id

    @override
    def _write(self, run: str, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metric = self._mlflow.entities.Metric
        entries = [metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(run, metrics=entries)

    @override
    def _note(self, run: str, folder: str) -> None:
        self._client.set_tag(run, "snapshot", folder)

    @override
    def close(self) -> None:
        if self._run is not None:
            self._client.set_terminated(self._run)
            self._run = None


def _imported(module: str, package: str) -> Any:
    """The module, which an extra of psfleet installs."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ConfigError(
            f"this logger needs {package}, which is not installed; run: pip install {package}"
        ) from None
