"""Callbacks of a training loop: early stopping, the best snapshot, loggers (W&B, MLflow), and your own.

    fleet.init()
    fleet.add_callbacks(EarlyStopping("auc", patience=3), KeepBest("auc", "best"))
    fleet.add_callbacks(WandbLogger(project="clicks"), MlflowLogger("clicks", "http://mlflow:5000"))
    for step, batch in enumerate(fleet.dataset(files, 1024, epochs=5), 1):
        ...  # one step
        if step % 1000 == 0:
            fleet.report_evaluation({"auc": auc})  # the loop ends after 3 reports without a better auc

For a callback of your own, derive a class from Callback. Its methods are called in the thread that trains,
between two steps, and an error in a method ends the script. TensorBoard needs no callback: start the job with
`psfleet-launch --tensorboard FOLDER`.
"""

import atexit
import contextlib
import importlib
import math
import os
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from typing_extensions import override

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.settings.kinds import shown_url
from psfleet.core.base.validation.annotations import FilePath, PositiveInt, checked

__all__ = ["BestValue", "Callback", "EarlyStopping", "KeepBest", "MlflowLogger", "WandbLogger"]


_REPLY_TIMEOUT = 10.0  # seconds for a tracking server to reply at all


class Callback:
    """Base class of objects that act after steps, evaluations and snapshots. Override the methods you need.

        class PrintLoss(Callback):
            def on_step(self, step, values):
                print(step, values.get("loss"))

    If a subclass has `state_dict()` and `set_state_dict(state)`, its state survives a restart of the worker
    and a resumed job, as with `fleet.remember`.

    Attributes:
        fleet: Fleet of the process, set by `add_callbacks`.
        is_stopped: Set this to True to end the loops over `fleet.dataset` and `fleet.shard` after the present
            step. Set it on all workers at the same step.
    """

    fleet: Any = None
    is_stopped = False

    def on_add(self) -> None:
        """Prepare for training, once `fleet` is set. An error here ends the script before it trains."""

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """Act at the end of a step of this worker.

        Args:
            step: Number of pushes that this worker has made.
            values: Values, by name, that were passed to `fleet.log` since the previous step.
        """

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Act on an evaluation that the script passed to `fleet.report_evaluation`.

        Args:
            step: Number of pushes that this worker has made.
            values: Metrics by name, the same on all workers.
        """

    def on_snapshot(self, step: int, folder: str) -> None:
        """Act after a snapshot was taken or tables were saved. Called on worker 0 only.

        Snapshots of `--snapshot-every` are reported at the end of a step. If several were taken since the
        last report, only the newest is reported. After a restart of worker 0 the newest snapshot is
        reported again.

        Args:
            step: Last step that the snapshot includes.
            folder: Folder of the snapshot or of the saved tables.
        """

    def close(self) -> None:
        """Free resources. Called when the worker leaves the fleet."""


class BestValue(Callback):
    """Callback that tracks the best value of a metric over all evaluations.

    Args:
        metric: Name of the metric among the values of an evaluation.
        mode: "max" if larger values are better, "min" if smaller ones are.

    Attributes:
        best: Best value, or None before the first evaluation.
        best_step: Step of the evaluation with the best value.
    """

    @checked
    def __init__(self, metric: str, mode: Literal["max", "min"] = "max") -> None:
        self.metric, self.mode = metric, mode
        self.best: float | None = None
        self.best_step = 0

    def is_better(self, step: int, values: Mapping[str, float]) -> bool:
        """Return whether an evaluation is better than all earlier ones. If so, store it as the best.

        An evaluation whose metric is NaN is never better.

        Args:
            step: Step of the evaluation.
            values: Metrics of the evaluation by name.

        Raises:
            UsageError: `values` lacks the watched metric.
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
        """Return the best value and its step."""
        return {"best": self.best, "best_step": self.best_step}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` has returned."""
        vars(self).update(state)


class EarlyStopping(BestValue):
    """Callback that ends training after several evaluations in a row without improvement.

        fleet.add_callbacks(EarlyStopping("auc", patience=3))

    Args:
        metric: Name of the metric among the values of an evaluation.
        patience: Number of evaluations in a row without improvement after which training ends.
        mode: "max" if larger values are better, "min" if smaller ones are.
        least_change: An evaluation is an improvement only if it differs from the best value by more than
            this.
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
        self.worse = 0  # evaluations without improvement, in a row

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
    """Callback that saves all tables whenever an evaluation is the best so far.

        fleet.add_callbacks(KeepBest("auc", "best"))  # later: fleet.load_model("best")

    Args:
        metric: Name of the metric among the values of an evaluation.
        folder: Folder to save to, which all servers must be able to write. A new save replaces the old one
            only when it is complete.
        mode: "max" if larger values are better, "min" if smaller ones are.
    """

    @checked
    def __init__(self, metric: str, folder: FilePath, mode: Literal["max", "min"] = "max") -> None:
        super().__init__(metric, mode)
        self.folder = folder

    @override
    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        if self.is_better(step, values):
            self.fleet.save_persistables(self.folder)


class _RunLogger(Callback):
    """Base of loggers that write values from worker 0 to one run of an experiment tracker.

    The id of the run is saved with the worker's state, so that a restarted worker continues the same run.
    Worker 0 opens the run when the logger is added: if the package or the tracking server is missing, the job
    ends before it trains. Other workers need neither.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._run: Any = None
        self._run_id = ""
        self._steps = 0

    @override
    def on_add(self) -> None:
        if self.fleet.is_first_worker():
            self._opened()

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
        """Start a run, or continue the run whose id was restored."""

    @abstractmethod
    def _write(self, run: Any, step: int, values: Mapping[str, float]) -> None: ...

    @abstractmethod
    def _note(self, run: Any, folder: str) -> None:
        """Store the folder of the newest snapshot in the run."""

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the run."""
        return {"run": self._run_id}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the id of the run, before it is opened again."""
        self._run_id = state["run"]


class WandbLogger(_RunLogger):
    """Callback that logs values, evaluations and the folder of the newest snapshot to Weights & Biases.

        fleet.add_callbacks(WandbLogger(project="clicks"))

    Args:
        every: Number of steps between two logged values of `fleet.log`. Every evaluation is logged.
        **options: Arguments of `wandb.init`, such as project="clicks" or mode="offline".
    """

    @checked
    def __init__(self, every: PositiveInt = 1, **options: Any) -> None:
        super().__init__(every)
        self._options = options

    @override
    def _open(self) -> Any:
        same = {"id": self._run_id, "resume": "allow"} if self._run_id else {}
        run = _imported("wandb", "wandb").init(**(self._options | same))
        self._run_id = run.id
        # Exit functions run in reverse order: this one must end the run before wandb's closes the connection.
        atexit.register(self.close)
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
    """Callback that logs values, evaluations and the folder of the newest snapshot to a run of MLflow.

        fleet.add_callbacks(MlflowLogger("clicks", "http://mlflow:5000"))

    Args:
        experiment: Name of the experiment, which is created if it does not exist.
        tracking_uri: Folder of a local store (`file:///data/mlruns`), or address of a server
            (`http://mlflow:5000`). None uses MLflow's own configuration.
        every: Number of steps between two logged values of `fleet.log`. Every evaluation is logged.
    """

    @checked
    def __init__(
        self, experiment: str, tracking_uri: str | None = None, every: PositiveInt = 1
    ) -> None:
        super().__init__(every)
        self._experiment = experiment
        self._uri = tracking_uri

    @override
    def _open(self) -> str:
        self._mlflow = mlflow = _imported("mlflow", "mlflow-skinny")
        uri = self._uri or mlflow.get_tracking_uri()
        if urlsplit(uri).scheme in ("", "file"):
            # MLflow refuses folders unless this is set, because it prefers databases.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            _check_reply(uri)
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            return self._begin_run()
        except (OSError, mlflow.exceptions.MlflowException) as error:
            reason = str(error).partition("\n")[0][:200]
            raise ConfigError(
                f"MLflow cannot log to {shown_url(uri)!r} ({reason}); give MlflowLogger a folder, such as "
                "file:///data/mlruns, or the address of a server that runs. Databases need pip install mlflow"
            ) from None

    def _begin_run(self) -> str:
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


def _check_reply(uri: str) -> None:
    """Raise OSError if a server at this address does not reply. MLflow alone would try for minutes."""
    if uri.startswith(("http://", "https://")):
        with contextlib.suppress(HTTPError):  # it replies
            urlopen(uri, timeout=_REPLY_TIMEOUT).close()


def _imported(module: str, package: str) -> Any:
    """Import a module of an optional package.

    Raises:
        ConfigError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ConfigError(
            f"this logger needs {package}, which is not installed; run: pip install {package}"
        ) from None
