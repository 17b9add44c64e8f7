"""Loggers of metrics to Weights & Biases and MLflow, as callbacks; `--tensorboard` needs none.

fleet.add_callbacks(WandbLogger(project="clicks"), MlflowLogger("clicks", "http://mlflow:5000"))
"""

import atexit
import importlib
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from psfleet.errors import ConfigError
from psfleet.fleet.callbacks import Callback
from psfleet.validation.annotations import PositiveInt, checked


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
